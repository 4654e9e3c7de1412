"""Answers, results and errors as HTTP responses.

Owns: every byte of a response, compression included, and the endpoint that hands responses to the transport. Pure.
Thread: any, but `send_answers`.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol

from edge_runtime.doors.http.connection import Frames, HttpRequest, HttpResponder
from edge_runtime.doors.http.head import BadMessage
from edge_runtime.doors.open_inference import oip
from edge_runtime.doors.open_inference.generate import generate_answer
from edge_runtime.doors.open_inference.operations import Caller, OpenInference
from edge_runtime.doors.open_inference.request import OipRequest
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import TensorHeader
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.replies import (
    Encoding,
    Entry,
    Shapes,
    TextAnswers,
    TransportReply,
    fields_in_words,
    kept_of,
    timing_fields,
)
from edge_runtime.request.request import Request
from edge_runtime.telemetry.tracing import TRACEPARENT, TraceParent, read_traceparent
from edge_runtime.tensors import Array, array_to_wire
from edge_runtime.wire import codec, json_codec

JSON_TYPE, BINARY_TYPE = "application/json", "application/octet-stream"
EVENTS_TYPE = "text/event-stream; charset=utf-8"

DEFLATE_LEVEL = 1
"""Tensors hardly shrink, and higher levels take several times as long."""

_REASONS = {each.value: each.phrase for each in HTTPStatus} | {499: "Client Closed Request"}

_BINARY_HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: {BINARY_TYPE}\r\nInference-Header-Content-Length: ".encode()


def _deflated(body: Sequence[Any], coding: str) -> bytes:
    deflater = zlib.compressobj(
        DEFLATE_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16 if coding == "gzip" else zlib.MAX_WBITS
    )
    return b"".join([*(deflater.compress(part) for part in body), deflater.flush()])


def response(
    body: Sequence[Any], kind: str = JSON_TYPE, status: int = 200, more: str = "", deflates: str | None = None
) -> Frames:
    """A whole response. more: further headers, each with its line's end."""
    if deflates is not None:
        body = (_deflated(body, deflates),)
        more += f"Content-Encoding: {deflates}\r\n"
    nbytes = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in body)
    head = (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\nContent-Type: {kind}\r\n{more}"
        f"Content-Length: {nbytes}\r\n\r\n"
    ).encode("latin-1")
    return (b"".join((head, *body)),) if nbytes < codec.MAX_HEADER_BYTES else (head, *body)


def json_response(value: Any, status: int = 200, deflates: str | None = None) -> Frames:
    """A result as JSON."""
    return response((json_codec.dumps(value),), status=status, deflates=deflates)


def status_of(error: EdgeRuntimeError) -> int:
    """The status of an error: its own where the message was not HTTP, else that of its code."""
    return error.status if isinstance(error, BadMessage) else oip.error_status(error)[0]


def retry_headers(error: EdgeRuntimeError, status: int) -> str:
    """Return the headers that say when a refused request may come again, each with its line's end; "" for none."""
    if status not in {429, 503} or not error.retryable:
        return ""
    retry_ms = error.retry_after_ms if error.retry_after_ms is not None else 1e3
    return f"Retry-After: {max(math.ceil(retry_ms / 1e3), 1)}\r\nretry-after-ms: {math.ceil(retry_ms)}\r\n"


def error_frames(
    error: EdgeRuntimeError, status: int | None = None, fields: Mapping[str, Any] | None = None, more: str = ""
) -> Frames:
    """An error. status: None for its own. fields: of its body; None: as in the Open Inference Protocol.

    more: further headers, each with its line's end.
    """
    status = status_of(error) if status is None else status
    more += retry_headers(error, status)
    if status == 401:
        more += "WWW-Authenticate: Bearer\r\n"
    elif status == 405:
        more += "Allow: GET, POST\r\n"
    return response((json_codec.dumps(oip.error_body(error) if fields is None else fields),), status=status, more=more)


