"""One ZeroMQ endpoint on a loop that turns when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from edge_runtime.clock import Clock
from edge_runtime.config.settings import Curve, ZmqSettings
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.zmq.bind import bind_router
from edge_runtime.doors.zmq.transport import Endpoint
from edge_runtime.telemetry.metrics import Metrics

ANSWER_S = 60.0


class ZmqSite:
    """An endpoint at `<folder>/s`, its loop and its counters, and libzmq's clients of it. `close` at the end."""

    def __init__(
        self, folder: Path, receiver: Any, *, clock: Clock | None = None, curve: Curve | None = None, **bounds: int
    ) -> None:
        """curve: its keys; it is at a port of TCP then. bounds: of the endpoint, in place of 1 MiB and 64 frames."""
        self.metrics = Metrics()
        self.loop = IoLoop(self.metrics, clock, unfinished_bytes=bounds.pop("unfinished_bytes", 128 << 20))
        address = f"ipc://{folder}/s" if curve is None else "tcp://127.0.0.1:*"
        self.bound = bind_router(address, ZmqSettings(curve=curve))
        self.address = self.bound.address
        given = {
            "send_bound_bytes": 1 << 20,
            "max_frame_bytes": 1 << 20,
            "message_frames": 64,
            "message_bytes": 1 << 20,
            "total_send_bound_bytes": 1 << 30,
        }
        self.endpoint = Endpoint(self.loop, self.bound, receiver, **{**given, **bounds}, is_control=False)
        self.loop.add(self.endpoint)
        self._context: zmq.Context[Any] = zmq.Context()
        self._clients: list[Any] = []

    def client(self, name: bytes = b"", keys: tuple[bytes, bytes, bytes] | None = None) -> Any:
        """A DEALER that is connected. name: its identity. keys: the server's public one, its own public and secret."""
        client = self._context.socket(zmq.DEALER)
        if keys is not None:
            for option, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True):
                client.set(option, key)
        if name:
            client.set(zmq.ROUTING_ID, name)
        client.connect(self.address)
        self._clients.append(client)
        return client

    def turn_until(self, is_so: Callable[[], Any], wait_s: float = 0.02) -> None:
        """Turn until something is so."""
        end_s = time.monotonic() + ANSWER_S
        while not is_so():
            assert time.monotonic() < end_s, "it never came"
            self.loop.turn(wait_s)

    def replies(self, client: Any, count: int) -> list[list[bytes]]:
        """Turn until so many replies have come."""
        found: list[list[bytes]] = []

        def has_all() -> bool:
            while client.poll(0):
                found.append(client.recv_multipart())
            return len(found) >= count

        self.turn_until(has_all)
        return found

    def close(self) -> None:
        """End clients, endpoint and loop."""
        for client in self._clients:
            client.close(linger=0)
        self._context.term()
        self.bound.close()
        self.endpoint.end(0.0)
        self.loop.close()
        self.bound.release()
