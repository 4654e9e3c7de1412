"""Which connections are closed when memory grows out of sight."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.growth_watch import CLOSE_LOOK_S, FREE_LOOKS, LOOK_S, TRIM_LOOKS, GrowthWatch

BOUND = 100


class WatchedConnection:
    """A connection that can only be closed. quiet, suspect: for so many looks."""

    def __init__(self, identity: bytes | None, *, suspect: int = 0, quiet: bool = False, is_owed: bool = False) -> None:
        self.identity = identity
        self.suspect_looks = suspect
        self.is_quiet = quiet
        self.is_owed = is_owed
        self.is_closed = False

    def close(self) -> bool:
        was_open, self.is_closed = not self.is_closed, True
        return was_open


class WatchedConnections:
    """Its connections, as `Connections` has them. noted: what was heard at each look. is_trusted: all was forgotten."""

    def __init__(self, *connections: WatchedConnection) -> None:
        self.all = connections
        self.noted: list[set[bytes | None]] = []
        self.is_trusted = False

    def suspect(self, heard: Any) -> None:
        self.noted.append(set(heard))

    def trust(self) -> None:
        self.is_trusted = True

    def suspects(self) -> list[WatchedConnection]:
        return [each for each in self.all if each.suspect_looks and not each.is_closed]

    def quiet(self) -> list[WatchedConnection]:
        return [each for each in self.all if each.is_quiet and not each.is_closed]


class FakeMemory:
    """The memory of a process, as a test sets it. trimmed: how often free memory was returned."""

    def __init__(self) -> None:
        self.private_bytes = 1_000
        self.held_bytes = 0
        self.is_loading = False
        self.trimmed = 0

    def trim(self) -> None:
        self.trimmed += 1


class Watched:
    """An endpoint with connections, and the memory of its process."""

    def __init__(self, *connections: WatchedConnection) -> None:
        self.connections: Any = WatchedConnections(*connections)
        self.heard: set[bytes | None] | None = None
        self.memory = FakeMemory()
        self.metrics = Metrics()
        self.now_s = 0.0
        self.watch = GrowthWatch(BOUND, self.metrics, self.memory)
        self.look()

    def is_owed(self, identity: bytes | None) -> bool:
        return any(each.is_owed for each in self.connections.all if each.identity == identity)

    def look(self, memory: int | None = None, heard: bytes | None = None) -> None:
        if memory is not None:
            self.memory.private_bytes = memory
        if self.heard is not None and heard is not None:
            self.heard.add(heard)
        self.now_s += LOOK_S
        self.watch.look([self], self.now_s)


def test_suspects_are_closed_when_memory_has_grown_by_more_than_one_message_and_no_others() -> None:
    endless, good, idle = WatchedConnection(b"e", suspect=2), WatchedConnection(b"g"), WatchedConnection(b"i")
    idle.is_quiet = True
    watched = Watched(endless, good, idle)
    watched.look(1_000 + BOUND)
    assert not endless.is_closed
    watched.look(1_000 + BOUND + BOUND // 4)
    assert (endless.is_closed, good.is_closed, idle.is_closed) == (True, False, False)
    assert watched.metrics.counters() == {"connections_closed_unfinished": 1}


def test_those_that_come_after_a_closing_are_closed_at_the_next_look() -> None:
    again = [WatchedConnection(b"%d" % number, suspect=2) for number in range(5)]
    watched = Watched(*again)
    for each in again:
        watched.connections.all = (each,)
        watched.look(1_000 + 2 * BOUND)
        assert each.is_closed


def test_a_connection_that_was_suspect_for_less_than_half_as_long_is_not_closed() -> None:
    endless, late = WatchedConnection(b"e", suspect=10), WatchedConnection(b"l", suspect=4)
    watched = Watched(endless, late)
    watched.look(1_000 + 2 * BOUND)
    assert (endless.is_closed, late.is_closed) == (True, False)


def test_what_a_connection_brought_is_noted_at_each_look_until_memory_is_as_before() -> None:
    watched = Watched(WatchedConnection(b"g"))
    watched.look(1_000 + BOUND // 2)
    watched.look(heard=b"g")
    watched.look()
    assert watched.connections.noted == [set(), {b"g"}, set()]
    watched.look(1_000)
    assert watched.connections.is_trusted
    assert watched.heard is None


def test_nobody_is_closed_for_the_memory_of_models() -> None:
    sender, idle = WatchedConnection(b"s", suspect=2), WatchedConnection(b"i", quiet=True)
    watched = Watched(sender, idle)
    watched.memory.is_loading = True
    for growth in range(1, 10):
        watched.look(1_000 + growth * BOUND)
    watched.memory.is_loading = False
    watched.look()
    assert not sender.is_closed
    assert not idle.is_closed
    watched.look(1_000 + 11 * BOUND)
    assert sender.is_closed


def test_when_nobody_is_suspect_all_that_wait_for_no_reply_are_closed_and_what_is_left_is_grown_for_good() -> None:
    silent, owed = WatchedConnection(b"s", quiet=True), WatchedConnection(b"o", quiet=True, is_owed=True)
    unknown, busy = WatchedConnection(None, quiet=True), WatchedConnection(b"b")
    watched = Watched(silent, owed, unknown, busy)
    watched.look(1_000 + BOUND + BOUND // 2)
    assert not silent.is_closed
    watched.look(1_000 + 2 * BOUND)
    assert [each.is_closed for each in (silent, owed, unknown, busy)] == [True, False, True, False]
    for _ in range(FREE_LOOKS + 1):
        watched.look()
    assert watched.heard is None
    assert watched.memory.trimmed == 1
    assert watched.metrics.counters() == {"connections_closed_unfinished": 2}


def test_what_attackers_fill_meanwhile_is_not_grown_for_good() -> None:
    watched = Watched(WatchedConnection(b"s", quiet=True))
    watched.look(1_000 + 2 * BOUND)
    watched.look(1_000 + BOUND // 4)
    for _ in range(FREE_LOOKS):
        watched.look(1_000 + BOUND)
    endless = WatchedConnection(b"e", suspect=2)
    watched.connections.all = (endless,)
    watched.look(1_000 + BOUND // 4 + BOUND + BOUND // 4)
    assert endless.is_closed


def test_free_memory_is_returned_while_closing_goes_on() -> None:
    again = [WatchedConnection(b"%d" % number, suspect=2) for number in range(10 * TRIM_LOOKS)]
    watched = Watched(*again)
    for each in again:
        watched.connections.all = (each,)
        watched.look(1_000 + 2 * BOUND)
    assert 1 < watched.memory.trimmed <= 10


def test_memory_of_waiting_requests_is_no_growth() -> None:
    silent = WatchedConnection(b"s", suspect=2)
    watched = Watched(silent)
    watched.memory.held_bytes = 5 * BOUND
    for _ in range(3):
        watched.look(1_000 + 5 * BOUND)
    assert not silent.is_closed


def test_looks_are_closer_while_memory_grows() -> None:
    watched = Watched()
    assert watched.watch.interval_s == pytest.approx(LOOK_S)
    watched.look(1_000 + BOUND // 2)
    assert watched.watch.interval_s == pytest.approx(CLOSE_LOOK_S)
    watched.look(1_000)
    assert watched.watch.interval_s == pytest.approx(LOOK_S)
