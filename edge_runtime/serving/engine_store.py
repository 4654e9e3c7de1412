"""Engines for this device: returned where they are built, else built one at a time, off every request's path.

Owns: the thread that runs builds, their state, and the function that builds an engine in a child process, where it may
crash, hang or eat memory for minutes. The engine goes into the cache's folder, never through a pipe. Knows no model's
name: artifacts are paths.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.tensorrt_plan import EnginePlan
from edge_runtime.errors import LoadFailed, NotBuiltYet, StorageFailed
from edge_runtime.repository.durable import make_folder
from edge_runtime.sandbox.child import ChildFunction, run_child
from edge_runtime.sandbox.ending import Cause, Ending, ShowProgress
from edge_runtime.serving.engine_cache import LIMIT_BYTES, EngineCache

log = logging.getLogger(__name__)

LIMIT_S = 3600.0
"""Limit of one build, against one that hangs: NVIDIA speaks of minutes for large networks on embedded devices."""

MEMORY_SHARE = 0.75
"""Share of this process's memory limit for one build. It is more than all models may have: TensorRT's builder alone
takes a gigabyte, and a build ends. Where memory runs out, the kernel ends the building process first."""

TOLD_EVERY_S = 2.0
"""Least time between two reports of a build's progress: each renews what the loader knows of requests' headers."""

LOGGED_SHARE = 0.25
"""Progress is logged when it has grown by this much."""

WAIT_S = 0.5
"""How long a waiting load overlooks its stop at most."""

NICENESS = 10
"""Beside 0, the daemon's: a tenth of a core where all are busy."""

_FINAL_CAUSES = frozenset((Cause.RAISED, Cause.TIMED_OUT, Cause.CRASHED))
"""Endings that the same build would have again. Memory may be free the next time."""


class EngineTask(Struct, frozen=True):
    """What to build, and where to keep it. device: what kernel timings are kept for. limit_bytes: of the folder."""

    plan: EnginePlan
    key: str
    folder: str
    device: str
    limit_bytes: int


def build_in_child(task: EngineTask, progress: ShowProgress) -> None:
    """Build an engine and keep it. Raises EdgeRuntimeError."""
    from edge_runtime.backends.tensorrt_build import build_engine

    cache = EngineCache(Path(task.folder), task.limit_bytes)
    built = build_engine(task.plan, lambda share, phase: progress(phase, round(share, 4)), cache.timings(task.device))
    if built.timings:
        cache.keep_timings(task.device, built.timings)
    cache.write(task.key, built.engine)


def judge(ending: Ending[None]) -> tuple[str, bool]:
    """Why a build failed, "" where it did not, and whether it would fail again. Pure."""
    if ending.cause is Cause.RETURNED:
        return "", False
    if ending.cause is Cause.RAISED:
        return ending.reason, ending.code != StorageFailed.code
    return f"its engine was not built: {ending.reason}", ending.cause in _FINAL_CAUSES


@dataclass(frozen=True, slots=True)
class BuildNews:
    """How far the engine of an artifact is; has_ended: words say why there is none, "" when it is there."""

    artifact: str
    words: str
    has_ended: bool


@dataclass(slots=True)
class _Build:
    """One waiting or running build. artifacts: the models that wait for it; copies share one engine."""

    plan: EnginePlan
    key: str
    device: str
    artifacts: set[str] = field(default_factory=set)
    share: float = 0.0
    phase: str = ""
    has_begun: bool = False
    reported_s: float = 0.0
    logged_share: float = 0.0

    def words(self) -> str:
        """Its progress, for people."""
        if not self.has_begun:
            return "its engine is waiting to be built"
        return f"its engine is being built ({self.share:.0%}{f', {self.phase.lower()}' if self.phase else ''})"


