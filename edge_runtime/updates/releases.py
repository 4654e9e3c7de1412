"""Verified releases on disk: each a folder of its own that the loader can serve, there whole or not at all.

Owns: `<folder>/<sha256 of the manifest>/` with `manifest.json`, `golden.bin` and the artifacts under the names that
their graphs use, all read-only. Files come from the artifact store, which drops them once they lie here, because a
graph's data must have one name only (backends/model_files.py). Never fetches. Called by the rollout and at start.

The hashed bytes are the loaded ones, as far as a library that opens files by name allows it: `open` hashes right before
the load, and `check_unchanged` right after it finds any change in between, by the time that the kernel notes at every
change and that only root can set. A process with the daemon's own rights could replace the daemon as well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from edge_runtime.config.settings import ModelSettings
from edge_runtime.durable import SYSTEM_DISK, Disk, make_folder, read_kept, sync_folder, write_atomically
from edge_runtime.errors import StorageFailed, UpdateError
from edge_runtime.models.folder import Fingerprint, ModelFolder, VersionFolder, owned_name
from edge_runtime.pipelines import PIPELINE
from edge_runtime.tensors import Array
from edge_runtime.updates.download import ARTIFACT_MODE, ExpectedFile, is_whole
from edge_runtime.updates.golden import GoldenTensors, read_golden
from edge_runtime.updates.manifest import MAX_MANIFEST_BYTES, Artifact, Manifest
from edge_runtime.updates.release_checks import (
    check_choice,
    check_manifest,
    check_served,
    decode_any,
    described_file,
)
from edge_runtime.updates.release_paths import (
    GOLDEN_FILE,
    MANIFEST_FILE,
    MODELS_FOLDER,
    RESERVED_FILES,
)
from edge_runtime.updates.states import Release
from edge_runtime.updates.store import ArtifactStore, place

_GRAPHS = (".onnx", ".xml")
"""Files that may have any number of names; all others may be a graph's data, which may have one only."""

_CANNOT_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP)

Seal = tuple[tuple[str, int, int, int, int], ...]
"""(name, size, inode, mtime_ns, ctime_ns) of every file: equal as long as none was written, replaced or relinked."""


@dataclass(frozen=True, slots=True)
class StagedRelease:
    """A release whose files were hashed a moment ago. folder: one version, as the loader takes it."""

    release: Release
    manifest: Manifest
    folder: ModelFolder
    golden: Path
    _seal: Seal = field(repr=False)

    @property
    def version(self) -> VersionFolder:
        """The release's only version."""
        (version,) = self.folder.versions.values()
        return version

    def golden_tensors(self) -> GoldenTensors:
        """Return the golden input and output. Raises UpdateError: it was changed, or does not fit the manifest."""
        data = _read(self.golden, self.manifest.golden.length)
        if hashlib.sha256(data).hexdigest() != self.manifest.golden.sha256:
            raise UpdateError(f"{self.golden}: was changed after it was verified; find out who writes there")
        return read_golden(self.manifest.golden, data, self.manifest.min_agreement)

    def check_unchanged(self) -> None:
        """Raise UpdateError, naming the file, where one is not the hashed file. Right after the load."""
        now = {stamp[0]: stamp for stamp in _seal(self.folder.path, self.manifest)}
        for stamp in self._seal:
            if now.get(stamp[0]) != stamp:
                raise UpdateError(
                    f"{self.folder.path / stamp[0]}: was changed after it was verified; find out who writes there"
                )


def golden_input(folder: Path, model: str, version: int) -> Mapping[str, Array] | None:
    """Return the golden input of a release in the folder of all; None: it is not there, or not whole. Thread: any.

    For who only looks at it: neither the manifest nor the file is compared with what was signed.
    """
    with suppress(OSError):
        for each in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
            with suppress(UpdateError):
                manifest = decode_any(_read(each / MANIFEST_FILE), each)
                if (manifest.model, manifest.version) == (model, version):
                    return read_golden(manifest.golden, _read(each / GOLDEN_FILE, manifest.golden.length)).inputs
    return None


