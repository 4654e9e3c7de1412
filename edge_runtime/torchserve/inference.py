"""TorchServe's paths over HTTP, as requests for inference and operations of the one table.

Owns: which paths are TorchServe's, and what their calls mean here: a `HttpProtocol` of the HTTP door, on only with
`http.torchserve`. message.py reads bodies and writes answers. Thread: the door's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.http.call import INFER, HttpCall
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests, ProtocolDeclaration, paths
from edge_runtime.doors.open_inference.operations import Caller, OpenInference, check_rights
from edge_runtime.doors.open_inference.request import infer_header, version_number
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, ModelNotFound, Unsupported
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.servable import Servable
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.replies import Encoding
from edge_runtime.torchserve.archives import TorchServeArchives
from edge_runtime.torchserve.message import TorchServeAnswer, TorchServeBody, read_torchserve_body, request_of_body
from edge_runtime.torchserve.model import is_handler
from edge_runtime.wire import codec

PROTOCOL = ProtocolDeclaration("torchserve", "edge_runtime.torchserve.inference:open_protocol")

PING, MODELS, DESCRIBE, REGISTER, UNREGISTER, SCALE, SET_DEFAULT, EXPLAIN, V1_READY = (
    *("torchserve_ping", "torchserve_models", "torchserve_describe", "torchserve_register"),
    *("torchserve_unregister", "torchserve_scale", "torchserve_default", "torchserve_explain", "torchserve_v1_ready"),
)

_MODEL = r"/models/(?P<name>[^/]+)(?:/(?P<version>[^/]+))?"

_PATHS = paths(
    # curl -T sends PUT
    (r"/(?P<torchserve>wfpredict)/(?P<name>[^/]+)", {"POST": INFER, "PUT": INFER}),
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

ALL_VERSIONS = "all"

_VERSION = re.compile(r"([1-9][0-9]{0,17})(?:\.0){0,2}", re.ASCII)

MOST_LISTED = 100
"""Models of one page where the client names no limit, as TorchServe has it."""


class Archives(Protocol):
    """Takes archives by URL into the models folder."""

    def take(self, url: str, name: str, done: Done) -> None:
        """`done` gets the names of an archive's models, or an EdgeRuntimeError, on another thread. Raises it, too."""
        ...

    def close(self) -> None:
        """End what is under way. Idempotent."""
        ...


def open_protocol(context: DoorContext, protocol: OpenInference) -> TorchServe:
    """Return the protocol that answers TorchServe's paths."""
    core = context.core
    archives = TorchServeArchives(context.settings("http").torchserve_hosts, core, core.clock)
    return TorchServe(protocol, core.table, archives)


