"""The checks of a release, in the order in which a device makes them; those that need no byte of a model are here.

| check | where | failing it |
|---|---|---|
| its share of the group includes this device | `choose_offers` | passed over |
| it is not active, not refused, not older, no leap of its counter | `why_not_offered` | passed over |
| its team signs the manifest that its group names | `repository_view.RepositoryView.release`, by `trust` | put off |
| the manifest makes sense, all its files are in its own folder | `manifest.decode_manifest` | put off |
| it is for this profile, runtime, memory and these backends, without code | `why_not_fit` | passed over |
| no reserved name, no setting in a library's own words, a small golden file | `check_served` | put off |
| its team signs each file as the manifest describes it; each hash fits | `staging.Staging.stage` | put off |
| of each backend's files all or none are there, each with its hash | `releases.Releases.open` | put off |
| a child process loads it and gets its golden output | `trial.ReleaseTrials.run` | refused |
| no file changed between its hash and its load | `releases.StagedRelease.check_unchanged` | put off |
| it serves as well as the version before, within its bounds | `observation.Observation.judge` | rolled back, refused |

Pure: manifests and names in, reasons out. Publishers hold to the same rules; the checks here are for a publisher whose
keys were stolen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime import plugins
from edge_runtime.backends.declaration import Declaration
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError, UpdateError
from edge_runtime.models.names import is_code, is_source
from edge_runtime.pipelines import PIPELINE
from edge_runtime.pipelines.definition import read_pipeline
from edge_runtime.updates.download import ExpectedFile
from edge_runtime.updates.golden import MAX_GOLDEN_BYTES
from edge_runtime.updates.manifest import (
    Artifact,
    Assignment,
    Delta,
    Golden,
    Manifest,
    decode_manifest,
    read_release_settings,
)
from edge_runtime.updates.release_paths import (
    GOLDEN_FILE,
    LONGEST_LEAP,
    MANIFEST_FILE,
    RESERVED_FILES,
    parse_release_file,
    place_of,
)
from edge_runtime.updates.states import Release

_SHARE_BITS = 64


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """The traits of a device that decide whether a release fits it.

    runtime: its version, as numbers. suffixes: of the artifacts that its backends load; several backends load ".onnx",
    so the publisher's backend says little; the whole name where a backend loads a folder's files together. precisions:
    of the variants that its profile asks for.
    """

    device_id: str
    profile: str
    runtime: tuple[int, ...]
    suffixes: frozenset[str]
    memory_bytes: int
    precisions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ReleaseSettings:
    """The settings of a release, and of a pipeline's models by their names."""

    own: ModelSettings
    models: Mapping[str, ModelSettings]


@dataclass(frozen=True, slots=True)
class KnownReleases:
    """The releases that a device knows. counters: the highest of each model.

    active: those that serve, by model. refused: reasons by the hash of the manifest. committed: hashes of the manifests
    that were active here at any time.
    """

    counters: Mapping[str, int]
    active: Mapping[str, Release]
    refused: Mapping[str, str]
    committed: Collection[str] = ()