class OipAnswer:
    """The answer to one request as it asks for it: each output as JSON or in binary form, plain or compressed.

    Its id is text, None without; or JSON text in bytes, b"" without.
    """

    def __init__(
        self,
        protocol: OpenInference | None = None,
        asked: OipRequest | None = None,
        deflates: str | None = None,
        *,
        as_list: bool | None = None,
        tells_readiness: bool = False,
    ) -> None:
        """asked: None: every output in binary form. tells_readiness: the status of a result says whether that is ready.

        as_list: of an answer to pictures or texts, in words but for bare outputs (`raw`); None: none came.
        """
        self._protocol = protocol
        self._asked = asked
        self._is_plain_json = asked is not None and asked.is_plain_json
        self._deflates = deflates
        self._as_list = as_list
        self._tells_readiness = tells_readiness

    def user_id(self, request_id: str | bytes | None) -> str:
        """The id as text."""
        if isinstance(request_id, bytes) and request_id:
            return str(json_codec.loads(b'{"id":' + request_id + b"}")["id"])
        return request_id if isinstance(request_id, str) else ""

    def head(self, plan: RequestPlan) -> TextAnswers | tuple[bytes, bytes]:
        """Return the writer of inline answers; in binary form, head and JSON before the id, and the JSON's rest."""
        assert plan.inline is not None
        if self._is_plain_json:
            return TextAnswers(_json_answers(plan, plan.inline.shapes), self._whole)
        sizes = [cut.size for _, cut in plan.inline.outputs]
        outputs = _binary_outputs(plan.tensor_headers(plan.inline.shapes), sizes)
        servable = plan.servable
        packed = json_codec.dumps(
            {"model_name": servable.model, "model_version": str(servable.number), "outputs": outputs}
        )
        length = len(packed)
        nbytes = length + plan.inline.nbytes
        return b"%s%d\r\nContent-Length: %d\r\n\r\n%s" % (_BINARY_HEAD, length, nbytes, packed), packed[1:]

    def answer(self, request: Request, request_id: Any) -> Frames:
        """A whole response with the outputs that its plan selects, or with the contents of pictures, in words."""
        plan, asked = request.plan, self._asked
        fields = fields_in_words(request, as_list=self._as_list) if self._as_list is not None else None
        if fields is not None:
            named = {} if request_id is None else {"id": request_id}
            timing = {"parameters": timing_fields(request)} if plan.wants_timing else {}
            return json_response({**named, **fields, **timing}, deflates=self._deflates)
        selected = plan.select(request.outputs)
        if self._is_plain_json and plan.is_bare:
            return self._whole(kept_of(plan, selected, _json_answers).pack_arrays(request_id, selected))
        outputs: list[dict[str, Any]] = []
        data: list[Any] = []
        for header, array in self._outputs(plan, selected):
            output = codec.tensor_fields(header)
            outputs.append(output)
            if array is None:
                continue
            if asked is None or asked.is_binary(header.name):
                data.append(array_to_wire(array))
                output["parameters"] = {oip.BINARY_SIZE: memoryview(data[-1]).nbytes}
            else:
                output["data"] = json_codec.array_to_json(header.datatype, array)
        fields = _answer_fields(request, outputs, plan.words(selected))
        if data or asked is None:
            return _binary_response(fields, request_id, data, self._deflates)
        if request_id is not None:
            fields = {"id": request_id, **fields}
        return json_response(fields, deflates=self._deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return error_frames(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        status = oip.readiness_status(result) if self._tells_readiness else 200
        return json_response(result, status, deflates=self._deflates)

    def _outputs(self, plan: RequestPlan, selected: Sequence[Array]) -> Iterable[tuple[TensorHeader, Array | None]]:
        if self._asked is None or self._protocol is None:
            return zip(plan.tensor_headers([array.shape for array in selected]), selected, strict=True)
        return self._protocol.outputs(self._asked, plan, selected)

    def _whole(self, text: bytes) -> Frames:
        return response((text,), deflates=self._deflates)


BINARY, READINESS = OipAnswer(), OipAnswer(tells_readiness=True)


def events_head(kind: str) -> bytes:
    """The head of a response that comes in parts, which nginx would keep back until there are many."""
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nX-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: %s\n\n" % json_codec.dumps(value)


class EventsEncoding(Encoding, Protocol):
    """How answers are written that may come in parts, each at once where the client reads chunks, else together.

    is_stream: whether this one does. kind: the Content-Type then. end: the bytes behind the last part of an answer,
    which follow no error: they say that it is whole.
    """

    is_stream: bool
    kind: str
    end: bytes

    def event(self, request: Request, request_id: Any) -> bytes:
        """Write a part; b"" where there is nothing to tell of it."""
        ...

    def failed_event(self, error: EdgeRuntimeError) -> bytes:
        """Write an error behind parts that have gone."""
        ...


class EventsReply(TransportReply):
    """The reply that has a part for each response. encoding: an EventsEncoding.

    Thread: any; a part that comes behind the end, such as that of a deadline, is left out.
    """

    __slots__ = ("_has_begun", "_has_ended", "_kept", "_lock", "_streams", "_writes")

    def __init__(
        self,
        frontend: InferFrontend,
        endpoint: HttpEndpoint,
        envelope: tuple[HttpRequest],
        encoding: EventsEncoding,
        request_id: Any,
    ) -> None:
        super().__init__(frontend, endpoint, envelope, encoding, request_id)
        self._writes = encoding
        self._kept: list[bytes] = []
        self._lock = threading.Lock()
        self._has_begun = self._has_ended = False
        head = envelope[0].head
        self._streams = head is not None and head.takes_chunks

    def part(self, request: Request) -> None:
        """Send a response; more come."""
        with self._lock:
            made = b"" if self._has_ended else self._event(request)
            if not made:
                return
            if self._streams:
                assert isinstance(self._endpoint, HttpEndpoint)
                head = b"" if self._has_begun else events_head(self._writes.kind)
                self._endpoint.post_part(self._envelope, head + _chunk(made))
            else:
                self._kept.append(made)
            self._has_begun = True

    def answer(self, request: Request) -> None:
        """Send the last response, or where there is none only the end."""
        with self._lock:
            if not self._has_ended:
                self._end((self._event(request) if request.outputs else b"") + self._writes.end)
                self._has_ended = True

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error: as an event, where others came before it."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            if self._has_begun:
                self._end(self._writes.failed_event(error))
            else:
                super().refuse(error)

    def _event(self, request: Request) -> bytes:
        made = self._writes.event(request, self.request_id)
        if self._frontend.listeners:
            self._frontend.tell_of(request)
        return made

    def _end(self, last: bytes) -> None:
        if self._has_begun and self._streams:
            frames: Frames = ((_chunk(last) if last else b"") + b"0\r\n\r\n",)
        else:
            frames = response((*self._kept, last), self._writes.kind)
        self._endpoint.post(self._envelope, frames)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class CallReply(TransportReply):
    """The reply to a call that is not inference. A result may be an `EventStream`, which goes on."""

    __slots__ = ()

    def result(self, result: Any) -> None:
        """Send the result, or the error; or open the stream."""
        if isinstance(result, EventStream):
            assert isinstance(self._endpoint, HttpEndpoint)
            result.open(self._endpoint, self._envelope[0])
        else:
            super().result(result)


class EventStream:
    """A response of server-sent events that goes on until its end or its reader's.

    more: further headers, each with its line's end. Thread: any; one at a time.
    """

    def __init__(self, more: str = "") -> None:
        self._more = more
        self._request: HttpRequest | None = None
        self._endpoint: HttpEndpoint
        self._has_ended = False

    def open(self, endpoint: HttpEndpoint, request: HttpRequest) -> None:
        """Begin as the answer to a request."""
        self._endpoint, self._request = endpoint, request
        head = events_head(EVENTS_TYPE)
        endpoint.post_part((request,), head[:-2] + f"Cache-Control: no-store\r\n{self._more}\r\n".encode())

    @property
    def is_open(self) -> bool:
        """Whether its reader is there."""
        return self._request is not None and self._request.connection.is_open and not self._has_ended

    @property
    def unread_bytes(self) -> int:
        """Bytes that its reader has not taken, beyond what the system holds."""
        return 0 if self._request is None else self._request.connection.unsent_bytes

    def send(self, text: bytes) -> None:
        """Send one or more events."""
        if self._request is not None and not self._has_ended:
            self._endpoint.post_part((self._request,), b"%x\r\n%s\r\n" % (len(text), text))

    def end(self, text: bytes = b"") -> None:
        """Send the last events, and end. Idempotent."""
        if self._request is not None and not self._has_ended:
            self._has_ended = True
            last = b"%x\r\n%s\r\n" % (len(text), text) if text else b""
            self._endpoint.post((self._request,), (last + b"0\r\n\r\n",))

    def drop(self) -> None:
        """Close the connection of a reader that does not read. Idempotent."""
        if self._request is not None and not self._has_ended:
            self._has_ended = True
            self._endpoint.drop(self._request)


class GenerateAnswer:
    """The answer to `generate`, and an event of the answer to `generate_stream`."""

    kind, end = EVENTS_TYPE, b""

    def __init__(self, deflates: str | None, *, is_stream: bool) -> None:
        self.is_stream = is_stream
        self._deflates = deflates

    def user_id(self, request_id: str | None) -> str:
        """The id as text."""
        return request_id or ""

    def answer(self, request: Request, request_id: Any) -> Frames:
        """A whole response with every output."""
        return self.result(self.fields(request, request_id), request_id)

    def event(self, request: Request, request_id: Any) -> bytes:
        """The event of one response."""
        return event(self.fields(request, request_id))

    def failed_event(self, error: EdgeRuntimeError) -> bytes:
        """The event of an error."""
        return event(oip.error_body(error))

    def fields(self, request: Request, request_id: Any) -> dict[str, Any]:
        """The fields of the answer, with every output."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        headers = plan.tensor_headers([array.shape for array in selected])
        outputs = [
            (header.name, json_codec.array_to_json(header.datatype, array))
            for header, array in zip(headers, selected, strict=True)
        ]
        fields = generate_answer(plan.servable, outputs)
        return fields if request_id is None else {"id": request_id, **fields}

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return error_frames(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (it is in the result)
        """Any other result."""
        if not self.is_stream:
            return json_response(result, deflates=self._deflates)
        return response((event(result),), EVENTS_TYPE, deflates=self._deflates)


def _json_answers(plan: RequestPlan, shapes: Shapes) -> json_codec.JsonAnswers:
    servable = plan.servable
    return json_codec.JsonAnswers(servable.model, servable.number, plan.tensor_headers(shapes), says_no_id=False)


def _answer_fields(request: Request, outputs: list[dict[str, Any]], words: Mapping[str, Any] | None) -> dict[str, Any]:
    plan: RequestPlan = request.plan
    fields: dict[str, Any] = {"model_name": plan.servable.model, "model_version": str(plan.servable.number)}
    if plan.wants_timing:
        fields["parameters"] = timing_fields(request)
    if words is not None:
        fields[oip.ANSWER] = words
    return {**fields, "outputs": outputs}


def _binary_outputs(headers: Sequence[TensorHeader], sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {**codec.tensor_fields(header), "parameters": {oip.BINARY_SIZE: size}}
        for header, size in zip(headers, sizes, strict=True)
    ]


def _binary_response(
    fields: dict[str, Any], request_id: Any, data: Sequence[Any], deflates: str | None = None
) -> Frames:
    packed = json_codec.dumps(fields)
    if isinstance(request_id, bytes):  # JSON text, as it came
        packed = b'{"id":' + request_id + b"," + packed[1:] if request_id else packed
    elif request_id is not None:
        packed = b'{"id":' + json_codec.dumps(request_id) + b"," + packed[1:]
    length = f"Inference-Header-Content-Length: {len(packed)}\r\n"
    return response((packed, *data), BINARY_TYPE, more=length, deflates=deflates)


class HttpEndpoint:
    """The endpoint of infer_frontend for HTTP: hands whole responses to the transport."""

    is_control = False
    post_answers = None

    def __init__(self, transport: HttpResponder, max_body_bytes: int) -> None:
        self._transport = transport
        self._max_body_bytes = max_body_bytes

    @property
    def max_frame_bytes(self) -> int:
        """Largest body."""
        return self._max_body_bytes

    def sender(self, request: HttpRequest) -> Hashable:
        """The token's name where there is one, else the connection."""
        caller = caller_of(request)
        return caller.sender if caller is not None and caller.sender is not None else request.connection

    def connection(self, request: HttpRequest) -> Hashable:
        """The connection."""
        return request.connection

    def traceparent(self, request: HttpRequest) -> TraceParent | None:
        """The span of its caller."""
        return read_traceparent(request.head.headers.get(TRACEPARENT)) if request.head is not None else None

    def tell_trace(self, request: HttpRequest, traceparent: str) -> None:
        """Have the response say the span that a request became; its head, which equal ones share, becomes its own."""
        assert request.head is not None
        adds = request.head.adds + f"{TRACEPARENT}: {traceparent}\r\n".encode()
        request.head = replace(request.head, adds=adds, is_plain=False)

    def send_answers(
        self,
        entries: Sequence[Entry],
        head: tuple[bytes, bytes],
        payloads: Sequence[Sequence[bytes]],
        reply_bytes: int,
        /,
    ) -> None:
        """Answer each request in binary form. head: of `OipAnswer`."""
        if len(entries) != len(payloads):
            raise ValueError(f"{len(payloads)} answers for {len(entries)} requests")
        whole, rest = head
        answer = self._transport.answer
        for (request, request_id, _), frames in zip(entries, payloads, strict=True):
            if request_id:
                json_bytes = 7 + len(request_id) + len(rest)
                begin = b'%s%d\r\nContent-Length: %d\r\n\r\n{"id":%s,%s' % (
                    _BINARY_HEAD, json_bytes, json_bytes + reply_bytes, request_id, rest
                )  # fmt: skip
            else:
                begin = whole
            answer(request, (begin + frames[0],) if len(frames) == 1 else (b"".join((begin, *frames)),))

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one response."""
        self._transport.answer(envelope[0], tuple(frames))

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one response from any thread."""
        self._transport.post(envelope[0], tuple(frames))

    def post_part(self, envelope: Sequence[Any], part: bytes) -> None:
        """Send a part of a response from any thread."""
        self._transport.post_part(envelope[0], part)

    def drop(self, request: HttpRequest) -> None:
        """Close the connection of a request from any thread."""
        self._transport.drop(request.connection)


def caller_of(request: HttpRequest) -> Caller | None:
    """The caller of a request, checked when its head came; None where it may not call."""
    assert request.head is not None
    found = request.head.meaning.callers.get(request.connection.place)
    return found if isinstance(found, Caller) else None
