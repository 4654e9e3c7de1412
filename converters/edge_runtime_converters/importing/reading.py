"""Which system a source comes from: each reader is asked in turn, in a child process that sees nothing but the source.

Owns: the order of the readers, and the child with its limits. A source may be hostile (a bomb, a path that leads out, a
file that crashes its parser), so it is read where that costs one child.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.durable import read_kept
from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.child import Show, run_child
from edge_runtime.sandbox.ending import Cause, ShowProgress
from edge_runtime_converters.importing.importers import Importer
from edge_runtime_converters.importing.plan import ImportPlan
from edge_runtime_converters.importing.source_folder import SourceFolder

TIMEOUT_S = 300.0
"""Unpacking 64 GiB is the longest part."""

MEMORY_BYTES = 2 << 30
MAX_PLAN_BYTES = 64 << 20
_PLAN_FILE = "plan.json"


class ReadTask(Struct, frozen=True):
    """A source for the child. work: a folder that it may write to. plugins: distributions whose importers it uses."""

    source: str
    work: str
    shapes: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


def read_source(source: Path, work: Path, show: Show | None = None, *, shapes: tuple[str, ...] = ()) -> ImportPlan:
    """Read a source in a child process, and return what an import of it will do.

    shapes: of inputs, as the caller says them. work: an empty folder; archives are unpacked there, so it stays until
    the import is over. Raises ConversionFailed: no reader knows it, or it is broken or hostile.
    """
    SourceFolder.of(source, work)
    real = source.resolve()
    seen = real if real.is_dir() else real.parent
    ending = run_child(
        read_in_child,
        ReadTask(str(source.absolute()), str(work), shapes, tuple(each.distribution for each in plugins.used())),
        limit_s=TIMEOUT_S,
        memory_bytes=MEMORY_BYTES,
        reads=[source.absolute(), seen],
        writes=[work],
        show=show,
    )
    if ending.cause is not Cause.RETURNED:
        said = ending.reason if ending.cause is Cause.RAISED else f"{source}: {ending.reason}; it may be damaged"
        raise ConversionFailed(said)
    try:
        text = read_kept(work / _PLAN_FILE, MAX_PLAN_BYTES)
        return msgspec.json.decode(text[:MAX_PLAN_BYTES], type=ImportPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConversionFailed(f"{source}: cannot be told apart: {error}") from error


def read_in_child(task: ReadTask, progress: ShowProgress) -> int:
    """Write the plan into the work folder; returns its number of models. Raises ConversionFailed."""
    plugins.use(task.plugins)
    source = SourceFolder.of(Path(task.source), Path(task.work), task.shapes)
    progress(f"reading {task.source}")
    plan = plan_of(source)
    (source.work / _PLAN_FILE).write_bytes(msgspec.json.encode(plan))
    return len(plan.models)


def plan_of(source: SourceFolder) -> ImportPlan:
    """Return what the first reader makes of it that knows it. Raises ConversionFailed: none does."""
    importers: list[Importer] = [plugins.declared("importers", name) for name in plugins.names("importers")]
    for importer in importers:
        plan: ImportPlan | None = importer.load().read(source)
        if plan is not None:
            return plan
    known = "; ".join(importer.summary for importer in importers)
    raise ConversionFailed(f"{source.file or source.root}: is none of what can be imported: {known}")
