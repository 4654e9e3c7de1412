"""Triton's `config.pbtxt`: what a ModelConfig means here. One table, for the file and for the config of a load.

Owns: every field of Triton's public model_config.proto: which setting it becomes, what has no meaning here, what is
refused; Triton's own checks of a config, with its texts, which people search for. Pure but for `read_config_file`.
docs/from-triton.md has the table for people. Whether a config fits its model is decided at load
(backends/declared_instance.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from edge_runtime.config.loading import read_settings
from edge_runtime.errors import ConfigError, DecodeFailed, EdgeRuntimeError, Unsupported
from edge_runtime.extras import install_advice
from edge_runtime.model_spec import DYNAMIC as ANY
from edge_runtime.model_spec import DeclaredTensor, Interface, ModelSpec, TensorSpec
from edge_runtime.models.folder import DeclaredSample, SampleInput
from edge_runtime.triton import CONFIG, CONFIG_OPTION

if TYPE_CHECKING:
    from edge_runtime.pipelines.definition import Pipeline

MAX_CHARACTERS = 1 << 18
"""Of a file, which takes about 8 µs a character to read; one of a thousand tensors has 100 000."""

MOST_NOTES = 20
"""Told of one config; further ones are counted."""

ENSEMBLE = "ensemble"

PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
}
"""Triton's platforms, which older configs have in place of a backend."""

BACKENDS = ("onnxruntime", "openvino", "tensorrt", "python", "pytorch", "tensorflow", "fil")
"""Triton's backends whose models are served here: by what the profile has, and from files that it reads."""

PYTHON = "python"

SEQUENCE_IDLE_US = 1_000_000
"""Triton's default of `max_sequence_idle_microseconds`."""

MANY_SEQUENCES = 1024
"""Most that a model keeps which does not say how many, see kept_state.py."""

_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID = "CONTROL_SEQUENCE_CORRID"
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
"""Of a control input: false and true, and the datatypes of an id."""

USUAL_FILES = {
    "onnxruntime": "model.onnx", "openvino": "model.xml", "tensorrt": "model.plan", "pytorch": "model.pt",
    "python": "model.py", "tensorflow": "saved_model.pb",
}  # fmt: skip
"""The files of a version of each backend, as the walk names it."""


class TritonConfig(Struct, frozen=True):
    """A ModelConfig, read. config: all of it, with protobuf's defaults, as the protocol's JSON has it.

    settings: the keys of `model.toml` that it stands for. notes: what has no meaning here, each by name. chain: of an
    ensemble, the pipeline that it is.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    chain: Pipeline | None = None

    @property
    def file(self) -> str:
        """The name of the file."""
        return CONFIG.name

    @property
    def backend(self) -> str:
        """Triton's name of the backend, written or by its platform; "" where only the files say it."""
        return self.config["backend"] or PLATFORMS.get(self.config["platform"], "")

    @property
    def model_file(self) -> str:
        """The name of a version's file or folder, where it is not the usual one."""
        return str(self.config["default_model_filename"])

    @property
    def usual_file(self) -> str:
        """The artifact that such a model has here, "" where `model_file` says neither backend nor kind."""
        if (usual := USUAL_FILES.get(self.backend)) is not None:
            return usual
        suffix = self.model_file[self.model_file.rfind(".") :] if "." in self.model_file else ""
        return next((name for name in USUAL_FILES.values() if name.endswith(suffix) and suffix), "")

    @property
    def max_batch_size(self) -> int:
        """Most rows of a request; 0: dims are whole shapes."""
        return int(self.config["max_batch_size"])

    @property
    def interface(self) -> Interface:
        """The tensors as requests have them, and the model."""
        inputs, outputs = (
            tuple(_declared(each, self.max_batch_size) for each in self.config[kind]) for kind in ("input", "output")
        )
        # Modules of PyTorch name no tensors, so what they were exported to has other names.
        by_place = self.backend == "pytorch"
        return Interface(self.config["name"], inputs, outputs, self.max_batch_size, by_place)

    @property
    def code_options(self) -> dict[str, str]:
        """The options that a `model.py` reads: all."""
        return {CONFIG_OPTION: json.dumps(self.config)}

    @property
    def sample(self) -> DeclaredSample | None:
        """The first sample of `model_warmup` that names files; None where none does."""
        for sample in self.config["model_warmup"]:
            if any(each.get("input_data_file") for each in sample["inputs"].values()):
                rows = max(sample["batch_size"], 1) if self.max_batch_size else 0
                inputs = tuple(_sample_input(name, each) for name, each in sample["inputs"].items())
                return DeclaredSample("model_warmup", rows, inputs, "warmup")
        return None

    def chain_faults(self, steps: Mapping[str, tuple[ModelSpec, int]]) -> Iterator[str]:
        """Why an ensemble cannot be served by these models: Triton's checks, in its order."""
        from edge_runtime.triton.ensembles import ensemble_faults

        return ensemble_faults(self, steps)

    def differences(self, backend: str, device: str) -> Iterator[str]:
        """Where the device profile serves it otherwise than it says."""
        if self.backend not in ("", backend):
            yield f"it says {self.config['platform'] or self.backend}; {backend} of the profile serves it"
        kinds = {group["kind"] for group in self.config["instance_group"]}
        on = "KIND_CPU" if device.upper() in ("", "CPU") else "KIND_GPU"
        if kinds & {"KIND_CPU", "KIND_GPU"} and on not in kinds:
            yield f"instance_group says {' and '.join(sorted(kinds))}; the profile serves it on {device or 'CPU'}"

    @property
    def label_files(self) -> dict[str, str]:
        """The files of labels, by output."""
        return {each["name"]: each["label_filename"] for each in self.config["output"] if each["label_filename"]}


