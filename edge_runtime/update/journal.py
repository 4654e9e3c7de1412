"""What a device must not forget of updates: what runs, what was refused, how far every role and counter had come.

Owns: which changes are one transaction, and that the second record (journal_record.py) follows the database. Where the
database had to be set aside a new one is begun from that record: the device serves on, says `is_state_lost`, and
installs nothing before a full refresh (DESIGN 8). Marks only grow. Decides nothing.

Thread: the one that opened it. Every method that writes is one durable transaction: when it returns, a power cut cannot
take it back; when it raises StorageFailed, nothing of it happened.
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
from edge_runtime.update.journal_record import Record, read_record, write_record
from edge_runtime.update.journal_tables import Entry, Refused, Release, Rollout
from edge_runtime.update.states import COUNTS_A_TRY, State, after_restart

log = logging.getLogger(__name__)

DATABASE = "journal.sqlite"


class Journal:
    """The memory of one device. `open` it before anything else; `close` is idempotent."""

    def __init__(self, folder: Path, *, disk: Disk = SYSTEM_DISK) -> None:
        self.is_state_lost = False
        self._folder = folder
        self._disk = disk
        self._database = Database(folder / DATABASE, tables.SCHEMA, disk=disk)

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the database, or set a broken one aside and begin anew; gone on with where it failed before.

        Raises StorageFailed: the disk takes neither.
        """
        make_folder(self._folder, disk=self._disk)
        is_lost = self._database.open()
        record = read_record(self._folder)
        # Not whether the file was there: after a power cut it may be, and be empty.
        if self.fact("begun") is None:
            self._begin(record, is_lost=is_lost or record is not None)
        elif record is not None and record.changes > self._changes():
            self._begin(record, is_lost=True)  # the record is written after the database: this one lost its log
        self.is_state_lost = self.fact("state_lost") is not None
        if (record or Record()) != self._in_record():
            self._write_record()  # a commit was cut off between the two, or the record was damaged

    def close(self) -> None:
        """Give the database back."""
        self._database.close()

    # ---- what is remembered -----------------------------------------------------------------------------------------

    def active(self) -> dict[str, Release]:
        """By model, the release that was committed last."""
        rows = self._database.read("select model, version, counter, manifest_sha256 from active")
        return {row[0]: Release(*row) for row in rows}

    def recorded(self) -> list[Release]:
        """What is active by the database, where it is open; else by the second record. Needs no `open` that went well.

        The record may be a commit behind: it is written after the database.
        """
        if self._database.is_open:
            with contextlib.suppress(StorageFailed):
                return list(self.active().values())
        record = read_record(self._folder)
        return record.active if record is not None else []

    def previous(self) -> dict[str, Release]:
        """By model, the release that was active before, which an operator can go back to."""
        rows = self._database.read("select model, version, counter, manifest_sha256 from previous")
        return {row[0]: Release(*row) for row in rows}

    def rollouts(self) -> dict[str, Rollout]:
        """By model, the release that is under way."""
        rows = self._database.read(
            "select model, version, counter, manifest_sha256, state, tries, reason from rollouts"
        )
        return {row[0]: Rollout(Release(*row[:4]), State(row[4]), row[5], row[6]) for row in rows}

    def refused(self) -> dict[str, Refused]:
        """By the hash of their manifests, releases that are never tried again, in the order of their refusal."""
        rows = self._database.read("select manifest_sha256, model, counter, reason from refused order by rowid")
        return {row[0]: Refused(*row[1:]) for row in rows}

    def marks(self) -> dict[str, int]:
        """The highest version seen of each role."""
        return dict(self._database.read("select role, version from marks"))

    def counters(self) -> dict[str, int]:
        """The highest release counter that was active of each model."""
        return dict(self._database.read("select model, counter from counters"))

    def fact(self, name: str) -> str | None:
        """A fact by name, for example `clock_floor_utc`."""
        rows = self._database.read("select value from facts where name = ?", name)
        return rows[0][0] if rows else None

    def history(self, count: int = 50) -> list[Entry]:
        """The last entries, newest first."""
        rows = self._database.read(
            "select at_utc, model, counter, what, reason from history order by number desc limit ?", count
        )
        return [Entry(*row) for row in rows]

    # ---- what happens -----------------------------------------------------------------------------------------------

    def raise_marks(self, versions: Mapping[str, int]) -> None:
        """Note how far roles have come. A mark never goes back: a lower version leaves it."""
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
        """A full refresh went well: what was lost with a database is made up for."""
        with self._database.transaction() as database:
            database.execute("delete from facts where name = 'state_lost'")
        self.is_state_lost = False

    def advance(self, release: Release, state: State, at_utc: str, reason: str = "") -> Rollout:
        """Note that a release is about to be in a state; a try is counted here, before it can end the process.

        A refusal stands in the history once, with its reason: when it is rejected.
        """
        with self._database.transaction() as database:
            tries = tables.tries(database, release) + (state is State.WARMING)
            tables.set_rollout(database, release, state, tries, reason)
            if state is not State.REJECTING:
                tables.note(database, at_utc, release, state.value, "" if state is State.ROLLING_BACK else reason)
        return Rollout(release, state, tries, reason[: tables.SHOWN_BYTES])

    def take_back_try(self, model: str) -> None:
        """The process ends on purpose: what was being tried did not end it."""
        with self._database.transaction() as database:
            database.execute("update rollouts set tries = max(tries - 1, 0) where model = ?", (model,))

    def drop(self, release: Release, at_utc: str, reason: str, *, keeps_tries: bool = False) -> None:
        """A release is no longer under way, and nothing is held against it; or its tries are, where they may be."""
        with self._database.transaction() as database:
            if keeps_tries:
                database.execute("update rollouts set state = ? where model = ?", (State.IDLE.value, release.model))
            else:
                database.execute("delete from rollouts where model = ?", (release.model,))
            tables.note(database, at_utc, release, "dropped", reason)

    def commit(self, release: Release, at_utc: str) -> None:
        """A release is the active one from now on. The second record follows; after a cut between, this one wins."""
        with self._database.transaction() as database:
            database.execute(
                "insert or replace into previous select * from active where model = ? and manifest_sha256 != ?",
                (release.model, release.manifest_sha256),
            )
            tables.set_active(database, release)
            tables.raise_counter(database, release)
            database.execute("delete from rollouts where model = ?", (release.model,))
            database.execute("delete from facts where name = ?", (f"starts {release.manifest_sha256}",))
            tables.note(database, at_utc, release, "committed", "")
            tables.count_change(database)
        self._follow()

    def begin_start(self, release: Release) -> int:
        """A release is about to be loaded at a start of the daemon; how often that has begun and not ended."""
        name = f"starts {release.manifest_sha256}"
        starts = int(self.fact(name) or 0) + 1
        self.note_fact(name, str(starts))
        return starts

    def end_start(self, release: Release) -> None:
        """It was loaded, or could not be: either way the process is still there."""
        with self._database.transaction() as database:
            database.execute("delete from facts where name = ?", (f"starts {release.manifest_sha256}",))

    def reject(self, release: Release, at_utc: str, reason: str) -> None:
        """A release is never tried again."""
        with self._database.transaction() as database:
            tables.refuse(database, release, reason)
            database.execute("delete from rollouts where model = ?", (release.model,))
            tables.note(database, at_utc, release, "rejected", reason)

    def go_back(self, release: Release, at_utc: str, reason: str) -> None:
        """A release that was active before is active again, and the one that is now is never tried again."""
        with self._database.transaction() as database:
            tables.refuse(database, self.active()[release.model], reason)
            tables.set_active(database, release)
            database.execute("delete from previous where model = ?", (release.model,))
            database.execute("delete from rollouts where model = ?", (release.model,))
            tables.note(database, at_utc, release, "gone back to", reason)
            tables.count_change(database)
        self._follow()

    def take_away(self, model: str, at_utc: str, reason: str) -> None:
        """A model is no longer meant for this device; how far its counter had come stays known."""
        with self._database.transaction() as database:
            release = self.active()[model]
            database.execute("delete from active where model = ?", (model,))
            database.execute("delete from previous where model = ?", (model,))
            database.execute("delete from rollouts where model = ?", (model,))
            tables.note(database, at_utc, release, "taken away", reason)
            tables.count_change(database)
        self._follow()

    def restart(self, at_utc: str) -> dict[str, Rollout]:
        """Put every release that was under way where a restart leaves it. Once, after `open`."""
        with self._database.transaction() as database:
            for rollout in self.rollouts().values():
                state = after_restart(rollout.state, rollout.tries)
                if state is rollout.state:
                    continue
                ended = f"the process ended while it was {rollout.state.value}"
                if rollout.state in COUNTS_A_TRY:
                    ended += f" (try {rollout.tries})"
                reason = rollout.reason if rollout.state is State.ROLLING_BACK and rollout.reason else ended
                if state is State.IDLE:
                    database.execute("delete from rollouts where model = ?", (rollout.release.model,))
                else:
                    tables.set_rollout(database, rollout.release, state, rollout.tries, reason)
                if state is not State.REJECTING:
                    tables.note(database, at_utc, rollout.release, state.value, reason)
        return self.rollouts()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, record: Record | None, *, is_lost: bool) -> None:
        """A database that knows nothing takes over what the second record says is active; a new device has none."""
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

    def _in_record(self) -> Record:
        return Record(self._changes(), sorted(self.active().values(), key=lambda release: release.model))

    def _follow(self) -> None:
        """Write the second record after a change; where the disk takes it no more, the next change or start does.

        Never raises: the change has happened, and nobody is to undo what goes on with it.
        """
        try:
            self._write_record()
        except StorageFailed as error:
            log.warning("the second record is behind the update journal", extra={"reason": error.message})

    def _write_record(self) -> None:
        write_record(self._folder, self._in_record(), disk=self._disk)
