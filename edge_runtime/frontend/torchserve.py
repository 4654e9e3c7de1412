"""TorchServe's paths over HTTP: predictions, ping and models, as requests and operations of the one table.

Owns: which paths are TorchServe's, what a body means for a served model, and how answers and errors are worded there.
On only with `http.torchserve`. `HttpFrontend` calls it. Thread: the door's; answers are made on any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, parse_qsl, unquote

import numpy as np

from edge_runtime.answers import Answer, kind_of
from edge_runtime.backends.torchserve_model import HANDLER_INPUTS, HANDLER_OUTPUTS
from edge_runtime.errors import (
    DecodeFailed,
    EdgeRuntimeError,
    ModelNotFound,
    RunFailed,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.frontend.generate import raw_fields
from edge_runtime.frontend.http_form import FORM_TYPE, boundary_of, cut_form
from edge_runtime.frontend.http_message import INFER, OPTIONS, HttpCall, error_frames, read_headers, response
from edge_runtime.frontend.open_inference import Caller, OpenInference
from edge_runtime.frontend.operations import Done
from edge_runtime.messages import PICTURE, TensorHeader, is_picture
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.scheduling.request import Request
from edge_runtime.serving.model_table import ModelTable, VersionState
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servable import Servable
from edge_runtime.tensors import Array
from edge_runtime.transports.http_head import BadMessage, HttpHead
from edge_runtime.transports.http_transport import Frames
from edge_runtime.wire import codec, json_codec, oip

PING, MODELS, DESCRIBE, REGISTER, UNREGISTER, SCALE, SET_DEFAULT, EXPLAIN, V1_READY = (
    *("torchserve_ping", "torchserve_models", "torchserve_describe", "torchserve_register"),
    *("torchserve_unregister", "torchserve_scale", "torchserve_default", "torchserve_explain", "torchserve_v1_ready"),
)

PREDICTIONS, V1 = "predictions", "v1"

_MODEL = r"/models/(?P<name>[^/]+)(?:/(?P<version>[^/]+))?"

_PATHS: tuple[tuple[re.Pattern[str], Mapping[str, str]], ...] = tuple(
    (re.compile(path), calls)
    for path, calls in (
        # curl -T sends PUT
        (r"/(?P<torchserve>predictions)/(?P<name>[^/]+)(?:/(?P<version>[^/]+))?", {"POST": INFER, "PUT": INFER}),
        (r"/(?P<torchserve>v1)/models/(?P<name>[^/:]+):predict", {"POST": INFER}),
        (r"/v1/models/(?P<name>[^/:]+)", {"GET": V1_READY}),
        (r"/ping", {"GET": PING}),
        (r"/models", {"GET": MODELS, "POST": REGISTER}),
        (_MODEL, {"GET": DESCRIBE, "PUT": SCALE, "DELETE": UNREGISTER}),
        (_MODEL + r"/set-default", {"PUT": SET_DEFAULT}),
        (r"/explanations/(?P<name>[^/]+)(?:/(?P<version>[^/]+))?", {"POST": EXPLAIN, "PUT": EXPLAIN}),
        (r"/v1/models/(?P<name>[^/:]+):explain", {"POST": EXPLAIN}),
    )
)

ALL_VERSIONS = "all"

_WITHHELD_HEADERS = frozenset(("authorization", "cookie", "proxy-authorization"))
"""Headers of a request that no handler sees."""

_OWN_HEADERS = frozenset(("connection", "content-length", "content-type", "transfer-encoding", "date", "upgrade"))
"""Headers of a response that a handler does not set."""

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,1024}", re.ASCII)

_VERSION = re.compile(r"([1-9][0-9]{0,17})(?:\.0){0,2}", re.ASCII)

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
"""Of a handler that raised: TorchServe's "Prediction failed"."""

MOST_LISTED = 100
"""Models of one page where the client names no limit, as TorchServe has it."""

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


class Sent(NamedTuple):
    """A request's body. rows: its values, one a row of the request; each is of `/v1`'s `instances`, or the only one.

    parts: of each row, for handlers. A row is bytes, a value of JSON, or a dict of those by a field's name.
    """

    parts: tuple[tuple[Part, ...], ...]
    rows: tuple[Any, ...]


