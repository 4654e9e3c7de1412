"""OpenVINO Model Server's `config.json`: its models by `base_path`, and its pipelines of models (DAG).

Owns: where a base path leads (they name paths in a container), what each option of a model becomes, and which DAGs are
pipelines here. Source: docs.openvino.ai, "Model Server Parameters", "Classic Models", "DAG Scheduler", and its schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.models import kinds
from edge_runtime.models.names import parse_version
from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.plan import (
    ImportPlan,
    Piece,
    PlannedModel,
    key_lines,
    model_name,
    refusal,
    settings_piece,
)
from edge_runtime_converters.importing.source_folder import SourceFolder

SYSTEM = "a configuration of OpenVINO Model Server"
CONFIG_FILE = "config.json"
MAPPING_FILE = "mapping_config.json"
REQUEST = "request"

Json = dict[str, Any]


class _ModelEntry(Struct, frozen=True):
    config: Json = {}


class _NodeSource(Struct, frozen=True):
    node_name: str
    data_item: str


class _OutputAlias(Struct, frozen=True):
    data_item: str
    alias: str


class _DagNode(Struct, frozen=True):
    name: str
    type: str = "DL model"
    model_name: str = ""
    library_name: str = ""
    version: int | None = None
    demultiply_count: int | None = None
    gather_from_node: str | None = None
    inputs: list[dict[str, _NodeSource]] = []
    outputs: list[_OutputAlias] = []


class _Dag(Struct, frozen=True):
    name: str
    inputs: list[str] = []
    nodes: list[_DagNode] = []
    outputs: list[dict[str, _NodeSource]] = []
    demultiply_count: int | None = None


class _MediaPipeGraph(Struct, frozen=True):
    name: str
    base_path: str = ""
    graph_path: str = ""


class _ServerConfig(Struct, frozen=True):
    """The part of config.json that is read."""

    model_config_list: list[_ModelEntry]
    pipeline_config_list: list[_Dag] = []
    mediapipe_config_list: list[_MediaPipeGraph] = []
    custom_loader_config_list: list[Json] = []
    custom_node_library_config_list: list[Json] = []


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models and pipelines of a configuration; None: it is none."""
    path = source.file or source.root / CONFIG_FILE
    if path.suffix != ".json" or not path.is_file():
        return None
    document = source.json(path)
    if not isinstance(document, dict) or "model_config_list" not in document:
        return None
    config: _ServerConfig = source.json_as(path, _ServerConfig)
    models = [
        _guarded(str(entry.config.get("name")), partial(_model, source, entry.config))
        for entry in config.model_config_list
    ]
    models += [_guarded(dag.name, partial(_pipeline, dag)) for dag in config.pipeline_config_list]
    models += [refusal(graph.name, "a MediaPipe graph", _GRAPH) for graph in config.mediapipe_config_list]
    return ImportPlan(SYSTEM, tuple(models))


_GRAPH = (
    "a MediaPipe graph runs calculators in C++ (and those of language models), which nothing here does; write its "
    "models as a pipeline.toml (docs/pipelines.md), with Python steps for what is between them"
)


# ---- private: models ------------------------------------------------------------------------------------------------


def _guarded(name: str, plan: Callable[[], PlannedModel]) -> PlannedModel:
    try:
        return plan()
    except ConversionFailed as error:
        return refusal(name, "OpenVINO Model Server", error.message)


