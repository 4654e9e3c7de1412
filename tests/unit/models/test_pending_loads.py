"""A request that waits for a load is told once: that the model is there, or why it is not."""

from __future__ import annotations

import pytest

from edge_runtime.errors import Cancelled, DeadlineExceeded, EdgeRuntimeError, LoadFailed, QueueFull
from edge_runtime.messages import RequestHeader
from edge_runtime.models.pending_loads import MAX_WAITING, MAX_WAITING_BYTES, PendingLoads
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.worker import refuse_expired
from tests.fakes.clock import FakeClock


class Kit:
    """Pending loads, and what was told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, 1)
        self.loads = PendingLoads(self.dispatcher)
        self.told: list[tuple[str, EdgeRuntimeError | None]] = []

    def wait(self, name: str, model: str = "m", *, timeout_ms: float | None = None, nbytes: int = 0) -> None:
        """Wait as a sender of this name."""
        header = RequestHeader(model=model, timeout_ms=timeout_ms)
        now_s = self.clock.monotonic_s()
        self.loads.wait(header, lambda error: self.told.append((name, error)), name, nbytes=nbytes, arrived_s=now_s)


@pytest.fixture
def kit() -> Kit:
    return Kit()


def test_a_load_that_ends_well_calls_what_waits_for_its_model_and_nothing_else(kit: Kit) -> None:
    kit.wait("a")
    kit.wait("b")
    kit.wait("c", "other")
    kit.loads.end("m", None)
    kit.loads.end("m", None)
    assert kit.told == [("a", None), ("b", None)]


def test_a_load_that_fails_says_why(kit: Kit) -> None:
    kit.wait("a")
    failed = LoadFailed("no")
    kit.loads.end("m", failed)
    assert kit.told == [("a", failed)]


def test_a_sender_that_is_gone_or_late_is_reported_before_the_load_ends_and_once(kit: Kit) -> None:
    kit.wait("late", timeout_ms=10.0)
    kit.wait("gone")
    kit.wait("stays")
    assert kit.dispatcher.drop("gone") == 1
    kit.clock.advance(1.0)
    refuse_expired(kit.dispatcher.expire()[0], kit.clock)
    kit.loads.end("m", None)
    assert [(name, type(error)) for name, error in kit.told] == [
        ("gone", Cancelled), ("late", DeadlineExceeded), ("stays", type(None)),
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "nbytes"), [(MAX_WAITING, 0), (2, MAX_WAITING_BYTES // 2)], ids=["number", "bytes"])
def test_no_more_waits_than_there_is_room_for(kit: Kit, count: int, nbytes: int) -> None:
    for _ in range(count):
        kit.wait("one", nbytes=nbytes)
    with pytest.raises(QueueFull):
        kit.wait("one", nbytes=nbytes or 1)
    kit.loads.end("m", None)
    assert len(kit.told) == count
