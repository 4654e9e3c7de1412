"""The live table: which versions can answer now, and what is known of the others.

Owns: the table and its generation. Written by the loader's thread only; read from any thread without a lock, since
every change replaces a whole inner mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from edge_runtime.errors import ModelNotFound, NotReady
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.split import Split


class State(Enum):
    """Where a version stands; `models` reports the value.

    BUILDING: nothing can run it until its engine is built, which takes minutes; whoever asks is told so at once.
    """

    LOADING = "loading"
    BUILDING = "building"
    READY = "ready"
    ON_DEMAND = "on_demand"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"
    FAILED = "failed"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one version, loaded or not."""

    model: str
    number: int
    state: State
    reason: str = ""


class Servables:
    """Live servables by model and version, and the standing of every version known."""

    def __init__(self) -> None:
        self.generation = 0
        self._live: dict[str, dict[int, Servable]] = {}
        self._beside: dict[str, tuple[Servable, ...]] = {}
        self._splits: dict[str, Split] = {}
        self._standings: dict[str, dict[int, Standing]] = {}
        self._want: Callable[[str, int], None] | None = None

    def on_demand(self, want: Callable[[str, int], None]) -> None:
        """Set what is called when a version that waits on demand is asked for. Once, at assembly."""
        self._want = want

    def resolve(self, model: str, number: int | None) -> Servable:
        """The servable that answers: the named version, else the newest ready one, or the incumbent of a split.

        Raises ModelNotFound, or NotReady with the reason; asking for a version that waits on demand starts its load.
        Thread: any.
        """
        split = self._splits.get(model)
        if split is not None and number in {None, split.incumbent.number}:
            return split.incumbent
        live = self._live.get(model)
        if live:
            found = live.get(number if number is not None else max(live))
            if found is not None:
                return found
        standing = self._standing(model, number)
        if standing.state is State.ON_DEMAND and self._want is not None:
            self._want(model, standing.number)
            raise NotReady(f"model {model} version {standing.number} is loading on demand", retry_after_ms=100.0)
        raise NotReady(f"model {model} version {standing.number} {_why_not(standing)}")

    def split_of(self, model: str) -> Split | None:
        """How the requests of a model that name no version are divided, if they are."""
        return self._splits.get(model)

    def is_answering(self, model: str, number: int | None) -> bool:
        """Whether there is a servable for this now."""
        live = self._live.get(model)
        return live is not None and (number is None or number in live)

    def is_coming(self, model: str, number: int | None) -> bool:
        """Whether a version that cannot answer now will be able to after a load that was asked for or is under way."""
        try:
            standing = self._standing(model, number)
        except ModelNotFound:
            return False
        return standing.state in {State.ON_DEMAND, State.LOADING}

    def ask_again(self, model: str, number: int | None) -> bool:
        """As `is_coming`, for who waits by now: a load that it asked for may have failed before it did."""
        try:
            standing = self._standing(model, number)
        except ModelNotFound:
            return False
        if standing.state is State.ON_DEMAND and self._want is not None:
            self._want(model, standing.number)
        return standing.state in {State.ON_DEMAND, State.LOADING}

    def has_failed(self, model: str, number: int) -> bool:
        """Whether a version could not be loaded, or not yet, and nothing answers for it."""
        standing = self._standings.get(model, {}).get(number)
        return standing is not None and standing.state in {State.FAILED, State.BUILDING}

    def is_building(self, model: str, number: int) -> bool:
        """Whether a version waits for its engine, and nothing answers for it."""
        standing = self._standings.get(model, {}).get(number)
        return standing is not None and standing.state is State.BUILDING

    def publish(self, servable: Servable) -> Servable | None:
        """Make a servable the live one of its version; returns the one it replaces, which the caller closes."""
        live = dict(self._live.get(servable.model, {}))
        replaced = live.get(servable.number)
        live[servable.number] = servable
        self._live[servable.model] = live
        self.stand(Standing(servable.model, servable.number, State.READY))
        self.generation += 1
        return replaced

    def withdraw(self, model: str, number: int, state: State, reason: str = "") -> Servable | None:
        """Take a version out of the live table; returns its servable, which the caller closes."""
        # First, so that who finds it gone finds the reason too.
        self.stand(Standing(model, number, state, reason))
        live = dict(self._live.get(model, {}))
        gone = live.pop(number, None)
        if live:
            self._live[model] = live
        else:
            self._live.pop(model, None)
        self.generation += 1
        return gone

    def arrange(
        self, model: str, live: Sequence[Servable], beside: Sequence[Servable], split: Split | None = None
    ) -> None:
        """Say which loaded versions of a model answer, and which stand by, in one step; nothing is closed.

        What it leaves out of both is the caller's to close and to say where it stands: before, where nothing answers
        from here on, so that who asks meanwhile finds that.
        """
        if split is not None:
            self._splits[model] = split
        else:
            self._splits.pop(model, None)
        self._beside.pop(model, None)
        if beside:
            self._beside[model] = tuple(beside)
        if live:
            self._live[model] = {servable.number: servable for servable in live}
        else:
            self._live.pop(model, None)
        for servable in (*beside, *live):
            state = State.READY if servable in live else State.STANDBY
            self.stand(Standing(model, servable.number, state))
        self.generation += 1

    def stand(self, standing: Standing) -> None:
        """Record what is known of a version."""
        self._standings[standing.model] = {**self._standings.get(standing.model, {}), standing.number: standing}
        self.generation += 1

    def forget(self, model: str, number: int) -> None:
        """A version is gone from its source: nothing is known of it any more."""
        known = {key: value for key, value in self._standings.get(model, {}).items() if key != number}
        if known:
            self._standings[model] = known
        else:
            self._standings.pop(model, None)
        self.generation += 1

    def live(self) -> list[Servable]:
        """Every live servable."""
        return [servable for versions in list(self._live.values()) for servable in versions.values()]

    def live_of(self, model: str) -> list[Servable]:
        """The live servables of one model."""
        return list(self._live.get(model, {}).values())

    def loaded(self) -> list[Servable]:
        """Every servable that holds memory: live, or standing by while its model is exchanged."""
        return self.live() + [servable for beside in list(self._beside.values()) for servable in beside]

    def memory_bytes(self) -> int:
        """What all loaded servables hold."""
        return sum(servable.memory_bytes for servable in self.loaded())

    def find(self, model: str, number: int) -> Servable | None:
        """The live servable of a version, if there is one."""
        return self._live.get(model, {}).get(number)

    def standing(self, model: str, number: int) -> Standing | None:
        """What is known of a version, if anything."""
        return self._standings.get(model, {}).get(number)

    def standings_of(self, model: str) -> list[Standing]:
        """Every version known of one model, by number."""
        return sorted(self._standings.get(model, {}).values(), key=lambda standing: standing.number)

    def standings(self) -> list[Standing]:
        """Every version known, by name and number."""
        found = [standing for versions in list(self._standings.values()) for standing in versions.values()]
        return sorted(found, key=lambda standing: (standing.model, standing.number))

    def is_settled(self) -> bool:
        """Whether every version is ready, failed, unloaded or waits on demand."""
        return all(standing.state is not State.LOADING for standing in self.standings())

    def listing(self) -> list[dict[str, Any]]:
        """The `models` op (wire v1)."""
        return [self._listed(standing) for standing in self.standings()]

    def _listed(self, standing: Standing) -> dict[str, Any]:
        servable = self.find(standing.model, standing.number)
        is_live = servable is not None
        if servable is None:
            beside = self._beside.get(standing.model, ())
            servable = next((each for each in beside if each.number == standing.number), None)
        instance = servable.layouts.narrow if servable is not None else None
        if is_live and standing.state is not State.UNLOADING:
            standing = replace(standing, state=State.READY)
        return {
            "name": standing.model,
            "version": standing.number,
            "state": standing.state.value,
            "reason": standing.reason,
            "backend": instance.backend if instance is not None else "",
            "device": instance.device if instance is not None else "",
            "precision": instance.precision if instance is not None else "",
            "mode": servable.mode if servable is not None else "",
            "memory_bytes": servable.memory_bytes if servable is not None else 0,
        }

    def _standing(self, model: str, number: int | None) -> Standing:
        known = self._standings.get(model)
        if not known:
            names = ", ".join(sorted(self._standings)[:20]) or "none"
            raise ModelNotFound(f"no model {model!r}; there are: {names}")
        if number is None:
            hopeful = [each for each in known.values() if each.state in {State.ON_DEMAND, State.LOADING}]
            return max(hopeful or known.values(), key=lambda standing: standing.number)
        if number not in known:
            versions = ", ".join(str(each) for each in sorted(known))
            raise ModelNotFound(f"model {model!r} has no version {number}; there are: {versions}")
        return known[number]


def _why_not(standing: Standing) -> str:
    """The end of a sentence that begins with the version."""
    match standing.state:
        case State.FAILED:
            return f"failed to load: {standing.reason}"
        case State.BUILDING:
            return f"is not ready yet: {standing.reason}"
        case State.STANDBY:
            return "is on standby: an update of this model is under way"
        case State.UNLOADED:
            return f"is unloaded; load it with: edge-runtime models load {standing.model}"
        case state:
            return f"is {state.value.replace('_', ' ')}"