def _model(source: SourceFolder, config: Json) -> PlannedModel:
    name = model_name(str(config.get("name", "")))
    if config.get("stateful"):
        raise ConversionFailed(f"{name}: is stateful (it remembers a sequence's requests), and models here are not")
    if config.get("custom_loader_options"):
        raise ConversionFailed(f"{name}: a custom loader (C++) reads it; save it as a file that OpenVINO reads itself")
    place = _place(source, str(config.get("base_path", "")))
    pieces: list[Piece] = []
    kinds_found: list[str] = []
    notes: list[str] = []
    versions = {1: place} if _artifact(source, place) else {
        number: folder for folder in source.folders(place) if (number := parse_version(folder.name)) is not None
    }  # fmt: skip
    for number, folder in sorted(versions.items()):
        artifact = _artifact(source, folder)
        if artifact is None:
            raise ConversionFailed(f"{folder}: holds no model that OpenVINO Model Server reads")
        pieces += artifact_pieces(source, artifact, str(number))
        kind = kinds.kind_of(artifact)
        kinds_found.append(kind.name if kind is not None else "a model")
        if (artifact.parent / MAPPING_FILE).is_file():
            notes.append(
                f"{MAPPING_FILE} of version {number} renames tensors, and is not applied: requests say the model's own "
                f"names ({_renames(source, artifact.parent / MAPPING_FILE)})"
            )
    if not pieces:
        raise ConversionFailed(f"{place}: holds no version (1/model.xml) and no model")
    settings, said = _settings(config)
    return PlannedModel(
        name=name,
        was=f"OpenVINO Model Server, {', '.join(dict.fromkeys(kinds_found))}",
        pieces=(*pieces, *settings_piece(settings, SYSTEM)),
        notes=(*notes, *said),
    )


def _place(source: SourceFolder, base_path: str) -> Path:
    """Where a base path leads: below the source, or by its end, since it names a path in a container."""
    if re.match(r"(s3|gs|azure|az|azfs|hdfs|http|https)://", base_path):
        raise ConversionFailed(f"base_path {base_path} is in a cloud; fetch it beside the configuration first")
    parts = [part for part in PurePosixPath(base_path).parts if part not in ("/", ".")]
    if not parts or ".." in parts:
        raise ConversionFailed(f"base_path {base_path[:200]!r} is not a path below the configuration's folder")
    if Path(base_path).is_absolute() and source.holds(Path(base_path)):
        return Path(base_path)
    for begin in range(len(parts)):
        found = source.root.joinpath(*parts[begin:])
        if found.exists() and source.holds(found):
            return found
    raise ConversionFailed(
        f"base_path {base_path} is not in {source.root}: it names a path in a container; copy that folder here as "
        f"{parts[-1]}/"
    )


def _artifact(source: SourceFolder, place: Path) -> Path | None:
    """The model of a version folder, or a file that is one; None where there is none."""
    wanted = (kinds.IR, kinds.ONNX, kinds.LITERT, kinds.PADDLE, kinds.SAVED_MODEL, kinds.FROZEN_GRAPH)
    if place.is_file() or kinds.kind_of(place) is kinds.SAVED_MODEL:
        return place
    found = [path for path in source.files(place) if kinds.kind_of(path) in wanted]
    if len(found) > 1:
        raise ConversionFailed(f"{place}: holds {' and '.join(path.name for path in found)}; which one is the model?")
    return found[0] if found else None


def _renames(source: SourceFolder, path: Path) -> str:
    said = source.json_as(path, dict[str, dict[str, str]])
    return ", ".join(f"{new} is {old}" for table in said.values() for old, new in table.items())


def _settings(config: Mapping[str, Any]) -> tuple[Json, list[str]]:
    """Return the settings for model.toml, and notes on the rest."""
    settings: Json = {}
    notes: list[str] = []
    if isinstance(config.get("nireq"), int) and config["nireq"] > 0:
        settings["instances"] = config["nireq"]
    device = str(config.get("target_device", "CPU"))
    if device != "CPU":
        settings |= {"backend": "openvino", "device": device}
    if (plugin := config.get("plugin_config")) and isinstance(plugin, dict):
        settings["options"] = {f"openvino.{key}": str(value) for key, value in plugin.items()}
    settings |= _versions(config.get("model_version_policy"))
    if shapes := _inner_shapes(config.get("shape")):
        settings["warmup"] = {"shapes": shapes}
    for key, what in _TOLD.items():
        if config.get(key) not in (None, "", {}):
            notes.append(f"{key} = {config[key]!r}: {what}")
    known = {
        "name", "base_path", "nireq", "target_device", "plugin_config", "model_version_policy", "stateful",
        "custom_loader_options", *_TOLD,
    }  # fmt: skip
    notes += [f"{key} = {config[key]!r} has no meaning here" for key in config if key not in known]
    return settings, notes


_TOLD = {
    "batch_size": "requests bring their own number of rows, up to the model's own and max_batch_rows",
    "shape": "the model keeps its own shape; open sides take any length, and warm up with these",
    "layout": "is not applied: send tensors in the model's own layout, or declare pictures (docs/pictures.md)",
}


