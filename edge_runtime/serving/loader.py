"""The one thread that loads, replaces, unloads, evicts and calibrates versions, and watches the models folder.

Owns: which versions are loaded, from what is in the folder, what the control endpoint asked for and what memory
allows. Everything it does is a command from its queue, one at a time, so nothing here needs a lock. One of its steps
failing is that version's state, never the thread's end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, ModelNotFound, NotReady
from edge_runtime.repository.folder import ModelFolder, VersionFolder
from edge_runtime.repository.version_policy import select_versions
from edge_runtime.repository.watch import Change, Watcher
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.serving.calibrator import Calibrator
from edge_runtime.serving.loading import Loaded, VersionLoader
from edge_runtime.serving.lobby import Lobby
from edge_runtime.serving.memory_budget import Resident, plan_eviction
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Servables, Standing, State

log = logging.getLogger(__name__)

Done = Callable[[EdgeRuntimeError | None], None]

POLL_S = 0.5
"""How often the models folder is looked at; a change is taken when it is 2 s old, so 0.5 s adds little to that."""

IDLE_S = 0.05
"""How long a calibration waits for the machine to be idle before it looks again."""

DRAIN_S = 30.0
"""A replaced version has this long to answer what it admitted; requests carry shorter deadlines than this."""


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """budget_bytes None: memory is not bounded."""

    watch: bool = True
    calibrate: bool = True
    budget_bytes: int | None = None


class Loader:
    """Keeps the live table true to the folder. Public methods may be called from any thread."""

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
    ) -> None:
        self._versions = versions
        self._watcher = watcher
        self._servables = servables
        self._dispatcher = dispatcher
        self._calibrator = calibrator
        self._lobby = lobby
        self._clock = clock
        self._settings = settings
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._measured_bytes: dict[tuple[str, int], int] = {}
        self._held_back: set[tuple[str, int]] = set()
        self._reported: set[str] = set()
        self._asked_for: set[tuple[str, int]] = set()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self.has_settled = threading.Event()

    def start(self) -> None:
        """Start the thread: it loads what the folder holds, then sets `has_settled`."""
        self._servables.on_demand(self.want)
        self._thread = threading.Thread(target=self._run, name="edge-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the step under way, then close every servable. Idempotent."""
        self._is_stopping = True
        self._commands.put(lambda: None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def load(self, model: str, number: int | None, done: Done) -> None:
        """Load (again) a version, or those its policy selects; `done` gets None or why not, on the loader's thread."""
        self._commands.put(lambda: self._answer(done, lambda: self._load_asked(model, number)))

    def unload(self, model: str, number: int | None, done: Done) -> None:
        """Unload a version, or all of a model; it stays away until `load` or until its files change."""
        self._commands.put(lambda: self._answer(done, lambda: self._unload_asked(model, number)))

    def want(self, model: str, number: int) -> None:
        """A request asked for a version that waits on demand."""
        if (model, number) not in self._asked_for:
            self._asked_for.add((model, number))
            self._commands.put(lambda: self._load_wanted(model, number))

    def rescan(self) -> None:
        """Look at the folder now (SIGHUP)."""
        self._commands.put(self._poll)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._poll)
        self.has_settled.set()
        while not self._is_stopping:
            try:
                command = self._commands.get(timeout=self._pause_s())
            except queue.Empty:
                self._guarded(self._calibrate if self._may_calibrate() else self._poll_if_watching)
                continue
            self._guarded(command)

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
        self._calibrator.step(lambda: self._is_stopping or not self._commands.empty() or not self._dispatcher.is_idle())

    def _poll_if_watching(self) -> None:
        if self._settings.watch:
            self._poll()

    def _poll(self) -> None:
        changes = self._watcher.poll()
        self._report_problems()
        self._take(changes)

    def _report_problems(self) -> None:
        """Say once what lies in the folder and is not served."""
        problems = set(map(str, self._watcher.scan.problems))
        for problem in sorted(problems - self._reported):
            log.warning("not served: %s", problem)
        self._reported = problems

    def _take(self, changes: list[Change]) -> None:
        for change in changes:
            for key in [key for key in self._held_back if key[0] == change.model]:
                if change.version in {None, key[1]}:
                    self._held_back.discard(key)
        models = dict.fromkeys(change.model for change in changes)
        for model in models:
            if self._is_stopping:
                return
            changed = {change.version for change in changes if change.model == model}
            self._reconcile(model, changed)

    def _reconcile(self, model: str, changed: set[int | None]) -> None:
        """Make the live versions of one model those that its policy selects. `changed` None: its settings changed."""
        folder = self._watcher.scan.models.get(model)
        known = [standing for standing in self._servables.standings() if standing.model == model]
        if folder is None:
            for standing in known:
                self._unload(model, standing.number, forget=True)
            return
        selected = select_versions(folder.versions, folder.settings.versions)
        for number in sorted(selected, reverse=True):
            if (model, number) in self._held_back:
                continue
            is_new = self._servables.find(model, number) is None
            if is_new or number in changed or None in changed:
                self._load_or_wait(folder, folder.versions[number])
        has_failed = any(self._servables.has_failed(model, number) for number in selected)
        if has_failed:
            self._fall_back(folder, selected)
        for standing in known:
            is_gone = standing.number not in folder.versions
            if is_gone or (standing.number not in selected and not has_failed):
                self._unload(model, standing.number, forget=is_gone)

    def _fall_back(self, folder: ModelFolder, selected: Sequence[int]) -> None:
        """A version that was to be served failed: what serves goes on; where nothing does, the newest that loads."""
        if folder.settings.versions.specific or any(each.model == folder.name for each in self._servables.live()):
            return
        for number in sorted(set(folder.versions) - set(selected), reverse=True):
            self._load_or_wait(folder, folder.versions[number])
            if self._servables.find(folder.name, number) is not None:
                log.warning("an older version serves", extra={"model": folder.name, "version": number})
                return

    def _load_or_wait(self, folder: ModelFolder, version: VersionFolder, *, is_wanted: bool = False) -> None:
        if not is_wanted and folder.settings.on_demand and self._servables.find(folder.name, version.number) is None:
            self._servables.stand(Standing(folder.name, version.number, State.ON_DEMAND))
            return
        try:
            self._load(folder, version)
        except EdgeRuntimeError as error:
            log.error("%s version %d is not loaded: %s", folder.name, version.number, error.message)

    def _load(self, folder: ModelFolder, version: VersionFolder) -> None:
        """Load beside the old one, swap, drain the old one. A failed load leaves the old one serving."""
        name, number = folder.name, version.number
        is_first = self._servables.find(name, number) is None
        if is_first:
            self._servables.stand(Standing(name, number, State.LOADING))
        started_s = self._clock.monotonic_s()
        try:
            loaded = self._load_beside(folder, version)
        except EdgeRuntimeError as error:
            state = State.FAILED if is_first else State.READY
            reason = error.message if is_first else f"a newer copy of its files failed to load: {error.message}"
            self._servables.stand(Standing(name, number, state, reason))
            self._asked_for.discard((name, number))
            self._lobby.open(name, NotReady(f"model {name} version {number} failed to load: {error.message}"))
            raise
        replaced = self._servables.publish(loaded.servable)
        self._watch_queue(loaded.servable)
        if loaded.note:
            self._servables.stand(Standing(name, number, State.READY, loaded.note))
        self._asked_for.discard((name, number))
        self._lobby.open(name, None)
        if replaced is not None:
            self._calibrator.discard(replaced)
            replaced.close(DRAIN_S)
        if self._settings.calibrate:
            self._calibrator.add(loaded)
        _log_loaded(loaded, self._clock.monotonic_s() - started_s)

    def _load_beside(self, folder: ModelFolder, version: VersionFolder) -> Loaded:
        """Make room, load, warm up. Raises EdgeRuntimeError only: a library's surprise is a failed load too."""
        try:
            key = (folder.name, version.number)
            self._make_room(key, self._measured_bytes.get(key) or self._versions.bytes_wanted(version))
            loaded = self._versions.load(folder, version)
        except EdgeRuntimeError:
            raise
        except Exception as error:
            log.exception("loading failed unexpectedly", extra={"model": folder.name, "version": version.number})
            raise LoadFailed(f"{type(error).__name__}: {error}") from error
        self._measured_bytes[key] = loaded.servable.memory_bytes
        try:
            # Files are only a guess at what a library makes of them: hold the budget by what was measured.
            self._make_room(key, loaded.servable.memory_bytes)
        except LoadFailed:
            loaded.servable.close(0.0)
            raise
        return loaded

    def _load_asked(self, model: str, number: int | None) -> None:
        changes = self._watcher.poll(at_once=model)
        self._take([change for change in changes if change.model != model])
        folder = self._watcher.scan.models.get(model)
        if folder is None or (number is not None and number not in folder.versions):
            what = f"model {model!r}" if folder is None else f"model {model!r} version {number}"
            raise ModelNotFound(f"{what} is not in the models folder")
        selected = (number,) if number is not None else select_versions(folder.versions, folder.settings.versions)
        if not selected:
            raise LoadFailed(f"model {model!r}: its version policy selects none of {sorted(folder.versions)}")
        for each in selected:
            self._held_back.discard((model, each))
            self._load(folder, folder.versions[each])
        if number is None:
            for servable in self._servables.live():
                if servable.model == model and servable.number not in selected:
                    self._unload(model, servable.number, forget=servable.number not in folder.versions)

    def _load_wanted(self, model: str, number: int) -> None:
        folder = self._watcher.scan.models.get(model)
        if folder is None or number not in folder.versions or self._servables.find(model, number) is not None:
            self._asked_for.discard((model, number))
            self._lobby.open(model, None)
            return
        self._load_or_wait(folder, folder.versions[number], is_wanted=True)

    def _unload_asked(self, model: str, number: int | None) -> None:
        known = [each for each in self._servables.standings() if each.model == model and number in {None, each.number}]
        if not known:
            raise ModelNotFound(f"no model {model!r}" + (f" version {number}" if number is not None else ""))
        for standing in known:
            self._held_back.add((model, standing.number))
            self._unload(model, standing.number, forget=False)

    def _unload(self, model: str, number: int, *, forget: bool) -> None:
        servable = self._servables.withdraw(model, number, State.UNLOADING)
        self._retire(servable)
        if forget:
            self._servables.forget(model, number)
        else:
            self._servables.stand(Standing(model, number, State.UNLOADED, "unloaded"))

    def _retire(self, servable: Servable | None) -> None:
        if servable is None:
            return
        self._calibrator.discard(servable)
        servable.close(DRAIN_S)
        log.info("unloaded", extra={"model": servable.model, "version": servable.number})

    def _watch_queue(self, servable: Servable) -> None:
        servable.metrics.watch("queue_rows", lambda: self._dispatcher.queued(servable.scheduled)[0])
        servable.metrics.watch("queue_bytes", lambda: self._dispatcher.queued(servable.scheduled)[1])

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _make_room(self, key: tuple[str, int], wanted: int) -> None:
        """Let others leave so that a version of so many bytes fits. Raises LoadFailed when that is not enough."""
        budget = self._settings.budget_bytes
        if budget is None:
            return
        residents = [
            Resident(each.model, each.number, each.memory_bytes, each.used_s, each.settings.pinned)
            for each in self._servables.live()
            if (each.model, each.number) != key
        ]
        plan = plan_eviction(residents, wanted, budget)
        if plan.missing_bytes:
            raise LoadFailed(
                f"needs {wanted} bytes; {plan.missing_bytes} are missing in the memory budget of {budget} "
                "even after every model that is not pinned would leave"
            )
        for resident in plan.leave:
            servable = self._servables.withdraw(resident.model, resident.number, State.ON_DEMAND, "left to free memory")
            self._retire(servable)

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


def _log_loaded(loaded: Loaded, took_s: float) -> None:
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
