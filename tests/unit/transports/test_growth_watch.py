"""Which connections are closed when memory grows out of sight."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.growth_watch import CLOSE_LOOK_S, FREE_LOOKS, LOOK_S, GrowthWatch

BOUND = 100


class WatchedConnection:
    """A connection that can only be closed."""

    def __init__(self, identity: bytes | None, *, brings_bytes: bool = False, is_owed: bool = False) -> None:
        self.identity = identity
        self.brings_bytes = brings_bytes
        self.is_owed = is_owed
        self.is_suspect = False
        self.is_closed = False

    def close(self) -> bool:
        was_open, self.is_closed = not self.is_closed, True
        return was_open


class WatchedConnections:
    """Its connections, as `Connections` has them."""

    def __init__(self, *connections: WatchedConnection) -> None:
        self.all = connections

    def suspect(self, heard: Any) -> None:
        for each in self.all:
            each.is_suspect = each.brings_bytes and each.identity not in heard

    def unfinished(self, heard: Any, *, suspects_only: bool) -> list[WatchedConnection]:
        return [
            each
            for each in self.all
            if not each.is_closed and each.identity not in heard and (each.is_suspect or not suspects_only)
        ]


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
        self.messages = False
        self.watch = GrowthWatch(BOUND, self.metrics, self.memory)
        self.look()

    def is_owed(self, identity: bytes | None) -> bool:
        return any(each.is_owed for each in self.connections.all if each.identity == identity)

    def has_messages(self) -> bool:
        return self.messages

    def look(self, memory: int | None = None, heard: bytes | None = None) -> None:
        if memory is not None:
            self.memory.private_bytes = memory
        if self.heard is not None and heard is not None:
            self.heard.add(heard)
        self.now_s += LOOK_S
        self.watch.look([self], self.now_s)


def test_the_connection_that_brings_bytes_and_no_message_is_closed_and_no_other() -> None:
    endless, good, idle = (WatchedConnection(b"e", brings_bytes=True), WatchedConnection(b"g"), WatchedConnection(b"i"))
    good.brings_bytes = True
    watched = Watched(endless, good, idle)
    watched.look(1_000 + BOUND // 2)
    watched.look(1_000 + BOUND // 2 + BOUND - 1, heard=b"g")
    assert not endless.is_closed
    watched.look(1_000 + BOUND // 2 + BOUND)
    assert (endless.is_closed, good.is_closed, idle.is_closed) == (True, False, False)
    assert watched.metrics.counters() == {"connections_closed_unfinished": 1}


def test_a_connection_is_not_closed_in_the_look_that_first_sees_its_bytes() -> None:
    late = WatchedConnection(b"l")
    watched = Watched(late)
    watched.look(1_000 + BOUND)
    late.brings_bytes = True
    watched.look(1_000 + 2 * BOUND)
    assert not late.is_closed
    watched.look(1_000 + 2 * BOUND, heard=b"l")
    assert not late.is_closed


def test_a_connection_within_one_whole_message_after_others_is_not_closed() -> None:
    sender = WatchedConnection(b"s", brings_bytes=True)
    watched = Watched(sender)
    watched.look(1_000 + 2 * BOUND)  # its messages before this one, which were read
    watched.look(1_000 + 3 * BOUND - 1)
    assert not sender.is_closed


def test_nobody_is_closed_for_messages_that_were_not_read_yet() -> None:
    sender = WatchedConnection(b"s", brings_bytes=True)
    watched = Watched(sender)
    watched.messages = True
    watched.look(1_000 + BOUND)
    watched.look(1_000 + 2 * BOUND)
    assert not sender.is_closed
    watched.messages = False
    watched.look(1_000 + 2 * BOUND)
    assert sender.is_closed


def test_nobody_is_closed_for_the_memory_of_models() -> None:
    sender, idle = WatchedConnection(b"s", brings_bytes=True), WatchedConnection(b"i")
    watched = Watched(sender, idle)
    watched.memory.is_loading = True
    for growth in range(1, 10):
        watched.look(1_000 + growth * BOUND)
    watched.memory.is_loading = False
    watched.look()
    assert not sender.is_closed
    assert not idle.is_closed
    watched.look(1_000 + 10 * BOUND)
    watched.look(1_000 + 11 * BOUND)
    assert sender.is_closed


def test_when_nobody_is_seen_all_that_nobody_waits_for_are_closed_and_what_is_left_is_grown_for_good() -> None:
    silent, owed, unknown = WatchedConnection(b"s"), WatchedConnection(b"o", is_owed=True), WatchedConnection(None)
    watched = Watched(silent, owed, unknown)
    watched.look(1_000 + BOUND)
    watched.look(1_000 + 3 * BOUND - 1)
    assert not silent.is_closed
    watched.look(1_000 + 3 * BOUND)
    assert (silent.is_closed, owed.is_closed, unknown.is_closed) == (True, False, True)
    for _ in range(FREE_LOOKS + 1):
        watched.look()
    assert watched.heard is None
    assert watched.memory.trimmed == 1
    assert watched.metrics.counters() == {"connections_closed_unfinished": 2}


def test_memory_of_waiting_requests_is_no_growth() -> None:
    silent = WatchedConnection(b"s", brings_bytes=True)
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
