"""A camera on 127.0.0.1 that speaks RTSP (RFC 2326), with H.264 in RTP over its TCP connection, as many do."""

from __future__ import annotations

import contextlib
import re
import socketserver
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import av
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

SDP = """v=0\r
o=- 0 0 IN IP4 127.0.0.1\r
s=camera\r
c=IN IP4 0.0.0.0\r
t=0 0\r
m=video 0 RTP/AVP 96\r
a=rtpmap:96 H264/90000\r
a=fmtp:96 packetization-mode=1\r
a=control:track0\r
"""

BETWEEN_S = 0.02
"""Between two pictures: faster than any real camera, so that a test need not wait for it."""


class RtspCamera:
    """Shows a picture of one colour (0 to 2: red, green, blue) to each who plays it. methods: what was asked for."""

    def __init__(self, colour: int) -> None:
        self.colour = colour
        self.methods: list[str] = []
        self._ends = threading.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"rtsp://127.0.0.1:{self._server.server_address[1]}/live"

    def __enter__(self) -> Self:
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has had enough
                    owner._converse(self)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="rtsp-camera")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _converse(self, handler: socketserver.StreamRequestHandler) -> None:
        handler.connection.settimeout(10)
        while line := handler.rfile.readline().decode():
            method = line.split()[0]
            self.methods.append(method)
            fields = dict(re.findall(r"([^:\r\n]+): ?([^\r\n]*)", self._head(handler)))
            more, body = {"Session": "1"}, ""
            if method == "OPTIONS":
                more = {"Public": "OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN"}
            elif method == "DESCRIBE":
                more, body = {"Content-Type": "application/sdp", "Content-Base": self.url + "/"}, SDP
            elif method == "SETUP":
                assert "interleaved=0-1" in fields["Transport"], fields
                more["Transport"] = "RTP/AVP/TCP;unicast;interleaved=0-1"
            more |= {"CSeq": fields["CSeq"], "Content-Length": str(len(body))}
            head = "".join(f"{name}: {value}\r\n" for name, value in more.items())
            handler.wfile.write(f"RTSP/1.0 200 OK\r\n{head}\r\n{body}".encode())
            if method == "PLAY":
                for packet in self._packets():
                    handler.wfile.write(b"$\0" + struct.pack(">H", len(packet)) + packet)
                return

    def _head(self, handler: socketserver.StreamRequestHandler) -> str:
        lines = []
        while (line := handler.rfile.readline()) not in (b"\r\n", b""):
            lines.append(line.decode())
        return "".join(lines)

    def _packets(self) -> Iterator[bytes]:
        """RTP packets (RFC 6184, one NAL unit each) until it ends; each picture is whole by itself."""
        codec = av.CodecContext.create("libx264", "w")
        codec.width, codec.height, codec.pix_fmt = 64, 48, "yuv420p"
        codec.options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "keyint=1:log-level=none"}
        codec.framerate = 50
        number, at = 0, 0
        while not self._ends.wait(BETWEEN_S):
            pixels = np.zeros((48, 64, 3), np.uint8)
            pixels[:, :, self.colour] = 255
            for encoded in codec.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")):
                units = [unit for unit in re.split(b"\0?\0\0\1", bytes(encoded)) if unit]
                for unit in units:
                    marker = 0x80 if unit is units[-1] else 0
                    yield struct.pack(">BBHII", 0x80, marker | 96, number & 0xFFFF, at, 1) + unit
                    number += 1
            at += 1800
