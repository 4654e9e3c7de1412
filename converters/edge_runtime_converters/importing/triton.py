"""A Triton model repository: `NAME/config.pbtxt` and `NAME/VERSION/model.*`, or one model's folder of it.

Owns: what of a repository is copied as it is (Triton's configs, labels, Python models, served artifacts), and what is
converted. Configs stay as they are: the daemon reads them.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime.repository import kinds
from edge_runtime.repository.names import parse_version
from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.plan import ImportPlan, Piece, PlannedModel, refusal
from edge_runtime_converters.importing.source_folder import SourceFolder

SYSTEM = "a Triton model repository"
CONFIG_FILE = "config.pbtxt"

_SERVED_AS_IT_IS = (kinds.ONNX, kinds.IR, kinds.LITERT, kinds.PADDLE)


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models of a repository; None: it is none."""
    if source.file is not None:
        return None
    if (source.root / CONFIG_FILE).is_file():
        return ImportPlan(f"one model of {SYSTEM}", (_model(source, source.root),))
    folders = [path for path in source.folders() if _is_model(source, path)]
    if not folders:
        return None
    return ImportPlan(SYSTEM, tuple(_model(source, folder) for folder in folders))


# ---- private --------------------------------------------------------------------------------------------------------


def _is_model(source: SourceFolder, folder: Path) -> bool:
    is_config = (folder / CONFIG_FILE).is_file()
    return is_config or any(parse_version(path.name) is not None for path in source.folders(folder))


def _model(source: SourceFolder, folder: Path) -> PlannedModel:
    try:
        return _planned(source, folder)
    except ConversionFailed as error:
        return refusal(folder.name, "a model of Triton", error.message)


def _planned(source: SourceFolder, folder: Path) -> PlannedModel:
    pieces: list[Piece] = []
    notes: list[str] = []
    was: list[str] = []
    for path in source.entries(folder):
        number = parse_version(path.name)
        if not source.holds(path):
            raise ConversionFailed(f"{path}: leads out of {source.root}; copy the files into it (cp -rL)")
        if number is None or not path.is_dir():
            pieces.append(Piece(place=path.name, source=str(path)))
            continue
        version, said = _version(source, path)
        pieces += version
        was += [word for word in said if word not in was]
    return PlannedModel(
        name=folder.name, was=", ".join(was) or "a model of Triton", pieces=tuple(pieces), notes=tuple(notes)
    )


def _version(source: SourceFolder, folder: Path) -> tuple[list[Piece], list[str]]:
    """The pieces of one version folder, and what its models are."""
    pieces: list[Piece] = []
    was: list[str] = []
    for path in source.entries(folder):
        kind = kinds.kind_of(path)
        is_converted = kind is not None and kind not in _SERVED_AS_IT_IS and kind.converts_to
        if is_converted and kind is not None:
            pieces += artifact_pieces(source, path, folder.name)
            was.append(kind.name)
        else:
            pieces.append(Piece(place=f"{folder.name}/{path.name}", source=str(path)))
            if kind is not None:
                was.append(kind.name)
    return pieces, was
