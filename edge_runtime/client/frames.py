"""Arrays to frames and back, for every client: headers are cached, small arrays copied, large ones lent.

Owns: the cache of packed headers and the choice between copy and view. Does no I/O. Thread: any; a cache is a dict that
is only added to and cleared.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import Answer, answers_from_fields
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch, error_from_wire
from edge_runtime.messages import (
    SEQUENCE_END,
    SEQUENCE_ID,
    SEQUENCE_START,
    InferResult,
    RegionPlace,
    RequestHeader,
    SequenceStep,
    TensorHeader,
    Timing,
)
from edge_runtime.telemetry.tracing import TRACEPARENT
from edge_runtime.tensors import (
    Array,
    array_from_wire,
    array_to_wire,
    datatype,
    datatype_name,
    element_count,
    fits_datatype,
)
from edge_runtime.wire.codec import ReplyHeader, pack_extra, pack_request, unpack_reply

LENT_BYTES = 256 << 10
"""From here a tensor is sent from the caller's own memory; below, a copy is cheaper than tracking the buffer. Measured
round trips over ipc, copied / lent: 64 KiB 30 / 40 us, 256 KiB 159 / 148, 600 KB 347 / 204, 4 MiB 1145 / 562."""

KEPT_REPLY_BYTES = 64 << 10
"""From here a reply's frame is itself the array's memory; smaller ones are copied out of libzmq's receive buffer."""

MAX_KEPT_HEADERS = 1024
"""Bound of the header cache; a client with more different headers packs each one again (about 3 us)."""

NO_PLACES: Mapping[str, RegionPlace] = {}

_ANY = SequenceStep(0)

Frame = bytes | bytearray | memoryview
"""One frame of a message. A memoryview is lent: sent without a copy."""


class Options(NamedTuple):
    """The fields of a header beside the model and its inputs; part of the cache's key.

    output_places, stream: as in RequestHeader. sequence: None for none.
    """

    version: int | None = None
    outputs: tuple[str, ...] | None = None
    timeout_ms: float | None = None
    priority: int = 0
    timing: bool = False
    output_places: tuple[RegionPlace | None, ...] = ()
    sequence: SequenceStep | None = None
    stream: bool = False


class CallPlaces(NamedTuple):
    """Where arrays of one call lie in shared memory, by name, and the connection that may say so."""

    connection: int
    inputs: Mapping[str, RegionPlace]
    outputs: Mapping[str, RegionPlace]


class Shared(NamedTuple):
    """The shared memory of one call. connection: the one that may name it.

    in_frames: makes header, frames and decoder of the same call without it. arrays: they stay until the end of the
    call, so that no other array gets their memory.
    """

    connection: int
    in_frames: Callable[[], tuple[bytes, Sequence[Frame], Callable[[Sequence[Any]], Any]]]
    arrays: tuple[Array, ...]


class RequestEncoder:
    """Turns calls into headers and frames; equal calls give the same header bytes, packed once."""

    def __init__(self) -> None:
        self._headers: dict[tuple[object, ...], bytes] = {}

    def encode(
        self,
        model: str,
        inputs: Mapping[str, Array],
        options: Options,
        parameters: Mapping[str, Any] | None = None,
        places: Mapping[str, RegionPlace] = NO_PLACES,
    ) -> tuple[bytes, list[Frame]]:
        """Return header bytes and one frame for each input that has no place in shared memory, then one of a sequence.

        Raises Unsupported for a dtype without a wire name.
        """
        extra = traceparent = None
        if parameters:
            traceparent, parameters = cut_traceparent(parameters)
        if options.sequence is not None or traceparent is not None:  # the header is the same for all of them
            extra, options = pack_extra(options.sequence, traceparent), options._replace(sequence=_ANY)
        key: tuple[object, ...] = (
            model, options, *[(name, array.dtype, array.shape) for name, array in inputs.items()], *places.items(),
        )  # fmt: skip
        header = None if parameters else self._headers.get(key)
        if header is None:
            header = pack_request(_header(model, inputs, options, parameters or {}, places))
            if not parameters:
                self._keep(key, header)
        frames: list[Frame] = [tensor_frame(name, array) for name, array in inputs.items() if name not in places]
        if extra is not None:
            frames.append(extra)
        return header, frames

    def _keep(self, key: tuple[object, ...], header: bytes) -> None:
        if len(self._headers) >= MAX_KEPT_HEADERS:
            self._headers.clear()
        self._headers[key] = header


