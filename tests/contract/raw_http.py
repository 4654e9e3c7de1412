"""A client of HTTP that sends bytes as it is told, and reads responses one by one."""

from __future__ import annotations

import json
import select
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.contract.running_daemon import ANSWER_S


@dataclass
class RawResponse:
    """status: 0 where the connection ended without one. headers: by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self):
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error; fails when it is none."""
        fields = self.fields
        assert set(fields) == {"error", "code"}
        assert fields["error"]
        return fields["code"]


class RawHttp:
    """One connection. Use as a context manager."""

    def __init__(self, url: str, *, context=None) -> None:
        if url.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(ANSWER_S)
            try:
                self.socket.connect(url.removeprefix("unix:"))
            except OSError:
                self.socket.close()
                raise
        else:
            place = urlsplit(url)
            self.socket = socket.create_connection((place.hostname, place.port), ANSWER_S)
            if context is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self._got = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, method: str, path: str, body: bytes = b"", **headers) -> RawResponse:
        self.send(request(method, path, body, **headers))
        return self.response(method)

    def response(self, method: str = "GET") -> RawResponse:
        while b"\r\n\r\n" not in self._got:
            if not self._more():
                return RawResponse(0, {}, self._got)
        head, _, self._got = self._got.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
        while len(self._got) < length:
            assert self._more(), "the connection ended within a response"
        body, self._got = self._got[:length], self._got[length:]
        return RawResponse(int(first.split()[1]), headers, body)

    def has_ended(self) -> bool:
        """Wait until the daemon has closed the connection; False when something else comes."""
        return not self._more() and not self._got

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        return not select.select([self.socket], [], [], seconds)[0]

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return False
        self._got += data
        return bool(data)


def request(method: str, path: str, body: bytes = b"", **headers) -> bytes:
    """A request; `a_b` among headers stands for `a-b`. A body has its length unless headers say otherwise."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if (body or method == "POST") and not {"content-length", "transfer-encoding"} & set(named):
        named["content-length"] = len(body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value is not None)
    host = "" if "host" in named else "host: localhost\r\n"
    return f"{method} {path} HTTP/1.1\r\n{host}{lines}\r\n".encode() + body


def json_infer(data, shape=(1, 16), **fields) -> bytes:
    """The JSON of a request for a model with one FP32 input."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(shape), "data": data}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def binary_infer(data: bytes, shape=(1, 16), *, nbytes=None, **fields) -> tuple[bytes, int]:
    """A body with a JSON head and one FP32 tensor in binary form, answered in binary form; the head's length."""
    parameters = {"binary_data_size": len(data) if nbytes is None else nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(shape), "parameters": parameters}
    head = json.dumps({**fields, "parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    return head + data, len(head)