class EngineStore:
    """An EngineSource that builds engines in the background. Any thread may call `engine` and `refuse`.

    folder: None keeps engines until this process ends. usable_bytes: memory that this process may use; None does not
    limit builds. limit_s: of a build. limit_bytes: of the folder. child: the function that builds. news: progress and
    ends of builds, for the loader.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        usable_bytes: int | None = None,
        limit_s: float = LIMIT_S,
        limit_bytes: int = LIMIT_BYTES,
        child: ChildFunction[EngineTask, None] = build_in_child,
    ) -> None:
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._kept = EngineCache(folder, limit_bytes) if folder is not None else None
        self._limit_bytes = limit_bytes
        self._memory_bytes = None if usable_bytes is None else int(usable_bytes * MEMORY_SHARE)
        self._limit_s = limit_s
        self._child = child
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._builds: dict[str, _Build] = {}
        self._keys: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._queue: queue.SimpleQueue[_Build | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.news: queue.SimpleQueue[BuildNews] = queue.SimpleQueue()

    def engine(self, plan: EnginePlan, key: str) -> bytes:
        """Return the engine. Raises NotBuiltYet: its build waits or runs now; LoadFailed: it cannot be built."""
        self._keys[plan.artifact] = key
        with self._lock:
            build = self._builds.get(key)
            failure = self._failures.get(key)
        if build is None and failure is None:
            found = self._cache().read(key)
            if found is not None:
                return found
            failure = self._cache().failure(key)
        if failure is not None:
            raise LoadFailed(failure)
        raise NotBuiltYet(self._want(plan, key))

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Wait until the build of `key` has ended; False where `stop` or `close` came first."""
        with self._changed:
            while key in self._builds and not stop.is_set() and not self._stop.is_set():
                self._changed.wait(WAIT_S)
        return not (stop.is_set() or self._stop.is_set())

    @property
    def folder(self) -> Path:
        """The folder of built engines."""
        return self._cache().folder

    def refuse(self, artifact: str, reason: str) -> None:
        """Drop a built engine that must not be used; it is not built again until its key changes."""
        key = self._keys.get(artifact)
        if key is not None:
            self._cache().remove(key)
            self._fail(key, reason, is_final=True)

    def close(self) -> None:
        """End the running build and drop the waiting ones; they start anew with the daemon. Idempotent."""
        self._stop.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    # ---- private ----------------------------------------------------------------------------------------------------

    def _cache(self) -> EngineCache:
        with self._lock:
            if self._kept is None:
                self._own = tempfile.TemporaryDirectory(prefix="edge-runtime-engines-")
                self._kept = EngineCache(Path(self._own.name), self._limit_bytes)
            return self._kept

    def _want(self, plan: EnginePlan, key: str) -> str:
        """Queue the build of an engine, once; returns its progress in words."""
        with self._lock:
            build = self._builds.get(key)
            if build is None:
                build = self._builds[key] = _Build(plan, key, f"{plan.library} {plan.version} {plan.device}")
                self._queue.put(build)
            build.artifacts.add(plan.artifact)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="edge-engines", daemon=True)
                self._thread.start()
            return build.words()

    def _run(self) -> None:
        self._cache().clean()
        while (build := self._queue.get()) is not None and not self._stop.is_set():
            try:
                self._build(build)
            except Exception:
                log.exception("building an engine failed unexpectedly")
                self._end(build, "building failed unexpectedly; see the log")

    def _build(self, build: _Build) -> None:
        build.has_begun = True
        if self._cache().read(build.key) is not None:
            self._end(build, "")  # it was queued again while it was being finished
            return
        log.info("building an engine", extra={"artifact": build.plan.artifact})
        began_s = time.monotonic()
        task = EngineTask(build.plan, build.key, str(self._cache().folder), build.device, self._limit_bytes)
        with contextlib.suppress(StorageFailed):  # the child says why
            make_folder(self._cache().folder)  # it may write there, not beside it
        try:
            ending = run_child(
                self._child,
                task,
                limit_s=self._limit_s,
                memory_bytes=self._memory_bytes,
                niceness=NICENESS,
                reads=[Path(build.plan.artifact).parent],
                writes=[self._cache().folder],
                stop=self._stop,
                show=partial(self._show, build),
            )
        except OSError as error:
            self._end(build, f"no process can be made to build its engine in: {error.strerror}")
            return
        if ending.cause is Cause.STOPPED:
            return
        fault, is_final = judge(ending)
        if fault:
            self._fail(build.key, fault, is_final=is_final)
            log.warning("no engine: %s", fault, extra={"artifact": build.plan.artifact})
        else:
            took_s = round(time.monotonic() - began_s, 1)
            log.info("an engine is built", extra={"artifact": build.plan.artifact, "took_s": took_s})
        self._end(build, fault)

    def _fail(self, key: str, reason: str, *, is_final: bool) -> None:
        with self._lock:
            self._failures[key] = reason
        if is_final:
            self._cache().keep_failure(key, reason)

    def _end(self, build: _Build, fault: str) -> None:
        with self._lock:
            self._builds.pop(build.key, None)
            self._changed.notify_all()
            artifacts = sorted(build.artifacts)
        for artifact in artifacts:
            self.news.put(BuildNews(artifact, fault, has_ended=True))

    def _show(self, build: _Build, phase: str, share: float | None) -> None:
        """Take a build's progress; report it and log it now and then."""
        build.share, build.phase = max(share or 0.0, build.share), phase or build.phase
        now_s = time.monotonic()
        if now_s - build.reported_s >= TOLD_EVERY_S:
            build.reported_s = now_s
            with self._lock:
                artifacts = sorted(build.artifacts)
            for artifact in artifacts:
                self.news.put(BuildNews(artifact, build.words(), has_ended=False))
        if build.share - build.logged_share >= LOGGED_SHARE:
            build.logged_share = build.share
            log.info(
                "building an engine",
                extra={"artifact": build.plan.artifact, "done": round(build.share, 2), "phase": build.phase},
            )