def share(device_id: str, manifest_sha256: str) -> float:
    """Return the place of a device in the rollout of a release, from 0 to just under 100; it never changes.

    A hash, so that canaries need no server; of the release too, so that other devices go first each time.
    """
    digest = hashlib.sha256(f"{device_id}\n{manifest_sha256}".encode()).digest()
    return int.from_bytes(digest[: _SHARE_BITS // 8], "big") / (1 << _SHARE_BITS) * 100.0


def takes_part(device_id: str, assignment: Assignment) -> bool:
    """Return whether an assignment's percentage includes a device. Raising the percentage only adds devices."""
    return share(device_id, assignment.manifest_sha256) < assignment.percent


def choose_offers(assignments: Iterable[Assignment], device_id: str) -> dict[str, Assignment]:
    """Return the assignment of each model for a device: of those that include it, the one with the highest counter."""
    chosen: dict[str, Assignment] = {}
    for each in assignments:
        best = chosen.get(each.model)
        if takes_part(device_id, each) and (best is None or each.release.counter > best.release.counter):
            chosen[each.model] = each
    return chosen


def why_not_offered(assignment: Assignment, memory: KnownReleases) -> str | None:
    """Return why an assignment is passed over, its manifest unread; None: take it. "": it is active already."""
    model, counter, sha256 = assignment.model, assignment.release.counter, assignment.manifest_sha256
    active = memory.active.get(model)
    if active is not None and active.manifest_sha256 == sha256:
        return ""
    if sha256 in memory.refused:
        return f"release {counter} of {model} was refused here before: {memory.refused[sha256]}"
    highest = memory.counters.get(model, 0)
    if counter < highest:
        return _why_not_back(assignment, highest, memory)
    if counter > highest + LONGEST_LEAP:
        return (
            f"release {counter} of {model} leaps from {highest}; wanted at most {LONGEST_LEAP} more: is a key stolen?"
        )
    return None


def why_not_fit(manifest: Manifest, device: DeviceTraits) -> str | None:
    """Return why a release does not fit this device; None: it does. Another profile may take it."""
    name = f"release {manifest.release_counter} of {manifest.model}"
    if manifest.profiles and device.profile not in manifest.profiles:
        return f"{name} is for {', '.join(manifest.profiles)}; this device's profile is {device.profile}"
    needed = version_numbers(manifest.min_runtime)
    if needed > device.runtime:
        return f"{name} needs edge-runtime {manifest.min_runtime}; this is {'.'.join(map(str, device.runtime))}"
    places = [artifact.place for artifact in manifest.artifacts]
    refused = [place for place in places if _is_never_carried(place)] or python_steps(manifest)
    if refused:
        return (
            f"{name} carries {refused[0]}; an update never brings code, what was compiled for another machine, "
            "nor what is still to be converted"
        )
    loaded = {each.model for each in manifest.artifacts if is_loaded(each, device.suffixes)}
    if loaded != {each.model for each in manifest.artifacts}:
        return f"{name} has {', '.join(sorted(places))}; backends here load {', '.join(sorted(device.suffixes))}"
    if manifest.peak_memory_bytes > device.memory_bytes:
        return f"{name} needs {manifest.peak_memory_bytes} bytes of memory; models may have {device.memory_bytes} here"
    return None


def is_loaded(artifact: Artifact, suffixes: Collection[str]) -> bool:
    """Return whether a backend of the device loads a file. suffixes: as of `DeviceTraits`."""
    names = plugins.names("backends")
    declared: Declaration | None = plugins.declared("backends", artifact.backend) if artifact.backend in names else None
    if declared is not None and declared.beside:
        return artifact.place.rpartition("/")[2] in suffixes
    return artifact.place.endswith(tuple(suffixes))


def version_numbers(text: str) -> tuple[int, ...]:
    """Return a version's numbers for comparison: (1, 2) for "1.2.0rc1". The first part that is not a number ends it."""
    found: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits[:18]))
        if digits != part:
            break
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def python_steps(manifest: Manifest) -> list[str]:
    """Return words for a pipeline's Python steps; [] where it has none, or cannot be read (`check_served`)."""
    try:
        pipeline = read_pipeline(manifest.pipeline, PIPELINE.name) if manifest.pipeline else None
    except ConfigError:
        return []
    steps = pipeline.steps if pipeline is not None else ()
    return [f"the Python step {step.name}" for step in steps if step.python is not None]


def described_file(file: Artifact | Golden | Delta) -> ExpectedFile:
    """Return the length and hash that a manifest gives a file."""
    length = file.size if isinstance(file, Delta) else file.length
    return ExpectedFile.of(length, {"sha256": file.sha256})


