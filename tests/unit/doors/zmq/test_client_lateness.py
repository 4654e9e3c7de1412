"""A client that was held up past a deadline: what came meanwhile is an answer, and only silence is a timeout."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.client.in_flight import LOOK_S, LOOKS, Call, SecondLooks, acquire, no_reply
from edge_runtime.doors.zmq import asyncio_client
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.channel import POLLIN, Channel
from edge_runtime.doors.zmq.client import Link
from tests.fakes.clock import FakeClock
from tests.fakes.server import FakeServer

X = np.arange(8, dtype=np.float32).reshape(2, 4)
BLIND_LOOKS = 3


class BehindChannel(Channel):
    """Sees no reply in the next `blind_looks` looks, as after a stall, before libzmq's thread ran; then what came."""

    blind_looks = 0

    def events(self) -> int:
        if self.blind_looks:
            self.blind_looks -= 1
            if not self.blind_looks:
                assert self.socket.poll(60_000, POLLIN), "the reply never came"
            return super().events() & ~POLLIN
        return super().events()


class SteppedClock:
    """The host's clock, put forward by `behind_s`; before each look of the thread that made it, it does a step."""

    def __init__(self) -> None:
        self.behind_s = 0.0
        self.steps: list[Callable[[], object]] = []
        self._thread = threading.current_thread()

    def monotonic_s(self) -> float:
        if self.steps and threading.current_thread() is self._thread:
            self.steps.pop(0)()
        return time.monotonic() + self.behind_s


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        yield server


@pytest.fixture
def channel(server: FakeServer) -> BehindChannel:
    return BehindChannel(server.endpoint)


def call(model: str, wait_s: float) -> Call:
    header, tensors = RequestEncoder().encode(model, {"x": X}, Options())
    return Call(header, tensors, wait_s, tensor)


def tensor(frames: Sequence[Any]) -> bytes:
    return bytes(frames[2].bytes)


# ---- when a reply is missing ----------------------------------------------------------------------------------------


def test_nothing_is_missing_before_its_deadline() -> None:
    assert SecondLooks().judge(now_s=9.999, earliest_s=10.0) is None


def test_a_reply_is_missing_after_all_looks_found_nothing() -> None:
    looks, clock = SecondLooks(), FakeClock(10.0)
    for _ in range(LOOKS):
        assert looks.judge(clock.monotonic_s(), 10.0) is None
        assert looks.due_s == clock.monotonic_s() + LOOK_S
        clock.advance(LOOK_S)
    assert looks.judge(clock.monotonic_s(), 10.0) == 10.0


def test_a_look_before_its_time_does_not_count() -> None:
    looks = SecondLooks()
    assert [looks.judge(10.0, 10.0) for _ in range(3 * LOOKS)] == [None] * 3 * LOOKS


def test_one_long_stall_is_one_look() -> None:
    looks = SecondLooks()
    assert looks.judge(10.0, 10.0) is None
    assert looks.judge(99.0, 10.0) is None


def test_a_reply_that_became_overdue_during_the_looks_gets_looks_of_its_own() -> None:
    looks, clock = SecondLooks(), FakeClock(10.0)
    missed: list[float] = []
    while not missed:
        if (found := looks.judge(clock.monotonic_s(), 10.0)) is not None:
            missed.append(found)
        clock.advance(LOOK_S)
    assert missed == [10.0]
    assert looks.judge(clock.monotonic_s(), earliest_s=10.005) is None


def test_a_reply_that_came_ends_the_looks() -> None:
    looks = SecondLooks()
    looks.judge(10.0, 10.0)
    assert looks.judge(10.0 + LOOK_S, earliest_s=20.0) is None
    assert [looks.judge(20.0 + n * LOOK_S, 20.0) for n in range(LOOKS)] == [None] * LOOKS


def test_a_timeout_says_when_the_client_itself_was_held_up() -> None:
    assert "held up" not in str(no_reply("ipc:///x", 1.05, 0.003))
    assert "this process was held up, too: it looked 0.17 s late" in str(no_reply("ipc:///x", 1.05, 0.173))


# ---- waiting for another thread -------------------------------------------------------------------------------------


class LateGate:
    """Opens at one of the looks after the first; keeps how long each was to wait."""

    def __init__(self, opens_at: int) -> None:
        self._opens_at = opens_at
        self.waits_s: list[float] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.waits_s.append(timeout)
        return len(self.waits_s) == self._opens_at + 1


