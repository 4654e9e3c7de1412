"""Changes of the models folder, reported when they have settled.

Owns: the rule that a state of a version (its absence included) counts when it was the same for `settle_s`. Never loads
and starts no thread: the loader calls `poll()` about each half second and acts on its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.clock import Clock
from edge_runtime.errors import DecodeFailed
from edge_runtime.models.folder import ModelFolder, Problem, Scan, VersionFolder
from edge_runtime.models.overrides import NO_OVERRIDE, Override
from edge_runtime.models.walk import scan

SETTLE_S = 2.0
"""A copy that pauses for longer is taken half-done, fails to load, and is taken again when it continues."""


class VersionChange(Struct, frozen=True):
    """One settled change. version None: the model's settings (`model.toml`) changed, appeared or went."""

    kind: Literal["appeared", "changed", "removed"]
    model: str
    version: int | None


_Key = tuple[str, int]
_SETTINGS = 0
"""A model's settings, in the place of a version's number (1 or more); sorts before those."""

_State = tuple[object, ...]
"""It must stay the same to count as settled; an absent version has the state None."""


class Watcher:
    """Polls the models folder and the places of named models; no inotify, so that any file system will do.

    root: None where only named models are. named: a model's folder or file, by its name (walk.py).

    The first poll takes everything at once: the start waits for no file, and a version that was still being copied is
    taken again when it settles. Thread: one caller at a time.

    While the root, a model or a version folder cannot be read (a disk gone, a permission), its versions stay taken:
    serving goes on, and `scan.problems` says so.
    """

    def __init__(
        self, root: Path | None, clock: Clock, settle_s: float = SETTLE_S, *, named: Mapping[str, Path] | None = None
    ) -> None:
        self._root = root
        self._named = dict(named or {})
        self._configured = dict(self._named)
        self._overrides: dict[str, Override] = {}
        self._clock = clock
        self._settle_s = settle_s
        self._is_first = True
        self._seen = Scan()
        self._settings: dict[str, ModelFolder] = {}
        self._versions: dict[_Key, VersionFolder] = {}
        self._waiting: dict[_Key, tuple[_State | None, float]] = {}

    @property
    def scan(self) -> Scan:
        """Return the settled versions and settings, with the problems of the latest poll.

        It has a model when it has a version of it. The versions to serve are chosen from this.
        """
        versions: dict[str, dict[int, VersionFolder]] = {name: {} for name in sorted(self._settings)}
        for (name, number), version in sorted(self._versions.items()):
            versions[name][number] = version
        models = {name: self._laid_over(self._settings[name], found) for name, found in versions.items()}
        return Scan(models, self._seen.problems, self._seen.unreadable)

    def lay_over(self, model: str, override: Override, place: Path | None) -> None:
        """Lay a caller's settings over a model's, and take it from another place than its own, from the next poll on.

        place: where the override's files are; None: the model's own place.
        """
        self._overrides[model] = override
        if override == NO_OVERRIDE:
            del self._overrides[model]
        if place is not None:
            self._named[model] = place
        elif model in self._configured:
            self._named[model] = self._configured[model]
        else:
            self._named.pop(model, None)

    def look(self) -> None:
        """Scan once, and take nothing: `scan.problems` and `unsettled` hold the present state."""
        self._seen = scan(self._root, self._seen, self._named)

    def unsettled(self) -> Iterator[Problem]:
        """Yield each model of the latest scan of which nothing was taken yet."""
        for name, model in self._seen.models.items():
            if name not in self._settings:
                reason = f"was found just now: it is taken when its files have not changed for {self._settle_s:g} s"
                yield Problem(model.path, reason, name)

    def poll(self, at_once: str | None = None) -> list[VersionChange]:
        """Scan once. Return the changes settled since the last call, by model, its settings before its versions.

        at_once: a model whose files are taken without waiting: a request to load it says that they are complete. Each
        change is returned once.
        """
        now = self._clock.monotonic_s()
        self.look()
        taken, found = self._taken_states(), self._found_states()
        settled: list[_Key] = []
        for key in sorted(found.keys() | taken.keys()):
            if found.get(key) == taken.get(key):
                self._waiting.pop(key, None)
            elif self._has_settled(key, found.get(key), now, is_asked_for=key[0] == at_once):
                settled.append(key)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key in found or key in taken}
        self._is_first = False
        return [self._take(key) for key in settled]

    # ---- private

    def _laid_over(self, model: ModelFolder, versions: dict[int, VersionFolder]) -> ModelFolder:
        override = self._overrides.get(model.name, NO_OVERRIDE)
        model = replace(model, versions=versions)
        try:
            return override.over(model)
        except DecodeFailed as error:
            return replace(model, settings_error=error.message)

    def _taken_states(self) -> dict[_Key, _State]:
        states = {key: _version_state(version) for key, version in self._versions.items()}
        states.update({(name, _SETTINGS): _settings_state(model) for name, model in self._settings.items()})
        return states

    def _found_states(self) -> dict[_Key, _State]:
        """Return the states of the latest scan; an unreadable folder keeps the taken state."""
        states: dict[_Key, _State] = {}
        for name, model in self._seen.models.items():
            if name in self._settings:
                states[name, _SETTINGS] = _settings_state(model)
            for number, version in model.versions.items():
                states[name, number] = _version_state(version)
        for key, version in self._versions.items():
            if key not in states and self._is_unreadable(version):
                states[key] = _version_state(version)
        for name, model in self._settings.items():
            # Invariant: settings go only with their model's last version, never on their own.
            states.setdefault((name, _SETTINGS), _settings_state(model))
        return states

    def _is_unreadable(self, version: VersionFolder) -> bool:
        unreadable = self._seen.unreadable
        if not unreadable:
            return False
        places = [version.path]
        if version.model in self._named:
            places.append(self._named[version.model])
        elif self._root is not None:
            places += [self._root, self._root / version.model]
        return not unreadable.isdisjoint(places)

    def _has_settled(self, key: _Key, state: _State | None, now: float, *, is_asked_for: bool) -> bool:
        """Return whether this state lasted long enough; the first poll and a request for the model need not wait."""
        waiting = self._waiting.get(key)
        if waiting is None or waiting[0] != state:
            waiting = self._waiting[key] = (state, now)
        if not (self._is_first or is_asked_for) and now - waiting[1] < self._settle_s:
            return False
        del self._waiting[key]
        return True

    def _take(self, key: _Key) -> VersionChange:
        name, number = key
        model = self._seen.models.get(name)
        if model is not None and number == _SETTINGS:
            self._settings[name] = model
            return VersionChange("changed", name, None)
        if model is not None and number in model.versions:
            self._settings.setdefault(name, model)
            kind: Literal["appeared", "changed"] = "changed" if key in self._versions else "appeared"
            self._versions[key] = model.versions[number]
            return VersionChange(kind, name, number)
        del self._versions[key]
        if not any(other == name for other, _ in self._versions):
            del self._settings[name]
        return VersionChange("removed", name, number)


def _version_state(version: VersionFolder) -> _State:
    # The path too: a file moved from the model's folder into 1/ keeps its name, inode and times.
    return (version.path, version.fingerprint)


def _settings_state(model: ModelFolder) -> _State:
    return (model.settings_fingerprint, model.settings_error)
