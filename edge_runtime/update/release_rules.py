"""What is asked of a release before its files are fetched, laid out or served, beyond its signature.

Pure: manifests and names in, reasons out. Owns: no code, no name that is taken, no settings in a library's own words,
and of each backend's files all or none. A publisher holds to the same; this is for one whose keys were stolen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError, UpdateError
from edge_runtime.repository.golden import MAX_GOLDEN_BYTES
from edge_runtime.repository.manifest import Manifest, decode_manifest
from edge_runtime.repository.release_paths import (
    GOLDEN_FILE,
    MANIFEST_FILE,
    RESERVED_FILES,
    is_code,
    parse_release_file,
)
from edge_runtime.repository.release_settings import read_release_settings
from edge_runtime.update.journal_tables import Release


def file_name(path: str) -> str:
    """What a release's file is called here: the last part of its target path."""
    return path.rpartition("/")[2]


def check_served(manifest: Manifest, source: str) -> ModelSettings:
    """The settings of a release. source: for the message.

    Raises UpdateError: it brings code, a file of a name that is taken, settings that no release may bring, or a golden
    file that is too large.
    """
    names = [file_name(artifact.path) for artifact in manifest.artifacts]
    for name in names:
        if is_code(name) or name in RESERVED_FILES or names.count(name) > 1:
            raise UpdateError(f"{source}: names {name}, which is code, or a name that is taken; it is not served")
    if file_name(manifest.golden.path) != GOLDEN_FILE:
        raise UpdateError(f"{source}: its golden file is {manifest.golden.path}, wanted {GOLDEN_FILE}")
    if manifest.golden.length > MAX_GOLDEN_BYTES:
        raise UpdateError(
            f"{source}: its golden file has {manifest.golden.length} bytes, wanted at most {MAX_GOLDEN_BYTES}"
        )
    try:
        return read_release_settings(manifest.settings, source)
    except ConfigError as error:
        raise UpdateError(error.message) from error


def decode_any(data: bytes, folder: Path) -> Manifest:
    """A manifest whose own path is not known: that of its release, which it names its files by."""
    try:
        named = msgspec.json.decode(data, type=_AnyManifest).golden.path
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpdateError(f"{folder / MANIFEST_FILE}: is no manifest: {error}") from error
    return decode_manifest(data, parse_release_file(named)[0].manifest)


def check_manifest(data: bytes, release: Release, folder: Path) -> Manifest:
    """The release's manifest. Raises UpdateError: it is another's, or may not be served."""
    path = folder / MANIFEST_FILE
    if hashlib.sha256(data).hexdigest() != release.manifest_sha256:
        raise UpdateError(f"{path}: is not the manifest that was signed; it was changed, or the disk lost it")
    manifest = decode_any(data, folder)
    said = (manifest.model, manifest.version, manifest.release_counter)
    if said != (release.model, release.version, release.counter):
        raise UpdateError(f"{path}: is of {said}, wanted {(release.model, release.version, release.counter)}")
    check_served(manifest, str(path))
    return manifest


def check_choice(manifest: Manifest, names: Collection[str], folder: Path) -> None:
    """Raise UpdateError unless, of each backend's files, all or none are among the names, and of one all.

    Those of a variant are files of their own: a device that does not want it has none of them.
    """
    backends: dict[tuple[str, str], list[str]] = {}
    for artifact in manifest.artifacts:
        backends.setdefault((artifact.backend, artifact.precision), []).append(file_name(artifact.path))
    if not names:
        raise UpdateError(
            f"{folder}: has no artifact; wanted {' or '.join(', '.join(each) for each in backends.values())}"
        )
    for group in backends.values():
        missing = [name for name in group if name not in names]
        if missing and len(missing) < len(group):
            raise UpdateError(f"{folder / missing[0]}: is missing; the release cannot be loaded without it")


# ---- private --------------------------------------------------------------------------------------------------------


class _GoldenPath(msgspec.Struct):
    path: str


class _AnyManifest(msgspec.Struct):
    golden: _GoldenPath
