"""Drives one rollout: keeps its record, and signs what `plan.decide_rollout` decides.

Owns: the order of record and signature. The record is written first; a process that ended in between finds the
signature missing when it goes on, and signs it. An assignment that another command changed meanwhile is left alone, and
the rollout stops. Thread: one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.errors import PublishError
from edge_runtime.fleet.fleet import AssignedRelease, ReleaseFates
from edge_runtime.publish.assignments import (
    EVERYONE,
    AssignableRelease,
    assign_release,
    find_release,
    read_assignments,
    replace_entries,
)
from edge_runtime.publish.change import Change
from edge_runtime.publish.configurations import read_groups
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.repository import Repository, open_repository
from edge_runtime.rollouts.plan import RolloutAct, RolloutPlan, decide_rollout
from edge_runtime.rollouts.record import DONE, RUNNING, STOPPED, STOPPING, RecordFile, RolloutRecord
from edge_runtime.updates.manifest import Assignment
from edge_runtime.updates.release_paths import parse_release_file

Agree = Callable[[Change], None]
"""Called with a change before it is signed; raises where a person does not want it."""

MOVED_S = 60.0
"""The groups of moved devices are read this often: all of the repository's metadata is."""

CHANGED = "another command changed what the group is assigned of this model"


class Conductor:
    """The rollouts of one model to one group. agree: as of `Agree`. now_s: Unix seconds. disk: where all is written."""

    def __init__(
        self,
        repository: Path,
        group: str,
        model: str,
        passphrases: Passphrases,
        agree: Agree,
        *,
        now_s: Callable[[], float] = time.time,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self._path = repository
        self._group = group
        self._model = model
        self._passphrases = passphrases
        self._agree = agree
        self._now_s = now_s
        self._disk = disk
        self._moved: Mapping[str, str] = {}
        self._moved_due_s = 0.0
        self.file = RecordFile(repository, group, model, disk=disk)

    def begin(
        self, version: int, plan: RolloutPlan, silent_share: float, *, goes_back: bool = False, team: str = ""
    ) -> RolloutRecord:
        """Sign the first step of a rollout. silent_share: of the group's devices, those that do not answer now.

        A share of the group that has the release already is kept: steps below it are left out. Raises PublishError: the
        plan cannot be, there is no such group or release, or the group runs it already, or a part of it another one.
        """
        if fault := plan.fault():
            raise PublishError(fault)
        with self._opened() as repository:
            release = find_release(repository, f"{team}/{self._model}" if team else self._model, version)
            entries = self._entries(repository)
            own = next((each for each in entries if each.manifest_sha256 == release.manifest_sha256), None)
            before = tuple(each for each in entries if each is not own)
            _check_beginning(self._group, release, own, before)
            if goes_back:
                _check_going_back(self._group, self._model, before)
            percent = own.percent if own is not None else 0.0
            steps = [index for index, each in enumerate(plan.percents) if each >= percent]
            if not steps:
                raise PublishError(
                    f"{self._group} gives {release} to {percent:g} % of its devices, more than the last step; "
                    "name higher steps"
                )
            record = RolloutRecord(
                self._group,
                self._model,
                version,
                release.path.counter,
                release.path.manifest,
                release.manifest_sha256,
                plan,
                before,
                silent_share,
                step=steps[0],
                since_s=self._now_s(),
                goes_back=goes_back,
                began_percent=percent,
            )
            if percent != record.percent:
                self._sign(assign_release(repository, self._group, release, record.percent), before_signing=record)
            self.file.save(record)
        return record

    def go_on(self) -> RolloutRecord:
        """Finish what an ended process had begun to sign. Raises PublishError: there is no rollout."""
        with self._opened() as repository:
            record = self._need_record()
            if record.state == STOPPING:
                return self._take_back(repository, record)
            return self._sign_step(repository, record) if record.state == RUNNING else record

    def look(self, fates: ReleaseFates) -> RolloutRecord:
        """Decide by what devices tell, and sign what is decided. Returns the record after it."""
        record = self._need_record()
        if record.state != RUNNING:
            return record
        now_s = self._now_s()
        decision = decide_rollout(record.plan, record.position, fates, now_s)
        looked = replace(
            record, reason=decision.reason, due_s=decision.due_s, looked_s=now_s, counts=_counts_json(fates)
        )
        if decision.act is RolloutAct.STOP:
            return self.stop(decision.reason, counts=looked.counts)
        if decision.act is RolloutAct.RAISE:
            return self._raise(record, looked)
        return self._note(replace(looked, state=DONE) if decision.act is RolloutAct.FINISH else looked)

    def stop(
        self, reason: str, *, goes_back: bool | None = None, counts: dict[str, Any] | None = None
    ) -> RolloutRecord:
        """Stop: the group is assigned what it was before, so that no further device takes the release.

        goes_back: whether devices that took it go back; None: as the rollout began. Where nothing was before, the
        percentage stays as it is: without an assignment, devices would drop the model. Raises PublishError: there is
        no rollout, or it is over.
        """
        with self._opened() as repository:
            record = self._need_record()
            if record.state not in (RUNNING, STOPPING):
                raise PublishError(f"the rollout of {record.name} to {record.group} is {record.state}: {record.reason}")
            if goes_back:
                _check_going_back(record.group, record.model, record.before)
            goes_back = record.goes_back if goes_back is None else goes_back
            counts = counts if counts is not None else record.counts
            stopping = replace(record, state=STOPPING, reason=reason, goes_back=goes_back, counts=counts, due_s=None)
            return self._take_back(repository, stopping)

    def assigned(self, record: RolloutRecord) -> AssignedRelease:
        """Return the release as a fleet counts its devices."""
        return AssignedRelease(
            record.group, record.model, record.release, record.version, record.percent, record.manifest_sha256
        )

    def moved(self) -> Mapping[str, str]:
        """Return the group of each device that targets moved, at most MOVED_S old, or older while others publish."""
        now_s = self._now_s()
        if not 0 < self._moved_due_s - now_s <= MOVED_S:
            with suppress(PublishError), self._opened() as repository:
                self._moved = read_groups(repository)
                self._moved_due_s = now_s + MOVED_S
        return self._moved

    # ---- private ----------------------------------------------------------------------------------------------------

    def _opened(self) -> AbstractContextManager[Repository]:
        return open_repository(self._path, self._passphrases, disk=self._disk)

    def _need_record(self) -> RolloutRecord:
        record = self.file.read()
        if record is None:
            raise PublishError(
                f"there is no rollout of {self._model} to {self._group}; `edge-runtime repo rollout start` begins one"
            )
        return record

    def _entries(self, repository: Repository) -> Sequence[Assignment]:
        return [each for each in read_assignments(repository, self._group) if each.model == self._model]

    def _percent(self, repository: Repository, record: RolloutRecord) -> float:
        """Return the share of the group that is given the release; 0: none."""
        shares = [each.percent for each in self._entries(repository) if each.manifest_sha256 == record.manifest_sha256]
        return max(shares, default=0.0)

    def _sign(self, change: Change, *, before_signing: RolloutRecord) -> None:
        """Sign a change for which the record stands."""
        self._agree(change)
        self.file.save(before_signing)
        change.commit()

    def _raise(self, record: RolloutRecord, looked: RolloutRecord) -> RolloutRecord:
        """Sign the next step, unless another command changed or stopped the rollout meanwhile."""
        with self._opened() as repository:
            known = self._need_record()
            if known != record:
                return known
            if self._percent(repository, record) != record.percent:
                return self._leave_alone(looked)
            return self._sign_step(repository, replace(looked, step=record.step + 1))

    def _sign_step(self, repository: Repository, record: RolloutRecord) -> RolloutRecord:
        """Sign the step of a record, if it is not signed yet."""
        percent = self._percent(repository, record)
        others = tuple(each for each in self._entries(repository) if each.manifest_sha256 != record.manifest_sha256)
        if others != (() if percent == EVERYONE else record.before):
            return self._leave_alone(record)
        if percent == record.percent:
            return record
        if percent != record.percent_before:
            return self._leave_alone(record)
        release = AssignableRelease(parse_release_file(record.manifest_path)[0], record.version, record.manifest_sha256)
        record = replace(record, since_s=self._now_s(), due_s=None)
        change = assign_release(repository, record.group, release, record.percent)
        self._sign(change, before_signing=record)
        return record

    def _take_back(self, repository: Repository, record: RolloutRecord) -> RolloutRecord:
        """Assign what was before, where the release is still assigned."""
        if self._percent(repository, record) and record.before:
            back = record.release if record.goes_back else 0
            entries = [
                replace(each, going_back_from=back or each.going_back_from) if each.percent == EVERYONE else each
                for each in record.before
            ]
            summary = f"stop the rollout of {record.name} to {record.group}"
            change = replace_entries(repository, record.group, record.model, entries, summary)
            self._sign(change, before_signing=record)
        stopped = replace(record, state=STOPPED)
        self.file.save(stopped)
        return stopped

    def _leave_alone(self, record: RolloutRecord) -> RolloutRecord:
        stopped = replace(record, state=STOPPED, reason=CHANGED, due_s=None)
        self.file.save(stopped)
        return stopped

    def _note(self, record: RolloutRecord) -> RolloutRecord:
        """Keep what a look found, unless another command stopped the rollout meanwhile."""
        known = self.file.read()
        if known is not None and replace(known, looked_s=record.looked_s) == record:
            return record
        with RepositoryFolder(self._path, self._disk).locked():
            known = self._need_record()
            if known.state != RUNNING:
                return known
            self.file.save(record)
        return record


# ---- private --------------------------------------------------------------------------------------------------------


def _check_beginning(
    group: str, release: AssignableRelease, own: Assignment | None, before: Sequence[Assignment]
) -> None:
    """Raise PublishError where the group runs the release already, or a part of it another one."""
    if own is not None and own.percent == EVERYONE:
        raise PublishError(f"{group} gives {release} to all of its devices already")
    for each in before:
        if each.percent != EVERYONE:
            raise PublishError(
                f"{group} gives release {each.release.counter} of {each.model} to {each.percent:g} % of its devices; "
                f"stop that rollout, or end it with `edge-runtime repo assign {group} {each.model}=VERSION`"
            )


def _check_going_back(group: str, model: str, before: Sequence[Assignment]) -> None:
    """Raise PublishError where a group ran nothing that its devices can go back to."""
    if not any(each.percent == EVERYONE for each in before):
        raise PublishError(f"{group} ran no release of {model} before, so no device goes back; leave out --go-back")


def _counts_json(fates: ReleaseFates) -> dict[str, Any]:
    counts = asdict(fates)
    return {**counts, "reasons": [dict(each) for each in fates.reasons]}
