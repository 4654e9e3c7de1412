"""What a cut did to a device: what of all that it had told of is lost, and what it holds that is half."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from edge_runtime.errors import UpdateError
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from tests.fakes.release_series import ReleaseSeries
from tests.power_loss.device import BAD_COUNTER, Fact


def damages(state: Path, series: ReleaseSeries, facts: Sequence[Fact]) -> list[str]:
    """A line for each; looks as a restart does, which writes a record of the journal that was cut off."""
    return [*_half_files(state, series), *_lost_files(state, facts), *_lost_memory(state, series, facts)]


def is_at_the_end(state: Path, series: ReleaseSeries) -> bool:
    """Whether the last release is active and whole."""
    with closing(Journal(state)) as journal:
        journal.open()
        release = journal.active()[series.model]
    Releases(state / "releases", ArtifactStore(state / "artifacts")).open(release)
    return release.counter == len(series.eras)


def _half_files(state: Path, series: ReleaseSeries) -> Iterator[str]:
    """Metadata and artifacts are whole or not there, told of or not."""
    published = {file.read_bytes() for era in series.eras for file in (era / "metadata").iterdir()}
    for file in (state / "metadata").glob("*.json"):
        if file.read_bytes() not in published:
            yield f"{file.name} is not what was published: {file.stat().st_size} bytes"
    for file in (state / "artifacts").glob("*"):
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != file.name:
            yield f"the artifact {file.name} has other bytes: {file.stat().st_size}"


def _lost_files(state: Path, facts: Sequence[Fact]) -> Iterator[str]:
    store = MetadataStore(state / "metadata")
    for role in {name for kind, name, _ in facts if kind == "role"}:
        if store.load(role, 1 << 20) is None:
            yield f"the metadata of {role} is lost"
    swept = max((number for number, fact in enumerate(facts) if fact[0] == "sweep"), default=-1)
    laid_out = {file.resolve() for file in (state / "releases").glob("[!.]*/*")}
    contents = {hashlib.sha256(file.read_bytes()).hexdigest() for file in laid_out}
    for kind, name, _ in facts[swept + 1 :]:
        if kind == "file" and name not in contents and not (state / "artifacts" / name).is_file():
            yield f"the artifact {name} is lost"
        if kind == "release" and not (state / "releases" / name).is_dir():
            yield f"the release {name} is lost"


def _lost_memory(state: Path, series: ReleaseSeries, facts: Sequence[Fact]) -> Iterator[str]:
    with closing(Journal(state)) as journal:
        journal.open()
        active = journal.active()
        kept = {
            "mark": journal.marks(),
            "active": {model: release.counter for model, release in active.items()},
            "refused": dict.fromkeys(journal.refused(), 0),
        }
        if journal.is_state_lost:
            yield "the journal is lost"
    for kind, name, number in facts:
        if kind in kept and kept[kind].get(name, -1) < number:
            yield f"{kind} {name}: had {number}, now {kept[kind].get(name)}"
    for release in active.values():
        if release.counter == BAD_COUNTER or release.counter > len(series.eras):
            yield f"release {release.counter} is active, and was never committed"
        try:
            Releases(state / "releases", ArtifactStore(state / "artifacts")).open(release)
        except UpdateError as error:
            yield f"what is active cannot be served: {error}"
