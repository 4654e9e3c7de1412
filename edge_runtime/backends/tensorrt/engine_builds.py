"""Engines of TensorRT as a kind of build: the task of the child that builds one, and the place where it is kept.

Called by builds/build_store.py, which has the thread; imported when the first engine is wanted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.base import BuildOrder
from edge_runtime.backends.tensorrt.plan import EnginePlan, plan_of
from edge_runtime.builds.build_cache import BuildCache
from edge_runtime.durable import make_folder
from edge_runtime.errors import NotBuiltYet, StorageFailed
from edge_runtime.sandbox.child import ChildFunction
from edge_runtime.sandbox.ending import Cause, Ending, ShowProgress


class EngineTask(Struct, frozen=True):
    """An engine to build, and its place. device: the key of kept kernel timings. limit_bytes: of the folder."""

    plan: EnginePlan
    key: str
    folder: str
    device: str
    limit_bytes: int


def build_in_child(task: EngineTask, progress: ShowProgress) -> None:
    """Build an engine and keep it: it goes into the cache's folder, never through a pipe. Raises EdgeRuntimeError."""
    from edge_runtime.backends.tensorrt.build import build_engine

    cache = BuildCache(Path(task.folder), task.limit_bytes)
    built = build_engine(task.plan, lambda share, phase: progress(phase, round(share, 4)), cache.timings(task.device))
    if built.timings:
        cache.keep_timings(task.device, built.timings)
    cache.write(task.key, built.engine)


class EngineBuilds:
    """A BuildKind. limit_s: against a build that hangs; NVIDIA speaks of minutes for large networks on small devices.

    final: memory may be free the next time.
    """

    doing, done, lacking = "building an engine", "an engine is built", "no engine"
    waits, runs, fails = "its engine is waiting to be built", "its engine is being built", "its engine was not built"
    is_conversion = False
    limit_s = 3600.0
    final = frozenset((Cause.RAISED, Cause.TIMED_OUT, Cause.CRASHED))
    not_yet: type[NotBuiltYet] = NotBuiltYet

    def __init__(self, cache: BuildCache, child: ChildFunction[EngineTask, None] = build_in_child) -> None:
        self.cache = cache
        self._child = child

    def find(self, key: str) -> bytes | None:
        """Return the engine; None where it is not built."""
        return self.cache.read(key)

    def build(self, plan: BuildOrder, key: str, run: Callable[..., Ending[None]]) -> Ending[None]:
        """Let a child build and keep it. Raises LoadFailed, OSError: no process can be made."""
        wanted = plan_of(plan)
        device = f"{wanted.library} {wanted.version} {wanted.device}"
        task = EngineTask(wanted, key, str(self.cache.folder), device, self.cache.limit_bytes)
        with contextlib.suppress(StorageFailed):  # the child says why
            make_folder(self.cache.folder)  # it may write there, not beside it
        reads = [Path(plan.artifact).parent, Path(plan.artifact).resolve()]  # which may be a link to elsewhere
        return run(self._child, task, reads=reads, writes=[self.cache.folder])
