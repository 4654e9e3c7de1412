"""How a version with forms of declared steps ends, and how a run in pieces does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from edge_runtime.backends.base import HostStatus
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import RunTooLong
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.servable import Layouts, PieceRunner, Servable
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.scheduled_model import Job, Layout, RunResult, ScheduledModel
from edge_runtime.steps import Form
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import Array
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

    def servable(forms: dict[Form, Servable] | None = None) -> Servable:
        instance: Any = FakeInstance()
        return Servable(
            "m", 1, ModelSettings(), Layouts(instance),
            batches=True, mode="workers", max_rows=1, inline=None,
            scheduled=ScheduledModel("m", Layout(None)), dispatcher=dispatcher, clock=clock,
            metrics=ModelMetrics(), forms=forms,
        )  # fmt: skip

    closing = servable({Form("picture", answers): servable() for answers in (True, False)})
    began_s = clock.monotonic_s()
    assert not closing.close(5.0)
    assert clock.monotonic_s() - began_s == 5.0
    assert not any(each.scheduled.is_open for each in closing.forms.values())


class HostedFake:
    """An instance in a host, which counts how often its host's status is read: that reads files of the kernel."""

    ahead = 0
    begins = True
    forms: Mapping[Form, Any] = {}

    def __init__(self) -> None:
        self.reads = 0
        self.begin = self.run_parts = self.room = self.finish_warm_up = self.restore = lambda: None

    @property
    def host(self) -> HostStatus:
        self.reads += 1
        return HostStatus(1, 2, 300, "")


def test_the_status_of_hosts_is_read_once_each_time_it_is_asked_for() -> None:
    wide = HostedFake()
    layouts = Layouts(cast("Any", FakeInstance()), cast("Any", wide))
    made = wide.reads
    for _ in range(3):
        assert layouts.host() == HostStatus(1, 2, 300, "")
    assert wide.reads - made == 3
    assert Layouts(cast("Any", FakeInstance())).host() is None


class FakeRun:
    """A run that was begun, with `limit_s` left."""

    def __init__(self, end: Callable[[RunResult], None], limit_s: float) -> None:
        self.end, self.limit_s, self.is_given_up = end, limit_s, False

    def left_s(self) -> float:
        return self.limit_s

    def give_up(self) -> None:
        self.is_given_up = True
        self.end(RunTooLong("it was ended"))


class FakeRunner:
    """Begins runs; the first `quick` end before `begin` has returned, as on another thread."""

    def __init__(self, quick: int) -> None:
        self.quick = quick
        self.begun: list[FakeRun] = []

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        raise NotImplementedError

    def begin(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> FakeRun:
        run = FakeRun(on_end, limit_s + len(self.begun))
        self.begun.append(run)
        if len(self.begun) <= self.quick:
            on_end([parts[0][0] + 1])
        return run

    def restore(self) -> None:
        pass


def begin_pieces(runner: FakeRunner, pieces: int) -> tuple[Job, list[RunResult]]:
    """A run of pieces of two rows, begun as a worker begins it, and what it ended with."""
    job = Job(ScheduledModel("m", Layout(None)), Layout(None), [], 0, 0.0, 0.0)
    ends: list[RunResult] = []
    rows = [[np.zeros((2 * pieces, 1), np.float32)]]
    job.run = PieceRunner(runner, 2).begin(rows, 5.0, job, ends.append)
    return job, ends


@pytest.mark.parametrize("quick", [0, 1, 2])
def test_the_limit_of_a_run_in_pieces_is_that_of_the_piece_under_way(quick: int) -> None:
    runner = FakeRunner(quick)
    job, ends = begin_pieces(runner, 3)
    assert job.run is not None
    assert job.run.left_s() == 5.0 + quick
    job.run.give_up()
    assert [each.is_given_up for each in runner.begun] == [number == quick for number in range(quick + 1)]
    assert [type(each) for each in ends] == [RunTooLong]


def test_no_piece_begins_after_one_that_ended_as_its_run_was_given_up() -> None:
    runner = FakeRunner(0)
    job, ends = begin_pieces(runner, 2)
    run, piece = job.run, runner.begun[0]
    assert run is not None
    piece.end, end = lambda result: None, piece.end
    run.give_up()
    end([np.ones((2, 1), np.float32)])
    assert len(runner.begun) == 1
    assert [type(each) for each in ends] == [RunTooLong]


def test_a_run_in_pieces_ends_with_the_rows_of_all() -> None:
    _, ends = begin_pieces(FakeRunner(3), 3)
    (outputs,) = ends
    assert isinstance(outputs, list)
    assert outputs[0].tolist() == [[1.0]] * 6
