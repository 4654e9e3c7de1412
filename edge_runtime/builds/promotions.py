"""Promotion of a build that has ended: loads its version, and swaps its engine in for the serving backend.

Owns: which builds wait for the end of a swap. Thread: the loader's.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edge_runtime.backends.base import Instance
from edge_runtime.backends.registry import find_declaration
from edge_runtime.builds.build_store import BuildNews, BuildStore
from edge_runtime.errors import BackendError, LoadFailed
from edge_runtime.models.builds import BuildParts
from edge_runtime.models.context import ModelSources
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.loading import LoadedVersion
from edge_runtime.models.model_table import ModelTable, VersionState, VersionStatus
from edge_runtime.models.placement import Placement
from edge_runtime.models.served_folder import ServedFolder
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

SAME_PRECISION_DIFFERENCE = 0.01
"""Of the largest value: other kernels in f32 differ by less than 1e-3 for ResNet-50, and another answer by more."""

OTHER_PRECISION_DIFFERENCE = 0.25
"""The same where one runs in fewer bits, as its owner asked for: a larger one is garbage, not a loss of accuracy."""


class Promotions:
    """Loads what was built: engines beside the backend that serves meanwhile, to answer in its place; conversions."""

    def __init__(self, builds: BuildStore, table: ModelTable, sources: ModelSources) -> None:
        self._builds = builds
        self._table = table
        self._sources = sources
        self._waiting: list[BuildNews] = []

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """Act on the news of builds.

        News of a model under swap waits until the swap is decided, the end of a build until the load that wanted it has
        ended too: a build may fail at once.
        """
        waiting, self._waiting = self._waiting, []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._builds.news.get_nowait())
        for news in waiting:
            self._take(news, placement, served)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _take(self, news: BuildNews, placement: Placement, served: ServedFolder) -> None:
        for folder, version, status in list(self._waiting_for(news.artifact)):
            is_serving = status.state is VersionState.READY
            is_swapping = folder.name in self._sources.swapping
            is_loading = status.state is VersionState.LOADING
            if is_loading and not news.has_ended:
                continue
            if not news.has_ended and news.is_conversion:
                older = "a newer copy of its files waits: " if is_serving else ""
                self._table.set_status(replace(status, reason=f"{older}{news.words}"))
            elif not news.has_ended or (news.words and is_serving and not is_swapping and not news.is_conversion):
                self._table.set_status(replace(status, reason=f"{news.backend}: {news.words}"))
            elif is_swapping or is_loading:
                # An update is observed: its measurements must not change under way.
                if news not in self._waiting:
                    self._waiting.append(news)
            else:
                # Beside what serves; compared and swapped. Where it is not taken, what serves goes on.
                placement.load_or_report(folder, version, check=partial(self._check, news.artifact))
                served.settle(folder.name)  # an older version may have answered for it until now

    def _waiting_for(self, artifact: str) -> Iterator[tuple[ModelFolder, VersionFolder, VersionStatus]]:
        """The versions that are loaded, or wait to be, from an artifact: the path of a file, or of a whole folder."""
        for status in self._table.statuses():
            folder = self._sources.folder_of(status.model)
            version = folder.versions.get(status.number) if folder is not None else None
            if (
                folder is None
                or version is None
                or not (status.state in (VersionState.READY, VersionState.LOADING) or status.state.is_being_made)
            ):
                continue
            if any(artifact in (str(path), str(path.parent)) for path in map(Path.absolute, version.files.values())):
                yield folder, version, status

    def _check(self, artifact: str, loaded: LoadedVersion) -> None:
        """Compare a new engine with what serves. Raises LoadFailed: they differ, and the engine is not used again."""
        servable = loaded.servable
        old = self._table.find(servable.model, servable.number)
        if old is None or not _are_comparable(old.layouts.narrow, servable.layouts.narrow):
            return
        try:
            compare(old.layouts.narrow, loaded)
        except LoadFailed as error:
            self._builds.refuse(artifact, error.message)
            raise


def open_builds(parts: BuildParts) -> tuple[BuildStore, Promotions]:
    """Make the store of builds on this device, and the promotions that load them."""
    store = BuildStore(parts.folder, parts.table, usable_bytes=parts.usable_bytes, hosts=parts.hosts)
    return store, Promotions(store, parts.table, parts.sources)


def _are_comparable(old: Instance, new: Instance) -> bool:
    """Whether two instances run the same model, and the old one may be asked beside those who use it.

    An engine that is replaced by another is of files that changed since; `model.py` is another model altogether.
    """
    built, meanwhile = find_declaration(new.backend), find_declaration(old.backend)
    if built is None or meanwhile is None or not built.builder or not meanwhile.serves_meanwhile:
        return False
    names = [
        ([tensor.name for tensor in each.spec.inputs], [tensor.name for tensor in each.spec.outputs])
        for each in (old, new)
    ]
    return names[0] == names[1]


def compare(old: Instance, loaded: LoadedVersion) -> None:
    """Hold a new instance's answers to those of what serves, on made-up inputs. Raises LoadFailed: they differ."""
    new = loaded.servable.layouts.narrow
    first = loaded.first_runs
    if not first.times:
        return
    inputs = first.inputs(new.spec, 1, loaded.servable.settings.warmup.shapes)
    try:
        expected, got = old.run(inputs), new.run(inputs)
    except BackendError as error:
        raise LoadFailed(f"its engine could not be held to what serves: {error.message}") from error
    is_same = old.precision == new.precision
    allowed = SAME_PRECISION_DIFFERENCE if is_same else OTHER_PRECISION_DIFFERENCE
    for tensor, want, have in zip(new.spec.outputs, expected, got, strict=True):
        found = difference(want, have)
        if found > allowed:
            raise LoadFailed(
                f"its engine answers otherwise than what serves: output {tensor.name!r} differs by {found:.1%} of its "
                f"largest value, allowed {allowed:.0%}; what serves goes on"
            )


def difference(want: Array, have: Array) -> float:
    """Largest difference as a share of the largest value; infinite where shapes differ or numbers are none. Pure.

    Integers are not compared: a class that changes by a rounding is not a fault.
    """
    if want.shape != have.shape:
        return float("inf")
    if want.dtype.kind != "f" or have.dtype.kind != "f" or not want.size:
        return 0.0
    left, right = want.astype(np.float64), have.astype(np.float64)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return float("inf")
    finite = np.isfinite(left)
    scale = float(np.max(np.abs(left), initial=0.0, where=finite))
    largest = float(np.max(np.abs(left - right), initial=0.0, where=finite))
    return largest / max(scale, 1e-6)
