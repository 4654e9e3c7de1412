"""The methods of the gRPC door: calls become requests, replies become answers or statuses.

Owns: the meaning of each method, the waits of a call, and its end. message.py reads and writes messages,
doors/open_inference/operations.py answers all but inference. Thread: the transport's; workers and others post replies.

Invariant: a call ends as exactly one answer or status; a stream's request as exactly one last message.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from edge_runtime.clock import Clock
from edge_runtime.doors.access.rules import DoorAccess, DoorAddress
from edge_runtime.doors.grpc.http2 import GrpcCall
from edge_runtime.doors.grpc.http2_head import trailer
from edge_runtime.doors.grpc.message import (
    CODE,
    FINAL_MARK,
    PROTOBUF,
    RAW_OUTPUT,
    CutRequest,
    ExtendedEncoding,
    ReadRequest,
    answer_head,
    cut_request,
    empty_answer,
    find_tensor,
    id_field,
    read_request,
    stream_answer,
    stream_error,
    varint,
)
from edge_runtime.doors.grpc.protobuf_messages import (
    HEALTH_METHODS,
    METHODS,
    SERVICE,
    HealthRequest,
    HealthResponse,
    Method,
)
from edge_runtime.doors.grpc.transport import GrpcMethod, GrpcTransport
from edge_runtime.doors.open_inference.oip import error_status
from edge_runtime.doors.open_inference.operations import OPEN_CALLS, Caller, OpenInference
from edge_runtime.doors.open_inference.request import OipRequest
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, Forbidden, RunFailed, Unauthenticated
from edge_runtime.messages import RequestHeader
from edge_runtime.protobufs import packed, plain, read
from edge_runtime.request.infer_frontend import InferFrontend, InferRoute
from edge_runtime.request.replies import Entry, TransportReply
from edge_runtime.request.request import Request
from edge_runtime.telemetry.tracing import TRACEPARENT, TraceParent
from edge_runtime.wire.codec import MAX_ID_BYTES

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Of tensors where a host reads them, as much as any library may want."""

AMPLE_S = 0.05
"""With so much time left a request of an inline model needs no look at its deadline: its run takes under 0.2 ms."""

STREAM_WAITING = 256
"""Requests of one stream that wait for their answers; no more is read from it until some have gone out."""

UNREAD_BYTES, PART_BYTES = 64 << 20, 512
"""Of the responses to one request that wait for their caller to read: more end it, as of a ZeroMQ connection. And what
one costs beside its bytes. No thread waits for that caller: the run's is as a rule the one that serves all doors."""

WATCH_S = 0.5
"""Between two looks for a change, for watchers of health."""

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata with the delay for gRPC's own retries; -1: not at all."""

RETRY_MS = 1000.0
"""Told where there is no forecast, as over HTTP: clients take less for the pause of a start, and wait through it."""


class PendingCall:
    """One request that waits for its answers; the receiver of its call where that has no stream of them.

    caller: who calls, once that was looked up. request: its request, from when there is one until it is answered.
    has_ended: its last answer has come. id_field: its id, as an answer has it. stream: in whose order its answers go;
    answers: those that have not gone yet. put_bytes, written_bytes: of its parts, by the run's thread, and of those
    that have gone out, by the transport's.
    """

    __slots__ = (
        "answers", "call", "caller", "has_ended", "id_field", "known", "put_bytes", "request", "stream", "wants_final",
        "written_bytes",
    )  # fmt: skip

    def __init__(self, call: GrpcCall, stream: RequestStream | None = None) -> None:
        self.call = call
        self.stream = stream
        self.answers: deque[tuple[Any, bool]] | None = None if stream is None else deque()
        self.caller: Caller | None = None
        self.request: Request | None = None
        self.known: KnownHead | None = None
        self.id_field = b""
        self.wants_final = self.has_ended = False
        self.put_bytes = self.written_bytes = 0

    @property
    def sender(self) -> Hashable:
        """The key of its queue: its token's name, or its connection."""
        if self.caller is not None:
            return self.caller.sender
        peer: str = self.call.connection.owner.peer
        return peer

    def put(self, answer: Any, *, is_last: bool = True) -> None:
        """Send an answer's bytes, or the error that it ends with. Thread: the transport's."""
        if is_last:  # a request holds its reply, which holds this
            self.has_ended, self.request = True, None
        if self.stream is not None:
            assert self.answers is not None
            self.answers.append((answer, is_last))
            self.stream.advance()
            return
        call = self.call
        call.receiver = None
        if isinstance(answer, bytes):
            call.answer(answer)
        else:
            _refuse(call, answer)

    def gone(self) -> None:
        """Take back a request whose caller does not wait any more."""
        self.call.receiver = None
        self.cancel()

    def cancel(self) -> None:
        """Take its request back, where that waits."""
        request, self.request, self.has_ended = self.request, None, True
        if request is not None:
            InferFrontend.cancel(request)

    def ended(self) -> None:
        """Nothing: one message was all."""

    def may_write(self) -> None:
        """Nothing: one answer is all."""


