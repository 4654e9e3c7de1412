"""The HTTP door: requests of its protocols, gathered, admitted and refused as those of ZeroMQ are.

Owns: which requests of a round are of known headers and run as a burst, which bodies are prepared beside its thread,
and the rest of a connection that ends. call.py reads heads, answer.py writes responses.
Thread: the transport's; workers and the loader post responses, `edge-http-body` inflates and reads large bodies.

Invariant: a request ends as exactly one response, or with its connection.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from edge_runtime.clock import Clock
from edge_runtime.doors.access.rules import DoorAccess, DoorAddress
from edge_runtime.doors.http.answer import (
    CallReply,
    EventsReply,
    GenerateAnswer,
    HttpEndpoint,
    OipAnswer,
    caller_of,
    error_frames,
    response,
)
from edge_runtime.doors.http.call import (
    INFER,
    MAX_OIP_HEAD_BYTES,
    OPTIONS,
    HttpCall,
    allowed_page,
    inflate,
    read_call,
)
from edge_runtime.doors.http.connection import ALIGNMENT, Frames, HttpConnection, HttpRequest, HttpResponder
from edge_runtime.doors.http.form import read_form
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.joined import JoinedReply
from edge_runtime.doors.http.protocols import CallRequests, HttpProtocol
from edge_runtime.doors.large_bodies import LARGE_JSON_BYTES, LargeBodies
from edge_runtime.doors.open_inference.generate import generate_fields, raw_request
from edge_runtime.doors.open_inference.named_regions import NamedRegions
from edge_runtime.doors.open_inference.operations import OPEN_CALLS, Caller, OpenInference
from edge_runtime.doors.open_inference.request import OipRequest, infer_header
from edge_runtime.errors import (
    DecodeFailed,
    EdgeRuntimeError,
    Forbidden,
    ModelNotFound,
    NotReady,
    NotServed,
    QueueFull,
    RequestError,
    TensorMismatch,
)
from edge_runtime.messages import TEXT, UNNAMED, RequestHeader, TensorHeader, is_picture, is_sound, other_picture
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.request.call_line import WaitingCall
from edge_runtime.request.infer_frontend import InferFrontend, InferRoute
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.plan import named_inputs
from edge_runtime.request.replies import Encoding, OpReply, TransportReply
from edge_runtime.request.request import Request, failure_of
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.tracing import TRACEPARENT, read_traceparent
from edge_runtime.tensors import Array
from edge_runtime.wire import codec, json_codec
from edge_runtime.wire.json_codec import Elements, KnownJson

FORESEEN_BYTES = 64 << 10
"""A body from here on is refused before it is read where the forecast says that its answer would be too late."""

LATE_S = 0.002
"""A request whose head came earlier than this is not part of a burst where it has a deadline."""

STOP_LOOK_S = 0.25
"""How long a stop goes unnoticed by the thread that inflates bodies and waits for room."""

_ID_BEGIN = b'{"id":"'

_FIRST_PRINTED = 0x20
"""JSON text holds no control character."""


class ReadBody(NamedTuple):
    """A body that was read. body: the bytes behind its JSON, Elements, or KnownJson; of another protocol its message.

    fields: of the JSON. error: why it cannot be read. request: of one that was read beside the door's thread, the
    request and its tensors, or of another protocol the servable and its CallRequests; or why there are none.
    """

    body: Any = b""
    fields: Mapping[str, Any] = {}
    error: EdgeRuntimeError | None = None
    request: tuple[Any, Any] | EdgeRuntimeError | None = None


class HttpFrontend:
    """The receiver of the HTTP transport, which `attach` gives it."""

    def __init__(
        self,
        frontend: InferFrontend,
        protocol: OpenInference,
        table: ModelTable,
        access: DoorAccess,
        *,
        clock: Clock,
        metrics: Metrics,
        max_body_bytes: int,
        inflated_bytes: int,
        protocols: Sequence[HttpProtocol] = (),
    ) -> None:
        """frontend: with the encoding BINARY. protocols: beside `protocol`; their paths are looked at first.

        inflated_bytes: of all bodies that were inflated and are not admitted yet.
        """
        self._frontend = frontend
        self._protocol = protocol
        self._table = table
        self._access = access
        self._clock = clock
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._protocols = protocols
        self._inflated = threading.Condition()
        self._inflated_bytes = 0
        self._most_inflated_bytes = inflated_bytes
        self._bodies = LargeBodies("edge-http-body")
        self._transport: HttpResponder
        self._endpoint: HttpEndpoint

    def attach(self, transport: HttpResponder) -> None:
        """Answer by this transport, whose receiver this is."""
        self._transport = transport
        self._access.on_change = lambda: transport.call(transport.forget_heads)
        self._endpoint = HttpEndpoint(transport, self._max_body_bytes)

    def close(self) -> None:
        """End the thread that prepares bodies. After the transport has stopped."""
        self._bodies.close()

    # ---- the transport's receiver -----------------------------------------------------------------------------------

    def understand(self, head: HttpHead) -> None:
        """Read the call of a head. A web page that is listed may read the answer: its browser asks for a header."""
        head.meaning = read_call(head, self._protocols)
        origin = head.headers.get("origin")
        if origin is not None and self._access.is_listed(origin):
            head.adds = allowed_page(head)
            head.is_plain = False
        if self._frontend.tracer is not None and read_traceparent(head.headers.get(TRACEPARENT)) is not None:
            head.meaning.key, head.meaning.is_json = b"", False  # a burst has no request to trace

    def begin(self, request: HttpRequest) -> Frames | None:
        """Refuse by its head a request that cannot be answered, before its body is read."""
        call, refusal = self._admitted(request)
        if refusal is not None or call.name != INFER or "name" not in call.values:
            return refusal
        assert request.head is not None
        name, version, nbytes = call.values["name"], call.version, request.head.length
        try:
            servable = self._table.resolve(name, version)
            if call.takes_pictures or nbytes >= FORESEEN_BYTES:
                inputs = (TensorHeader(UNNAMED, "BYTES", (1,)),) if call.takes_pictures else ()
                header = RequestHeader(model=name, version=version, inputs=inputs, timeout_ms=call.timeout_ms)
                servable = servable.form_for(named_inputs(servable, header))
                self._frontend.foresee(self._endpoint.sender(request), header, nbytes, servable)
            shift = request.head.body_shift
            if shift and (room := servable.room(nbytes + ALIGNMENT)) is not None:
                begin = -shift % ALIGNMENT  # its tensors lie aligned where the host reads them
                request.body = room[begin : begin + nbytes]
        except EdgeRuntimeError as error:
            if isinstance(error, NotReady) and self._table.is_coming(name, version):
                return None  # it waits for its model, with its body
            self._frontend.count_refused(self._endpoint, request, error, name)
            return call.encoding.refusal(error, None)
        return None

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        """Gather requests of known headers into bursts, answer others one by one, then the bursts."""
        frontend = self._frontend
        routes = frontend.routes()
        touched: list[InferRoute] = []
        for request in requests:
            if not request.connection.is_open:
                continue
            try:
                route = self._gather(request, routes) or self._request(request)
                if route is not None and len(route.burst) == 1:
                    touched.append(route)
            except Exception as error:  # noqa: BLE001 (a bug in one request must not lose the gathered ones)
                self._metrics.count("http_errors")
                self._transport.answer(request, error_frames(failure_of(error, "a bug ended a request")))
        self._answer_bursts(touched)

    def _answer_bursts(self, touched: Sequence[InferRoute]) -> None:
        for burst, failed in self._frontend.answer_bursts(self._endpoint, touched):
            self._metrics.count("http_errors")
            for entry in burst:
                if entry[0].frames is None:
                    self._transport.answer(entry[0], error_frames(failed))

    def failure(self, error: EdgeRuntimeError) -> Frames:
        """Write the response to bytes that are not a request."""
        return error_frames(error)

    def gone(self, connection: HttpConnection) -> None:
        """Take back the waiting requests of a connection that has ended."""
        self._frontend.gone(connection)
        for request in connection.waiting:
            for each in request.memory:
                self._frontend.cancel(each)

    def beat(self) -> None:
        """Count answered requests."""
        self._frontend.count_runs()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _gather(self, request: HttpRequest, routes: Mapping[bytes, InferRoute]) -> InferRoute | None:
        """Add a request of a known header before binary tensors to its route's burst; None for any other."""
        assert request.head is not None
        call: HttpCall = request.head.meaning
        size = call.head_bytes
        if not call.key or size is None:
            return None
        body = request.body
        if isinstance(body, memoryview):
            return None
        key, request_id = _without_id(body[:size])
        route = routes.get(call.key + key)
        if route is None or not self._may_join(request, call, route):
            return None
        if len(body) - size == route.single_size:
            route.burst.append((request, request_id, body[size:]))
            return route
        sizes = route.sizes
        if len(sizes) == 1 or len(body) - size != sum(sizes):
            return None
        at, parts = size, []
        for nbytes in sizes:
            parts.append(body[at : at + nbytes])
            at += nbytes
        route.burst.append((request, request_id, tuple(parts)))
        return route

    def _may_join(self, request: HttpRequest, call: HttpCall, route: InferRoute) -> bool:
        """Whether a request may be one of a burst of its route, each of which it could be without being looked at."""
        if call.refusal is not None:
            return False
        if route.plan.timeout_s != math.inf and request.arrived_s < self._clock.monotonic_s() - LATE_S:
            return False  # its deadline counts from its head
        caller = call.callers.get(request.connection.place)
        return isinstance(caller, Caller) and (caller.sender is None or route.plan.inline is not None)

    def _request(self, request: HttpRequest) -> InferRoute | None:
        """Answer one request by itself, or add it to the burst of the route that is returned."""
        call, refusal = self._admitted(request)
        if refusal is not None:
            self._transport.answer(request, refusal)
            return None
        is_text = call.head_bytes is None and not call.is_picture
        if call.protocol is not None and request.head is not None:
            is_text = call.protocol.reads_long(request.body, request.head)
        if call.inflates is None and not (is_text and len(request.body) > LARGE_JSON_BYTES):
            return self._answer(request, call, _read(request, call, self._max_body_bytes))
        try:
            self._bodies.read(
                len(request.body),
                partial(self._prepare, request, call),
                self._transport.call,
                partial(self._prepared, request, call),
            )
        except QueueFull as full:
            self._transport.answer(request, call.encoding.refusal(full, None))
        return None

    def _prepare(self, request: HttpRequest, call: HttpCall) -> tuple[int, ReadBody]:
        """Inflate and read a body: its bytes of those inflated, and all of it. Thread: edge-http-body."""
        inflated_bytes = 0 if call.inflates is None else self._await_room()
        try:
            read = _read(request, call, self._max_body_bytes)
            if read.error is None and call.name == INFER:
                read = self._with_arrays(read, request, call)
        except Exception as bug:  # noqa: BLE001 (its client's answer; failure_of logs it)
            read = ReadBody(error=failure_of(bug, "a body could not be read"))
        if read.error is not None:
            self._free_inflated(inflated_bytes)
            inflated_bytes = 0
        return inflated_bytes, read

    def _with_arrays(self, read: ReadBody, request: HttpRequest, call: HttpCall) -> ReadBody:
        """Make the arrays of a body in JSON, too: those of a large one would hold up the door. Thread: edge-http-body.

        Its route is not looked up: routes are the door's thread's.
        """
        try:
            if call.protocol is not None:
                assert request.head is not None
                servable = self._table.resolve(*call.protocol.model_of(read.body, call))
                asked: Any = servable, call.protocol.requests_of(servable, read.body, request.head, call)
            elif call.head_bytes is None and not isinstance(read.body, Elements):
                asked = self._asked(call, read)
            else:
                return read
        except NotReady:  # the door waits for its model
            return read
        except EdgeRuntimeError as error:
            error.__context__ = None  # as in `_read`
            asked = error.with_traceback(None)
        return read._replace(request=asked)

    def _await_room(self) -> int:
        """Wait until one more body may be inflated, and return its bytes of the bound."""
        nbytes = self._max_body_bytes
        with self._inflated:
            # The transport's thread makes room as it answers, and no longer once it has stopped.
            while self._inflated_bytes + nbytes > self._most_inflated_bytes and not self._transport.is_stopping:
                self._inflated.wait(STOP_LOOK_S)
            self._inflated_bytes += nbytes
        return nbytes

    def _free_inflated(self, nbytes: int) -> None:
        if nbytes:
            with self._inflated:
                self._inflated_bytes -= nbytes
                self._inflated.notify()

    def _prepared(self, request: HttpRequest, call: HttpCall, prepared: tuple[int, ReadBody]) -> None:
        inflated_bytes, read = prepared
        try:
            if request.connection.is_open:
                route = self._answer(request, call, read)
                if route is not None:
                    self._answer_bursts([route])
        finally:
            self._free_inflated(inflated_bytes)

    def _answer(self, request: HttpRequest, call: HttpCall, read: ReadBody) -> InferRoute | None:
        """Answer a request whose body was read, or add it to the burst of the route that is returned."""
        if read.error is not None:
            error = self._first_fault(call, read.error) if call.name == INFER else read.error
            self._frontend.count_refused(self._endpoint, request, error, call.values.get("name", ""))
            self._transport.answer(request, call.encoding.refusal(error, None))
        elif call.name == INFER:
            return self._infer(request, call, read)
        elif call.name == OPTIONS:
            self._transport.answer(request, response((), more="Allow: GET, POST\r\n"))
        else:
            self._call(request, call, read.fields)
        return None

    def _call(self, request: HttpRequest, call: HttpCall, fields: Mapping[str, Any]) -> None:
        """Answer any call but inference; the answer may come later, from any thread."""
        caller = caller_of(request)
        assert caller is not None
        caller = replace(caller, sender=caller.sender or request.connection)
        reply = CallReply(self._frontend, self._endpoint, (request,), call.encoding, None).result
        if call.protocol is None:
            self._protocol.call(call.name, {**fields, **call.values}, caller, reply)
            return
        calls = (call, *(each for each in call.also if each.refusal is None))
        for each, done in zip(calls, _joined_results(len(calls), reply), strict=True):
            assert each.protocol is not None
            try:
                each.protocol.call(each, fields, caller, done)
            except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
                done(failure_of(error, f"{each.name} failed"))

    def _infer(self, request: HttpRequest, call: HttpCall, read: ReadBody) -> InferRoute | None:
        """As `_answer`, for inference."""
        if call.protocol is not None:
            self._infer_by(call.protocol, request, call, read)
            return None
        body = read.body
        known = body if isinstance(body, KnownJson) else None
        key = _text_key(call, read)
        route = self._frontend.routes().get(key) if key is not None else None
        tensors = _known_tensors(route, read) if route is not None else None
        if route is not None and tensors is not None:
            if known is None or read.request is not None or not self._may_join(request, call, route):
                request_id = read.fields.get("id") if known is None else known.id
                self._ask_known(request, route, request_id, tensors, key)
                return None
            route.burst.append((request, known.id or None, tensors[0] if len(tensors) == 1 else tensors))
            return route
        reply = TransportReply(self._frontend, self._endpoint, (request,), call.encoding, b"")
        with self._frontend.answering(reply):
            try:
                if isinstance(read.request, EdgeRuntimeError):
                    raise read.request
                asked, tensors = read.request or self._asked(call, read)
            except RequestError as error:
                raise self._first_fault(call, error) from None
            encoding = self._encoding(call, asked, body)
            if isinstance(encoding, GenerateAnswer) and encoding.is_stream:
                reply = EventsReply(self._frontend, self._endpoint, (request,), encoding, asked.id)
            else:
                reply = TransportReply(self._frontend, self._endpoint, (request,), encoding, asked.id)
            if known is not None and (not asked.is_plain_json or any(asked.input_regions)):
                key = None
            if key is None:
                self._ask(request, reply, asked.header, tensors, self._key(request, call, asked), None)
            else:
                self._ask(request, reply, asked.header, tensors, key, encoding)
        return None

    def _infer_by(
        self, protocol: HttpProtocol, request: HttpRequest, call: HttpCall, read: ReadBody, *, may_wait: bool = True
    ) -> None:
        """Submit the requests of a message of another protocol: one, or several that are answered as one.

        may_wait: for a model that is loading on demand.
        """
        assert request.head is not None
        if not request.connection.is_open:
            return
        reply = TransportReply(self._frontend, self._endpoint, (request,), call.encoding, None)
        with self._frontend.answering(reply):
            if isinstance(read.request, EdgeRuntimeError):
                raise read.request
            model, version = protocol.model_of(read.body, call)
            try:
                servable = self._table.resolve(model, version)
            except NotReady:
                if not (may_wait and self._table.is_coming(model, version)):
                    raise
                header = RequestHeader(model=model, version=version, timeout_ms=call.timeout_ms)
                go_on = partial(self._infer_by, protocol, request, call, read, may_wait=False)
                self._await_model(request, reply, header, go_on)
                return
            asked = read.request[1] if read.request is not None and read.request[0] is servable else None
            if asked is None:
                asked = protocol.requests_of(servable, read.body, request.head, call)
            if len(asked.requests) > 1:
                self._ask_joined(request, asked, servable)
                return
            if not asked.requests:
                joined: Any = asked.encoding
                self._transport.answer(request, joined.join(()))
                return
            ((header, tensors),) = asked.requests
            if getattr(asked.encoding, "is_stream", False):
                encoding: Any = asked.encoding
                reply = EventsReply(self._frontend, self._endpoint, (request,), encoding, None)
            else:
                reply = TransportReply(self._frontend, self._endpoint, (request,), asked.encoding, None)
            self._ask(request, reply, header, tensors, None, None)

    def _await_model(
        self, request: HttpRequest, reply: TransportReply, header: RequestHeader, go_on: Callable[[], None]
    ) -> None:
        """Go on with a request on this thread once its model is loaded, or refuse it."""

        def on_end(error: EdgeRuntimeError | None) -> None:
            if error is None:
                self._transport.call(go_on)
            else:
                self._frontend.count_refused(self._endpoint, request, error, header.model)
                reply.refuse(error)

        self._frontend.await_model(
            self._endpoint, request, header, on_end, nbytes=len(request.body), arrived_s=request.arrived_s
        )

    def _ask_joined(self, request: HttpRequest, asked: CallRequests, servable: Servable) -> None:
        """Submit several requests that are answered as one, at their turn. Raises DeadlineUnmeetable, QueueFull."""

        def submit(part: OpReply, header: RequestHeader, tensors: Sequence[Any]) -> Request | None:
            return self._submit(request, part, header, tensors, None, None)

        def begin() -> None:
            joined.begin()

        def refuse(error: EdgeRuntimeError) -> None:
            self._frontend.count_refused(self._endpoint, request, error, header.model)
            joined.refuse(error)

        header, _ = asked.requests[0]
        asks = servable.form_for(header).scheduled
        runs_s = asks.layout.run_times.predict_s
        work_s = sum(runs_s(each.inputs[0].shape[0] if each.inputs[0].shape else 1) for each, _ in asked.requests)
        line = self._frontend.line(header.model)
        call = WaitingCall(
            header,
            self._endpoint.sender(request),
            len(request.body),
            request.arrived_s,
            asks,
            work_s / max(asks.layout.concurrency, 1),
            begin,
            refuse,
        )
        joined = JoinedReply(
            self._frontend,
            self._endpoint,
            (request,),
            asked,
            submit=submit,
            on_door=self._transport.call,
            on_end=partial(line.end, call),
        )
        request.memory = joined.admitted
        line.join(call)

    def _ask_known(
        self,
        request: HttpRequest,
        route: InferRoute,
        request_id: str | int | None,
        tensors: Sequence[Any],
        key: str | None,
    ) -> None:
        """Submit one request of a known header by itself."""
        reply = TransportReply(self._frontend, self._endpoint, (request,), route.encoding, request_id or None)
        with self._frontend.answering(reply):
            self._ask(request, reply, route.header, tensors, key, route.encoding)

    def _ask(  # noqa: PLR0917 (as `InferFrontend.ask`)
        self,
        request: HttpRequest,
        reply: TransportReply,
        header: RequestHeader,
        tensors: Sequence[Any],
        key: bytes | str | None,
        encoding: Encoding | None,
    ) -> None:
        """Submit one request, a sequence's behind those that came before. key, encoding: as of `InferFrontend.ask`."""
        if header.sequence is not None and self._bodies.has_earlier:
            go_on = partial(self._ask_behind, request, reply, header, tensors, key, encoding)
            self._bodies.behind(len(request.body), self._transport.call, go_on)
            return
        caller = caller_of(request)
        admitted = self._submit(request, reply, header, tensors, key, encoding)
        if admitted is not None and caller is not None and caller.sender is not None:
            request.memory = (admitted,)  # its sender's other connections go on when this one ends

    def _ask_behind(self, request: HttpRequest, reply: TransportReply, *asked: Any) -> None:
        """Go on with a request that let earlier ones go before it."""
        if request.connection.is_open:
            with self._frontend.answering(reply):
                self._ask(request, reply, *asked)

    def _submit(  # noqa: PLR0917 (as `InferFrontend.ask`)
        self,
        request: HttpRequest,
        reply: OpReply,
        header: RequestHeader,
        tensors: Sequence[Any],
        key: bytes | str | None,
        encoding: Encoding | None,
    ) -> Request | None:
        """Submit one request, whose deadline counts from its head. Returns and raises as `InferFrontend.ask`."""
        spent_s = self._clock.monotonic_s() - request.arrived_s
        longest_s = math.inf if header.timeout_ms is None else max(header.timeout_ms / 1e3 - spent_s, 0.0)
        return self._frontend.ask(self._endpoint, request, reply, header, tensors, key, encoding, timeout_s=longest_s)

    def _asked(self, call: HttpCall, read: ReadBody) -> tuple[OipRequest, list[Any]]:
        """Return the request of a call, and its tensors. Raises RequestError. Thread: any."""
        name, version = call.values["name"], call.values.get("version")
        body, fields, may_have_booleans = read.body, read.fields, True
        if isinstance(body, KnownJson):
            body, may_have_booleans = b"", False
        tensors: list[Any] | None = None
        if "generate" in call.values:
            fields = generate_fields(self._table.resolve(name, call.version), fields)
        elif call.head_bytes == 0:
            fields, tensors = raw_request(self._table.resolve(name, call.version), body)
        elif isinstance(body, Elements):
            fields, tensors = {**fields, "inputs": body.inputs()}, [body.array()]
        asked = infer_header(name, version, fields, timeout_ms=call.timeout_ms)
        if tensors is None:
            tensors = _tensors(asked, fields, body, self._protocol.regions, may_have_booleans=may_have_booleans)
        return asked, tensors

    def _first_fault(self, call: HttpCall, error: EdgeRuntimeError) -> EdgeRuntimeError:
        """Return the error of a bad request for inference: that there is no such model or version comes before its own.

        A request whose body is still on its way is refused by that alone, so the answer would depend on its pieces.
        """
        if "name" not in call.values:
            return error
        try:
            self._table.resolve(call.values["name"], call.version)
        except (ModelNotFound, NotServed) as first:
            return first
        except EdgeRuntimeError:
            return error
        return error

    def _encoding(self, call: HttpCall, asked: OipRequest, body: Any) -> Encoding:
        """Choose how a request is answered. body: as `_read` returns it."""
        if "generate" in call.values:
            return GenerateAnswer(call.deflates, is_stream=call.values["generate"] == "generate_stream")
        if isinstance(body, Elements) and not asked.classes and not asked.output_regions:
            return OipAnswer(self._protocol, asked, call.deflates, as_list=body.as_list)
        return OipAnswer(self._protocol, asked, call.deflates)

    def _key(self, request: HttpRequest, call: HttpCall, asked: OipRequest) -> bytes | None:
        """The key by which equal requests are known; None where the next one must be read anew."""
        if not call.key or call.head_bytes is None or isinstance(request.body, memoryview):
            return None
        if asked.input_sizes != codec.frame_sizes(asked.header.inputs):
            return None
        outputs = asked.header.outputs
        is_binary = asked.binary_default if outputs is None else all(map(asked.is_binary, outputs))
        if not is_binary or asked.classes or asked.output_regions or any(asked.input_regions):
            return None
        raw = bytes(request.body[: call.head_bytes])
        key, request_id = _without_id(raw)
        if b'"id"' in key or (asked.id is not None) != bool(request_id):
            return None
        return call.key + key

    # ---- who may ----------------------------------------------------------------------------------------------------

    def _admitted(self, request: HttpRequest) -> tuple[HttpCall, Frames | None]:
        """The call of a request, and why its sender may not make it."""
        head = request.head
        assert head is not None
        call: HttpCall = head.meaning
        place = request.connection.place
        found = call.callers.get(place)
        if found is None:
            found = call.callers[place] = self._check(head, call, place)
        if not isinstance(found, Caller):
            return call, found
        if call.also and call.name == INFER:
            call = next((each for each in call.also if each.protocol is not None and each.protocol.claims(each)), call)
        return call, call.refusal

    def _check(self, head: HttpHead, call: HttpCall, place: DoorAddress) -> Caller | Frames:
        headers = head.headers
        try:
            self._access.check_browser(place, headers.get("origin"), headers.get("host"))
            if call.check is not None:
                call.check(place)
            is_open = call.name in (OPEN_CALLS if call.protocol is None else call.protocol.open_calls)
            if is_open or call.name == OPTIONS:
                return Caller(None, address=place)
            login = self._access.login(head.method, headers)
            rights = self._access.caller(place, headers.get("authorization"), login)
            if call.name == INFER and not rights.may_infer:
                raise Forbidden("this token may not infer; make one with: edge-runtime token add NAME --may infer")
        except EdgeRuntimeError as error:
            return call.encoding.refusal(error, None)
        return Caller(rights.name, rights.may_infer, rights.may_control, rights.may_view, place)


