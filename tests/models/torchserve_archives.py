"""Archives of TorchServe, as torch-model-archiver writes them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def manifest(name: str, version: str = "1.0", handler: str = "image_classifier", **fields: str) -> str:
    """The text of `MAR-INF/MANIFEST.json`. fields: serializedFile, modelFile, configFile, requirementsFile …"""
    model = {"modelName": name, **fields, "handler": handler, "modelVersion": version}
    return json.dumps(
        {"createdOn": "01/02/2025 03:04:05", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}, indent=2
    )


def put_archive(folder: Path, name: str, files: Mapping[str, bytes | str], version: str = "1.0", **fields: str) -> Path:
    """Write `<folder>/<name>.mar`. files: by name. fields: of the manifest's model, and `archive`, the file's name."""
    path = folder / fields.pop("archive", f"{name}.mar")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for member, content in files.items():
            opened.writestr(member, content)
        opened.writestr("MAR-INF/MANIFEST.json", manifest(name, version, **fields))
    return path


def put_workflow(folder: Path, name: str, spec: str, **files: str) -> Path:
    """Write `<folder>/<name>.war`, as torch-workflow-archiver does."""
    path = folder / f"{name}.war"
    workflow = {"workflowName": name, "specFile": "workflow.yaml"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for member, content in {"workflow.yaml": spec, **files}.items():
            opened.writestr(member, content)
        opened.writestr("WAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "workflow": workflow}))
    return path


def put_tar(folder: Path, name: str, files: Mapping[str, bytes | str], **fields: str) -> Path:
    """Write `<folder>/<name>.tar.gz`, as `--archive-format tgz` does: all below a folder of the model's name."""
    path = folder / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as opened:
        for member, content in {**files, "MAR-INF/MANIFEST.json": manifest(name, **fields)}.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"{name}/{member}")
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return path


def put_folder(folder: Path, name: str, files: Mapping[str, bytes | str], **fields: str) -> Path:
    """Write `<folder>/<name>/`, as `--archive-format no-archive` does."""
    path = folder / name
    for member, content in {**files, "MAR-INF/MANIFEST.json": manifest(name, **fields)}.items():
        place = path / member
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