class RequestStream:
    """The requests of one stream, answered in their order, each with one message or several; errors do not end it."""

    def __init__(self, call: GrpcCall, resume: Callable[[GrpcCall], None]) -> None:
        self.waiting: deque[PendingCall] = deque()
        self._call = call
        self._resume = resume
        self._has_ended = self._is_paused = self._is_full = self._is_advancing = False

    def add(self, pending: PendingCall) -> None:
        """Have a request wait for its answers."""
        self.waiting.append(pending)
        if len(self.waiting) >= STREAM_WAITING and not self._is_paused:
            self._is_paused = True
            self._call.pause()
        self.advance()

    def advance(self) -> None:
        """Send the answers whose turn it is, as far as the caller reads them."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while not self._is_full and self._send_next():
                pass
        finally:
            self._is_advancing = False
        if self._has_ended and not self.waiting:
            self._call.receiver = None
            self._call.end()
        elif self._is_paused and len(self.waiting) < STREAM_WAITING:
            self._is_paused = False
            self._resume(self._call)

    def ended(self) -> None:
        """End once all is answered."""
        self._has_ended = True
        self.advance()

    def may_write(self) -> None:
        """Go on with answers: the caller reads again."""
        self._is_full = False
        self.advance()

    def gone(self) -> None:
        """Take back the requests that wait."""
        self._call.receiver = None
        waiting = list(self.waiting)
        self.waiting.clear()
        for pending in waiting:
            pending.cancel()

    def _send_next(self) -> bool:
        """Send the next answer; return whether there was one."""
        pending = self.waiting[0] if self.waiting else None
        if pending is None or not pending.answers:
            return False
        answer, is_last = pending.answers.popleft()
        message = _stream_message(pending, answer, is_last=is_last)
        if message:
            self._is_full = not self._call.write(message)
        if isinstance(answer, bytes):
            pending.written_bytes += len(answer) + PART_BYTES
        if is_last:
            self.waiting.popleft()
        return True


class HealthWatch:
    """A call that receives each change of the server's health; the receiver of its call. told: the last status."""

    def __init__(self, call: GrpcCall, watches: set[HealthWatch]) -> None:
        self.told = 0
        self._call = call
        self._watches = watches
        watches.add(self)

    def tell(self, status: int) -> None:
        """Send a status that differs from the last."""
        if status != self.told:
            self.told = status
            self._call.write(HealthResponse(status=status).SerializeToString())

    def gone(self) -> None:
        """Tell no more."""
        self._call.receiver = None
        self._watches.discard(self)

    def ended(self) -> None:
        """Nothing: its one message has come."""

    def may_write(self) -> None:
        """Nothing: a status is small."""


class KnownHead(NamedTuple):
    """The kept parts of a known head.

    answer: of an inline model, the bytes before each tensor of its answer, fields included; protobuf reads fields in
    any order, and an id comes last.
    """

    oip: OipRequest
    wants_final: bool
    answer: tuple[bytes, ...]


class NoMore(NamedTuple):
    """The end of a request's answers, in none of them. message: for a caller that asks for a mark of the end."""

    message: bytes


class StreamReply(TransportReply):
    """The reply to a request on a stream: one message a response."""

    def part(self, request: Request) -> None:
        """Send a response; more come. Raises RunFailed: its caller does not read them."""
        pending: PendingCall = self._envelope[0]
        if pending.put_bytes - pending.written_bytes > UNREAD_BYTES:
            raise RunFailed("its caller does not read the responses on its stream")
        message = self.encoding.answer(request, self.request_id)[0]
        if self._frontend.listeners:
            self._frontend.tell_of(request)
        pending.put_bytes += len(message) + PART_BYTES
        self._put(message, is_last=False)

    def answer(self, request: Request) -> None:
        """Send the last response, or where there is none only the end."""
        if request.outputs:
            super().answer(request)
        else:
            self._put(NoMore(empty_answer(request.plan, self.request_id)), is_last=True)

    def _put(self, message: Any, *, is_last: bool) -> None:
        assert isinstance(self._endpoint, GrpcEndpoint)
        self._endpoint.post_part(self._envelope, message, is_last=is_last)


