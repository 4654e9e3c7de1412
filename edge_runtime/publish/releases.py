"""A new release of a model, or of a pipeline with its models: taken in, tried, described by a manifest, and signed.

Owns: the content of `manifest.json`, and the counter of a release. Counters of a model grow by one; a version may be
released again with the same bytes, never with others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from tuf.api.metadata import TargetFile

from edge_runtime.errors import PublishError
from edge_runtime.publish.assignments import read_manifest
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.intake import Intake, take_in
from edge_runtime.publish.patches import LAST_RELEASES, make_patches
from edge_runtime.publish.pipeline_trial import TryPipeline, try_pipeline
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.trial import LIMIT_S, ArtifactTrial, try_artifact
from edge_runtime.updates.golden import (
    DEFAULT_TOLERANCE,
    MAX_GOLDEN_BYTES,
    TOLERANCES,
    WRITTEN_TOLERANCES,
    count_agreements,
    differences,
    unpack,
)
from edge_runtime.updates.manifest import (
    ANY_PROFILE,
    Artifact,
    Golden,
    Manifest,
    ReleaseBounds,
    StepModel,
    Tolerance,
    encode_manifest,
)
from edge_runtime.updates.release_checks import version_numbers
from edge_runtime.updates.release_paths import GOLDEN_FILE, LONGEST_LEAP, ReleasePath, team_role

MIN_RUNTIME = "0.1.0"
"""The first version that reads these manifests. Raised when a device must understand something new."""

BOUNDS_RUNTIME = "0.1.0"
"""The first version that holds a release to its bounds; one with bounds says so, since others would not read them."""


@dataclass(frozen=True, slots=True)
class ReleaseOptions:
    """The options of a publisher. path, model, version: as in `intake.take_in`. golden: as of `try_artifact`.

    tolerances: by precision, over the usual ones. profiles: device profiles that it is for; none: all. patches: the
    number of releases before it to patch from. counter: of the release; None: one more than the highest so far.
    models: the folder of a pipeline's models; None: beside it. bounds: that every device holds it to; None for none.
    """

    team: str
    path: Path
    model: str | None = None
    version: int | None = None
    golden: Path | None = None
    min_runtime: str = MIN_RUNTIME
    profiles: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    patches: int = LAST_RELEASES
    counter: int | None = None
    models: Path | None = None
    bounds: ReleaseBounds | None = None


@dataclass(frozen=True, slots=True)
class PreparedRelease:
    """A release ready to be signed. notes: sentences for its publisher."""

    change: Change
    release: ReleasePath
    manifest: Manifest
    notes: tuple[str, ...]


def prepare_release(
    repository: Repository, options: ReleaseOptions, pipeline_child: TryPipeline | None = None
) -> PreparedRelease:
    """Take a model in, try it, and draft its release.

    pipeline_child: what the child calls that tries a pipeline; None: pipelines are refused. Raises PublishError: no
    such team, too few of its keys within reach, another team's model, a version whose bytes changed, a folder that may
    not be published, a counter that devices would refuse, or a model that does not work.
    """
    _check_options(repository, options)
    role = team_role(options.team)
    Draft(repository).check_keys(role)  # before the trial, which may take minutes
    intake = take_in(repository.folder, options.path, options.model, options.version, options.models)
    release = _next_release(repository, options.team, intake, options.counter)
    trials = _try_pipeline(intake, options, pipeline_child) if intake.parts else _try_model(intake, options)
    usual = WRITTEN_TOLERANCES if trials[0].result.is_prompt else TOLERANCES
    tolerances = {**usual, **options.tolerances}
    _check_agreement(trials, tolerances)
    _check_bounds(options.bounds, trials[0], tolerances)
    draft = Draft(repository)
    for file in intake.files:
        path = release.file(file.published_name)
        draft.add_file(role, path, file.path, TargetFile(file.length, {"sha256": file.sha256}, path))
    golden = _golden(draft, release, trials[0], tolerances)
    patches = list(make_patches(repository, release, intake.files, options.patches)) if options.patches else []
    for patch in patches:
        draft.add_data(role, patch.delta.target, patch.data)
    manifest = _manifest(options, intake, release, trials, golden)
    manifest = replace(manifest, delta=tuple(patch.delta for patch in patches))
    draft.add_data(role, release.manifest, encode_manifest(manifest))
    change = draft.finish(
        f"publish {intake.model} version {intake.version} as release {release.counter} of {options.team}"
    )
    return PreparedRelease(change, release, manifest, tuple(_notes(intake, trials, release)))


def _try_model(intake: Intake, options: ReleaseOptions) -> list[ArtifactTrial]:
    return [
        try_artifact(
            each.backend,
            each.path,
            intake.settings,
            precision=each.precision,
            has_steps=intake.has_steps,
            golden=options.golden,
            limit_s=options.limit_s,
        )
        for each in intake.artifacts
    ]


def _try_pipeline(intake: Intake, options: ReleaseOptions, child: TryPipeline | None) -> list[ArtifactTrial]:
    """Try the whole pipeline on its models' first artifacts, then on their second ones, until each was asked."""
    if child is None:
        raise PublishError(f"{options.path}: is a pipeline, which only `edge-runtime repo publish` tries")
    rounds = max(len(part.artifacts) for part in intake.parts)
    return [try_pipeline(child, intake, turn, golden=options.golden, limit_s=options.limit_s) for turn in range(rounds)]


