"""The daemon's gRPC door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `grpc.endpoint` or `grpc.control`, since it imports hpack and protobuf. Thread: main.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.access.addresses import DoorAddresses
from edge_runtime.doors.door import drain
from edge_runtime.doors.grpc.frontend import GrpcFrontend
from edge_runtime.doors.grpc.message import PROTOBUF
from edge_runtime.doors.grpc.transport import GrpcTransport
from edge_runtime.doors.open_inference.operations import open_inference

log = logging.getLogger(__name__)


def open_door(context: DoorContext) -> GrpcDoor:
    """Return the door of `[grpc]`."""
    return GrpcDoor(context)


class GrpcDoor:
    """The addresses of `[grpc]`. endpoints: those bound, as a client writes them."""

    def __init__(self, context: DoorContext) -> None:
        settings = self._settings = context.settings("grpc")
        access = context.access["grpc"]
        self._context = context
        self._addresses = DoorAddresses(access)
        self.endpoints = self._addresses.endpoints
        self._frontend = context.new_frontend("grpc", encoding=PROTOBUF)
        self._methods = GrpcFrontend(
            self._frontend,
            open_inference(context, settings),
            access,
            context.core.clock,
            max_message_bytes=settings.max_body_bytes,
        )
        self._transport: GrpcTransport | None = None

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        settings, core, descriptors = self._settings, self._context.core, self._context.descriptors
        listeners = self._addresses.bind()
        self._transport = GrpcTransport(
            listeners,
            self._methods,
            core.metrics,
            max_message_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            max_connections=descriptors.share(settings.max_connections),
            may_connect=descriptors.may_connect,
            total_bytes=max(core.infer.unanswered.total_bytes, settings.max_body_bytes),
            loop=self._context.loop if not self._addresses.is_tls else None,
        )
        self._methods.attach(self._transport)
        self._transport.serve()
        log.info("grpc", extra={"endpoints": " ".join(self.endpoints)})

    def ready(self) -> None:
        """Nothing: it answers from the start on."""

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        transport = self._transport
        if transport is not None:
            self._addresses.reload(lambda tls: transport.call(partial(transport.use_tls, tls)))

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if self._transport is not None:
            drain(self._transport.call, self._frontend, limit_s)

    def close(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()
        self._addresses.release()

    def status(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}
