"""The values that all parts share which load, swap and unload versions, and where each model comes from.

Loads nothing. Made by daemon/assemble.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from edge_runtime.errors import LoadFailed

if TYPE_CHECKING:
    from edge_runtime.clock import Clock
    from edge_runtime.models.executor import Executor
    from edge_runtime.models.folder import ModelFolder
    from edge_runtime.models.load_marks import LoadMarks
    from edge_runtime.models.model_table import ModelTable
    from edge_runtime.models.pending_loads import PendingLoads
    from edge_runtime.models.watch import Watcher
    from edge_runtime.request.dispatcher import Dispatcher
    from edge_runtime.telemetry.metrics import Metrics


class ModelSources:
    """Says which folder a model is loaded from: the models folder, or a release. A model has one source.

    Thread: the loader's; `reserved` is filled before that starts.

    releases: the folder of the release that serves, by model. reserved: models whose releases are still to be loaded.
    swapping: models under swap, whose versions never leave the memory for others.
    """

    def __init__(self, watcher: Watcher | None) -> None:
        """watcher: reads the models folder; None: the folder is not served at all."""
        self.releases: dict[str, ModelFolder] = {}
        self.reserved: set[str] = set()
        self.swapping: set[str] = set()
        self._watcher = watcher

    def in_folder(self, model: str) -> ModelFolder | None:
        """Return a model as it lies in the models folder; None where it does not."""
        return self._watcher.scan.models.get(model) if self._watcher is not None else None

    def folder_of(self, model: str) -> ModelFolder | None:
        """Return the folder that a model was loaded from, and is again on demand."""
        return self.releases.get(model) or self.in_folder(model)

    def is_managed(self, model: str) -> bool:
        """Whether the models folder's model of this name is ignored."""
        return model in self.releases or model in self.reserved or model in self.swapping

    def check_free(self, model: str) -> None:
        """Raise LoadFailed while a model is being swapped: only its update may change it then."""
        if model in self.swapping:
            raise LoadFailed(
                f"an update of model {model!r} is under way; wait until it is decided, see: edge-runtime update status"
            )


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
