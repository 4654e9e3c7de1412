"""The chosen HTTP library on a loop of its own, which answers every request with the same bytes, as a bound for doors.

python http_echo.py HOST:PORT FILE        FILE: one whole answer, head and body
"""

from __future__ import annotations

import select
import socket
import sys
from pathlib import Path

import httptools

READ_BYTES = 1 << 18


class EchoConnection:
    """One connection: parses what comes and answers each whole request."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        self.socket = connection
        self._answer = answer
        self._ended = 0
        self._left = b""
        self._parser = httptools.HttpRequestParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, as a server has to."""

    def on_message_complete(self) -> None:
        """Count a whole request."""
        self._ended += 1

    def receive(self, buffer: memoryview) -> bool:
        """Read once and answer; False at the end."""
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not count:
            return False
        self._parser.feed_data(buffer[:count])
        if self._ended:
            answers, self._ended = self._answer * self._ended, 0
            sent = self.socket.send(answers)
            if sent < len(answers):
                self.socket.setblocking(True)
                self.socket.sendall(answers[sent:])
                self.socket.setblocking(False)
        return True


def serve(address: str, answer: bytes) -> None:
    """Answer until the process is ended."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=1024)
    epoll = select.epoll()
    epoll.register(listener.fileno(), select.EPOLLIN)
    connections: dict[int, EchoConnection] = {}
    buffer = memoryview(bytearray(READ_BYTES))
    while True:
        for number, _ in epoll.poll():
            if number == listener.fileno():
                connection, _ = listener.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[connection.fileno()] = EchoConnection(connection, answer)
                epoll.register(connection.fileno(), select.EPOLLIN)
            elif not connections[number].receive(buffer):
                epoll.unregister(number)
                connections.pop(number).socket.close()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]).read_bytes())
