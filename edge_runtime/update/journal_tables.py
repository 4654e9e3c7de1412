"""The tables of a device's journal, their rows as values, and the second record of what is active.

Owns: the schema and the statements that change it; each statement runs inside a transaction of journal.py's. The second
record is a file beside the database. It is written after the database, and may be one change behind: the device serves
on from it where the database was lost. Thread: the journal's.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime.repository.durable import Disk, read_kept, write_atomically
from edge_runtime.update.states import ReleaseState

KEPT_HISTORY = 1_000
"""Entries of the history: years of updates, and some 200 KB."""

SHOWN_BYTES = 500
"""Of a reason: what a person reads in `status`."""

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

MAX_RECORD_BYTES = 1 << 20


class Release(msgspec.Struct, frozen=True):
    """The identity of a release."""

    model: str
    version: int
    counter: int
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A release under way. tries: how many of its tries had no result."""

    release: Release
    state: ReleaseState
    tries: int
    reason: str


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


# ---- statements -----------------------------------------------------------------------------------------------------


def tries(database: sqlite3.Connection, release: Release) -> int:
    """Return the tries of this very release; another one of the model starts at 0."""
    row = database.execute(
        "select tries from rollouts where model = ? and manifest_sha256 = ?", (release.model, release.manifest_sha256)
    ).fetchone()
    return int(row[0]) if row else 0


def set_rollout(database: sqlite3.Connection, release: Release, state: ReleaseState, tries: int, reason: str) -> None:
    """Make a release the only one under way of its model."""
    database.execute(
        "insert or replace into rollouts values (?, ?, ?, ?, ?, ?, ?)",
        (
            release.model, release.version, release.counter, release.manifest_sha256, state.value, tries,
            reason[:SHOWN_BYTES],
        ),
    )  # fmt: skip


def set_active(database: sqlite3.Connection, release: Release) -> None:
    """Make a release the active one of its model."""
    database.execute(
        "insert or replace into active values (?, ?, ?, ?)",
        (release.model, release.version, release.counter, release.manifest_sha256),
    )


def refuse(database: sqlite3.Connection, release: Release, reason: str) -> None:
    """Refuse a release for ever; the first reason stays."""
    database.execute(
        "insert or ignore into refused values (?, ?, ?, ?)",
        (release.manifest_sha256, release.model, release.counter, reason[:SHOWN_BYTES]),
    )


def end_rollout(database: sqlite3.Connection, model: str) -> None:
    """Remove the release under way of a model, with its tries."""
    database.execute("delete from rollouts where model = ?", (model,))


def set_fact(database: sqlite3.Connection, name: str, value: str) -> None:
    """Set a fact by name."""
    database.execute("insert or replace into facts values (?, ?)", (name, value))


def forget_fact(database: sqlite3.Connection, name: str) -> None:
    """Remove a fact."""
    database.execute("delete from facts where name = ?", (name,))


def note(database: sqlite3.Connection, at_utc: str, release: Release, what: str, reason: str) -> None:
    """Add an entry to the history; the oldest goes."""
    database.execute(
        "insert into history (at_utc, model, counter, what, reason) values (?, ?, ?, ?, ?)",
        (at_utc, release.model, release.counter, what, reason[:SHOWN_BYTES]),
    )
    database.execute("delete from history where number <= (select max(number) from history) - ?", (KEPT_HISTORY,))


def raise_counter(database: sqlite3.Connection, release: Release) -> None:
    """Raise the counter of a model; it never goes back."""
    database.execute(
        "insert into counters values (?, ?) on conflict do update set counter = max(counter, excluded.counter)",
        (release.model, release.counter),
    )


def count_change(database: sqlite3.Connection) -> None:
    """Count a change of the active releases; the second record has the same count."""
    database.execute(
        "insert into facts values ('changes', '1') on conflict do update set value = cast(value as integer) + 1"
    )


class ActiveRecord(msgspec.Struct, frozen=True):
    """The second record: the active releases, and the count of their changes."""

    changes: int = 0
    active: list[Release] = []


def read_record(folder: Path) -> ActiveRecord | None:
    """Return the second record; None: there is none that can be read."""
    try:
        return msgspec.json.decode(read_kept(folder / RECORD, MAX_RECORD_BYTES), type=ActiveRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_record(folder: Path, record: ActiveRecord, *, disk: Disk) -> None:
    """Replace the record, durably. Raises StorageFailed."""
    write_atomically(folder / RECORD, msgspec.json.encode(record), disk=disk)
