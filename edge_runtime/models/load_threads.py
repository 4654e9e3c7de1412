"""Loads side by side: each on a thread of its own, while the loader's thread does everything else.

Owns: the loads under way, and their results until they are taken. It changes no table: the result of a load is
published by the loader's thread, which calls everything here. A load is marked by its own thread, so that a crash names
whose it was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from msgspec import Struct, field

from edge_runtime.clock import Clock
from edge_runtime.errors import LoadFailed
from edge_runtime.models.executor import Executor
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.load_marks import LoadMarks
from edge_runtime.models.loading import LoadedVersion

log = logging.getLogger(__name__)

Load = Callable[[ModelFolder, VersionFolder], LoadedVersion]
"""Loads and warms up one version. Raises LoadFailed. Thread: any."""


class _UnderWay(Struct):
    """One load. began_s: monotonic. loaded, error: how it ended, one of the two."""

    folder: ModelFolder
    version: VersionFolder
    wanted_bytes: int
    began_s: float
    thread: threading.Thread | None = None
    has_ended: bool = False
    loaded: LoadedVersion | None = None
    error: LoadFailed = field(default_factory=lambda: LoadFailed("it was not loaded; see the log"))

    def is_of(self, folder: ModelFolder, version: VersionFolder) -> bool:
        """Whether it loads these very files with these settings."""
        return (self.version, self.folder.settings) == (version, folder.settings)


class LoadThreads:
    """Threads of loads. Thread: the loader's, and once that has ended, the one that closes."""

    def __init__(self, load: Load, marks: LoadMarks, executor: Executor, clock: Clock) -> None:
        """executor: of the loader's thread, which takes each end as a step."""
        self._load = load
        self._clock = clock
        self._marks = marks
        self._executor = executor
        self._under_way: dict[tuple[str, int], _UnderWay] = {}

    @property
    def running(self) -> int:
        """How many loads run. Thread: any."""
        return sum(not each.has_ended for each in list(self._under_way.values()))

    @property
    def is_empty(self) -> bool:
        """Whether none runs, and none waits to be taken. Thread: any."""
        return not self._under_way

    @property
    def wanted_bytes(self) -> int:
        """The bytes that they are expected to take."""
        return sum(each.wanted_bytes for each in self._under_way.values())

    def begin(self, folder: ModelFolder, version: VersionFolder, wanted_bytes: int, done: Callable[[], None]) -> None:
        """Begin a load. done: called on the loader's thread after its end, unless that thread has ended by then."""
        under_way = _UnderWay(folder, version, wanted_bytes, self._clock.monotonic_s())
        under_way.thread = threading.Thread(
            target=self._run, args=(under_way, done), name=f"edge-load-{version.model}", daemon=True
        )
        self._under_way[version.model, version.number] = under_way
        under_way.thread.start()

    def began_s(self, folder: ModelFolder, version: VersionFolder) -> float | None:
        """When the load began that `take` returns, monotonic; None where that returns none."""
        under_way = self._under_way.get((version.model, version.number))
        return under_way.began_s if under_way is not None and under_way.is_of(folder, version) else None

    def take(self, folder: ModelFolder, version: VersionFolder) -> LoadedVersion | None:
        """Wait for the load of a version and return its result; None where none was begun of these files.

        Raises LoadFailed: it could not be loaded.
        """
        if self.began_s(folder, version) is None:
            self.drop(version.model, version.number)
            return None
        under_way = self._under_way[version.model, version.number]
        _join(under_way, None)
        del self._under_way[version.model, version.number]
        if under_way.loaded is None:
            raise under_way.error
        return under_way.loaded

    def drop(self, model: str, number: int) -> None:
        """Wait for an abandoned load, and close its version."""
        under_way = self._under_way.get((model, number))
        if under_way is not None:
            _join(under_way, None)
            del self._under_way[model, number]
            _close(under_way)

    def close(self, limit_s: float | None) -> None:
        """Close versions loaded and not taken. limit_s: how long to wait for loads, None for their end. Idempotent."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        for key, under_way in list(self._under_way.items()):
            if _join(under_way, None if end_s is None else max(end_s - time.monotonic(), 0.0)):
                del self._under_way[key]
                _close(under_way)

    def _run(self, under_way: _UnderWay, done: Callable[[], None]) -> None:
        try:
            with self._marks.loading(under_way.folder, under_way.version):
                under_way.loaded = self._load(under_way.folder, under_way.version)
        except LoadFailed as error:
            under_way.error = error
        except Exception:
            log.exception("a load failed unexpectedly", extra={"model": under_way.version.model})
        under_way.has_ended = True
        self._executor.submit(done)


def _join(under_way: _UnderWay, limit_s: float | None) -> bool:
    """Wait for a load's end; whether it has come."""
    assert under_way.thread is not None
    under_way.thread.join(limit_s)
    return not under_way.thread.is_alive()


def _close(under_way: _UnderWay) -> None:
    if under_way.loaded is not None:
        with contextlib.suppress(Exception):
            under_way.loaded.servable.close(0.0)