class Releases:
    """The folder of all releases on this device. Thread: one owner.

    Never trusts what lies there: `open` reads and hashes every byte.
    """

    def __init__(self, folder: Path, artifacts: ArtifactStore, *, disk: Disk = SYSTEM_DISK) -> None:
        self._folder = folder
        self._artifacts = artifacts
        self._disk = disk

    def artifacts(self) -> dict[str, Path]:
        """Return the paths of the releases' artifacts by SHA-256, as their manifests say: not hashed yet."""
        found: dict[str, Path] = {}
        folders: list[Path] = []
        with suppress(OSError):
            folders = sorted(each for each in self._folder.iterdir() if not each.name.startswith("."))
        for folder in folders:
            with suppress(UpdateError, OSError):
                for artifact in decode_any(_read(folder / MANIFEST_FILE), folder).artifacts:
                    path = folder / artifact.place
                    if path.is_file():
                        found[artifact.sha256] = path
        return found

    def lay_out(self, release: Release, manifest_data: bytes, chosen: Sequence[Artifact]) -> None:
        """Make the folder of a release from its manifest, its golden file and the chosen artifacts. Idempotent.

        The files are in the artifact store, or in another release's folder. When it returns, the folder survives a
        power cut; interrupted before, there is none, and the store still has the files. A folder that is damaged or
        lacks a file is replaced, so the release must not serve. Raises UpdateError: the manifest is not the release's,
        its files may not be served, or one is not here. StorageFailed: the disk does not take it.
        """
        manifest = check_manifest(manifest_data, release, self._path(release))
        files = {artifact.place: described_file(artifact) for artifact in chosen}
        files[GOLDEN_FILE] = described_file(manifest.golden)
        check_choice(manifest, set(files) - RESERVED_FILES, self._path(release))
        written = {MANIFEST_FILE: manifest_data, **_written(manifest)}
        final = self._path(release)
        if not self._is_laid_out(final, written, files):
            part = self._folder / f".{final.name}.part"
            try:
                _remove(part)
                self._fill(part, written, files)
                self._put_away(final)
                self._disk.rename(part, final)
                sync_folder(self._folder, disk=self._disk)
            except OSError as error:
                raise StorageFailed(f"{final}: cannot be laid out: {error.strerror}; look at the disk") from error
        # Invariant: a release's files have no other name than the one they are loaded by.
        self._artifacts.remove(wanted.digest for wanted in files.values())

    def open(self, release: Release) -> StagedRelease:
        """Read and hash every byte of a release that was laid out. Right before its load.

        Raises UpdateError, naming a file that is missing, changed, or may not be served.
        """
        folder = self._path(release)
        manifest = check_manifest(_read(folder / MANIFEST_FILE), release, folder)
        described = {artifact.place: described_file(artifact) for artifact in manifest.artifacts}
        self._let_go_of_links(folder, described)
        written = {
            name: ExpectedFile.of(len(data), {"sha256": hashlib.sha256(data).hexdigest()})
            for name, data in _written(manifest).items()
        }
        seal = _seal(folder, manifest)
        there = [stamp[0] for stamp in seal if stamp[0] not in RESERVED_FILES and stamp[0] not in written]
        for name in there:
            if name not in described:
                raise UpdateError(f"{folder / name}: is not a file of the release; find out who writes there")
        check_choice(manifest, there, folder)
        for name, wanted in [
            (GOLDEN_FILE, described_file(manifest.golden)),
            *written.items(),
            *((name, described[name]) for name in there),
        ]:
            if not is_whole(folder / name, wanted):
                raise UpdateError(
                    f"{folder / name}: is not the file that was signed; it was changed, or the disk lost it"
                )
        files = {name: folder / name for name in (*there, *written)}
        return StagedRelease(release, manifest, _model_folder(manifest, folder, files), folder / GOLDEN_FILE, seal)

    def keep_only(self, manifests: Collection[str], *, digests: Collection[str] | None = ()) -> None:
        """Remove every release but those of these manifests, and from the store all but these digests; None: no file.

        A folder is renamed before a file in it is removed: half of one never counts as a release. Raises StorageFailed;
        the next call removes the rest.
        """
        try:
            for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
                if folder.name.startswith("."):
                    _remove(folder)
                elif folder.name not in manifests:
                    self._put_away(folder)
        except OSError as error:
            raise StorageFailed(f"{self._folder}: cannot be tidied: {error.strerror}; look at the disk") from error
        if digests is not None:
            self._artifacts.keep_only(digests)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _path(self, release: Release) -> Path:
        return self._folder / release.manifest_sha256

    def _is_laid_out(self, folder: Path, written: Mapping[str, bytes], files: Mapping[str, ExpectedFile]) -> bool:
        with suppress(UpdateError):
            if all(_read(folder / name) == data for name, data in written.items()):
                return all(is_whole(folder / name, wanted) for name, wanted in files.items())
        return False

    def _fill(self, part: Path, written: Mapping[str, bytes], files: Mapping[str, ExpectedFile]) -> None:
        folders = {part, *((part / name).parent for name in files)}
        for folder in sorted(folders):
            make_folder(folder, disk=self._disk)
        for name, data in written.items():
            write_atomically(part / name, data, mode=ARTIFACT_MODE, disk=self._disk)
        elsewhere, linked = self.artifacts(), set[str]()
        for name, wanted in files.items():
            stored = self._artifacts.path(wanted)
            source = stored if stored.is_file() else elsewhere.get(wanted.digest)
            if source is None:
                raise UpdateError(f"{part / name}: its bytes are not here; they must be fetched first")
            if wanted.digest in linked or (source != stored and not name.endswith(_GRAPHS)):
                place(source, part / name, disk=self._disk)
            else:
                self._link(source, part / name)
                linked.add(wanted.digest)
        for folder in sorted(folders):
            sync_folder(folder, disk=self._disk)

    def _link(self, source: Path, file: Path) -> None:
        """Link a file; copy it where the file system has no links."""
        try:
            self._disk.link(source, file)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            place(source, file, disk=self._disk)

    def _let_go_of_links(self, folder: Path, files: Mapping[str, ExpectedFile]) -> None:
        """Remove the store's names of files in a release, which an interrupted `lay_out` left."""
        for name, wanted in files.items():
            with suppress(FileNotFoundError):
                if (folder / name).samefile(self._artifacts.path(wanted)):
                    self._artifacts.remove([wanted.digest])

    def _put_away(self, folder: Path) -> None:
        """Rename a folder, durably, and then remove it; remove at once what is not a folder."""
        gone = folder.with_name(f".{folder.name}.gone")
        _remove(gone)
        if not _is_folder(folder):
            _remove(folder)
            return
        self._disk.rename(folder, gone)
        sync_folder(self._folder, disk=self._disk)
        _remove(gone)


