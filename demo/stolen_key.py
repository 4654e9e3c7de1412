"""A publisher with a stolen team key: it publishes any bytes, with any golden output.

`edge-runtime repo publish` runs a model before it signs it, and records what it answers; it cannot publish a model that
does not answer what it says. A signature proves who published, not that it works, so a device finds out for itself.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from edge_runtime.publish.assignments import read_manifest, read_target
from edge_runtime.publish.change import Draft
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.repository import open_repository
from edge_runtime.updates.manifest import encode_manifest
from edge_runtime.updates.release_paths import GOLDEN_FILE, ReleasePath, team_role


def publish_untried(path: Path, passphrase: str, model: bytes, version: int) -> None:
    """Sign a model as the next release after the last one, with that one's golden input and output.

    path: the repository. model: bytes of an ONNX file. Raises PublishError.
    """
    with open_repository(path, Passphrases([passphrase])) as repository:
        last, target = max(repository.catalog.releases(), key=lambda each: each[0].counter)
        manifest = read_manifest(repository, last, target)
        role, release = team_role(last.team), ReleasePath(last.team, last.model, last.counter + 1)
        golden_target = repository.catalog.target(role, manifest.golden.path)
        assert golden_target is not None
        draft = Draft(repository)
        (artifact,) = manifest.artifacts
        file = release.file(artifact.path.rpartition("/")[2])
        draft.add_data(role, file, model)
        draft.add_data(role, release.file(GOLDEN_FILE), read_target(repository, golden_target))
        data = draft.catalog.delegated[role].targets[file]
        forged = replace(
            manifest,
            version=version,
            release_counter=release.counter,
            artifacts=(replace(artifact, path=file, sha256=data.hashes["sha256"], length=data.length),),
            golden=replace(manifest.golden, path=release.file(GOLDEN_FILE)),
            delta=(),
        )
        draft.add_data(role, release.manifest, encode_manifest(forged))
        draft.finish(f"sign {release.folder} untried").commit()
