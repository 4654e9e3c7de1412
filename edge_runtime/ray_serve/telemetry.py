"""A replica's metrics in `ray.serve.metrics`, beside those that Serve has itself, and the forecast that they show.

Owns: what was told already of the core's own counters, which go on. Thread: the replica's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from ray.serve import metrics

from edge_runtime.daemon.core import Core
from edge_runtime.messages import RequestHeader
from edge_runtime.models.servable import Servable
from edge_runtime.request.plan import plan_head
from edge_runtime.request.request import Arrival

TELL_S = 1.0
"""Between two looks: Ray exports its metrics each ten seconds."""

ANSWERED = "answered"
"""The ending of a request that was answered; of any other it is the code of its error."""

_NEW_SENDER = "forecast"
"""The sender of a request that comes for the first time."""


def forecast_s(core: Core, servable: Servable, sender: str) -> float:
    """Seconds that a request of one row would take which came now from a sender."""
    head = plan_head(servable, RequestHeader(model=servable.model))
    arrival = Arrival(head, 0, sender, core.clock.monotonic_s())
    return core.dispatcher.forecast_s(servable.scheduled, arrival)


class ServeMetrics:
    """The counters and gauges of one replica; none costs a request anything."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._requests = metrics.Counter(
            "edge_runtime_requests",
            description="Requests by model and ending: answered, or the code of their error.",
            tag_keys=("model", "ending"),
        )
        self._delay = metrics.Gauge(
            "edge_runtime_forecast_delay_ms",
            description="Milliseconds that a request of one row would take which came now.",
            tag_keys=("model",),
        )
        self.last_sender = _NEW_SENDER
        """The process whose handle sent the last request. Senders have turns, so only its own wait for all of its."""
        self._told: dict[tuple[str, str], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tell what is new from now on, each TELL_S."""
        self._timer = asyncio.get_running_loop().call_later(TELL_S, self._tell_and_go_on)

    def stop(self) -> None:
        """Tell the last, and no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.tell()

    def tell(self) -> None:
        """Tell what is new."""
        for key, count in self._counts():
            if new := count - self._told.get(key, 0):
                self._told[key] = count
                self._requests.inc(new, tags={"model": key[0], "ending": key[1]})
        for servable in self._core.table.live():
            self._delay.set(self._forecast_s(servable) * 1e3, tags={"model": servable.model})

    def slowest_s(self) -> tuple[float, float]:
        """Seconds that a request to the slowest model would take which came now, and what of it is a run; else 0.0."""
        found = (
            (self._forecast_s(each), each.scheduled.layout.run_times.predict_s(1)) for each in self._core.table.live()
        )
        return max(found, default=(0.0, 0.0))

    def _forecast_s(self, servable: Servable) -> float:
        """The same of one model: of a new sender, as each request by HTTP is, or of the last."""
        return max(forecast_s(self._core, servable, each) for each in (_NEW_SENDER, self.last_sender))

    def _tell_and_go_on(self) -> None:
        self.start()
        self.tell()

    def _counts(self) -> Iterator[tuple[tuple[str, str], int]]:
        for model, each in self._core.metrics.models().items():
            yield (model, ANSWERED), each.answered_requests
            for code, count in dict(each.refusals).items():
                yield (model, code), count