# ---- private --------------------------------------------------------------------------------------------------------


def _written(manifest: Manifest) -> dict[str, bytes]:
    """Return the files of a release, by name, that its manifest holds itself."""
    return {PIPELINE.name: manifest.pipeline.encode()} if manifest.pipeline else {}


def _model_folder(manifest: Manifest, folder: Path, files: Mapping[str, Path]) -> ModelFolder:
    """Return the release as a model. A pipeline's models have the number of the release: it is never used again."""
    settings = check_served(manifest, str(folder / MANIFEST_FILE))
    owned: list[ModelFolder] = []
    for name, each in settings.models.items():
        place = folder / MODELS_FOLDER / name
        own = {path.name: path for path in files.values() if path.parent == place}
        owned.append(_one_version(owned_name(manifest.model, name), manifest.release_counter, place, own, each))
    model = _one_version(manifest.model, manifest.version, folder, files, settings.own)
    return replace(model, owned=tuple(owned))


def _one_version(
    model: str, number: int, folder: Path, files: Mapping[str, Path], settings: ModelSettings
) -> ModelFolder:
    version = VersionFolder(model, number, folder, dict(files), _fingerprint(files))
    return ModelFolder(model, folder, msgspec.structs.replace(settings, convert="never"), None, {number: version})


def _fingerprint(files: Mapping[str, Path]) -> Fingerprint:
    stats = {name: path.stat() for name, path in files.items()}
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ino, each.st_mode) for name, each in stats.items())


def _seal(folder: Path, manifest: Manifest) -> Seal:
    """Return the seal of a release. Raises UpdateError: an entry is not a plain file, or a folder cannot be read."""
    folders = {Path(artifact.place).parent for artifact in manifest.artifacts}
    known = {str(each) for place in folders for each in (place, place.parent)}
    return tuple(sorted(_stamps(folder, "", known)))


def _stamps(folder: Path, prefix: str, folders: Collection[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """folders: those that a release has, which is none but for a pipeline's."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if name in folders and entry.is_dir(follow_symlinks=False):
                    yield from _stamps(folder / entry.name, f"{name}/", folders)
                    continue
                if not entry.is_file(follow_symlinks=False):
                    raise UpdateError(f"{entry.path}: is not a plain file; find out who writes there")
                found = entry.stat(follow_symlinks=False)
                yield (name, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    except OSError as error:
        raise UpdateError(f"{folder}: cannot be read: {error.strerror}; the release is fetched again") from error


def _read(path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> bytes:
    try:
        return read_kept(path, max_bytes)
    except OSError as error:
        raise UpdateError(f"{path}: cannot be read: {error.strerror}; the release is fetched again") from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link itself, if it is there. Raises OSError."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
