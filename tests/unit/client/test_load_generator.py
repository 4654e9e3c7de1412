"""The load that is offered is the plan's, also where the generator itself was held up."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import numpy as np

from edge_runtime.client.channel import Channel
from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.client.load_generator import Generator, Measured, Plan
from tests.fakes.server import FakeServer

X = np.zeros((1, 4), np.float32)


def test_what_was_due_while_the_generator_was_held_up_past_the_end_is_sent_all_the_same(tmp_path: Path) -> None:
    def sent(*looks_s: float) -> Measured:
        """A run that looks at the clock at these seconds, the last again and again."""
        clock = chain(looks_s, repeat(looks_s[-1]))
        with FakeServer(tmp_path / "s") as server:
            plan = Plan(server.endpoint, rate=10.0, seconds=10.0, warmup_s=0.0)
            header, tensors = RequestEncoder().encode("echo", {"x": X}, Options())
            channel = Channel(server.endpoint)
            channel.open(comes_back=True)
            assert channel.wait_connected(30)
            try:
                return Generator(channel.socket, plan, [header, *map(bytes, tensors)], lambda: next(clock)).run()
            finally:
                channel.close()

    in_time = sent(0.0, 0.0, *(0.1 * step for step in range(101))).sent
    assert 60 < in_time < 140, "Poisson: 100 with a standard deviation of 10"
    assert sent(0.0, 0.0, 99.0).sent == in_time