class GrpcEndpoint:
    """The endpoint of infer_frontend for gRPC: hands replies to the calls that wait for them."""

    is_control = False
    post_answers = None

    def __init__(self, transport: GrpcTransport, max_message_bytes: int) -> None:
        self._transport = transport
        self.max_frame_bytes = max_message_bytes

    def sender(self, pending: PendingCall) -> Hashable:
        """The key of its queue."""
        return pending.sender

    def connection(self, pending: PendingCall) -> None:  # noqa: ARG002 (as the protocol has it)
        """None: memory is named by the protocol's own regions."""
        return

    def traceparent(self, pending: PendingCall) -> TraceParent | None:
        """The span of its caller; the requests of a stream share it."""
        return pending.call.head.traceparent

    def tell_trace(self, pending: PendingCall, traceparent: str) -> None:
        """Have a call's trailers say the span that its request became; those of a stream are of many."""
        if pending.stream is None:
            pending.call.told = trailer(TRACEPARENT, traceparent)

    def send_answers(
        self,
        entries: Sequence[Entry],
        header: bytes,  # noqa: ARG002 (of frames)
        payloads: Sequence[Sequence[bytes]],
        reply_bytes: int,  # noqa: ARG002 (HTTP/2 holds back who does not read)
    ) -> None:
        """Answer requests of one known head."""
        if len(entries) != len(payloads):
            raise ValueError(f"{len(payloads)} answers for {len(entries)} requests")
        before = entries[0][0].known.answer
        if len(before) == 1:
            (head,) = before
            for (pending, request_id, _), tensors in zip(entries, payloads, strict=True):
                pending.put(head + tensors[0] + request_id)
            return
        for (pending, request_id, _), tensors in zip(entries, payloads, strict=True):
            parts = [part for pair in zip(before, tensors, strict=True) for part in pair]
            pending.put(b"".join((*parts, request_id)))

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Hand over one reply."""
        envelope[0].put(frames[0])

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Hand over one reply from any thread, behind the parts that were handed over before it."""
        if self._transport.is_own_thread and not envelope[0].put_bytes:
            envelope[0].put(frames[0])
        else:
            self._transport.call(partial(envelope[0].put, frames[0]))

    def post_call(self, answer: Callable[[Any], None], result: Any) -> None:
        """Hand over the result of a call that is not a request, from any thread."""
        if self._transport.is_own_thread:
            answer(result)
        else:
            self._transport.call(partial(answer, result))

    def post_part(self, envelope: Sequence[Any], message: Any, *, is_last: bool) -> None:
        """Hand over one of several replies from any thread."""
        self._transport.call(partial(envelope[0].put, message, is_last=is_last))