def _joined_results(count: int, reply: Done) -> list[Done]:
    """Return a place for the result of each protocol that answers a call; when all are there, they go out as one.

    A result is an error, or JSON and its status; of a field of several, the first one's counts.
    """
    if count == 1:
        return [reply]
    results: list[Any] = [None] * count
    left, lock = iter(range(count - 1, -1, -1)), threading.Lock()

    def take(index: int, result: Any) -> None:
        results[index] = result
        with lock:
            is_last = next(left) == 0
        if not is_last:
            return
        first, *_ = results
        if not isinstance(first, EdgeRuntimeError):
            told = [each[0] for each in reversed(results) if not isinstance(each, EdgeRuntimeError)]
            first = {key: value for fields in told for key, value in fields.items()}, first[1]
        reply(first)

    return [partial(take, index) for index in range(count)]


def _known_tensors(route: InferRoute, read: ReadBody) -> Sequence[Any] | None:
    """The tensors of a body whose route is known; None where a closer look is due. Those of JSON are packed."""
    if isinstance(read.request, EdgeRuntimeError):
        return None
    if read.request is not None:
        tensors: Sequence[Any] = read.request[1]
        return tensors
    if isinstance(read.body, KnownJson):
        return json_codec.pack_tensors(route.header.inputs, read.body.data)
    return [read.body.array()]


