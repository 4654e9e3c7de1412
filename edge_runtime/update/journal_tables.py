"""The tables of a device's journal: what a row of each says, and the statements that change them.

Owns: the schema. Every statement runs inside a transaction of journal.py's, which knows what belongs together. Thread:
the journal's.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import msgspec

from edge_runtime.update.states import State

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


class Release(msgspec.Struct, frozen=True):
    """One release of a model, as far as memory goes."""

    model: str
    version: int
    counter: int
    manifest_sha256: str


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


# ---- statements -----------------------------------------------------------------------------------------------------


def tries(database: sqlite3.Connection, release: Release) -> int:
    """How often this very release was tried; another one of the model begins at none."""
    row = database.execute(
        "select tries from rollouts where model = ? and manifest_sha256 = ?", (release.model, release.manifest_sha256)
    ).fetchone()
    return int(row[0]) if row else 0


def set_rollout(database: sqlite3.Connection, release: Release, state: State, tries: int, reason: str) -> None:
    """A release is under way, and no other of its model."""
    database.execute(
        "insert or replace into rollouts values (?, ?, ?, ?, ?, ?, ?)",
        (
            release.model, release.version, release.counter, release.manifest_sha256, state.value, tries,
            reason[:SHOWN_BYTES],
        ),
    )  # fmt: skip


def set_active(database: sqlite3.Connection, release: Release) -> None:
    """A release is what its model runs."""
    database.execute(
        "insert or replace into active values (?, ?, ?, ?)",
        (release.model, release.version, release.counter, release.manifest_sha256),
    )


def refuse(database: sqlite3.Connection, release: Release, reason: str) -> None:
    """A release is never tried again, for the reason that was first."""
    database.execute(
        "insert or ignore into refused values (?, ?, ?, ?)",
        (release.manifest_sha256, release.model, release.counter, reason[:SHOWN_BYTES]),
    )


def set_fact(database: sqlite3.Connection, name: str, value: str) -> None:
    """Remember a fact by name."""
    database.execute("insert or replace into facts values (?, ?)", (name, value))


def note(database: sqlite3.Connection, at_utc: str, release: Release, what: str, reason: str) -> None:
    """One more entry of the history; the oldest goes."""
    database.execute(
        "insert into history (at_utc, model, counter, what, reason) values (?, ?, ?, ?, ?)",
        (at_utc, release.model, release.counter, what, reason[:SHOWN_BYTES]),
    )
    database.execute("delete from history where number <= (select max(number) from history) - ?", (KEPT_HISTORY,))


def raise_counter(database: sqlite3.Connection, release: Release) -> None:
    """How far a model has come; never back."""
    database.execute(
        "insert into counters values (?, ?) on conflict do update set counter = max(counter, excluded.counter)",
        (release.model, release.counter),
    )


def count_change(database: sqlite3.Connection) -> None:
    """What is active has changed once more, which the second record says as well."""
    database.execute(
        "insert into facts values ('changes', '1') on conflict do update set value = cast(value as integer) + 1"
    )