def named_steps(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The steps of an ensemble by the names that its pipeline has for them: the model's, a second one of it MODEL_2."""
    from edge_runtime.pipelines.definition import INPUT

    steps: dict[str, Mapping[str, Any]] = {}
    for step in config["ensemble_scheduling"]["step"]:
        base = _NO_STEP_NAME.sub("_", step["model_name"])[:60]
        names = (base if number == 1 else f"{base}_{number}" for number in count(1))
        steps[next(name for name in names if name not in steps and name != INPUT)] = step
    return steps


def whole_shape(dims: Sequence[int], max_batch_size: int) -> tuple[int, ...]:
    """The shape of a tensor with its rows, which dims leave out where the model batches."""
    return (ANY, *dims) if max_batch_size else tuple(dims)


def read_config_file(path: Path, model: str) -> TritonConfig:
    """Read a model's `config.pbtxt`. Raises ConfigError, which names the path."""
    text = read_settings(path)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path}: has over {MAX_CHARACTERS} characters; a model's config is smaller")
    read = _read_text(text, model)
    if isinstance(read, str):
        raise ConfigError(f"{path}: {read}")
    return read


def read_config_json(values: Mapping[str, Any], model: str) -> TritonConfig:
    """Read the ModelConfig of a load, in its JSON form.

    Raises DecodeFailed: it is none; Unsupported: it asks for what is not offered.
    """
    try:
        from edge_runtime.protobufs import from_json, message_class
    except ImportError:
        raise Unsupported(f"config: {_needs_protobuf()}") from None
    # Protobuf does not tell 0 from nothing; here 0 says that the model does not batch.
    says_no_rows = values.get("max_batch_size", values.get("maxBatchSize")) in (0, "0")
    return _read(from_json(message_class(_MESSAGE), values), model, says_no_rows=says_no_rows)


# ---- private --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _read_text(text: str, model: str) -> TritonConfig | str:
    """The config of a text, or why there is none. The folder is looked at twice a second, faults and all."""
    try:
        from edge_runtime.protobufs import from_text, message_class
    except ImportError:
        return _needs_protobuf()
    try:
        return _read(from_text(message_class(_MESSAGE), text), model)
    except EdgeRuntimeError as error:
        return error.message


_MESSAGE = "inference.ModelConfig"

