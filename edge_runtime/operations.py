"""The table of operations: every request except inference, with its scope and parameters.

Pure data and the checks that follow from it. The frontend answers an operation by the method of the same name of
`OperationHandlers` (request/operation_handlers.py). The clients' methods, the command line's actions, completion and
the documents are made from these rows: a new operation is one row here and one method there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edge_runtime.errors import DecodeFailed

if TYPE_CHECKING:
    from edge_runtime.messages import RequestHeader

# What packs and checks messages brings numpy, of which a verb's help needs nothing: it is imported when it is used.

DEFAULT_WAIT_S = 30.0
"""How long a call without a timeout waits for its reply: longer than any run on a device, shorter than patience."""

LOAD_WAIT_S = 600.0
"""How long load and unload wait: a large model from a slow card, compiled for a GPU, takes minutes."""

UPDATE_WAIT_S = 48 * 3600.0
"""How long operations wait that may install a release: a day at most over a slow link, then trial and observation. The
loss of the daemon ends them at once."""

DEFAULT_HISTORY = 50
MAX_HISTORY = 1_000
"""As many entries as a device keeps (updates/journal.py): some 200 KB."""


class Scope(Enum):
    """Where an operation is answered."""

    INFER = "infer"
    """On every endpoint, MQTT included: it changes nothing."""
    CONTROL = "control"
    """On control endpoints only, so nothing that arrives by MQTT changes the device or names a folder."""


class Parameter(Struct, frozen=True):
    """One parameter. kind: str, int, or Path, which travels as its absolute text.

    in_header: a field of the header itself (model, version); the others are entries of the header's `parameters`.
    default: of the daemon, for a parameter that is not required. most: the largest integer; the smallest is 1.
    """

    name: str
    kind: type[str | int | Path]
    summary: str
    is_required: bool = False
    in_header: bool = False
    default: int | str | None = None
    most: int | None = None

    def value_in(self, header: RequestHeader) -> Any:
        """Read and check the parameter of a request. Raises DecodeFailed."""
        from edge_runtime.wire.codec import short, typed

        if self.in_header:
            return getattr(header, self.name)
        wire_kind = int if self.kind is int else str
        value = typed(header.parameters, self.name, wire_kind, "" if self.kind is Path else self.default)
        if self.kind is Path and (not Path(value).is_absolute() or "\0" in value):
            raise DecodeFailed(
                f"{self.name}: got {short(value)}, wanted the whole path of a folder that the daemon sees"
            )
        if self.is_required and value is None:
            raise DecodeFailed(f"parameters: {header.op} wants {self.name}, {self.summary}")
        if self.most is not None and value is not None and not 1 <= value <= self.most:
            raise DecodeFailed(f"{self.name}: got {short(value)}, wanted 1 to {self.most}")
        return value


class Operation(Struct, frozen=True):
    """One row. summary: one sentence for help, docstrings and documents; notes: what it cannot say.

    result: the Python type of what clients return. wait_s: how long a client waits that names no timeout. command: the
    verb and action of the command line. has_method: whether clients offer a method of this name (`live` and `ready`
    have methods of their own). is_update: needs `[update]`, and refuses parameters that the row does not name.
    """

    name: str
    scope: Scope
    summary: str
    parameters: tuple[Parameter, ...] = ()
    result: str = "dict[str, Any]"
    notes: str = ""
    wait_s: float = DEFAULT_WAIT_S
    command: str = ""
    has_method: bool = True
    is_update: bool = False

    def values_in(self, header: RequestHeader) -> dict[str, Any]:
        """Read and check the parameters of a request, by name. Raises DecodeFailed."""
        if self.is_update:
            self._refuse_unknown(header)
        return {parameter.name: parameter.value_in(header) for parameter in self.parameters}

    def _refuse_unknown(self, header: RequestHeader) -> None:
        from edge_runtime.wire.codec import short

        known = [parameter.name for parameter in self.parameters if not parameter.in_header]
        for name in header.parameters:
            if name not in known:
                wanted = " and ".join(known) or "none"
                raise DecodeFailed(f"parameters: {self.name} does not know {short(name)}; wanted {wanted}")
        if not header.model and any(each.name == "model" and each.is_required for each in self.parameters):
            raise DecodeFailed(f"{self.name} wants a model; `edge-runtime update status` says which have a release")


class OperationAnswer(Struct, frozen=True):
    """An operation that a capability answers, in place of a method of `OperationHandlers`; shipped.py finds it.

    answer: "module:function", (table of models, the row's parameters by name) -> result. It must not wait, unless it is
    `apart`: on a thread of its own, one call at a time. door: the name of one that it gets in place of the table, where
    that is open; elsewhere the operation is `unsupported`, or with `opens` has it opened first.
    """

    name: str
    answer: str
    door: str = ""
    opens: bool = False
    apart: bool = False


MODEL = Parameter("model", str, "the model's name", is_required=True, in_header=True)
VERSION = Parameter("version", int, "one version; without it the daemon chooses", in_header=True)

_ROWS = (
    Operation("live", Scope.INFER, "Tell whether the daemon answers.", result="bool", has_method=False),
    Operation(
        "ready",
        Scope.INFER,
        "Tell whether the daemon, or one model, can answer inference.",
        (Parameter("model", str, "one model; without it the daemon", in_header=True), VERSION),
        result="bool",
        has_method=False,
    ),
    Operation(
        "models",
        Scope.INFER,
        "List every version that the daemon knows, and each file of its models folder that it does not serve.",
        result="list[dict[str, Any]]",
        notes=(
            "Each entry has name, version, state, reason, backend, device, precision, mode and memory_bytes. What lies "
            'in the folder and is not a version has version null, state "not_served", its path, and the reason.'
        ),
        command="models list",
    ),
    Operation(
        "metadata",
        Scope.INFER,
        "Describe what a model takes and gives.",
        (MODEL, VERSION),
        notes=(
            "In the Open Inference Protocol's words, with `max_batch_rows` and `max_frame_bytes`. Over MQTT the latter "
            "bounds a whole message. `steps`: what `model.toml` declares of pictures and answers, where it does; "
            "`forms`: what a picture may be sent as, and what then comes back. "
            "`preset`: the one that the model's own file tells, where no steps for pictures are declared."
        ),
        command="models show",
    ),
    Operation(
        "model_config",
        Scope.INFER,
        "Describe a loaded model as Triton's ModelConfig.",
        (MODEL, VERSION),
        notes="What was found out of it: `max_batch_size` is the most rows of one run, 0 where it does not batch.",
    ),
    Operation(
        "model_statistics",
        Scope.INFER,
        "Tell what loaded models have done, in Triton's words.",
        (Parameter("model", str, "one model; without it all", in_header=True), VERSION),
        result="list[dict[str, Any]]",
        notes="`inference_count` counts rows, `execution_count` runs, both without warm-up.",
    ),
    Operation(
        "stats",
        Scope.INFER,
        "Tell counters, latencies by model, memory and uptime.",
        command="status",
    ),
    Operation(
        "overview",
        Scope.INFER,
        "Tell in one sentence how the device is, and show its machine and its models.",
        notes=(
            "`level` is `good`, `warning` or `bad`. Rates are those of the last five seconds, quantiles those of the "
            "last five seconds in which there was an answer, a minute back at most. Answered where the "
            "[page](page.md) is on, as are `history` and `events`."
        ),
        command="doctor overview",
    ),
    Operation(
        "history",
        Scope.INFER,
        "Tell rates, latencies and refusals of the last fifteen minutes, a sample each five seconds.",
        (Parameter("model", str, "one model; without it all, and the machine", in_header=True),),
        notes="Oldest first; `null` where nothing was answered.",
        command="doctor history",
    ),
    Operation(
        "events",
        Scope.INFER,
        "List the last loads, updates, failures and warnings, each with what to do, newest first.",
        (Parameter("count", int, "how many", default=DEFAULT_HISTORY, most=MAX_HISTORY),),
        result="list[dict[str, Any]]",
        notes="`docs` names the document with more.",
        command="doctor events",
    ),
    Operation(
        "doctor",
        Scope.INFER,
        "Tell what a bug report needs, without passwords, tokens and keys.",
        notes="`files`: texts by name. `edge-runtime doctor --bundle FILE` packs them.",
    ),
    Operation(
        "tuning",
        Scope.INFER,
        "Tell what `edge-runtime tune` found out about a model: why it is served as it is.",
        (Parameter("model", str, "the model's name", is_required=True, in_header=True),),
        notes="`reasons`: the sentences in its `model.toml`; `picture`: SVG, or null where no tune wrote one.",
    ),
    Operation(
        "example",
        Scope.INFER,
        "Give an input to try a model with: its release's golden one, or that of its warm-up.",
        (Parameter("model", str, "the model's name", is_required=True, in_header=True),),
        notes=(
            '`source`: "golden", "warm-up", or null where there is neither; `body`: a JSON request for inference, null '
            "too where it would have more than 262,144 elements."
        ),
    ),
    Operation(
        "attach_memory",
        Scope.INFER,
        "Let this connection name the regions of a memory connection.",
        (Parameter("secret", str, "what the memory socket told, as 32 hexadecimal digits", is_required=True),),
        result="bool",
        notes="Over ipc. The client's `allocate` does it.",
        has_method=False,
    ),
    Operation(
        "stop_notice",
        Scope.INFER,
        "Tell, as the last answer on this connection, that the daemon stops.",
        result="bool",
        notes=(
            "Over ZeroMQ, and not on a control endpoint. What the connection sent and has no answer by then was never "
            "run. The Python clients ask for it."
        ),
        has_method=False,
    ),
    Operation(
        "cancel",
        Scope.INFER,
        "End a request of the same client that is answered in parts.",
        (Parameter("request_id", str, "its id: of JSON as text, of frames as hexadecimal digits", is_required=True),),
        result="bool",
        notes=(
            "It ends with the error `cancelled`; `false`: there is no such request, or it has ended. A client whose "
            "connection ends needs no `cancel`. Over MQTT the id is the correlation data, in hexadecimal digits."
        ),
        has_method=False,
    ),
    Operation(
        "cameras",
        Scope.INFER,
        "List the cameras, and what becomes of their frames.",
        result="list[dict[str, Any]]",
        notes=(
            "An entry for each rule that looks at one: model, name, camera, from, state (`starting`, `online`, "
            "`lost`), reason, losses, dropped. A camera that none looks at has state `unused`."
        ),
        command="cameras list",
    ),
    Operation(
        "results",
        Scope.INFER,
        "List the last result of each rule of [[publish]].",
        result="list[dict[str, Any]]",
        notes=(
            "`answer` is as it is published, `null` before the first. The first call finds what was published last; "
            "for 10 s after each call it is the newest answer, published or not. `has_picture`: the [page](page.md) "
            "shows it, to who has the right `view`."
        ),
        command="cameras results",
    ),
    Operation(
        "camera_add",
        Scope.CONTROL,
        "Read a camera, in place of one of that name.",
        (
            Parameter("camera", str, "the camera's name", is_required=True),
            Parameter("url", str, "where it is, as `url` of [[camera]]", is_required=True),
            Parameter("model", str, "a model whose answers are published, where no rule says so"),
        ),
        result="Any",
        notes=(
            "Until the next reload or restart, which take what the configuration says. What `[[camera]]` says of one "
            "of that name beside its `url` stays. Returns as `cameras`."
        ),
        command="cameras add",
    ),
    Operation(
        "camera_remove",
        Scope.CONTROL,
        "Stop reading a camera, with the rules that look at it.",
        (Parameter("camera", str, "the camera's name", is_required=True),),
        result="Any",
        notes="Until the next reload or restart, which take what the configuration says. Returns as `cameras`.",
        command="cameras remove",
    ),
    Operation(
        "load",
        Scope.CONTROL,
        "Load a model, or one version, anew, and wait until it is ready.",
        (MODEL, VERSION),
        result="Any",
        notes=(
            "Returns the model's entries as in `models`. Waits up to 10 minutes. Raises LoadFailed, BackendUnavailable "
            "and ModelNotFound."
        ),
        wait_s=LOAD_WAIT_S,
        command="models load",
    ),
    Operation(
        "unload",
        Scope.CONTROL,
        "Take a model, or one version, out of service.",
        (MODEL, VERSION),
        result="Any",
        notes="Admitted requests are answered first. Returns and raises as `load`.",
        wait_s=LOAD_WAIT_S,
        command="models unload",
    ),
    Operation(
        "update_status",
        Scope.INFER,
        "Tell what runs by updates, what is under way, what was refused and why, and how the last check ended.",
        notes="Raises Unsupported where no updates are configured, as every operation of updates.",
        command="update status",
        is_update=True,
    ),
    Operation(
        "update_history",
        Scope.INFER,
        "List the last events of updates, newest first.",
        (Parameter("count", int, f"entries, {DEFAULT_HISTORY} by default", default=DEFAULT_HISTORY, most=MAX_HISTORY),),
        result="list[dict[str, Any]]",
        notes="Each entry has at_utc, model, counter, what and reason.",
        command="update history",
        is_update=True,
    ),
    Operation(
        "update_check",
        Scope.CONTROL,
        "Look now what the repository offers, and install nothing.",
        notes=(
            "The result has at_utc, is_ok, reason, source and offers; a fault of the repository is told there. Raises "
            "EdgeRuntimeError with the code `update_failed` while the updater is at work."
        ),
        wait_s=UPDATE_WAIT_S,
        command="update check",
        is_update=True,
    ),
    Operation(
        "update_apply",
        Scope.CONTROL,
        "Look now and install what is meant for this device.",
        notes=(
            "Returns the result of `update_check` once every release is observed. A daemon whose client stops waiting "
            "goes on."
        ),
        wait_s=UPDATE_WAIT_S,
        command="update apply",
        is_update=True,
    ),
    Operation(
        "update_import",
        Scope.CONTROL,
        "Install from a folder, such as a USB stick.",
        (Parameter("folder", Path, "a folder that the daemon sees", is_required=True),),
        notes="As `update_apply`, from a folder that `repo bundle` wrote.",
        wait_s=UPDATE_WAIT_S,
        command="update import",
        is_update=True,
    ),
    Operation(
        "update_rollback",
        Scope.CONTROL,
        "Let the release before serve again, and refuse the current one.",
        (MODEL,),
        notes=(
            "A release that is under way is withdrawn instead. The result has model, and `release`, which serves now, "
            "or `withdrawn`. Waits up to 10 minutes."
        ),
        wait_s=LOAD_WAIT_S,
        command="update rollback",
        is_update=True,
    ),
)

OPERATIONS: Mapping[str, Operation] = {row.name: row for row in _ROWS}
"""Every operation by name, in the order in which documents list them."""


def pack_operation(operation: Operation, values: Mapping[str, Any]) -> bytes:
    """Pack the header of a call. values: by parameter, None for the daemon's default."""
    from edge_runtime.messages import RequestHeader
    from edge_runtime.wire.codec import pack_request

    in_header = {
        each.name: values[each.name] for each in operation.parameters if each.in_header and each.name in values
    }
    parameters = {
        # The daemon has another working directory, so a path travels whole.
        each.name: str(Path(values[each.name]).absolute()) if each.kind is Path else values[each.name]
        for each in operation.parameters
        if not each.in_header
    }
    return pack_request(RequestHeader(op=operation.name, parameters=parameters, **in_header))


def actions_of(verb: str) -> dict[str, Operation]:
    """Return the operations of a verb of the command line, by action."""
    rows = [row for row in OPERATIONS.values() if row.command.startswith(f"{verb} ")]
    return {row.command.removeprefix(f"{verb} "): row for row in rows}
