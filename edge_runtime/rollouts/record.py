"""The record of a rollout: what it is, where it stands, and why; kept beside the repository, so that it can go on.

Owns: the files `rollouts/<group>/<model>.json`, and the lock of the one process that drives a rollout. A record is
written before the signature that it stands for, so that a process that ended between the two signs it when it goes on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from edge_runtime.durable import SYSTEM_DISK, Disk, make_folder, write_atomically
from edge_runtime.errors import PublishError
from edge_runtime.rollouts.plan import RolloutPlan, RolloutPosition
from edge_runtime.updates.manifest import Assignment

FOLDER = "rollouts"

RUNNING, STOPPING, STOPPED, DONE = "running", "stopping", "stopped", "done"


class RolloutRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One rollout of a release to a group.

    before: the model's assignments when it began, which a stop brings back. silent_share: of the group's devices then.
    began_percent: of the group that had the release before the first step. step: index of the percentage that is
    signed, or to be signed next. since_s: the instant of that, Unix seconds.
    goes_back: whether devices that took the release go back when it stops. counts: of the last look, at looked_s.
    """

    group: str
    model: str
    version: int
    release: int
    manifest_path: str
    manifest_sha256: str
    plan: RolloutPlan
    before: tuple[Assignment, ...]
    silent_share: float
    step: int
    since_s: float
    state: Literal["running", "stopping", "stopped", "done"] = "running"
    reason: str = ""
    goes_back: bool = False
    due_s: float | None = None
    looked_s: float | None = None
    counts: dict[str, Any] = {}
    began_percent: float = 0.0

    @property
    def percent(self) -> float:
        """Return the percentage that devices are given."""
        return self.plan.percents[self.step]

    @property
    def percent_before(self) -> float:
        """Return the percentage that is signed while the step's own is not yet."""
        return max(self.plan.percents[self.step - 1] if self.step else 0.0, self.began_percent)

    @property
    def position(self) -> RolloutPosition:
        """Return its position in its plan."""
        return RolloutPosition(self.step, self.since_s, self.silent_share)

    @property
    def name(self) -> str:
        """Return words for the release."""
        return f"{self.model} version {self.version} (release {self.release})"


class RecordFile:
    """The record of one group and model in a repository's folder. The repository's lock guards `save`."""

    def __init__(self, repository: Path, group: str, model: str, *, disk: Disk = SYSTEM_DISK) -> None:
        self.path = repository / FOLDER / group / f"{model}.json"
        self._disk = disk

    def read(self) -> RolloutRecord | None:
        """Return the record; None: there is none. Raises PublishError: it cannot be read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=RolloutRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise PublishError(
                f"{self.path}: cannot be read: {error}; remove it, and start the rollout anew"
            ) from error

    def save(self, record: RolloutRecord) -> None:
        """Keep a record, durably. Raises StorageFailed."""
        data = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
        write_atomically(self.path, data, disk=self._disk)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Keep every other process from driving this rollout. Raises PublishError: one does."""
        make_folder(self.path.parent, disk=self._disk)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(fd):
                raise PublishError(f"{self.path}: another process drives this rollout; wait for its end, or end it")
            yield
        finally:
            os.close(fd)

    @property
    def is_driven(self) -> bool:
        """Return whether a process drives this rollout now."""
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(fd)
        finally:
            os.close(fd)

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")


def read_records(repository: Path) -> list[tuple[RolloutRecord, RecordFile]]:
    """Return the records of a repository, by group and model. Raises PublishError: one cannot be read."""
    found: list[tuple[RolloutRecord, RecordFile]] = []
    for path in sorted((repository / FOLDER).glob("*/*.json")):
        file = RecordFile(repository, path.parent.name, path.name.removesuffix(".json"))
        record = file.read()
        if record is not None:
            found.append((record, file))
    return found


def record_json(record: RolloutRecord, *, is_driven: bool) -> Mapping[str, Any]:
    """Return a rollout as a program reads it."""
    return {
        "group": record.group,
        "model": record.model,
        "version": record.version,
        "release": record.release,
        "state": record.state,
        "reason": record.reason,
        "is_driven": is_driven,
        "percent": record.percent,
        "began_percent": record.began_percent,
        "steps": list(record.plan.percents),
        "hold_s": record.plan.hold_s,
        "stop_at_percent": round(record.plan.stop_share * 100, 6),
        "since": record.since_s,
        "due": record.due_s,
        "looked": record.looked_s,
        "counts": record.counts,
    }


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
