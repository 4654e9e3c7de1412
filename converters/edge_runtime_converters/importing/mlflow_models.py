"""An MLflow model folder: `MLmodel` names its flavors, and each flavor the file that the library saved.

Owns: which flavor is taken, where its model lies, and what of the signature is kept. Pickles are refused unread, with
the way out. Source: mlflow.org/docs, "MLflow Models, storage format", and `save_model` of each flavor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.models import kinds
from edge_runtime.tensors import DATATYPES
from edge_runtime_converters.importing.artifacts import artifact_pieces, model_in
from edge_runtime_converters.importing.plan import ImportPlan, PlannedModel, model_name, refusal
from edge_runtime_converters.importing.source_folder import SourceFolder

SYSTEM = "an MLflow model"
MLMODEL = "MLmodel"

PATHS = {
    "onnx": ("data",),
    "xgboost": ("data",),
    "lightgbm": ("data",),
    "catboost": ("data",),
    "keras": ("data",),
    "tensorflow": ("saved_model_dir", "data"),
    "pytorch": ("model_data", "data"),
    "sklearn": ("pickled_model", "data"),
}
"""Flavors that can be taken, the best first, and the keys by which each names its file or folder."""

WAYS_OUT = {
    "sklearn": "skops.io.dump(mlflow.sklearn.load_model('URI'), 'model.skops'), then edge-runtime convert model.skops",
    "pytorch": (
        "torch.export.save(torch.export.export(mlflow.pytorch.load_model('URI'), (example,)), 'model.pt2'), then "
        "edge-runtime convert model.pt2"
    ),
    "lightgbm": (
        "mlflow.lightgbm.load_model('URI').booster_.save_model('model.txt'), then edge-runtime convert model.txt"
    ),
    "xgboost": "mlflow.xgboost.load_model('URI').save_model('model.json'), then edge-runtime convert model.json",
}
"""Advice where a flavor was saved as a pickle."""

_MOST_COLUMNS = 40
"""Of a signature in the report."""


class _MLmodel(Struct, frozen=True):
    """The part of MLmodel that is read."""

    flavors: dict[str, dict[str, Any]] = {}
    signature: dict[str, Any] | None = None


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the model of a folder, or those of its folders; None: it is none of MLflow."""
    if source.file is not None and source.file.name != MLMODEL:
        return None
    folders = [folder for folder in (source.root, *source.folders()) if (folder / MLMODEL).is_file()]
    if not folders:
        return None
    own = folders[:1] if folders[0] == source.root else folders
    return ImportPlan(SYSTEM if len(own) == 1 else "a folder of MLflow models", tuple(_model(source, f) for f in own))


# ---- private --------------------------------------------------------------------------------------------------------


def _model(source: SourceFolder, folder: Path) -> PlannedModel:
    try:
        return _planned(source, folder)
    except ConversionFailed as error:
        return refusal(folder.name, SYSTEM, error.message)


def _planned(source: SourceFolder, folder: Path) -> PlannedModel:
    described: _MLmodel = source.yaml_as(folder / MLMODEL, _MLmodel)
    flavor = next((name for name in PATHS if name in described.flavors), None)
    if flavor is None:
        held = ", ".join(map(str, described.flavors)) or "none"
        raise ConversionFailed(
            f"{folder / MLMODEL}: its flavors are {held}; wanted one of {', '.join(PATHS)}. A python_function runs "
            "code of its own: write it as a model.py (docs/python-models.md)"
        )
    keys = described.flavors[flavor]
    named = next((str(keys[key]) for key in PATHS[flavor] if keys.get(key)), "")
    if not named:
        raise ConversionFailed(f"{folder / MLMODEL}: flavor {flavor} names no file ({' or '.join(PATHS[flavor])})")
    artifact = model_in(source, source.inside(named, folder))
    if kinds.kind_of(artifact) in (kinds.PICKLE, kinds.PYTORCH_WEIGHTS, None) and flavor in WAYS_OUT:
        raise ConversionFailed(
            f"{artifact}: flavor {flavor}, saved as a pickle, which runs code when it is read, so nothing was read. "
            f"Where it was trained: {WAYS_OUT[flavor]}"
        )
    pieces = artifact_pieces(source, artifact, shapes=_shapes(described))
    others = [name for name in described.flavors if name not in (flavor, "python_function")]
    notes = [f"its flavors {', '.join(others)} are left out; {flavor} was taken"] if others else []
    notes += _columns(described)
    return PlannedModel(name=model_name(folder.name), was=f"MLflow, flavor {flavor}", pieces=pieces, notes=tuple(notes))


def _inputs(described: _MLmodel) -> list[dict[str, Any]]:
    """The inputs of a signature, which MLflow writes as JSON within the YAML; none where it has another form."""
    try:
        text = (described.signature or {}).get("inputs")
        return msgspec.json.decode(text, type=list[dict[str, Any]]) if isinstance(text, str) else []
    except msgspec.MsgspecError:
        return []


def _shapes(described: _MLmodel) -> tuple[str, ...]:
    """The shapes that a signature of tensors says, as `convert --shapes` takes them; a wrong one is said there."""
    names = {str(tensor.dtype): name for name, tensor in DATATYPES.items()}
    shapes = []
    for place, tensor in enumerate(_inputs(described)):
        spec = tensor.get("tensor-spec")
        if not isinstance(spec, Mapping) or not isinstance(spec.get("shape"), list):
            return ()
        name = tensor.get("name") or f"input_{place}"
        datatype = names.get(str(spec.get("dtype")), "FP32")
        shapes.append(f"{name}={','.join(map(str, spec['shape']))}:{datatype}")
    return tuple(shapes)


def _columns(described: _MLmodel) -> list[str]:
    """Tell the columns of a table that the model was trained on: they become one tensor, in this order."""
    names = [
        str(tensor.get("name")) for tensor in _inputs(described) if tensor.get("name") and "tensor-spec" not in tensor
    ]
    if not names:
        return []
    shown = ", ".join(names[:_MOST_COLUMNS]) + (", …" if len(names) > _MOST_COLUMNS else "")
    return [f"the {len(names)} columns of its signature are one tensor, in this order: {shown}"]
