"""A Triton model repository: `NAME/config.pbtxt` and `NAME/VERSION/model.*`, or one model's folder of it.

Owns: what of a repository is copied as it is (configs, labels, Python models, served artifacts), what is converted, and
which of a config's tensors a converted model answers as. Configs stay as they are: the daemon reads them. Source:
Triton's "Model Repository" and "Model Configuration", and the documents of its PyTorch and FIL backends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConfigError, ConversionFailed
from edge_runtime.model_spec import DeclaredTensor
from edge_runtime.models import kinds
from edge_runtime.models.names import parse_version
from edge_runtime.tensors import DATATYPES
from edge_runtime.triton import CONFIG
from edge_runtime.triton.config import TritonConfig, read_config_file
from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.plan import CallersOutput, ImportPlan, Piece, PlannedModel, refusal
from edge_runtime_converters.importing.source_folder import SourceFolder

SYSTEM = "a Triton model repository"
CODE_FILE = "model.py"
FIL = "fil"
SHAPLEY = "treeshap_output"

TREELITE = (
    "is a Treelite checkpoint, which nothing here reads; where it was made, save the model by its own library: "
    "XGBoost's save_model('xgboost.json'), LightGBM's save_model('model.txt'), or skops.io.dump(model, 'model.skops')"
)

_PLACED = re.compile(r".*__(\d+)")
"""A tensor's name that says its place, as Triton's PyTorch backend has it: `INPUT__0`."""

_AS_IT_IS = (kinds.ONNX, kinds.IR, kinds.LITERT, kinds.PADDLE)


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models of a repository; None: it is none."""
    if source.file is not None:
        return None
    if (source.root / CONFIG.name).is_file():
        return ImportPlan(f"one model of {SYSTEM}", (_model(source, source.root),))
    folders = [path for path in source.folders() if _is_model(source, path)]
    if not folders:
        return None
    return ImportPlan(SYSTEM, tuple(_model(source, folder) for folder in folders))


# ---- private: one model ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ModelPieces:
    """The parts of one model that were found so far."""

    pieces: list[Piece] = field(default_factory=list)
    was: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _is_model(source: SourceFolder, folder: Path) -> bool:
    is_config = (folder / CONFIG.name).is_file()
    return is_config or any(parse_version(path.name) is not None for path in source.folders(folder))


def _model(source: SourceFolder, folder: Path) -> PlannedModel:
    try:
        return _planned(source, folder)
    except ConversionFailed as error:
        return refusal(folder.name, "a model of Triton", error.message)


def _planned(source: SourceFolder, folder: Path) -> PlannedModel:
    config = _config(source, folder)
    taken = _ModelPieces()
    for path in source.entries(folder):
        if not source.holds(path):
            raise ConversionFailed(f"{path}: leads out of {source.root}; copy the files into it (cp -rL)")
        if parse_version(path.name) is not None and path.is_dir():
            _take_version(source, path, config, taken)
        else:
            taken.pieces.append(Piece(place=path.name, source=str(path)))
    steps = config.chain.steps if config is not None and config.chain is not None else ()
    if not taken.was:
        taken.was.append("an ensemble" if steps else "a model of Triton")
    return PlannedModel(
        name=folder.name,
        was=", ".join(dict.fromkeys(taken.was)),
        pieces=tuple(taken.pieces),
        needs=tuple(dict.fromkeys(step.model for step in steps if step.model)),
        notes=(*taken.notes, *(f"config.pbtxt: {note}" for note in (config.notes if config is not None else ()))),
    )


def _config(source: SourceFolder, folder: Path) -> TritonConfig | None:
    """A model's config; None without one. Raises ConversionFailed: it is none, or asks for what is not offered."""
    path = folder / CONFIG.name
    if not path.is_file():
        return None
    source.bytes(path)  # within its bound, and inside the source
    try:
        return read_config_file(path, folder.name)
    except ConfigError as error:
        raise ConversionFailed(error.message) from error


def _take_version(source: SourceFolder, folder: Path, config: TritonConfig | None, taken: _ModelPieces) -> None:
    """Add the pieces of one version folder. Raises ConversionFailed: nothing in it can be served."""
    entries = source.entries(folder)
    found = {path: kinds.kind_of(path) for path in entries}
    if not entries or (folder / CODE_FILE).is_file():
        taken.pieces.append(Piece(place=folder.name, source=str(folder)))
        taken.was += ["a Python model"] if entries else []
        return
    refused: list[str] = []
    is_any = False
    for path, kind in found.items():
        if kind in _AS_IT_IS or (kind is None and not _lack(path, config)):
            taken.pieces.append(Piece(place=f"{folder.name}/{path.name}", source=str(path)))
            is_any |= kind is not None or path.is_dir()
            taken.was += [kind.name] if kind is not None else []
            continue
        try:
            if kind is None:
                raise ConversionFailed(f"{path} {_lack(path, config)}")
            taken.pieces += _converted(source, path, folder.name, config)
            is_any = True
            taken.was.append(kind.name)
        except ConversionFailed as error:
            refused.append(error.message)
    if refused and not is_any:
        raise ConversionFailed("; ".join(refused))
    taken.notes += [f"left out: {reason}" for reason in refused]


