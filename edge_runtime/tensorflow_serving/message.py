"""TensorFlow Serving's bodies: rows and columns of JSON as tensors, and outputs as predictions.

Owns: what `instances` and `inputs` mean for a served model, `{"b64": …}`, and how answers are written. Pure. Thread:
the door's for requests; bodies are read and answers made on any.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edge_runtime.answers import answer_fields
from edge_runtime.doors.http.answer import error_frames, json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.servable import Servable
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.tensors import Array
from edge_runtime.wire import codec, json_codec

SIGNATURE = "serving_default"
"""The name of the one signature that every model has."""

INSTANCES, INPUTS = "instances", "inputs"

BINARY, BINARY_OUTPUT = "b64", "_bytes"
"""The key of binary text in base64; and the end of names of outputs that are answered so."""


class PredictBody(NamedTuple):
    """A body. is_rows: whether `value` is `instances`, one item a row, else `inputs`, whole tensors."""

    value: Any
    is_rows: bool


class NamedTensor(NamedTuple):
    """One input. array: of a text, its bytes in BYTES."""

    name: str
    datatype: str
    array: Array


def read_predict_body(body: bytes) -> PredictBody:
    """Read a body. Raises DecodeFailed."""
    fields = json_codec.loads(body)
    name = codec.typed(fields, "signature_name", str, SIGNATURE) or SIGNATURE
    if name != SIGNATURE:
        raise DecodeFailed(
            f'Serving signature name: "{name[:80]}" not found in signature def; every model here has {SIGNATURE} alone'
        )
    given = [key for key in (INSTANCES, INPUTS) if fields.get(key) is not None]
    if len(given) != 1:
        raise DecodeFailed(
            f"got {' and '.join(given) or 'neither'}; wanted one of '{INSTANCES}', a list with an item for each row, "
            f"and '{INPUTS}', whole tensors"
        )
    is_rows = given == [INSTANCES]
    if is_rows and not (isinstance(fields[INSTANCES], list) and fields[INSTANCES]):
        raise DecodeFailed(f"{INSTANCES}: wanted a list with at least one item")
    return PredictBody(fields[given[0]], is_rows)


def prediction_requests(servable: Servable, body: PredictBody, call: HttpCall) -> CallRequests:
    """Return the requests that a body means: as many rows in each as the model takes. Raises EdgeRuntimeError."""
    tensors = _row_tensors(servable, body.value) if body.is_rows else _column_tensors(servable, body.value)
    whole = _header(servable, tensors, call)
    form = servable.form_for(whole)
    counts = {len(each.array) if each.array.ndim else -1 for each in tensors}
    (count,) = counts if len(counts) == 1 else (-1,)
    if body.is_rows and not form.batches and _have_no_rows(form, tensors):
        # Each instance is a whole tensor of a model without rows.
        parts = [[each._replace(array=each.array[row]) for each in tensors] for row in range(count)]
    else:
        step = form.max_rows if form.batches else 1 if _takes_one_row(form, tensors) else count
        starts = range(0, count, step) if count > step > 0 else (0,)
        parts = [
            [each._replace(array=each.array[start : start + step]) for each in tensors] if len(starts) > 1 else tensors
            for start in starts
        ]
    encoding: PredictionRows | PredictedColumns = PredictedColumns(call.deflates)
    if body.is_rows:
        encoding = PredictionRows(call.deflates, count, len(parts))
    requests = [(_header(servable, part, call), [each.array for each in part]) for part in parts]
    return CallRequests(encoding, requests)


class PredictedColumns:
    """The answer to `inputs`: each output whole, the only one by itself."""

    def __init__(self, deflates: str | None) -> None:
        self._deflates = deflates

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id)
        """The outputs of one request."""
        return self.join((request,))

    def join(self, requests: Sequence[Request]) -> Frames:
        """The outputs of several, one after another."""
        words = _words(requests)
        if words is not None:
            return json_response({"outputs": words}, deflates=self._deflates)
        columns = {name: _in_json(name, datatype, array) for name, datatype, array in _outputs(requests)}
        told = next(iter(columns.values())) if len(columns) == 1 else columns
        return json_response({"outputs": told}, deflates=self._deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return error_frames(error, fields={"error": error.message})

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)


class PredictionRows(PredictedColumns):
    """The answer to `instances`: an item for each, the value of the only output or an object by outputs' names.

    count: of instances; parts: of requests that they became.
    """

    def __init__(self, deflates: str | None, count: int, parts: int) -> None:
        super().__init__(deflates)
        self._count = count
        self._parts = parts

    def join(self, requests: Sequence[Request]) -> Frames:
        """The rows of several, one after another. Raises TensorMismatch: an output has not a row for each."""
        words = _words(requests)
        if words is not None:
            return json_response({"predictions": words}, deflates=self._deflates)
        columns = {name: self._rows(name, datatype, array) for name, datatype, array in _outputs(requests, self._each)}
        if len(columns) == 1:
            return json_response({"predictions": next(iter(columns.values()))}, deflates=self._deflates)
        rows = [{name: each[row] for name, each in columns.items()} for row in range(self._count)]
        return json_response({"predictions": rows}, deflates=self._deflates)

    def _each(self, array: Array) -> Array:
        """An output of one request, with rows where each request is one instance of a model without."""
        is_one = self._count == self._parts
        return array[None] if is_one and not (array.ndim and len(array) == 1) else array

    def _rows(self, name: str, datatype: str, array: Array) -> Any:
        if len(array) != self._count:
            raise TensorMismatch(
                f"Tensor name: {name} has inconsistent batch size: {len(array)} expecting: {self._count}; ask with "
                f"'{INPUTS}' in place of '{INSTANCES}'"
            )
        return _in_json(name, datatype, array)


# ---- private: requests ----------------------------------------------------------------------------------------------


def _header(servable: Servable, tensors: Sequence[NamedTensor], call: HttpCall) -> RequestHeader:
    return RequestHeader(
        model=servable.model,
        version=call.version,
        inputs=tuple(TensorHeader(each.name, each.datatype, each.array.shape) for each in tensors),
        timeout_ms=call.timeout_ms,
    )


def _have_no_rows(form: Servable, tensors: Sequence[NamedTensor]) -> bool:
    """Whether each instance has all axes of its input, so that there is none for rows."""
    ranks = {each.name: len(each.shape) for each in form.spec.inputs}
    return all(ranks.get(each.name) == each.array.ndim - 1 for each in tensors)


def _takes_one_row(form: Servable, tensors: Sequence[NamedTensor]) -> bool:
    """Whether axis 0 of each input has the length 1."""
    shapes = {each.name: each.shape for each in form.spec.inputs}
    return all(shapes.get(each.name, ())[:1] == (1,) for each in tensors)


def _names(servable: Servable, is_text: Callable[[], bool]) -> dict[str, str]:
    """The inputs that a caller may send, with their datatypes: those of declared steps where text or pictures come."""
    steps = servable.steps
    if steps is not None and steps.inputs and is_text():
        return dict.fromkeys(steps.inputs, "BYTES")
    return {each.name: each.datatype for each in servable.spec.inputs}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_binary(value)


def _is_binary(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {BINARY}


def _row_tensors(servable: Servable, rows: Sequence[Any]) -> list[NamedTensor]:
    """The inputs of `instances`: each with a row for each item. Raises DecodeFailed, TensorMismatch."""
    first = rows[0]
    is_named = isinstance(first, dict) and not _is_binary(first)
    values = first.values() if is_named else (first,)
    names = _names(servable, lambda: all(_is_text(_first(each)) for each in values))
    if not is_named:
        if len(names) != 1:
            raise TensorMismatch(
                f"{INSTANCES}: got values without names; wanted objects with {', '.join(names)}, the inputs of model "
                f"{servable.model}"
            )
        if any(isinstance(each, dict) and not _is_binary(each) for each in rows):
            raise TensorMismatch(f"{INSTANCES}: got objects beside values; wanted items of one kind")
        ((name, datatype),) = names.items()
        return [_tensor(name, datatype, list(rows))]
    if not isinstance(first, dict) or any(not isinstance(each, dict) or each.keys() != first.keys() for each in rows):
        raise TensorMismatch(f"{INSTANCES}: wanted objects that all have the same names")
    _check_names(servable, first, names, INSTANCES)
    return [_tensor(name, names[name], [each[name] for each in rows]) for name in first]


def _column_tensors(servable: Servable, value: Any) -> list[NamedTensor]:
    """The inputs of `inputs`, whole. Raises DecodeFailed, TensorMismatch."""
    is_named = isinstance(value, dict) and not _is_binary(value)
    values = list(value.values()) if is_named else [value]
    names = _names(servable, lambda: all(_is_text(_first(each)) for each in values))
    if not is_named:
        if len(names) != 1:
            raise TensorMismatch(
                f"{INPUTS}: got a value without a name; wanted an object with {', '.join(names)}, the inputs of model "
                f"{servable.model}"
            )
        ((name, datatype),) = names.items()
        return [_tensor(name, datatype, value)]
    _check_names(servable, value, names, INPUTS)
    return [_tensor(name, names[name], each) for name, each in value.items()]


def _check_names(servable: Servable, given: Mapping[str, Any], names: Mapping[str, str], key: str) -> None:
    strange = next((each for each in given if each not in names), None)
    if strange is not None:
        raise TensorMismatch(
            f"{key}: model {servable.model} has no input {codec.short(strange)}; it takes {', '.join(names)}"
        )


def _first(value: Any) -> Any:
    """The first element of nested lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _tensor(name: str, datatype: str, value: Any) -> NamedTensor:
    """Nested lists, or one value, as a tensor. Raises DecodeFailed, TensorMismatch."""
    shape, flat = json_codec.nested(name, value)
    if datatype == "BYTES":
        flat = [_text(name, each) for each in flat]
        array: Array = np.empty(len(flat), object)
        array[:] = flat
        return NamedTensor(name, datatype, array.reshape(shape))
    return NamedTensor(name, datatype, json_codec.array_from_json(TensorHeader(name, datatype, shape), flat))


