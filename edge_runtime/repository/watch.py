"""What changed in the models folder, told only when it has settled.

Owns: the rule that a state of a version (its absence included) counts when it was the same for `settle_s`. Never
loads and starts no thread: the loader calls `poll()` about each half second and acts on what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edge_runtime.clock import Clock
from edge_runtime.repository.folder import ModelFolder, Scan, VersionFolder
from edge_runtime.repository.walk import scan

SETTLE_S = 2.0
"""A copy that pauses for longer is taken half-done, fails to load, and is taken again when it goes on (DESIGN 6)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One settled difference. version None: the model's settings (`model.toml`) changed, appeared or went."""

    kind: Literal["appeared", "changed", "removed"]
    model: str
    version: int | None


_Key = tuple[str, int]
_SETTINGS = 0
"""Stands for a model's settings where a version's number (1 or more) stands otherwise, and sorts before them."""

_State = tuple[object, ...]
"""What has to stay the same to count as settled; an absent version has the state None."""


class Watcher:
    """Follows one models folder by looking at it again and again; no inotify, so any file system does.

    The first poll takes everything at once: at start nobody is asked to wait, and a version that was still being
    copied is taken again when it settles. Thread: one caller at a time.

    While the root, a model or a version folder cannot be read (a disk gone, a permission), what was taken from it
    stays taken: serving goes on, and `scan.problems` says so.
    """

    def __init__(self, root: Path, clock: Clock, settle_s: float = SETTLE_S) -> None:
        self._root = root
        self._clock = clock
        self._settle_s = settle_s
        self._is_first = True
        self._seen = Scan()
        self._settings: dict[str, ModelFolder] = {}
        self._versions: dict[_Key, VersionFolder] = {}
        self._waiting: dict[_Key, tuple[_State | None, float]] = {}

    @property
    def scan(self) -> Scan:
        """What was taken so far: settled versions and settings only, with the problems of the latest poll.

        A model is in here when it has a version in here. Decide from this which versions are wanted.
        """
        versions: dict[str, dict[int, VersionFolder]] = {name: {} for name in sorted(self._settings)}
        for (name, number), version in sorted(self._versions.items()):
            versions[name][number] = version
        models = {name: replace(self._settings[name], versions=found) for name, found in versions.items()}
        return Scan(models, self._seen.problems, self._seen.unreadable)

    def poll(self, at_once: str | None = None) -> list[Change]:
        """Look once. Returns what settled since the last call, by model, its settings before its versions.

        at_once: a model that is taken as it lies, without waiting: somebody who asks for a load says that its files
        are complete. Every change is told once, to whoever polls: one that is dropped is lost.
        """
        now = self._clock.monotonic_s()
        self._seen = scan(self._root, known=self._seen)
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

    def _taken_states(self) -> dict[_Key, _State]:
        states = {key: _version_state(version) for key, version in self._versions.items()}
        states.update({(name, _SETTINGS): _settings_state(model) for name, model in self._settings.items()})
        return states

    def _found_states(self) -> dict[_Key, _State]:
        """States of the latest scan; what it could not read is as it was taken."""
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
        return bool(unreadable) and not unreadable.isdisjoint((self._root, self._root / version.model, version.path))

    def _has_settled(self, key: _Key, state: _State | None, now: float, *, is_asked_for: bool) -> bool:
        """Whether this state was there for long enough; the first poll, and who asks for a model, need not wait."""
        waiting = self._waiting.get(key)
        if waiting is None or waiting[0] != state:
            waiting = self._waiting[key] = (state, now)
        if not (self._is_first or is_asked_for) and now - waiting[1] < self._settle_s:
            return False
        del self._waiting[key]
        return True

    def _take(self, key: _Key) -> Change:
        name, number = key
        model = self._seen.models.get(name)
        if model is not None and number == _SETTINGS:
            self._settings[name] = model
            return Change("changed", name, None)
        if model is not None and number in model.versions:
            self._settings.setdefault(name, model)
            kind: Literal["appeared", "changed"] = "changed" if key in self._versions else "appeared"
            self._versions[key] = model.versions[number]
            return Change(kind, name, number)
        del self._versions[key]
        if not any(other == name for other, _ in self._versions):
            del self._settings[name]
        return Change("removed", name, number)


def _version_state(version: VersionFolder) -> _State:
    # The path too: a file moved from the model's folder into 1/ keeps its name, inode and times.
    return (version.path, version.fingerprint)


def _settings_state(model: ModelFolder) -> _State:
    return (model.settings_fingerprint, model.settings_error)
