"""Releases for tests of the device's side: described by hand, without a publisher, around files of any content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.tensors import Array
from edge_runtime.updates.download import ExpectedFile
from edge_runtime.updates.golden import TOLERANCES, Packed, pack
from edge_runtime.updates.manifest import Artifact, Delta, Golden, Manifest, StepModel, TensorForm, encode_manifest
from edge_runtime.updates.release_paths import GOLDEN_FILE, ReleasePath, step_file
from edge_runtime.updates.states import Release
from edge_runtime.updates.store import ArtifactStore


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Made:
    """A release: what memory knows of it, its manifest as bytes, and its files' bytes by their names."""

    release: Release
    manifest: Manifest
    manifest_data: bytes
    files: Mapping[str, bytes]

    @property
    def path(self) -> str:
        """Of the manifest's target."""
        return ReleasePath("vision", self.release.model, self.release.counter).manifest

    def store(self, artifacts: ArtifactStore, names: Sequence[str] | None = None) -> None:
        """Put the files where a fetch would."""
        for name in self.files if names is None else names:
            data = self.files[name]
            artifacts.adopt(ExpectedFile.of(len(data), {"sha256": sha256(data)}), [data])


def make_release(
    files: Mapping[str, tuple[str, bytes]],
    golden: tuple[Mapping[str, Array], Mapping[str, Array]] = ({}, {}),
    *,
    model: str = "digits",
    version: int = 1,
    counter: int = 1,
    specs: tuple[Sequence[TensorForm], Sequence[TensorForm]] = ((), ()),
    **others: Any,
) -> Made:
    """A release of these files: name -> (backend, bytes). golden: inputs and outputs. others: of the manifest.

    A pipeline's have names like `detect/model.onnx`, by the model of the pipeline that they are of.
    """
    path = ReleasePath("vision", model, counter)
    published = {name: _published(name) for name in files}
    inputs, outputs = pack(golden[0]), pack(golden[1])
    data = inputs.data + outputs.data
    manifest = Manifest(
        **{
            "model": model,
            "version": version,
            "release_counter": counter,
            "min_runtime": "0.1.0",
            "inputs": tuple(specs[0]) or inputs.forms,
            "outputs": tuple(specs[1]) or outputs.forms,
            "artifacts": tuple(
                Artifact(
                    f"{path.folder}/{published[name][0]}",
                    sha256(content),
                    len(content),
                    backend,
                    "",
                    published[name][1],
                )
                for name, (backend, content) in files.items()
            ),
            "models": tuple(StepModel(of) for of in dict.fromkeys(of for _, of in published.values()) if of),
            "golden": described(f"{path.folder}/{GOLDEN_FILE}", inputs, outputs),
            "peak_memory_bytes": 1 << 20,
            **others,
        }
    )
    encoded = encode_manifest(manifest)
    release = Release(model, version, counter, sha256(encoded))
    content = {published[name][0]: each[1] for name, each in files.items()}
    return Made(release, manifest, encoded, {**content, GOLDEN_FILE: data})


def _published(name: str) -> tuple[str, str]:
    """The last part of a file's target, and the model of a pipeline that it is of."""
    model, slash, file = name.rpartition("/")
    return (step_file(file, model), model) if slash else (name, "")


def described(path: str, inputs: Packed, outputs: Packed) -> Golden:
    """What a manifest says of golden tensors."""
    data = inputs.data + outputs.data
    lengths = (*inputs.lengths, *outputs.lengths)
    return Golden(path, sha256(data), len(data), "f32", inputs.forms, outputs.forms, lengths, dict(TOLERANCES))


def delta(old: bytes, new: bytes, patch: bytes, *, counter: int, algorithm: str, model: str = "digits") -> Delta:
    """A patch as a manifest names it."""
    target = ReleasePath("vision", model, counter).file(f"{sha256(new)[:12]}-from-{sha256(old)[:12]}.patch")
    return Delta(sha256(old), sha256(new), target, sha256(patch), algorithm, len(patch))


def folder_of(root: Path, made: Made) -> Path:
    """Where a release lies in the folder of all releases."""
    return root / made.release.manifest_sha256
