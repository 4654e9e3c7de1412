"""Keeps pipelines in step with their models, which come, change and go.

Owns: when a pipeline is looked at again. It asks no clock: the model table's generation says that something changed.
Thread: the loader's.
"""

from __future__ import annotations

import logging

from edge_runtime.errors import LoadFailed
from edge_runtime.models.context import ModelContext
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.placement import Placement, state_after
from edge_runtime.models.served_folder import ServedFolder
from edge_runtime.pipelines.loading import Attempt, PipelineLoader

log = logging.getLogger(__name__)

MAX_ROUNDS = 16
"""Looks in a row: a pipeline of pipelines needs one a level. What changes still is looked at by the next step."""

_AWAY = (VersionState.UNLOADED, VersionState.UNLOADING, VersionState.ON_DEMAND, VersionState.STANDBY)
"""States of a pipeline that nothing but a person, or a request, ends."""


class PipelineUpkeep:
    """Loads pipelines that waited, and unloads those whose models went."""

    def __init__(
        self, pipelines: PipelineLoader, context: ModelContext, placement: Placement, folder: ServedFolder
    ) -> None:
        self._pipelines = pipelines
        self._table = context.table
        self._placement = placement
        self._sources = context.sources
        self._folder = folder
        self._generation = -1

    def take_news(self) -> None:
        """Look at every pipeline again, if the table changed since the last look."""
        for _ in range(MAX_ROUNDS):
            generation = self._table.generation
            if generation == self._generation:
                return
            for (model, number), attempt in list(self._pipelines.attempts.items()):
                self._look(model, number, attempt)
            self._generation = generation

    # ---- private -----------------------------------------------------------------------------------------------------

    def _look(self, model: str, number: int, attempt: Attempt) -> None:
        status = self._table.status(model, number)
        if status is None:
            self._forget(model, number, attempt)
            return
        basis = self._pipelines.look(attempt.pipeline)
        if status.state in _AWAY or model in self._sources.swapping or basis == attempt.basis:
            return
        attempt.basis = basis
        servable = self._table.find(model, number)
        if servable is None or servable.chain is None:
            self._load(model, number)
            return
        try:
            fit = self._pipelines.check(servable)
        except LoadFailed as error:
            if attempt.fit is None:
                self._load(model, number)  # its file has changed, too, to go with these models
            if self._table.find(model, number) is servable:
                state = state_after(error)
                log.warning("pipeline %s version %d is not served: %s", model, number, error.message)
                self._placement.take_away(model, number, state, error.message)
            return
        if fit != attempt.fit:
            self._load(model, number)

    def _load(self, model: str, number: int) -> None:
        folder = self._sources.folder_of(model)
        version = folder.versions.get(number) if folder is not None else None
        if folder is not None and version is not None:
            self._placement.load_or_report(folder, version)

    def _forget(self, model: str, number: int, attempt: Attempt) -> None:
        """A pipeline is gone: versions that only it kept may go."""
        del self._pipelines.attempts[model, number]
        for each in attempt.pipeline.models:
            self._folder.settle(each)