class GrpcFrontend:
    """The methods of one door."""

    def __init__(
        self,
        frontend: InferFrontend,
        protocol: OpenInference,
        access: DoorAccess,
        clock: Clock,
        *,
        max_message_bytes: int,
    ) -> None:
        self._frontend = frontend
        self._protocol = protocol
        self._access = access
        self._has_tokens = access.has_tokens
        self._monotonic_s = clock.monotonic_s
        self._max_message_bytes = max_message_bytes
        self._endpoint: GrpcEndpoint | None = None
        self._transport: GrpcTransport | None = None
        self._touched: list[InferRoute] = []
        self._watches: set[HealthWatch] = set()
        self._look_due_s = 0.0
        self.methods: Mapping[str, GrpcMethod] = {
            **{
                METHODS[name].path: GrpcMethod(partial(self._call, METHODS[name], *rest))
                for name, rest in _CALLS.items()
            },
            METHODS["ModelInfer"].path: GrpcMethod(self._infer, room=self._room),
            METHODS["ModelStreamInfer"].path: GrpcMethod(self._infer_in_stream, is_stream=True, room=self._room),
            HEALTH_METHODS["Check"].path: GrpcMethod(self._check),
            HEALTH_METHODS["Watch"].path: GrpcMethod(self._watch),
        }

    def attach(self, transport: GrpcTransport) -> None:
        """Answer by this transport. Before it starts."""
        self._transport = transport
        self._endpoint = GrpcEndpoint(transport, self._max_message_bytes)

    def beat(self) -> None:
        """Count inline runs, and look for a change of health."""
        self._frontend.count_runs()
        now_s = self._monotonic_s()
        if self._watches and now_s >= self._look_due_s:
            self._look_due_s = now_s + WATCH_S
            self._ask_health(SERVICE, self._tell_watches)

    def end_round(self) -> None:
        """Answer the bursts of this round."""
        if not self._touched:
            return
        assert self._endpoint is not None
        touched, self._touched = self._touched, []
        for burst, error in self._frontend.answer_bursts(self._endpoint, touched):
            for pending, _, _ in burst:
                pending.put(error)

    # ---- inference --------------------------------------------------------------------------------------------------

    def _infer(self, data: Any, call: GrpcCall) -> None:
        self._submit(data, PendingCall(call), TransportReply)

    def _infer_in_stream(self, data: Any, call: GrpcCall) -> None:
        stream = cast("RequestStream | None", call.receiver)
        if stream is None:
            assert self._transport is not None
            stream = call.receiver = RequestStream(call, self._transport.resume)
        pending = PendingCall(call, stream)
        self._submit(data, pending, StreamReply)
        stream.add(pending)

    def _submit(self, data: Any, pending: PendingCall, reply_of: type[TransportReply]) -> None:
        """Make a request of a message; however it ends, its answer is put to `pending`."""
        assert self._endpoint is not None
        call = pending.call
        left_s = call.time_left_s()
        cut = cut_request(data)
        if cut is not None and len(cut.id) > MAX_ID_BYTES:
            cut = None
        route = self._frontend.routes().get(cut.head) if cut is not None else None
        known: KnownHead | None = route.kept if route is not None else None
        if cut is not None:
            pending.id_field = cut.id
        if known is not None and route is not None and cut is not None:
            pending.known, pending.wants_final = known, known.wants_final
            may_join = call.head.traceparent is None or self._frontend.tracer is None
            if may_join and not self._has_tokens and _fits(route, cut) and self._may_join(route, left_s):
                self._gather(pending, route, cut)
                return
        if pending.stream is None:
            call.receiver = pending
        reply = reply_of(self._frontend, self._endpoint, (pending,), PROTOBUF, pending.id_field)
        with self._frontend.answering(reply):
            caller = pending.caller = self._caller(call)
            if not caller.may_infer:
                raise Forbidden("this token may not infer; give it the right: edge-runtime token add NAME --may infer")
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("the deadline was over when the request came")
            oip: OipRequest
            tensors: Sequence[Any]
            if known is not None and cut is not None:
                oip, tensors = known.oip, cut.tensors
            else:
                oip, tensors, pending.wants_final = self._read(data, route)
                pending.id_field = reply.request_id = id_field(oip.id)
                if cut is not None and len(cut.tensors) != len(oip.header.inputs):
                    cut = None  # typed contents lie in its head, so no other request has it
            if oip.classes or oip.output_regions or any(oip.input_regions):
                cut = None  # its head alone does not say what to answer
                encoding = ExtendedEncoding(self._protocol, oip)
                reply = reply_of(self._frontend, self._endpoint, (pending,), encoding, pending.id_field)
                tensors = self._with_regions(oip, tensors)
            self._ask(pending, reply, oip.header, tensors, cut.head if cut is not None else None)

    def _ask(
        self,
        pending: PendingCall,
        reply: TransportReply,
        header: RequestHeader,
        tensors: Sequence[Any],
        key: bytes | None,
    ) -> None:
        """Submit one request, a sequence's behind those that came before. key: as of `InferFrontend.ask`."""
        assert self._endpoint is not None
        assert self._transport is not None
        if not pending.call.is_open:
            return
        with self._frontend.answering(reply):
            bodies = self._transport.bodies
            if header.sequence is not None and bodies.has_earlier:
                again = partial(self._ask, pending, reply, header, tensors, key)
                bodies.behind(sum(map(len, tensors)), self._transport.call, again)
                return
            deadline_s = pending.call.deadline_s
            left_s = math.inf if deadline_s is None else max(deadline_s - self._monotonic_s(), 0.0)
            request = self._frontend.ask(
                self._endpoint,
                pending,
                reply,
                header,
                tensors,
                key,
                timeout_s=left_s,
            )
            if not pending.has_ended:
                pending.request = request

    def _room(self, call: GrpcCall, first: bytes, length: int) -> memoryview | None:
        """Memory for a large request of a known head, where the model's host reads its tensor in place."""
        tensor = find_tensor(first, length)
        route = self._frontend.routes().get(tensor.head) if tensor is not None else None
        if tensor is None or route is None or route.single_size != tensor.nbytes or not self._may_infer(call):
            return None
        room = route.plan.servable.room(length + ALIGNMENT)
        begin = -tensor.begin % ALIGNMENT
        return None if room is None else room[begin : begin + length]

    def _may_infer(self, call: GrpcCall) -> bool:
        try:
            return not self._has_tokens or self._caller(call).may_infer
        except Unauthenticated:
            return False  # as its request will be told

    def _with_regions(self, oip: OipRequest, tensors: Sequence[Any]) -> list[Any]:
        """The tensors of all inputs; `tensors` are those in no region. Raises RegionNotFound, TensorMismatch."""
        left = iter(tensors)
        return [
            next(left) if region is None else self._protocol.regions.read(f"input '{header.name}'", region)
            for header, region in zip(oip.header.inputs, oip.input_regions, strict=True)
        ]

    def _read(self, data: Any, route: InferRoute | None) -> ReadRequest:
        """Decode a request, and keep its facts with its route, where there is one."""
        found = read_request(bytes(data))
        if route is not None and route.kept is None:
            plan = route.plan
            answer: list[bytes] = []
            if plan.inline is not None:
                answer = [RAW_OUTPUT + varint(row.size) for _, row in plan.inline.outputs]
                answer[0] = answer_head(plan, plan.inline.shapes) + answer[0]
            route.kept = KnownHead(found.oip, found.wants_final, tuple(answer))
        return found

    def _may_join(self, route: InferRoute, left_s: float | None) -> bool:
        """Whether a request may be one of a burst, which has no deadline of its call, and is not taken back with it."""
        if route.plan.inline is not None:
            return left_s is None or left_s > AMPLE_S
        return left_s is None and self._frontend.runs_together(route)

    def _gather(self, pending: PendingCall, route: InferRoute, cut: CutRequest) -> None:
        """Add a request to the burst of its head; the requests that one round brings run together."""
        tensors = cut.tensors
        route.burst.append((pending, cut.id, tensors[0] if len(tensors) == 1 else tuple(tensors)))
        if len(route.burst) == 1:
            self._touched.append(route)

    def _caller(self, call: GrpcCall) -> Caller:
        """Find the caller's rights. Raises Unauthenticated."""
        connection, head = call.connection.owner, call.head
        place: DoorAddress = connection.place
        if self._has_tokens and head.authorizations > 1:  # a proxy might have looked at another
            raise Unauthenticated("authorization came twice; send one token")
        rights = self._access.caller(place, head.authorization if self._has_tokens else None)
        return Caller(rights.name or connection.peer, rights.may_infer, rights.may_control)

    # ---- every other call -------------------------------------------------------------------------------------------

    def _call(self, method: Method, name: str, shape: Callable[[Any], Any], data: Any, call: GrpcCall) -> None:
        """Answer a call of the protocol but inference. shape: makes gRPC's fields of the result."""
        assert self._endpoint is not None
        try:
            values = plain(read(method.request, bytes(data)))
            if "model_name" in values:
                values["name"] = values.pop("model_name")
            for key, value in values.pop("settings", {}).items():
                values[key] = value.get("value") if isinstance(value, dict) else value
            caller = Caller(None) if name in OPEN_CALLS else self._caller(call)
            answer = partial(self._answer_call, method, name, shape, call)
            self._protocol.call(name, values, caller, partial(self._endpoint.post_call, answer))
        except EdgeRuntimeError as error:
            _refuse(call, error)
        except Exception as error:
            log.exception("%s failed", name)
            _refuse(call, RunFailed(f"{name} failed: {type(error).__name__}: {error}"))

    @staticmethod
    def _answer_call(method: Method, name: str, shape: Callable[[Any], Any], call: GrpcCall, result: Any) -> None:
        if isinstance(result, EdgeRuntimeError):
            _refuse(call, result)
            return
        try:
            call.answer(packed(method.response, shape(result)))
        except Exception as error:
            log.exception("%s failed", name)
            _refuse(call, RunFailed(f"{name} failed: {type(error).__name__}: {error}"))

    # ---- health -----------------------------------------------------------------------------------------------------

    def _check(self, data: Any, call: GrpcCall) -> None:
        try:
            service = read(HealthRequest, bytes(data)).service
        except EdgeRuntimeError as error:
            _refuse(call, error)
            return
        self._ask_health(service, partial(self._answer_check, call))

    @staticmethod
    def _answer_check(call: GrpcCall, status: int) -> None:
        if status == SERVICE_UNKNOWN:
            call.end("NOT_FOUND", f"wanted service '' or {SERVICE!r}")
        else:
            call.answer(HealthResponse(status=status).SerializeToString())

    def _watch(self, data: Any, call: GrpcCall) -> None:
        try:
            service = read(HealthRequest, bytes(data)).service
        except EdgeRuntimeError as error:
            _refuse(call, error)
            return
        known = service in ("", SERVICE)
        watch = call.receiver = HealthWatch(call, self._watches if known else set())
        self._ask_health(service, watch.tell)

    def _tell_watches(self, status: int) -> None:
        for each in list(self._watches):
            each.tell(status)

    def _ask_health(self, service: str, tell: Callable[[int], None]) -> None:
        """Tell the status of a service, on this thread. Everyone may ask: probes have no tokens."""
        if service not in ("", SERVICE):
            tell(SERVICE_UNKNOWN)
            return
        assert self._endpoint is not None
        answer = partial(_tell_health, tell)
        self._protocol.call("server_ready", {}, Caller(None), partial(self._endpoint.post_call, answer))