class ReplyDecoder:
    """Turns replies into results; a known header is not decoded again."""

    def __init__(self) -> None:
        self._headers: dict[bytes, ReplyHeader] = {}

    def result(self, frames: Sequence[Any]) -> InferResult:
        """Decode the reply to an inference call. Raises the EdgeRuntimeError that it carries, or DecodeFailed.

        The arrays are writable, and nothing else refers to their memory.
        """
        header = self._header(frames[0].bytes)
        outputs: dict[str, Array] = {}
        if len(frames) - 2 != len(header.outputs):
            raise TensorMismatch(f"the reply announces {len(header.outputs)} outputs and has {len(frames) - 2} frames")
        for tensor, frame in zip(header.outputs, frames[2:], strict=True):
            outputs[tensor.name] = _array(tensor, frame)
        timing = None if header.timing is None else _timing(header.timing)
        answers = read_answers(header.answer, outputs)
        if header.part is not None:
            marks = header.part, header.final
            return InferResult(header.model, header.version, outputs, timing, (), answers, *marks)
        return InferResult(header.model, header.version, outputs, timing, answers=answers)

    def is_last(self, frames: Sequence[Any]) -> bool:
        """Whether nothing comes behind this reply: a last part, a whole answer or an error. Raises DecodeFailed."""
        header = unpack_reply(frames[0].bytes)
        return header.part is None or header.final

    def result_into(
        self, destinations: Mapping[str, Array], shared: tuple[str, ...], frames: Sequence[Any]
    ) -> InferResult:
        """As `result`, with outputs in the caller's arrays: written there by the daemon, or copied from frames."""
        header = self._header(frames[0].bytes)
        count = sum(tensor.place is None for tensor in header.outputs)
        if len(frames) - 2 != count:
            raise TensorMismatch(f"the reply announces {count} frames and has {len(frames) - 2}")
        left = iter(frames[2:])
        outputs: dict[str, Array] = {}
        for tensor in header.outputs:
            array = _array(tensor, next(left)) if tensor.place is None else None
            destination = destinations.get(tensor.name)
            outputs[tensor.name] = (
                fill_destination(tensor, destination, array) if destination is not None else _given(tensor, array)
            )
        timing = None if header.timing is None else _timing(header.timing)
        return InferResult(header.model, header.version, outputs, timing, shared, read_answers(header.answer, outputs))

    def value(self, frames: Sequence[Any]) -> Any:
        """Decode the reply to an operation. Raises the EdgeRuntimeError that it carries, or DecodeFailed."""
        header = unpack_reply(frames[0].bytes)
        if header.error is not None:
            raise _error(header.error)
        return header.result

    def _header(self, packed: bytes) -> ReplyHeader:
        header = self._headers.get(packed)
        if header is None:
            header = unpack_reply(packed)
            if header.error is not None:
                raise _error(header.error)
            # One with any of these hardly ever comes again.
            if header.timing is None and header.answer is None and header.part is None and header.traceparent is None:
                if len(self._headers) >= MAX_KEPT_HEADERS:
                    self._headers.clear()
                self._headers[packed] = header
        return header


def cut_traceparent(parameters: Mapping[str, Any] | None) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return the caller's span that parameters name, which no protocol has among them, and the others."""
    if not parameters or TRACEPARENT not in parameters:
        return None, parameters
    return str(parameters[TRACEPARENT]), {key: value for key, value in parameters.items() if key != TRACEPARENT}


def with_sequence(parameters: Mapping[str, Any] | None, step: SequenceStep | None) -> Mapping[str, Any] | None:
    """Return parameters that name a sequence too, for a protocol without a frame of its own for that."""
    if step is None:
        return parameters
    marks = {SEQUENCE_ID: step.id, SEQUENCE_START: step.start, SEQUENCE_END: step.end}
    return {**(parameters or {}), **marks}


def arrays(inputs: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], list[str]]:
    """Return the inputs as arrays, and the names of lists, numbers and texts, whose dtype is a guess.

    Raises TensorMismatch for what has no names.
    """
    if type(inputs) is not dict and not isinstance(inputs, Mapping):  # the second takes ten times as long
        raise TensorMismatch(
            f"inputs: got {type(inputs).__name__}, wanted arrays by name: {{'image': array}}; metadata(model) has names"
        )
    found: dict[str, Array] = {}
    guessed: list[str] = []
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            found[name] = value
            continue
        if isinstance(value, np.generic):
            found[name] = np.asarray(value)
            continue
        found[name] = _array_of(name, value)
        guessed.append(name)
    return found, guessed


def checked_options(
    version: object, outputs: Sequence[str] | Mapping[str, Array] | None, timeout_ms: object, priority: object,
    *, timing: bool,
) -> Options:  # fmt: skip
    """The options of a call. A text as outputs is one name. Raises TypeError for values of another kind."""
    if outputs is not None:
        outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if type(timeout_ms) not in (float, int, type(None)):
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, numbers.Real):
            raise TypeError(f"timeout_ms: got {timeout_ms!r}, wanted milliseconds as a number, or None")
        timeout_ms = float(timeout_ms)
    if version is not None and type(version) is not int:
        version = _whole_number("version", version, "a number such as 2, or None for the newest")
    if priority is None:
        priority = 0
    elif type(priority) is not int:
        priority = _whole_number("priority", priority, "1 (first) to 9, or 0 for the model's default")
    return Options(version, outputs, timeout_ms, priority, timing)  # type: ignore[arg-type]


