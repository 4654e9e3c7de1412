"""Engines for this device: handed out where they are built, else built one at a time, off every request's path.

Owns: the thread that has them built, and what is known of builds under way or failed. A build is a process of its own,
bounded in time and memory, that ends with this one. Knows no model's name: artifacts are paths.
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edge_runtime.backends.tensorrt_order import EngineOrder
from edge_runtime.errors import LoadFailed, NotBuiltYet
from edge_runtime.serving import engine_child
from edge_runtime.serving.engine_cache import LIMIT_BYTES, EngineCache
from edge_runtime.serving.engine_child import BuildNews, BuildRequest
from edge_runtime.serving.trial_process import Ended, run_child

log = logging.getLogger(__name__)

LIMIT_S = 3600.0
"""Of one build, against one that hangs: NVIDIA speaks of minutes for large networks on embedded devices."""

MEMORY_SHARE = 0.75
"""Of what this process may use, for one build. More than models may have together: TensorRT's builder alone takes a
gigabyte, and a build ends; beyond it, and where memory runs out before, the building process is the first to go."""

TOLD_EVERY_S = 2.0
"""Progress is passed on no oftener: each time, what is known of headers is checked anew."""

LOGGED_SHARE = 0.25
"""Progress is logged when it has grown by this much."""

WAIT_S = 0.5
"""How long somebody who waits for an engine does not notice that he is to stop, at most."""

Done = Callable[[str, str], None]
Told = Callable[[str, str], None]


@dataclass(slots=True)
class _Build:
    """One engine under way. artifacts: the models that wait for it; the same bytes may lie in several places."""

    order: EngineOrder
    key: str
    device: str
    artifacts: set[str] = field(default_factory=set)
    share: float = 0.0
    phase: str = ""
    has_begun: bool = False

    def words(self) -> str:
        """For people."""
        if not self.has_begun:
            return "its engine is waiting to be built"
        return f"its engine is being built ({self.share:.0%}{f', {self.phase.lower()}' if self.phase else ''})"


class EngineStore:
    """See EngineSource. `engine` and `refuse` may be called from any thread.

    folder None: engines are kept as long as this process. usable_bytes: memory that this process may use, None
    unknown, so that builds are not bounded. limit_s: of a build. limit_bytes: of the folder.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        usable_bytes: int | None = None,
        limit_s: float = LIMIT_S,
        limit_bytes: int = LIMIT_BYTES,
        child: str = engine_child.__name__,
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
        self._orders: queue.SimpleQueue[_Build | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_done: Done = lambda *_: None
        self._on_progress: Told = lambda *_: None

    def tell(self, on_done: Done, on_progress: Told) -> None:
        """Set who is told, on the builder's thread. Once, at assembly.

        on_done(artifact, why not): a build ended, "" when the engine is there. on_progress(artifact, words).
        """
        self._on_done, self._on_progress = on_done, on_progress

    def engine(self, order: EngineOrder, key: str) -> bytes:
        """The engine, where there is one. Raises NotBuiltYet: it is being built from now on; LoadFailed."""
        self._keys[order.artifact] = key
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
        raise NotBuiltYet(self._want(order, key))

    def wait(self, key: str, stop: threading.Event) -> bool:
        """See EngineSource."""
        with self._changed:
            while key in self._builds and not stop.is_set() and not self._stop.is_set():
                self._changed.wait(WAIT_S)
        return not (stop.is_set() or self._stop.is_set())

    @property
    def folder(self) -> Path:
        """Where engines are kept."""
        return self._cache().folder

    def refuse(self, artifact: str, reason: str) -> None:
        """An engine was built and is not to be used: it is not built again, until something changes."""
        key = self._keys.get(artifact)
        if key is not None:
            self._cache().remove(key)
            self._fail(key, reason, is_final=True)

    def close(self) -> None:
        """End the build under way, and give up the others; they begin anew at the next start. Idempotent."""
        self._stop.set()
        self._orders.put(None)
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

    def _want(self, order: EngineOrder, key: str) -> str:
        """Have an engine built, once; returns how far that is."""
        with self._lock:
            build = self._builds.get(key)
            if build is None:
                build = self._builds[key] = _Build(order, key, f"{order.library} {order.version} {order.device}")
                self._orders.put(build)
            build.artifacts.add(order.artifact)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="edge-engines", daemon=True)
                self._thread.start()
            return build.words()

    def _run(self) -> None:
        self._cache().clean()
        while (build := self._orders.get()) is not None and not self._stop.is_set():
            try:
                self._build(build)
            except Exception:
                log.exception("building an engine failed unexpectedly")
                self._end(build, "building failed unexpectedly; see the log")

    def _build(self, build: _Build) -> None:
        build.has_begun = True
        if self._cache().read(build.key) is not None:
            self._end(build, "")  # it was ordered once more while it was finished
            return
        log.info("building an engine", extra={"artifact": build.order.artifact})
        began_s = time.monotonic()
        listener = _Listener(build, self._told)
        request = BuildRequest(build.order, build.key, str(self._cache().folder), build.device, self._limit_bytes)
        try:
            ended = run_child(
                self._child,
                msgspec.json.encode(request),
                limit_s=self._limit_s,
                stop=self._stop,
                heard=listener.hear,
                memory_bytes=self._memory_bytes,
            )
        except OSError as error:
            self._end(build, f"no process can be made to build its engine in: {error.strerror}")
            return
        if ended.is_stopped:
            return
        fault, is_final = judge(ended, listener.last, self._limit_s, self._memory_bytes)
        if fault:
            self._fail(build.key, fault, is_final=is_final)
            log.warning("no engine: %s", fault, extra={"artifact": build.order.artifact})
        else:
            took_s = round(time.monotonic() - began_s, 1)
            log.info("an engine is built", extra={"artifact": build.order.artifact, "took_s": took_s})
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
            self._on_done(artifact, fault)

    def _told(self, build: _Build) -> None:
        with self._lock:
            artifacts = sorted(build.artifacts)
        for artifact in artifacts:
            self._on_progress(artifact, build.words())


