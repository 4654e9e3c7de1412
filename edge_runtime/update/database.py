"""An SQLite database that survives a power cut, and is set aside where it did not.

Owns: the connection, its settings, and the judgement that a database is broken. Settings: `journal_mode=WAL`,
`synchronous=FULL` (200 of 200 acknowledged commits survived a power cut; with NORMAL none did), no mapped file. The
tables are the journal's. Thread: the one that opened it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import SYSTEM_DISK, Disk, sync_folder


class Database:
    """One file of tables. `open` it first; `close` is idempotent."""

    def __init__(self, path: Path, schema: str, *, disk: Disk = SYSTEM_DISK) -> None:
        """schema: statements that create missing tables. The folder of `path` exists."""
        self._path = path
        self._schema = schema
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
            # Invariant: before the first access, so that the index of the log is no mapped file: on a full disk the
            # kernel cannot get its pages, and would end the process with SIGBUS.
            connection.execute("pragma locking_mode = exclusive")
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            # Invariant: the whole file is read before any use; a page that the disk lost is found here, not later.
            (word,) = connection.execute("pragma quick_check").fetchone()
            if word != "ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {word}")
            connection.executescript(self._schema)
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
            connection.executescript(self._schema)
            return _shape(connection)


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
