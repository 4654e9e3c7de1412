"""The addresses of one door: bound with their locks and TLS, and let go at the end.

Owns: the listening sockets until a transport has them, the files of Unix sockets, and the files that a reload reads
again. Used by doors whose settings are a `DoorSettings`. Thread: main.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.doors.access.rules import DoorAccess, DoorAddress
from edge_runtime.doors.binding import IPC_MODE, PASSING, SocketFiles, bind_tcp, bind_unix
from edge_runtime.doors.door import keeping
from edge_runtime.errors import AddressTaken, ConfigError


class DoorListener(Struct):
    """A listening socket. place: the address, which its requests carry. context: of TLS, None without."""

    socket: socket.socket
    place: DoorAddress
    context: ssl.SSLContext | None = None


class DoorAddresses:
    """The addresses of one door. endpoints: those bound, as a client writes them. is_tls: whether one speaks TLS."""

    def __init__(self, access: DoorAccess) -> None:
        self.endpoints: list[str] = []
        self.is_tls = False
        self._access = access
        self._files = SocketFiles()

    def bind(self) -> list[DoorListener]:
        """Bind all, or none. Raises ConfigError, AddressTaken."""
        access, listeners = self._access, list[DoorListener]()
        context = access.ssl_context()
        self.is_tls = context is not None
        try:
            for address in access.addresses:
                bound = self._bind(address)
                place = address if address.path is not None else replace(address, port=bound.getsockname()[1])
                listeners.append(DoorListener(bound, place, context if address.is_tls else None))
        except BaseException:
            for each in listeners:
                each.socket.close()
            raise
        self.endpoints += [each.place.endpoint(access.key) for each in listeners]
        return listeners

    def reload(self, use_tls: Callable[[ssl.SSLContext], None]) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        key = self._access.key
        with keeping(f"the tokens of {key} are"):
            self._access.reload_tokens()
        with keeping(f"the certificate of {key} is"):
            context = self._access.ssl_context()
            if context is not None:
                use_tls(context)

    def release(self) -> None:
        """Remove the files of the sockets, which are closed. Idempotent."""
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
            raise why_not_bound(address, error, f"--{self._access.key}") from None
        self._files.add(path)
        return bound


def why_not_bound(address: DoorAddress, error: OSError, option: str) -> ConfigError:
    """The error for an address that cannot be bound. option: the command line's, that names another."""
    text = f"cannot bind {address}: {error.strerror or error}"
    if error.errno in PASSING:
        return AddressTaken(f"{text}; free it, or name another address with {option}")
    return ConfigError(f"{text}; wanted an address of this machine")