def check_served(manifest: Manifest, source: str) -> ReleaseSettings:
    """Return the settings of a release. source: for the message.

    Raises UpdateError: it has code, a reserved file name, settings that no release may bring, a pipeline of other
    models than it brings, or too large a golden file.
    """
    places = [artifact.place for artifact in manifest.artifacts]
    for place in places:
        if _is_never_carried(place) or place in RESERVED_FILES or places.count(place) > 1:
            raise UpdateError(
                f"{source}: names {place}, which is code, or to be converted, or a name that is taken; it is not served"
            )
    if place_of(manifest.golden.path, "") != GOLDEN_FILE:
        raise UpdateError(f"{source}: its golden file is {manifest.golden.path}, wanted {GOLDEN_FILE}")
    if manifest.golden.length > MAX_GOLDEN_BYTES:
        raise UpdateError(
            f"{source}: its golden file has {manifest.golden.length} bytes, wanted at most {MAX_GOLDEN_BYTES}"
        )
    try:
        _check_pipeline(manifest, source)
        return ReleaseSettings(
            read_release_settings(manifest.settings, source),
            {each.name: read_release_settings(each.settings, f"{source}: {each.name}") for each in manifest.models},
        )
    except ConfigError as error:
        raise UpdateError(error.message) from error


def decode_any(data: bytes, folder: Path) -> Manifest:
    """Decode a manifest without its path: the paths of its files say which release it is of."""
    try:
        named = msgspec.json.decode(data, type=_AnyManifest).golden.path
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpdateError(f"{folder / MANIFEST_FILE}: is not a manifest: {error}") from error
    return decode_manifest(data, parse_release_file(named)[0].manifest)


def check_manifest(data: bytes, release: Release, folder: Path) -> Manifest:
    """Decode the manifest of a release. Raises UpdateError: it is another release's, or may not be served."""
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
    """Raise UpdateError unless the names hold all files or none of each backend, and all of at least one.

    A variant's files count apart: a device that does not want the variant has none of them. A pipeline's release needs
    them of each of its models. Files of no backend are always needed. names: places in the folder.
    """
    backends: dict[tuple[str, str, str], list[str]] = {}
    for artifact in manifest.artifacts:
        backends.setdefault((artifact.model, artifact.backend, artifact.precision), []).append(artifact.place)
    for model in dict.fromkeys(artifact.model for artifact in manifest.artifacts):
        groups = [group for (of, backend, _), group in backends.items() if of == model and backend]
        if not any(name in group for group in groups for name in names):
            raise UpdateError(f"{folder}: has no artifact; wanted {' or '.join(', '.join(each) for each in groups)}")
    for (_, backend, _), group in backends.items():
        missing = [name for name in group if name not in names]
        if missing and (not backend or len(missing) < len(group)):
            raise UpdateError(f"{folder / missing[0]}: is missing; the release cannot be loaded without it")


# ---- private --------------------------------------------------------------------------------------------------------


def _why_not_back(assignment: Assignment, highest: int, memory: KnownReleases) -> str | None:
    """Return why a device does not go back to an older release; None: its group asks for it, and it ran that before."""
    older = f"release {assignment.release.counter} of {assignment.model} is older than {highest}, which was here"
    if not assignment.going_back_from:
        return f"{older}; publish it under a new counter"
    if assignment.going_back_from < highest:
        return f"{older}; its group goes back from {assignment.going_back_from} only"
    if assignment.manifest_sha256 not in memory.committed:
        return f"{older}, and it was never kept here: a device goes back only to what it ran; publish it anew"
    return None


def _is_never_carried(place: str) -> bool:
    name = place.rpartition("/")[2]
    return is_code(name) or is_source(name)


def _check_pipeline(manifest: Manifest, source: str) -> None:
    """Raise UpdateError unless a pipeline asks the release's models, all of them, and runs no code; or ConfigError."""
    if not manifest.pipeline:
        return
    pipeline = read_pipeline(manifest.pipeline, f"{source}: {PIPELINE.name}")
    if code := python_steps(manifest):
        raise UpdateError(f"{source}: its pipeline has {code[0]}, and an update never brings code; it is not served")
    names = {model.name for model in manifest.models}
    if set(pipeline.models) != names:
        asked = ", ".join(pipeline.models)
        raise UpdateError(f"{source}: its pipeline asks {asked}; it brings {', '.join(sorted(names))}")


class _GoldenPath(msgspec.Struct):
    path: str


class _AnyManifest(msgspec.Struct):
    golden: _GoldenPath
