"""The part of every client without I/O: builds calls, decodes their replies, and decides what to send or wait for next.

Owns: the meaning of a call (defaults, waits, datatypes of lists, size checks before sending), what models take, and
retries. A public method of a client is a flow here: a generator that yields what it needs (a call to send, metadata to
fetch, seconds to wait), gets the result or the error of that, and returns what the method returns. A client meets the
needs: blocking_client.py on the caller's thread, doors/zmq/asyncio_client.py on its loop. Thread: any; dicts are only
added to and cleared.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from edge_runtime.client import frames
from edge_runtime.client.frames import (
    CallPlaces,
    Frame,
    Options,
    Shared,
    arrays,
    check_destinations,
    checked_options,
    cut_traceparent,
    with_sequence,
)
from edge_runtime.client.in_flight import Call, Carrier, NotBack
from edge_runtime.client.near_misses import advised
from edge_runtime.client.pictures import with_pictures, with_raw
from edge_runtime.doors.zmq.client_memory import NOT_ATTACHED, ClientMemory
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, NotReady, TensorMismatch
from edge_runtime.messages import UNNAMED, InferResult
from edge_runtime.models.names import check_model_name
from edge_runtime.operations import DEFAULT_WAIT_S, OPERATIONS, Operation, Scope, pack_operation
from edge_runtime.steps import ModelSteps, steps_from_fields
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from edge_runtime.client.pictures import Picture

SLACK_S = 1.0
"""How much longer than the request's own timeout a client waits for the daemon's word on it."""

MAX_IN_FLIGHT = 256
"""Enough to fill the largest batches of tiny models; the daemon's own queues are bounded besides."""

READY_POLL_S = 0.05
"""How often `wait_ready` asks; a daemon with one tiny model is ready after about 250 ms."""

SIZE_CHECK_BYTES = 1 << 20
"""From here a tensor, or a message, is held against the daemon's limit; no daemon has a reason to set less."""

NO_LIMIT = 1 << 63
"""The limit of a daemon that states none."""

LEAST_PAUSE_S = 0.001
MOST_PAUSE_S = 1.0
"""Bounds of the pause after a refusal without a forecast: it doubles from the first to the second."""

SOON_MS = 1000.0
"""A model that loads sends a tenth of it as `retry_after_ms`; HTTP sends a second where there is no forecast."""

T = TypeVar("T")


class MetadataOf(NamedTuple):
    """A need of a flow: the metadata of a model, fetched once for all flows that need it at the same time."""

    model: str
    version: int | None = None


Flow = Generator[Call | MetadataOf | float, Any, T]
"""A flow by what it returns. It is sent a call's decoded reply; a float is seconds to wait."""


class InferArguments(NamedTuple):
    """Arguments of `infer` or `submit`, with checked options."""

    model: str
    inputs: Mapping[str, npt.ArrayLike] | None
    picture: Picture | None
    pictures: Sequence[Picture] | Array | None
    options: Options
    parameters: Mapping[str, Any] | None
    outputs: Sequence[str] | Mapping[str, Array] | None
    cast: bool


class CallBuilder(Protocol):
    """Builds calls and decodes replies in the words of one protocol. Does no I/O.

    noun: what answers, for messages. ready_ask_s: how long the first question of `wait_ready` waits. knows_pictures:
    whether the other side knows which input takes a picture that has no name; else the model's declared steps decide.
    names_parts: parts of an answer come by name alone, without datatypes, which the model's metadata has.
    """

    endpoint: str
    noun: str
    ready_ask_s: float
    knows_pictures: bool
    names_parts: bool

    def operation(self, operation: Operation, values: Mapping[str, Any], wait_s: float) -> Flow[Any]:
        """Ask one operation. Raises Unsupported where the protocol has no words for it."""
        ...

    def infer(  # noqa: PLR0917 (what a call is made of)
        self,
        model: str,
        tensors: Mapping[str, Array],
        options: Options,
        parameters: Mapping[str, Any] | None,
        destinations: Mapping[str, Array],
        places: CallPlaces | None,
    ) -> Call:
        """Build an inference call. Raises Unsupported, TensorMismatch and ModelNotFound for what cannot be sent.

        destinations: arrays that outputs go into. places: which arrays lie in shared memory.
        """
        ...


