"""What a device must not forget of updates: what runs, what was refused, how far every role and counter had come.

Owns: the SQLite database (`journal_mode=WAL`, `synchronous=FULL`: 200 of 200 acknowledged commits survived a power cut,
with NORMAL none did) and, beside it, a second record of the active releases, written through `durable`. Where the
database cannot be read it is set aside and a new one begun from that record: the device serves on, says
`is_state_lost`, and installs nothing before a full refresh (DESIGN 8). Marks only grow. Decides nothing.

Thread: the one that opened it. Every method that writes is one durable transaction: when it returns, a power cut cannot
take it back; when it raises StorageFailed, nothing of it happened.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import SYSTEM_DISK, Disk, make_folder, read_kept, sync_folder, write_atomically
from edge_runtime.update.states import COUNTS_A_TRY, State, after_restart

log = logging.getLogger(__name__)

DATABASE, RECORD = "journal.sqlite", "active.json"
KEPT_HISTORY = 1_000
"""Entries of the history: years of updates, and some 200 KB."""

SHOWN_BYTES = 500
"""Of a reason: what a person reads in `status`."""

MAX_RECORD_BYTES = 1 << 20

_SCHEMA = """
create table if not exists facts (name text primary key, value text not null) strict;
create table if not exists marks (role text primary key, version integer not null) strict;
create table if not exists counters (model text primary key, counter integer not null) strict;
create table if not exists active (
  model text primary key, version integer not null, counter integer not null, manifest_sha256 text not null
) strict;
create table if not exists previous (
  model text primary key, version integer not null, counter integer not null, manifest_sha256 text not null
) strict;
create table if not exists rollouts (
  model text primary key, version integer not null, counter integer not null, manifest_sha256 text not null,
  state text not null, tries integer not null, reason text not null
) strict;
create table if not exists refused (
  manifest_sha256 text primary key, model text not null, counter integer not null, reason text not null
) strict;
create table if not exists history (
  number integer primary key autoincrement, at_utc text not null, model text not null, counter integer not null,
  what text not null, reason text not null
) strict;
"""


class Release(msgspec.Struct, frozen=True):
    """One release of a model, as far as memory goes."""

    model: str
    version: int
    counter: int
    manifest_sha256: str


class Record(msgspec.Struct, frozen=True):
    """The second record: what is active, and how often that had changed."""

    changes: int = 0
    active: list[Release] = []


@dataclass(frozen=True, slots=True)
class Rollout:
    """A release under way. tries: how often it was warmed up and did not say how that ended."""

    release: Release
    state: State
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A release that is never tried again, and why."""

    model: str
    counter: int
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the history."""

    at_utc: str
    model: str
    counter: int
    what: str
    reason: str


class Journal:
    """The memory of one device. `open` it before anything else; `close` is idempotent."""

    def __init__(self, folder: Path, *, disk: Disk = SYSTEM_DISK) -> None:
        self.is_state_lost = False
        self._folder = folder
        self._disk = disk
        self._database: sqlite3.Connection | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the database, or set a broken one aside and begin anew; gone on with where it failed before.

        Raises StorageFailed: the disk takes neither.
        """
        make_folder(self._folder, disk=self._disk)
        path = self._folder / DATABASE
        try:
            is_lost = self._database is None and self._connect_or_begin(path)
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(f"{path}: cannot be opened: {error}; look at the disk") from error
        record = _read_record(self._folder / RECORD)
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
        if self._database is not None:
            self._database.close()
            self._database = None

    # ---- what is remembered -----------------------------------------------------------------------------------------

    def active(self) -> dict[str, Release]:
        """By model, the release that was committed last."""
        rows = self._read("select model, version, counter, manifest_sha256 from active")
        return {row[0]: Release(*row) for row in rows}

    def recorded(self) -> list[Release]:
        """What is active by the database, where it is open; else by the second record. Needs no `open` that went well.

        The record may be a commit behind: it is written after the database.
        """
        if self._database is not None:
            with contextlib.suppress(StorageFailed):
                return list(self.active().values())
        record = _read_record(self._folder / RECORD)
        return record.active if record is not None else []

    def previous(self) -> dict[str, Release]:
        """By model, the release that was active before, which an operator can go back to."""
        rows = self._read("select model, version, counter, manifest_sha256 from previous")
        return {row[0]: Release(*row) for row in rows}

    def rollouts(self) -> dict[str, Rollout]:
        """By model, the release that is under way."""
        rows = self._read("select model, version, counter, manifest_sha256, state, tries, reason from rollouts")
        return {row[0]: Rollout(Release(*row[:4]), State(row[4]), row[5], row[6]) for row in rows}

    def refused(self) -> dict[str, Refused]:
        """By the hash of their manifests, releases that are never tried again, in the order of their refusal."""
        rows = self._read("select manifest_sha256, model, counter, reason from refused order by rowid")
        return {row[0]: Refused(*row[1:]) for row in rows}

    def marks(self) -> dict[str, int]:
        """The highest version seen of each role."""
        return dict(self._read("select role, version from marks"))

    def counters(self) -> dict[str, int]:
        """The highest release counter that was active of each model."""
        return dict(self._read("select model, counter from counters"))

    def fact(self, name: str) -> str | None:
        """A fact by name, for example `clock_floor_utc`."""
        rows = self._read("select value from facts where name = ?", name)
        return rows[0][0] if rows else None

    def history(self, count: int = 50) -> list[Entry]:
        """The last entries, newest first."""
        rows = self._read(
            "select at_utc, model, counter, what, reason from history order by number desc limit ?", count
        )
        return [Entry(*row) for row in rows]

    # ---- what happens -----------------------------------------------------------------------------------------------

    def raise_marks(self, versions: Mapping[str, int]) -> None:
        """Note how far roles have come. A mark never goes back: a lower version leaves it."""
        with self._transaction() as database:
            database.executemany(
                "insert into marks values (?, ?) on conflict do update set version = max(version, excluded.version)",
                versions.items(),
            )

    def note_fact(self, name: str, value: str) -> None:
        """Remember a fact."""
        with self._transaction() as database:
            _set_fact(database, name, value)

    def found_whole(self) -> None:
        """A full refresh went well: what was lost with a database is made up for."""
        with self._transaction() as database:
            database.execute("delete from facts where name = 'state_lost'")
        self.is_state_lost = False

    def advance(self, release: Release, state: State, at_utc: str, reason: str = "") -> Rollout:
        """Note that a release is about to be in a state; a try is counted here, before it can end the process."""
        with self._transaction() as database:
            tries = _tries(database, release) + (state is State.WARMING)
            _set_rollout(database, release, state, tries, reason)
            _note(database, at_utc, release, state.value, reason)
        return Rollout(release, state, tries, reason[:SHOWN_BYTES])

    def take_back_try(self, model: str) -> None:
        """The process ends on purpose: what was being tried did not end it."""
        with self._transaction() as database:
            database.execute("update rollouts set tries = max(tries - 1, 0) where model = ?", (model,))

    def drop(self, release: Release, at_utc: str, reason: str, *, keeps_tries: bool = False) -> None:
        """A release is no longer under way, and nothing is held against it; or its tries are, where they may be."""
        with self._transaction() as database:
            if keeps_tries:
                database.execute("update rollouts set state = ? where model = ?", (State.IDLE.value, release.model))
            else:
                database.execute("delete from rollouts where model = ?", (release.model,))
            _note(database, at_utc, release, "dropped", reason)

    def commit(self, release: Release, at_utc: str) -> None:
        """A release is the active one from now on. The second record follows; after a cut between, this one wins."""
        with self._transaction() as database:
            database.execute(
                "insert or replace into previous select * from active where model = ? and manifest_sha256 != ?",
                (release.model, release.manifest_sha256),
            )
            _set_active(database, release)
            _raise_counter(database, release)
            database.execute("delete from rollouts where model = ?", (release.model,))
            database.execute("delete from facts where name = ?", (f"starts {release.manifest_sha256}",))
            _note(database, at_utc, release, "committed", "")
            _count_change(database)
        self._follow()

    def begin_start(self, release: Release) -> int:
        """A release is about to be loaded at a start of the daemon; how often that has begun and not ended."""
        name = f"starts {release.manifest_sha256}"
        starts = int(self.fact(name) or 0) + 1
        self.note_fact(name, str(starts))
        return starts

    def end_start(self, release: Release) -> None:
        """It was loaded, or could not be: either way the process is still there."""
        with self._transaction() as database:
            database.execute("delete from facts where name = ?", (f"starts {release.manifest_sha256}",))

    def reject(self, release: Release, at_utc: str, reason: str) -> None:
        """A release is never tried again."""
        with self._transaction() as database:
            _refuse(database, release, reason)
            database.execute("delete from rollouts where model = ?", (release.model,))
            _note(database, at_utc, release, "rejected", reason)

    def go_back(self, release: Release, at_utc: str, reason: str) -> None:
        """A release that was active before is active again, and the one that is now is never tried again."""
        with self._transaction() as database:
            _refuse(database, self.active()[release.model], reason)
            _set_active(database, release)
            database.execute("delete from previous where model = ?", (release.model,))
            database.execute("delete from rollouts where model = ?", (release.model,))
            _note(database, at_utc, release, "gone back to", reason)
            _count_change(database)
        self._follow()

    def take_away(self, model: str, at_utc: str, reason: str) -> None:
        """A model is no longer meant for this device; how far its counter had come stays known."""
        with self._transaction() as database:
            release = self.active()[model]
            database.execute("delete from active where model = ?", (model,))
            database.execute("delete from previous where model = ?", (model,))
            database.execute("delete from rollouts where model = ?", (model,))
            _note(database, at_utc, release, "taken away", reason)
            _count_change(database)
        self._follow()

    def restart(self, at_utc: str) -> dict[str, Rollout]:
        """Put every release that was under way where a restart leaves it. Once, after `open`."""
        with self._transaction() as database:
            for rollout in self.rollouts().values():
                state = after_restart(rollout.state, rollout.tries)
                if state is rollout.state:
                    continue
                reason = f"the process ended while it was {rollout.state.value}"
                if rollout.state in COUNTS_A_TRY:
                    reason += f" (try {rollout.tries})"
                if state is State.IDLE:
                    database.execute("delete from rollouts where model = ?", (rollout.release.model,))
                else:
                    _set_rollout(database, rollout.release, state, rollout.tries, reason)
                _note(database, at_utc, rollout.release, state.value, reason)
        return self.rollouts()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _connect_or_begin(self, path: Path) -> bool:
        """Connect; True: to a new database, the broken one was set aside. Raises sqlite3.Error, OSError."""
        try:
            self._database = self._connect(path)
        except sqlite3.Error as error:
            if not _is_broken(error):
                raise
            self._set_aside(path)
            self._database = self._connect(path)
            return True
        return False

    def _connect(self, path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, isolation_level=None)
        try:
            # Invariant: before the first access, so that the index of the log is no mapped file: on a full disk its
            # pages cannot be had, and the kernel would end the process with SIGBUS.
            database.execute("pragma locking_mode = exclusive")
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = full")
            # Invariant: read before it is believed; a page that a disk lost is found here and not in the middle.
            (word,) = database.execute("pragma quick_check").fetchone()
            if word != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {word}")
            database.executescript(_SCHEMA)
            if _shape(database) != _wanted_shape():
                raise sqlite3.DatabaseError("its tables are malformed: their columns are not those that were made")
            sync_folder(path.parent, disk=self._disk)
        except BaseException:
            database.close()
            raise
        return database

    def _set_aside(self, path: Path) -> None:
        """Keep a broken database for whoever wants to know why, out of the way of the next one."""
        for suffix in ("", "-wal", "-shm"):
            broken = path.with_name(path.name + suffix)
            with contextlib.suppress(FileNotFoundError):
                self._disk.rename(broken, broken.with_name(f"{broken.name}.broken"))

    def _begin(self, record: Record | None, *, is_lost: bool) -> None:
        """A database that knows nothing takes over what the second record says is active; a new device has none."""
        with self._transaction() as database:
            _set_fact(database, "begun", "yes")
            if is_lost:
                _set_fact(database, "state_lost", "yes")
            if record is None:
                return
            for query in ("delete from active", "delete from previous", "delete from rollouts"):
                database.execute(query)
            for release in record.active:
                _set_active(database, release)
                _raise_counter(database, release)
            _set_fact(database, "changes", str(record.changes))

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
        write_atomically(self._folder / RECORD, msgspec.json.encode(self._in_record()), disk=self._disk)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self._database
        assert database is not None, "open first"
        try:
            database.execute("begin immediate")
            try:
                yield database
                self._disk.commit(database)
            except BaseException:
                if database.in_transaction:
                    database.execute("rollback")
                raise
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(
                f"{self._folder / DATABASE}: the update journal cannot be written: {error}; nothing was changed; is "
                "the disk full or failing?"
            ) from error

    def _read(self, query: str, *values: Any) -> list[Any]:
        assert self._database is not None, "open first"
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StorageFailed(
                f"{self._folder / DATABASE}: the update journal cannot be read: {error}; look at the disk"
            ) from error


