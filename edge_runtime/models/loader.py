"""The one thread that loads, swaps, unloads, evicts and calibrates versions, and watches the models folder.

Owns: the orders of the control endpoint, requests and updates. Each is a step on that thread, one at a time, so nothing
here needs a lock. The start's loads run on threads of their own, and each end of one is a step. A step that fails is
its version's status, never the thread's end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_runtime.config.settings import Config
from edge_runtime.errors import Draining, EdgeRuntimeError, Forbidden, LoadFailed, LoadsNotAsked, ModelNotFound
from edge_runtime.models.builds import Builds
from edge_runtime.models.calibration import Calibrator
from edge_runtime.models.chains import Chains
from edge_runtime.models.context import ModelContext
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.model_table import VersionState, VersionStatus
from edge_runtime.models.names import variant_of
from edge_runtime.models.overrides import NO_OVERRIDE, Override
from edge_runtime.models.placement import Placement
from edge_runtime.models.served_folder import ServedFolder

if TYPE_CHECKING:
    from edge_runtime.models.swap import Swap

log = logging.getLogger(__name__)

Done = Callable[[EdgeRuntimeError | None], None]

POLL_S = 0.5
"""How often the models folder is looked at; a change is taken when it is 2 s old, so 0.5 s adds little to that."""

IDLE_S = 0.05
"""How long a calibration waits for the machine to be idle before it looks again."""


class Loader:
    """Keeps the model table true to the folder and to updates. Public methods may be called from any thread."""

    def __init__(
        self,
        context: ModelContext,
        *,
        placement: Placement,
        folder: ServedFolder,
        builds: Builds,
        chains: Chains,
        calibrator: Calibrator,
        config: Config,
    ) -> None:
        self._context = context
        self._executor = context.executor
        self._table = context.table
        self._pending_loads = context.pending_loads
        self._marks = context.marks
        self._placement = placement
        self._sources = context.sources
        self._folder = folder
        self._builds = builds
        self._chains = chains
        self._calibrator = calibrator
        self._dispatcher = context.dispatcher
        self._config = config
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        # Invariant: no look waits while a step is under way, or when the thread has not begun or has ended.
        self._is_in_step = True
        self._looks: list[Callable[[], None]] = []
        self._look_lock = threading.Lock()
        self.has_settled = threading.Event()

    def start(self) -> None:
        """Start the thread: it loads the versions of the folder, then sets `has_settled`."""
        self._thread = threading.Thread(target=self._run, name="edge-loader", daemon=True)
        self._executor.begin()
        self._thread.start()

    def stop_loads(self) -> None:
        """Load nothing more of the folder: the daemon stops, and may be killed for being slow. Idempotent."""
        self._folder.stop()
        self._marks.close()

    def close(self, limit_s: float | None = None) -> None:
        """Stop after the step under way, and refuse the others. Servables stay open. Idempotent.

        limit_s: how long to wait for that step, None for its end; `is_running` is true while one goes on.
        """
        self.stop_loads()
        self._is_stopping = True
        self._executor.wake()
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None
        self._executor.end()
        if self._thread is None:
            self._placement.close_loads(limit_s)

    @property
    def is_running(self) -> bool:
        """Whether its thread, or a load, has begun and not ended."""
        return self._thread is not None or self._placement.has_loads

    def load(self, model: str, number: int | None, done: Done, override: Override = NO_OVERRIDE) -> None:
        """Load (again) a version, or those its policy selects; `done` gets None or why not, on the loader's thread.

        override: laid over the model by the caller, until it is loaded again.
        """
        self._submit(done, lambda: self._load_asked(model, number, override))

    def take_in(self, keep: Callable[[], tuple[str, Path]], override: Override, done: Done, *, at_once: bool) -> None:
        """Serve a model that a door receives, to that door alone; `done` as of `load`.

        keep: writes its files, and returns its name and folder; called on the loader's thread. at_once: load it now,
        else on its first request.
        """
        self._submit(done, lambda: self._take_in(keep, override, at_once))

    def give_up(self, model: str, done: Done) -> None:
        """Unload and forget a model that `take_in` brought; `done` as of `load`."""
        self._submit(done, lambda: self._folder.give_up(model))

    def load_variant(self, model: str, precision: str, done: Done) -> None:
        """Have a model answer by its variant at a precision, "" by itself again; `done` as of `load`.

        Versions without such a variant, those that keep sequences, and a model whose settings name its precision stay
        as they are.
        """
        self._submit(done, lambda: self._load_variant(model, precision))

    def unload(self, model: str, number: int | None, done: Done, *, takes_steps: bool = False) -> None:
        """Unload a version, or all of a model; it stays away until `load` or until its files change.

        takes_steps: with a pipeline, unload the models that were loaded for it alone.
        """
        self._submit(done, lambda: self._unload_asked(model, number, takes_steps))

    def forget_overrides(self) -> None:
        """Remove the files that callers brought. Call it after `close`, when no model is loaded any more."""
        self._folder.close()

    def load_suspects(self) -> None:
        """Load the versions that ended the daemon before. Call it once, when everything else is served."""
        self._executor.submit(self._folder.load_suspects)

    def look(self, done: Callable[[], None]) -> None:
        """Read the folder now, and call `done` once the table lists the versions copied there a moment ago.

        While a step is under way, which may take minutes, `done` is called at once.
        """
        with self._look_lock:
            if is_free := not self._is_in_step:
                self._looks.append(done)
        if is_free:
            self._executor.wake()
        else:
            done()

    def rescan(self) -> None:
        """Look at the folder now (SIGHUP)."""
        self._executor.submit(self._folder.poll)

    # ---- updates ----------------------------------------------------------------------------------------------------

    def swap(self, folder: ModelFolder, before_alone: Callable[[], None] = lambda: None) -> Swap:
        """Load a release, the folder's only version, beside the versions of its model that serve. Waits.

        From here on the model is an update's: the models folder's model of that name is ignored, and reported.
        before_alone: called on the loader's thread where memory holds only one of the two, between unloading the old
        one and loading the new one; an EdgeRuntimeError from it brings the old one back. Raises LoadFailed (all is as
        before), Draining, and the errors of `before_alone`.
        """
        from edge_runtime.models.swap import Swap

        swap = Swap(folder, self._context, self._placement, self._folder, self._calibrator)
        self._executor.call(lambda: swap.load(before_alone))
        return swap

    def holds_both(self, folder: ModelFolder) -> bool:
        """Whether memory holds a release beside the serving versions of its model, by the sizes of files. Waits."""
        (version,) = folder.versions.values()
        return self._executor.call(lambda: self._placement.has_room(version, keeping=version.model))

    def reserve(self, models: Iterable[str]) -> None:
        """Ignore these names in the models folder: updates serve them. Call it before `start`.

        Updates may serve others too: the list of names is the second record's, which may be a commit behind.
        """
        self._sources.reserved.update(models)
        self._table.awaits_updates = True

    def expect_no_more(self) -> None:
        """From now on a model that updates have not served is like any other: unknown, or waited for. Waits."""
        self._table.awaits_updates = False
        with contextlib.suppress(Draining):
            self._executor.call(self._end_expected)

    def serve_release(self, folder: ModelFolder) -> None:
        """Serve a release, the folder's only version, and nothing else of its model. Waits; before `start`, works here.

        Raises LoadFailed (the model stays an update's, with nothing or the version that served before), Draining.
        """
        self._executor.call(lambda: self._serve_release(folder))

    def note(self, status: VersionStatus) -> None:
        """Record the status of a release that is not loaded, or not yet. Waits; does nothing once the loader ended."""
        with contextlib.suppress(Draining):
            self._executor.call(lambda: self._note(status))

    def release_away(self, model: str) -> None:
        """Unload a model that is not an update's any more; the models folder's model of that name comes back. Waits.

        Raises LoadFailed (a swap is under way), Draining.
        """
        self._executor.call(lambda: self._release_away(model))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._folder.begin)
        self._table.is_complete = True
        self._take_changes()
        self._is_in_step = False
        while not self._is_stopping:
            step = self._next_step()
            self._begin_step()
            # First, so that a step finds all done that came before it.
            self._guarded(self._folder.take_failures)
            self._guarded(lambda: self._builds.take_news(self._placement, self._folder))
            self._guarded(self._placement.end_left)
            self._guarded(self._load_wanted)
            self._guarded(step)
            self._take_changes()
            self._is_in_step = False
        self._begin_step()

    def _take_changes(self) -> None:
        """Load versions whose models have changed that they ask; then the start may be over."""
        self._guarded(lambda: self._chains.take_news(self._placement, self._folder))
        if not self._folder.is_starting:
            self.has_settled.set()

    def _begin_step(self) -> None:
        """End the looks that were asked for: from here on a look does not wait."""
        with self._look_lock:
            self._is_in_step = True
            looks, self._looks = self._looks, []
        if looks:
            self._guarded(self._folder.look)
        for done in looks:
            self._guarded(done)

    def _next_step(self) -> Callable[[], None]:
        """Return the next submitted step, else a step of calibration or a look at the folder."""
        step = self._executor.next(IDLE_S if self._calibrator.has_work else POLL_S)
        if step is not None:
            return step
        if self._calibrator.has_work and self._dispatcher.is_idle() and not self._placement.is_loading:
            return self._calibrator.step
        return self._poll_if_watching

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("a step of the loader failed")

    def _poll_if_watching(self) -> None:
        if self._config.watch:
            self._folder.poll()

    def _load_wanted(self) -> None:
        """Load the versions on demand that requests asked for."""
        for model, number in self._table.take_wanted():
            if self._is_stopping:
                return
            folder = self._sources.folder_of(model)
            if folder is None or number not in folder.versions or self._table.find(model, number) is not None:
                self._pending_loads.end(model, None)
            else:
                self._placement.load_or_report(folder, folder.versions[number])

    # ---- what was asked for -----------------------------------------------------------------------------------------

    def _check_may_ask(self) -> None:
        """Raise LoadsNotAsked where the configuration forbids loads and unloads on request."""
        if self._config.model_control in {"none", "poll"}:
            raise LoadsNotAsked(
                "explicit model load / unload is not allowed if polling is enabled: model_control is "
                f"{self._config.model_control!r} here; serve with --model-control-mode explicit, or without that option"
            )

    def _load_asked(self, model: str, number: int | None, override: Override) -> None:
        self._check_may_ask()
        self._sources.check_free(model)
        if model in self._sources.releases:
            if override != NO_OVERRIDE:
                raise Forbidden(f"model {model!r} is a signed release: it takes no config, and no files")
            self._load_release_again(model, number)
            return
        if self._folder.is_received(model):
            if override != NO_OVERRIDE:
                raise Forbidden(f"model {model!r} was sent by a detector: it takes no config, and no files")
            self._load_from_folder(model, number)
            return
        with self._folder.laid_over(model, override):
            self._load_from_folder(model, number)

    def _load_from_folder(self, model: str, number: int | None) -> None:
        folder, selected = self._folder.select_asked(model, number)
        for each in selected:
            self._folder.let_come(model, each)
            self._placement.load_asked(folder, folder.versions[each])
        if number is None:
            for servable in self._table.live_of(model):
                is_step = bool(self._table.users(model, servable.number, by_number=True))
                if servable.number not in selected and not is_step:
                    self._placement.unload(model, servable.number, forget=servable.number not in folder.versions)

    def _load_variant(self, model: str, precision: str) -> None:
        self._sources.check_free(model)
        folder = self._sources.folder_of(model)
        if folder is None or folder.settings.precision is not None:
            return
        wanted = replace(folder, settings=replace(folder.settings, precision=precision or None))
        failed: LoadFailed | None = None
        for servable in self._table.live_of(model):
            version = folder.versions.get(servable.number)
            is_fixed = version is None or servable.sequences is not None or servable.chain is not None
            if version is None or is_fixed or servable.settings.precision == wanted.settings.precision:
                continue
            if precision and not any(variant_of(name) == precision for name in version.files):
                continue
            try:
                self._placement.load_asked(wanted, version)
            except LoadFailed as error:  # the other versions may have theirs
                failed = failed or error
        if failed is not None:
            raise failed

    def _take_in(self, keep: Callable[[], tuple[str, Path]], override: Override, at_once: bool) -> None:
        model, place = keep()
        self._folder.take_in(model, place, override)
        if at_once and not self._table.is_answering(model, None):
            self._load_from_folder(model, None)

    def _load_release_again(self, model: str, number: int | None) -> None:
        """Load a release again that was unloaded by hand; another one comes by an update only."""
        folder = self._sources.releases[model]
        (version,) = folder.versions.values()
        if self._table.is_answering(model, None) or number not in {None, version.number}:
            raise LoadFailed(
                f"model {model!r} is served from the update repository, version {version.number}; "
                "change it with: edge-runtime update check, apply or rollback"
            )
        self._placement.load_asked(folder, version)

    def _unload_asked(self, model: str, number: int | None, takes_steps: bool = False) -> None:
        self._check_may_ask()
        self._sources.check_free(model)
        known = [status for status in self._table.statuses_of(model) if number in {None, status.number}]
        if not known:
            raise ModelNotFound(f"no model {model!r}" + (f" version {number}" if number is not None else ""))
        for status in known:
            if users := self._table.users(model, status.number):
                raise LoadFailed(
                    f"model {model!r} version {status.number} is a step of the pipeline {', '.join(map(repr, users))}; "
                    "unload that first"
                )
        chains = [each.chain for each in self._table.live_of(model) if each.chain is not None]
        for status in known:
            if model not in self._sources.releases:
                self._folder.hold_back(model, status.number)
            self._placement.unload(model, status.number, forget=False)
        for step in sorted({each.model for chain in chains if takes_steps for each in chain.asks}):
            if not self._folder.is_asked_for(step):
                with contextlib.suppress(LoadFailed, ModelNotFound):  # another pipeline asks it, or it is gone
                    self._unload_asked(step, None, takes_steps)

    def _serve_release(self, folder: ModelFolder) -> None:
        model = folder.name
        (version,) = folder.versions.values()
        self._sources.check_free(model)
        self._sources.releases[model] = folder
        if self._table.awaits_updates:
            self._table.starting |= {(model, version.number)}
        known = [status.number for status in self._table.statuses_of(model)]
        if folder.settings.on_demand:
            self._placement.load_or_wait(folder, version)
        else:
            self._placement.load_unmarked(folder, version)
        for number in known:
            if number != version.number:
                self._placement.unload(model, number, forget=True)

    def _note(self, status: VersionStatus) -> None:
        self._table.set_status(status)
        is_update = self._table.awaits_updates and self._sources.is_managed(status.model)
        if status.state is VersionState.LOADING and is_update:
            self._table.starting |= {(status.model, status.number)}

    def _end_expected(self) -> None:
        self._table.starting -= {key for key in self._table.starting if self._sources.is_managed(key[0])}

    def _release_away(self, model: str) -> None:
        self._sources.check_free(model)
        if not self._sources.is_managed(model):
            return
        self._sources.releases.pop(model, None)
        self._sources.reserved.discard(model)
        for status in self._table.statuses_of(model):
            self._placement.unload(model, status.number, forget=True)
        self._folder.catch_up(model)

    def _submit(self, done: Done, step: Callable[[], None]) -> None:
        """Queue a step that a caller waits for. done: called with its end."""
        self._executor.submit(lambda: self._answer(done, step), done)

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
