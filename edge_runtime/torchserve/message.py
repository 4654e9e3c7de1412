"""TorchServe's messages: what a body means for a served model, and how answers and errors are worded.

Owns: the parts of a body, what each of TorchServe's built-in handlers would make of them, and its names of errors.
Pure. Thread: the door's for requests; answers are made on any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from edge_runtime.answers import BESIDE, Answer, kind_of, layout_of
from edge_runtime.doors.http.answer import error_frames, json_response, response, status_of
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.form import FORM_TYPE, boundary_of, cut_form
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.open_inference import oip
from edge_runtime.doors.open_inference.generate import raw_fields
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, ModelNotFound, RunFailed, TensorMismatch
from edge_runtime.messages import RAW, UNNAMED, TensorHeader, is_picture
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.tensors import Array
from edge_runtime.torchserve.model import HANDLER_INPUTS, is_handler
from edge_runtime.wire import codec, json_codec

V1 = "v1"
"""Marks a path in the form of TensorFlow Serving, `/v1/models/NAME:predict`; the others begin with `/predictions`."""

_WITHHELD_HEADERS = frozenset(("authorization", "cookie", "proxy-authorization"))
"""Headers of a request that no handler sees."""

_OWN_HEADERS = frozenset(("connection", "content-length", "content-type", "transfer-encoding", "date", "upgrade"))
"""Headers of a response that a handler does not set."""

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,1024}", re.ASCII)

_TYPES = {
    400: "BadRequestException",
    401: "InvalidKeyException",
    403: "InvalidKeyException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    409: "ConflictStatusException",
    503: "ServiceUnavailableException",
    504: "RequestTimeoutException",
}
OTHER_TYPE = "InternalServerException"

RUN_FAILED_STATUS = 503
"""The status where a handler raised: TorchServe's "Prediction failed"."""

JSON_KIND, TEXT_KIND, BYTES_KIND = "application/json", "text/plain; charset=utf-8", "application/octet-stream"
URL_FORM_TYPE = "application/x-www-form-urlencoded"


class Part(NamedTuple):
    """One part of a body: a field of a form, or the whole body, whose name is "body". kind: its Content-Type."""

    name: str
    kind: str
    data: bytes | memoryview

    def value(self) -> Any:
        """Its value where it is JSON, else its bytes. Raises DecodeFailed."""
        if self.kind == JSON_KIND:
            return json_codec.load_value(bytes(self.data))
        return self.data


class TorchServeBody(NamedTuple):
    """A request's body. rows: its values, one a row of the request; each is of `/v1`'s `instances`, or the only one.

    parts: of each row, for handlers. A row is bytes, a value of JSON, or a dict of those by a field's name.
    """

    parts: tuple[tuple[Part, ...], ...]
    rows: tuple[Any, ...]


def read_torchserve_body(body: bytes | memoryview, head: HttpHead, call: HttpCall) -> TorchServeBody:
    """Cut and decode a body. Raises DecodeFailed."""
    kind = head.headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    is_v1 = call.values["torchserve"] == V1
    if plain == FORM_TYPE and not is_v1:
        parts = tuple(
            Part(each.name, each.kind.partition(";")[0].strip().lower(), each.data)
            for each in cut_form(body, boundary_of(kind))
        )
    elif plain == URL_FORM_TYPE and not is_v1 and not _is_no_form(body):
        parts = tuple(Part(name, "", text.encode()) for name, text in _url_form(bytes(body)))
    else:
        looks_json = plain in {"", URL_FORM_TYPE} and bytes(body[:1]) in {b"{", b"["}
        parts = (Part("body", JSON_KIND if looks_json or is_v1 or plain.endswith("json") else plain, body),)
    if is_v1:
        return _instances(parts[0])
    if len(parts) == 1 and parts[0].name in {"body", "data"}:
        return TorchServeBody((parts,), (parts[0].value(),))
    return TorchServeBody((parts,), ({each.name: each.value() for each in parts},))