def _shape(database: sqlite3.Connection) -> list[tuple[str, ...]]:
    """The names of all tables and columns: a bit that flips in one of them escapes `quick_check`."""
    return database.execute(
        "select t.name, c.name, c.type from sqlite_schema t, pragma_table_info(t.name) c "
        "where t.type = 'table' order by t.name, c.cid"
    ).fetchall()


@functools.cache
def _wanted_shape() -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_SCHEMA)
        return _shape(database)


def _tries(database: sqlite3.Connection, release: Release) -> int:
    """How often this very release was tried; another one of the model begins at none."""
    row = database.execute(
        "select tries from rollouts where model = ? and manifest_sha256 = ?", (release.model, release.manifest_sha256)
    ).fetchone()
    return int(row[0]) if row else 0


def _set_rollout(database: sqlite3.Connection, release: Release, state: State, tries: int, reason: str) -> None:
    database.execute(
        "insert or replace into rollouts values (?, ?, ?, ?, ?, ?, ?)",
        (
            release.model, release.version, release.counter, release.manifest_sha256, state.value, tries,
            reason[:SHOWN_BYTES],
        ),
    )  # fmt: skip


def _set_active(database: sqlite3.Connection, release: Release) -> None:
    database.execute(
        "insert or replace into active values (?, ?, ?, ?)",
        (release.model, release.version, release.counter, release.manifest_sha256),
    )


