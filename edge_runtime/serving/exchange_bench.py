"""What exchanges work with, and which models are updates' rather than the models folder's.

Owns: the table of releases that serve. Thread: the loader's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edge_runtime.clock import Clock
from edge_runtime.errors import LoadFailed
from edge_runtime.repository.folder import ModelFolder
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.serving.lifecycle import Lifecycle
from edge_runtime.serving.lobby import Lobby
from edge_runtime.serving.orders import Orders
from edge_runtime.serving.placement import Placement
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBench:
    """The parts, and the table.

    folder_model(model): what lies in the models folder. on_end(model): an exchange is over. releases: the folder of the
    release that serves, by model. reserved: models whose releases are still to be loaded.
    """

    servables: Servables
    placement: Placement
    lifecycle: Lifecycle
    lobby: Lobby
    dispatcher: Dispatcher
    metrics: Metrics
    clock: Clock
    orders: Orders
    folder_model: Callable[[str], ModelFolder | None]
    on_end: Callable[[str], None]
    releases: dict[str, ModelFolder] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)

    def is_managed(self, model: str) -> bool:
        """Whether the models folder's model of this name is to be ignored."""
        return model in self.releases or model in self.reserved or model in self.placement.held

    def folder_of(self, model: str) -> ModelFolder | None:
        """Where what serves of a model was loaded from, and is again on demand."""
        return self.releases.get(model) or self.folder_model(model)

    def check_free(self, model: str) -> None:
        """Raise LoadFailed while the model is being exchanged: one hand at a time."""
        if model in self.placement.held:
            raise LoadFailed(
                f"an update of model {model!r} is under way; wait until it is decided, see: edge-runtime update status"
            )
