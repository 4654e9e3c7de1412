"""A repository that is open to be changed, or is being made.

Owns: the parts that one publisher works with: folder, catalog, keys, and how long signatures stay good. The folder is
locked from `open_repository` to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from edge_runtime.durable import SYSTEM_DISK, Disk, make_folder, write_atomically
from edge_runtime.errors import PublishError
from edge_runtime.publish.catalog import TOP_LEVEL, Catalog, load_catalog
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.key_ring import KeyRing, NewKeys
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.typed_toml import build, parse_toml

DayCount = Annotated[int, Meta(ge=1, le=3650)]


class Days(Struct, frozen=True, forbid_unknown_fields=True):
    """Days for which each kind of metadata stays good. A person signs the first five, cron the last two.

    timestamp: how long a stranger's copy can keep a device on an old state, and how long cron may stand still; the
    snapshot is signed with it when half its time is over.
    """

    root: DayCount = 365
    targets: DayCount = 365
    team: DayCount = 365
    fleet: DayCount = 365
    config: DayCount = 365
    snapshot: DayCount = 14
    timestamp: DayCount = 7

    def of(self, role: str) -> int:
        """Return the days of a role."""
        kind = role if role in TOP_LEVEL else role.partition("-")[0]
        return int(asdict(self)[kind])


class _Settings(Struct, frozen=True, forbid_unknown_fields=True):
    days: Days = Days()


@dataclass(slots=True)
class Repository:
    """One repository in the hands of its only publisher. `catalog` is replaced when a change is committed."""

    folder: RepositoryFolder
    catalog: Catalog
    keys: KeyRing
    days: Days
    now_utc: datetime
    is_new: bool = False


@contextmanager
def open_repository(
    path: Path, passphrases: Passphrases, *, disk: Disk = SYSTEM_DISK, now_utc: datetime | None = None
) -> Iterator[Repository]:
    """Open a repository to read or to change, and finish an interrupted change.

    Raises PublishError: there is none, it does not verify, or another publisher is at work.
    """
    folder = RepositoryFolder(path, disk)
    if not folder.is_repository:
        raise PublishError(f"{path}: is not a repository; make one with `edge-runtime repo init {path}` or give --repo")
    with folder.locked():
        yield Repository(
            folder, load_catalog(folder), KeyRing(folder.keys, passphrases, disk), _read_days(folder), _now(now_utc)
        )


@dataclass(frozen=True, slots=True)
class Founding:
    """Keys of a new repository by role, and how many of them must sign."""

    keys: dict[str, NewKeys]
    thresholds: dict[str, int]
    days: Days = field(default_factory=Days)


@contextmanager
def found_repository(
    path: Path,
    founding: Founding,
    passphrases: Passphrases,
    *,
    disk: Disk = SYSTEM_DISK,
    now_utc: datetime | None = None,
) -> Iterator[Change]:
    """Yield the change that makes a repository; before its commit only settings are written, which a new try replaces.

    Raises PublishError: there is one already, or there are fewer keys than must sign.
    """
    folder = RepositoryFolder(path, disk)
    make_folder(path, disk=disk)
    with folder.locked():
        if folder.is_repository:
            raise PublishError(f"{path}: is a repository already; name another folder")
        ring = KeyRing(folder.keys, passphrases, disk)
        now = _now(now_utc)
        catalog = Catalog(Root(expires=now), Targets(expires=now), Snapshot(expires=now), Timestamp(expires=now))
        for role in TOP_LEVEL:
            keys = ring.add(role, founding.keys[role])
            for key in keys:
                catalog.root.add_key(key, role)
            threshold = founding.thresholds.get(role, 1)
            check_threshold(role, len(keys), threshold)
            catalog.root.roles[role].threshold = threshold
        repository = Repository(folder, catalog, ring, founding.days, now, is_new=True)
        draft = Draft(repository, catalog)
        draft.touch(*TOP_LEVEL)
        change = draft.finish(f"make the repository {path}")
        make_folder(folder.targets, disk=disk)
        write_atomically(folder.settings, _days_toml(founding.days), disk=disk)
        yield change


def check_threshold(role: str, keys: int, threshold: int) -> None:
    """Raise PublishError unless a role has enough keys for its threshold."""
    if not 1 <= threshold <= keys:
        raise PublishError(f"{role}: threshold {threshold} with {keys} keys; wanted 1 to {keys}")


def _now(now_utc: datetime | None) -> datetime:
    return (now_utc or datetime.now(timezone.utc)).replace(microsecond=0)


def _read_days(folder: RepositoryFolder) -> Days:
    if not folder.settings.exists():
        return Days()
    text = folder.settings.read_text(encoding="utf-8")
    return build(_Settings, parse_toml(text, str(folder.settings)), str(folder.settings)).days


def _days_toml(days: Days) -> bytes:
    lines = (f"{name} = {count}" for name, count in asdict(days).items())
    return "\n".join(("# How many days what is signed stays good.", "[days]", *lines, "")).encode()
