"""Builds that this device makes of models, one at a time, and off every request's path.

Owns: the thread that runs builds, their order, progress and failures, whichever kind they are of: what a backend has
built (the `builder` of its declaration), and conversions of files that no backend reads (conversions.py). A build runs
in a child process, where it may crash, hang or eat memory for minutes. Knows no model's name: artifacts are paths.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime.backends.base import BuildOrder
from edge_runtime.backends.registry import declaration_of
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, NotBuiltYet, StorageFailed
from edge_runtime.models.model_table import ModelTable
from edge_runtime.plugins import named
from edge_runtime.sandbox.ending import NO_LIMITS, Cause, ChildLimits, Ending

if TYPE_CHECKING:
    import tempfile

    from edge_runtime.builds.build_cache import BuildCache
    from edge_runtime.builds.conversions import ConversionBuilds, ConversionPlan, ConversionReport, ConvertTask
    from edge_runtime.config.settings import ModelSettings
    from edge_runtime.hosts.hosts import Hosts
    from edge_runtime.models.builds import Conversion
    from edge_runtime.models.folder import VersionFolder
    from edge_runtime.sandbox.child import ChildFunction, TaskT
    from edge_runtime.sandbox.ending import ResultT

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.75
"""Share of this process's memory limit for one build. It is more than all models may have: a builder may take
a gigabyte, and a build ends. Where memory runs out, the kernel ends the building process first."""

TOLD_EVERY_S = 2.0
"""Least time between two reports of a build's progress: each renews what the loader knows of requests' headers."""

LOGGED_SHARE = 0.25
"""Progress is logged when it has grown by this much."""

WAIT_S = 0.5
"""How long a waiting load overlooks its stop at most."""

NICENESS = 10
"""Beside 0, the daemon's: a tenth of a core where all are busy."""


class BuildKind(Protocol):
    """One kind of build: how it is said, bounded and done.

    doing, done, lacking: for the log. waits, runs, fails: for people, with {name} of the file. is_conversion: as of
    BuildNews. limit_s: of one build. final: endings that the same build would have again. not_yet: what is raised while
    it waits or runs.
    """

    doing: str
    done: str
    lacking: str
    waits: str
    runs: str
    fails: str
    is_conversion: bool
    limit_s: float
    final: frozenset[Cause]
    not_yet: type[NotBuiltYet]

    @property
    def cache(self) -> BuildCache:
        """Where builds of this kind are kept."""
        ...

    def find(self, key: str) -> Any:
        """Return the finished build; None where there is none."""
        ...

    def build(self, plan: Any, key: str, run: Callable[..., Ending[Any]]) -> Ending[Any]:
        """Build and keep it. run: `BuildStore._run_child` of this build, which has its limits of time and memory.

        Raises StorageFailed, LoadFailed, OSError (no process).
        """
        ...


class BuildNews(Struct, frozen=True):
    """How far the build of an artifact is; has_ended: words say why it failed, "" where it did not.

    is_conversion: nothing else serves these very files meanwhile. backend: whose build it is, "" for a conversion.
    """

    artifact: str
    words: str
    has_ended: bool
    is_conversion: bool = False
    backend: str = ""


class _Build(Struct):
    """One build, wanted, waiting or running. artifacts: the files that wait for it; copies share one build."""

    kind: BuildKind
    plan: BuildOrder | ConversionPlan
    key: str
    artifacts: set[str] = field(default_factory=set)
    share: float = 0.0
    phase: str = ""
    has_begun: bool = False
    reported_s: float = 0.0
    logged_share: float = 0.0

    @property
    def name(self) -> str:
        """The name of the file that it is built of."""
        return Path(self.plan.artifact).name

    def words(self) -> str:
        """Its progress, for people."""
        if not self.has_begun:
            return self.kind.waits.format(name=self.name)
        how_far = [f"{self.share:.0%}"] if self.share or not self.phase else []  # not every phase tells a share
        if self.phase:
            how_far.append(self.phase[:1].lower() + self.phase[1:])
        return f"{self.kind.runs.format(name=self.name)} ({', '.join(how_far)})"