_NO_STEP_NAME = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that a model's name may have, and a step's not."""


class _Taking(Struct):
    """A config while its fields are taken, one after another."""

    model: str
    config: Mapping[str, Any]
    says_no_rows: bool
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    chain: Pipeline | None = None

    def note(self, name: str, why: str) -> None:
        """Tell that a field has no meaning here."""
        self.notes.append(f"{name}: {why}")

    def option(self, key: str, value: str) -> None:
        """Set an option of a backend."""
        self.settings["options"] = {**self.settings.get("options", {}), key: value}


def _read(message: Any, model: str, *, says_no_rows: bool = False) -> TritonConfig:
    from edge_runtime.protobufs import whole

    config = whole(message)
    config["name"] = config["name"] or model
    if config["name"] != model:
        raise DecodeFailed(
            f"unexpected directory name '{model}' for model '{config['name']}', directory name must equal model name"
        )
    _check(config)
    taking = _Taking(model, config, says_no_rows)
    given = {each.name for each, _ in message.ListFields()}
    for name in config:
        if name in _REFUSED and name in given:
            raise Unsupported(f"{name}: {_REFUSED[name]}")
        if name in _TAKEN:
            _TAKEN[name](taking, config[name])
        elif name in given and (name not in _SWITCHES or config[name].get("enable")):
            taking.note(name, _MEANINGLESS[name])
    notes = taking.notes[:MOST_NOTES]
    if len(taking.notes) > MOST_NOTES:
        notes.append(f"and {len(taking.notes) - MOST_NOTES} more fields have no meaning here")
    return TritonConfig(config, taking.settings, tuple(notes), taking.chain)


def _declared(values: Mapping[str, Any], max_batch_size: int) -> DeclaredTensor:
    kind = values["data_type"].removeprefix("TYPE_")
    inner = values["reshape"]["shape"] if "reshape" in values else values["dims"]
    return DeclaredTensor(
        values["name"],
        "BYTES" if kind == "STRING" else kind,
        whole_shape(values["dims"], max_batch_size),
        whole_shape(inner, max_batch_size),
    )


def _sample_input(name: str, values: Mapping[str, Any]) -> SampleInput:
    kind = values["data_type"].removeprefix("TYPE_")
    tensor = TensorSpec(name, "BYTES" if kind == "STRING" else kind, tuple(values["dims"]))
    return SampleInput(tensor, values.get("input_data_file", ""), bool(values.get("zero_data")))


# ---- what each field becomes


def _take_nothing(taking: _Taking, value: Any) -> None:
    """The field needs no setting: it is checked, or read where it is used."""


def _take_backend(taking: _Taking, backend: str) -> None:
    platform = taking.config["platform"]
    known = backend or PLATFORMS.get(platform, "")
    if platform and platform != ENSEMBLE and not known:
        raise Unsupported(f"unexpected platform type '{platform}' for {taking.model}; wanted {_list(PLATFORMS)}")
    if backend and PLATFORMS.get(platform, backend) != backend:
        raise DecodeFailed(f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")
    if known and known not in BACKENDS:
        raise Unsupported(f"unable to find backend library for backend '{known}'; wanted {_list(BACKENDS)}")
    if known == PYTHON:
        taking.settings["backend"] = PYTHON


def _take_versions(taking: _Taking, policy: Mapping[str, Any]) -> None:
    if "specific" in policy:
        if not (versions := policy["specific"]["versions"]):
            raise DecodeFailed(f"version_policy: specific names no versions for {taking.model}")
        taking.settings["versions"] = {"specific": versions}
    elif "all" in policy:
        taking.settings["versions"] = {"all": True}
    elif "latest" in policy:
        taking.settings["versions"] = {"latest": policy["latest"]["num_versions"] or 1}


def _take_rows(taking: _Taking, rows: int) -> None:
    if rows:
        taking.settings |= {"max_batch_rows": rows, "batch": True}
    elif taking.says_no_rows or (taking.config["input"] and taking.config["output"]):
        # As in Triton: a config without tensors is completed, and may batch then.
        taking.settings["batch"] = False


def _take_tensors(taking: _Taking, tensors: Sequence[Mapping[str, Any]]) -> None:
    for each in tensors:
        for key, why in _TENSOR_MEANINGLESS.items():
            if each.get(key) not in (None, False, "FORMAT_NONE"):
                taking.note(f"{each['name']}.{key}", why)


def _take_inputs(taking: _Taking, tensors: Sequence[Mapping[str, Any]]) -> None:
    _take_tensors(taking, tensors)
    backend = taking.config["backend"] or PLATFORMS.get(taking.config["platform"], "")
    if backend == "pytorch":  # TorchScript does not say what it takes
        declared = [_declared(each, taking.config["max_batch_size"]) for each in tensors]
        taking.settings["input"] = {
            each.name: {"shape": each.inner_shape, "datatype": each.datatype}
            for each in declared
            if each.datatype != "BYTES"
        }
    if backend != PYTHON and any(each["optional"] for each in tensors):
        names = ", ".join(each["name"] for each in tensors if each["optional"])
        taking.note(f"{names}.optional", "a request that leaves it out is refused")


def _take_batching(taking: _Taking, batching: Mapping[str, Any]) -> None:
    if preferred := batching["preferred_batch_size"]:
        taking.settings["preferred_batch_rows"] = preferred
    if delay := batching["max_queue_delay_microseconds"]:
        taking.settings["max_queue_delay_ms"] = delay / 1e3
    asks = (
        "preferred_batch_size", "preserve_ordering", "priority_levels", "default_queue_policy", "priority_queue_policy",
    )  # fmt: skip
    if any(batching.get(key) for key in asks):
        taking.settings["queue"] = {
            "levels": batching["priority_levels"],
            "default_level": batching["default_priority_level"],
            "keep_order": batching["preserve_ordering"],
            "default": _policy(batching.get("default_queue_policy", {})),
            "level": {level: _policy(each) for level, each in batching["priority_queue_policy"].items()},
        }


def _take_sequences(taking: _Taking, batching: Mapping[str, Any]) -> None:
    """Make `[sequence]` of it. Slots need no rows here, and rows of any sequences run together: both strategies do."""
    if batching["iterative_sequence"]:
        raise Unsupported(
            f"sequence_batching.iterative_sequence of {taking.model}: a request is not scheduled again here; have the "
            "model loop, or its client ask again"
        )
    answered = {each["name"] for each in taking.config["output"]}
    controls: dict[str, str] = {}
    values: dict[str, tuple[float, float]] = {}
    for each in batching["control_input"]:
        for control in each["control"]:
            kind = control["kind"].removeprefix("CONTROL_SEQUENCE_")
            controls[kind] = each["name"]
            if pair := next((control[key] for key in _PAIRS if control[key]), None):
                values[kind] = float(pair[0]), float(pair[1])
    sequence: dict[str, Any] = {
        "idle_ms": (batching["max_sequence_idle_microseconds"] or SEQUENCE_IDLE_US) / 1e3,
        "controls": controls,
        "values": values,
        "state": [_state(each, answered) for each in batching["state"]],
    }
    oldest, direct = batching.get("oldest", {}), batching.get("direct", {})
    candidates = oldest.get("max_candidate_sequences", 0)
    if candidates > MANY_SEQUENCES:  # as many as memory holds are fewer; in Triton further ones wait
        sequence["max_sequences"] = candidates
    if preferred := oldest.get("preferred_batch_size"):
        taking.settings["preferred_batch_rows"] = preferred
    delay_us = oldest.get("max_queue_delay_microseconds", 0)
    if direct.get("minimum_slot_utilization"):
        delay_us = direct["max_queue_delay_microseconds"]
    if delay_us:
        taking.settings["max_queue_delay_ms"] = delay_us / 1e3
    taking.settings["sequence"] = sequence


def _state(values: Mapping[str, Any], answered: Collection[str]) -> dict[str, Any]:
    kind = values["data_type"].removeprefix("TYPE_")
    state = {
        "input": values["input_name"],
        "output": values["output_name"],
        "is_answered": values["output_name"] in answered,
        "shape": [1 if length == ANY else length for length in values["dims"]],
    }
    if kind not in ("INVALID", "STRING"):
        state["datatype"] = kind
    for initial in values["initial_state"][:1]:
        if initial.get("data_file"):
            state["initial"] = initial["data_file"]
    return state


def _take_ensemble(taking: _Taking, ensemble: Mapping[str, Any]) -> None:
    """Make a pipeline of the steps: each tensor of the ensemble becomes the place that it comes from."""
    from edge_runtime.pipelines.definition import INPUT, Place, Step, make_pipeline

    config = taking.config
    if any("reshape" in each for each in (*config["input"], *config["output"])):
        raise Unsupported(f"reshape of a tensor of an ensemble is not offered, for {taking.model}")
    if ensemble.get("max_inflight_requests"):
        taking.note("ensemble_scheduling.max_inflight_requests", "queues bound the requests of each step")
    places = {each["name"]: Place(INPUT, each["name"]) for each in config["input"]}
    named = named_steps(config)
    for name, step in named.items():
        places |= {tensor: Place(name, output) for output, tensor in step["output_map"].items()}
    steps = [
        Step(
            name,
            model=step["model_name"],
            version=step["model_version"] if step["model_version"] > 0 else None,
            inputs={given: places[tensor] for given, tensor in step["input_map"].items()},
        )
        for name, step in named.items()
    ]
    rows = config["max_batch_size"]
    inputs = [_declared(each, rows) for each in config["input"]]
    try:
        taking.chain = make_pipeline(
            steps,
            {each["name"]: places[each["name"]] for each in config["output"]},
            {each.name: TensorSpec(each.name, each.datatype, each.shape) for each in inputs},
            max_batch_rows=rows or None,
            source=taking.model,
        )
    except ConfigError as error:
        raise DecodeFailed(error.message) from None


def _policy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "on_timeout": values.get("timeout_action", "REJECT").lower(),
        "timeout_ms": values.get("default_timeout_microseconds", 0) / 1e3,
        "allow_override": values.get("allow_timeout_override", False),
        "max_requests": values.get("max_queue_size", 0),
    }


def _take_instances(taking: _Taking, groups: Sequence[Mapping[str, Any]]) -> None:
    for index, group in enumerate(groups):
        for key, why in _GROUP_MEANINGLESS.items():
            if group.get(key):
                taking.note(f"instance_group[{index}].{key}", why)
    if instances := sum(group["count"] for group in groups if not group["passive"]):
        taking.settings["instances"] = instances
    if instances > 1 and taking.config["backend"] == PYTHON:
        taking.note("instance_group.count", "a Python model has one process, with one run at a time")


def _take_warmup(taking: _Taking, samples: Sequence[Mapping[str, Any]]) -> None:
    if not samples:
        return
    warmup: dict[str, Any] = {
        "rows": sorted({max(each["batch_size"], 1) for each in samples}),
        "runs": max(max(each["count"], 1) for each in samples),
        "shapes": {},
    }
    for sample in samples:
        for name, tensor in sample["inputs"].items():
            if tensor["dims"] and taking.config["max_batch_size"]:
                warmup["shapes"][name] = tensor["dims"]
    taking.settings["warmup"] = warmup


def _take_optimization(taking: _Taking, policy: Mapping[str, Any]) -> None:
    if level := policy.get("graph", {}).get("level", 0):
        taking.option("onnxruntime.optimization", "basic" if level < 0 else "extended")
    for kind, accelerators in policy.get("execution_accelerators", {}).items():
        for each in accelerators:
            why = "the device profile decides what runs a model; device in model.toml overrides it"
            taking.note(f"optimization.execution_accelerators.{kind}.{each['name']}", why)
    for key, why in _OPTIMIZATION_MEANINGLESS.items():
        if policy.get(key) not in (None, 0, False, "PRIORITY_DEFAULT"):
            taking.note(f"optimization.{key}", why)


def _take_parameters(taking: _Taking, parameters: Mapping[str, Mapping[str, str]]) -> None:
    """Those that a backend of Triton knows; all others are for the model's callers, and for its model.py."""
    backend = taking.config["backend"] or PLATFORMS.get(taking.config["platform"], "")
    for key, value in parameters.items():
        text = value["string_value"]
        if key in _THREADS.get(backend, ()):
            if text.isascii() and text.isdigit() and int(text):
                taking.settings["threads"] = int(text)
        elif (backend, key) == ("onnxruntime", "enable_mem_arena"):
            taking.option("onnxruntime.arena", text)
        elif key in _PARAMETERS_MEANINGLESS.get(backend, ()):
            taking.note(f"parameters.{key}", "it has no equal here; it is told to clients")