def request_of_body(servable: Servable, body: TorchServeBody, head: HttpHead) -> tuple[dict[str, Any], list[Any]]:
    """A request's fields in the protocol's words, and its tensors. Raises DecodeFailed, TensorMismatch."""
    if is_handler(servable.spec):
        return _handler_request(body, head)
    steps = servable.steps
    has_answers = steps is not None and steps.outputs and _mask_output(servable) is None
    fields: dict[str, Any] = {"parameters": {RAW: not has_answers} if steps is not None else {}}
    rows = [_unwrapped(row, servable.spec) for row in body.rows]
    takes_pictures = steps is not None and bool(steps.inputs)
    if takes_pictures and all(isinstance(row, bytes | memoryview | str) for row in rows):
        named: list[tuple[TensorHeader, Any]] = [
            (TensorHeader(UNNAMED, "BYTES", (len(rows),)), _elements([*map(_as_bytes, rows)], (len(rows),)))
        ]
    elif len(rows) == 1 and isinstance(rows[0], bytes | memoryview) and servable.spec.inputs[0].datatype != "BYTES":
        fields |= raw_fields(servable, len(rows[0]))
        (item,) = fields["inputs"]
        fields["parameters"].pop(oip.BINARY_OUTPUTS, None)
        named = [(TensorHeader(item["name"], item["datatype"], tuple(item["shape"])), rows[0])]
    else:
        named = [_tensor(spec, _values_of(spec, rows, servable.spec)) for spec in servable.spec.inputs]
    fields["inputs"] = [codec.tensor_fields(header) for header, _ in named]
    return fields, [data for _, data in named]


class TorchServeAnswer:
    """The answers to one call, as TorchServe and its built-in handlers give them."""

    def __init__(self, table: ModelTable, call: HttpCall) -> None:
        """call: not read further than its path yet; errors name model and version as they came."""
        self._table = table
        self._call = call
        self._values = dict(call.values)

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id here)
        """A whole response: of the one row, or of all rows as `predictions`."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        if is_handler(plan.servable.spec):
            return self._handled(selected)
        rows = _rows(plan, selected)
        if self._call.values["torchserve"] == V1:
            return _json({"predictions": rows}, self._call.deflates)
        (row,) = rows if len(rows) == 1 else (rows,)
        if isinstance(row, bytes):
            kind, body = _text_or_bytes(row)
            return response((body,), kind, deflates=self._call.deflates)
        return _json(row, self._call.deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error as TorchServe words it."""
        values = self._values
        status, kind, message = status_of(error), None, error.message
        if isinstance(error, ModelNotFound) and "name" in values:
            name, version = values["name"], values.get("version")
            kind, message = "ModelNotFoundException", f"Model not found: {name}"
            if version is not None and self._table.statuses_of(name):
                kind = "ModelVersionNotFoundException"
                message = f"Model version: {version} does not exist for model: {name}"
        if isinstance(error, RunFailed):
            status, kind = RUN_FAILED_STATUS, OTHER_TYPE
        return error_frames(error, status, error_fields(status, message, kind))

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """The result of another call: its JSON, and its status."""
        return json_response(*result)

    def _handled(self, selected: Sequence[Array]) -> Frames:
        """Write what a handler returned, with the status and the headers that it set."""
        bodies: list[bytes] = selected[0].reshape(-1).tolist()
        said = json_codec.loads(selected[1].reshape(-1).tolist()[0])
        status = codec.typed(said, "status", int, 200)
        status = status if 200 <= status <= 599 else 500
        if codec.typed(said, "is_error", bool, False):
            fields = error_fields(status, bodies[0].decode("utf-8", "replace"), OTHER_TYPE)
            return response((json_codec.dumps(fields),), JSON_KIND, status)
        if self._call.values["torchserve"] == V1:
            return _json({"predictions": [_json_or_text(each) for each in bodies]}, self._call.deflates)
        kind, more = JSON_KIND, ""
        for name, value in codec.typed(said, "headers", dict, {}).items():
            if not (_HEADER.fullmatch(name) and isinstance(value, str) and _HEADER_VALUE.fullmatch(value)):
                continue
            if name.lower() == "content-type":
                kind = value
            elif name.lower() not in _OWN_HEADERS:
                more += f"{name}: {value}\r\n"
        return response((bodies[0],), kind, status, more, deflates=self._call.deflates)


