"""The process that prepares hosts, begun before the daemon imports what it is made of: on two cores the two overlap.

Owns: the guess whether models will run in hosts of the backend that is chosen first, by the names and sizes of their
files alone. What it begins is ended where no model wants it. Called by `serve` once the configuration is read. Thread:
main.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime import plugins
from edge_runtime.config.settings import Config

if TYPE_CHECKING:
    from edge_runtime.backends.declaration import Declaration
    from edge_runtime.hosts.prepared_parent import PreparedParent

LEAST_BYTES = 4 << 20
"""Of a file that is taken for a model in a host: one row of a net of that size is mostly more work than may be done
inside (backends/onnx/traced_values.py). A wrong guess costs some tenths of a second of another core."""

MOST_FILES = 256
"""That are looked at: a large folder's models load for longer than what is gained here."""

_DEPTH = 2
"""Folders below the models folder in which a model's file lies: those of the model and of its version."""


def begin_early_parent(config: Config) -> PreparedParent | None:
    """Begin the parent that the start is likely to want; None where it is not, or no process can be made."""
    declared = _chosen_first(config)
    if declared is None or not wants_host(config):
        return None
    from edge_runtime.hosts.prepared_parent import Preparation, PreparedParent

    parent = PreparedParent(Preparation(declared.name, declared.prepare))
    try:
        parent.begin()
    except OSError:  # said when a host is wanted
        return None
    return parent


def wants_host(config: Config) -> bool:
    """Whether a model of the configuration is likely to run in a host of that backend. Raises nothing."""
    if config.isolation == "never" or len(os.sched_getaffinity(0)) < 2:
        return False
    declared = _chosen_first(config)
    if declared is None or not declared.begins_early:
        return False
    if not _has_one(declared.libraries) or _has_one(declared.yields_to):
        return False
    suffix = declared.artifacts[0].removeprefix("model")
    least_bytes = 1 if config.isolation == "always" else LEAST_BYTES
    places = [*config.model.values(), *([] if config.models_folder is None else [config.models_folder])]
    return any(size >= least_bytes for place in places for size in islice(_sizes(place, suffix, _DEPTH), MOST_FILES))


# ---- private --------------------------------------------------------------------------------------------------------


def _chosen_first(config: Config) -> Declaration | None:
    """The declaration of the backend that is tried first; None where there is no such backend."""
    known = plugins.names("backends")
    name = config.backends[0].name if config.backends else known[0]
    found: Declaration | None = plugins.declared("backends", name) if name in known else None
    return found


def _has_one(libraries: tuple[str, ...]) -> bool:
    return any(find_spec(name) is not None for name in libraries)


def _sizes(place: str, suffix: str, depth: int) -> Iterator[int]:
    """Yield the sizes of models in a file or folder, 0 for every other file, so that those are counted too."""
    try:
        if place.endswith(suffix):
            yield Path(place).stat().st_size
            return
        with os.scandir(place) as entries:
            found = list(islice(entries, MOST_FILES))
    except OSError:
        return
    for entry in found:
        if entry.name.endswith(suffix):
            yield from _sizes(entry.path, suffix, 0)
        elif depth and not entry.name.startswith("."):
            yield from _sizes(entry.path, suffix, depth - 1)
        yield 0