_TAKEN: Mapping[str, Callable[[_Taking, Any], None]] = {
    "name": _take_nothing,
    "platform": _take_nothing,
    "backend": _take_backend,
    "version_policy": _take_versions,
    "max_batch_size": _take_rows,
    "input": _take_inputs,
    "output": _take_tensors,
    "dynamic_batching": _take_batching,
    "ensemble_scheduling": _take_ensemble,
    "sequence_batching": _take_sequences,
    "instance_group": _take_instances,
    "default_model_filename": _take_nothing,
    "model_warmup": _take_warmup,
    "optimization": _take_optimization,
    "parameters": _take_parameters,
    "model_transaction_policy": _take_nothing,
}
"""The reader of each field that has a meaning here."""

_REFUSED = {
    "batch_input": "inputs made of the other requests of a batch are not made here; export the model without them",
    "batch_output": "outputs scattered by the shapes of a batch are not made here; export the model without them",
    "model_operations": "a library of operators is code, which no model brings here",
    "model_repository_agents": (
        "whom to trust is not the model's to configure; sign releases instead (docs/updates.md), and leave this out"
    ),
}
"""Fields without which the model would answer otherwise than its owner means: it is not served with them."""

_MEANINGLESS = {
    "runtime": "the device profile chooses the library that runs the model",
    "cc_model_filenames": "engines are built on this machine, of the ONNX model",
    "metric_tags": "metrics have the labels model and version",
    "model_metrics": "histograms have fixed buckets",
    "response_cache": "no answer is kept: each request is run",
}
"""Fields that are logged once, at load."""

