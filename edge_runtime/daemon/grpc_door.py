"""The daemon's gRPC door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `grpc.endpoint` or `grpc.control`, since it imports grpcio and protobuf. Thread: main.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

from edge_runtime.config.door_access import DoorAccess, DoorAddress
from edge_runtime.config.settings import GrpcSettings
from edge_runtime.errors import AddressTaken, ConfigError
from edge_runtime.frontend.grpc_frontend import GrpcFrontend
from edge_runtime.frontend.infer_frontend import InferFrontend
from edge_runtime.frontend.open_inference import OpenInference
from edge_runtime.transports.grpc_transport import GrpcListener, GrpcTransport
from edge_runtime.transports.zmq_bind import IPC_MODE, PASSING, lock_path

log = logging.getLogger(__name__)


class GrpcDoor:
    """The addresses of `[grpc]`. endpoints: those bound, as a client writes them."""

    def __init__(
        self, settings: GrpcSettings, access: DoorAccess, frontend: InferFrontend, protocol: OpenInference
    ) -> None:
        self.endpoints: list[str] = []
        self._access = access
        self._frontend = frontend
        self._paths = [Path(each.path) for each in access.addresses if each.path is not None]
        self._lock_fds: list[int] = []
        methods = GrpcFrontend(frontend, protocol, access, max_message_bytes=settings.max_body_bytes)
        tls = access.tls_files()
        self._transport = GrpcTransport(
            [GrpcListener(str(each), each, is_tls=each.is_tls) for each in access.addresses],
            methods,
            tls,
            max_message_bytes=settings.max_body_bytes,
            max_connections=settings.max_connections,
        )
        methods.attach(self._transport)

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        for path in self._paths:  # the library binds over any socket that is there
            self._lock_fds.append(lock_path(path, f"unix:{path}"))
        try:
            self._transport.start()
        except OSError as error:
            raise _why_not_bound(self._access.addresses, error) from None
        for address, port in zip(self._access.addresses, self._transport.ports, strict=True):
            if address.path is not None:
                Path(address.path).chmod(IPC_MODE)
                self.endpoints.append(str(address))
            else:
                scheme = "grpcs" if address.is_tls else "grpc"
                self.endpoints.append(f"{scheme}://{replace(address, port=port)}")
        log.info("grpc", extra={"endpoints": " ".join(self.endpoints)})

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        try:
            self._access.reload_tokens()
        except ConfigError as error:
            log.error("the tokens of grpc are as before", extra={"reason": error.message})
        try:
            tls = self._access.tls_files()
        except ConfigError as error:
            log.error("the certificate of grpc is as before", extra={"reason": error.message})
        else:
            self._transport.use_tls(tls)

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if not self.endpoints:
            return
        has_stopped = threading.Event()
        self._transport.post(self._frontend.drain)
        self._transport.post(has_stopped.set)
        has_stopped.wait(limit_s)

    def close(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        self._transport.stop()
        locks, self._lock_fds = self._lock_fds, []
        for path in self._paths if self.endpoints else ():
            path.unlink(missing_ok=True)
        for each in locks:
            os.close(each)
        self.endpoints.clear()


def _why_not_bound(addresses: tuple[DoorAddress, ...], error: OSError) -> ConfigError:
    """What the library does not say: which address it is, and whether another process has it."""
    for address in addresses:
        if address.path is not None:
            continue
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, address.port))
            except OSError as found:
                text = f"cannot bind {address}: {found.strerror or found}"
                if found.errno in PASSING:
                    return AddressTaken(f"{text}; free it, or name another address with --grpc")
                return ConfigError(f"{text}; wanted an address of this machine")
    return ConfigError(f"grpc.endpoint: cannot bind {', '.join(map(str, addresses))}: {error}")
