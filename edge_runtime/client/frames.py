"""Arrays to frames and back, for every client: packed headers kept, small arrays copied, large ones lent.

Owns: the cache of packed headers and the choice between copy and view. Knows no socket and no thread; one object may
be used from several threads (its cache is a dict that is only added to and cleared).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import EdgeRuntimeError, TensorMismatch, error_from_wire
from edge_runtime.messages import InferResult, Timing
from edge_runtime.tensors import Array, array_from_wire, array_to_wire, datatype, datatype_name
from edge_runtime.wire.codec import ReplyHeader, RequestHeader, TensorHeader, pack_request, unpack_reply

LENT_BYTES = 256 << 10
"""From here a tensor goes out as the caller's own memory; below, a copy is cheaper than tracking the buffer. Measured
round trips over ipc, copied / lent: 64 KiB 30 / 40 us, 256 KiB 159 / 148, 600 KB 347 / 204, 4 MiB 1145 / 562."""

KEPT_REPLY_BYTES = 64 << 10
"""From here a reply's frame is itself the array's memory; smaller ones are copied out of libzmq's receive buffer."""

SIZE_CHECK_BYTES = 1 << 20
"""From here a tensor is held against the daemon's `max_frame_bytes`; no daemon has a reason to set less."""

NO_LIMIT = 1 << 63
"""What a daemon that states no limit takes."""

MAX_KEPT_HEADERS = 1024
"""Bound of the header cache; a client that varies more than this pays for packing (about 3 us) each time."""

Frame = bytes | bytearray | memoryview
"""What goes into a message. A memoryview is lent: sent without a copy."""


class Options(NamedTuple):
    """What a header says beside the model and its inputs; hashable, so that it is part of the cache's key."""

    version: int | None = None
    outputs: tuple[str, ...] | None = None
    timeout_ms: float | None = None
    priority: int = 0
    timing: bool = False


class RequestEncoder:
    """Turns calls into headers and frames; equal calls give the same header bytes, packed once."""

    def __init__(self) -> None:
        self._headers: dict[tuple[object, ...], bytes] = {}

    def encode(
        self, model: str, inputs: Mapping[str, Array], options: Options, parameters: Mapping[str, Any] | None = None
    ) -> tuple[bytes, list[Frame]]:
        """Header bytes and one frame an input. Raises Unsupported for a dtype that has no wire name."""
        key = (model, options, *[(name, array.dtype, array.shape) for name, array in inputs.items()])
        header = None if parameters else self._headers.get(key)
        if header is None:
            header = pack_request(_header(model, inputs, options, parameters or {}))
            if not parameters:
                self._keep(key, header)
        return header, [_frame(name, array) for name, array in inputs.items()]

    def _keep(self, key: tuple[object, ...], header: bytes) -> None:
        if len(self._headers) >= MAX_KEPT_HEADERS:
            self._headers.clear()
        self._headers[key] = header


class ReplyDecoder:
    """Turns replies into results; a header seen before is not decoded again."""

    def __init__(self) -> None:
        self._headers: dict[bytes, ReplyHeader] = {}

    def result(self, frames: Sequence[Any]) -> InferResult:
        """An infer reply's frames as an InferResult. Raises the EdgeRuntimeError it carries, or DecodeFailed.

        The arrays are the caller's own and writable: nothing else refers to their memory.
        """
        header = self._header(frames[0].bytes)
        outputs: dict[str, Array] = {}
        if len(frames) - 2 != len(header.outputs):
            raise TensorMismatch(f"the reply announces {len(header.outputs)} outputs and has {len(frames) - 2} frames")
        for tensor, frame in zip(header.outputs, frames[2:], strict=True):
            data = frame.buffer if len(frame) >= KEPT_REPLY_BYTES else bytearray(frame.bytes)
            outputs[tensor.name] = array_from_wire(tensor.datatype, tensor.shape, data)
        timing = None if header.timing is None else _timing(header.timing)
        return InferResult(header.model, header.version, outputs, timing)

    def value(self, frames: Sequence[Any]) -> Any:
        """What an op other than infer answered. Raises the EdgeRuntimeError it carries, or DecodeFailed."""
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
            if header.timing is None:  # one with timing is hardly ever seen again
                if len(self._headers) >= MAX_KEPT_HEADERS:
                    self._headers.clear()
                self._headers[packed] = header
        return header


