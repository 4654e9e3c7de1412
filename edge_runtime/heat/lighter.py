"""Lighter variants of models: a version's file at int8 answers in place of the model itself, and the other way round.

Owns: which versions have one. The loader loads and publishes as it does a file that changed: beside the one that
answers, so no request is lost. Thread: the governor's, but for what the loader calls.
"""

from __future__ import annotations

import logging
from functools import partial

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.heat.settings import LIGHTER
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import ModelTable

log = logging.getLogger(__name__)


class LighterVariants:
    """Switches all models that have a lighter variant."""

    def __init__(self, table: ModelTable, loader: Loader) -> None:
        self._table = table
        self._loader = loader
        self._switched: set[str] = set()

    def switch(self, is_lighter: bool) -> None:
        """Have the lighter variants answer, or the models themselves again. Does not wait."""
        if is_lighter:
            for model in sorted({each.model for each in self._table.live() if each.chain is None}):
                self._switched.add(model)
                self._loader.load_variant(model, LIGHTER, partial(self._told, model))
            return
        for model in sorted(self._switched):
            self._loader.load_variant(model, "", partial(self._told, model))
        self._switched.clear()

    @staticmethod
    def _told(model: str, error: EdgeRuntimeError | None) -> None:
        if error is not None:
            log.warning("a variant is not loaded", extra={"model": model, "reason": error.message})