def _tell_health(tell: Callable[[int], None], result: Any) -> None:
    tell(SERVING if isinstance(result, dict) and result.get("ready") else NOT_SERVING)


def _fits(route: InferRoute, cut: CutRequest) -> bool:
    """Whether each tensor has the length that the head says."""
    tensors = cut.tensors
    if len(tensors) == 1:
        return route.single_size == len(tensors[0])
    return len(tensors) == len(route.sizes) and all(map(int.__eq__, map(len, tensors), route.sizes))


def _refuse(call: GrpcCall, error: EdgeRuntimeError) -> None:
    _, status = error_status(error)
    metadata = [(CODE, error.code)]
    if error.retryable:
        metadata.append((PUSHBACK, str(max(round(error.retry_after_ms or RETRY_MS), 1))))
    call.end(status, error.message, metadata)


def _stream_message(pending: PendingCall, answer: Any, *, is_last: bool) -> bytes:
    """A message of a stream; empty where nothing is to be sent."""
    if isinstance(answer, NoMore):
        return stream_answer(answer.message + FINAL_MARK) if pending.wants_final else b""
    if not isinstance(answer, bytes):
        return stream_error(answer, pending.id_field, has_code=pending.wants_final)
    return stream_answer(answer + FINAL_MARK if pending.wants_final and is_last else answer)