def check_destinations(outputs: object) -> Mapping[str, Array]:
    """The arrays that outputs are written into, by name; none where outputs are names. Raises TensorMismatch."""
    if not isinstance(outputs, Mapping):
        return {}
    for name, destination in outputs.items():
        if (
            not isinstance(destination, np.ndarray)
            or not destination.flags.c_contiguous
            or not destination.flags.writeable
        ):
            raise TensorMismatch(f"output {name!r}: wanted a C-contiguous array that can be written")
    return outputs


def fit_datatypes(inputs: dict[str, Array], names: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Convert these arrays to the model's datatypes where they are of the same kind and every integer fits; in place.

    Fractions for an integer input stay as they are: the daemon's refusal then names both datatypes.
    """
    wanted = {str(spec["name"]): str(spec["datatype"]) for spec in metadata.get("inputs", ())}
    for name in names:
        kind = wanted.get(name)
        if kind is None or kind in ("BYTES", "BF16") or inputs[name].dtype.kind not in "biuf":
            continue
        dtype = datatype(kind).dtype
        if inputs[name].dtype.kind == "f" and dtype.kind != "f":
            continue
        if dtype.kind in "iu" and inputs[name].size and not _fits(inputs[name], dtype):
            raise TensorMismatch(f"input {name!r}: a value does not fit {kind}, which the model takes")
        inputs[name] = inputs[name].astype(dtype)


def _whole_number(name: str, value: object, wanted: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted {wanted}") from None


def _array_of(name: str, value: npt.ArrayLike) -> Array:
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise TensorMismatch(f"input {name!r}: {error}; wanted nested lists of equal lengths") from None
    return array


def _fits(array: Array, dtype: np.dtype[np.generic]) -> bool:
    limits = np.iinfo(np.dtype(dtype.name))
    return array.dtype.kind == "b" or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)


def _array(tensor: TensorHeader, frame: Any) -> Array:
    data = frame.buffer if len(frame) >= KEPT_REPLY_BYTES else bytearray(frame.bytes)
    return array_from_wire(tensor.datatype, tensor.shape, data)


def _given(tensor: TensorHeader, array: Array | None) -> Array:
    if array is None:
        raise TensorMismatch(f"output {tensor.name!r} was written to a place that this call did not name")
    return array


def fill_destination(tensor: TensorHeader, destination: Array, array: Array | None) -> Array:
    """The destination, or its beginning where the output is smaller. array: from a frame, to be copied."""
    count = element_count(tensor.shape)
    if not fits_datatype(destination.dtype, tensor.datatype) or count > destination.size:
        raise TensorMismatch(
            f"output {tensor.name!r} is {tensor.datatype} {list(tensor.shape)}, its array {destination.dtype} "
            f"{list(destination.shape)}"
        )
    filled = destination if destination.shape == tensor.shape else destination.reshape(-1)[:count].reshape(tensor.shape)
    if array is not None:
        filled[...] = array if array.dtype.kind == "O" else array.view(filled.dtype)
    return filled


def _header(
    model: str,
    inputs: Mapping[str, Array],
    options: Options,
    parameters: Mapping[str, Any],
    places: Mapping[str, RegionPlace],
) -> RequestHeader:
    return RequestHeader(
        model=model,
        version=options.version,
        inputs=tuple(
            TensorHeader(name, datatype_name(array.dtype), array.shape, places.get(name))
            for name, array in inputs.items()
        ),
        output_places=options.output_places,
        outputs=options.outputs,
        timeout_ms=options.timeout_ms,
        priority=options.priority,
        timing=options.timing,
        parameters=parameters,
        has_extra=options.sequence is not None,
        stream=options.stream,
    )


def tensor_frame(name: str, array: Array) -> Frame:
    """The bytes of one tensor: a copy of a small one, a view of a large one. Raises TensorMismatch."""
    kind = array.dtype.kind
    if kind in "fiub" and array.nbytes < LENT_BYTES and array.dtype.isnative:
        return array.tobytes()
    if kind == "O" and not all(isinstance(element, str | bytes) for element in array.flat):
        raise TensorMismatch(f"input {name!r} is an array of objects; wanted text or bytes in each element, or numbers")
    data = array_to_wire(array)
    return data if isinstance(data, bytes) or memoryview(data).nbytes >= LENT_BYTES else bytes(data)


def _timing(fields: Mapping[str, float]) -> Timing:
    return Timing(float(fields["queue_ms"]), float(fields["run_ms"]), int(fields["batch_rows"]))


def read_answers(fields: Mapping[str, Any] | None, outputs: Mapping[str, Array]) -> tuple[Answer, ...]:
    """Return the answers in a reply beside these outputs, if any. Raises DecodeFailed for what is none."""
    if fields is None:
        return ()
    try:
        return tuple(answers_from_fields(fields, outputs))
    except (LookupError, TypeError, ValueError) as error:
        raise DecodeFailed(f"the reply's answer cannot be read: {type(error).__name__}: {error}") from None


def _error(fields: Mapping[str, Any]) -> EdgeRuntimeError:
    forecast = fields.get("retry_after_ms")
    return error_from_wire(
        str(fields.get("code", "internal")),
        str(fields.get("message", "the daemon gave no message")),
        None if forecast is None else float(forecast),
    )
