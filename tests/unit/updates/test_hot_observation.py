"""A release is judged by no run time of a device that is slowed for its heat: neither refused for it, nor kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import LoadFailed
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import Allowance
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.updates import observation
from edge_runtime.updates.observation import (
    LEAST_TO_JUDGE,
    SLOWED_LIMIT_S,
    Judgement,
    Observation,
    RunRecord,
    Thresholds,
    Verdict,
)
from tests.fakes.clock import FakeClock

HOT = Allowance(1, 6, 0.5)
WINDOW_S = 10.0


class Device:
    """A device that observes a release: each look lets time pass, and `live` says what happens in it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, 2)
        self.current, self.candidate = self._servable(), self._servable()
        self.live: Callable[[float], None] = lambda _seconds: None
        self.shown: list[str] = []

    def _servable(self) -> Any:
        metrics = ModelMetrics()
        scheduled = ScheduledModel("m", Layout(None), metrics=metrics)
        return SimpleNamespace(metrics=metrics, scheduled=scheduled, owned=(), precision="FP32")

    def run(self, servable: Any, run_s: float, count: int = 1) -> None:
        """Have requests answered, as the inline path counts them."""
        self.dispatcher.teach_apart(servable.scheduled)
        servable.metrics.answered(0.0, run_s, count)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        self.dispatcher.allow(HOT)
        yield
        self.dispatcher.allow(None)

    def judge(self, **thresholds: float) -> Judgement:
        swap = SimpleNamespace(
            candidate=self.candidate,
            current=self.current,
            switch=lambda: None,
            split=self._split,
            context=self,
            model="m",
        )
        return Observation(
            cast("Any", swap),
            cast("Any", SimpleNamespace(inputs={})),
            UpdateSettings(root_file=""),
            self.clock,
            cast("Any", self),
            thresholds=Thresholds(window_s=WINDOW_S, **thresholds),
        ).judge()

    def _split(self, _percent: float) -> None:
        raise LoadFailed("the two cannot stand in for one another")

    # ---- as RolloutProgress -----------------------------------------------------------------------------------------

    def show(self, detail: str, observed: object = ()) -> None:
        self.shown.append(detail)

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        self.live(seconds)
        return False


@pytest.fixture
def device() -> Device:
    found = Device()
    found.run(found.current, 0.01, 100)
    return found


def test_run_times_of_a_slowed_device_are_counted_and_kept_apart() -> None:
    device = Device()
    device.run(device.current, 0.01, 30)
    record = RunRecord(device.current.metrics)
    device.run(device.current, 0.01, 30)
    with device.slowed():
        device.run(device.current, 0.5, 50)
        assert (record.observed().requests, record.observed().timed) == (80, 30)
    with device.slowed():
        device.run(device.current, 0.5, 50)
    device.run(device.current, 0.01, 10)
    seen = record.observed()
    assert (seen.requests, seen.slowed, seen.timed) == (140, 100, 40)
    assert seen.p95_s is not None
    assert seen.p95_s < 0.02
    assert device.current.metrics.run_time.count == 170  # who looks at metrics sees all of them


def test_a_good_release_is_not_refused_for_run_times_of_heat(device: Device) -> None:
    def live(_seconds: float) -> None:
        device.dispatcher.allow(HOT if device.clock.monotonic_s() - began_s < 60.0 else None)
        device.run(device.candidate, 0.5 if device.dispatcher.is_slowed else 0.01, 10)

    began_s = device.clock.monotonic_s()
    device.live = live
    judgement = device.judge(max_p95_s=0.1)
    assert judgement.verdict is Verdict.HEALTHY, judgement
    assert device.clock.monotonic_s() - began_s >= 60.0 + WINDOW_S - 1.0  # the heat was none of the window
    assert any("waits until this device is no more slowed" in each for each in device.shown)


def test_a_slow_release_is_not_kept_for_what_the_one_before_took_in_heat() -> None:
    device = Device()
    device.run(device.current, 0.01, 100)
    with device.slowed():
        device.run(device.current, 0.5, 1_000)
    device.live = lambda _seconds: device.run(device.candidate, 0.2, 10)
    judgement = device.judge()
    assert judgement.verdict is Verdict.REGRESSED
    assert "before it took p95 9.91 ms" in judgement.reason


def test_a_release_that_fails_is_refused_in_heat_as_well(device: Device) -> None:
    def live(_seconds: float) -> None:
        device.candidate.metrics.refused("run_failed", 10)

    device.live = live
    with device.slowed():
        judgement = device.judge()
    assert judgement.verdict is Verdict.REGRESSED


def test_golden_runs_of_a_device_that_is_slowed_meanwhile_are_made_again_when_it_is_cool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    cool: Counter[int] = Counter()
    hot_until_s = math.inf

    def infer_once(servable: Any, *_: object) -> list[Any]:
        nonlocal hot_until_s
        cool[id(servable)] += not device.dispatcher.is_slowed
        if cool.total() == 5 and math.isinf(hot_until_s):
            device.dispatcher.allow(HOT)
            hot_until_s = device.clock.monotonic_s() + 20.0
        device.run(servable, 0.5 if device.dispatcher.is_slowed else 0.01)
        return []

    def live(_seconds: float) -> None:
        if device.clock.monotonic_s() >= hot_until_s:
            device.dispatcher.allow(None)

    monkeypatch.setattr(observation, "infer_once", infer_once)
    monkeypatch.setattr(observation, "golden_faults", lambda *_: ())
    device.live = live
    judgement = device.judge(max_p95_s=0.1)
    assert judgement.verdict is Verdict.HEALTHY, judgement
    assert cool[id(device.candidate)] >= LEAST_TO_JUDGE
    assert cool[id(device.current)] >= LEAST_TO_JUDGE


def test_a_device_that_stays_hot_puts_the_release_off(device: Device) -> None:
    device.live = lambda _seconds: device.run(device.candidate, 0.01, 10)
    began_s = device.clock.monotonic_s()
    with device.slowed():
        judgement = device.judge()
    assert judgement.verdict is Verdict.UNDECIDED
    assert "slowed for its heat for 1800 s" in judgement.reason
    assert device.clock.monotonic_s() - began_s == pytest.approx(SLOWED_LIMIT_S, abs=1.0)