# ---- the results of calls, as gRPC has them -------------------------------------------------------------------------


def _same(result: Any) -> Any:
    return result


def _listed(key: str) -> Callable[[Any], Any]:
    """A list, which gRPC has as a field."""
    return lambda result: {key: result} if isinstance(result, list) else result


def _regions(result: Any) -> Any:
    """A list of regions, which gRPC has as a map by name."""
    return {"regions": {each["name"]: each for each in result}}


def _trace_settings(result: Any) -> Any:
    return {
        "settings": {
            key: {"value": [str(each) for each in value] if isinstance(value, list) else [str(value)]}
            for key, value in result.items()
        }
    }


def _log_settings(result: Any) -> Any:
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {key: {kinds[type(value)]: value} for key, value in result.items()}}


def _snake(name: str) -> str:
    """ServerLive -> server_live."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


_SHAPES: dict[str, Callable[[Any], Any]] = {
    "ModelConfig": lambda result: {"config": result},
    "RepositoryIndex": _listed("models"),
    "SystemSharedMemoryStatus": _regions,
    "CudaSharedMemoryStatus": _regions,
    "TraceSetting": _trace_settings,
    "LogSettings": _log_settings,
}

_CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    name: (_snake(name).replace("repository_model_", "repository_"), _SHAPES.get(name, _same))
    for name in METHODS
    if name not in ("ModelInfer", "ModelStreamInfer")
}
"""Each method's name for `OpenInference.call`, and the function that makes gRPC's fields of the result."""
