"""A static web server for many devices that look at once: one process, one epoll loop, connections kept alive.

    python -m bench.metadata_server FOLDER

Prints its port. A file is read anew for each request, as nginx would; what is not there is a 404.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from bench.mqtt_devices import allow_connections, end_with_parent

BACKLOG = 4096
"""What Linux's somaxconn lets be."""

MAX_CONNECTIONS = 16_000
REQUEST_BYTES = 4096
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class MetadataServer:
    """Serves a folder on `port`. A request is one packet, as those of the devices are."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._open: dict[int, socket.socket] = {}

    @property
    def port(self) -> int:
        """On 127.0.0.1."""
        return int(self._listener.getsockname()[1])

    def run(self) -> None:
        """Serve for ever."""
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._answer(fd)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            self._open[connection.fileno()] = connection
            self._epoll.register(connection, select.EPOLLIN)

    def _answer(self, fd: int) -> None:
        connection = self._open[fd]
        try:
            request = connection.recv(REQUEST_BYTES)
            if request:
                connection.send(self._found(request.split(b" ", 2)[1].decode()))
                return
        except OSError:
            pass
        del self._open[fd]
        connection.close()

    def _found(self, path: str) -> bytes:
        try:
            file = os.open(self._folder + path, os.O_RDONLY)
        except OSError:
            return NOT_FOUND
        body = os.read(file, 1 << 20)
        os.close(file)
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def main(arguments: list[str]) -> None:
    """Serve the folder until killed."""
    end_with_parent()
    allow_connections(MAX_CONNECTIONS)
    server = MetadataServer(Path(arguments[0]))
    print(server.port, flush=True)
    server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