def _lack(path: Path, config: TritonConfig | None) -> str:
    """Name a file of an unknown kind by its name or its config, and say what to do; "" where it is not a model."""
    if path.suffix == ".tl" or (_parameter(config, "model_type") == "treelite_checkpoint" and path.suffix == ""):
        return TREELITE
    if path.name == "xgboost.model":
        return kinds.XGBOOST_BINARY.sentence(path.name)
    return ""


def _converted(source: SourceFolder, path: Path, version: str, config: TritonConfig | None) -> tuple[Piece, ...]:
    """The pieces of a model that is converted, with the tensors that its config declares. Raises ConversionFailed."""
    first, *others = artifact_pieces(source, path, version, _shapes(config))
    if config is None or first.target != "onnx":
        return first, *others
    values = {name: getattr(first, name) for name in first.__struct_fields__}
    if config.backend == FIL:
        answered = Piece(**{**values, "inputs": _names(config.interface.inputs), "outputs": _forest_answer(config)})
    elif kinds.kind_of(path) is kinds.TORCHSCRIPT:  # its inputs have the names of its shapes
        answered = Piece(**{**values, "outputs": _outputs(config.interface.outputs)})
    else:
        answered = Piece(
            **{**values, "inputs": _names(config.interface.inputs), "outputs": _outputs(config.interface.outputs)}
        )
    return answered, *others


# ---- private: tensors as a config declares them ---------------------------------------------------------------------


def _in_places(tensors: Sequence[DeclaredTensor]) -> list[tuple[int, DeclaredTensor]]:
    """Tensors with the places that their names say, in the order of those; else as they stand."""
    found = [_PLACED.fullmatch(tensor.name) for tensor in tensors]
    if all(found):
        return sorted(((int(each[1][:4]), tensor) for each, tensor in zip(found, tensors, strict=True) if each))
    return list(enumerate(tensors))


def _names(tensors: Sequence[DeclaredTensor]) -> tuple[str, ...]:
    return tuple(tensor.name for _, tensor in _in_places(tensors))


def _shapes(config: TritonConfig | None) -> tuple[str, ...]:
    """The shapes of the inputs, as `convert --shapes` takes them."""
    if config is None:
        return ()
    shapes = []
    for _, tensor in _in_places(config.interface.inputs):
        if tensor.datatype not in DATATYPES:  # text, which neither program computes with
            return ()
        shapes.append(f"{tensor.name}={','.join(map(str, tensor.inner_shape))}:{tensor.datatype}")
    return tuple(shapes)


def _outputs(tensors: Sequence[DeclaredTensor]) -> tuple[CallersOutput, ...]:
    return tuple(CallersOutput(name=tensor.name, place=place) for place, tensor in _in_places(tensors))


def _forest_answer(config: TritonConfig) -> tuple[CallersOutput, ...]:
    """The one FP32 output of Triton's FIL backend. Raises ConversionFailed: Shapley values, which are not computed."""
    if any(tensor.name == SHAPLEY for tensor in config.interface.outputs):
        raise ConversionFailed(f"config.pbtxt: output {SHAPLEY} (Shapley values) is not computed here; leave it out")
    if not config.interface.outputs:
        return ()
    output = config.interface.outputs[0]
    columns = output.shape[-1] if output.shape else 1
    if columns < 1:
        raise ConversionFailed(f"config.pbtxt: output {output.name} has the shape {list(output.shape)}; wanted columns")
    is_class = _is_true(config, "output_class") or _is_true(config, "is_classifier")
    if not is_class or _is_true(config, "predict_proba"):
        made: tuple[str, ...] = ("probabilities", "variable")
        return (CallersOutput(name=output.name, made=made, columns=columns),)
    threshold = _parameter(config, "threshold")
    if not threshold:
        return (CallersOutput(name=output.name, made=("label", "variable"), columns=columns),)
    try:
        above = float(threshold)
    except ValueError as error:
        raise ConversionFailed(f"config.pbtxt: threshold is {threshold!r}; wanted a number") from error
    return (CallersOutput(name=output.name, made=("probabilities", "variable"), columns=1, above=above),)


def _is_true(config: TritonConfig, name: str) -> bool:
    return _parameter(config, name).lower() == "true"


def _parameter(config: TritonConfig | None, name: str) -> str:
    parameters: Mapping[str, Any] = config.config.get("parameters") or {} if config is not None else {}
    return str((parameters.get(name) or {}).get("string_value", ""))