def _text_key(call: HttpCall, read: ReadBody) -> str | None:
    """The key of equal requests in JSON, or with pictures; None where the next one must be read anew.

    It is text, so that no request in binary form has it.
    """
    body = read.body
    if isinstance(body, KnownJson):
        return call.key.decode() + body.text
    if not call.key or not isinstance(body, Elements):
        return None
    request_id = read.fields.get("id")
    if not isinstance(request_id, str | None) or len(request_id or "") > codec.MAX_ID_BYTES:
        return None
    return call.key.decode() + json_codec.known_elements(read.fields, body)


def _read(  # noqa: PLR0911 (a return for each kind of body)
    request: HttpRequest, call: HttpCall, max_bytes: int
) -> ReadBody:
    """Read a body. Raises nothing. Thread: any."""
    try:
        body = request.body if call.inflates is None else inflate(request.body, max_bytes)
        size = call.head_bytes
        if call.protocol is not None and call.name == INFER:
            assert request.head is not None
            return ReadBody(call.protocol.read(body, request.head, call))
        if call.is_json and body[:1] == b"{":
            return _read_json(bytes(body), call, json_codec.MAX_JSON_BYTES)
        head = bytes(body[:64])
        may_be_picture = call.takes_oip and size is None
        if call.is_text and not head.lstrip().startswith(b"{"):
            return ReadBody(Elements((bytes(body),), as_list=False, name=TEXT))
        is_file = may_be_picture and (is_picture(head) or is_sound(head) or other_picture(head))
        if call.takes_pictures or is_file:
            return _read_pictures(body, call)  # curl -d says another type
        if size == 0:
            return ReadBody(body)
        if size is not None:
            if size > len(body):
                raise DecodeFailed(f"inference-header-content-length is {size}, and the body has {len(body)} bytes")
            return ReadBody(body[size:], json_codec.loads(bytes(body[:size]), MAX_OIP_HEAD_BYTES))
        if call.ignores_body or (not len(body) and call.name != INFER):
            return ReadBody()
        return _read_json(bytes(body), call, _json_bound(request, call, max_bytes))
    except EdgeRuntimeError as error:
        # Where it was raised names the body, inflated: it would last until the refusal is sent.
        error.__context__ = None
        return ReadBody(error=error.with_traceback(None))


