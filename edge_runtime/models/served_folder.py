"""The models folder as it is served: loads versions that come or change there, and unloads those that go.

Owns: which versions of the folder its policy selects, which were held back by hand, the settings that callers and doors
laid over it, the paths reported as not served, and the order of the start's loads. Models that updates serve are none
of it. Thread: the loader's, but `stop`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from edge_runtime.config.settings import Config
from edge_runtime.errors import Forbidden, LoadFailed, ModelNotFound
from edge_runtime.models.context import ModelContext
from edge_runtime.models.folder import ModelFolder, Problem, is_owned_name, select_versions
from edge_runtime.models.model_table import VersionState, VersionStatus
from edge_runtime.models.overrides import NO_OVERRIDE, Override, OverrideFiles
from edge_runtime.models.placement import Placement
from edge_runtime.models.watch import VersionChange, Watcher

log = logging.getLogger(__name__)

NOT_ASKED_FOR = "not loaded: nobody asked for it"
"""The reason of a version that lies in the folder, where models are not loaded by themselves."""


class ServedFolder:
    """Keeps the live table true to the models folder, but for the models that updates serve.

    is_starting: until every model that `begin` found is ready, failed, on demand or a suspect.
    watcher None: the folder is not served at all. config: says which models the start loads, and whether changes of
    the folder are served without anybody asking; else they are listed.
    """

    def __init__(
        self,
        watcher: Watcher | None,
        context: ModelContext,
        placement: Placement,
        *,
        override_files: OverrideFiles,
        config: Config,
    ) -> None:
        self._watcher = watcher
        self._sources = context.sources
        self._table = context.table
        self._placement = placement
        self._marks = context.marks
        self._override_files = override_files
        self._config = config
        self._follows = config.follows_folder
        self._laid_over: dict[str, tuple[Override, Path | None]] = {}
        self._received: set[str] = set()
        self._is_stopping = False
        self._held_back: set[tuple[str, int]] = set()
        self._asked: set[str] = set()
        self._missed: dict[str, set[int | None]] = {}
        self._reported: set[str] = set()
        # The start: loads that have not begun, the cheapest first; by model, those that have not ended; what is last.
        self._waiting: list[tuple[str, int]] = []
        self._left: dict[str, set[int]] = {}
        self._pipelines: list[str] = []
        self._suspects: list[str] = []
        self._may_load_suspects = False
        self.is_starting = True

    def stop(self) -> None:
        """Load no further model: the daemon stops. Thread: any."""
        self._is_stopping = True

    def close(self) -> None:
        """Remove the files that callers brought. Call it when no model is loaded any more."""
        self._override_files.close()

    # ---- beside updates ----------------------------------------------------------------------------------------------

    def catch_up(self, model: str) -> None:
        """Take the changes of a model's folder that were missed while updates served the model."""
        changed = self._missed.pop(model, set())
        if self._watcher is not None:
            self._reconcile(model, changed)

    def take_failures(self) -> None:
        """Replace each serving version that failed by the newest older one that loads."""
        for model in self._placement.take_failures():
            folder = self._sources.in_folder(model)
            if folder is not None and not self._sources.is_managed(model):
                self._fall_back(folder, select_versions(folder.versions, folder.settings.versions))

    # ---- the models folder -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the folder for the first time, and begin to load its models side by side, cheap ones first.

        Pipelines come when all others have ended, and those that ended the daemon before by `load_suspects`.
        """
        if self._watcher is None:
            self.is_starting = False
            return
        try:
            self._begin(self._watcher)
        except BaseException:
            self.is_starting = False
            raise

    def _begin(self, watcher: Watcher) -> None:
        changes = watcher.poll()
        self._report_problems(watcher)
        found = watcher.scan.models
        asked = {name for name in found if self._config.is_loaded_at_start(name)}
        for name in found.keys() - asked:
            self._list(name)
        self._suspects = [name for name, folder in found.items() if name in asked and self._marks.is_suspect(folder)]
        for model in self._suspects:
            for number in select_versions(found[model].versions, found[model].settings.versions):
                reason = "waits for all others: the daemon ended while it was loaded"
                self._expect(model, number, reason)
        self._asked |= asked
        asked.difference_update(self._suspects)
        self._begin_loads({change.model for change in changes if change.model in asked})

    def load_suspects(self) -> None:
        """Load the models that `begin` left out, when all others have ended.

        One that ends the daemon again costs the others only a restart.
        """
        self._may_load_suspects = True
        if self.is_starting:
            return
        suspects, self._suspects = self._suspects, []
        self._table.starting -= {key for key in self._table.starting if key[0] in suspects}
        for model in suspects:
            if not self._is_stopping:
                self._reconcile(model, set())

    def poll(self) -> None:
        """Read the folder once, and load and unload versions by its changes."""
        if self._watcher is not None:
            changes = self._watcher.poll()
            self._report_problems(self._watcher)
            self._take(changes)

    def look(self) -> None:
        """Read the folder once, so that the table lists the versions copied there a moment ago; load nothing."""
        if not self._follows:
            self.poll()
        elif self._watcher is not None:
            self._watcher.look()
            self._report_problems(self._watcher)

    def select_asked(self, model: str, number: int | None) -> tuple[ModelFolder, Sequence[int]]:
        """Return the model as it lies in the folder now, and its versions that a person asks for.

        Raises ModelNotFound, LoadFailed (its policy selects none).
        """
        if self._watcher is None:
            raise ModelNotFound(
                f"model {model!r} is not a release of the update repository, and no folder is served while "
                "update.require_signed holds; see: edge-runtime update status"
            )
        self._take([change for change in self._poll_asked(self._watcher, model) if change.model != model])
        folder = self._sources.in_folder(model)
        if folder is None or (number is not None and number not in folder.versions):
            what = "it" if folder is None else f"version {number}"
            raise ModelNotFound(
                f"failed to load '{model}', failed to poll from model repository: {what} is not in the models folder"
            )
        selected = (number,) if number is not None else select_versions(folder.versions, folder.settings.versions)
        if not selected:
            raise LoadFailed(f"model {model!r}: its version policy selects none of {sorted(folder.versions)}")
        return folder, selected

    @contextmanager
    def laid_over(self, model: str, override: Override) -> Iterator[None]:
        """Lay a caller's settings and files over a model, for good unless the load inside fails.

        Raises Forbidden (only releases are served), LoadFailed (files cannot be kept).
        """
        if self._watcher is None:
            if override != NO_OVERRIDE:
                raise Forbidden("only signed releases are served here (require_signed): no config, and no files")
            yield
            return
        before = self._laid_over.get(model, (NO_OVERRIDE, None))
        place = self._override_files.write(model, override.files) if override.files else None
        self._watcher.lay_over(model, override, place)
        try:
            yield
        except BaseException:
            self._watcher.lay_over(model, *before)
            self._watcher.poll(at_once=model)
            if place is not None:
                self._override_files.remove(place)
            raise
        self._laid_over[model] = override, place
        if before[1] is not None:
            self._override_files.remove(before[1])

    def is_received(self, model: str) -> bool:
        """Whether a door brought this model; the door keeps its files."""
        return model in self._received

    def take_in(self, model: str, place: Path, override: Override) -> None:
        """Serve a model only to the door that keeps its folder. With `on_demand` it loads on its first request.

        Raises Forbidden: only signed releases are served.
        """
        if self._watcher is None:
            raise Forbidden("only signed releases are served here (require_signed)")
        self._received.add(model)
        self._table.closed |= {model}
        self._watcher.lay_over(model, override, place)
        self._take(self._watcher.poll(at_once=model))

    def give_up(self, model: str) -> None:
        """Unload and forget a model that `take_in` brought; its folder is its door's to remove."""
        if self._watcher is None or model not in self._received:
            return
        self._received.discard(model)
        self._watcher.lay_over(model, NO_OVERRIDE, None)
        self._take(self._watcher.poll(at_once=model))
        self._table.closed -= {model}
        self._placement.forget(model)

    def hold_back(self, model: str, number: int) -> None:
        """Keep a version that was unloaded by hand unloaded, until a person loads it or its files change."""
        self._held_back.add((model, number))
        self._asked.discard(model)

    def let_come(self, model: str, number: int) -> None:
        """End `hold_back`."""
        self._held_back.discard((model, number))
        self._asked.add(model)

    def is_asked_for(self, model: str) -> bool:
        """Whether the folder, the start or a person asks for a model; False where only pipelines do."""
        return self._follows or model in self._asked

    def settle(self, model: str) -> None:
        """Unload the versions that a model's policy does not select any more.

        Models that a pipeline brings with it are none of the folder's.
        """
        if self._watcher is not None and model not in self._sources.releases and not is_owned_name(model):
            self._reconcile(model, set())

    # ---- the start's loads -------------------------------------------------------------------------------------------

    def _expect(self, model: str, number: int, reason: str = "") -> None:
        """Show a version as one that the start loads."""
        self._table.set_status(VersionStatus(model, number, VersionState.LOADING, reason))
        self._table.starting |= {(model, number)}

    def _begin_loads(self, models: Iterable[str]) -> None:
        costs: dict[tuple[str, int], tuple[int, int]] = {}
        for model in sorted(models):
            folder = self._sources.in_folder(model)
            if folder is None:
                continue
            if self._sources.is_managed(model):
                self._missed.setdefault(model, set()).add(None)
                continue
            selected = select_versions(folder.versions, folder.settings.versions)
            numbers = {each for each in selected if self._placement.loads_at_once(folder, folder.versions[each])}
            for number in numbers:
                self._expect(model, number)
            if folder.is_pipeline:
                self._pipelines.append(model)
                continue
            self._left[model] = numbers
            costs.update({(model, each): self._placement.cost(folder, folder.versions[each]) for each in numbers})
        for model in [model for model, numbers in self._left.items() if not numbers]:
            self._reconcile(model, set())
        self._waiting = sorted(costs, key=lambda key: (costs[key], key))
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin as many loads as may run at once. After the end of the last one, load the pipelines."""
        while self._waiting and not self._is_stopping:
            model, number = self._waiting[0]
            folder = self._sources.in_folder(model)
            version = folder.versions.get(number) if folder is not None else None
            if folder is not None and version is not None and model in self._left:
                try:
                    if not self._placement.begin_load(folder, version, partial(self._end_load, model, number)):
                        return
                except LoadFailed:  # which its turn to be published says
                    self._publish(model, number)
            self._waiting.pop(0)
        if self.is_starting and not (self._left or self._is_stopping):
            self.is_starting = False
            for model in self._pipelines:
                self._reconcile(model, set())
            # One that waits for a build is like any that comes later.
            self._table.starting -= {key for key in self._table.starting if key[0] in self._pipelines}
            if self._may_load_suspects:
                self.load_suspects()

    def _end_load(self, model: str, number: int) -> None:
        """Publish the result of a load, and begin the next ones."""
        try:
            self._publish(model, number)
        finally:
            if model not in self._left:  # else it waits for the model's other versions
                self._placement.drop_load(model, number)  # it was unloaded meanwhile, or is an update's by now
            self._begin_next()

    def _publish(self, model: str, number: int) -> None:
        """Take the loads of a model into the table once all have ended, the newest first."""
        left = self._left.get(model, set())
        left.discard(number)
        if left or model not in self._left:
            return
        if self._sources.is_managed(model):
            del self._left[model]
            self._missed.setdefault(model, set()).add(None)
        else:
            self._reconcile(model, set())

    # ---- private ----------------------------------------------------------------------------------------------------

    def _poll_asked(self, watcher: Watcher, model: str) -> list[VersionChange]:
        """Read the folder, and take at once the files of a model that a person asks for, and its steps that are new."""
        changes = watcher.poll(at_once=model)
        seen, left = set[str](), [model]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in watcher.scan.models:
                changes += watcher.poll(at_once=name)
            if (folder := watcher.scan.models.get(name)) is not None:
                left += self._placement.asked_models(folder)
        return changes

    def _is_pipeline(self, model: str) -> bool:
        """Whether a model is a pipeline: it is loaded after the models of its steps."""
        folder = self._sources.in_folder(model)
        return folder is not None and folder.is_pipeline

    def _report_problems(self, watcher: Watcher) -> None:
        """Log each problem of the folder once, and list in the table those that are of no version."""
        scan = watcher.scan
        problems = [*scan.problems, *self._ignored(scan.models.values())]
        told = {str(each): each for each in problems if not each.is_of_version or self._is_untold(each)}
        for text in sorted(told.keys() - self._reported):
            log.warning("not served: %s", text, extra={"model": told[text].model})
        self._reported = set(told)
        left = [each for each in problems if each.model and not each.is_of_version]
        told_of = {each.model for each in left}
        self._table.not_served = (*left, *(each for each in watcher.unsettled() if each.model not in told_of))

    def _is_untold(self, problem: Problem) -> bool:
        """Whether a version's problem must be logged here: no failed load has logged it, and no coming load will."""
        folder = self._sources.in_folder(problem.model)
        if folder is None or problem not in folder.all_problems():
            return False  # it has not settled: the load comes then
        statuses = self._table.statuses_of(problem.model)
        is_loading = any(status.state is VersionState.LOADING for status in statuses)
        return bool(statuses) and not is_loading and not any(problem.reason in status.reason for status in statuses)

    def _ignored(self, folders: Iterable[ModelFolder]) -> Iterator[Problem]:
        for folder in folders:
            release = self._sources.releases.get(folder.name)
            if release is not None:
                (number,) = release.versions
                yield Problem(
                    folder.path, f"ignored: release {number} of the update repository serves this name", folder.name
                )

    def _take(self, changes: list[VersionChange]) -> None:
        for change in changes:
            for key in [key for key in self._held_back if key[0] == change.model]:
                if change.version in {None, key[1]}:
                    self._held_back.discard(key)
        models = dict.fromkeys(change.model for change in changes)
        for model in sorted(models, key=self._is_pipeline):
            if self._is_stopping:
                return
            changed = {change.version for change in changes if change.model == model}
            if not (self._follows or model in self._received):
                self._list(model)
            elif self._sources.is_managed(model):
                self._missed.setdefault(model, set()).update(changed)
            else:
                self._reconcile(model, changed)

    def _list(self, model: str) -> None:
        """Set the status of each version of a model from the folder, without loading or unloading any."""
        folder = self._sources.in_folder(model)
        numbers = set(folder.versions) if folder is not None else set()
        for status in self._table.statuses_of(model):
            if status.number not in numbers and status.reason == NOT_ASKED_FOR:
                self._table.forget(model, status.number)
        for number in numbers:
            if self._table.status(model, number) is None:
                self._table.set_status(VersionStatus(model, number, VersionState.UNLOADED, NOT_ASKED_FOR))

    def _reconcile(self, model: str, changed: set[int | None]) -> None:
        """Make the live versions of one model those that its policy selects. `changed` None: its settings changed."""
        self._left.pop(model, None)
        folder = self._sources.in_folder(model)
        known = self._table.statuses_of(model)
        if folder is None:
            for status in known:
                self._placement.unload(model, status.number, forget=True)
            return
        selected = select_versions(folder.versions, folder.settings.versions)
        for number in sorted(selected, reverse=True):
            if (model, number) in self._held_back:
                continue
            is_new = self._table.find(model, number) is None
            if is_new or number in changed or None in changed:
                self._placement.load_or_wait(folder, folder.versions[number])
        has_failed = any(self._table.has_failed(model, number) for number in selected)
        if has_failed:
            self._fall_back(folder, selected)
        for status in known:
            is_gone = status.number not in folder.versions
            is_step = bool(self._table.users(model, status.number, by_number=True))
            if is_gone or (status.number not in selected and not has_failed and not is_step):
                self._placement.unload(model, status.number, forget=is_gone)

    def _fall_back(self, folder: ModelFolder, selected: Sequence[int]) -> None:
        """Load the newest older version that loads, where a selected one failed and no version serves."""
        if folder.settings.versions.specific or self._table.live_of(folder.name):
            return
        for number in sorted(set(folder.versions) - set(selected), reverse=True):
            self._placement.load_or_wait(folder, folder.versions[number])
            if self._table.find(folder.name, number) is not None:
                log.warning("an older version serves", extra={"model": folder.name, "version": number})
                return
            if self._table.is_being_made(folder.name, number):
                return  # one more build at most: each takes minutes