class TorchServe:
    """TorchServe's calls, answered by the table of models and the table of operations."""

    paths = _PATHS
    open_calls = frozenset((PING,))

    def __init__(self, protocol: OpenInference, table: ModelTable, archives: Archives) -> None:
        self._protocol = protocol
        self._archives = archives
        self._table = table
        self._answers: dict[str, Callable[[Mapping[str, str], Caller, Done], None]] = {
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

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding that words answers and errors as TorchServe does."""
        return TorchServeAnswer(self._table, call)

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Read the version as TorchServe writes it, and the query of what has no body. Raises ModelNotFound."""
        version = call.values.get("version")
        if version is not None and not (call.name == DESCRIBE and version == ALL_VERSIONS):
            number = _VERSION.fullmatch(version)
            if number is None:
                raise ModelNotFound(
                    f"there is no version {codec.short(version)} here; wanted a whole number, as 2 or 2.0"
                )
            call.values["version"] = number[1]
        if call.name != INFER:
            call.values["query"], call.ignores_body = head.query, True

    def claims(self, call: HttpCall) -> bool:
        """Whether the model runs a handler of TorchServe's, which alone says what instances are."""
        try:
            return is_handler(self._table.resolve(call.values["name"], call.version).spec)
        except EdgeRuntimeError:
            return False

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """Whether a body is text: curl -T names no type."""
        return "content-type" in head.headers or bytes(body[:1]) in {b"{", b"["}

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> TorchServeBody:
        """Cut and decode a body. Thread: any. Raises DecodeFailed."""
        return read_torchserve_body(body, head, call)

    def model_of(self, message: TorchServeBody, call: HttpCall) -> tuple[str, int | None]:
        """Return the model of the path. Raises DecodeFailed."""
        del message
        return call.values["name"], version_number(call.values.get("version"))

    def requests_of(self, servable: Servable, message: TorchServeBody, head: HttpHead, call: HttpCall) -> CallRequests:
        """Return the request that a body means. Raises EdgeRuntimeError."""
        fields, tensors = request_of_body(servable, message, head)
        asked = infer_header(call.values["name"], call.version, fields, timeout_ms=call.timeout_ms)
        return CallRequests(call.encoding, ((asked.header, tensors),))

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Answer one call but predictions, with its JSON and its status. Raises EdgeRuntimeError."""
        del fields
        self._answers[call.name](call.values, caller, reply)

    def close(self) -> None:
        """End the import of an archive that is under way."""
        self._archives.close()

    def _ping(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        del values

        def respond(ready: Any) -> None:
            failed = any(each.state is VersionState.FAILED for each in self._table.statuses())
            if isinstance(ready, EdgeRuntimeError) or not ready["ready"]:
                reply(({"status": "Unhealthy"}, 500))
            else:
                reply(({"status": "Partial Healthy" if failed else "Healthy"}, 200))

        self._protocol.call("server_ready", {}, caller, respond)

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

        def respond(entries: list[dict[str, Any]]) -> Any:
            found = [each for each in entries if each["name"] == name and each["version"] is not None]
            if wanted not in (None, ALL_VERSIONS):
                found = [each for each in found if str(each["version"]) == wanted]
            elif wanted is None and found:
                found = [max(found, key=lambda each: (each["state"] == VersionState.READY.value, each["version"]))]
            if not found:
                return ModelNotFound(f"there is no model {codec.short(name)}")
            return [self._described(each) for each in found], 200

        self._protocol.operate("models", {}, caller, reply, respond)

    def _register(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        query = parse_qs(values["query"])
        url = query.get("url", [""])[0]
        wanted = _whole(query, "initial_workers", 1)
        if "://" in url:
            check_rights("load", caller)
            found = query.get("model_name", [""])[0]
            self._archives.take(url, found, lambda names: self._load_taken(names, wanted, caller, reply))
            return
        name = query.get("model_name", [url.rpartition("/")[2].removesuffix(".mar")])[0]
        if not name:
            raise DecodeFailed("url: wanted the name of a model in the models folder, as in /models?url=resnet.mar")
        self._load((name,), wanted, caller, reply)

    def _load_taken(self, names: Any, wanted: int, caller: Caller, reply: Done) -> None:
        """Load the models of an archive that was taken. Thread: any."""
        if isinstance(names, EdgeRuntimeError):
            reply(names)
            return
        try:
            self._load(names, wanted, caller, reply)
        except EdgeRuntimeError as error:
            reply(error)

    def _load(self, names: Sequence[str], wanted: int, caller: Caller, reply: Done) -> None:
        """Load a model and those beside it, which go first."""
        name, *beside = names

        def respond(_: Any) -> Any:
            return {
                "status": f'Model "{name}" registered with {self._workers(name, None, wanted)} initial workers'
            }, 200

        for each in beside:
            self._protocol.operate("load", {"name": each}, caller, lambda _: None, lambda _: None)
        self._protocol.operate("load", {"name": name}, caller, reply, respond)

    def _unregister(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        said = {"status": f'Model "{values["name"]}" unregistered'}
        self._protocol.operate("unload", values, caller, reply, lambda _: (said, 200))

    def _scale(self, values: Mapping[str, str], caller: Caller, reply: Done) -> None:
        least = _whole(parse_qs(values["query"]), "min_worker", 1)
        version = values.get("version")

        if least < 1:
            raise DecodeFailed("min_worker: got 0, wanted 1 or more; unload a model by DELETE")

        def respond(_: Any) -> Any:
            name = values["name"]
            workers = self._workers(name, int(version) if version is not None else None, least)
            return {"status": f"Workers scaled to {workers} for model: {name}"}, 200

        self._protocol.operate("ready", values, caller, reply, respond)

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

    def _workers(self, name: str, version: int | None, wanted: int) -> str:
        """How many runs of a model are on at once, and why they are fewer than wanted. Raises as `resolve`."""
        runs = self._table.resolve(name, version).layouts.narrow.concurrency
        if wanted <= runs:
            return str(runs)
        return f"{runs} ({wanted} were asked for; cores, backend and instances in model.toml say how many run at once)"

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


# ---- private --------------------------------------------------------------------------------------------------------


def _whole(query: Mapping[str, Sequence[str]], key: str, default: int) -> int:
    text = query.get(key, [str(default)])[0]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DecodeFailed(f"{key}: got {codec.short(text)}, wanted a whole number")
    return int(text)
