"""How a version with forms of declared steps ends."""

from __future__ import annotations

from typing import Any

from edge_runtime.config.settings import ModelSettings
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.servable import Layouts, Servable
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.steps import Form
from edge_runtime.telemetry.metrics import ModelMetrics
from tests.fakes.clock import FakeClock


class FakeInstance:
    def __init__(self) -> None:
        self.spec = ModelSpec((), ())

    def close(self) -> None:
        pass


class BusyDispatcher(Dispatcher):
    """Every model of it has a run that never ends: closing one takes all the time that it is given."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock, 2, 1.0)
        self.clock = clock

    def close_model(self, model: ScheduledModel, timeout_s: float) -> bool:
        self.clock.advance(timeout_s)
        return super().close_model(model, 0.0) and False


def test_the_forms_of_a_version_that_ends_share_its_time() -> None:
    clock = FakeClock()
    dispatcher = BusyDispatcher(clock)

    def servable() -> Servable:
        instance: Any = FakeInstance()
        return Servable(
            "m", 1, ModelSettings(), Layouts(instance),
            batches=True, mode="workers", max_rows=1, inline=None,
            scheduled=ScheduledModel("m", Layout(None)), dispatcher=dispatcher, clock=clock,
            metrics=ModelMetrics(),
        )  # fmt: skip

    closing = servable()
    closing.forms = {Form("picture", answers): servable() for answers in (True, False)}
    began_s = clock.monotonic_s()
    assert not closing.close(5.0)
    assert clock.monotonic_s() - began_s == 5.0
    assert not any(each.scheduled.is_open for each in closing.forms.values())
