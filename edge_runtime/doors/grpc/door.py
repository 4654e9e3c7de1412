"""The daemon's gRPC door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `grpc.endpoint` or `grpc.control`, since it imports hpack and protobuf. Thread: main.
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from edge_runtime.config.door_access import DoorAccess, DoorAddress
from edge_runtime.config.settings import GrpcSettings
from edge_runtime.daemon.core import Core
from edge_runtime.doors.binding import IPC_MODE, SocketFiles, bind_tcp, bind_unix
from edge_runtime.doors.door import drain, keeping, why_not_bound
from edge_runtime.doors.grpc.frontend import GrpcFrontend
from edge_runtime.doors.grpc.transport import GrpcListener, GrpcTransport
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.open_inference.operations import OpenInference
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.sandbox.descriptors import Descriptors

log = logging.getLogger(__name__)


class GrpcDoor:
    """The addresses of `[grpc]`. endpoints: those bound, as a client writes them."""

    def __init__(
        self,
        settings: GrpcSettings,
        access: DoorAccess,
        core: Core,
        frontend: InferFrontend,
        protocol: OpenInference,
        *,
        descriptors: Descriptors,
        loop: IoLoop,
    ) -> None:
        self._loop = loop
        self.endpoints: list[str] = []
        self._settings = settings
        self._access = access
        self._core = core
        self._frontend = frontend
        self._descriptors = descriptors
        self._methods = GrpcFrontend(frontend, protocol, access, core.clock, max_message_bytes=settings.max_body_bytes)
        self._transport: GrpcTransport | None = None
        self._files = SocketFiles()

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        context = self._access.ssl_context()
        listeners: list[GrpcListener] = []
        try:
            for address in self._access.addresses:
                bound = self._bind(address)
                place = address if address.path is not None else replace(address, port=bound.getsockname()[1])
                listeners.append(GrpcListener(bound, place, context if address.is_tls else None))
        except BaseException:
            for each in listeners:
                each.socket.close()
            raise
        settings = self._settings
        self._transport = GrpcTransport(
            listeners,
            self._methods,
            self._core.metrics,
            max_message_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            max_connections=self._descriptors.share(settings.max_connections),
            may_connect=self._descriptors.may_connect,
            total_bytes=max(self._core.infer.unanswered.total_bytes, settings.max_body_bytes),
            loop=self._loop if context is None else None,
        )
        self._methods.attach(self._transport)
        self._transport.serve()
        self.endpoints += [each.place.endpoint("grpc") for each in listeners]
        log.info("grpc", extra={"endpoints": " ".join(self.endpoints)})

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        with keeping("the tokens of grpc are"):
            self._access.reload_tokens()
        transport = self._transport
        if transport is None:
            return
        with keeping("the certificate of grpc is"):
            context = self._access.ssl_context()
            if context is not None:
                transport.post(partial(transport.use_tls, context))

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if self._transport is not None:
            drain(self._transport.post, self._frontend, limit_s)

    def close(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()
        self._files.release()
        self.endpoints.clear()

    def _bind(self, address: DoorAddress) -> socket.socket:
        try:
            if address.path is None:
                return bind_tcp(address.host, address.port)
            path = Path(address.path)
            self._files.lock(path, str(address))
            bound = bind_unix(path, IPC_MODE)
        except OSError as error:
            raise why_not_bound(address, error, "--grpc") from None
        self._files.add(path)
        return bound
