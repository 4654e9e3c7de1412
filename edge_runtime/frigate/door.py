"""The daemon's door for Frigate's detectors: a ROUTER socket of their own, on the I/O loop.

Imported only with `frigate.endpoint`. Thread: main.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.zmq.bind import BoundSocket, bind_router, is_this_machine
from edge_runtime.doors.zmq.transport import Endpoint
from edge_runtime.errors import ConfigError
from edge_runtime.frigate.frontend import PREFIX, FrigateFrontend
from edge_runtime.frigate.received_models import ReceivedModels

log = logging.getLogger(__name__)

MESSAGE_FRAMES = 8
"""A message has two, and the delimiter of REQ before them."""

HEADER_BYTES = 64 << 10
"""Of a message, beside the model: far more than any header."""

LINGER_S = 1.0


def open_door(context: DoorContext) -> FrigateDoor:
    """Return the door of `[frigate]`."""
    return FrigateDoor(context)


class FrigateDoor:
    """The address of `[frigate]`. endpoint: as a detector writes it, "" until it is bound."""

    def __init__(self, context: DoorContext) -> None:
        self.endpoint = ""
        core = context.core
        self._settings = context.settings("frigate")
        self._context = context
        self._frontend = FrigateFrontend(
            self._settings,
            table=core.table,
            loader=core.loader,
            infer=core.infer,
            received=ReceivedModels(core.state / "frigate" if core.state is not None else None, PREFIX),
            may_receive=not core.config.requires_signed,
            clock=core.clock,
            metrics=core.metrics,
        )
        self._bound: BoundSocket | None = None
        self._endpoint: Endpoint | None = None

    def start(self) -> None:
        """Bind, and answer from now on; detectors that come before their models are loaded wait. Raises ConfigError."""
        settings, config, loop = self._settings, self._context.config, self._context.loop
        address = settings.endpoint
        if not settings.insecure and not is_this_machine(address):
            raise ConfigError(
                f"frigate.endpoint: {address} can be reached from other machines, and detectors have no password: "
                "name an ipc path or 127.0.0.1, or accept the risk with frigate.insecure = true"
            )
        own = ZmqSettings(
            max_frame_bytes=max(settings.max_model_bytes, HEADER_BYTES),
            send_bound_bytes=config.zmq.send_bound_bytes,
            insecure=True,
        )
        self._bound = bind_router(address, own, self._context.descriptors)
        self.endpoint = self._bound.address
        self._endpoint = endpoint = Endpoint(
            loop,
            self._bound,
            self._frontend,
            send_bound_bytes=own.send_bound_bytes,
            max_frame_bytes=own.max_frame_bytes,
            message_frames=MESSAGE_FRAMES,
            message_bytes=own.max_frame_bytes + HEADER_BYTES,
            total_send_bound_bytes=self._context.core.infer.unanswered.total_bytes,
            is_control=False,
        )
        self._frontend.attach(loop.call)
        self._frontend.start()
        if settings.accept_models:  # one that comes leaves what others send its room
            loop.unfinished_bytes += settings.max_model_bytes
        loop.call(lambda: loop.add(endpoint, self._frontend.beat))
        log.info("frigate", extra={"endpoint": self.endpoint})

    def ready(self) -> None:
        """Nothing: it answers from the start on."""

    def reload(self) -> None:
        """Nothing: it reads no file again."""

    def stop_admitting(self, limit_s: float) -> None:
        """Nothing: the closed core refuses pictures, and a detector asks again."""

    def close(self) -> None:
        """Send the replies that are there, and close. Idempotent; once the I/O thread has ended."""
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
            if self._endpoint is not None:
                self._endpoint.end(LINGER_S)
            bound.release()
        self.endpoint = ""

    def status(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}