class BuildStore:
    """Builds in the background, one at a time. A BuildSource. Any thread may call it.

    folder: the state folder; None keeps what is built until this process ends. usable_bytes: memory that this process
    may use; None does not limit builds. limit_s: of a build, None for its kind's own. limit_bytes: of each kind's
    folder, None for LIMIT_BYTES of build_cache.py. table: knows which conversions are served, which stay. hosts: whose
    prepared parents fork builds that want one; None starts each anew. build, convert: the functions that child
    processes call, for backends and for conversions; None for the real ones. news: progress and ends of builds, for the
    loader.
    """

    def __init__(
        self,
        folder: Path | None,
        table: ModelTable,
        *,
        usable_bytes: int | None = None,
        limit_s: float | None = None,
        limit_bytes: int | None = None,
        hosts: Hosts | None = None,
        build: ChildFunction[Any, None] | None = None,
        convert: ChildFunction[ConvertTask, ConversionReport] | None = None,
    ) -> None:
        self._folder = folder
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._limit_bytes = limit_bytes
        self._memory_bytes = None if usable_bytes is None else int(usable_bytes * MEMORY_SHARE)
        self._limit_s = limit_s
        self._table = table
        self._hosts = hosts
        self._build_child = build
        self._convert = convert
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._builds: dict[str, _Build] = {}
        self._orders: dict[str, BuildOrder] = {}
        self._failures: dict[str, str] = {}
        self._queue: queue.SimpleQueue[_Build | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.news: queue.SimpleQueue[BuildNews] = queue.SimpleQueue()

    @property
    def built_folder(self) -> Path:
        """Where builds of all backends are kept: their keys differ."""
        return self._backend_cache.folder

    @property
    def _backend_cache(self) -> BuildCache:
        return self._cache("engines")

    def of_backend(self, name: str) -> BuildKind:
        """Return the kind of builds of a backend: the `builder` of its declaration, made of the cache.

        Raises LoadFailed: it has none.
        """
        builder = declaration_of(name).builder
        if not builder:
            raise LoadFailed(f"{name} has nothing built")
        of_test = () if self._build_child is None else (self._build_child,)
        kind: BuildKind = named(builder)(self._backend_cache, *of_test)
        return kind

    @property
    def conversions(self) -> ConversionBuilds:
        """The kind of builds that are conversions."""
        from edge_runtime.builds.conversions import ConversionBuilds, convert_in_child

        cache = self._cache("conversions")
        return ConversionBuilds(cache, self._convert or convert_in_child, self._table, self._memory_bytes)

    def built(self, order: BuildOrder) -> bytes:
        """Return the build of a backend. Raises NotBuiltYet: it waits or runs now; LoadFailed: it cannot be built."""
        self._orders[order.artifact] = order
        found: bytes = self._find(_Build(self.of_backend(order.backend), order, order.key))
        return found

    @staticmethod
    def plan_conversion(
        settings: ModelSettings, version: VersionFolder, artifacts: Collection[str]
    ) -> ConversionPlan | None:
        """Return how a version's file is converted, as `conversions.plan_conversion`. Raises LoadFailed."""
        from edge_runtime.builds.conversions import plan_conversion

        return plan_conversion(settings, version, artifacts)

    def converted(self, plan: ConversionPlan) -> Conversion:
        """Return the converted model. Raises NotConvertedYet: it waits or runs now; LoadFailed: it cannot be."""
        found: Conversion = self._find(_Build(self.conversions, plan, plan.key()))
        return found

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Wait until the build of `key` has ended; False where `stop` or `close` came first."""
        with self._changed:
            while key in self._builds and not stop.is_set() and not self._stop.is_set():
                self._changed.wait(WAIT_S)
        return not (stop.is_set() or self._stop.is_set())

    def refuse(self, artifact: str, reason: str) -> None:
        """Drop the build of a file that must not be used; it is not built again until its key changes."""
        order = self._orders.get(artifact)
        if order is not None:
            build = _Build(self.of_backend(order.backend), order, order.key)
            build.kind.cache.remove(build.key)
            self._fail(build, reason, is_final=True)

    def stop(self) -> None:
        """End the running build soon, and begin no other. Does not wait."""
        self._stop.set()
        self._queue.put(None)

    def close(self) -> None:
        """End the running build and drop the waiting ones; they start anew with the daemon. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    # ---- private ----------------------------------------------------------------------------------------------------

    def _cache(self, name: str) -> BuildCache:
        from edge_runtime.builds.build_cache import LIMIT_BYTES, BuildCache

        return BuildCache(self._home() / name, self._limit_bytes or LIMIT_BYTES)

    def _home(self) -> Path:
        with self._lock:
            if self._folder is None:
                import tempfile

                self._own = tempfile.TemporaryDirectory(prefix="edge-runtime-builds-")
                self._folder = Path(self._own.name)
            return self._folder

    def _find(self, wanted: _Build) -> Any:
        """Return the finished build. Raises NotBuiltYet of the kind, which this has queued; LoadFailed."""
        kind, key = wanted.kind, wanted.key
        with self._lock:
            is_coming = key in self._builds
            failure = self._failures.get(key)
        if not is_coming and failure is None:
            found = kind.find(key)
            if found is not None:
                return found
            failure = kind.cache.failure(key)
        if failure is not None:
            raise LoadFailed(failure)
        raise kind.not_yet(self._want(wanted))

    def _want(self, wanted: _Build) -> str:
        """Queue a build, once; returns its progress in words."""
        with self._lock:
            build = self._builds.setdefault(wanted.key, wanted)
            if build is wanted:
                self._queue.put(build)
            build.artifacts.add(wanted.plan.artifact)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="edge-builds", daemon=True)
                self._thread.start()
            return build.words()

    def _run(self) -> None:
        while (build := self._queue.get()) is not None and not self._stop.is_set():
            try:
                build.kind.cache.clean()  # what interrupted builds left
                self._build(build)
            except Exception as error:
                log.exception("a build failed unexpectedly")
                fault = f"building failed unexpectedly ({type(error).__name__}); see the log"
                self._fail(build, fault, is_final=False)  # else it is wanted again at once
                self._end(build, fault)

    def _build(self, build: _Build) -> None:
        kind = build.kind
        build.has_begun = True
        if kind.find(build.key) is not None:
            self._end(build, "")  # it was queued again while it was being finished
            return
        log.info(kind.doing, extra={"artifact": build.plan.artifact})
        began_s = time.monotonic()
        try:
            ending = kind.build(build.plan, build.key, partial(self._run_child, build))
        except EdgeRuntimeError as error:
            fault, is_final = error.message, not isinstance(error, StorageFailed)
        except OSError as error:
            fault, is_final = f"no process can be made for it: {error.strerror}", False
        else:
            if ending.cause is Cause.STOPPED:
                return
            fault, is_final = judge(kind, build.name, ending)
        if fault:
            self._fail(build, fault, is_final=is_final)
            log.warning("%s: %s", kind.lacking, fault, extra={"artifact": build.plan.artifact})
        else:
            took_s = round(time.monotonic() - began_s, 1)
            log.info(kind.done, extra={"artifact": build.plan.artifact, "took_s": took_s})
        self._end(build, fault)

    def _run_child(
        self,
        build: _Build,
        function: ChildFunction[TaskT, ResultT],
        task: TaskT,
        *,
        reads: Sequence[Path],
        writes: Sequence[Path],
        within: tuple[str, ...] = (),
        written: ChildLimits = NO_LIMITS,
        prepare: Callable[[str], None] | None = None,
        what: str = "",
    ) -> Ending[ResultT]:
        """Call a function in a child within a build's limits.

        prepare, what: as of `Hosts.call`; the others as of `run_child`. Raises OSError.
        """
        from edge_runtime.sandbox.child import run_child

        limit_s = self._limit_s or build.kind.limit_s
        bounds: dict[str, Any] = {  # of every child that builds
            "niceness": NICENESS, "reads": reads, "writes": writes, "within": within,
            "stop": self._stop, "show": partial(self._show, build),
        }  # fmt: skip
        if self._hosts is not None and prepare is not None:
            try:
                return self._hosts.call(
                    function,
                    task,
                    prepare=prepare,
                    what=what,
                    limits=replace(written, limit_s=limit_s, memory_bytes=self._memory_bytes),
                    **bounds,
                )
            except LoadFailed as error:
                if self._stop.is_set():
                    return Ending(Cause.STOPPED)
                log.warning("no prepared process: %s", error.message, extra={"artifact": build.plan.artifact})
        return run_child(function, task, limit_s=limit_s, memory_bytes=self._memory_bytes, written=written, **bounds)

    def _fail(self, build: _Build, reason: str, *, is_final: bool) -> None:
        with self._lock:
            self._failures[build.key] = reason
        if is_final:
            build.kind.cache.keep_failure(build.key, reason)

    def _end(self, build: _Build, fault: str) -> None:
        with self._changed:
            self._builds.pop(build.key, None)
            self._tell(build, fault, has_ended=True)
            self._changed.notify_all()

    def _show(self, build: _Build, phase: str, share: float | None) -> None:
        """Take a build's progress; report it and log it now and then."""
        build.share, build.phase = max(share or 0.0, build.share), phase or build.phase
        now_s = time.monotonic()
        if now_s - build.reported_s >= TOLD_EVERY_S:
            build.reported_s = now_s
            with self._lock:
                self._tell(build, build.words(), has_ended=False)
        if build.share - build.logged_share >= LOGGED_SHARE:
            build.logged_share = build.share
            log.info(
                build.kind.doing,
                extra={"artifact": build.plan.artifact, "done": round(build.share, 2), "phase": build.phase},
            )

    def _tell(self, build: _Build, words: str, *, has_ended: bool) -> None:
        """Put news of a build for each file that waits for it. The caller has the lock."""
        backend = build.plan.backend if isinstance(build.plan, BuildOrder) else ""
        for artifact in sorted(build.artifacts):
            self.news.put(BuildNews(artifact, words, has_ended, build.kind.is_conversion, backend))


def judge(kind: BuildKind, name: str, ending: Ending[Any]) -> tuple[str, bool]:
    """Why a build failed, "" where it did not, and whether it would fail again. name: of its file. Pure."""
    if ending.cause is Cause.RETURNED:
        return "", False
    if ending.cause is Cause.RAISED:
        return ending.reason, ending.code != StorageFailed.code
    advice = "; the file may be damaged, or cut short: copy it again" if ending.cause is Cause.CRASHED else ""
    return f"{kind.fails.format(name=name)}: {ending.reason}{advice}", ending.cause in kind.final
