"""Triton's words: a loaded version as a ModelConfig, its statistics, classes of an output, and parameters of a load.

Pure. Field names, their order and defaults are those of Triton's JSON, because clients read them by name.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.model_spec import TensorSpec
from edge_runtime.models.folder import DEFAULT_LATEST
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.names import NAME_RULE, is_model_name
from edge_runtime.models.overrides import MAX_FILES, Override, check_file, check_settings
from edge_runtime.models.servable import Servable
from edge_runtime.operations import OperationAnswer
from edge_runtime.steps import steps_fields
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import Array, bf16_to_fp32
from edge_runtime.triton.config import ENSEMBLE, TritonConfig, read_config_json
from edge_runtime.triton.config import PLATFORMS as TRITON_PLATFORMS
from edge_runtime.wire.codec import short

PIPELINE = "pipeline"
"""The backend of a pipeline here; to Triton's clients a pipeline is an ensemble."""

PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan", PIPELINE: ENSEMBLE}
"""Triton's names of backends in metadata; the others are called as here."""

MODEL_FILES = {
    "onnxruntime": "model.onnx", "openvino": "model.xml", "tensorrt": "model.plan", "pytorch": "model.pt",
    "python": "model.py", "pipeline": "pipeline.toml",
}  # fmt: skip
"""`default_model_filename` of each backend."""

CPU_DEVICES = ("", "CPU")

CONFIG, FILE = "config", "file:"
"""Parameters of a load: a ModelConfig, and what begins with `file:`, a file."""

MAX_CONFIG_BYTES = 1 << 20

MODEL_CONFIG = OperationAnswer("model_config", "edge_runtime.triton.words:config_of")
MODEL_STATISTICS = OperationAnswer("model_statistics", "edge_runtime.triton.words:statistics_of")


def config_of(table: ModelTable, model: str, version: int | None) -> dict[str, Any]:
    """Answer the operation `model_config`, of the version that answers. Raises as `ModelTable.resolve`."""
    return told_config(table.resolve(model, version))


def statistics_of(table: ModelTable, model: str, version: int | None) -> list[dict[str, Any]]:
    """Answer the operation `model_statistics`, of loaded versions: of one model, or of all."""
    if model:
        table.resolve(model, version)  # raises for one that is not there
    found = table.live_of(model) if model else table.live()
    return model_statistics([each for each in found if version in {None, each.number}])


def model_config(servable: Servable) -> dict[str, Any]:
    """Describe a loaded version as a ModelConfig."""
    settings, backend = servable.settings, servable.layouts.narrow.backend
    max_batch_size = servable.max_rows if servable.batches else 0
    config: dict[str, Any] = {
        "name": servable.model,
        "platform": PLATFORMS.get(backend, ""),
        "backend": backend if backend != PIPELINE else "",
        "version_policy": _version_policy(settings),
        "max_batch_size": max_batch_size,
        "input": [_input(spec, batches=servable.batches) for spec in servable.spec.inputs],
        "output": [_output(spec, servable) for spec in servable.spec.outputs],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": False},
            "output_pinned_memory": {"enable": False},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
    }
    if max_batch_size > 1 and backend != PIPELINE:
        config["dynamic_batching"] = {
            "preferred_batch_size": list(settings.preferred_batch_rows) or [max_batch_size],
            "max_queue_delay_microseconds": round(settings.max_queue_delay_ms * 1e3),
            "preserve_ordering": False,
            "priority_levels": 9,
            "default_priority_level": settings.priority,
            "priority_queue_policy": {},
        }
    if backend == PIPELINE:
        told: dict[str, Any] = {}
        if servable.chain is not None:
            told |= servable.chain.fields()
        if servable.steps is not None:
            told["steps"] = steps_fields(servable.steps)
        return config | {"ensemble_scheduling": {"step": []}, "parameters": _parameters(told), "model_warmup": []}
    on_cpu = servable.layouts.narrow.device.upper() in CPU_DEVICES
    config["instance_group"] = [
        {
            "name": servable.model,
            "kind": "KIND_CPU" if on_cpu else "KIND_GPU",
            "count": servable.scheduled.layout.concurrency,
            "gpus": [] if on_cpu else [0],
            "secondary_devices": [],
            "profile": [],
            "passive": False,
            "host_policy": "",
        }
    ]
    config["default_model_filename"] = MODEL_FILES.get(backend, "")
    # gRPC's ModelMetadata has no place for them.
    of_pictures: dict[str, Any] = {"preset": servable.about.offered} if servable.about.offered is not None else {}
    if servable.steps is not None:
        of_pictures["steps"] = steps_fields(servable.steps)
    parameters = _parameters(of_pictures)
    config |= {"cc_model_filenames": {}, "metric_tags": {}, "parameters": parameters, "model_warmup": []}
    return config


