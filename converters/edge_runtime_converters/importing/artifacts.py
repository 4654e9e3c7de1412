"""Which pieces a model's file becomes in a version folder: copied where a backend serves it, converted where one does.

Owns: the canonical names, and which files belong to one model (an IR's weights, ONNX's external data). Every reader
asks here, so that each system's artifacts are taken alike. Reads the first bytes of a file, and an ONNX model's names
of data.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime.models import kinds
from edge_runtime.models.names import weights_name
from edge_runtime_converters.formats import artifact_name
from edge_runtime_converters.importing.plan import Piece
from edge_runtime_converters.importing.source_folder import SourceFolder

_PADDLE_WEIGHTS = ".pdiparams"

_WITHOUT_SHAPES = (kinds.TORCHSCRIPT, kinds.FROZEN_GRAPH)
"""Kinds whose files leave out the shapes of inputs; of others a wrong shape would be refused."""


def artifact_pieces(
    source: SourceFolder, artifact: Path, folder: str = "1", shapes: tuple[str, ...] = ()
) -> tuple[Piece, ...]:
    """Return the pieces that a model's file, or the folder that is one model, becomes in the version folder `folder`.

    shapes: of inputs, taken where such a file leaves them out. Raises ConversionFailed: nothing here serves or converts
    it; what to do.
    """
    if not source.holds(artifact):
        raise ConversionFailed(f"{artifact}: not there, or it leads out of {source.root}; copy the files into it")
    kind = kinds.kind_of(artifact)
    if kind is None:
        raise ConversionFailed(f"{artifact}: is not a model that is known here (docs/models.md lists them)")
    if kind is kinds.ONNX:
        data = _onnx_data(artifact)
        return (_copied(artifact, folder, "model.onnx"), *(_copied(path, folder, name) for name, path in data))
    if kind is kinds.IR:
        weights = _beside(artifact, weights_name(artifact.name), "its weights")
        return _copied(artifact, folder, "model.xml"), _copied(weights, folder, "model.bin")
    if kind is kinds.LITERT:
        return (_copied(artifact, folder, "model.tflite"),)
    if kind is kinds.CATBOOST_WORDS:
        return (_copied(artifact, folder, "model.json" if artifact.suffix == ".json" else "model.cbm"),)
    if kind is kinds.PADDLE:
        weights = _beside(artifact, f"{artifact.stem}{_PADDLE_WEIGHTS}", "its weights")
        return _copied(artifact, folder, "model.pdmodel"), _copied(weights, folder, f"model{_PADDLE_WEIGHTS}")
    if kind is kinds.FROZEN_GRAPH or kind.converts_to in ("onnx", "openvino"):
        target = "onnx" if kind.converts_to == "onnx" else "openvino"
        place = f"{folder}/{artifact_name('model', target, 'fp32')}"
        wanted = shapes if kind in _WITHOUT_SHAPES else ()
        return (Piece(place=place, source=str(artifact), target=target, shapes=wanted),)  # type: ignore[arg-type]
    raise ConversionFailed(f"{artifact} {kind.sentence(artifact.name)}")


def model_in(source: SourceFolder, path: Path) -> Path:
    """Return the one model of a folder; a file, or a folder that is a model, is itself.

    One called `model` or `saved_model` goes before others. Raises ConversionFailed: none, or several.
    """
    if not path.is_dir() or kinds.kind_of(path) is not None:
        return path
    found = [each for each in source.entries(path) if source.holds(each) and _is_artifact(each)]
    own = [each for each in found if each.stem in ("model", "saved_model")] or found
    if not own:
        raise ConversionFailed(f"{path}: holds no model that is known here (docs/models.md lists them)")
    if len(own) > 1:
        names = " and ".join(each.name for each in own)
        raise ConversionFailed(f"{path}: holds {names}; which one is the model? Move the others away")
    return own[0]


# ---- private --------------------------------------------------------------------------------------------------------


def _is_artifact(path: Path) -> bool:
    kind = kinds.kind_of(path)
    return kind is not None and (kind.is_model or kind.may_hold_code)


def _copied(path: Path, folder: str, name: str) -> Piece:
    return Piece(place=f"{folder}/{name}", source=str(path))


def _onnx_data(artifact: Path) -> list[tuple[str, Path]]:
    try:
        return [(name, artifact.parent / name) for name in check_onnx_files(artifact).locations]
    except LoadFailed as error:
        raise ConversionFailed(f"{artifact}: {error.message}") from error


def _beside(artifact: Path, name: str, what: str) -> Path:
    path = artifact.parent / name
    if not path.is_file():
        raise ConversionFailed(f"{artifact}: {what}, {name}, must lie beside it; copy it there")
    return path
