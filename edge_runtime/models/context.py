"""The values that all parts share which load, swap and unload versions. Does nothing. Made by daemon/assemble.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from edge_runtime.clock import Clock
    from edge_runtime.models.executor import Executor
    from edge_runtime.models.load_marks import LoadMarks
    from edge_runtime.models.model_table import ModelTable
    from edge_runtime.models.pending_loads import PendingLoads
    from edge_runtime.models.sources import ModelSources
    from edge_runtime.request.dispatcher import Dispatcher
    from edge_runtime.telemetry.metrics import Metrics


class ModelContext(Struct, frozen=True):
    """One of each for a serving core. executor: of the loader's thread, on which versions come and go."""

    table: ModelTable
    pending_loads: PendingLoads
    sources: ModelSources
    marks: LoadMarks
    dispatcher: Dispatcher
    executor: Executor
    metrics: Metrics
    clock: Clock
