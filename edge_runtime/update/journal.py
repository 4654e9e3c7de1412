"""A device's memory of updates: active and refused releases, and the highest version of each role and counter.

Owns: which changes are one transaction, and that the second record follows the database. Where the database had to be
set aside, a new one starts from that record: the device serves on, reports `is_state_lost`, and installs nothing before
a full refresh. Marks only grow. Decides nothing.

Thread: the one that opened it. Every method that writes is one durable transaction: when it returns, a power cut cannot
undo it; when it raises StorageFailed, nothing of it happened.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import SYSTEM_DISK, Disk, make_folder
from edge_runtime.update import journal_tables as tables
from edge_runtime.update.database import Database
from edge_runtime.update.journal_tables import (
    ActiveRecord,
    Entry,
    RefusedRelease,
    Release,
    RolloutRow,
    read_record,
    write_record,
)
from edge_runtime.update.states import STATES, ReleaseState, after_restart

log = logging.getLogger(__name__)

DATABASE = "journal.sqlite"


class Journal:
    """The journal of one device. `open` it before anything else; `close` is idempotent."""

    def __init__(self, folder: Path, *, disk: Disk = SYSTEM_DISK) -> None:
        self.is_state_lost = False
        self._folder = folder
        self._disk = disk
        self._database = Database(folder / DATABASE, tables.SCHEMA, disk=disk)

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the database, or set a broken one aside and begin a new one. May be called again after a failure.

        Raises StorageFailed: the disk takes neither.
        """
        make_folder(self._folder, disk=self._disk)
        is_lost = self._database.open()
        record = read_record(self._folder)
        # Asked of its content: after a power cut the file may be there, and be empty.
        if self.fact("begun") is None:
            self._begin(record, is_lost=is_lost or record is not None)
        elif record is not None and record.changes > self._changes():
            self._begin(record, is_lost=True)  # the record is written after the database: the database lost its log
        self.is_state_lost = self.fact("state_lost") is not None
        if (record or ActiveRecord()) != self._in_record():
            self._write_record()  # a commit was interrupted between the two, or the record was damaged

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    # ---- what is remembered -----------------------------------------------------------------------------------------

    def active(self) -> dict[str, Release]:
        """Return the release committed last of each model."""
        rows = self._database.read("select model, version, counter, manifest_sha256 from active")
        return {row[0]: Release(*row) for row in rows}

    def recorded(self) -> list[Release]:
        """Return the active releases by the database, where it is open; else by the second record.

        The record may be a commit behind: it is written after the database.
        """
        if self._database.is_open:
            with contextlib.suppress(StorageFailed):
                return list(self.active().values())
        record = read_record(self._folder)
        return record.active if record is not None else []

    def previous(self) -> dict[str, Release]:
        """Return the release before the active one of each model, which an operator can roll back to."""
        rows = self._database.read("select model, version, counter, manifest_sha256 from previous")
        return {row[0]: Release(*row) for row in rows}

    def rollouts(self) -> dict[str, RolloutRow]:
        """Return the release under way of each model."""
        rows = self._database.read(
            "select model, version, counter, manifest_sha256, state, tries, reason from rollouts"
        )
        return {row[0]: RolloutRow(Release(*row[:4]), ReleaseState(row[4]), row[5], row[6]) for row in rows}

    def refused(self) -> dict[str, RefusedRelease]:
        """Return the refused releases by the hash of their manifests, oldest refusal first."""
        rows = self._database.read("select manifest_sha256, model, counter, reason from refused order by rowid")
        return {row[0]: RefusedRelease(*row[1:]) for row in rows}

    def marks(self) -> dict[str, int]:
        """Return the highest version seen of each role."""
        return dict(self._database.read("select role, version from marks"))

    def counters(self) -> dict[str, int]:
        """Return the highest release counter that was active of each model."""
        return dict(self._database.read("select model, counter from counters"))

    def fact(self, name: str) -> str | None:
        """Return a fact by name, for example `clock_floor_utc`."""
        rows = self._database.read("select value from facts where name = ?", name)
        return rows[0][0] if rows else None

    def history(self, count: int = 50) -> list[Entry]:
        """Return the last entries, newest first."""
        rows = self._database.read(
            "select at_utc, model, counter, what, reason from history order by number desc limit ?", count
        )
        return [Entry(*row) for row in rows]

    # ---- what happens -----------------------------------------------------------------------------------------------

    def raise_marks(self, versions: Mapping[str, int]) -> None:
        """Raise the marks of roles to these versions. A lower version leaves a mark as it is."""
        with self._database.transaction() as database:
            database.executemany(
                "insert into marks values (?, ?) on conflict do update set version = max(version, excluded.version)",
                versions.items(),
            )

    def note_fact(self, name: str, value: str) -> None:
        """Remember a fact."""
        with self._database.transaction() as database:
            tables.set_fact(database, name, value)

    def found_whole(self) -> None:
        """Clear `is_state_lost`: a full refresh made up for the lost database."""
        with self._database.transaction() as database:
            tables.forget_fact(database, "state_lost")
        self.is_state_lost = False

    def advance(self, release: Release, state: ReleaseState, at_utc: str, reason: str = "") -> RolloutRow:
        """Write down that a release enters a state. Counts a try before it can end the process.

        The history has a refusal once, with its reason: from `reject`.
        """
        with self._database.transaction() as database:
            tries = tables.tries(database, release) + (state is ReleaseState.WARMING)
            tables.set_rollout(database, release, state, tries, reason)
            if state is not ReleaseState.REJECTING:
                tables.note(
                    database, at_utc, release, state.value, "" if state is ReleaseState.ROLLING_BACK else reason
                )
        return RolloutRow(release, state, tries, reason[: tables.SHOWN_BYTES])

    def take_back_try(self, model: str) -> None:
        """Uncount a try: the process ends on purpose, and not by the release's fault."""
        with self._database.transaction() as database:
            database.execute("update rollouts set tries = max(tries - 1, 0) where model = ?", (model,))

    def drop(self, release: Release, at_utc: str, reason: str, *, keeps_tries: bool = False) -> None:
        """End a rollout without holding anything against the release but, with `keeps_tries`, its tries."""
        with self._database.transaction() as database:
            if keeps_tries:
                database.execute(
                    "update rollouts set state = ? where model = ?", (ReleaseState.IDLE.value, release.model)
                )
            else:
                tables.end_rollout(database, release.model)
            tables.note(database, at_utc, release, "dropped", reason)

    def commit(self, release: Release, at_utc: str) -> None:
        """Make a release the active one. The second record follows; the database wins after a cut between them."""
        with self._database.transaction() as database:
            database.execute(
                "insert or replace into previous select * from active where model = ? and manifest_sha256 != ?",
                (release.model, release.manifest_sha256),
            )
            tables.set_active(database, release)
            tables.raise_counter(database, release)
            tables.end_rollout(database, release.model)
            tables.forget_fact(database, f"starts {release.manifest_sha256}")
            tables.note(database, at_utc, release, "committed", "")
            tables.count_change(database)
        self._follow()

    def begin_start(self, release: Release) -> int:
        """Count a load of a release at a start of the daemon; return how many of them began without an end."""
        starts = self.starts(release) + 1
        self.note_fact(f"starts {release.manifest_sha256}", str(starts))
        return starts

    def starts(self, release: Release) -> int:
        """Return how many loads of a release at a start of the daemon began without an end."""
        return int(self.fact(f"starts {release.manifest_sha256}") or 0)

    def end_start(self, release: Release) -> None:
        """Forget the starts of a release: it loaded or failed to, and the process still runs."""
        with self._database.transaction() as database:
            tables.forget_fact(database, f"starts {release.manifest_sha256}")

    def reject(self, release: Release, at_utc: str, reason: str) -> None:
        """Refuse a release for ever."""
        with self._database.transaction() as database:
            tables.refuse(database, release, reason)
            tables.end_rollout(database, release.model)
            tables.note(database, at_utc, release, "rejected", reason)

    def go_back(self, release: Release, at_utc: str, reason: str) -> None:
        """Make the release before the active one again, and refuse the active one for ever."""
        with self._database.transaction() as database:
            tables.refuse(database, self.active()[release.model], reason)
            tables.set_active(database, release)
            database.execute("delete from previous where model = ?", (release.model,))
            tables.end_rollout(database, release.model)
            tables.note(database, at_utc, release, "gone back to", reason)
            tables.count_change(database)
        self._follow()

    def take_away(self, model: str, at_utc: str, reason: str) -> None:
        """Forget a model that is no longer meant for this device, but for its counter."""
        with self._database.transaction() as database:
            release = self.active()[model]
            database.execute("delete from active where model = ?", (model,))
            database.execute("delete from previous where model = ?", (model,))
            tables.end_rollout(database, model)
            tables.note(database, at_utc, release, "taken away", reason)
            tables.count_change(database)
        self._follow()

    def restart(self, at_utc: str) -> dict[str, RolloutRow]:
        """Put every release under way into the state after a restart, and return the rollouts. Once, after `open`."""
        with self._database.transaction() as database:
            for rollout in self.rollouts().values():
                state = after_restart(rollout.state, rollout.tries)
                if state is rollout.state:
                    continue
                ended = f"the process ended while it was {rollout.state.value}"
                if STATES[rollout.state].counts_tries:
                    ended += f" (try {rollout.tries})"
                reason = rollout.reason if rollout.state is ReleaseState.ROLLING_BACK and rollout.reason else ended
                if state is ReleaseState.IDLE:
                    tables.end_rollout(database, rollout.release.model)
                else:
                    tables.set_rollout(database, rollout.release, state, rollout.tries, reason)
                if state is not ReleaseState.REJECTING:
                    tables.note(database, at_utc, rollout.release, state.value, reason)
        return self.rollouts()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, record: ActiveRecord | None, *, is_lost: bool) -> None:
        """Start an empty database with the active releases of the second record; a new device has none."""
        with self._database.transaction() as database:
            tables.set_fact(database, "begun", "yes")
            if is_lost:
                tables.set_fact(database, "state_lost", "yes")
            if record is None:
                return
            for query in ("delete from active", "delete from previous", "delete from rollouts"):
                database.execute(query)
            for release in record.active:
                tables.set_active(database, release)
                tables.raise_counter(database, release)
            tables.set_fact(database, "changes", str(record.changes))

    def _changes(self) -> int:
        return int(self.fact("changes") or 0)

    def _in_record(self) -> ActiveRecord:
        return ActiveRecord(self._changes(), sorted(self.active().values(), key=lambda release: release.model))

    def _follow(self) -> None:
        """Write the second record after a change; where the disk refuses it, the next change or start writes it.

        Never raises: the change has happened, and its caller must not undo the rest.
        """
        try:
            self._write_record()
        except StorageFailed as error:
            log.warning("the second record is behind the update journal", extra={"reason": error.message})

    def _write_record(self) -> None:
        write_record(self._folder, self._in_record(), disk=self._disk)