_SWITCHES = frozenset(("response_cache",))
"""Of those: where `enable` is false, nothing is asked for."""

_TENSOR_MEANINGLESS = {
    "format": "the dims say where the channels are",
    "is_shape_tensor": "engines are built here, of the ONNX model, which has no shape tensors",
    "allow_ragged_batch": "requests of other shapes are run apart",
    "is_non_linear_format_io": "engines are built here, with linear tensors",
}

_GROUP_MEANINGLESS = {
    "rate_limiter": "cores are shared by all models",
    "gpus": "the device profile chooses the device",
    "secondary_devices": 'device = "DLA:0" in model.toml chooses a DLA',
    "profile": "engines are built here, with one profile",
    "passive": "each instance serves",
    "host_policy": "the device profile places runs",
}

_OPTIMIZATION_MEANINGLESS = {
    "priority": "requests have priorities: priority in model.toml",
    "cuda": "CUDA graphs are the backend's to decide",
    "input_pinned_memory": "the backend decides how inputs reach a GPU",
    "output_pinned_memory": "the backend decides how outputs leave a GPU",
    "gather_kernel_buffer_threshold": "batches are gathered before they reach a GPU",
    "eager_batching": "the next batch is made ready where that gains",
}

_THREADS = {"onnxruntime": ("intra_op_thread_count",), "openvino": ("INFERENCE_NUM_THREADS", "CPU_THREADS_NUM")}
"""Parameters that say how many cores a run takes, by backend."""

