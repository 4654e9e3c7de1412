"""Releases of one model, one after the other, and the repository as it was when each of them was assigned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.publish.assignments import assign
from edge_runtime.publish.change import Change
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import ReleaseOptions, prepare_release
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.roles import add_group, add_team
from tests.fakes.publishing import Publisher

TEAM, GROUP = "vision", "line"


@dataclass(frozen=True, slots=True)
class ReleaseSeries:
    """A published model. eras: in the n-th folder (from 0), release and version n + 1 is the one assigned to GROUP."""

    model: str
    root: bytes
    eras: tuple[Path, ...]


def publish_series(folder: Path, model: str, make: Callable[[Path, int], object], count: int) -> ReleaseSeries:
    """Publish versions 1 to `count` of a model. make: writes the artifacts of a version into the folder it is given."""
    publisher = Publisher(folder / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, TEAM, NewKeys(is_online=True)))
    publisher.carry_out(lambda repository: add_group(repository, GROUP, NewKeys(is_online=True)))
    eras = []
    for version in range(1, count + 1):
        make(folder / "models" / model / str(version), version)
        publisher.carry_out(_release(folder / "models" / model, version))
        publisher.carry_out(_assignment(model, version))
        era = folder / "eras" / str(version)
        for part in ("metadata", "targets"):
            shutil.copytree(publisher.path / part, era / part)
        eras.append(era)
    return ReleaseSeries(model, publisher.root_1, tuple(eras))


def _release(path: Path, version: int) -> Callable[[Repository], Change]:
    return lambda repository: prepare_release(repository, ReleaseOptions(TEAM, path, version=version)).change


def _assignment(model: str, version: int) -> Callable[[Repository], Change]:
    return lambda repository: assign(repository, GROUP, model, version)
