"""ZeroMQ messages to requests: frames with a msgpack header, or one JSON frame. The transport's receiver.

Owns: what wire v1's frames mean. Every message gets exactly one reply. Thread: I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.frontend.forms import Form, Frames, Json
from edge_runtime.frontend.infer_frontend import KEEP_FRAME_BYTES, InferFrontend, InferRoute, TransportInquiry
from edge_runtime.transports.zmq_transport import Endpoint, Entry, Peer
from edge_runtime.wire import codec


class ZmqFrontend:
    """The receiver of every infer and control endpoint."""

    def __init__(self, frontend: InferFrontend) -> None:
        self._frontend = frontend

    def routes(self) -> Mapping[bytes, InferRoute]:
        """Known headers, by their bytes."""
        return self._frontend.routes()

    def lot(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        """Answer requests of one known header."""
        self._frontend.lot(endpoint, route, entries)

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> None:
        """Answer anything else: a header not seen before, another op, JSON, REQ, or what a hostile peer sends."""
        first = frames[0]
        is_json = len(frames) == 1 and len(first) > 0 and first.bytes[:1] == b"{"
        request_id = frames[1].bytes if len(frames) > 1 and len(frames[1]) <= codec.MAX_ID_BYTES else b""
        form: Form = Json(None) if is_json else Frames(request_id)
        inquiry = self._frontend.inquiry(endpoint, peer.envelope, form)
        with self._frontend.answering(inquiry):
            if is_json:
                self._json_message(inquiry, first.bytes)
            else:
                _check_framing(frames)
                self._binary_message(inquiry, request_id, first.bytes, frames[2:])

    def _binary_message(
        self, inquiry: TransportInquiry, request_id: bytes, header: bytes, frames: Sequence[Any]
    ) -> None:
        decoded = codec.unpack_request(header)
        tensors = tuple(frame.bytes if len(frame) < KEEP_FRAME_BYTES else frame for frame in frames)
        inquiry.form = Frames(request_id, tensors)
        self._frontend.ask(inquiry, decoded, header)

    def _json_message(self, inquiry: TransportInquiry, frame: bytes) -> None:
        try:
            request = codec.unpack_json_request(frame)
        except EdgeRuntimeError:
            inquiry.form = Json(codec.json_id(frame))
            raise
        inquiry.form = Json(request.id, request.arrays)
        self._frontend.ask(inquiry, request.header, None)


def _check_framing(frames: Sequence[Any]) -> None:
    if len(frames[0]) > codec.MAX_HEADER_BYTES:
        raise DecodeFailed(f"the header is {len(frames[0])} bytes; at most {codec.MAX_HEADER_BYTES} are read")
    if len(frames) < 2:
        raise DecodeFailed("one frame that is no JSON object; wanted a header, an id, and one frame a tensor")
    if len(frames[1]) > codec.MAX_ID_BYTES:
        raise DecodeFailed(f"the id is {len(frames[1])} bytes; at most {codec.MAX_ID_BYTES} are echoed")