class TorchServe:
    """TorchServe's calls, answered by the table of models and the table of operations."""

    def __init__(self, protocol: OpenInference, table: ModelTable) -> None:
        self._protocol = protocol
        self._table = table
        self._calls: dict[str, Callable[[Mapping[str, str], Caller, Done], None]] = {
            PING: self._ping,
            MODELS: self._models,
            DESCRIBE: self._describe,
            REGISTER: self._register,
            UNREGISTER: self._unregister,
            SCALE: self._scale,
            SET_DEFAULT: self._set_default,
            EXPLAIN: self._explain,
            V1_READY: self._v1_ready,
        }

    def read_call(self, head: HttpHead) -> HttpCall | None:
        """What a head asks for; None where its path is none of TorchServe's."""
        for path, calls in _PATHS:
            found = path.fullmatch(head.path)
            if found is None:
                continue
            call = HttpCall()
            call.values = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
            call.refuse = partial(self.refusal, dict(call.values))
            try:
                _read(head, call, calls)
            except BadMessage as error:
                call.refusal = call.refuse(error, error.status)
            except EdgeRuntimeError as error:
                call.refusal = call.refuse(error, None)
            return call
        return None

    def refusal(self, values: Mapping[str, str], error: EdgeRuntimeError, status: int | None = None) -> Frames:
        """An error as TorchServe words it. values: of the call's path."""
        kind, message = None, error.message
        if isinstance(error, ModelNotFound) and "name" in values:
            name, version = values["name"], values.get("version")
            kind, message = "ModelNotFoundException", f"Model not found: {name}"
            if version is not None and self._table.statuses_of(name):
                kind = "ModelVersionNotFoundException"
                message = f"Model version: {version} does not exist for model: {name}"
        if isinstance(error, RunFailed):
            status, kind = RUN_FAILED_STATUS, OTHER_TYPE
        if status is None:
            status = oip.error_status(error)[0]
        return error_frames(error, status, error_fields(status, message, kind))

    def has(self, name: str) -> bool:
        """Whether it answers a call."""
        return name in self._calls

    def call(self, name: str, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        """Answer one call but predictions.

        reply: gets the JSON of the answer and its status, or an EdgeRuntimeError, once, from any thread.
        """
        try:
            self._calls[name](values, caller, reply)
        except EdgeRuntimeError as error:
            reply(error)

    # ---- predictions ------------------------------------------------------------------------------------------------

    @staticmethod
    def read_body(body: bytes | memoryview, head: HttpHead, call: HttpCall) -> Sent:
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
            return Sent((parts,), (parts[0].value(),))
        return Sent((parts,), ({each.name: each.value() for each in parts},))

    @staticmethod
    def request(servable: Servable, sent: Sent, head: HttpHead) -> tuple[dict[str, Any], list[Any]]:
        """A request's fields in the protocol's words, and its tensors. Raises DecodeFailed, TensorMismatch."""
        if is_handler(servable.spec):
            return _handler_request(sent, head)
        steps = servable.steps
        has_answers = steps is not None and steps.outputs and _mask_output(servable) is None
        fields: dict[str, Any] = {"parameters": {oip.RAW: not has_answers} if steps is not None else {}}
        rows = [_unwrapped(row, servable.spec) for row in sent.rows]
        takes_pictures = steps is not None and bool(steps.inputs)
        if takes_pictures and all(isinstance(row, bytes | memoryview | str) for row in rows):
            named: list[tuple[TensorHeader, Any]] = [
                (TensorHeader(PICTURE, "BYTES", (len(rows),)), _elements([*map(_as_bytes, rows)], (len(rows),)))
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

    # ---- other calls ------------------------------------------------------------------------------------------------

    def _ping(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        del values

        def told(ready: Any) -> None:
            failed = any(each.state is VersionState.FAILED for each in self._table.statuses())
            if isinstance(ready, EdgeRuntimeError) or not ready["ready"]:
                reply(({"status": "Unhealthy"}, 500))
            else:
                reply(({"status": "Partial Healthy" if failed else "Healthy"}, 200))

        self._protocol.call("server_ready", {}, caller, told)

    def _models(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        query = parse_qs(values["query"])
        begin, limit = _whole(query, "next_page_token", 0), _whole(query, "limit", MOST_LISTED)

        def page(entries: list[dict[str, Any]]) -> tuple[Any, int]:
            names = sorted({each["name"] for each in entries if each["version"] is not None})
            listed = names[begin : begin + limit]
            fields: dict[str, Any] = {"models": [{"modelName": name, "modelUrl": f"{name}.mar"} for name in listed]}
            if begin + limit < len(names):
                fields["nextPageToken"] = str(begin + limit)
            return fields, 200

        self._protocol.operate("models", {}, caller, reply, page)

    def _describe(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        name, wanted = values["name"], values.get("version")

        def told(entries: list[dict[str, Any]]) -> Any:
            found = [each for each in entries if each["name"] == name and each["version"] is not None]
            if wanted not in (None, ALL_VERSIONS):
                found = [each for each in found if str(each["version"]) == wanted]
            elif wanted is None and found:
                found = [max(found, key=lambda each: (each["state"] == VersionState.READY.value, each["version"]))]
            if not found:
                return ModelNotFound(f"there is no model {codec.short(name)}")
            return [self._described(each) for each in found], 200

        self._protocol.operate("models", {}, caller, reply, told)

    def _register(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        query = parse_qs(values["query"])
        url = query.get("url", [""])[0]
        if "://" in url:
            raise Unsupported("no archive is fetched here; run: edge-runtime import FILE.mar --models DIR")
        name = query.get("model_name", [url.rpartition("/")[2].removesuffix(".mar")])[0]
        if not name:
            raise DecodeFailed("url: wanted the name of a model in the models folder, as in /models?url=resnet.mar")
        said = {"status": f'Model "{name}" registered with 1 initial workers'}
        self._protocol.operate("load", {"name": name}, caller, reply, lambda _: (said, 200))

    def _unregister(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        said = {"status": f'Model "{values["name"]}" unregistered'}
        self._protocol.operate("unload", values, caller, reply, lambda _: (said, 200))

    def _scale(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        least = _whole(parse_qs(values["query"]), "min_worker", 1)
        version = values.get("version")

        def told(_: Any) -> Any:
            servable = self._table.resolve(values["name"], int(version) if version is not None else None)
            runs = servable.layouts.narrow.concurrency
            if not 1 <= least <= runs:
                text = f"min_worker: got {least}, and {runs} run at once here, as the device profile and model.toml say"
                return DecodeFailed(f"{text}; change it there, and unload a model by DELETE")
            return {"status": f"Workers scaled to {runs} for model: {values['name']}"}, 200

        self._protocol.operate("ready", values, caller, reply, told)

    def _set_default(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        del caller, reply
        raise Unsupported(
            f"the newest version that is ready answers for {codec.short(values['name'])}; unload it, or name a version "
            "in the request"
        )

    def _explain(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        del values, caller, reply
        raise Unsupported("explanations are not offered here: they need the model's gradients")

    def _v1_ready(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        name = values["name"]
        if not self._table.statuses_of(name):
            raise ModelNotFound(f"there is no model {codec.short(name)}")
        self._protocol.operate("ready", values, caller, reply, lambda ready: ({"name": name, "ready": ready}, 200))

    def _described(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        name, number = entry["name"], entry["version"]
        servable = self._table.find(name, number)
        runs = servable.layouts.narrow.concurrency if servable is not None else 0
        host = entry["host"] or {}
        worker = {
            "id": str(host.get("pid", 0)),
            "status": "READY" if entry["state"] == VersionState.READY.value else "UNLOADING",
            "memoryUsage": entry["memory_bytes"],
            "pid": host.get("pid", 0),
            "gpu": entry["device"] not in {"", "CPU"},
            "gpuUsage": "N/A",
        }
        return {
            "modelName": name,
            "modelVersion": f"{number}.0",
            "modelUrl": f"{name}.mar",
            "runtime": "python" if entry["backend"] == "python" else entry["backend"],
            "minWorkers": runs,
            "maxWorkers": runs,
            "batchSize": servable.max_rows if servable is not None else 1,
            "maxBatchDelay": int(servable.settings.max_queue_delay_ms) if servable is not None else 0,
            "loadedAtStartup": True,
            "workers": [worker] if servable is not None else [],
        }


class TorchServeAnswer:
    """The answer to a prediction, as TorchServe's built-in handlers give it."""

    def __init__(self, call: HttpCall) -> None:
        self._refuse = call.refuse
        self._is_v1 = call.values["torchserve"] == V1
        self._deflates = call.deflates

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id here)
        """A whole response: of the one row, or of all rows as `predictions`."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        if is_handler(plan.servable.spec):
            return self._handled(selected)
        rows = _rows(plan, selected)
        if self._is_v1:
            return _json({"predictions": rows}, self._deflates)
        (row,) = rows if len(rows) == 1 else (rows,)
        if isinstance(row, bytes):
            kind, body = _text_or_bytes(row)
            return response((body,), kind, deflates=self._deflates)
        return _json(row, self._deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return self._refuse(error, None)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Never called: other operations are answered by `TorchServe.call`."""
        return _json(result, self._deflates)

    def _handled(self, selected: Sequence[Array]) -> Frames:
        """What a handler returned, with the status and the headers that it set."""
        bodies: list[bytes] = selected[0].reshape(-1).tolist()
        if self._is_v1:
            return _json({"predictions": [_json_or_text(each) for each in bodies]}, self._deflates)
        said = json_codec.loads(selected[1].reshape(-1).tolist()[0])
        status = codec.typed(said, "status", int, 200)
        status = status if 200 <= status <= 599 else 500
        if codec.typed(said, "is_error", bool, False):
            fields = error_fields(status, bodies[0].decode("utf-8", "replace"), OTHER_TYPE)
            return response((json_codec.dumps(fields),), JSON_KIND, status)
        kind, more = JSON_KIND, ""
        for name, value in codec.typed(said, "headers", dict, {}).items():
            if not (_HEADER.fullmatch(name) and isinstance(value, str) and _HEADER_VALUE.fullmatch(value)):
                continue
            if name.lower() == "content-type":
                kind = value
            elif name.lower() not in _OWN_HEADERS:
                more += f"{name}: {value}\r\n"
        return response((bodies[0],), kind, status, more, deflates=self._deflates)


def is_handler(spec: ModelSpec) -> bool:
    """Whether a model takes and gives what a handler of TorchServe's does."""
    return (
        tuple(each.name for each in spec.inputs) == HANDLER_INPUTS
        and tuple(each.name for each in spec.outputs) == HANDLER_OUTPUTS
        and {each.datatype for each in (*spec.inputs, *spec.outputs)} == {"BYTES"}
    )


def error_fields(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    """The body of an error. kind: TorchServe's name of it; by its status where it is None."""
    return {"code": status, "type": kind or _TYPES.get(status, OTHER_TYPE), "message": message}


# ---- private: requests ----------------------------------------------------------------------------------------------


def _read(head: HttpHead, call: HttpCall, calls: Mapping[str, str]) -> None:
    if head.method == "OPTIONS":  # a browser's question
        call.name = OPTIONS
        return
    if head.method not in calls:
        raise BadMessage(f"got {head.method}, wanted {' or '.join(calls)} for {head.path}", 405)
    call.name = calls[head.method]
    version = call.values.get("version")
    if version is not None and not (call.name == DESCRIBE and version == ALL_VERSIONS):
        number = _VERSION.fullmatch(version)
        if number is None:
            raise ModelNotFound(f"there is no version {codec.short(version)} here; wanted a whole number, as 2 or 2.0")
        call.values["version"] = number[1]
    if call.name != INFER:
        call.values["query"], call.ignores_body = head.query, True
    read_headers(head, call)
    call.head_bytes = None


def _is_no_form(body: bytes | memoryview) -> bool:
    """Whether a body is JSON or a picture, of which curl -d says that it is a form."""
    return bytes(body[:1]) in {b"{", b"["} or is_picture(bytes(body[:16]))


def _url_form(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=512)
    except ValueError as error:
        raise DecodeFailed(f"the form is not {URL_FORM_TYPE}: {error}") from None


def _instances(part: Part) -> Sent:
    value = part.value()
    rows = value.get("instances") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DecodeFailed('the body: wanted {"instances": [...]}, one item for each row')
    named = (each if isinstance(each, dict) and each else {"body": each} for each in rows)
    parts = (tuple(Part(name, JSON_KIND, json_codec.dumps(value)) for name, value in each.items()) for each in named)
    return Sent(tuple(parts), tuple(rows))


def _handler_request(sent: Sent, head: HttpHead) -> tuple[dict[str, Any], list[Any]]:
    headers = {name: value for name, value in head.headers.items() if name not in _WITHHELD_HEADERS}
    bodies: list[bytes] = []
    said: list[bytes] = []
    for parts in sent.parts:
        bodies.append(bytes(parts[0].data) if len(parts) == 1 else b"".join(each.data for each in parts))
        listed = [[each.name, each.kind, len(each.data)] for each in parts]
        said.append(json_codec.dumps({"parts": listed, "headers": headers}))
    shape = (len(sent.parts), 1)
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
    inner = _shape_of(values[0])
    if len(values) == 1 and len(inner) == len(spec.shape):
        values, shape = values[0], inner
    else:
        shape = (len(values), *inner)
    header = TensorHeader(spec.name, spec.datatype, shape)
    return header, json_codec.array_from_json(header, values)


def _shape_of(value: Any) -> tuple[int, ...]:
    """The shape of nested lists, by their first elements."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _as_bytes(value: bytes | memoryview | str) -> bytes | memoryview:
    return value.encode() if isinstance(value, str) else value


def _elements(data: Sequence[bytes | memoryview], shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(len(data), dtype=object)
    for index, each in enumerate(data):
        array[index] = each
    return array.reshape(shape)


def _whole(query: Mapping[str, Sequence[str]], key: str, default: int) -> int:
    text = query.get(key, [str(default)])[0]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DecodeFailed(f"{key}: got {codec.short(text)}, wanted a whole number")
    return int(text)


# ---- private: answers -----------------------------------------------------------------------------------------------


def _mask_output(servable: Servable) -> str | None:
    """The output that declares a mask: its class and probability are made of the bare tensor."""
    if servable.steps is None:
        return None
    return next((name for name, each in servable.steps.outputs.items() if kind_of(each) == "mask"), None)


def _rows(plan: RequestPlan, selected: Sequence[Array]) -> list[Any]:
    """What an answer says, one item a row."""
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
    return {}


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