def _read_json(text: bytes, call: HttpCall, most_bytes: int) -> ReadBody:
    """The Elements or the KnownJson of a body, b"" where it has none, and its fields. Raises DecodeFailed."""
    fields = json_codec.loads(text, most_bytes)
    if "generate" in call.values:
        json_codec.refuse_doubled_keys(text, fields)
    if not call.is_json and not call.takes_oip:
        return ReadBody(b"", fields)
    elements = json_codec.elements_of(fields)
    if elements is not None:
        return ReadBody(elements, fields)
    known = json_codec.cut_known(text, fields) if call.is_json else None
    return ReadBody(b"" if known is None or isinstance(known.id, int) else known, fields)  # an id is text here


def _read_pictures(body: bytes | memoryview, call: HttpCall) -> ReadBody:
    """The pictures that a body is, or has as a form, and the form's fields."""
    if call.boundary is not None:
        return ReadBody(*read_form(body, call.boundary))
    return ReadBody(Elements((body,), as_list=False))


def _json_bound(request: HttpRequest, call: HttpCall, max_bytes: int) -> int:
    """Most bytes of a body that is JSON: whole models come in the one that loads them, from who may load."""
    caller = caller_of(request)
    is_load = call.name == "repository_load" and caller is not None and caller.may_control
    return max_bytes if is_load else json_codec.MAX_JSON_BYTES


