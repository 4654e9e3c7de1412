"""Every call of the Open Inference Protocol but inference, answered alike for the HTTP and the gRPC door.

Owns: who may make which call, and the results in the words of the protocol's JSON form. request.py reads requests
for inference. Knows no socket, no HTTP and no protobuf. Thread: the door's; a reply may come from any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime import __version__
from edge_runtime.answers import kind_of
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.access.rules import DoorAddress
from edge_runtime.doors.access.settings import DoorSettings
from edge_runtime.doors.open_inference import oip
from edge_runtime.doors.open_inference.named_regions import NamedRegions
from edge_runtime.doors.open_inference.request import OipRequest, version_number, whole_number
from edge_runtime.errors import (
    DecodeFailed,
    EdgeRuntimeError,
    Forbidden,
    LoadFailed,
    ModelNotFound,
    NotReady,
    RegionNotFound,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.names import NAME_RULE
from edge_runtime.models.servable import Servable
from edge_runtime.models.served_folder import NOT_ASKED_FOR
from edge_runtime.operations import OPERATIONS, Scope
from edge_runtime.request.operation_handlers import Done, OperationCall, OperationHandlers, Status
from edge_runtime.request.plan import RequestPlan
from edge_runtime.telemetry.logs import log_level, set_log_level
from edge_runtime.tensors import Array, array_to_wire
from edge_runtime.triton import words as triton_words
from edge_runtime.wire.codec import short, typed

log = logging.getLogger(__name__)

EXTENSIONS = (
    *("classification", "model_repository", "schedule_policy", "model_configuration", "binary_tensor_data"),
    *("parameters", "statistics", "trace", "logging"),
)
"""Extensions of Triton's that the doors speak, as the server's metadata names them."""

MEMORY_EXTENSION = "system_shared_memory"

NO_TRACE = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}
"""Triton's trace settings where it traces nothing."""

STATES = {
    VersionState.READY.value: "READY",
    VersionState.LOADING.value: "LOADING",
    **{state.value: "LOADING" for state in VersionState if state.is_being_made},
    VersionState.UNLOADING.value: "UNLOADING",
}
"""Triton's names of states in the repository's index; all others are UNAVAILABLE."""

OPEN_CALLS = frozenset(("server_live", "server_ready"))
"""Answered without a token: probes of Kubernetes have none."""

CONTROL_WAYS = (
    "it needs a token with control (edge-runtime token add NAME --may infer,control), or serve with --allow-control, "
    "--http-control ADDR or --grpc-control ADDR"
)
"""The ways to operations that callers may not ask for otherwise, as refusals name them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights of a caller. sender: the name of its token where it has one, else its connection.

    address: by which it came, over HTTP.
    """

    sender: Hashable
    may_infer: bool = True
    may_control: bool = False
    may_view: bool = False
    address: DoorAddress | None = None


def open_inference(context: DoorContext, settings: DoorSettings) -> OpenInference:
    """Return the operations that answer the calls of a door."""
    return OpenInference(
        context.core.table,
        context.operations,
        context.status,
        _named_regions(context),
        server_name=settings.server_name,
        strict_readiness=bool(getattr(context.config.table("http"), "strict_readiness", False)),
    )


def _named_regions(context: DoorContext) -> NamedRegions:
    """Memory that clients name, which the doors of a daemon share."""
    found = context.shared.get("named regions")
    if found is None:
        config = context.config
        found = context.shared["named regions"] = NamedRegions(
            is_allowed=config.shared_memory.client_named, max_tensor_bytes=config.limits.message_bytes
        )
    return found


