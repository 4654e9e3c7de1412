"""The fate of single versions: loaded beside what serves, published, unloaded, or waiting for their first request.

Owns: the order of these steps, so that no request is lost on the way. What is to be loaded is the loader's to say.
Thread: the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_runtime.clock import Clock
from edge_runtime.errors import LoadFailed, NotBuiltYet, NotReady
from edge_runtime.repository.folder import ModelFolder, VersionFolder
from edge_runtime.serving.calibrator import Calibrator
from edge_runtime.serving.loading import Loaded
from edge_runtime.serving.lobby import Lobby
from edge_runtime.serving.placement import Placement
from edge_runtime.serving.servables import Servables, Standing, State

log = logging.getLogger(__name__)

Check = Callable[[Loaded], None]
"""Looks at a version before it takes over. Raises LoadFailed: it is not to."""


class Lifecycle:
    """Loads and unloads versions as they are asked for, one at a time. calibrator None: none is calibrated."""

    def __init__(
        self,
        placement: Placement,
        servables: Servables,
        lobby: Lobby,
        clock: Clock,
        calibrator: Calibrator | None,
    ) -> None:
        self._placement = placement
        self._servables = servables
        self._lobby = lobby
        self._clock = clock
        self._calibrator = calibrator

    def load_or_wait(self, folder: ModelFolder, version: VersionFolder) -> None:
        """Load a version, unless it is to wait for its first request. A failure is logged, and where it stands."""
        if folder.settings.on_demand and self._servables.find(folder.name, version.number) is None:
            self._servables.stand(Standing(folder.name, version.number, State.ON_DEMAND))
        else:
            self.load_or_report(folder, version)

    def load_or_report(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load a version; a failure is logged, and where it stands."""
        try:
            self.load(folder, version, check)
        except NotBuiltYet as error:
            log.info("%s version %d waits: %s", folder.name, version.number, error.message)
        except LoadFailed as error:
            log.error("%s version %d is not loaded: %s", folder.name, version.number, error.message)

    def load(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load beside the old one, swap, drain the old one.

        Raises LoadFailed, which leaves the old one serving; NotBuiltYet, where it will be loaded by itself.
        """
        name, number = folder.name, version.number
        old = self._servables.find(name, number)
        before = self._servables.standing(name, number)
        if old is None:
            self._servables.stand(Standing(name, number, State.LOADING))
        started_s = self._clock.monotonic_s()
        try:
            loaded = self._placement.load(folder, version, without=() if old is None else (old,), check=check)
        except LoadFailed as error:
            failed = State.BUILDING if isinstance(error, NotBuiltYet) else State.FAILED
            state = failed if old is None else State.READY
            fate = "waits" if failed is State.BUILDING else "failed to load"
            reason = error.message if old is None else f"a newer copy of its files {fate}: {error.message}"
            if before is not None and before.state is State.ON_DEMAND and self._placement.is_held_up(version):
                state, reason = State.ON_DEMAND, "waits for memory until an update of another model is decided"
            self._servables.stand(Standing(name, number, state, reason))
            self._lobby.open(name, NotReady(f"model {name} version {number} failed to load: {error.message}"))
            raise
        replaced = self._servables.publish(loaded.servable)
        if loaded.note:
            self._servables.stand(Standing(name, number, State.READY, loaded.note))
        self._lobby.open(name, None)
        log_loaded(loaded, self._clock.monotonic_s() - started_s)
        self._placement.retire(replaced)
        self.calibrate(loaded)

    def calibrate(self, loaded: Loaded) -> None:
        """Have a version calibrated when the machine is idle, where that is wanted at all."""
        if self._calibrator is not None:
            self._calibrator.add(loaded)

    def unload(self, model: str, number: int, *, forget: bool) -> None:
        """Take a version away, after what it admitted was answered. forget: it is gone from its source too."""
        self._placement.retire(self._servables.withdraw(model, number, State.UNLOADING))
        if forget:
            self._servables.forget(model, number)
        else:
            self._servables.stand(Standing(model, number, State.UNLOADED, "unloaded"))


def log_loaded(loaded: Loaded, took_s: float) -> None:
    """Say what was loaded, and what really runs it."""
    servable = loaded.servable
    instance = servable.layouts.narrow
    log.info(
        "loaded",
        extra={
            "model": servable.model,
            "version": servable.number,
            "backend": instance.backend,
            "device": instance.device,
            "precision": instance.precision,
            "mode": servable.mode,
            "took_s": round(took_s, 3),
            **({"note": loaded.note} if loaded.note else {}),
        },
    )