_PARAMETERS_MEANINGLESS = {
    "onnxruntime": (
        "inter_op_thread_count", "execution_mode", "enable_mem_pattern", "memory.enable_memory_arena_shrinkage",
        "cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy",
    ),
    "openvino": (
        "CPU_EXTENSION_PATH", "CPU_THROUGHPUT_STREAMS", "ENFORCE_BF16", "SKIP_OV_DYNAMIC_BATCHSIZE",
        "ENABLE_BATCH_PADDING", "RESHAPE_IO_LAYOUT", "TARGET_DEVICE", "NUM_STREAMS", "PERFORMANCE_HINT",
    ),
    "pytorch": (
        "DISABLE_OPTIMIZED_EXECUTION", "INFERENCE_MODE", "ENABLE_NVFUSER", "ENABLE_WEIGHT_SHARING",
        "ENABLE_CACHE_CLEANING", "ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER",
    ),
    "tensorflow": (
        "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS", "TF_USE_PER_SESSION_THREADS", "TF_SIGNATURE_DEF",
        "TF_GRAPH_TAG",
    ),
}  # fmt: skip
"""Parameters that a backend of Triton knows and nothing here does, by backend."""


# ---- Triton's checks


def _check(config: Mapping[str, Any]) -> None:
    """Raise DecodeFailed where Triton takes no such config, with its text."""
    for fault in _faults(config):
        raise DecodeFailed(fault)


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    name, most = config["name"], config["max_batch_size"]
    if most < 0:
        yield f"'max_batch_size' must be non-negative value for {name}"
    for kind in ("input", "output"):
        for each in config[kind]:
            yield from (f"model {kind} {fault} for {name}" for fault in _tensor_faults(each, most))
        names = Counter(each["name"] for each in config[kind])
        yield from (
            f"model {kind} '{each}' is declared {times} times for {name}" for each, times in names.items() if times > 1
        )
    if "dynamic_batching" in config:
        yield from (f"{fault} for {name}" for fault in _batching_faults(config["dynamic_batching"], most))
    if "sequence_batching" in config:
        yield from (f"{fault} for {name}" for fault in _sequence_faults(config["sequence_batching"], most))
    for group in config["instance_group"]:
        if (kind := group["kind"]) in ("KIND_CPU", "KIND_MODEL") and group["gpus"]:
            which = f"instance group {group['name']} of model {name}"
            yield f"{which} has kind {kind} but specifies one or more GPUs"
    if "ensemble_scheduling" in config or config["platform"] == ENSEMBLE:
        yield from _ensemble_faults(config)


