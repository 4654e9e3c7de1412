"""A browser's requests to the page of a device, as bytes."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from urllib.parse import urlsplit

from tests.contract.raw_http import RawHttp, RawResponse
from tests.contract.running_daemon import ANSWER_S


class Viewer(RawHttp):
    """One connection, which sends what the page itself sends."""

    def __init__(self, url: str, *, context=None, **headers) -> None:
        """headers: of every request, such as `cookie`."""
        super().__init__(url, context=context)
        self.url = url
        self.headers = headers

    def get(self, path: str, **headers) -> RawResponse:
        return self.ask("GET", path, **{**self.headers, **headers})

    def post(self, path: str, fields=None, **headers) -> RawResponse:
        body = b"" if fields is None else json.dumps(fields).encode()
        return self.ask("POST", path, body, **{"x_edge_page": "1", **self.headers, **headers})

    def login(self, token: str) -> str:
        """Log in on a connection of its own, and return the cookie as a browser sends it back."""
        place = urlsplit(self.url)
        connection = HTTPConnection(place.hostname, place.port, timeout=ANSWER_S)
        try:
            connection.request("POST", "/page/login", json.dumps({"token": token}), {"x-edge-page": "1"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return answer.headers["Set-Cookie"].partition(";")[0]
        finally:
            connection.close()

    def call(self, operation: str, **parameters):
        """The result of an operation."""
        answer = self.post(f"/page/call/{operation}", parameters)
        assert answer.status == 200, answer.body
        return answer.fields["result"]

    def refused(self, path: str, fields=None, **headers) -> tuple[int, str]:
        """Status and code of a refusal."""
        answer = self.post(path, fields, **headers)
        assert set(answer.fields) == {"error"}
        assert answer.fields["error"]["message"]
        return answer.status, answer.fields["error"]["code"]


class Stream(Viewer):
    """A stream of events, read one by one."""

    def __init__(self, url: str, **headers) -> None:
        super().__init__(url, **headers)
        self.send(b"GET /page/stream HTTP/1.1\r\nhost: localhost\r\n")
        self.send(b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items()) + b"\r\n")
        while b"\r\n\r\n" not in self._got:
            assert self._more(), "the connection ended"
        self.head, _, self._got = self._got.partition(b"\r\n\r\n")
        assert b" 200 " in self.head, self.head
        self._text = b""

    def event(self) -> tuple[str, dict]:
        """The next event: its name and its data; ("end", {}) at the end of the response."""
        while b"\n\n" not in self._text:
            while b"\r\n" not in self._got:
                assert self._more(), "the connection ended"
            size, _, rest = self._got.partition(b"\r\n")
            while len(rest) < int(size, 16) + 2:
                assert self._more(), "the connection ended"
                size, _, rest = self._got.partition(b"\r\n")
            if int(size, 16) == 0:
                self._got = rest[2:]
                return "end", {}
            self._text += rest[: int(size, 16)]
            self._got = rest[int(size, 16) + 2 :]
        text, _, self._text = self._text.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in text.decode().split("\n") if not line.startswith(":"))
        return (fields["event"], json.loads(fields["data"])) if "event" in fields else self.event()

    def until(self, name: str) -> dict:
        while True:
            found, data = self.event()
            if found == name:
                return data
            assert found != "end"