class OpenInference:
    """Answers every call of the protocol but inference."""

    def __init__(
        self,
        table: ModelTable,
        operations: OperationHandlers,
        status: Status,
        regions: NamedRegions,
        *,
        server_name: str,
        strict_readiness: bool = False,
    ) -> None:
        """regions: that clients name. server_name: in the server's metadata.

        strict_readiness: one model that failed to load makes the server not ready, as with Triton.
        """
        self._server_name = server_name
        self._table = table
        self._operations = operations
        self._status = status
        self._strict_readiness = strict_readiness
        self.regions = regions
        self._calls: dict[str, Callable[[Mapping[str, Any], Caller, Done], None]] = {
            "server_live": self._server_live,
            "server_ready": self._server_ready,
            "model_ready": self._model_ready,
            "server_metadata": self._server_metadata,
            "model_metadata": self._model_metadata,
            "repository_index": self._repository_index,
            "repository_load": self._repository_load,
            "repository_unload": self._repository_unload,
            "model_config": self._model_config,
            "model_statistics": self._model_statistics,
            "system_shared_memory_status": self._memory_status,
            "system_shared_memory_register": self._memory_register,
            "system_shared_memory_unregister": self._memory_unregister,
            "cuda_shared_memory_status": self._cuda_status,
            "cuda_shared_memory_register": self._cuda_register,
            "cuda_shared_memory_unregister": self._cuda_unregister,
            "trace_setting": self._trace_setting,
            "log_settings": self._log_settings,
        }

    def call(self, name: str, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Answer one call.

        values: parts of the path and fields of the body, by Triton's names. reply: gets the body of HTTP's answer (gRPC
        fills the message of the same fields from it) or an EdgeRuntimeError, once, from any thread. `repository_index`
        gives a list, which is gRPC's field `models`, and the status of shared memory one that is its map `regions`;
        `model_config` gives what is gRPC's field `config`, the settings what is its map `settings`. `server_ready` and
        `model_ready` give `ready`, true or false; `oip.readiness_status` says which status of HTTP that is.
        """
        handler = self._calls.get(name)
        try:
            if handler is None:
                raise Unsupported(f"{name} is not offered here")
            handler(values, caller, reply)
        except EdgeRuntimeError as error:
            reply(error)
        except Exception as error:
            log.exception("%s failed", name)
            reply(EdgeRuntimeError(f"{name} failed: {type(error).__name__}: {error}"))

    def operate(
        self,
        operation: str,
        values: Mapping[str, Any],
        caller: Caller,
        reply: Done,
        shape: Callable[[Any], Any],
        *,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Answer a call by a row of the table of operations.

        shape: makes the protocol's answer of its result. parameters: of the row, beside model and version.
        """
        check_rights(operation, caller)
        header = RequestHeader(
            op=operation,
            model=values.get("name") or "",
            version=version_number(values.get("version")),
            parameters=dict(parameters or {}),
        )
        call = OperationCall(
            lambda result: reply(result if isinstance(result, EdgeRuntimeError) else shape(result)),
            is_control=caller.may_control,
        )
        self._operations.answer(header, call)

    # ---- health and metadata ----------------------------------------------------------------------------------------

    def _server_live(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        del values, caller
        reply({"live": True})

    def _server_ready(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        del values, caller
        reason = self._why_not_ready()
        reply({"ready": True} if reason is None else {"ready": False, "reason": reason})

    def _why_not_ready(self) -> str | None:
        if self._status.is_draining:
            return oip.DRAINING
        if not self._status.is_ready:
            return self._table.progress()
        if self._strict_readiness:
            failed = [each.model for each in self._table.statuses() if each.state is VersionState.FAILED]
            if failed:
                return f"model {failed[0]} failed to load"
        return None

    def _model_ready(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        name = _name(values)
        self.operate("ready", values, caller, reply, lambda is_ready: {"name": name, "ready": is_ready})

    def _server_metadata(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        del values, caller
        extensions = [*EXTENSIONS, *((MEMORY_EXTENSION,) if self.regions.is_allowed else ())]
        reply({"name": self._server_name, "version": __version__, "extensions": extensions})

    def _model_metadata(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        self.operate("metadata", values, caller, reply, _metadata)

    def _model_config(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        _name(values)
        self.operate("model_config", values, caller, reply, lambda config: config)

    def _model_statistics(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        try:
            self.operate("model_statistics", values, caller, reply, lambda found: {"model_stats": found})
        except (ModelNotFound, NotReady) as error:
            raise DecodeFailed(error.message) from None  # 400, as with Triton

    # ---- the repository ---------------------------------------------------------------------------------------------

    def _repository_index(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        only_ready = typed(values, "ready", bool, False)
        check_rights("models", caller)
        self._operations.loader.look(
            lambda: self.operate("models", {}, caller, reply, lambda entries: _index(entries, only_ready=only_ready))
        )

    def _repository_load(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        def loaded(result: Any) -> None:
            if isinstance(result, LoadFailed):
                result = LoadFailed(f"load failed for model '{values['name']}': {result.message}")
            reply(result)

        _check_loadable(_name(values))
        parameters = typed(values, "parameters", dict, {})
        if not parameters:
            self.operate("load", {"name": _name(values)}, caller, loaded, lambda _: {})
            return
        _check_may_control("load", caller)
        self._operations.loader.load(
            _name(values),
            None,
            lambda error: loaded({} if error is None else error),
            triton_words.read_override(_name(values), parameters),
        )

    def _repository_unload(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        def unloaded(result: Any) -> None:
            # A model that is not there is as it was wanted, as with Triton.
            reply({} if isinstance(result, ModelNotFound) else result)

        parameters = typed(values, "parameters", dict, {})
        if not typed(parameters, "unload_dependents", bool, False):
            self.operate("unload", {"name": _name(values)}, caller, unloaded, lambda _: {})
            return
        _check_may_control("unload", caller)
        self._operations.loader.unload(
            _name(values), None, lambda error: unloaded({} if error is None else error), takes_steps=True
        )

    # ---- memory that clients name -----------------------------------------------------------------------------------

    def _memory_status(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        _check_may_infer(caller)
        reply(self.regions.status(values.get("name")))

    def _memory_register(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        _check_may_infer(caller)
        nbytes = whole_number(values, "byte_size") or 0
        key: str = typed(values, "key", str, "")
        self.regions.register(typed(values, "name", str, ""), key, whole_number(values, "offset") or 0, nbytes)
        reply({})

    def _memory_unregister(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        _check_may_infer(caller)
        self.regions.unregister(values.get("name"))
        reply({})

    def _cuda_status(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        _check_may_infer(caller)
        if name := values.get("name"):
            raise RegionNotFound(f"Unable to find cuda shared memory region: '{name}'")
        reply([])

    def _cuda_register(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        del values, reply
        _check_may_infer(caller)
        raise Unsupported("CUDA shared memory is not served; send tensors, or use system shared memory")

    def _cuda_unregister(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        del values
        _check_may_infer(caller)
        reply({})  # none is registered

    # ---- settings: reading them is free -----------------------------------------------------------------------------

    def _trace_setting(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Tell that nothing is traced. Nothing can be changed but to that."""
        _check_may_infer(caller)
        name = values.get("name")
        if name and not self._table.statuses_of(name):
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        wanted = {key: value for key, value in values.items() if key not in {"name", "version"}}
        if wanted:
            _check_may_control("trace settings", caller)
        for key, value in wanted.items():
            if key not in NO_TRACE:
                raise DecodeFailed(f"Unknown trace setting '{short(key)}'; wanted one of {', '.join(NO_TRACE)}")
            if key == "trace_level" and value not in (None, [], ["OFF"], "OFF"):
                raise Unsupported(
                    "traces are not written here; `timing` in a request and /metrics tell where time goes"
                )
        reply(dict(NO_TRACE))

    def _log_settings(self, values: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Tell the log's level in Triton's flags, after changing it where the values say so."""
        _check_may_infer(caller)
        if values:
            _check_may_control("log settings", caller)
            set_log_level(_wanted_level(values))
        reply(_log_flags())

    # ---- answers to inference ---------------------------------------------------------------------------------------

    def outputs(
        self, request: OipRequest, plan: RequestPlan, selected: Sequence[Array]
    ) -> list[tuple[TensorHeader, Array | None]]:
        """Turn a request's outputs into those of its answer: classes, with their labels, where it asks for them.

        selected: of the plan, in its order. An output that goes to a region is written there, and is None here. Raises
        RegionNotFound, TensorMismatch. Thread: any.
        """
        found: list[tuple[TensorHeader, Array | None]] = []
        for header, array in zip(plan.tensor_headers([each.shape for each in selected]), selected, strict=True):
            count, part = request.classes.get(header.name), request.output_regions.get(header.name)
            if count is not None:
                best = _classes(plan.servable, header, array, count)
                found.append((TensorHeader(header.name, "BYTES", best.shape), best))
            elif part is not None:
                self.regions.write(f"output '{header.name}'", part, memoryview(array_to_wire(array)).cast("B"))
                found.append((header, None))
            else:
                found.append((header, array))
        return found


def _classes(servable: Servable, header: TensorHeader, array: Array, count: int) -> Array:
    """The best classes of an output, with their labels. Raises TensorMismatch."""
    steps, name = servable.steps, header.name
    labels = servable.labels_of(name)
    if steps is None or not servable.form.answers or name not in steps.outputs:
        return triton_words.classes(array, header.datatype, count, batches=servable.batches, labels=labels)
    kind = kind_of(steps.outputs[name])
    if kind != "classes":
        raise TensorMismatch(f"classification: output '{name}' answers with {kind}; wanted classes, or raw = true")
    return triton_words.answered_classes(array, count, labels)


def check_rights(operation: str, caller: Caller) -> None:
    """Raise Forbidden unless the caller may ask for operations of its scope."""
    if OPERATIONS[operation].scope is Scope.CONTROL:
        _check_may_control(operation, caller)
    else:
        _check_may_infer(caller)


def _check_may_control(what: str, caller: Caller) -> None:
    if not caller.may_control:
        raise Forbidden(f"{what} is not allowed here; {CONTROL_WAYS}")


def _check_may_infer(caller: Caller) -> None:
    if not (caller.may_infer or caller.may_control):
        raise Forbidden("this token may not ask; give it infer: edge-runtime token add NAME --may infer")


def _name(values: Mapping[str, Any]) -> str:
    name: str = typed(values, "name", str, "")
    if not name.strip():
        raise DecodeFailed("Model name cannot be empty. Please enter a valid name to deploy.")
    return name


def _check_loadable(name: str) -> None:
    """Raise DecodeFailed for a path in the place of a model's name: no folder but a model's own is looked at."""
    if "/" in name or name.strip() in {".", ".."}:
        raise DecodeFailed(f"model name must not contain path traversal characters: got {short(name)}; {NAME_RULE}")


def _metadata(described: Mapping[str, Any]) -> dict[str, Any]:
    platform = described["platform"]
    steps = {key: described[key] for key in ("steps", "forms", "preset", "pipeline") if key in described}
    return {
        "name": described["name"],
        "versions": described["versions"],
        "platform": triton_words.PLATFORMS.get(platform, platform),
        "inputs": described["inputs"],
        "outputs": described["outputs"],
        **steps,
    }


def _index(entries: list[dict[str, Any]], *, only_ready: bool) -> list[dict[str, Any]]:
    found = []
    for entry in entries:
        state = STATES.get(entry["state"], "UNAVAILABLE")
        if only_ready and state != "READY":
            continue
        reason = entry["reason"] or ("" if entry["state"] in STATES else entry["state"].replace("_", " "))
        if entry["reason"] == NOT_ASKED_FOR:
            if {"name": entry["name"]} not in found:
                found.append({"name": entry["name"]})  # as Triton lists what was never loaded
            continue
        version = "" if entry["version"] is None else str(entry["version"])
        found.append({"name": entry["name"], "version": version, "state": state, "reason": reason})
    return found


def _log_flags() -> dict[str, Any]:
    """The log's level as Triton's log settings."""
    level = log_level()
    return {
        "log_file": "",
        "log_info": level <= logging.INFO,
        "log_warning": level <= logging.WARNING,
        "log_error": True,
        "log_verbose_level": int(level <= logging.DEBUG),
        "log_format": "default",
    }


def _wanted_level(values: Mapping[str, Any]) -> int:
    """The level that changed log settings mean. Raises DecodeFailed, Unsupported."""
    flags = _log_flags()
    for key, value in values.items():
        if key not in flags:
            raise DecodeFailed(f"Unknown log setting '{short(key)}'; wanted one of {', '.join(flags)}")
        if key in {"log_file", "log_format"}:
            if value not in ("", flags[key]):
                what = "log file location" if key == "log_file" else "log format"
                raise Unsupported(f"{what} can not be updated through network protocol; set it in [log] of config.toml")
            continue
        kind = int if key == "log_verbose_level" else bool
        flags[key] = typed(values, key, kind, flags[key])
    if flags["log_verbose_level"] > 0:
        return logging.DEBUG
    if flags["log_info"]:
        return logging.INFO
    return logging.WARNING if flags["log_warning"] else logging.ERROR