def _ensemble_faults(config: Mapping[str, Any]) -> Iterator[str]:  # noqa: PLR0912 (one branch a rule of Triton's)
    """Triton's checks of an ensemble alone, in its order; whether its steps fit is seen at load."""
    from edge_runtime.pipelines.definition import MAX_STEPS

    name = config["name"]
    if config["platform"] != ENSEMBLE:
        yield f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
    if config["backend"]:
        yield f"Ensemble model '{name}' must have platform type '{ENSEMBLE}' and empty backend type"
    if "ensemble_scheduling" not in config:
        yield f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
    if config["instance_group"]:
        yield f"instance group should not be specified for ensemble '{name}'"
    if "optimization" in config:
        yield f"optimization should not be specified for ensemble '{name}'"
    if config["model_warmup"]:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    steps = config["ensemble_scheduling"]["step"]
    if len(steps) > MAX_STEPS:
        yield f"ensemble '{name}' has {len(steps)} steps, at most {MAX_STEPS} are run"
    if not steps:
        yield f"must specify 'step' for ensemble '{name}'"
    written: set[str] = set()
    for index, step in enumerate(steps):
        for key in ("model_name", "input_map", "output_map"):
            if not step[key]:
                yield f"must specify '{key}' in step {index} of ensemble '{name}'"
        for tensor in step["output_map"].values():
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {index}"
                )
            written.add(tensor)
    read = {tensor for step in steps for tensor in step["input_map"].values()}
    given, wanted = ([each["name"] for each in config[kind]] for kind in ("input", "output"))
    for tensor in given:
        if tensor not in read | written:
            yield f"ensemble input '{tensor}' for ensemble {name}' is not used"
    ready = _ready(given, steps)
    for tensor in wanted:
        if tensor not in read | written:
            yield f"ensemble output '{tensor}' for ensemble {name}' is not used"
        if tensor not in ready:
            missing = next(iter(sorted(read - ready - {tensor})), tensor)
            why = f": at least one of its depending tensors, '{missing}', is not connected"
            yield f"output '{tensor}' for ensemble '{name}' is not written{why if missing != tensor else ''}"
    for tensor in sorted((read | written) - set(wanted)):
        if tensor not in ready or tensor not in read:
            yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"
    if set(given) & written:
        yield f"ensemble tensor '{min(set(given) & written)}' is an input, and a step writes it, in ensemble '{name}'"


def _ready(given: Sequence[str], steps: Sequence[Mapping[str, Any]]) -> set[str]:
    """The tensors that are there once every step has run that can."""
    ready, left = set(given), list(steps)
    while runs := [step for step in left if ready.issuperset(step["input_map"].values())]:
        for step in runs:
            ready.update(step["output_map"].values())
            left.remove(step)
    return ready


def _tensor_faults(tensor: Mapping[str, Any], max_batch_size: int) -> Iterator[str]:
    name, dims = tensor["name"], tensor["dims"]
    if not name:
        yield "must specify 'name'"
    if tensor["data_type"] == "TYPE_INVALID":
        yield f"'{name}' must specify 'data_type'"
    if not dims:
        yield f"'{name}' must specify 'dims'"
    variable = f"must be integer >= 1, or {ANY} to indicate a variable-size dimension"
    if any(dim < 1 and dim != ANY for dim in dims):
        yield f"'{name}' dimension {variable}"
    if "reshape" not in tensor:
        return
    shape = tensor["reshape"]["shape"]
    if not shape and not max_batch_size:
        yield f"'{name}' cannot have empty reshape for non-batching model as scalar tensors are not supported"
    if any(dim < 1 and dim != ANY for dim in shape):
        yield f"'{name}' reshape dimensions {variable}"
    ours, theirs = _between_open(dims), _between_open(shape)
    if len(ours) != len(theirs):
        yield f"'{name}' has different number of variable-size dimensions for dims and reshape"
    if ours != theirs:
        yield f"'{name}' has different size for dims and reshape"


