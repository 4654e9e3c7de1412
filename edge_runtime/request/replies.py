"""How requests are answered: where a reply goes, and its encoding, the same as of its request.

Owns: `TransportReply`, the reply to one message of a transport; `PartsReply`, to one whose answer is wanted in parts;
`BurstReply`, to many that were run as one; frames with a msgpack header, or one JSON frame. infer_frontend.py treats
all doors and encodings alike. Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from struct import iter_unpack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from edge_runtime.answers import BESIDE, answer_fields
from edge_runtime.errors import EdgeRuntimeError, TensorMismatch
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Reply, Request, failure_of
from edge_runtime.telemetry.tracing import TraceParent
from edge_runtime.tensors import Array, Buffer, array_to_wire
from edge_runtime.wire import codec, json_codec

if TYPE_CHECKING:
    from edge_runtime.request.infer_frontend import InferFrontend, InferRoute

COPIED_BYTES = 4096
"""A smaller output is copied into its frame: the views that `array_to_wire` makes of one cost more than the copy."""


Entry = tuple[Any, Any, Any]
"""One request of a known header: where its reply goes, its id, and its tensor (a tuple of tensors for several).

The id is bytes, in JSON text, a number or None."""

Shapes = Sequence[tuple[int, ...]]
Made = TypeVar("Made")

PostAnswers = Callable[[Sequence[Entry], Any, Sequence[Sequence[bytes]], int], None]


class ReplyEndpoint(Protocol):
    """One place where requests come in, as far as replies need it. Thread: its transport's, except `post`."""

    is_control: bool

    @property
    def max_frame_bytes(self) -> int:
        """Largest tensor that it takes."""
        ...

    def sender(self, origin: Any) -> Hashable:
        """The connection, or the client, that an entry's first element stands for: requests of one share a queue."""
        ...

    def connection(self, origin: Any) -> Hashable:
        """The connection that a message came by, for the state of one; None where messages come by no connection."""
        ...

    def send_answers(
        self, entries: Sequence[Entry], head: Any, payloads: Sequence[Sequence[bytes]], reply_bytes: int, /
    ) -> None:
        """Send each entry an answer: the head, its id and its output frames, `reply_bytes` of them in all.

        head: of `BurstEncoding`. Raises ValueError, with nothing sent, when there are not as many payloads as entries.
        """
        ...

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one reply, or drop and count it."""
        ...

    @property
    def post_answers(self) -> PostAnswers | None:
        """Sends answers as `send_answers` does, from any thread; None where each is sent by itself."""
        ...

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one reply from any thread."""
        ...


class TracedEndpoint(ReplyEndpoint, Protocol):
    """One whose messages carry the context of a trace beside their headers. Asked only where requests are traced."""

    def traceparent(self, origin: Any) -> TraceParent | None:
        """The span of a message's caller; None: it said none, or one that is not traced."""
        ...

    def tell_trace(self, origin: Any, traceparent: str) -> None:
        """Have the reply to a message say the span that its request became. Before there is a reply."""
        ...


class PartsEndpoint(ReplyEndpoint, Protocol):
    """One that sends answers in parts."""

    def post_part(self, envelope: Sequence[Any], frames: Sequence[Any], marks: Mapping[str, Any]) -> None:
        """Send one part, the end or an error among them, behind those before. marks: of a part. Thread: any."""
        ...


class Encoding(Protocol):
    """How replies are written: each method returns all frames of one."""

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """The outputs that a request's plan selects."""
        ...

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """A refusal or failure."""
        ...

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """The result of an op other than infer."""
        ...