def _parameters(told: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without a field in a ModelConfig, as its parameters."""
    return {name: {"string_value": json.dumps(value)} for name, value in told.items()}


def told_config(servable: Servable) -> dict[str, Any]:
    """Return the ModelConfig that a loaded version is of, to the letter, completed as Triton completes it.

    Without a `config.pbtxt` it is what was found out.
    """
    found = model_config(servable)
    told = servable.about.config
    if not isinstance(told, TritonConfig):
        return found
    config = dict(told.config)
    config["platform"], config["backend"] = _platform_and_backend(told, found)
    for key in ("input", "output"):
        config[key] = config[key] or found[key]
    if not config["max_batch_size"] and found["max_batch_size"]:  # it says nothing, as it names no tensors
        config["max_batch_size"] = found["max_batch_size"]
        if "sequence_batching" not in config and "dynamic_batching" in found:
            config.setdefault("dynamic_batching", found["dynamic_batching"])
    config.setdefault("version_policy", {"latest": {"num_versions": 1}})
    batching = config.get("dynamic_batching")
    if batching is not None and not batching["preferred_batch_size"] and config["max_batch_size"]:
        config["dynamic_batching"] = {**batching, "preferred_batch_size": [config["max_batch_size"]]}
    if told.chain is not None:
        return config
    config["optimization"] = {**_OPTIMIZATION, **config.get("optimization", {})}
    config["default_model_filename"] = config["default_model_filename"] or _usual_file(config)
    config["instance_group"] = _instance_groups(config, found)
    return config


_OPTIMIZATION = {
    "priority": "PRIORITY_DEFAULT",
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
}
"""Triton's, where a config says nothing else."""


def _platform_and_backend(told: TritonConfig, found: Mapping[str, Any]) -> tuple[str, str]:
    platform, backend = told.config["platform"], told.backend
    if platform == ENSEMBLE:
        return platform, ""
    backend = backend or found["backend"]
    default = {**{name: platform for platform, name in TRITON_PLATFORMS.items() if name != "tensorflow"}}
    return platform or default.get(backend, ""), backend


def _usual_file(config: Mapping[str, Any]) -> str:
    by_platform = {"tensorflow_savedmodel": "model.savedmodel", "tensorflow_graphdef": "model.graphdef"}
    return by_platform.get(config["platform"]) or MODEL_FILES.get(config["backend"], "")


def _instance_groups(config: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each group with its name, kind, count and GPUs, as Triton fills them; one where the config has none."""
    (made,) = found["instance_group"]
    if not config["instance_group"]:
        return [made]
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(config["instance_group"]):
        kind = group["kind"] if group["kind"] != "KIND_AUTO" else made["kind"]
        is_double = kind == "KIND_CPU" and config["backend"] in ("onnxruntime", "tensorflow")
        groups.append(
            {
                **group,
                "name": group["name"] or f"{config['name']}_{index}",
                "kind": kind,
                "count": group["count"] if group["count"] > 0 else 2 if is_double else 1,
                "gpus": group["gpus"] or (made["gpus"] if kind == "KIND_GPU" else []),
            }
        )
    return groups


def model_statistics(servables: Sequence[Servable]) -> list[dict[str, Any]]:
    """Tell what loaded versions have done, newest first.

    Versions of one model count together, unless an update is under way: such numbers are reported once, of the newest.
    """
    told: set[int] = set()
    entries: list[dict[str, Any]] = []
    for servable in sorted(servables, key=lambda each: (each.model, -each.number)):
        if id(servable.metrics) not in told:
            told.add(id(servable.metrics))
            entries.append(_statistics(servable))
    return entries


def classes(array: Array, datatype: str, count: int, *, batches: bool, labels: Sequence[str] = ()) -> Array:
    """The best classes of an output, as BYTES `value:index`, best first; of equals the first. labels: behind the index.

    Shapes: [rows, ...] -> [rows, min(count, elements of a row)] where axis 0 is rows, else [...] -> [min(count, size)].
    Raises TensorMismatch for a datatype that has no order.
    """
    if datatype in {"BYTES", "BOOL"}:
        raise TensorMismatch(
            f"class result not available for output due to unsupported type '{datatype}'; classification wants numbers"
        )
    values = bf16_to_fp32(array.astype(np.uint16, copy=False)) if datatype == "BF16" else array
    rows: npt.NDArray[Any] = values.reshape((len(values) if batches else 1, -1))
    is_float = rows.dtype.kind == "f"
    keys = np.where(np.isnan(rows), -np.inf, rows) if is_float else rows
    # Reversed twice, so that of equals the first is first.
    order = rows.shape[1] - 1 - np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    best = np.empty(order.shape, dtype=object)
    for row, indices in enumerate(order):
        found = rows[row, indices].tolist()
        best[row] = [_class(value, index, labels) for value, index in zip(found, indices.tolist(), strict=True)]
    return best if batches else best[0]


def answered_classes(answers: Array, count: int, labels: Sequence[str]) -> Array:
    """The same of an answer in classes, which has them in order: FP32 [rows, top, 2] -> BYTES [rows, min(count, top)].

    Empty where a row has no more.
    """
    best = np.empty((answers.shape[0], min(count, answers.shape[1])), dtype=object)
    for row, found in enumerate(answers[:, :count].tolist()):
        best[row] = [_class(score, int(index), labels) if index >= 0 else b"" for index, score in found]
    return best


# ---- private --------------------------------------------------------------------------------------------------------


def read_override(model: str, parameters: Mapping[str, Any]) -> Override:
    """Read the parameters of a load: settings and files that replace the model's own. Raises DecodeFailed, Unsupported.

    parameters: `config`, JSON text, and `file:VERSION/NAME`, bytes or base64 text.
    """
    if not is_model_name(model):
        raise DecodeFailed(f"{short(model)} is not a model name; wanted {NAME_RULE}")
    triton: TritonConfig | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == CONFIG:
            triton = _load_config(model, value)
        elif key.startswith(FILE):
            files[check_file(key.removeprefix(FILE))] = _load_content(key, value)
        else:
            raise DecodeFailed(f"parameters: load does not know {short(key)}; wanted {CONFIG} and {FILE}VERSION/NAME")
    if len(files) > MAX_FILES:
        raise DecodeFailed(f"parameters: got {len(files)} files, wanted at most {MAX_FILES}")
    settings = triton.settings if triton is not None else {}
    check_settings(settings)
    return Override(settings, files, triton)


def _class(value: float, index: int, labels: Sequence[str]) -> bytes:
    text = f"{value:.6f}:{index}" if isinstance(value, float) else f"{value}:{index}"
    return (f"{text}:{labels[index]}" if index < len(labels) else text).encode()


def _version_policy(settings: ModelSettings) -> dict[str, Any]:
    versions = settings.versions
    if versions.specific:
        return {"specific": {"versions": list(versions.specific)}}
    return {"all": {}} if versions.all else {"latest": {"num_versions": versions.latest or DEFAULT_LATEST}}


def _tensor(spec: TensorSpec, *, batches: bool) -> dict[str, Any]:
    kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": kind, "dims": list(spec.shape[1:] if batches else spec.shape)}


def _input(spec: TensorSpec, *, batches: bool) -> dict[str, Any]:
    tensor = _tensor(spec, batches=batches)
    return {
        "name": tensor["name"],
        "data_type": tensor["data_type"],
        "format": "FORMAT_NONE",
        "dims": tensor["dims"],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
    }


def _output(spec: TensorSpec, servable: Servable) -> dict[str, Any]:
    declared = servable.steps.outputs.get(spec.name) if servable.steps is not None else None
    labels = declared.labels if declared is not None and isinstance(declared.labels, str) else ""
    return {**_tensor(spec, batches=servable.batches), "label_filename": labels, "is_shape_tensor": False}


def _statistics(servable: Servable) -> dict[str, Any]:
    metrics: ModelMetrics = servable.metrics
    answered, failed = metrics.answered_requests, sum(dict(metrics.refusals).values())
    used_ms = round((time.time() - servable.idle_s) * 1e3)
    return {
        "name": servable.model,
        "version": str(servable.number),
        "last_inference": used_ms if metrics.runs else 0,
        "inference_count": metrics.rows,
        "execution_count": metrics.runs,
        "inference_stats": {
            "success": _duration(answered, metrics.total.total),
            "fail": _duration(failed, 0.0),
            "queue": _duration(answered, metrics.queue.total),
            "compute_input": _duration(answered, 0.0),
            "compute_infer": _duration(answered, metrics.run_time.total),
            "compute_output": _duration(answered, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(runs, 0.0),
                "compute_infer": _duration(runs, run_s),
                "compute_output": _duration(runs, 0.0),
            }
            for rows, (runs, run_s) in sorted(dict(metrics.by_rows).items())
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


def _load_content(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise DecodeFailed(f"{short(key)}: wanted base64") from None
    if not isinstance(value, bytes):
        raise DecodeFailed(f"{short(key)}: got {type(value).__name__}, wanted base64 over HTTP, bytes over gRPC")
    return value


def _load_config(model: str, text: Any) -> TritonConfig:
    """The ModelConfig of a load."""
    if not isinstance(text, str) or len(text) > MAX_CONFIG_BYTES:
        raise DecodeFailed("config: wanted a ModelConfig as JSON text")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"config: not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise DecodeFailed(f"config: got {type(config).__name__}, wanted an object")
    try:
        return read_config_json(config, model)
    except DecodeFailed as error:
        raise DecodeFailed(f"config: {error.message}") from None