def _versions(policy: Any) -> Json:
    if not isinstance(policy, dict):
        return {}
    if "all" in policy:
        return {"versions": {"all": True}}
    for key, ours in (("latest", "num_versions"), ("specific", "versions")):
        value = policy.get(key)
        if isinstance(value, dict) and value.get(ours):
            return {"versions": {key: value[ours]}}
    return {}


def _inner_shapes(shape: Any) -> dict[str, list[int]]:
    """Shapes by input without axis 0; none where it is not by name, or leaves a side open."""
    shapes = {}
    for name, text in shape.items() if isinstance(shape, dict) else ():
        sides = [side.strip() for side in str(text).strip("() ").split(",") if side.strip()]
        if len(sides) > 1 and all(re.fullmatch(r"[1-9][0-9]{0,8}", side) for side in sides):
            shapes[str(name)] = [int(side) for side in sides[1:]]
    return shapes


# ---- private: pipelines ---------------------------------------------------------------------------------------------


def _pipeline(dag: _Dag) -> PlannedModel:
    """A DAG as `pipeline.toml`. Raises ConversionFailed: a part of it has no counterpart."""
    name = model_name(dag.name)
    for node in dag.nodes:
        if node.type != "DL model":
            raise ConversionFailed(
                f"{name}: node {node.name} is a custom node, {node.library_name}, a library in C++; write the pipeline "
                "as pipeline.toml (docs/pipelines.md) with a Python step in its place"
            )
        if node.demultiply_count is not None or node.gather_from_node is not None:
            raise ConversionFailed(
                f"{name}: node {node.name} splits its outputs (demultiply_count, gather_from_node); write the pipeline "
                'as pipeline.toml (docs/pipelines.md) with map = "STEP.TENSOR" in the step that runs for each'
            )
    if dag.demultiply_count is not None:
        raise ConversionFailed(f"{name}: splits its request (demultiply_count); send the parts as rows instead")
    steps = _step_names(dag)
    lines: list[str] = ["# Imported from OpenVINO Model Server."]
    for node in dag.nodes:
        inputs = {key: _reading(dag, steps, each) for table in node.inputs for key, each in table.items()}
        step: Json = {"name": steps[node.name], "model": model_name(node.model_name), "inputs": inputs}
        if node.version is not None:
            step["version"] = node.version
        lines += ["", "[[step]]", *key_lines(step)]
    outputs = {key: _reading(dag, steps, each) for table in dag.outputs for key, each in table.items()}
    lines += ["", "[output]", *key_lines(outputs)]
    needs = tuple(dict.fromkeys(model_name(node.model_name) for node in dag.nodes))
    return PlannedModel(
        name=name,
        was="OpenVINO Model Server, a DAG",
        pieces=(Piece(place="pipeline.toml", text="\n".join(lines) + "\n"),),
        needs=needs,
    )


def _step_names(dag: _Dag) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in dag.nodes:
        near = re.sub(r"[^A-Za-z0-9_-]+", "_", node.name)[:64] or "step"
        near = "step" if near == "input" else near
        if node.name in names or near in names.values():
            raise ConversionFailed(f"{dag.name}: two nodes are called {node.name}; rename one")
        names[node.name] = near
    return names


def _reading(dag: _Dag, steps: Mapping[str, str], read: _NodeSource) -> str:
    """A place in `pipeline.toml`, of a node's output by its alias. Raises ConversionFailed: there is none."""
    if read.node_name == REQUEST:
        if read.data_item not in dag.inputs:
            raise ConversionFailed(f"{dag.name}: reads {read.data_item} of the request, which is none of its inputs")
        return f"input.{read.data_item}"
    node = next((node for node in dag.nodes if node.name == read.node_name), None)
    if node is None:
        raise ConversionFailed(f"{dag.name}: reads of node {read.node_name}, which is not there")
    tensor = next((each.data_item for each in node.outputs if each.alias == read.data_item), None)
    if tensor is None:
        raise ConversionFailed(f"{dag.name}: node {node.name} has no output {read.data_item}")
    return f"{steps[node.name]}.{tensor}"