class ClientCore:
    """Calls and replies of one client. timeout_ms: of requests that name none; None: the model's default.

    memory, carrier: arrays shared with the daemon, and the connection that may name them.
    """

    def __init__(
        self,
        timeout_ms: float | None,
        builder: CallBuilder,
        memory: ClientMemory | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self._timeout_ms = timeout_ms
        self._builder = builder
        self._memory = memory
        self._carrier = carrier
        self._known: dict[MetadataOf, Mapping[str, Any]] = {}
        """Of models that were asked for; a reload that changes datatypes is a new model in all but name."""
        self._most_bytes: int | None = None

    # ---- inference --------------------------------------------------------------------------------------------------

    def checked_arguments(  # noqa: PLR0917 (what a client's method takes)
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None,
        picture: Picture | None,
        pictures: Sequence[Picture] | Array | None,
        raw: bool | None,
        version: int | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        timeout_ms: float | None,
        priority: int,
        timing: bool,
        parameters: Mapping[str, Any] | None,
        cast: bool,
    ) -> InferArguments:
        """Check the options of a call; without a timeout it has the client's. Raises TypeError."""
        if timeout_ms is None:
            timeout_ms = self._timeout_ms
        options = checked_options(version, outputs, timeout_ms, priority, timing=timing)
        return InferArguments(model, inputs, picture, pictures, options, with_raw(parameters, raw), outputs, cast)

    def infer(self, arguments: InferArguments, *, retry: bool) -> Flow[InferResult]:
        """Ask once, or while the daemon's start still loads the model; with `retry` again after each refusal.

        All until the deadline. What is raised then says how far the start is.
        """
        _, result = yield from self.begin(arguments, retry=retry)
        return result

    def begin(self, arguments: InferArguments, *, retry: bool) -> Flow[tuple[Call, InferResult]]:
        """As `infer`; with the call, whose further parts may come where its options say `stream`."""
        options, inputs = arguments.options, arguments.inputs
        has_pictures = inputs is None or arguments.picture is not None or arguments.pictures is not None
        began_s = time.monotonic()
        retries: Retries | None = None
        while True:
            try:
                if has_pictures:
                    inputs, has_pictures = (yield from self._with_pictures(arguments)), False
                assert inputs is not None
                call = yield from self._call(arguments, inputs, options)
                try:
                    result: InferResult = yield call
                    return call, result
                except TensorMismatch as error:
                    self._forget(call.model)
                    raise (yield from self._advised(error, arguments, inputs)) from None
            except (EdgeRuntimeError, NotBack) as error:
                if not (retry or is_starting(error)):
                    raise
                retries = retries or Retries(options, began_s)
                pause_s = retries.pause_s(error)
                options = retries.options
            yield pause_s

    def call(self, arguments: InferArguments) -> Flow[Call]:
        """Build the call of a request that is not waited for."""
        inputs = arguments.inputs
        if inputs is None or arguments.picture is not None or arguments.pictures is not None:
            inputs = yield from self._with_pictures(arguments)
        return (yield from self._call(arguments, inputs, arguments.options))

    def answered(self, call: Call) -> Flow[InferResult]:
        """Send a call of `call` and return its result."""
        try:
            result: InferResult = yield call
            return result
        except TensorMismatch:
            self._forget(call.model)  # another version may serve now, which takes something else
            raise

    def attach(self) -> Flow[None]:
        """Let the connection name this client's regions of shared memory."""
        memory = self._memory
        assert memory is not None
        secret = {"secret": memory.secret.hex()}
        call: Any = next(self._builder.operation(OPERATIONS["attach_memory"], secret, wait_for_s(self._timeout_ms)))
        try:
            yield call
        except EdgeRuntimeError:  # a daemon that has forgotten them
            memory.lose()
        else:
            memory.attached = call.connection

    # ---- operations -------------------------------------------------------------------------------------------------

    def operation(self, name: str, values: Mapping[str, Any], timeout_ms: float | None = None) -> Flow[Any]:
        """Ask an operation, while the daemon's start still loads its model again and again until its wait is over.

        timeout_ms: of one with scope control; others take the client's.
        """
        end_s = time.monotonic() + self._wait_s(name, timeout_ms)
        while True:
            try:
                return (yield from self._ask(name, values, timeout_ms))
            except NotReady as error:
                pause_s = (error.retry_after_ms or 0.0) / 1e3
                if not is_starting(error) or time.monotonic() + pause_s >= end_s:
                    raise
            yield pause_s

    def _wait_s(self, name: str, timeout_ms: float | None) -> float:
        operation = OPERATIONS[name]
        return wait_for_s(self._timeout_ms if operation.scope is Scope.INFER else timeout_ms, operation.wait_s)

    def _ask(
        self, name: str, values: Mapping[str, Any], timeout_ms: float | None = None, limit_s: float = math.inf
    ) -> Flow[Any]:
        """Ask an operation once. limit_s: of the wait."""
        operation = OPERATIONS[name]
        if operation.scope is Scope.CONTROL:
            self._forget(values.get("model") or "")
        wait_s = min(self._wait_s(name, timeout_ms), limit_s)
        return (yield from self._builder.operation(operation, values, wait_s))

    def is_live(self) -> Flow[bool]:
        """Whether there is an answer."""
        return (yield from self._says("live", {}))

    def is_ready(self, model: str, limit_s: float = math.inf) -> Flow[bool]:
        """Whether all, or one model, is ready; False without an answer. limit_s: of the wait for it."""
        return (yield from self._says("ready", {"model": model}, limit_s))

    def wait_ready(self, limit_s: float, model: str) -> Flow[None]:
        """Ask until the answer is ready. Raises TimeoutError."""
        builder = self._builder
        end_s = time.monotonic() + limit_s
        ask_s = builder.ready_ask_s
        while not (yield from self.is_ready(model, min(ask_s, max(end_s - time.monotonic(), READY_POLL_S)))):
            if time.monotonic() >= end_s:
                what = model or f"the {builder.noun}"
                how_far = yield from self._how_far(model)
                raise TimeoutError(f"{what} at {builder.endpoint} was not ready within {limit_s:.1f} s{how_far}")
            ask_s *= 2
            yield READY_POLL_S

    def fetch(self, wanted: MetadataOf) -> Flow[Mapping[str, Any]]:
        """Fetch metadata, unless another flow has meanwhile."""
        found = self._known.get(wanted)
        if found is None:
            found = self._known[wanted] = yield from self._ask("metadata", wanted._asdict())
        return found

    # ---- private ----------------------------------------------------------------------------------------------------

    def _with_pictures(self, arguments: InferArguments) -> Flow[Mapping[str, npt.ArrayLike]]:
        """The inputs with the pictures, under the name that the other side has for them."""
        name = UNNAMED
        is_asked = arguments.picture is not None or arguments.pictures is not None
        if is_asked and not self._builder.knows_pictures:  # not every server knows a name but the tensor's
            metadata = yield from self._metadata(arguments.model, arguments.options.version)
            name = next(iter(declared_steps(metadata).inputs), UNNAMED)
        return with_pictures(arguments.inputs, arguments.picture, arguments.pictures, name)

    def _call(self, arguments: InferArguments, inputs: Mapping[str, npt.ArrayLike], options: Options) -> Flow[Call]:
        builder, model = self._builder, arguments.model
        tensors, guessed = arrays(inputs)
        if guessed or arguments.cast:
            names = list(tensors) if arguments.cast else guessed
            frames.fit_datatypes(tensors, names, (yield from self._metadata(model)))
        destinations = check_destinations(arguments.outputs)
        if options.stream and destinations:
            raise TensorMismatch("outputs: each part of an answer has arrays of its own; name outputs without arrays")
        places = None if self._memory is None else self._memory.call_places(tensors, destinations)
        if places is not None:
            places = yield from self._nameable(places)
        call = builder.infer(model, tensors, options, arguments.parameters, destinations, places)
        call.model = model
        if options.stream and builder.names_parts:
            metadata = yield from self._metadata(model, options.version)
            call.oip = replace(call.oip, outputs_as=metadata.get("outputs", ()))
        if call.bounded_bytes >= SIZE_CHECK_BYTES:
            yield from self._check_size(call, tensors)
        return call

    def _nameable(self, places: CallPlaces) -> Flow[CallPlaces | None]:
        """The places that the present connection may name; None: the arrays go in frames."""
        memory, carrier = self._memory, self._carrier
        assert memory is not None
        assert carrier is not None
        if memory.attached != carrier.connection:
            yield from self.attach()
        return None if memory.attached == NOT_ATTACHED else places._replace(connection=memory.attached)

    def _check_size(self, call: Call, tensors: Mapping[str, Array]) -> Flow[None]:
        """Raise TensorMismatch for what the daemon would close the connection over, or the broker drop."""
        if self._most_bytes is None:
            # A model that is missing or not ready refuses the call itself, with a better message.
            with contextlib.suppress(EdgeRuntimeError):
                metadata = yield from self._metadata(call.model)
                self._most_bytes = int(metadata.get("max_frame_bytes", NO_LIMIT))
        most = self._most_bytes
        if most is None or call.bounded_bytes <= most:
            return
        if call.topic:
            raise TensorMismatch(
                f"the request to model {call.model!r} is {call.bounded_bytes} bytes and {self._builder.endpoint} takes "
                f"at most {most} in one message; send fewer rows at once, {call.size_advice}"
            )
        sizes = zip(tensors, map(_nbytes, call.tensors), strict=True)
        name, nbytes = next((name, nbytes) for name, nbytes in sizes if nbytes > most)
        raise TensorMismatch(
            f"input {name!r} of model {call.model!r} is {nbytes} bytes and this daemon takes at most {most} in one "
            f"tensor; send fewer rows at once, or {call.size_advice}"
        )

    def _advised(
        self, error: TensorMismatch, arguments: InferArguments, inputs: Mapping[str, npt.ArrayLike]
    ) -> Flow[TensorMismatch]:
        """The error, with what would fit the model as it is now."""
        with contextlib.suppress(EdgeRuntimeError, ConnectionError, TimeoutError):
            metadata = yield from self._metadata(arguments.model, arguments.options.version)
            return advised(error, arrays(inputs)[0], metadata)
        return error

    def _metadata(self, model: str, version: int | None = None) -> Flow[Mapping[str, Any]]:
        wanted = MetadataOf(model, version)
        found = self._known.get(wanted)
        if found is None:
            found = yield wanted
        return found

    def _forget(self, model: str) -> None:
        for known in [each for each in list(self._known) if each.model == model]:
            self._known.pop(known, None)

    def _says(self, name: str, values: Mapping[str, Any], limit_s: float = math.inf) -> Flow[bool]:
        try:
            return bool((yield from self._ask(name, values, limit_s=limit_s)))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _how_far(self, model: str) -> Flow[str]:
        """The end of a sentence: how far the daemon, or one model, is; "" where there is no answer."""
        try:
            known = yield from self._ask("models", {}, limit_s=SLACK_S)
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return ""
        if not model:
            return f": it is {how_far(known)}"
        states = (
            ": ".join(filter(None, (str(each.get("state")), str(each.get("reason") or ""))))
            for each in known
            if each.get("name") == model
        )
        return f": {'; '.join(states) or 'no such model is known'}"


class CallTopics(Protocol):
    """Where a device is asked whose broker carries calls by topics."""

    @property
    def ready_ask_s(self) -> float:
        """As of `CallBuilder`."""
        ...

    @property
    def size_advice(self) -> str:
        """As of `Call`, for a message that is too large."""
        ...

    def infer(self, model: str = "", version: int | None = None) -> str:
        """Return the topic of calls; of one model's alone where it is named."""
        ...


class DaemonCalls:
    """Calls in wire v1, over ZeroMQ or a broker. device: whose topics carry them there; it bounds whole messages."""

    knows_pictures = True
    names_parts = False

    def __init__(self, endpoint: str, device: CallTopics | None = None) -> None:
        self.endpoint = endpoint
        self.noun = "daemon" if device is None else "device"
        self.ready_ask_s = math.inf if device is None else device.ready_ask_s
        self._device = device
        self._encoder = frames.RequestEncoder()
        self._decoder = frames.ReplyDecoder()

    def operation(self, operation: Operation, values: Mapping[str, Any], wait_s: float) -> Flow[Any]:
        """Ask one operation."""
        call = Call(pack_operation(operation, values), (), wait_s, self._decoder.value)
        call.operation = operation
        if self._device is not None:
            call.topic = self._device.infer()  # the model is in the header alone: a bad name of one may be a bad topic
        return (yield call)

    def infer(  # noqa: PLR0917 (what a call is made of)
        self,
        model: str,
        tensors: Mapping[str, Array],
        options: Options,
        parameters: Mapping[str, Any] | None,
        destinations: Mapping[str, Array],
        places: CallPlaces | None,
    ) -> Call:
        """Build an inference call. Raises Unsupported and TensorMismatch for what cannot be sent."""
        traceparent = None
        if self._device is not None:
            parameters, options = with_sequence(parameters, options.sequence), options._replace(sequence=None)
            traceparent, parameters = cut_traceparent(parameters)
        timeout_ms = options.timeout_ms
        wait_s = wait_for_s(timeout_ms)
        if places is None:
            header, data = self._encoder.encode(model, tensors, options, parameters)
            decode = partial(self._decoder.result_into, destinations, ()) if destinations else self._decoder.result
            call = Call(header, data, wait_s, decode, timeout_ms)
        else:
            in_place = options
            if places.outputs:
                in_place = options._replace(output_places=tuple(map(places.outputs.get, options.outputs or ())))
            header, data = self._encoder.encode(model, tensors, in_place, parameters, places.inputs)
            decode = partial(self._decoder.result_into, destinations, tuple(places.inputs))
            call = Call(header, data, wait_s, decode, timeout_ms)

            def in_frames() -> tuple[bytes, Sequence[Frame], Callable[[Sequence[Any]], Any]]:
                plain = self.infer(model, tensors, options, parameters, destinations, None)
                return plain.header, plain.tensors, plain.decode

            call.shared = Shared(places.connection, in_frames, (*tensors.values(), *destinations.values()))
        if self._device is None:
            call.bounded_bytes = max(
                [each.nbytes if type(each) is memoryview else len(each) for each in data], default=0
            )
        else:
            call.topic, call.traceparent = self._device.infer(check_model_name(model), options.version), traceparent
            call.size_advice = self._device.size_advice
            call.bounded_bytes = len(header) + sum(map(_nbytes, data))
        if options.stream:
            call.parts, call.is_last, call.cancel_header = deque(), self._decoder.is_last, _cancel_header
        return call


class Retries:
    """The tries of one request. options: of the next one, with what is left of the time."""

    def __init__(self, options: Options, began_s: float) -> None:
        """options: of the first try, which began then; without a timeout, a request is tried again for 30 s."""
        self.options = options
        timeout_s = DEFAULT_WAIT_S if options.timeout_ms is None else options.timeout_ms / 1e3
        self._until_s = began_s + timeout_s
        self._pause_s = LEAST_PAUSE_S

    def pause_s(self, error: EdgeRuntimeError | NotBack) -> float:
        """How long to wait before the next try. Raises `error` where another try is of no use, or comes too late."""
        if not isinstance(error, NotBack) and (not error.retryable or isinstance(error, DeadlineExceeded)):
            raise error
        after_ms = None if isinstance(error, NotBack) else error.retry_after_ms
        if after_ms is None:
            pause_s = self._pause_s
            self._pause_s = min(2 * pause_s, MOST_PAUSE_S)
        else:
            pause_s = max(after_ms / 1e3, LEAST_PAUSE_S)
        left_s = self._until_s - time.monotonic() - pause_s
        if left_s <= 0:
            raise error
        if self.options.timeout_ms is not None:
            self.options = self.options._replace(timeout_ms=left_s * 1e3)
        return pause_s


def is_starting(error: EdgeRuntimeError | NotBack) -> bool:
    """Whether a refusal is of a model that is loading now: such a one says to ask again soon."""
    return isinstance(error, NotReady) and error.retry_after_ms is not None and error.retry_after_ms < SOON_MS


def how_far(models: Sequence[Mapping[str, Any]]) -> str:
    """How far a daemon's start is, by what its `models` operation lists."""
    listed = [each for each in models if each.get("state") != "not_served"]
    ready = sum(each.get("state") == "ready" for each in listed)
    return f"starting, {ready} of {len(listed)} ready" if listed else "starting"


def declared_steps(metadata: Mapping[str, Any]) -> ModelSteps:
    """Return the steps in a model's metadata."""
    fields = metadata.get("steps")
    return ModelSteps() if fields is None else steps_from_fields(fields)


def picture_input_name(metadata: Mapping[str, Any]) -> str:
    """The input that takes files: as declared, or of a pipeline the first of BYTES; "" where there is none."""
    inputs = declared_steps(metadata).inputs
    declared = next((name for name, each in inputs.items() if each.is_file), "")
    if declared or "pipeline" not in metadata:
        return declared
    return next((str(each["name"]) for each in metadata.get("inputs", ()) if each["datatype"] == "BYTES"), "")


def input_name(metadata: Mapping[str, Any], element: str) -> str:
    """The input whose rows are declared to be such elements; "" where there is none."""
    inputs = declared_steps(metadata).inputs
    return next((name for name, each in inputs.items() if each.element == element), "")


def wait_for_s(timeout_ms: float | None, default_s: float = DEFAULT_WAIT_S) -> float:
    """How long a client waits for a reply, in seconds: the timeout and some slack, else the operation's default."""
    return default_s if timeout_ms is None else timeout_ms / 1e3 + SLACK_S


def _cancel_header(number: bytes) -> bytes:
    return pack_operation(OPERATIONS["cancel"], {"request_id": number.hex()})


def _nbytes(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