class PartsEncoding(Encoding, Protocol):
    """An encoding that knows parts of an answer."""

    def part(self, request: Request, request_id: Any, marks: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of one part, where it has any. marks: of `codec.part_marks`."""
        ...


class TextAnswers(NamedTuple):
    """Writes each answer of a burst as text. whole: makes all frames of a reply of its text."""

    answers: json_codec.JsonAnswers
    whole: Callable[[bytes], tuple[Any, ...]]


@runtime_checkable
class BurstEncoding(Encoding, Protocol):
    """An encoding of known headers, whose bursts are answered without a `Request` each."""

    def head(self, plan: RequestPlan) -> Any:
        """Return the part before the outputs in each answer of an inline plan, for `ReplyEndpoint.send_answers`.

        Where answers are not outputs behind a head: their TextAnswers.
        """
        ...


def kept_of(plan: RequestPlan, selected: Sequence[Array], make: Callable[[RequestPlan, Shapes], Made]) -> Made:
    """Return the parts that an encoding writes for outputs of these shapes, made when they differ from the last ones.

    make: the encoding's own, always the same function.
    """
    shapes = tuple([array.shape for array in selected])
    kept = plan.kept
    if kept is None or kept[0] is not make or kept[1] != shapes:
        kept = plan.kept = make, shapes, make(plan, shapes)
    made: Made = kept[2]
    return made


def frames_head(plan: RequestPlan, shapes: Shapes) -> bytes:
    """The msgpack header of answers that are outputs of these shapes, and nothing beside them."""
    return codec.pack_answer(plan.servable.model, plan.servable.number, plan.tensor_headers(shapes))


class FramesEncoding:
    """A msgpack header, the id (bytes), and one frame an output that is not written to shared memory."""

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of the outputs that its plan selects. Raises TensorMismatch where one is larger than its place."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        if plan.is_bare:
            header = kept_of(plan, selected, frames_head)
        else:
            timing, servable = timing_fields(request) if plan.wants_timing else None, plan.servable
            headers = plan.tensor_headers([array.shape for array in selected])
            header = codec.pack_answer(servable.model, servable.number, headers, timing, plan.words(selected))
        if request.destinations:
            return (header, request_id, *_frames_but_destinations(plan, selected, request.destinations))
        return (header, request_id, *[frame_of(array) for array in selected])

    def part(self, request: Request, request_id: Any, marks: Mapping[str, Any]) -> tuple[Any, ...]:
        """Frames of one part."""
        plan: RequestPlan = request.plan
        selected, timing = plan.select(request.outputs) if request.outputs else (), _timing_of_end(request, marks)
        headers = plan.tensor_headers([array.shape for array in selected]) if selected else ()
        words = plan.words(selected) if selected else None
        header = codec.pack_answer(plan.servable.model, plan.servable.number, headers, timing, words, marks=marks)
        return (header, request_id, *[frame_of(array) for array in selected])

    def head(self, plan: RequestPlan) -> bytes:
        """The header of an inline answer."""
        assert plan.inline is not None
        return frames_head(plan, plan.inline.shapes)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """Frames of an error."""
        return (codec.pack_error(error), request_id)

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """Frames of an op's result."""
        return (codec.pack_result(result), request_id)


class TracedFrames:
    """As FramesEncoding, with a trace's context in the header. traceparent: of the one request that it answers."""

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of the outputs that its plan selects."""
        return self._told(FRAMES.answer(request, request_id))

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """Frames of an error."""
        return self._told(FRAMES.refusal(error, request_id))

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """Frames of an op's result."""
        return self._told(FRAMES.result(result, request_id))

    def _told(self, frames: tuple[Any, ...]) -> tuple[Any, ...]:
        header, *rest = frames
        return (codec.with_traceparent(header, self._traceparent), *rest)


class JsonEncoding:
    """One JSON frame, with the id (text, a number or None) inside."""

    def __init__(self, *, as_list: bool | None = None) -> None:
        """as_list: of an answer to pictures or texts, in words, without tensors, but for bare outputs (`raw`).

        False: of one; True: under `answers`, however many there are; None: none came.
        """
        self._as_list = as_list

    def head(self, plan: RequestPlan) -> TextAnswers:
        """Return the writer of inline answers."""
        assert plan.inline is not None
        return TextAnswers(json_answers(plan, plan.inline.shapes), lambda text: (text,))

    def answer(self, request: Request, request_id: Any) -> tuple[Any, ...]:
        """Frames of the outputs that its plan selects."""
        plan: RequestPlan = request.plan
        timing = timing_fields(request) if plan.wants_timing else None
        fields = fields_in_words(request, as_list=self._as_list) if self._as_list is not None else None
        if fields is not None:
            said = json_codec.dumps({**fields, **({} if timing is None else {"timing": timing})})
            return (b'{"id":%s,%s' % (b"null" if request_id is None else json_codec.dumps(request_id), said[1:]),)
        selected = plan.select(request.outputs)
        if plan.is_bare:
            return (kept_of(plan, selected, json_answers).pack_arrays(request_id, selected),)
        headers = plan.tensor_headers([array.shape for array in selected])
        servable = plan.servable
        outputs = list(zip(headers, selected, strict=True))
        words = plan.words(selected)
        more = None if words is None else {"answer": words}
        return (json_codec.pack_json_answer(request_id, servable.model, servable.number, outputs, timing, more=more),)

    def part(self, request: Request, request_id: Any, marks: Mapping[str, Any]) -> tuple[Any, ...]:
        """Frames of one part."""
        plan: RequestPlan = request.plan
        timing = _timing_of_end(request, marks)
        told = {**marks, **({} if timing is None else {"timing": timing})}
        has_words = self._as_list is not None and bool(request.outputs)
        fields = fields_in_words(request, as_list=bool(self._as_list)) if has_words else None
        if fields is not None:
            return (json_codec.dumps({"id": request_id, **fields, **told}),)
        selected = plan.select(request.outputs) if request.outputs else ()
        headers = plan.tensor_headers([array.shape for array in selected]) if selected else ()
        words = plan.words(selected) if selected else None
        more = told if words is None else {"answer": words, **told}
        outputs = list(zip(headers, selected, strict=True))
        model, version = plan.servable.model, plan.servable.number
        return (json_codec.pack_json_answer(request_id, model, version, outputs, more=more),)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> tuple[Any, ...]:
        """Frames of an error."""
        return (json_codec.pack_json_error(request_id, error),)

    def result(self, result: Any, request_id: Any) -> tuple[Any, ...]:
        """Frames of an op's result."""
        return (json_codec.pack_json_result(request_id, result),)


def fields_in_words(request: Request, *, as_list: bool) -> dict[str, Any] | None:
    """The answer to pictures or texts in JSON, but its id and timing; None where bare outputs were asked for.

    Outputs that say nothing in words stand beside, as tensors.
    """
    plan: RequestPlan = request.plan
    servable = plan.servable
    selected = plan.select(request.outputs)
    answers = plan.answers(selected)
    if answers is None or servable.steps is None:
        return None
    fields: dict[str, Any] = {"model_name": servable.model, "model_version": str(servable.number)}
    fields |= answer_fields(answers, as_list=as_list or servable.steps.has_items)
    headers = plan.tensor_headers([array.shape for array in selected])
    said = {*servable.steps.outputs, *BESIDE}
    outputs = [(header, array) for header, array in zip(headers, selected, strict=True) if header.name not in said]
    if outputs or not servable.steps.outputs:
        fields["outputs"] = json_codec.outputs_to_json(outputs)
    return fields


def json_answers(plan: RequestPlan, shapes: Shapes) -> json_codec.JsonAnswers:
    """Return the writer of answers that are outputs of these shapes, and nothing beside them."""
    return json_codec.JsonAnswers(plan.servable.model, plan.servable.number, plan.tensor_headers(shapes))


def _frames_but_destinations(
    plan: RequestPlan, selected: Sequence[Array], destinations: Sequence[Array | None]
) -> Iterator[Buffer]:
    """Write outputs to their places in shared memory; give the frames of the others."""
    for index, array, destination in zip(plan.outputs, selected, destinations, strict=True):
        data = frame_of(array)
        if destination is None:
            yield data
            continue
        nbytes = memoryview(data).nbytes
        if nbytes > destination.nbytes:
            name = plan.servable.spec.outputs[index].name
            raise TensorMismatch(f"output {name!r} is {nbytes} bytes, its place has {destination.nbytes}")
        destination[:nbytes] = np.frombuffer(data, np.uint8)


def frame_of(array: Array) -> Buffer:
    """The bytes of an output on the wire."""
    if array.nbytes < COPIED_BYTES and array.dtype.kind in "fiu" and array.dtype.isnative:
        return array.tobytes()
    return array_to_wire(array)


def _timing_of_end(request: Request, marks: Mapping[str, Any]) -> dict[str, float] | None:
    """The timing of a request that wants it, with its last part: before, its run goes on."""
    return timing_fields(request) if request.plan.wants_timing and "final" in marks else None


FRAMES: PartsEncoding = FramesEncoding()
JSON: PartsEncoding = JsonEncoding()
_IN_WORDS, _IN_WORDS_AS_LIST = JsonEncoding(as_list=False), JsonEncoding(as_list=True)


def json_encoding(elements: json_codec.Elements | None) -> PartsEncoding:
    """How a JSON request is answered."""
    if elements is None:
        return JSON
    return _IN_WORDS_AS_LIST if elements.as_list else _IN_WORDS


def timing_fields(request: Request) -> dict[str, float]:
    """The `timing` map of a reply (wire v1)."""
    return {
        "queue_ms": round(request.queue_s * 1e3, 3),
        "run_ms": round(request.run_s * 1e3, 3),
        "batch_rows": request.batch_rows,
    }


class OpReply(Reply, Protocol):
    """Where and how a request or an op is answered: one of `answer`, `refuse` and `result` is called, once."""

    def result(self, result: Any) -> None:
        """Send the result of an op other than infer, or the EdgeRuntimeError that it ended with. Thread: any."""
        ...


class TransportReply:
    """The reply to one message of a transport, off the lean path: where it goes, and in which encoding."""

    __slots__ = ("_endpoint", "_envelope", "_frontend", "encoding", "request_id")

    def __init__(
        self,
        frontend: InferFrontend,
        endpoint: ReplyEndpoint,
        envelope: tuple[Any, ...],
        encoding: Encoding,
        request_id: Any,
    ) -> None:
        self._frontend = frontend
        self._endpoint = endpoint
        self._envelope = envelope
        self.encoding = encoding
        self.request_id = request_id

    @property
    def at(self) -> tuple[ReplyEndpoint, tuple[Any, ...]]:
        """Where it goes."""
        return self._endpoint, self._envelope

    @property
    def user_id(self) -> str:
        """The caller's own name for its request: what other encodings call an id is a transport's."""
        name = getattr(self.encoding, "user_id", None)
        return name(self.request_id) if name is not None else ""

    @property
    def writes_text(self) -> bool:
        """Whether outputs are more than frames."""
        return self.encoding is not FRAMES

    def answer(self, request: Request) -> None:
        """Send the answer.

        Its listener hears it first: a client with its answer may ask again at once, and another worker would tell the
        listener of that answer before this one.
        """
        frames = self.encoding.answer(request, self.request_id)
        if self._frontend.listeners:
            self._frontend.tell_of(request)
        self._endpoint.post(self._envelope, frames)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error."""
        self._endpoint.post(self._envelope, self.encoding.refusal(error, self.request_id))

    def result(self, result: Any) -> None:
        """Send an op's result, or its error."""
        if isinstance(result, EdgeRuntimeError):
            self.refuse(result)
        else:
            self._endpoint.post(self._envelope, self.encoding.result(result, self.request_id))


class PartsReply(TransportReply):
    """The reply to a request whose answer is wanted in parts: each is sent as it comes, and the last is marked.

    name: the request's id as text, of bytes their hexadecimal digits. key: its sender and name, set before it is
    submitted, by which its client may end it. Thread: any; a part that comes behind the end,
    such as that of a deadline, is left out.
    """

    __slots__ = ("_has_ended", "_lock", "_part", "_sends", "_writes", "key", "name")

    def __init__(
        self,
        frontend: InferFrontend,
        endpoint: PartsEndpoint,
        envelope: tuple[Any, ...],
        encoding: PartsEncoding,
        request_id: Any,
    ) -> None:
        super().__init__(frontend, endpoint, envelope, encoding, request_id)
        self._sends = endpoint
        self._writes = encoding
        self._lock = threading.Lock()
        self._part = 0
        self._has_ended = False
        self.name = request_id.hex() if isinstance(request_id, bytes) else str(request_id)
        self.key: tuple[Hashable, str] | None = None

    def part(self, request: Request) -> None:
        """Send a part; more come."""
        with self._lock:
            if not self._has_ended:
                self._send(request, final=False)

    def answer(self, request: Request) -> None:
        """Send the last part; where it has no outputs, only that it is the last."""
        with self._lock:
            if not self._has_ended:
                self._send(request, final=True)
                self._has_ended = True
        self._frontend.forget_stream(self)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error, which ends it."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._sends.post_part(self._envelope, self.encoding.refusal(error, self.request_id), {})
        self._frontend.forget_stream(self)

    def _send(self, request: Request, *, final: bool) -> None:
        marks = codec.part_marks(self._part, final=final)
        frames = self._writes.part(request, self.request_id, marks)
        self._part += 1
        if self._frontend.listeners and request.outputs:
            self._frontend.tell_of(request)
        self._sends.post_part(self._envelope, frames, marks)


class BurstReply:
    """The reply to entries of one known header. Thread: any."""

    __slots__ = ("_endpoint", "_entries", "_frontend", "_route")

    user_id = ""

    def __init__(
        self, frontend: InferFrontend, endpoint: ReplyEndpoint, route: InferRoute, entries: Sequence[Entry]
    ) -> None:
        self._frontend = frontend
        self._endpoint = endpoint
        self._route = route
        self._entries = entries

    @property
    def writes_text(self) -> bool:
        """Whether outputs are more than frames."""
        return self._route.encoding is not FRAMES

    def answer(self, request: Request) -> None:
        """Cut the outputs into as many answers as there are entries, and post these at once."""
        post = self._endpoint.post_answers
        if post is None or self._route.encoding is not FRAMES:
            self._answer_each(request)
            return
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        header = kept_of(plan, [array[: plan.rows] for array in selected], frames_head)
        count, columns, nbytes = request.count, [], 0
        for array in selected:
            size = array.nbytes // count
            columns.append([part for (part,) in iter_unpack(f"{size}s", frame_of(array))])
            nbytes += size
        post(self._entries, header, list(zip(*columns, strict=True)), nbytes)

    def _answer_each(self, request: Request) -> None:
        """Post each answer as if its entry had run alone; one that cannot be written is a refusal."""
        whole, rows, encoding = request.outputs, request.plan.rows, self._route.encoding
        for number, (origin, request_id, _) in enumerate(self._entries):
            request.outputs = [array[number * rows : (number + 1) * rows] for array in whole]
            try:
                frames = encoding.answer(request, request_id)
            except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
                failed = failure_of(error, f"an answer of model {request.header.model} could not be given")
                request.metrics.refused(failed.code)
                request.count -= 1
                frames = encoding.refusal(failed, request_id)
            self._endpoint.post((origin,), frames)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error to each."""
        for origin, request_id, _ in self._entries:
            self._endpoint.post((origin,), self._route.encoding.refusal(error, request_id))

    def split(self, request: Request) -> list[Request]:
        """Make a request of each entry, which stands where the burst did."""
        return self._frontend.apart(self._endpoint, self._route, self._entries, request)


def join_burst(plan: RequestPlan, entries: Sequence[tuple[Any, Any, Any]]) -> list[Any]:
    """The only input of all entries together, in their order: [entries * rows, *inner]."""
    return plan.rows_of(b"".join([entry[2] for entry in entries]))
