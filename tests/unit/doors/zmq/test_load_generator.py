"""The load that is offered is the plan's, also where the generator itself was held up."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.doors.zmq.channel import Channel
from edge_runtime.doors.zmq.load_generator import Generator, Measured, Plan
from tests.fakes.server import FakeServer

X = np.zeros((1, 4), np.float32)


def generated(tmp_path: Path, plan: dict[str, Any], *looks_s: float) -> Measured:
    """A run that looks at the clock at these seconds, the last again and again."""
    looks = chain(looks_s, repeat(looks_s[-1]))
    clock = SimpleNamespace(monotonic_s=lambda: next(looks))
    with FakeServer(tmp_path / "s") as server:
        header, tensors = RequestEncoder().encode("echo", {"x": X}, Options())
        channel = Channel(server.endpoint)
        channel.open(comes_back=True)
        assert channel.wait_connected(30)
        try:
            frames = [header, *map(bytes, tensors)]
            whole = Plan(server.endpoint, **{"warmup_s": 0.0, **plan})
            return Generator(channel.socket, whole, frames, clock).run()
        finally:
            channel.close()


def test_requests_due_while_the_generator_was_held_up_past_the_end_are_sent_all_the_same(tmp_path: Path) -> None:
    def sent(*looks_s: float) -> Measured:
        return generated(tmp_path, {"rate": 10.0, "seconds": 10.0}, *looks_s)

    in_time = sent(0.0, 0.0, *(0.1 * step for step in range(101))).sent
    assert 60 < in_time < 140, "Poisson: 100 with a standard deviation of 10"
    held_up = sent(0.0, 0.0, 99.0)
    assert (held_up.sent, held_up.lost) == (in_time, 0)
    assert held_up.own_s == held_up.latencies_s, "all of it is the generator's own"
    assert min(held_up.own_s) >= 89.0


def test_an_answer_that_waited_for_the_generator_is_distinguished_from_one_that_the_daemon_was_long_about(
    tmp_path: Path,
) -> None:
    plan = {"in_flight": 1, "seconds": 3.0}
    # It began, sent, and looked again only after 3 s: the answer may have been there all the time.
    busy = generated(tmp_path, plan, 0.0, 0.0, 3.0)
    assert (busy.latencies_s, busy.own_s) == ([3.0], [3.0])
    # It began, sent, looked and waited at once, for 3 s.
    waiting = generated(tmp_path, plan, 0.0, 0.0, 0.0, 0.0, 3.0)
    assert (waiting.latencies_s, waiting.own_s) == ([3.0], [0.0])


def test_a_rate_is_of_the_answers_that_came_in_its_time_however_long_they_were_under_way(tmp_path: Path) -> None:
    # One request is sent during the warm-up, and its answer is read at the end.
    plan = {"in_flight": 1, "seconds": 1.0, "warmup_s": 1.0}
    found = generated(tmp_path, plan, 0.0, 0.0, 2.0)
    assert (found.sent, found.answered, found.latencies_s) == (0, 1, [])