def _refuse(database: sqlite3.Connection, release: Release, reason: str) -> None:
    database.execute(
        "insert or ignore into refused values (?, ?, ?, ?)",
        (release.manifest_sha256, release.model, release.counter, reason[:SHOWN_BYTES]),
    )


def _set_fact(database: sqlite3.Connection, name: str, value: str) -> None:
    database.execute("insert or replace into facts values (?, ?)", (name, value))


def _note(database: sqlite3.Connection, at_utc: str, release: Release, what: str, reason: str) -> None:
    database.execute(
        "insert into history (at_utc, model, counter, what, reason) values (?, ?, ?, ?, ?)",
        (at_utc, release.model, release.counter, what, reason[:SHOWN_BYTES]),
    )
    database.execute("delete from history where number <= (select max(number) from history) - ?", (KEPT_HISTORY,))


def _raise_counter(database: sqlite3.Connection, release: Release) -> None:
    database.execute(
        "insert into counters values (?, ?) on conflict do update set counter = max(counter, excluded.counter)",
        (release.model, release.counter),
    )


def _count_change(database: sqlite3.Connection) -> None:
    """What is active has changed once more, which the second record says as well."""
    database.execute(
        "insert into facts values ('changes', '1') on conflict do update set value = cast(value as integer) + 1"
    )


def _read_record(path: Path) -> Record | None:
    """The second record; None when there is none that can be read."""
    try:
        return msgspec.json.decode(read_kept(path, MAX_RECORD_BYTES), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_broken(error: Exception) -> bool:
    """Whether the file is no database any more, rather than out of reach for the moment."""
    return isinstance(error, sqlite3.DatabaseError) and (
        not isinstance(error, sqlite3.OperationalError) or "malformed" in str(error)
    )
