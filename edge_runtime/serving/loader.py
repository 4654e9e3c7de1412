"""The one thread that loads, replaces, unloads, evicts and calibrates versions, and watches the models folder.

Owns: which versions are loaded, from what is in the folder, what updates put in its place, and what the control
endpoint and requests ask for. Everything it does is an order, one at a time, so nothing here needs a lock. One of
its steps failing is that version's state, never the thread's end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, ModelNotFound
from edge_runtime.repository.folder import ModelFolder
from edge_runtime.repository.watch import Watcher
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.serving.calibrator import Calibrator
from edge_runtime.serving.exchange import Exchange
from edge_runtime.serving.exchange_bench import ExchangeBench
from edge_runtime.serving.folder_models import FolderModels
from edge_runtime.serving.lifecycle import Lifecycle
from edge_runtime.serving.loading import VersionLoader
from edge_runtime.serving.lobby import Lobby
from edge_runtime.serving.orders import Orders
from edge_runtime.serving.placement import Placement
from edge_runtime.serving.servables import Servables
from edge_runtime.serving.takeovers import Takeovers
from edge_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

Done = Callable[[EdgeRuntimeError | None], None]

POLL_S = 0.5
"""How often the models folder is looked at; a change is taken when it is 2 s old, so 0.5 s adds little to that."""

IDLE_S = 0.05
"""How long a calibration waits for the machine to be idle before it looks again."""


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """budget_bytes None: memory is not bounded. serves_folder False: only what updates bring is served."""

    watch: bool = True
    calibrate: bool = True
    budget_bytes: int | None = None
    serves_folder: bool = True


class Loader:
    """Keeps the live table true to the folder and to updates. Public methods may be called from any thread."""

    def __init__(
        self,
        *,
        versions: VersionLoader,
        watcher: Watcher,
        servables: Servables,
        dispatcher: Dispatcher,
        calibrator: Calibrator,
        lobby: Lobby,
        clock: Clock,
        settings: LoaderSettings,
        metrics: Metrics,
        refuse_engine: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        """refuse_engine(artifact, reason): an engine was built, and is not to be used."""
        self._servables = servables
        self._dispatcher = dispatcher
        self._calibrator = calibrator
        self._lobby = lobby
        self._settings = settings
        self._orders = Orders()
        placement = Placement(
            versions=versions,
            servables=servables,
            dispatcher=dispatcher,
            calibrator=calibrator,
            metrics=metrics,
            budget_bytes=settings.budget_bytes,
        )
        self._lifecycle = Lifecycle(placement, servables, lobby, clock, calibrator if settings.calibrate else None)
        self._bench = ExchangeBench(
            servables=servables,
            placement=placement,
            lifecycle=self._lifecycle,
            lobby=lobby,
            dispatcher=dispatcher,
            metrics=metrics,
            clock=clock,
            orders=self._orders,
            folder_model=self._folder_model,
            on_end=self._end_exchange,
        )
        self._folders = FolderModels(
            watcher if settings.serves_folder else None,
            servables,
            self._lifecycle,
            self._bench,
            lambda: self._is_stopping,
        )
        self._takeovers = Takeovers(self._bench, self._folders, refuse_engine)
        self._asked_for: set[tuple[str, int]] = set()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self.has_settled = threading.Event()

    def start(self) -> None:
        """Start the thread: it loads what the folder holds, then sets `has_settled`."""
        self._servables.on_demand(self.want)
        self._thread = threading.Thread(target=self._run, name="edge-loader", daemon=True)
        self._orders.begin()
        self._thread.start()

    def close(self) -> None:
        """Stop after the step under way; who waits for another is refused. Servables stay open. Idempotent."""
        self._is_stopping = True
        self._orders.give(lambda: None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._orders.end()

    def load(self, model: str, number: int | None, done: Done) -> None:
        """Load (again) a version, or those its policy selects; `done` gets None or why not, on the loader's thread."""
        self._orders.give(lambda: self._answer(done, lambda: self._load_asked(model, number)), done)

    def unload(self, model: str, number: int | None, done: Done) -> None:
        """Unload a version, or all of a model; it stays away until `load` or until its files change."""
        self._orders.give(lambda: self._answer(done, lambda: self._unload_asked(model, number)), done)

    def want(self, model: str, number: int) -> None:
        """A request asked for a version that waits on demand."""
        if (model, number) not in self._asked_for:
            self._asked_for.add((model, number))
            self._orders.give(lambda: self._load_wanted(model, number))

    def rescan(self) -> None:
        """Look at the folder now (SIGHUP)."""
        self._orders.give(self._folders.poll)

    def engine_progress(self, artifact: str, words: str) -> None:
        """How far an engine is that is being built from an artifact, named by its path."""
        self._orders.give(lambda: self._takeovers.progress(artifact, words))

    def engine_done(self, artifact: str, fault: str) -> None:
        """An engine was built, and may take over, or was not: `fault` says why."""
        self._orders.give(lambda: self._takeovers.done(artifact, fault))

    # ---- updates ----------------------------------------------------------------------------------------------------

    def exchange(self, folder: ModelFolder, before_alone: Callable[[], None] = lambda: None) -> Exchange:
        """Load a release, the folder's only version, beside what serves of its model. Waits.

        From here on the model is an update's: the models folder's model of that name is ignored, and reported.
        before_alone: called on the loader's thread where memory holds only one of the two, between unloading the old
        one and loading the new one; an EdgeRuntimeError from it brings the old one back. Raises LoadFailed (all is as
        before), Draining, and what `before_alone` raised.
        """
        return self._orders.ask(lambda: self._begin_exchange(folder, before_alone))

    def holds_both(self, folder: ModelFolder) -> bool:
        """Whether memory holds a release beside what serves of its model, as far as sizes of files tell. Waits."""
        (version,) = folder.versions.values()
        return self._orders.ask(lambda: self._bench.placement.has_room_beside(version))

    def reserve(self, models: Iterable[str]) -> None:
        """These are updates': the models folder's models of these names are ignored. Before `start`."""
        self._bench.reserved.update(models)

    def serve_release(self, folder: ModelFolder) -> None:
        """Serve a release, the folder's only version, and nothing else of its model. Waits; before `start`, works here.

        Raises LoadFailed (the model stays an update's, with nothing or what served before), Draining.
        """
        self._orders.ask(lambda: self._serve_release(folder))

    def release_away(self, model: str) -> None:
        """A model is no update's any more: it is unloaded, and the models folder's model of that name comes back.

        Waits. Raises LoadFailed (an exchange is under way), Draining.
        """
        self._orders.ask(lambda: self._release_away(model))

    def _begin_exchange(self, folder: ModelFolder, before_alone: Callable[[], None]) -> Exchange:
        exchange = Exchange(self._bench, folder, before_alone)
        exchange.load()
        return exchange

    def _end_exchange(self, model: str) -> None:
        """An exchange is over: either the model is an update's now, or all is as it was before."""
        if model not in self._bench.releases:
            self._folders.catch_up(model)
        self._takeovers.resume()

    def _serve_release(self, folder: ModelFolder) -> None:
        model = folder.name
        (version,) = folder.versions.values()
        self._bench.check_free(model)
        self._bench.releases[model] = folder
        known = [standing.number for standing in self._servables.standings_of(model)]
        if folder.settings.on_demand:
            self._lifecycle.load_or_wait(folder, version)
        else:
            self._lifecycle.load(folder, version)
        for number in known:
            if number != version.number:
                self._lifecycle.unload(model, number, forget=True)

    def _release_away(self, model: str) -> None:
        bench = self._bench
        bench.check_free(model)
        if not bench.is_managed(model):
            return
        bench.releases.pop(model, None)
        bench.reserved.discard(model)
        for standing in self._servables.standings_of(model):
            self._lifecycle.unload(model, standing.number, forget=True)
        self._folders.catch_up(model)

    def _folder_model(self, model: str) -> ModelFolder | None:
        return self._folders.find(model)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._folders.poll)
        self.has_settled.set()
        while not self._is_stopping:
            self._guarded(self._next_step())

    def _next_step(self) -> Callable[[], None]:
        """What was ordered, else what idle time is for."""
        step = self._orders.next(self._pause_s())
        if step is not None:
            return step
        return self._calibrate if self._may_calibrate() else self._poll_if_watching

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("a step of the loader failed")

    def _pause_s(self) -> float:
        return IDLE_S if self._calibrator.has_work else POLL_S

    def _may_calibrate(self) -> bool:
        return self._calibrator.has_work and self._dispatcher.is_idle()

    def _calibrate(self) -> None:
        self._calibrator.step(lambda: self._is_stopping or self._orders.are_waiting() or not self._dispatcher.is_idle())

    def _poll_if_watching(self) -> None:
        if self._settings.watch:
            self._folders.poll()

    # ---- what was asked for -----------------------------------------------------------------------------------------

    def _load_asked(self, model: str, number: int | None) -> None:
        self._bench.check_free(model)
        if model in self._bench.releases:
            self._load_release_again(model, number)
            return
        folder, selected = self._folders.select_asked(model, number)
        for each in selected:
            self._folders.let_come(model, each)
            self._lifecycle.load(folder, folder.versions[each])
        if number is None:
            for servable in self._servables.live_of(model):
                if servable.number not in selected:
                    self._lifecycle.unload(model, servable.number, forget=servable.number not in folder.versions)

    def _load_release_again(self, model: str, number: int | None) -> None:
        """A release that was unloaded by hand comes back; another one comes by an update only."""
        folder = self._bench.releases[model]
        (version,) = folder.versions.values()
        if self._servables.is_answering(model, None) or number not in {None, version.number}:
            raise LoadFailed(
                f"model {model!r} is served from the update repository, version {version.number}; "
                "change it with: edge-runtime update check, apply or rollback"
            )
        self._lifecycle.load(folder, version)

    def _load_wanted(self, model: str, number: int) -> None:
        # First: whoever asks once this has failed asks anew.
        self._asked_for.discard((model, number))
        folder = self._bench.folder_of(model)
        if folder is None or number not in folder.versions or self._servables.find(model, number) is not None:
            self._lobby.open(model, None)
        else:
            self._lifecycle.load_or_report(folder, folder.versions[number])

    def _unload_asked(self, model: str, number: int | None) -> None:
        self._bench.check_free(model)
        known = [standing for standing in self._servables.standings_of(model) if number in {None, standing.number}]
        if not known:
            raise ModelNotFound(f"no model {model!r}" + (f" version {number}" if number is not None else ""))
        for standing in known:
            if model not in self._bench.releases:
                self._folders.hold_back(model, standing.number)
            self._lifecycle.unload(model, standing.number, forget=False)

    def _answer(self, done: Done, step: Callable[[], None]) -> None:
        try:
            step()
        except EdgeRuntimeError as error:
            done(error)
        except Exception as error:
            log.exception("a control command failed")
            done(LoadFailed(f"{type(error).__name__}: {error}"))
        else:
            done(None)
