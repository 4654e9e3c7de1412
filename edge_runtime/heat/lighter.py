"""Lighter variants of models: a version's file at int8 answers in place of the model itself, and the other way round.

Owns: which models were switched, and which are to be tried again. The loader loads and publishes as it does a file that
changed: beside the one that answers, so no request is lost. Nothing here waits for a load, and no lock is held
meanwhile. Thread: the governor's, but for what the loader calls.
"""

from __future__ import annotations

import logging
import math
from functools import partial

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.heat.settings import LIGHTER
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import ModelTable

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""Models are looked at again after this time: a load that failed for lack of memory may succeed by then, and models
that were loaded since have variants too."""


class LighterVariants:
    """Switches all models that have a lighter variant."""

    def __init__(self, table: ModelTable, loader: Loader, clock: Clock) -> None:
        self._table = table
        self._loader = loader
        self._clock = clock
        self._is_lighter = False
        # Invariant: models whose own variant may not answer. A load's end takes one out, on the loader's thread.
        self._switched: set[str] = set()
        self._under_way: set[tuple[str, bool]] = set()
        self._again_s = math.inf

    def switch(self, is_lighter: bool) -> None:
        """Have the lighter variants answer, or the models themselves again. Called at each reading; does not wait."""
        now_s = self._clock.monotonic_s()
        if is_lighter == self._is_lighter and now_s < self._again_s:
            return
        self._is_lighter = is_lighter
        if is_lighter:
            self._switched |= {each.model for each in self._table.live() if each.chain is None}
        self._again_s = now_s + AGAIN_S if self._switched else math.inf
        for model in sorted(self._switched):
            if (model, is_lighter) in self._under_way:
                continue
            self._under_way.add((model, is_lighter))
            self._loader.load_variant(model, LIGHTER if is_lighter else "", partial(self._told, model, is_lighter))

    def _told(self, model: str, is_lighter: bool, error: EdgeRuntimeError | None) -> None:
        self._under_way.discard((model, is_lighter))
        if error is not None:
            told = {"model": model, "reason": error.message, "again_s": AGAIN_S}
            log.warning("a variant is not loaded; it is tried again", extra=told)
        elif not is_lighter and not self._is_lighter:
            self._switched.discard(model)