def _text(name: str, value: Any) -> bytes:
    """The bytes of one text. Raises DecodeFailed, TensorMismatch."""
    if _is_binary(value) and isinstance(value[BINARY], str):
        try:
            return base64.b64decode(value[BINARY], validate=True)
        except ValueError as error:
            raise DecodeFailed(f"input {codec.short(name)}: {BINARY}: not base64: {error}") from None
    if not isinstance(value, str):
        raise TensorMismatch(f'input {codec.short(name)}: got {codec.short(value)}, wanted text or {{"{BINARY}": …}}')
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise DecodeFailed(f"input {codec.short(name)}: got half a surrogate pair, which no text has") from None


# ---- private: answers -----------------------------------------------------------------------------------------------


def _words(requests: Sequence[Request]) -> list[Any] | None:
    """The answers in words, one a row; None where they are bare outputs."""
    found: list[Any] = []
    for request in requests:
        plan: RequestPlan = request.plan
        answers = plan.answers(plan.select(request.outputs))
        if answers is None:
            return None
        found += [answer_fields((each,), as_list=False) for each in answers]
    return found


def _outputs(
    requests: Sequence[Request], each: Callable[[Array], Array] = lambda array: array
) -> list[tuple[str, str, Array]]:
    """Name, datatype and rows of each output. each: makes rows of one request's."""
    plan: RequestPlan = requests[0].plan
    columns = zip(*(request.plan.select(request.outputs) for request in requests), strict=True)
    found = []
    for column in columns:
        rows = [each(array) for array in column]
        found.append(rows[0] if len(rows) == 1 else np.concatenate(rows))
    headers = plan.tensor_headers([array.shape for array in found])
    return [(header.name, header.datatype, array) for header, array in zip(headers, found, strict=True)]


def _in_json(name: str, datatype: str, array: Array) -> Any:
    """An output as nested lists, for JSON."""
    if datatype == "BYTES":
        texts = np.empty(array.size, object)
        texts[:] = [_told(name, each) for each in array.reshape(-1).tolist()]
        return texts.reshape(array.shape).tolist()
    flat = json_codec.array_to_json(datatype, array)
    if isinstance(flat, list):  # of numbers that are not finite
        numbers: Array = np.empty(len(flat), object)
        numbers[:] = flat
        return numbers.reshape(array.shape).tolist()
    # ONNX Runtime's INT64 is C's long long, of which orjson takes arrays and no single numbers: rows may be such.
    return flat.view(flat.dtype.str).reshape(array.shape)


def _told(name: str, value: Any) -> Any:
    """One text: in base64 where its output's name says so, or where it is not UTF-8."""
    data = value if isinstance(value, bytes) else str(value).encode()
    if not name.endswith(BINARY_OUTPUT):
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    return {BINARY: base64.b64encode(data).decode()}