def _check_options(repository: Repository, options: ReleaseOptions) -> None:
    if team_role(options.team) not in repository.catalog.delegated:
        known = ", ".join(repository.catalog.owners("team")) or "none"
        raise PublishError(f"there is no team {options.team[:80]!r}; known: {known}; `repo add-team` makes one")
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){0,2}", options.min_runtime):
        raise PublishError(f"min_runtime is {options.min_runtime[:80]!r}; wanted a version like {MIN_RUNTIME}")
    named = options.bounds.max_p95_ms if options.bounds is not None else {}
    for name in (*options.profiles, *(each for each in named if each != ANY_PROFILE)):
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", name):
            raise PublishError(f"{name[:80]!r} is not a profile's name; `edge-runtime profile list` shows them")


def choose_counter(model: str, highest: int, counter: int | None) -> int:
    """Return the counter of a model's next release. highest: of its releases so far, 0: there is none. Pure.

    Raises PublishError: the asked one is not higher, or leaps farther than a device accepts.
    """
    if counter is None:
        return highest + 1
    if counter <= highest:
        raise PublishError(
            f"counter {counter}: {model} has release {highest} already, and counters only grow; wanted {highest + 1} "
            f"to {highest + LONGEST_LEAP}"
        )
    if counter > highest + LONGEST_LEAP:
        raise PublishError(
            f"counter {counter}: leaps from {highest}, and a device accepts at most {LONGEST_LEAP} more; wanted "
            f"at most {highest + LONGEST_LEAP}: publish and assign that one first, then the one beyond it"
        )
    return counter


def _next_release(repository: Repository, team: str, intake: Intake, counter: int | None) -> ReleasePath:
    highest = 0
    files = {(file.model, file.name): file.sha256 for file in intake.files}
    for release, target in repository.catalog.releases():
        if release.model != intake.model:
            continue
        if release.team != team:
            raise PublishError(
                f"{intake.model} is a model of the team {release.team}; devices know it by its name alone"
            )
        highest = max(highest, release.counter)
        manifest = read_manifest(repository, release, target)
        old = {(each.model, each.place.rpartition("/")[2]): each.sha256 for each in manifest.artifacts}
        if manifest.version == intake.version and (old, manifest.pipeline) != (files, intake.pipeline):
            following = intake.version + 1
            way = (
                f"put the new ones into {following}/" if intake.has_versions else f"publish with --version {following}"
            )
            raise PublishError(
                f"{intake.model} version {intake.version} was published with other bytes, as release "
                f"{release.counter}; a version is never used again: {way}"
            )
    return ReleasePath(team, intake.model, choose_counter(intake.model, highest, counter))


def _check_agreement(trials: Sequence[ArtifactTrial], tolerances: Mapping[str, Tolerance]) -> None:
    """Raise PublishError unless all artifacts of the version answer alike."""
    first = trials[0]
    for other in trials[1:]:
        if first.result.golden_inputs != other.result.golden_inputs:
            raise PublishError(f"{first.artifact} and {other.artifact}: the artifacts do not take the same inputs")
        _, wanted = unpack(_described(first, "", tolerances), first.golden)
        _, got = unpack(_described(other, "", tolerances), other.golden)
        tolerance = tolerances.get(other.result.precision, DEFAULT_TOLERANCE)
        found = differences(first.result.golden_outputs, wanted, got, tolerance)
        if found:
            raise PublishError(
                f"{first.artifact} ({first.result.precision}) and {other.artifact} ({other.result.precision}): the "
                f"artifacts answer differently: {'; '.join(found)}"
            )