class _Listener:
    """What a building process says, line by line."""

    def __init__(self, build: _Build, tell: Callable[[_Build], None]) -> None:
        self._build = build
        self._tell = tell
        self._rest = b""
        self._told_s = 0.0
        self._logged = 0.0
        self.last = BuildNews()

    def hear(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            try:
                self.last = msgspec.json.decode(line, type=BuildNews)
            except msgspec.DecodeError:  # what a library printed, perhaps
                continue
            self._take(self.last)

    def _take(self, news: BuildNews) -> None:
        build = self._build
        build.share, build.phase = max(news.share, build.share), news.phase or build.phase
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            self._tell(build)
        if build.share - self._logged >= LOGGED_SHARE:
            self._logged = build.share
            log.info(
                "building an engine",
                extra={"artifact": build.order.artifact, "done": round(build.share, 2), "phase": build.phase},
            )


def judge(ended: Ended, last: BuildNews, limit_s: float, memory_bytes: int | None) -> tuple[str, bool]:
    """Why a build failed, "" where it did not, and whether it would fail again. Pure."""
    match ended:
        case Ended(is_late=True):
            return f"its engine was not built within {limit_s:g} s", True
        case Ended(is_too_large=True):
            return f"building its engine took more than the {memory_bytes} bytes of memory that it may have", False
        case Ended(signal="SIGKILL"):
            return "the process that built its engine was killed; is the device out of memory?", False
        case Ended(signal=signal) if signal:
            return f"building its engine ended the process that did it ({signal}): {ended.said}", True
    if last.is_done or last.fault:
        return last.fault, not last.may_pass
    return f"the process that built its engine ended without a word: {ended.said}", False
