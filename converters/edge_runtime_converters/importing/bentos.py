"""A BentoML model, a bento, or a model store: `model.yaml` beside the file that the framework saved.

Owns: the layouts (a model's folder; `models/NAME/VERSION/` in a bento and in a store; `.bentomodel` and `.bento`
archives), and what of a bento is left out: its service is code. Source: docs.bentoml.com, "Model store", and
`bentoml.<framework>.save_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.models import kinds
from edge_runtime_converters.importing import optimum_exports
from edge_runtime_converters.importing.artifacts import artifact_pieces, model_in
from edge_runtime_converters.importing.plan import ImportPlan, PlannedModel, model_name, refusal
from edge_runtime_converters.importing.source_folder import SourceFolder

MODEL_FILE = "model.yaml"
BENTO_FILE = "bento.yaml"
LATEST = "latest"
ARCHIVES = (".bento", ".bentomodel")

_WAYS_OUT = {
    "bentoml.sklearn": "skops.io.dump(bentoml.sklearn.load_model('TAG'), 'model.skops')",
    "bentoml.picklable_model": "skops.io.dump(bentoml.picklable_model.load_model('TAG'), 'model.skops')",
    "bentoml.pytorch": (
        "torch.export.save(torch.export.export(bentoml.pytorch.load_model('TAG'), (example,)), 'model.pt2')"
    ),
}


class _BentoModel(Struct, frozen=True):
    """The part of model.yaml that is read."""

    name: str
    version: str = ""
    module: str = ""
    signatures: dict[str, Any] = {}


class _Bento(Struct, frozen=True):
    """The part of bento.yaml that is read."""

    name: str = ""
    service: str = ""
    models: list[Any] = []


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models of a bento, a store, or one model; None: it is none of BentoML."""
    if source.file is not None:
        if source.file.suffix in ARCHIVES:
            return read(source.unpack(source.file))
        if source.file.name not in (MODEL_FILE, BENTO_FILE):
            return None
    if (source.root / BENTO_FILE).is_file():
        return _bento(source)
    if _is_model(source.root):
        return ImportPlan("a BentoML model", (_model(source, source.root),))
    models, notes = _store(source, source.root)
    return ImportPlan("a BentoML model store", models, notes) if models else None


# ---- private --------------------------------------------------------------------------------------------------------


def _is_model(folder: Path) -> bool:
    return (folder / MODEL_FILE).is_file()


def _bento(source: SourceFolder) -> ImportPlan:
    bento: _Bento = source.yaml_as(source.root / BENTO_FILE, _Bento)
    models, notes = _store(source, source.root / "models")
    said = [f"its service, {bento.service or 'src/'}, is code and is not taken: callers ask its models"]
    if not models:
        tags = [str(each.get("tag")) for each in bento.models if isinstance(each, dict)]
        raise ConversionFailed(
            f"{source.root}: a bento without its models ({', '.join(tags) or 'it names none'}); bentoml models export "
            "TAG writes one as a .bentomodel, which can be imported"
        )
    return ImportPlan("a bento", models, (*notes, *said))


def _store(source: SourceFolder, folder: Path) -> tuple[tuple[PlannedModel, ...], tuple[str, ...]]:
    """The newest version of each model in `NAME/VERSION/`, and which others are left out."""
    models: list[PlannedModel] = []
    notes: list[str] = []
    for place in source.folders(folder):
        versions = [each for each in source.folders(place) if _is_model(each)]
        if not versions:
            continue
        newest = place / source.text(place / LATEST, 256).strip() if (place / LATEST).is_file() else versions[-1]
        chosen = newest if newest in versions else versions[-1]
        models.append(_model(source, chosen))
        left = [each.name for each in versions if each != chosen]
        if left:
            notes.append(f"{place.name}: version {chosen.name} was taken; left out: {', '.join(left)}")
    return tuple(models), tuple(notes)


def _model(source: SourceFolder, folder: Path) -> PlannedModel:
    name = folder.name
    try:
        described: _BentoModel = source.yaml_as(folder / MODEL_FILE, _BentoModel)
        name = described.name
        return _planned(source, folder, described)
    except ConversionFailed as error:
        return refusal(name, "a BentoML model", error.message)


def _planned(source: SourceFolder, folder: Path, described: _BentoModel) -> PlannedModel:
    name = model_name(described.name)
    was = f"BentoML, {described.module.removeprefix('bentoml.') or 'no framework'}"
    export = optimum_exports.planned(source, folder, name)
    if export:
        if len(export) > 1:
            raise ConversionFailed(f"{folder}: holds {len(export)} models; import that folder itself")
        return PlannedModel(name=name, was=f"{was}: {export[0].was}", pieces=export[0].pieces, notes=export[0].notes)
    artifact = model_in(source, folder)
    if kinds.kind_of(artifact) in (kinds.PICKLE, kinds.PYTORCH_WEIGHTS):
        way = _WAYS_OUT.get(described.module, "save the model in a format that holds no code")
        raise ConversionFailed(
            f"{artifact}: {described.module} saves a pickle, which runs code when it is read, so nothing was read. "
            f"Where it was trained: {way}, then edge-runtime convert"
        )
    left = [each for each in described.signatures if each not in ("run", "predict", "__call__", "forward")]
    notes = (f"its methods {', '.join(left)} are not taken; requests run the model itself",) if left else ()
    return PlannedModel(name=name, was=was, pieces=artifact_pieces(source, artifact), notes=notes)
