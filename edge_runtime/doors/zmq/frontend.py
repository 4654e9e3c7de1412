"""Makes requests of ZeroMQ messages: frames with a msgpack header, or one JSON frame. The transport's receiver.

Owns: the meaning of wire v1's frames. Every message gets exactly one reply. Thread: I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_runtime.doors.zmq.transport import Endpoint, Peer
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.request.infer_frontend import InferFrontend, InferRoute
from edge_runtime.request.replies import FRAMES, JSON, PartsReply, TransportReply, json_encoding
from edge_runtime.wire import codec, json_codec


class ZmqFrontend:
    """The receiver of every infer and control endpoint."""

    def __init__(self, frontend: InferFrontend) -> None:
        self._frontend = frontend
        # On the path of every request, and the same for every transport.
        self.routes = frontend.routes
        self.answer_burst = frontend.answer_burst
        self.gone = frontend.gone
        self.unheard = frontend.unheard
        self.owes = frontend.owes

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> InferRoute | None:
        """Answer any other message: a new header, another op, JSON, REQ, or a malformed one.

        JSON with a known header joins a burst instead: that of the route that is returned.
        """
        first = frames[0]
        is_json = len(frames) == 1 and len(first) > 0 and first[:1] == b"{"
        encoding, own_id = (JSON, None) if is_json else (FRAMES, _request_id(frames))
        reply = TransportReply(self._frontend, endpoint, peer.envelope, encoding, own_id)
        with self._frontend.answering(reply):
            if is_json:
                return self._json_message(endpoint, peer, reply, first)
            _check_framing(frames)
            self._binary_message(endpoint, peer, reply, frames)
        return None

    def refuse(self, endpoint: Endpoint, peer: Peer, frames: list[Any], error: EdgeRuntimeError) -> None:
        """Answer a message that is too large: `frames` are its header, and its id where it has one."""
        reply = TransportReply(self._frontend, endpoint, peer.envelope, FRAMES, _request_id(frames))
        with self._frontend.answering(reply):
            raise error

    def _binary_message(self, endpoint: Endpoint, peer: Peer, reply: TransportReply, frames: Sequence[Any]) -> None:
        header = bytes(frames[0])
        decoded = codec.unpack_request(header)
        tensors, sequence, traceparent = frames[2:], None, None
        if decoded.has_extra:
            if not tensors:
                raise DecodeFailed("extra: the header announces a frame behind the tensors, and none came")
            (sequence, traceparent), tensors = codec.unpack_extra(tensors[-1]), tensors[:-1]
        if decoded.stream and decoded.op == "infer":
            reply = PartsReply(self._frontend, endpoint, peer.envelope, FRAMES, reply.request_id)
        said: dict[str, Any] = {"sequence": sequence, "traceparent": traceparent}
        self._frontend.ask(endpoint, peer.envelope[0], reply, decoded, tensors, header, **said)

    def _json_message(self, endpoint: Endpoint, peer: Peer, reply: TransportReply, frame: Any) -> InferRoute | None:
        text, key = bytes(frame), None
        try:
            fields = json_codec.loads(text)
            known = json_codec.cut_known(text, fields) if len(peer.envelope) == 1 else None
            if known is not None:
                key, request_id, data = known
                route = self._frontend.routes().get(key)
                tensors = json_codec.pack_tensors(route.header.inputs, data) if route is not None else None
                if route is not None and tensors is not None:
                    route.burst.append((peer.envelope[0], request_id, tensors[0] if len(tensors) == 1 else tensors))
                    return route
            decoded = json_codec.unpack_json_request(text, fields)
        except EdgeRuntimeError:
            reply.request_id = json_codec.json_id(text)
            raise
        reply.request_id, reply.encoding = decoded.id, json_encoding(decoded.elements)
        if decoded.header.stream and decoded.header.op == "infer":
            encoding = json_encoding(decoded.elements)
            reply = PartsReply(self._frontend, endpoint, peer.envelope, encoding, decoded.id)
        if decoded.elements is not None:
            key = json_codec.known_elements(fields, decoded.elements)
        self._frontend.ask(endpoint, peer.envelope[0], reply, decoded.header, decoded.arrays, key, reply.encoding)
        return None


def _request_id(frames: Sequence[Any]) -> bytes:
    """The id to echo; empty where there is none that can be."""
    return bytes(frames[1]) if len(frames) > 1 and len(frames[1]) <= codec.MAX_ID_BYTES else b""


def _check_framing(frames: Sequence[Any]) -> None:
    if len(frames[0]) > codec.MAX_HEADER_BYTES:
        raise DecodeFailed(f"the header is {len(frames[0])} bytes; at most {codec.MAX_HEADER_BYTES} are read")
    if len(frames) < 2:
        raise DecodeFailed("one frame that is not a JSON object; wanted a header, an id, and one frame a tensor")
    if len(frames[1]) > codec.MAX_ID_BYTES:
        raise DecodeFailed(f"the id is {len(frames[1])} bytes; at most {codec.MAX_ID_BYTES} are echoed")