def pack_op(op: str, model: str = "", version: int | None = None, parameters: Mapping[str, Any] | None = None) -> bytes:
    """Header of any op but infer."""
    return pack_request(RequestHeader(op=op, model=model, version=version, parameters=parameters or {}))


def folder_parameters(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The parameters that name a folder: the daemon has another working directory, so the whole path."""
    return {"folder": str(Path(folder).absolute())}


def arrays(inputs: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], list[str]]:
    """The inputs as arrays, and the names of those that were none (lists, numbers, text), whose dtype is a guess."""
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


def fit_datatypes(inputs: dict[str, Array], guessed: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Give arrays made from lists the model's datatypes, where no value is lost by that; in place.

    Numbers with a fraction stay as they are for an integer input: the daemon's refusal then names both datatypes.
    """
    wanted = {str(spec["name"]): str(spec["datatype"]) for spec in metadata.get("inputs", ())}
    for name in guessed:
        kind = wanted.get(name)
        if kind is None or kind in ("BYTES", "BF16") or inputs[name].dtype.kind not in "biuf":
            continue
        dtype = datatype(kind).dtype
        if inputs[name].dtype.kind == "f" and dtype.kind != "f":
            continue
        if dtype.kind in "iu" and inputs[name].size and not _fits(inputs[name], dtype):
            raise TensorMismatch(f"input {name!r}: a value does not fit {kind}, which the model takes")
        inputs[name] = inputs[name].astype(dtype)


def largest_bytes(frames: Sequence[Frame]) -> int:
    """Bytes of the largest tensor frame."""
    return max(map(_nbytes, frames), default=0)


def check_frame_sizes(model: str, inputs: Mapping[str, Array], frames: Sequence[Frame], max_frame_bytes: int) -> None:
    """Raise TensorMismatch for a tensor that the daemon would close the connection over."""
    for name, frame in zip(inputs, frames, strict=True):
        if _nbytes(frame) > max_frame_bytes:
            raise TensorMismatch(
                f"input {name!r} of model {model!r} is {_nbytes(frame)} bytes and this daemon takes at most "
                f"{max_frame_bytes} in one tensor; send fewer rows at once, or raise [zmq] max_frame_bytes in its "
                "configuration"
            )


def wait_s(timeout_ms: float | None, default_s: float, slack_s: float) -> float:
    """How long a client waits for a reply: the request's timeout and some slack, else the default; in seconds."""
    return default_s if timeout_ms is None else timeout_ms / 1e3 + slack_s


def _array_of(name: str, value: npt.ArrayLike) -> Array:
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise TensorMismatch(f"input {name!r}: {error}; wanted nested lists of equal lengths") from None
    return array


def _fits(array: Array, dtype: np.dtype[np.generic]) -> bool:
    limits = np.iinfo(np.dtype(dtype.name))
    return array.dtype.kind == "b" or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)


def _header(model: str, inputs: Mapping[str, Array], options: Options, parameters: Mapping[str, Any]) -> RequestHeader:
    return RequestHeader(
        model=model,
        version=options.version,
        inputs=tuple(TensorHeader(name, datatype_name(array.dtype), array.shape) for name, array in inputs.items()),
        outputs=options.outputs,
        timeout_ms=options.timeout_ms,
        priority=options.priority,
        timing=options.timing,
        parameters=parameters,
    )


def _frame(name: str, array: Array) -> Frame:
    kind = array.dtype.kind
    if kind in "fiub" and array.nbytes < LENT_BYTES and array.dtype.isnative:
        return array.tobytes()
    if kind == "O" and not all(isinstance(element, str | bytes) for element in array.flat):
        raise TensorMismatch(f"input {name!r} is an array of objects; wanted text or bytes in each element, or numbers")
    data = array_to_wire(array)
    return data if isinstance(data, bytes) or memoryview(data).nbytes >= LENT_BYTES else bytes(data)


def _nbytes(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def _timing(fields: Mapping[str, float]) -> Timing:
    return Timing(float(fields["queue_ms"]), float(fields["run_ms"]), int(fields["batch_rows"]))


def _error(fields: Mapping[str, Any]) -> EdgeRuntimeError:
    forecast = fields.get("retry_after_ms")
    return error_from_wire(
        str(fields.get("code", "internal")),
        str(fields.get("message", "the daemon gave no message")),
        None if forecast is None else float(forecast),
    )