def _tensors(
    asked: OipRequest, fields: Mapping[str, Any], body: Any, regions: NamedRegions, *, may_have_booleans: bool
) -> list[bytes | bytearray | memoryview | Array]:
    """Each input's data: its part of the body, an array of its JSON, or a copy out of its region.

    may_have_booleans: as of `array_from_json`. Raises DecodeFailed, TensorMismatch, Unsupported.
    """
    tensors: list[bytes | bytearray | memoryview | Array] = []
    at = 0
    for header, size, region, item in zip(
        asked.header.inputs, asked.input_sizes, asked.input_regions, fields.get("inputs") or (), strict=True
    ):
        if region is not None:
            tensors.append(regions.read(f"input '{header.name}'", region))
            continue
        if size is None:
            tensors.append(json_codec.array_from_json(header, item.get("data"), may_have_booleans=may_have_booleans))
            continue
        if size > len(body) - at:
            raise TensorMismatch(
                f"input {codec.short(header.name)}: binary_data_size is {size}, and the body has {len(body) - at} left"
            )
        tensors.append(body[at : at + size])
        at += size
    if at != len(body):
        raise TensorMismatch(
            f"{len(body) - at} bytes follow the inputs: their sizes do not add up to the body's length"
        )
    return tensors


def _without_id(raw: bytes) -> tuple[bytes, bytes]:
    """The JSON of a request without an id at its beginning, and the id as JSON text; b"" where there is none.

    The text goes into the answer as it is, so one that a reader of JSON has to look at stays where it is.
    """
    if not raw.startswith(_ID_BEGIN):
        return raw, b""
    end = raw.find(b'"', len(_ID_BEGIN))
    if end <= len(_ID_BEGIN) or raw[end + 1 : end + 2] != b"," or end > codec.MAX_ID_BYTES * 4:
        return raw, b""
    before = raw[:end]
    if b"\\" in before or not before.isascii() or min(before) < _FIRST_PRINTED:
        return raw, b""
    return raw[end + 1 :], raw[len(_ID_BEGIN) - 1 : end + 1]
