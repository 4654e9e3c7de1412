"""How much the I/O loop does before it comes round, by a clock that only the work itself moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.io_loop import ROUND_S
from edge_runtime.doors.zmq.transport import RECEIVE_BYTES, Endpoint
from edge_runtime.errors import EdgeRuntimeError
from tests.fakes.zmq_site import ZmqSite

WORK_S = 0.003
"""What one message takes of the clock."""

LOOK_S = 0.001
"""What one look at the clock takes: each drain is followed by one."""

FRAMES = 64
BYTES = 1 << 20


class WorkClock:
    """Stands still but for work, and looks at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += LOOK_S
        return self.now_s


class CountingReceiver:
    """Knows no header, and answers what is not too large with its id; each answer takes WORK_S."""

    def __init__(self, clock: WorkClock) -> None:
        self._clock = clock
        self.answered = 0
        self.refused: list[tuple[int, str]] = []

    def routes(self) -> dict[bytes, Any]:
        return {}

    def answer_burst(self, endpoint: Endpoint, route: Any, entries: Any) -> None:
        raise AssertionError("no header is known")

    def message(self, endpoint: Endpoint, peer: Any, frames: list[Any]) -> None:
        self._clock.now_s += WORK_S
        self.answered += 1
        endpoint.send(peer.envelope, [b"", bytes(frames[1])])

    def refuse(self, endpoint: Endpoint, peer: Any, frames: list[Any], error: EdgeRuntimeError) -> None:
        self.refused.append((len(frames), error.code))
        endpoint.send(peer.envelope, [b"refused", bytes(frames[1])])


class Served(ZmqSite):
    """A site whose loop runs by a clock of the work."""

    def __init__(self, folder: Path) -> None:
        self.clock = WorkClock()
        self.receiver = CountingReceiver(self.clock)
        super().__init__(
            folder, self.receiver, clock=self.clock, max_frame_bytes=BYTES, message_frames=FRAMES, message_bytes=BYTES
        )
        self.begins_s: list[float] = []

    def serve(self, until: Any) -> list[float]:
        """Serve until `until` says so; return the clock's time that each round took."""

        def beat() -> None:
            self.begins_s.append(self.clock.now_s)
            if until():
                self.loop.stop()

        self.loop.run(beat, 5.0)
        return [end - begin for begin, end in zip(self.begins_s, self.begins_s[1:], strict=False)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def replies(client: Any, count: int) -> list[list[bytes]]:
    found = []
    for _ in range(count):
        assert client.poll(5_000), "no reply came"
        found.append(client.recv_multipart())
    return found


def test_a_round_ends_soon_however_many_slow_messages_wait(served: Served) -> None:
    client = served.client()
    for number in range(200):
        client.send_multipart([b"header", b"%d" % number, b"."])
    rounds_s = served.serve(lambda: served.receiver.answered == 200)
    assert max(rounds_s) < ROUND_S + WORK_S + 5 * LOOK_S
    assert [reply[1] for reply in replies(client, 200)] == [b"%d" % number for number in range(200)]


def test_the_loop_comes_round_while_a_message_of_many_frames_is_dropped(served: Served) -> None:
    greedy, polite = served.client(), served.client()
    polite.send_multipart([b"header", b"one", b"."])
    greedy.send_multipart([b"header", b"many", *([b"."] * 160_000)])
    rounds_s = served.serve(lambda: served.receiver.answered == 1 and served.receiver.refused)
    assert max(rounds_s) < ROUND_S + WORK_S + 5 * LOOK_S
    assert replies(greedy, 1) == [[b"refused", b"many"]]
    assert replies(polite, 1) == [[b"", b"one"]]
    assert served.metrics.counters() == {"messages_too_large": 1}


def test_a_dropped_message_is_read_in_rounds_and_the_next_one_is_answered(served: Served) -> None:
    client = served.client()
    client.send_multipart([b"header", b"many", *([b"."] * 160_000)])
    client.send_multipart([b"header", b"next", b"."])
    rounds_s = served.serve(lambda: served.receiver.answered == 1)
    assert len(rounds_s) > 160_000 * 3 // RECEIVE_BYTES
    assert max(rounds_s) < ROUND_S + WORK_S + 5 * LOOK_S
    assert [reply[1] for reply in replies(client, 2)] == [b"many", b"next"]
    assert served.metrics.counters() == {"messages_too_large": 1}


@pytest.mark.parametrize("delimiter", [[], [b""]], ids=["dealer", "req"])
@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([b"."] * (FRAMES + 1), id="frames"),
        pytest.param([bytes(BYTES // 2)] * 3, id="bytes"),
        pytest.param([bytes(BYTES)], id="bytes of one"),
        pytest.param([bytes(BYTES), b"."], id="bytes at the end"),
    ],
)
def test_a_message_over_a_bound_is_refused_once_and_the_next_is_read_whole(
    served: Served, delimiter: list[bytes], tensors: list[bytes]
) -> None:
    client = served.client()
    for number in range(3):
        client.send_multipart([*delimiter, b"header", b"large%d" % number, *tensors])
        client.send_multipart([*delimiter, b"header", b"small%d" % number, b"."])
    served.serve(lambda: served.receiver.answered == 3)
    assert served.receiver.refused == [(2, "decode_failed")] * 3
    ids = [reply[-1] for reply in replies(client, 6)]
    assert ids == [b"large0", b"small0", b"large1", b"small1", b"large2", b"small2"]


def test_a_message_at_its_bounds_is_read(served: Served) -> None:
    client = served.client()
    client.send_multipart([b"header", b"frames", *([b"."] * (FRAMES - 2))])
    client.send_multipart([b"header", b"bytes", bytes(BYTES - len(b"headerbytes"))])
    served.serve(lambda: served.receiver.answered == 2)
    assert served.receiver.refused == []


def test_replies_posted_while_the_loop_sleeps_wake_it_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[None] = []
    monkeypatch.setattr(served.loop, "wake", lambda: wakes.append(None))
    served.loop.is_asleep = True

    for _ in range(3):
        served.endpoint.post((b"nobody",), (b"", b"id"))

    assert len(wakes) == 1
    assert len(served.loop.outbox) == 3
