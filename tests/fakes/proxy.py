"""An HTTP proxy that leads everybody to one server, and notes what it was asked."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

WAIT_S = 60.0


class Proxy:
    """Takes CONNECT and whole addresses, and leads each to `there`. heads: what it was told; `says`: its answer."""

    def __init__(self, there: tuple[str, int]) -> None:
        self.there = there
        self.says = b"HTTP/1.1 200 Connection established\r\n\r\n"
        self.heads: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, suppress(OSError):
                self._lead(peer)

    def _lead(self, peer: socket.socket) -> None:
        peer.settimeout(WAIT_S)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = peer.recv(1)
            if not piece:
                return
            head += piece
        self.heads.append(head)
        if head.startswith(b"CONNECT"):
            peer.sendall(self.says)
            if b" 200 " not in self.says:
                return
        with socket.create_connection(self.there, WAIT_S) as there:
            if not head.startswith(b"CONNECT"):
                method, _, rest = head.partition(b" http://")
                there.sendall(method + b" /" + rest.partition(b"/")[2])
            while True:
                for ready in select.select([peer, there], [], [], WAIT_S)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    (there if ready is peer else peer).sendall(data)