def error_fields(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    """The body of an error. kind: TorchServe's name of it; by its status where it is None."""
    return {"code": status, "type": kind or _TYPES.get(status, OTHER_TYPE), "message": message}


# ---- private: requests ----------------------------------------------------------------------------------------------


def _is_no_form(body: bytes | memoryview) -> bool:
    """Whether a body is JSON or a picture, of which curl -d says that it is a form."""
    return bytes(body[:1]) in {b"{", b"["} or is_picture(bytes(body[:16]))


def _url_form(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=512)
    except ValueError as error:
        raise DecodeFailed(f"the form is not {URL_FORM_TYPE}: {error}") from None


def _instances(part: Part) -> TorchServeBody:
    value = part.value()
    rows = value.get("instances") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DecodeFailed('the body: wanted {"instances": [...]}, one item for each row')
    named = (each if isinstance(each, dict) and each else {"body": each} for each in rows)
    parts = (tuple(Part(name, JSON_KIND, json_codec.dumps(value)) for name, value in each.items()) for each in named)
    return TorchServeBody(tuple(parts), tuple(rows))


def _handler_request(body: TorchServeBody, head: HttpHead) -> tuple[dict[str, Any], list[Any]]:
    headers = {name: value for name, value in head.headers.items() if name not in _WITHHELD_HEADERS}
    bodies: list[bytes] = []
    said: list[bytes] = []
    for parts in body.parts:
        bodies.append(bytes(parts[0].data) if len(parts) == 1 else b"".join(each.data for each in parts))
        listed = [[each.name, each.kind, len(each.data)] for each in parts]
        said.append(json_codec.dumps({"parts": listed, "headers": headers}))
    shape = (len(body.parts), 1)
    fields = {
        "inputs": [{"name": name, "datatype": "BYTES", "shape": list(shape)} for name in HANDLER_INPUTS],
        "parameters": {},
    }
    return fields, [_elements(bodies, shape), _elements(said, shape)]


def _unwrapped(row: Any, spec: ModelSpec) -> Any:
    """A row without the object around the value of the only input: `{"data": …}`, `{"body": …}`, `{"b64": …}`."""
    while isinstance(row, dict) and len(spec.inputs) == 1:
        name = next((each for each in (spec.inputs[0].name, "data", "body", "b64") if each in row), None)
        if name is None:
            break
        row = row[name]
    return row


def _values_of(spec: TensorSpec, rows: Sequence[Any], whole: ModelSpec) -> list[Any]:
    """The value of one input in each row. Raises TensorMismatch."""
    if len(whole.inputs) == 1 and not any(isinstance(row, dict) for row in rows):
        return list(rows)
    names = ", ".join(each.name for each in whole.inputs)
    for row in rows:
        if not isinstance(row, dict) or spec.name not in row:
            got = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise TensorMismatch(
                f"input {codec.short(spec.name)} is missing: got {got[:200]}; wanted an object, or a form, with {names}"
            )
    return [row[spec.name] for row in rows]


def _tensor(spec: TensorSpec, values: list[Any]) -> tuple[TensorHeader, Array]:
    """Values of rows as one tensor. Raises DecodeFailed, TensorMismatch."""
    if spec.datatype == "BYTES" and all(isinstance(each, bytes | memoryview | str) for each in values):
        shape: tuple[int, ...] = (len(values), *(1 for _ in spec.shape[1:]))
        return TensorHeader(spec.name, "BYTES", shape), _elements([*map(_as_bytes, values)], shape)
    if any(isinstance(each, bytes | memoryview) for each in values):
        values = [
            json_codec.load_value(bytes(each)) if isinstance(each, bytes | memoryview) else each for each in values
        ]
    shape, flat = json_codec.nested(spec.name, values)
    if len(values) == 1 and len(shape) == len(spec.shape) + 1:
        shape = shape[1:]
    header = TensorHeader(spec.name, spec.datatype, shape)
    return header, json_codec.array_from_json(header, flat)


def _as_bytes(value: bytes | memoryview | str) -> bytes | memoryview:
    return value.encode() if isinstance(value, str) else value


def _elements(data: Sequence[bytes | memoryview], shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(len(data), dtype=object)
    for index, each in enumerate(data):
        array[index] = each
    return array.reshape(shape)


# ---- private: answers -----------------------------------------------------------------------------------------------


def _mask_output(servable: Servable) -> str | None:
    """The output that declares a mask: its class and probability are made of the bare tensor."""
    if servable.steps is None:
        return None
    return next((name for name, each in servable.steps.outputs.items() if kind_of(each) == "mask"), None)


def _rows(plan: RequestPlan, selected: Sequence[Array]) -> list[Any]:
    """The values of an answer, one item a row."""
    answers = plan.answers(selected)
    if answers is not None:
        return [_words(each) for each in answers]
    headers = plan.tensor_headers([each.shape for each in selected])
    mask = _mask_output(plan.servable)
    if mask is not None:
        array = next((each for header, each in zip(headers, selected, strict=True) if header.name == mask), None)
        if array is not None:
            return list(_best_of_each_pixel(array))
    named = {
        header.name: _row_values(header.datatype, each, plan.rows if plan.servable.batches else 1)
        for header, each in zip(headers, selected, strict=True)
    }
    if len(named) == 1:
        return next(iter(named.values()))
    count = min(len(each) for each in named.values())
    return [{name: _in_json(each[row]) for name, each in named.items()} for row in range(count)]


def _row_values(datatype: str, array: Array, rows: int) -> list[Any]:
    """An output's values, one item a row. Text stays bytes."""
    if datatype == "BYTES":
        values: list[bytes] = array.reshape(-1).tolist()
        if array.ndim and len(values) == array.shape[0]:
            return values
        return [[each.decode("utf-8", "replace") for each in values]]
    flat = json_codec.array_to_json(datatype, array)
    if isinstance(flat, list):  # of numbers that are not finite
        flat = np.array(flat, dtype=object)
    numbers = flat.reshape(array.shape)
    found = list(numbers) if array.ndim and array.shape[0] == rows else [numbers]
    return [each.tolist() if numbers.dtype.kind == "O" and isinstance(each, np.ndarray) else each for each in found]


def _words(answer: Answer) -> Any:
    """One row's answer as TorchServe's handler of that kind gives it."""
    if answer.classes is not None:
        return {each.label: each.score for each in answer.classes}
    if answer.boxes is not None:
        return [{each.label: [*each.box], "score": each.score} for each in answer.boxes]
    if answer.text is not None:
        return answer.text.encode()
    for array in (answer.mask, answer.embedding):
        if array is not None:
            return array
    said = (layout_of(kind).to_json(value) for kind, value in answer.values().items() if kind not in BESIDE.values())
    return next(said, {})


def _best_of_each_pixel(array: Array) -> Array:
    """Class and probability of each pixel, FP32 [rows, height, width, 2], of logits [rows, classes, height, width].

    Of classes themselves, [rows, height, width] or with one channel: probability 1.
    """
    if array.ndim == 4 and array.shape[1] > 1:
        logits = array.astype(np.float32)
        best = logits.argmax(axis=1)
        top = logits.max(axis=1, keepdims=True)
        found = 1 / np.exp(logits - top).sum(axis=1)
    else:
        best = array[:, 0] if array.ndim == 4 else array
        found = np.ones(best.shape, np.float32)
    return np.stack([best.astype(np.float32), found.astype(np.float32)], axis=-1)


def _in_json(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _json(value: Any, deflates: str | None) -> Frames:
    if isinstance(value, dict) and "predictions" in value:
        value = {"predictions": [_in_json(each) for each in value["predictions"]]}
    return response((json_codec.dumps(value),), JSON_KIND, deflates=deflates)


def _text_or_bytes(data: bytes) -> tuple[str, bytes]:
    try:
        data.decode()
    except UnicodeDecodeError:
        return BYTES_KIND, data
    return TEXT_KIND, data


def _json_or_text(data: bytes) -> Any:
    try:
        return json_codec.load_value(data)
    except DecodeFailed:
        return data.decode("utf-8", "replace")
