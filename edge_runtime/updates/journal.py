"""A device's memory of updates: active and refused releases, and the highest version of each role and counter.

Owns: the tables, which changes are one transaction, and the second record: a file beside the database, written after
it, which may be one change behind. Where the database had to be set aside, a new one starts from that record: the
device serves on, reports `is_state_lost`, and installs nothing before a full refresh. Marks only grow. Decides nothing.

Thread: the one that opened it. Every method that writes is one durable transaction: when it returns, a power cut cannot
undo it; when it raises StorageFailed, nothing of it happened.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.durable import SYSTEM_DISK, Disk, make_folder, read_kept, sync_folder, write_atomically
from edge_runtime.errors import StorageFailed
from edge_runtime.updates.states import STATES, Release, ReleaseState, RolloutRow, after_restart

log = logging.getLogger(__name__)

DATABASE = "journal.sqlite"

KEPT_HISTORY = 1_000
"""Entries of the history: years of updates, and some 200 KB."""

SHOWN_BYTES = 500
"""Of a reason: what a person reads in `status`."""

COMMITTED = "committed "
"""The beginning of a fact's name: the manifest's hash of a release that was active here follows. Facts and not a table:
a daemon of before finds its own tables, so that going back to that daemon keeps the journal."""

KEPT_COMMITTED = 500
"""Of all models: some 60 KB. A group goes back by one release or a few."""

SCHEMA = """
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

RECORD = "active.json"
"""The second record's file."""

MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RefusedRelease:
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


class ActiveRecord(msgspec.Struct, frozen=True):
    """The second record: the active releases, and the count of their changes."""

    changes: int = 0
    active: list[Release] = []


