"""The daemon's gRPC door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `grpc.endpoint` or `grpc.control`, since it imports grpcio and protobuf. Thread: main.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from edge_runtime.config.door_access import DoorAccess, DoorAddress
from edge_runtime.config.settings import GrpcSettings
from edge_runtime.daemon.doors import drain, keeping, why_not_bound
from edge_runtime.errors import ConfigError
from edge_runtime.frontend.grpc_frontend import GrpcFrontend
from edge_runtime.frontend.infer_frontend import InferFrontend
from edge_runtime.frontend.open_inference import OpenInference
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.transports.binding import IPC_MODE, SocketFiles, bind_tcp
from edge_runtime.transports.grpc_transport import GrpcListener, GrpcTransport

log = logging.getLogger(__name__)


class GrpcDoor:
    """The addresses of `[grpc]`. endpoints: those bound, as a client writes them."""

    def __init__(
        self,
        settings: GrpcSettings,
        access: DoorAccess,
        frontend: InferFrontend,
        protocol: OpenInference,
        descriptors: Descriptors,
    ) -> None:
        self.endpoints: list[str] = []
        self._access = access
        self._frontend = frontend
        self._files = SocketFiles()
        methods = GrpcFrontend(frontend, protocol, access, max_message_bytes=settings.max_body_bytes)
        tls = access.tls_files()
        # The library accepts without asking; each address has a server, with a bound of its own.
        most = descriptors.promise(settings.max_connections)
        most = max(most // len(access.addresses), 1)
        self._transport = GrpcTransport(
            [GrpcListener(str(each), each, is_tls=each.is_tls) for each in access.addresses],
            methods,
            tls,
            max_message_bytes=settings.max_body_bytes,
            max_connections=most,
        )
        methods.attach(self._transport)

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        for each in self._access.addresses:
            if each.path is not None:  # the library binds over any socket that is there
                self._files.lock(Path(each.path), str(each))
        try:
            self._transport.start()
        except OSError as error:
            raise _why_not_bound(self._access.addresses, error) from None
        for address, port in zip(self._access.addresses, self._transport.ports, strict=True):
            if address.path is not None:
                Path(address.path).chmod(IPC_MODE)
                self._files.add(Path(address.path))
            self.endpoints.append(replace(address, port=port).endpoint("grpc"))
        log.info("grpc", extra={"endpoints": " ".join(self.endpoints)})

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        with keeping("the tokens of grpc are"):
            self._access.reload_tokens()
        with keeping("the certificate of grpc is"):
            self._transport.use_tls(self._access.tls_files())

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if self.endpoints:
            drain(self._transport.post, self._frontend, limit_s)

    def close(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        self._transport.stop()
        self._files.release()
        self.endpoints.clear()


def _why_not_bound(addresses: tuple[DoorAddress, ...], error: OSError) -> ConfigError:
    """Find out what the library does not tell: which address it is, and whether another process has it."""
    for address in addresses:
        if address.path is None:
            try:
                bind_tcp(address.host, address.port).close()
            except OSError as found:
                return why_not_bound(address, found, "--grpc")
    return ConfigError(f"grpc.endpoint: cannot bind {', '.join(map(str, addresses))}: {error}")
