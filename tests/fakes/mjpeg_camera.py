"""A camera on 127.0.0.1 as many are: JPEGs one after the other, by HTTP, for ever (multipart/x-mixed-replace)."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from PIL import Image

from tests.fakes.http_server import Answer, HttpServer, Request

if TYPE_CHECKING:
    from typing_extensions import Self

BETWEEN_S = 0.01
"""Between two pictures: faster than any real camera, so that a test need not wait for it."""


def jpeg(colour: str, size: tuple[int, int] = (64, 48)) -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG", quality=95)
    return file.getvalue()


class MjpegCamera:
    """Shows `picture`, the bytes of one part, until it is changed. Not `is_there`: streams end, new ones get 503."""

    def __init__(self, picture: bytes) -> None:
        self.picture = picture
        self.is_there = True
        self.sent = 0
        self.is_silent = False
        self._server = HttpServer(lambda _path: None)
        self._server.answer = self._answer
        self._ends = threading.Event()

    @property
    def url(self) -> str:
        """Where it is, with a password that must be told nowhere."""
        return self._server.url.replace("://", "://user:secret-word@") + "stream"

    def wait_sent(self, count: int) -> None:
        """Until so many more pictures have been sent."""
        wanted = self.sent + count
        for _ in range(2000):
            if self.sent >= wanted:
                return
            self._ends.wait(BETWEEN_S)
        raise AssertionError(f"{self.sent} pictures were sent, and wanted are {wanted}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._server.stop()

    def _answer(self, _request: Request) -> Answer:
        if not self.is_there:
            return Answer(503, b"not now")
        return Answer(200, self._parts(), {"Content-Type": "multipart/x-mixed-replace; boundary=picture"})

    def _parts(self) -> Iterator[bytes]:
        while self.is_there and not self._ends.wait(BETWEEN_S):
            if self.is_silent:
                continue
            data = self.picture
            yield b"--picture\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(data), data)
            self.sent += 1
