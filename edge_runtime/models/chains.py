"""Versions that ask other models: their loaders, and the needs of the live ones.

Owns: which capability loads a version, by the `FolderFile` that says whom it asks. Nothing of one is imported before
there is such a version. Thread: the loader's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.models.folder import ModelFolder, VersionFolder

if TYPE_CHECKING:
    from edge_runtime.backends.base import Instance
    from edge_runtime.backends.registry import Backends
    from edge_runtime.clock import Clock
    from edge_runtime.config.settings import ModelSettings
    from edge_runtime.models.context import ModelContext
    from edge_runtime.models.load_plans import ServingLimits
    from edge_runtime.models.loading import LoadedVersion
    from edge_runtime.models.placement import Placement
    from edge_runtime.models.servable import Servable
    from edge_runtime.models.served_folder import ServedFolder
    from edge_runtime.request.dispatcher import Dispatcher
    from edge_runtime.request.infer import Infer
    from edge_runtime.request.scheduled_model import ScheduledModel
    from edge_runtime.steps import Form
    from edge_runtime.telemetry.metrics import Metrics, ModelMetrics

MAX_DEPTH = 8
"""Models that ask models that ask models: a request of the first waits for one of each below it."""


class ChainParts(Struct, frozen=True):
    """The parts of a `ChainLoader`."""

    context: ModelContext
    backends: Backends
    limits: ServingLimits
    infer: Infer


class OwnChain(NamedTuple):
    """The parts of a chain by which a backend's models answer, see `Declaration.chain`.

    scheduled: the queue of requests that wait before their first run; nothing of it runs by itself. forms: who runs
    what the chain asks for. instance: the model's own.
    """

    model: str
    number: int
    settings: ModelSettings
    instance: Instance
    scheduled: ScheduledModel
    forms: Mapping[Form, Servable]
    dispatcher: Dispatcher
    clock: Clock
    metrics: Metrics


class ChainLoader(Protocol):
    """Loads versions that ask other models. Made once, with `ChainParts`."""

    def asked_models(self, folder: ModelFolder, version: VersionFolder) -> Collection[str]:
        """Return the models that a version asks. Raises LoadFailed."""
        ...

    def steps_to_load(self, folder: ModelFolder, version: VersionFolder) -> Sequence[tuple[ModelFolder, VersionFolder]]:
        """Return the versions that a version asks, that are not loaded, and could be. Raises nothing."""
        ...

    def load(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        metrics: ModelMetrics | None = None,
        owned: Sequence[LoadedVersion] = (),
    ) -> LoadedVersion:
        """Make a servable of a version. owned: the models that it brought with it, loaded.

        Raises LoadFailed with every reason; WaitsForModels: it will be by itself.
        """
        ...

    def check_swap(self, candidate: Servable) -> None:
        """Raise LoadFailed where a live servable of this loader could not go on with a version that is to answer."""
        ...

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """Load versions that waited for models, and unload those whose models went, if the table has changed."""
        ...


class Chains:
    """The loaders of versions that ask other models, each made when its first version comes."""

    def __init__(self, parts: ChainParts) -> None:
        self._parts = parts
        self._loaders: dict[str, ChainLoader] = {}

    def loader(self, folder: ModelFolder, version: VersionFolder) -> ChainLoader:
        """Return the loader of a version. Raises LookupError: it asks no other model."""
        name = folder.chain_kind(version).loader
        if name not in self._loaders:
            self._loaders[name] = plugins.named(name)(self._parts)
        return self._loaders[name]

    def check_swap(self, candidate: Servable) -> None:
        """As `ChainLoader.check_swap`, of all."""
        for loader in self._loaders.values():
            loader.check_swap(candidate)

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """As `ChainLoader.take_news`, of all."""
        for loader in list(self._loaders.values()):
            loader.take_news(placement, served)