def _check_bounds(bounds: ReleaseBounds | None, trial: ArtifactTrial, tolerances: Mapping[str, Tolerance]) -> None:
    """Raise PublishError for a bound of golden rows without rows to hold it by."""
    if bounds is None or bounds.min_agreement is None:
        return
    if trial.result.is_made_up:
        raise PublishError(
            "a bound of the golden rows needs inputs with clear answers: give them with --golden FILE.npz"
        )
    _, outputs = unpack(_described(trial, "", tolerances), trial.golden)
    if not count_agreements(trial.result.golden_outputs, outputs, outputs)[0]:
        shapes = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in trial.result.golden_outputs)
        raise PublishError(
            f"a bound of the golden rows needs an output of scores, FP32 [rows, 2 or more]; got {shapes}"
        )


def _golden(draft: Draft, release: ReleasePath, trial: ArtifactTrial, tolerances: Mapping[str, Tolerance]) -> Golden:
    if len(trial.golden) > MAX_GOLDEN_BYTES:
        raise PublishError(
            f"golden input and output have {len(trial.golden)} bytes, wanted at most {MAX_GOLDEN_BYTES}; "
            "give a smaller input with --golden"
        )
    path = release.file(GOLDEN_FILE)
    draft.add_data(team_role(release.team), path, trial.golden)
    return _described(trial, path, tolerances)


def _described(trial: ArtifactTrial, path: str, tolerances: Mapping[str, Tolerance]) -> Golden:
    result = trial.result
    return Golden(
        path=path,
        sha256=hashlib.sha256(trial.golden).hexdigest(),
        length=len(trial.golden),
        precision=result.precision,
        inputs=result.golden_inputs,
        outputs=result.golden_outputs,
        lengths=result.lengths,
        tolerance=dict(tolerances),
    )


def _manifest(
    options: ReleaseOptions, intake: Intake, release: ReleasePath, trials: Sequence[ArtifactTrial], golden: Golden
) -> Manifest:
    return Manifest(
        model=intake.model,
        version=intake.version,
        release_counter=release.counter,
        min_runtime=_min_runtime(options),
        profiles=options.profiles,
        inputs=trials[0].result.inputs,
        outputs=trials[0].result.outputs,
        settings=dict(intake.settings),
        artifacts=tuple(
            Artifact(
                release.file(file.published_name), file.sha256, file.length, file.backend, file.precision, file.model
            )
            for file in intake.files
        ),
        pipeline=intake.pipeline,
        models=tuple(StepModel(part.model, dict(part.settings)) for part in intake.parts),
        golden=golden,
        peak_memory_bytes=max(trial.result.peak_memory_bytes for trial in trials),
        bounds=options.bounds,
    )


def _min_runtime(options: ReleaseOptions) -> str:
    """Return the oldest version that may run a release: the asked one, or a later one that reads its bounds."""
    needed = [options.min_runtime, *([BOUNDS_RUNTIME] if options.bounds is not None else [])]
    return max(needed, key=version_numbers)


def _notes(intake: Intake, trials: Sequence[ArtifactTrial], release: ReleasePath) -> list[str]:
    notes: list[str] = []
    if intake.left_out:
        why = ": what they say of texts is in its settings" if intake.has_steps else ", since no artifact names them"
        notes.append(f"not published{why}: {', '.join(intake.left_out)}")
    if trials[0].result.is_made_up:
        is_prompt = trials[0].result.is_prompt
        what = "a sentence of ours" if intake.has_steps or is_prompt else "noise"
        kind = "FILE, its prompt," if is_prompt else "FILE, a text a line," if intake.has_steps else "FILE.npz"
        notes.append(f"the golden input is {what}; --golden {kind} with a real one finds more mistakes")
    if release.counter > LONGEST_LEAP:
        notes.append(
            f"devices that never had {release.model} begin with a release of at most {LONGEST_LEAP}; give them an "
            "older one first"
        )
    return notes
