"""The governor: reads the device each second, decides by throttle.py, and has the dispatcher and models follow.

Owns: the state between two readings, and the words for it. Has no thread: door.py calls `step`. Its clock is
injected, so that tests give it hours of a simulated device. Thread: one that steps; any that asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.heat.throttle import HeatLimits, HeatReading, HeatStage, Throttle, plan_throttle
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.telemetry.host import HostProbe

log = logging.getLogger(__name__)

WORK_OVER_S = 10.0
"""The cores that work takes are a mean of about this time."""

WORDS = {
    HeatStage.FREE: "nothing is slowed",
    HeatStage.SHARE: "low work has a share of its time",
    HeatStage.CORES: "all work has fewer cores, low work next to nothing",
    HeatStage.LIGHTER: "lighter variants answer, where models have one",
    HeatStage.REFUSING: "low priorities are refused",
}


class Governor:
    """Keeps one device below its limit.

    zones: as of `[thermal]`. make_lighter: has lighter variants answer, or the models themselves again; called at each
    step, so that a variant that failed to load is tried again; must not wait.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        host: HostProbe,
        clock: Clock,
        limits: HeatLimits,
        *,
        zones: Collection[str] = (),
        make_lighter: Callable[[bool], None] = lambda _is_lighter: None,
    ) -> None:
        self.limits = limits
        self.throttle = Throttle(cores=limits.cores, cores_now=limits.cores, of_cores=limits.cores)
        self.reading = HeatReading(clock.monotonic_s(), None)
        self.frequency_share: float | None = None
        self.power_watts: float | None = None
        self._dispatcher = dispatcher
        self._host = host
        self._clock = clock
        self._zones = zones
        self._make_lighter = make_lighter
        # Held for the moment in which the dispatcher is told, never while models are switched.
        self._telling = threading.Lock()
        self._is_released = False
        self._seconds = dispatcher.taken_s, dispatcher.low_s
        self._cores = 0.0, 0.0
        dispatcher.count_work(limits.low_priority)

    @property
    def stage(self) -> HeatStage:
        """How far it goes."""
        return self.throttle.stage(self.limits)

    @property
    def words(self) -> str:
        """Return its meaning, and the limit. The same for each reading of one stage."""
        return f"{WORDS[self.stage]}; the limit is {self.limits.limit_celsius:g} °C"

    def step(self) -> None:
        """Read, decide, and have it followed. About once a second."""
        before, now_s = self.throttle, self._clock.monotonic_s()
        self.reading = HeatReading(
            now_s,
            max(self._host.zones(self._zones).values(), default=None),
            self._host.is_slowed(),
            *self._work(now_s - self.reading.now_s),
        )
        self.frequency_share, self.power_watts = self._host.frequency_share(), self._host.power_watts()
        self.throttle = plan_throttle(before, self.reading, self.limits)
        with self._telling:
            if self._is_released:  # this reading took longer than the daemon waited for it
                return
            self._dispatcher.allow(self.throttle.allowance(self.limits))
        self._make_lighter(self.throttle.is_lighter)
        if self.stage is not before.stage(self.limits):
            log.log(
                logging.WARNING if self.stage is HeatStage.REFUSING else logging.INFO,
                "the governor of heat: %s",
                self.words,
                extra={"stage": self.stage.value, "celsius": self.reading.celsius},
            )

    def release(self) -> None:
        """Let runs have everything: the governor ends, and a reading under way takes nothing any more."""
        with self._telling:
            self._is_released = True
            self._dispatcher.allow(None)

    def status(self) -> dict[str, Any]:
        """Return what it sees and does, as JSON values."""
        throttle, reading = self.throttle, self.reading
        return {
            "stage": self.stage.value,
            "reason": self.words,
            "celsius": reading.celsius,
            "limit_celsius": self.limits.limit_celsius,
            "is_slowed": reading.is_slowed,
            "frequency_share": _short(self.frequency_share),
            "power_watts": _short(self.power_watts),
            "low_priority": self.limits.low_priority,
            "low_share": round(throttle.low_share, 3),
            "cores": round(throttle.cores, 2),
            "lighter": throttle.is_lighter,
            "refuses_low": throttle.refuses,
        }

    def _work(self, elapsed_s: float) -> tuple[float, float]:
        """The cores that all work and low work take, as moving means."""
        before, now = self._seconds, (self._dispatcher.taken_s, self._dispatcher.low_s)
        if elapsed_s > 0:
            self._seconds = now
            weight = min(elapsed_s / WORK_OVER_S, 1.0)
            taken, low = (
                mean + weight * ((after_s - before_s) / elapsed_s - mean)
                for mean, after_s, before_s in zip(self._cores, now, before, strict=True)
            )
            self._cores = taken, low
        return self._cores


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