@pytest.mark.parametrize("opens_at", range(LOOKS + 1))
def test_a_gate_that_opens_at_one_of_the_looks_was_waited_for(opens_at: int) -> None:
    gate = LateGate(opens_at)
    assert acquire(gate, 0.2)
    assert gate.waits_s == [0.2] + [LOOK_S] * opens_at


def test_a_gate_that_stays_shut_is_left_after_the_last_look() -> None:
    gate = LateGate(LOOKS + 1)
    assert not acquire(gate, 0.2)
    assert len(gate.waits_s) == 1 + LOOKS


@pytest.mark.parametrize(("limit_s", "waited_s"), [(-1.0, 0.0), (float("inf"), threading.TIMEOUT_MAX)])
def test_a_wait_that_no_lock_takes_is_cut_to_one_it_does(limit_s: float, waited_s: float) -> None:
    gate = LateGate(0)
    acquire(gate, limit_s)
    assert gate.waits_s == [waited_s]


# ---- threads --------------------------------------------------------------------------------------------------------


def test_a_call_gets_the_reply_that_came_while_it_was_held_up(server: FakeServer, channel: BehindChannel) -> None:
    link = Link(channel, 8)
    link.ask(call("echo", 10))  # connected
    channel.blind_looks = BLIND_LOOKS
    assert link.ask(call("echo", wait_s=0.0)) == X.tobytes()
    link.close()


def test_a_future_gets_the_reply_that_came_while_its_client_was_held_up(
    server: FakeServer, channel: BehindChannel
) -> None:
    link = Link(channel, 8)
    link.ask(call("echo", 10))
    channel.blind_looks = BLIND_LOOKS
    future = link.submit(call("echo", wait_s=0.0))
    assert future.result(timeout=60) == X.tobytes()
    link.close()


def test_a_client_that_looked_late_and_found_nothing_says_so(channel: BehindChannel) -> None:
    class Leaping(FakeClock):
        def monotonic_s(self) -> float:
            self.advance(0.3)
            return super().monotonic_s()

    link = Link(channel, 8, Leaping())
    link.ask(call("echo", 10))  # connected
    with pytest.raises(TimeoutError, match=r"within 0\.100 s; .* it looked 0\.20 s late"):
        link.ask(call("silent", wait_s=0.1))
    link.close()


def test_a_call_that_waited_long_for_its_slot_is_given_time_for_its_answer(
    server: FakeServer, channel: BehindChannel
) -> None:
    clock = SteppedClock()
    link = Link(channel, 1, clock)
    first = link.submit(call("held", wait_s=60))
    server.wait_for(1)

    def wait_long() -> None:
        clock.behind_s = 1.2
        server.release()
        first.result(timeout=60)
        channel.blind_looks = 1  # so that its deadline is judged before its reply is seen

    clock.steps = [lambda: None, wait_long]  # its wait for a slot begins; it waits
    second = link.submit(call("echo", wait_s=0.2))
    assert second.result(timeout=60) == X.tobytes()
    link.close()


def test_a_slot_that_came_free_while_its_waiter_was_held_up_is_taken(
    server: FakeServer, channel: BehindChannel
) -> None:
    clock = SteppedClock()
    link = Link(channel, 1, clock)
    first = link.submit(call("held", wait_s=60))
    server.wait_for(1)

    def let_go() -> None:
        server.release()
        first.result(timeout=60)
        channel.blind_looks = 1  # the server may take longer to answer than all looks

    clock.steps = [lambda: None, lambda: None, let_go]  # its wait begins; is over with nothing; at the next look
    second = link.submit(call("echo", wait_s=0.0))
    assert second.result(timeout=60) == X.tobytes()
    link.close()


# ---- asyncio --------------------------------------------------------------------------------------------------------


def test_a_loop_that_was_held_up_takes_the_reply_that_came_meanwhile(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels: list[BehindChannel] = []

    def behind(*arguments: Any) -> BehindChannel:
        channels.append(BehindChannel(*arguments))
        return channels[-1]

    monkeypatch.setattr(asyncio_client, "Channel", behind)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncClient(server.endpoint) as client:
            asked = asyncio.ensure_future(client.infer("held", {"x": X}, timeout_ms=20))
            await asyncio.to_thread(server.wait_for, 1)
            channels[0].blind_looks = BLIND_LOOKS
            start_s = loop.time()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 5.0)
            assert loop.time() > start_s + 1.02
            server.release()
            np.testing.assert_array_equal((await asked)["x"], X)

    asyncio.run(main())