def _between_open(dims: Sequence[int]) -> list[int]:
    """Elements between open dimensions: [2, 4, -1, 6] -> [8, 6]. They stay the same when a tensor is reshaped."""
    found = [1]
    for dim in dims:
        if dim == ANY:
            found.append(1)
        else:
            found[-1] = prod((found[-1], dim))
    return found


def _batching_faults(batching: Mapping[str, Any], max_batch_size: int) -> Iterator[str]:
    preferred, levels = batching["preferred_batch_size"], batching["priority_levels"]
    if any(size <= 0 for size in preferred):
        yield "dynamic batching preferred size must be positive"
    if max_batch_size and any(size > max_batch_size for size in preferred):
        yield "dynamic batching preferred size must be <= max batch size"
    policies = [batching.get("default_queue_policy", {}), *batching["priority_queue_policy"].values()]
    if levels:
        if not 1 <= batching["default_priority_level"] <= levels:
            yield f"default priority level must be in range [1, {levels}]"
        if any(not 1 <= int(level) <= levels for level in batching["priority_queue_policy"]):
            yield f"priority queue policy must have priority level in range [1, {levels}]"
    if batching["preserve_ordering"]:
        if levels > 1:
            yield "Only one priority level is allowed when 'preserve_ordering' is true"
        if any(_delays(each) for each in policies):
            yield "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"


def _sequence_faults(batching: Mapping[str, Any], max_batch_size: int) -> Iterator[str]:
    """Triton's checks of `sequence_batching`."""
    used: set[str] = set()
    for each in batching["control_input"]:
        if not each["name"]:
            yield "sequence batching control tensor must have a name"
        if each["name"] in used or len(each["control"]) > 1:
            yield f"sequence batching control tensor '{each['name']}' is specified for multiple control kinds"
        used.add(each["name"])
        for control in each["control"]:
            yield from _control_faults(control)
    if not 0.0 <= batching.get("direct", {}).get("minimum_slot_utilization", 0.0) <= 1.0:
        yield "sequence batching minimum slot utilization must be in range (0.0, 1.0]"
    preferred = batching.get("oldest", {}).get("preferred_batch_size", [])
    if any(size <= 0 or (max_batch_size and size > max_batch_size) for size in preferred):
        yield "sequence batching preferred batch size must be positive and <= max batch size"
    for state in batching["state"]:
        for initial in state["initial_state"][:1]:
            yield from _initial_faults(state, initial)


def _control_faults(control: Mapping[str, Any]) -> Iterator[str]:
    kind, pairs = control["kind"], [key for key in _PAIRS if control[key]]
    for key in pairs:
        if len(control[key]) != 2:
            yield f"sequence batching control '{key}' must have exactly 2 entries for {kind}"
    if kind == _CORRID and control["data_type"] not in (*_CORRID_TYPES, "TYPE_INVALID"):
        yield f"unexpected data type for control {_CORRID}. Allowed data types are {_list(_CORRID_TYPES)},"
    if kind != _CORRID and not pairs:
        yield f"sequence batching control must specify one of {_list(_PAIRS)} for {kind}"


def _initial_faults(state: Mapping[str, Any], initial: Mapping[str, Any]) -> Iterator[str]:
    dims, wanted, name = list(initial["dims"]), list(state["dims"]), state["input_name"]
    if ANY not in wanted and dims != wanted:
        ours, theirs = (",".join(map(str, each)) for each in (dims, wanted))
        yield f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {ours} != {theirs}"
    if initial["data_type"] != state["data_type"]:
        yield (f"The data type used for 'initial_state' field of state '{name}' does not match the state data type.")


def _delays(policy: Mapping[str, Any]) -> bool:
    return bool(policy.get("default_timeout_microseconds")) and policy["timeout_action"] == "DELAY"


def _list(words: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(words)


def _needs_protobuf() -> str:
    return f"config.pbtxt needs protobuf; {install_advice('triton')}"
