"""What an endpoint counts of the replies that it cannot send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.unsent import TRACKED_BYTES
from edge_runtime.transports.zmq_bind import bind_router, new_context
from edge_runtime.transports.zmq_transport import Endpoint, Entry, IoLoop

GONE: list[Entry] = [(b"gone", b"1", b""), (b"gone", b"2", b"")]


class DeafReceiver:
    """An endpoint that only sends asks it nothing."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not expected")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def endpoint(tmp_path: Path, metrics: Metrics) -> Iterator[Endpoint]:
    """One that nobody is connected to."""
    context, loop = new_context(), IoLoop(metrics)
    bound = bind_router(context, f"ipc://{tmp_path}/s", ZmqSettings())
    try:
        yield Endpoint(
            loop,
            bound.socket,
            DeafReceiver(),
            send_bound_bytes=1 << 20,
            max_frame_bytes=1 << 20,
            is_control=False,
        )
    finally:
        bound.close()
        loop.close()
        context.term()


@pytest.mark.parametrize("output_frames", [1, 3])
@pytest.mark.parametrize("frame_bytes", [1, TRACKED_BYTES])
def test_a_reply_that_finds_no_peer_is_counted_once_however_many_frames_it_has(
    endpoint: Endpoint, metrics: Metrics, output_frames: int, frame_bytes: int
) -> None:
    frames = [bytes(frame_bytes)] * output_frames
    endpoint.answer_lot(GONE, b"header", [frames] * len(GONE), output_frames * frame_bytes)
    assert metrics.counters() == {"replies_dropped": len(GONE)}
