"""Builds on this device: engines and the like that a backend has built, and conversions.

Owns: when the capability that builds is made: at the first build or conversion that is wanted. Nothing of it is
imported before. Thread: any, but for `take_news`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.backends.base import BuildSource

if TYPE_CHECKING:
    from edge_runtime.backends.base import BuildOrder
    from edge_runtime.config.settings import ModelSettings
    from edge_runtime.hosts.hosts import Hosts
    from edge_runtime.models.context import ModelSources
    from edge_runtime.models.folder import VersionFolder
    from edge_runtime.models.model_table import ModelTable
    from edge_runtime.models.placement import Placement
    from edge_runtime.models.served_folder import ServedFolder


class Conversion(Struct, frozen=True):
    """A converted model that is kept: its files by name, in a folder that holds nothing else of a model.

    report: the converter's, as `edge-runtime convert --json` prints it.
    """

    folder: Path
    files: Mapping[str, Path]
    report: Mapping[str, Any]


class PlannedConversion(Protocol):
    """A conversion to do. artifact: the file, or the folder that is one model."""

    @property
    def artifact(self) -> str:
        """The path of the file."""
        ...

    def missing(self) -> list[str]:
        """Return the modules that converting takes and that are not installed."""
        ...


class BuildParts(Struct, frozen=True):
    """The parts of a `Builder`. folder: the state folder, None for none. usable_bytes: memory of this process.

    hosts: whose prepared parents fork builds that want one.
    """

    table: ModelTable
    sources: ModelSources
    folder: Path | None
    usable_bytes: int | None
    hosts: Hosts


class Builder(BuildSource, Protocol):
    """The capability: builds in the background, one at a time. Made once, of `BuildParts`."""

    @property
    def built_folder(self) -> Path:
        """The folder that keeps the builds of backends."""
        ...

    def plan_conversion(
        self, settings: ModelSettings, version: VersionFolder, artifacts: Collection[str]
    ) -> PlannedConversion | None:
        """Return how a version's file is converted; None where it has none that can be, or is not to be.

        artifacts: names of files that backends here load. Raises LoadFailed: several files could be meant.
        """
        ...

    def converted(self, plan: PlannedConversion) -> Conversion:
        """Return the converted model. Raises NotConvertedYet: it waits or runs now; LoadFailed: it cannot be."""
        ...

    def stop(self) -> None:
        """End the running build soon, and begin no other. Does not wait."""
        ...

    def close(self) -> None:
        """End the running build and drop the waiting ones. Idempotent."""
        ...


class Promoter(Protocol):
    """Loads finished builds. Thread: the loader's."""

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """Load what was built beside what serves, to answer in its place; tell how far a build is."""
        ...


class Builds:
    """The builder of a device, made when it is first wanted. It is its BuildSource."""

    def __init__(self, parts: BuildParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._made: tuple[Builder, Promoter] | None = None
        self._is_stopped = False

    @property
    def builder(self) -> Builder:
        """The capability, which this makes."""
        with self._lock:
            if self._made is None:
                self._made = plugins.named(plugins.declared("parts", "builds").opens)(self._parts)
                if self._is_stopped:
                    self._made[0].stop()
            return self._made[0]

    def built(self, order: BuildOrder) -> bytes:
        """As of `BuildSource`."""
        return self.builder.built(order)

    def wait(self, key: str, stop: threading.Event) -> bool:
        """As of `BuildSource`."""
        return self.builder.wait(key, stop)

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """As of `Promoter`, where anything was built."""
        if self._made is not None:
            self._made[1].take_news(placement, served)

    def stop(self) -> None:
        """End the running build soon, and begin no other. Does not wait."""
        with self._lock:
            self._is_stopped = True
            if self._made is not None:
                self._made[0].stop()

    def close(self) -> None:
        """End the running build and drop the waiting ones; they start anew with the daemon. Idempotent."""
        self.stop()
        if self._made is not None:
            self._made[0].close()
