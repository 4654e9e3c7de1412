"""A daemon in a thread, as a client sees one: a ROUTER that speaks wire v1 through the real codec.

What it answers depends on the model's name, so that a test reads without the server:
echo: the inputs as outputs. held: nothing until `release`. silent: never anything. busy: queue_full, retry after 12.5
ms. patient: the same twice, then as echo. garbage: frames that are not a reply. short: one output fewer than announced.
Everything it got is in `requests`, but for what each connection asks first: to hear that it stops.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from edge_runtime.errors import DecodeFailed, Forbidden, ModelNotFound, QueueFull
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.operations import OPERATIONS, pack_operation
from edge_runtime.wire import codec
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_FRAME_BYTES = 4 << 20

ANSWER_S = 60.0
"""How long anything may take before the test fails: far above anything but a hang."""

STOP_NOTICE = pack_operation(OPERATIONS["stop_notice"], {})

METADATA: dict[str, Any] = {
    "name": "echo",
    "versions": ["3"],
    "platform": "fake",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "max_batch_rows": 32,
    "max_frame_bytes": MAX_FRAME_BYTES,
}


@dataclass(frozen=True)
class Received:
    """One request as it came."""

    packed: bytes
    header: RequestHeader
    id: bytes
    tensors: tuple[bytes, ...]


class FakeServer:
    """Serves one endpoint until `close`; `close` and a second FakeServer on the same path are a restart."""

    def __init__(
        self, path: Path, *, is_control: bool = False, curve_secret: bytes | None = None, uses_tcp: bool = False
    ) -> None:
        self.requests: list[Received] = []
        self.results: dict[str, Any] = {
            "live": True,
            "ready": True,
            "models": [{"name": "echo", "version": 3, "state": "ready", "reason": ""}],
            "metadata": METADATA,
            "stats": {"uptime_s": 1.5},
            "load": [{"name": "echo", "version": 3, "state": "ready"}],
            "unload": [],
        }
        self._path = path
        self._refusals = 0
        self._is_control = is_control
        self._held: list[tuple[bytes, Received]] = []
        self._notices: list[tuple[bytes, bytes]] = []
        self._calls: list[Callable[[], None]] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._came = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.RCVHWM, 0)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if curve_secret is not None:
            self._router.set(zmq.CURVE_SERVER, 1)
            self._router.set(zmq.CURVE_SECRETKEY, curve_secret)
        self._router.bind("tcp://127.0.0.1:*" if uses_tcp else f"ipc://{path}")
        self.endpoint = self._router.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="fake-server")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> None:
        """End as a daemon does that is told to: with its notice, and all that it sent before on the wire."""
        self._calls.append(self._tell_stop)
        self.close(linger_ms=10_000)

    def close(self, linger_ms: int = 0) -> None:
        if self._wake_fd < 0:
            return
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self._router.close(linger=linger_ms)
        self._context.term()
        os.close(self._wake_fd)
        self._wake_fd = -1
        self._path.unlink(missing_ok=True)

    def release(self, order: Callable[[list[Any]], list[Any]] = list) -> None:
        """Answer everything held, in the order `order` gives."""

        def answer() -> None:
            held, self._held = self._held, []
            for identity, received in order(held):
                self._echo(identity, received)

        self._calls.append(answer)
        os.eventfd_write(self._wake_fd, 1)

    def wait_for(self, count: int) -> None:
        """Return when `count` requests came in all."""
        assert self.has(count, within_s=ANSWER_S)

    def has(self, count: int, *, within_s: float) -> bool:
        """Whether `count` requests came in all, or come within that time."""
        with self._came:
            return self._came.wait_for(lambda: len(self.requests) >= count, timeout=within_s)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._is_stopping:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._calls:
                self._calls.pop(0)()
            if self._router in ready and not self._is_stopping:
                self._answer(self._router.recv_multipart())
        while self._calls:
            self._calls.pop(0)()

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) < 3:
            self._error(frames[0], b"", DecodeFailed("wanted a header, an id, and a frame a tensor"))
            return
        identity, packed, request_id, *tensors = frames
        if packed == STOP_NOTICE:
            self._notices.append((identity, request_id))
            return
        received = Received(packed, codec.unpack_request(packed), request_id, tuple(tensors))
        with self._came:
            self.requests.append(received)
            self._came.notify_all()
        header = received.header
        if header.op in ("load", "unload") and not self._is_control:
            self._error(identity, request_id, Forbidden(f"{header.op} is answered on the control endpoint only"))
        elif header.op != "infer":
            result = self.results[header.op]
            if isinstance(result, Exception):
                self._error(identity, request_id, result)
            else:
                self._send(identity, codec.pack_result(result), request_id)
        elif header.model == "echo":
            self._echo(identity, received)
        elif header.model == "held":
            self._held.append((identity, received))
        elif header.model == "busy":
            self._error(identity, request_id, QueueFull("64 rows wait, as many as may", retry_after_ms=12.5))
        elif header.model == "patient":
            self._refusals += 1
            if self._refusals % 3:
                self._error(identity, request_id, QueueFull("full", retry_after_ms=12.5))
            else:
                self._echo(identity, received)
        elif header.model == "garbage":
            self._send(identity, b"\xc1 no msgpack", request_id, b"x")
        elif header.model == "short":
            outputs = [TensorHeader("a", "FP32", (1,)), TensorHeader("b", "FP32", (1,))]
            self._send(identity, codec.pack_answer("short", 1, outputs), request_id, bytes(4))
        elif header.model != "silent":
            self._error(identity, request_id, ModelNotFound(f"no model {header.model!r}"))

    def _tell_stop(self) -> None:
        for identity, request_id in self._notices:
            self._send(identity, codec.pack_result(True), request_id)

    def _echo(self, identity: bytes, received: Received) -> None:
        header = received.header
        timing = {"queue_ms": 0.25, "run_ms": 1.5, "batch_rows": 2} if header.timing else None
        wanted = header.outputs or tuple(tensor.name for tensor in header.inputs)
        by_name = {tensor.name: (tensor, data) for tensor, data in zip(header.inputs, received.tensors, strict=True)}
        outputs = [by_name[name] for name in wanted]
        packed = codec.pack_answer(header.model, header.version or 3, [tensor for tensor, _ in outputs], timing)
        self._send(identity, packed, received.id, *(data for _, data in outputs))

    def _error(self, identity: bytes, request_id: bytes, error: Any) -> None:
        self._send(identity, codec.pack_error(error), request_id)

    def _send(self, *frames: bytes) -> None:
        self._router.send_multipart(frames)
