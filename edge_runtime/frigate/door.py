"""The daemon's door for Frigate's detectors: a ROUTER socket on a loop and a thread of its own.

A detector's pictures are large, and casting one takes as long as a hundred small requests: the loop of all other
ZeroMQ clients does not wait for them. Imported only with `frigate.endpoint`. Thread: main.
"""

from __future__ import annotations

import logging
import threading

from edge_runtime.config.settings import FrigateSettings, ZmqSettings
from edge_runtime.daemon.core import Core
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.zmq.bind import BoundSocket, bind_router, is_this_machine
from edge_runtime.doors.zmq.transport import Endpoint
from edge_runtime.errors import ConfigError
from edge_runtime.frigate.frontend import PREFIX, FrigateFrontend
from edge_runtime.models.received_models import ReceivedModels
from edge_runtime.sandbox.descriptors import Descriptors

log = logging.getLogger(__name__)

BEAT_S = 0.1
"""How often handshakes that wait are looked at; a detector waits for one only when it starts."""

SWEEP_BEATS = 10

MESSAGE_FRAMES = 8
"""A message has two, and the delimiter of REQ before them."""

HEADER_BYTES = 64 << 10
"""Of a message, beside the model: far more than any header."""

LINGER_S = 1.0


class FrigateDoor:
    """The address of `[frigate]`. endpoint: as a detector writes it, "" until it is bound."""

    def __init__(self, settings: FrigateSettings, core: Core, descriptors: Descriptors) -> None:
        self.endpoint = ""
        self._settings = settings
        self._core = core
        self._descriptors = descriptors
        self._frontend = FrigateFrontend(
            settings,
            table=core.table,
            loader=core.loader,
            infer=core.infer,
            received=ReceivedModels(core.state / "frigate" if core.state is not None else None, PREFIX),
            may_receive=not core.config.requires_signed,
            clock=core.clock,
            metrics=core.metrics,
        )
        self._loop = IoLoop(
            core.metrics, unfinished_bytes=max(settings.max_model_bytes, core.config.limits.message_bytes)
        )
        self._bound: BoundSocket | None = None
        self._endpoint: Endpoint | None = None
        self._thread: threading.Thread | None = None
        self._beats = 0

    def start(self) -> None:
        """Bind, and answer from now on; detectors that come before their models are loaded wait. Raises ConfigError."""
        address, settings = self._settings.endpoint, self._settings
        assert address is not None
        if not settings.insecure and not is_this_machine(address):
            raise ConfigError(
                f"frigate.endpoint: {address} can be reached from other machines, and detectors have no password: "
                "name an ipc path or 127.0.0.1, or accept the risk with frigate.insecure = true"
            )
        own = ZmqSettings(
            max_frame_bytes=max(settings.max_model_bytes, HEADER_BYTES),
            send_bound_bytes=self._core.config.zmq.send_bound_bytes,
            insecure=True,
        )
        self._bound = bind_router(address, own, self._descriptors)
        self.endpoint = self._bound.address
        self._endpoint = Endpoint(
            self._loop,
            self._bound,
            self._frontend,
            send_bound_bytes=own.send_bound_bytes,
            max_frame_bytes=own.max_frame_bytes,
            message_frames=MESSAGE_FRAMES,
            message_bytes=own.max_frame_bytes + HEADER_BYTES,
            total_send_bound_bytes=self._core.infer.unanswered.total_bytes,
            is_control=False,
        )
        self._frontend.attach(self._loop.call)
        self._frontend.start()
        self._loop.add(self._endpoint)
        self._thread = threading.Thread(
            target=self._loop.run, args=(self._beat, BEAT_S), name="edge-frigate", daemon=True
        )
        self._thread.start()
        log.info("frigate", extra={"endpoint": self.endpoint})

    def reload(self) -> None:
        """Nothing: it reads no file again."""

    def stop_admitting(self, limit_s: float) -> None:
        """Nothing: the closed core refuses pictures, and a detector asks again."""

    def close(self) -> None:
        """Send the replies that are there, and close. Idempotent; once the core is closed."""
        if self._thread is not None:
            self._loop.stop()
            self._thread.join()
            self._thread = None
        if self._bound is not None:
            self._bound.close()
            if self._endpoint is not None:
                self._endpoint.end(LINGER_S)
            self._bound.release()
            self._bound = None
        self._loop.close()
        self.endpoint = ""

    def _beat(self) -> None:
        self._frontend.beat()
        self._beats += 1
        if not self._beats % SWEEP_BEATS:
            self._loop.sweep()
