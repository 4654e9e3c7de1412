"""The models folder as it is to be served: which versions its policy selects, and what lies there and is not served.

Owns: what was held back by hand, what changed while updates serve a model in the folder's place, and what was reported.
Loads nothing itself. Thread: the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from edge_runtime.errors import LoadFailed, ModelNotFound
from edge_runtime.repository.folder import ModelFolder, Problem
from edge_runtime.repository.version_policy import select_versions
from edge_runtime.repository.watch import Change, Watcher
from edge_runtime.serving.exchange_bench import ExchangeBench
from edge_runtime.serving.lifecycle import Lifecycle
from edge_runtime.serving.servables import Servables

log = logging.getLogger(__name__)


class FolderModels:
    """Keeps the live table true to the models folder, but for the models that updates serve.

    watcher None: the folder is not served at all.
    """

    def __init__(
        self,
        watcher: Watcher | None,
        servables: Servables,
        lifecycle: Lifecycle,
        bench: ExchangeBench,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._watcher = watcher
        self._servables = servables
        self._lifecycle = lifecycle
        self._bench = bench
        self._is_stopping = is_stopping
        self._held_back: set[tuple[str, int]] = set()
        self._missed: dict[str, set[int | None]] = {}
        self._reported: set[str] = set()

    def find(self, model: str) -> ModelFolder | None:
        """A model as it lies in the folder, if it does."""
        return self._watcher.scan.models.get(model) if self._watcher is not None else None

    def poll(self) -> None:
        """Look at the folder once, and load and unload what that asks for."""
        if self._watcher is not None:
            changes = self._watcher.poll()
            self._report_problems(self._watcher)
            self._take(changes)

    def select_asked(self, model: str, number: int | None) -> tuple[ModelFolder, Sequence[int]]:
        """The model as it lies there now, and its versions that somebody asks for by hand.

        Raises ModelNotFound, LoadFailed (its policy selects none).
        """
        if self._watcher is None:
            raise ModelNotFound(
                f"model {model!r} is no release of the update repository, and the models folder is not served; "
                "see: edge-runtime update status"
            )
        changes = self._watcher.poll(at_once=model)
        self._take([change for change in changes if change.model != model])
        folder = self.find(model)
        if folder is None or (number is not None and number not in folder.versions):
            what = f"model {model!r}" if folder is None else f"model {model!r} version {number}"
            raise ModelNotFound(f"{what} is not in the models folder")
        selected = (number,) if number is not None else select_versions(folder.versions, folder.settings.versions)
        if not selected:
            raise LoadFailed(f"model {model!r}: its version policy selects none of {sorted(folder.versions)}")
        return folder, selected

    def hold_back(self, model: str, number: int) -> None:
        """A version was unloaded by hand: it stays away until it is asked for, or its files change."""
        self._held_back.add((model, number))

    def let_come(self, model: str, number: int) -> None:
        """A version was asked for by hand."""
        self._held_back.discard((model, number))

    def catch_up(self, model: str) -> None:
        """Updates do not serve a model any more: take what changed in the folder meanwhile."""
        changed = self._missed.pop(model, set())
        if self._watcher is not None:
            self._reconcile(model, changed)

    def settle(self, model: str) -> None:
        """A version came that others answered for: what its policy does not select leaves."""
        if self._watcher is not None:
            self._reconcile(model, set())

    # ---- private ----------------------------------------------------------------------------------------------------

    def _report_problems(self, watcher: Watcher) -> None:
        """Say once what lies in the folder and is not served."""
        scan = watcher.scan
        problems = set(map(str, [*scan.problems, *self._ignored(scan.models.values())]))
        for problem in sorted(problems - self._reported):
            log.warning("not served: %s", problem)
        self._reported = problems

    def _ignored(self, folders: Iterable[ModelFolder]) -> Iterator[Problem]:
        """A model has one source: its folder is passed over while updates serve it (DESIGN 6)."""
        for folder in folders:
            release = self._bench.releases.get(folder.name)
            if release is not None:
                (number,) = release.versions
                yield Problem(folder.path, f"ignored: release {number} of the update repository serves this name")

    def _take(self, changes: list[Change]) -> None:
        for change in changes:
            for key in [key for key in self._held_back if key[0] == change.model]:
                if change.version in {None, key[1]}:
                    self._held_back.discard(key)
        models = dict.fromkeys(change.model for change in changes)
        for model in models:
            if self._is_stopping():
                return
            changed = {change.version for change in changes if change.model == model}
            if self._bench.is_managed(model):
                self._missed.setdefault(model, set()).update(changed)
            else:
                self._reconcile(model, changed)

    def _reconcile(self, model: str, changed: set[int | None]) -> None:
        """Make the live versions of one model those that its policy selects. `changed` None: its settings changed."""
        folder = self.find(model)
        known = self._servables.standings_of(model)
        if folder is None:
            for standing in known:
                self._lifecycle.unload(model, standing.number, forget=True)
            return
        selected = select_versions(folder.versions, folder.settings.versions)
        for number in sorted(selected, reverse=True):
            if (model, number) in self._held_back:
                continue
            is_new = self._servables.find(model, number) is None
            if is_new or number in changed or None in changed:
                self._lifecycle.load_or_wait(folder, folder.versions[number])
        has_failed = any(self._servables.has_failed(model, number) for number in selected)
        if has_failed:
            self._fall_back(folder, selected)
        for standing in known:
            is_gone = standing.number not in folder.versions
            if is_gone or (standing.number not in selected and not has_failed):
                self._lifecycle.unload(model, standing.number, forget=is_gone)

    def _fall_back(self, folder: ModelFolder, selected: Sequence[int]) -> None:
        """A version that was to be served failed: what serves goes on; where nothing does, the newest that loads."""
        if folder.settings.versions.specific or self._servables.live_of(folder.name):
            return
        for number in sorted(set(folder.versions) - set(selected), reverse=True):
            self._lifecycle.load_or_wait(folder, folder.versions[number])
            if self._servables.find(folder.name, number) is not None:
                log.warning("an older version serves", extra={"model": folder.name, "version": number})
                return
            if self._servables.is_building(folder.name, number):
                return  # one more engine at most: each takes minutes
