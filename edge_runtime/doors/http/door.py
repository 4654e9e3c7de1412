"""The daemon's HTTP door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `http.endpoint` or `http.control`, since it imports httptools. Thread: main.
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_runtime.config.door_access import DoorAccess, DoorAddress
from edge_runtime.config.settings import HttpSettings
from edge_runtime.daemon.core import Core
from edge_runtime.doors.binding import IPC_MODE, SocketFiles, bind_tcp, bind_unix
from edge_runtime.doors.door import drain, keeping, why_not_bound
from edge_runtime.doors.http.connection import HttpListener
from edge_runtime.doors.http.frontend import HttpFrontend
from edge_runtime.doors.http.transport import HttpTransport
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.open_inference.operations import OpenInference
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.sandbox.descriptors import Descriptors

if TYPE_CHECKING:
    from edge_runtime.torchserve.archives import TorchServeArchives

log = logging.getLogger(__name__)


class HttpDoor:
    """The addresses of `[http]`. endpoints: those bound, as a client writes them."""

    def __init__(
        self,
        settings: HttpSettings,
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
        self._archives: TorchServeArchives | None = None
        torchserve = None
        if settings.torchserve:
            from edge_runtime.torchserve.archives import TorchServeArchives
            from edge_runtime.torchserve.inference import TorchServe

            self._archives = TorchServeArchives(settings.torchserve_hosts, core, core.clock)
            torchserve = TorchServe(protocol, core.table, self._archives)
        self._http_frontend = HttpFrontend(
            frontend,
            protocol,
            core.table,
            access,
            clock=core.clock,
            metrics=core.metrics,
            max_body_bytes=settings.max_body_bytes,
            inflated_bytes=max(core.config.limits.message_bytes, settings.max_body_bytes),
            torchserve=torchserve,
        )
        self._transport: HttpTransport | None = None
        self._files = SocketFiles()

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        context = self._access.ssl_context()
        listeners: list[HttpListener] = []
        try:
            for address in self._access.addresses:
                bound = self._bind(address)
                place = address if address.path is not None else replace(address, port=bound.getsockname()[1])
                listeners.append(HttpListener(bound, place, context if address.is_tls else None))
            settings = self._settings
            self._transport = HttpTransport(
                listeners,
                self._http_frontend,
                self._core.metrics,
                max_body_bytes=settings.max_body_bytes,
                body_timeout_s=settings.body_timeout_s,
                max_connections=self._descriptors.share(settings.max_connections),
                may_connect=self._descriptors.may_connect,
                total_bytes=max(self._core.infer.unanswered.total_bytes, settings.max_body_bytes),
                loop=self._loop if context is None else None,
            )
        except BaseException:
            for each in listeners:
                each.socket.close()
            raise
        self._http_frontend.attach(self._transport)
        self._transport.start()
        self.endpoints += [each.place.endpoint("http") for each in listeners]
        log.info("http", extra={"endpoints": " ".join(self.endpoints)})

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        with keeping("the tokens of http are"):
            self._access.reload_tokens()
        transport = self._transport
        if transport is None:
            return
        transport.call(transport.forget_heads)
        with keeping("the certificate of http is"):
            context = self._access.ssl_context()
            if context is not None:
                transport.call(partial(transport.use_tls, context))

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if self._transport is not None:
            drain(self._transport.call, self._frontend, limit_s)

    def close(self) -> None:
        """Send the responses that are there and close every connection. Idempotent."""
        if self._archives is not None:
            self._archives.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()
        self._http_frontend.close()
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
            raise why_not_bound(address, error, "--http") from None
        self._files.add(path)
        return bound