class Journal:
    """The journal of one device. `open` it before anything else; `close` is idempotent."""

    def __init__(self, folder: Path, *, disk: Disk = SYSTEM_DISK) -> None:
        self.is_state_lost = False
        self._folder = folder
        self._disk = disk
        self._database = Database(folder / DATABASE, disk=disk)

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the database, or set a broken one aside and begin a new one. May be called again after a failure.

        Raises StorageFailed: the disk takes neither.
        """
        make_folder(self._folder, disk=self._disk)
        is_lost = self._database.open()
        record = _read_record(self._folder)
        # Asked of its content: after a power cut the file may be there, and be empty.
        if self.fact("begun") is None:
            self._begin(record, is_lost=is_lost or record is not None)
        elif record is not None and record.changes > self._for_record().changes:
            self._begin(record, is_lost=True)  # the record is written after the database: the database lost its log
        self.is_state_lost = self.fact("state_lost") is not None
        if (record or ActiveRecord()) != self._for_record():
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
        record = _read_record(self._folder)
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

    def committed(self) -> frozenset[str]:
        """Return the hashes of manifests of releases that were active here, of each model the last ones."""
        rows = self._database.read("select name from facts where name glob ?", f"{COMMITTED}*")
        known = [*self.active().values(), *self.previous().values()]
        return frozenset([row[0].removeprefix(COMMITTED) for row in rows] + [each.manifest_sha256 for each in known])

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
            _set_fact(database, name, value)

    def found_whole(self) -> None:
        """Clear `is_state_lost`: a full refresh made up for the lost database."""
        with self._database.transaction() as database:
            _forget_fact(database, "state_lost")
        self.is_state_lost = False

    def advance(self, release: Release, state: ReleaseState, at_utc: str, reason: str = "") -> RolloutRow:
        """Write down that a release enters a state. Counts a try before it can end the process.

        The history has a refusal once, with its reason: from `reject`.
        """
        with self._database.transaction() as database:
            row = database.execute(
                "select tries from rollouts where model = ? and manifest_sha256 = ?",
                (release.model, release.manifest_sha256),
            ).fetchone()  # of this very release: another one of the model starts at 0
            tries = (row[0] if row else 0) + (state is ReleaseState.WARMING)
            _set_rollout(database, release, state, tries, reason)
            if state is not ReleaseState.REJECTING:
                _note(database, at_utc, release, state.value, "" if state is ReleaseState.ROLLING_BACK else reason)
        return RolloutRow(release, state, tries, reason[:SHOWN_BYTES])

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
                _end_rollout(database, release.model)
            _note(database, at_utc, release, "dropped", reason)

    def commit(self, release: Release, at_utc: str) -> None:
        """Make a release the active one. The second record follows; the database wins after a cut between them."""
        with self._active_change() as database:
            database.execute(
                "insert or replace into previous select * from active where model = ? and manifest_sha256 != ?",
                (release.model, release.manifest_sha256),
            )
            _set_active(database, release)
            _raise_counter(database, release)
            _end_rollout(database, release.model)
            _forget_fact(database, f"starts {release.manifest_sha256}")
            _note_committed(database, release)
            _note(database, at_utc, release, "committed", "")

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
            _forget_fact(database, f"starts {release.manifest_sha256}")

    def reject(self, release: Release, at_utc: str, reason: str) -> None:
        """Refuse a release for ever."""
        with self._database.transaction() as database:
            _refuse(database, release, reason)
            _end_rollout(database, release.model)
            _note(database, at_utc, release, "rejected", reason)

    def go_back(self, release: Release, at_utc: str, reason: str) -> None:
        """Make the release before the active one again, and refuse the active one for ever."""
        with self._active_change() as database:
            _refuse(database, self.active()[release.model], reason)
            _set_active(database, release)
            database.execute("delete from previous where model = ?", (release.model,))
            _end_rollout(database, release.model)
            _note(database, at_utc, release, "gone back to", reason)

    def take_away(self, model: str, at_utc: str, reason: str) -> None:
        """Forget a model that is no longer meant for this device, but for its counter."""
        with self._active_change() as database:
            release = self.active()[model]
            database.execute("delete from active where model = ?", (model,))
            database.execute("delete from previous where model = ?", (model,))
            _end_rollout(database, model)
            _note(database, at_utc, release, "taken away", reason)

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
                    _end_rollout(database, rollout.release.model)
                else:
                    _set_rollout(database, rollout.release, state, rollout.tries, reason)
                if state is not ReleaseState.REJECTING:
                    _note(database, at_utc, rollout.release, state.value, reason)
        return self.rollouts()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, record: ActiveRecord | None, *, is_lost: bool) -> None:
        """Start an empty database with the active releases of the second record; a new device has none."""
        with self._database.transaction() as database:
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

    @contextlib.contextmanager
    def _active_change(self) -> Iterator[sqlite3.Connection]:
        """Run one change of the active releases as a transaction; the second record follows it.

        Where the disk refuses the record, the next change or start writes it: the change has happened, and its caller
        must not undo the rest.
        """
        with self._database.transaction() as database:
            yield database
            database.execute(
                "insert into facts values ('changes', '1') on conflict do update set value = cast(value as integer) + 1"
            )
        try:
            self._write_record()
        except StorageFailed as error:
            log.warning("the second record is behind the update journal", extra={"reason": error.message})

    def _for_record(self) -> ActiveRecord:
        """Return the second record as it must be."""
        active = sorted(self.active().values(), key=lambda release: release.model)
        return ActiveRecord(int(self.fact("changes") or 0), active)

    def _write_record(self) -> None:
        """Replace the second record, durably. Raises StorageFailed."""
        write_atomically(self._folder / RECORD, msgspec.json.encode(self._for_record()), disk=self._disk)


class Database:
    """The SQLite file of the journal, which survives a power cut, and is set aside where it did not.

    Settings: `journal_mode=WAL`, `synchronous=FULL` (200 of 200 acknowledged commits survived a power cut; with NORMAL
    none did), no mapped file. `open` it first; `close` is idempotent.
    """

    def __init__(self, path: Path, *, disk: Disk) -> None:
        """path: in a folder that exists."""
        self._path = path
        self._disk = disk
        self._connection: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Return whether it is open for reading and writing."""
        return self._connection is not None

    def open(self) -> bool:
        """Open it, if it is not open. True: a new one, because the old one is broken and was set aside.

        Raises StorageFailed: the disk can read or write neither.
        """
        if self._connection is not None:
            return False
        try:
            return self._connect_or_begin()
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(f"{self._path}: cannot be opened: {error}; {_advice(error)}") from error

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block's statements as one transaction, durable at its end. Raises StorageFailed: none of them ran."""
        connection = self._connection
        assert connection is not None, "open first"
        try:
            connection.execute("begin immediate")
            try:
                yield connection
                self._disk.commit(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(
                f"{self._path}: the update journal cannot be written: {error}; nothing was changed; is the disk full "
                "or failing?"
            ) from error

    def read(self, query: str, *values: Any) -> list[Any]:
        """Return all rows of a query. Raises StorageFailed."""
        assert self._connection is not None, "open first"
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StorageFailed(
                f"{self._path}: the update journal cannot be read: {error}; look at the disk"
            ) from error

    # ---- private ----------------------------------------------------------------------------------------------------

    def _connect_or_begin(self) -> bool:
        try:
            self._connection = self._connect()
        except sqlite3.Error as error:
            if not _is_broken(error):
                raise
            self._set_aside()
            self._connection = self._connect()
            return True
        return False

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            # Invariant: before the first access, so that the index of the log is not a mapped file: on a full disk the
            # kernel cannot get its pages, and would end the process with SIGBUS.
            connection.execute("pragma locking_mode = exclusive")
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            # Invariant: the whole file is read before any use; a page that the disk lost is found here, not later.
            (word,) = connection.execute("pragma quick_check").fetchone()
            if word != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {word}")
            connection.executescript(SCHEMA)
            if _shape(connection) != self._wanted_shape():
                raise sqlite3.DatabaseError("its tables are malformed: their columns are not those that were made")
            sync_folder(self._path.parent, disk=self._disk)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_aside(self) -> None:
        """Rename a broken database, so that a person can look for the cause."""
        for suffix in ("", "-wal", "-shm"):
            broken = self._path.with_name(self._path.name + suffix)
            with contextlib.suppress(FileNotFoundError):
                self._disk.rename(broken, broken.with_name(f"{broken.name}.broken"))

    def _wanted_shape(self) -> list[tuple[str, ...]]:
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(SCHEMA)
            return _shape(connection)


# ---- statements, inside a transaction -------------------------------------------------------------------------------


def _set_rollout(database: sqlite3.Connection, release: Release, state: ReleaseState, tries: int, reason: str) -> None:
    """Make a release the only one under way of its model."""
    database.execute(
        "insert or replace into rollouts values (?, ?, ?, ?, ?, ?, ?)",
        (
            release.model, release.version, release.counter, release.manifest_sha256, state.value, tries,
            reason[:SHOWN_BYTES],
        ),
    )  # fmt: skip


def _set_active(database: sqlite3.Connection, release: Release) -> None:
    """Make a release the active one of its model."""
    database.execute(
        "insert or replace into active values (?, ?, ?, ?)",
        (release.model, release.version, release.counter, release.manifest_sha256),
    )


def _note_committed(database: sqlite3.Connection, release: Release) -> None:
    """Remember that a release was active here, and forget the oldest beyond KEPT_COMMITTED."""
    _set_fact(database, f"{COMMITTED}{release.manifest_sha256}", f"{release.model} {release.counter}")
    database.execute(
        "delete from facts where name glob :names and rowid not in "
        "(select rowid from facts where name glob :names order by rowid desc limit :most)",
        {"names": f"{COMMITTED}*", "most": KEPT_COMMITTED},
    )


def _refuse(database: sqlite3.Connection, release: Release, reason: str) -> None:
    """Refuse a release for ever; the first reason stays."""
    database.execute(
        "insert or ignore into refused values (?, ?, ?, ?)",
        (release.manifest_sha256, release.model, release.counter, reason[:SHOWN_BYTES]),
    )


def _end_rollout(database: sqlite3.Connection, model: str) -> None:
    """Remove the release under way of a model, with its tries."""
    database.execute("delete from rollouts where model = ?", (model,))


def _set_fact(database: sqlite3.Connection, name: str, value: str) -> None:
    """Set a fact by name."""
    database.execute("insert or replace into facts values (?, ?)", (name, value))


def _forget_fact(database: sqlite3.Connection, name: str) -> None:
    """Remove a fact."""
    database.execute("delete from facts where name = ?", (name,))


def _note(database: sqlite3.Connection, at_utc: str, release: Release, what: str, reason: str) -> None:
    """Add an entry to the history; the oldest goes."""
    database.execute(
        "insert into history (at_utc, model, counter, what, reason) values (?, ?, ?, ?, ?)",
        (at_utc, release.model, release.counter, what, reason[:SHOWN_BYTES]),
    )
    database.execute("delete from history where number <= (select max(number) from history) - ?", (KEPT_HISTORY,))


def _raise_counter(database: sqlite3.Connection, release: Release) -> None:
    """Raise the counter of a model; it never goes back."""
    database.execute(
        "insert into counters values (?, ?) on conflict do update set counter = max(counter, excluded.counter)",
        (release.model, release.counter),
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _read_record(folder: Path) -> ActiveRecord | None:
    """Return the second record; None: there is none that can be read."""
    try:
        return msgspec.json.decode(read_kept(folder / RECORD, MAX_RECORD_BYTES), type=ActiveRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _shape(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    """Return the names of all tables and columns: `quick_check` does not see a flipped bit in one of them."""
    return connection.execute(
        "select t.name, c.name, c.type from sqlite_schema t, pragma_table_info(t.name) c "
        "where t.type = 'table' order by t.name, c.cid"
    ).fetchall()


def _advice(error: Exception) -> str:
    if "locked" in str(error):  # what SQLITE_BUSY is called; Python 3.10 has no code for it
        return "another daemon uses it: give each a state folder of its own (--state)"
    return "look at the disk"


def _is_broken(error: sqlite3.Error) -> bool:
    """Return whether the file is damaged, rather than out of reach for the moment."""
    return isinstance(error, sqlite3.DatabaseError) and (
        not isinstance(error, sqlite3.OperationalError) or "malformed" in str(error)
    )
