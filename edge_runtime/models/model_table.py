"""The model table: which versions answer now, and the status of every version known.

Owns: the table and its generation, and the versions on demand that requests asked for. Written by the loader's thread
only; read from any thread without a lock, since every change replaces a whole inner mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from edge_runtime.errors import ModelNotFound, NotReady, NotServed
from edge_runtime.messages import SequenceStep
from edge_runtime.models.executor import Executor
from edge_runtime.models.folder import Problem
from edge_runtime.models.servable import Servable

if TYPE_CHECKING:
    from edge_runtime.models.split import Split

START_RETRY_MS = 100.0
"""When to ask again for a model that is loading: a small one takes about as long."""


class VersionState(Enum):
    """The state of a version; `models` reports the value.

    BUILDING, CONVERTING: no backend can run it until its engine is built, or its file converted, which takes minutes;
    requests are refused meanwhile, and an older version may answer.
    """

    LOADING = "loading"
    BUILDING = "building"
    CONVERTING = "converting"
    READY = "ready"
    ON_DEMAND = "on_demand"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"
    FAILED = "failed"
    STANDBY = "standby"

    @property
    def is_being_made(self) -> bool:
        """Whether a version waits for a build of its own, after which it is loaded by itself."""
        return self in (VersionState.BUILDING, VersionState.CONVERTING)


NOT_SERVED = "not_served"
"""The state that `models` reports of a path in the models folder that is not a version."""


class VersionStatus(Struct, frozen=True):
    """The state of one version, loaded or not, and why."""

    model: str
    number: int
    state: VersionState
    reason: str = ""


class ModelTable:
    """Live servables by model and version, and the status of every version known."""

    def __init__(self, executor: Executor) -> None:
        """executor: whose thread loads the versions that `take_wanted` returns.

        is_complete: whether the models folder was read once; until then no model is unknown. Set by the loader.
        closed: models that only the door may ask which brought them. not_served: what lies in the models folder and
        is not a version. starting: versions that the start loads, and has not; each is refused at once, while requests
        wait for a load that comes later. awaits_updates: whether updates have not said yet which models they serve;
        until then no model is unknown either. All set by the loader's thread, `awaits_updates` by the updater's.
        """
        self.generation = 0
        self.is_complete = False
        self.starting: frozenset[tuple[str, int]] = frozenset()
        self.awaits_updates = False
        self._progress = (-1, "")
        self.closed: frozenset[str] = frozenset()
        self.not_served: tuple[Problem, ...] = ()
        self._ending: dict[str, tuple[Servable, ...]] = {}
        self._live: dict[str, dict[int, Servable]] = {}
        self._beside: dict[str, tuple[Servable, ...]] = {}
        self._splits: dict[str, Split] = {}
        self._statuses: dict[str, dict[int, VersionStatus]] = {}
        self._executor = executor
        self._wanted: set[tuple[str, int]] = set()
        self._wanted_lock = threading.Lock()

    def resolve(self, model: str, number: int | None) -> Servable:
        """Return the servable that answers: the named version, else the newest ready or a split's current one.

        Raises ModelNotFound, or NotReady with the reason; asking for a version that waits on demand starts its load.
        Thread: any.
        """
        split = self._splits.get(model)
        if split is not None and number in {None, split.current.number}:
            return split.current
        live = self._live.get(model)
        if live:
            found = live.get(number if number is not None else max(live))
            if found is not None:
                return found
        status = self._status(model, number)
        if status.state is VersionState.ON_DEMAND:
            self._want(model, status.number)
            raise NotReady(f"model {model} version {status.number} is loading on demand", retry_after_ms=START_RETRY_MS)
        if (model, status.number) in self.starting:
            why = f"; it {status.reason}" if status.reason else ""
            raise NotReady(
                f"model {model} version {status.number} is loading{why}; the daemon is {self.progress()}",
                retry_after_ms=START_RETRY_MS,
            )
        kind = NotServed if status.state in {VersionState.UNLOADED, VersionState.FAILED} else NotReady
        unknown = f"Request for unknown model: '{model}' has no available versions: " if kind is NotServed else ""
        raise kind(f"{unknown}model {model} version {status.number} {_why_not(status)}")

    def split_of(self, model: str) -> Split | None:
        """Return the split of the requests that name no version; None where they are not divided."""
        return self._splits.get(model)

    def is_answering(self, model: str, number: int | None) -> bool:
        """Whether a servable answers for it now."""
        live = self._live.get(model)
        return live is not None and (number is None or number in live)

    def is_coming(self, model: str, number: int | None) -> bool:
        """Whether a request waits for a version that cannot answer now: it is loading, or will load on demand.

        The start's loads are not waited for: all callers of a device that starts would be.
        """
        try:
            status = self._status(model, number)
        except (ModelNotFound, NotReady):
            return False
        return self._is_awaited(status)

    def ask_again(self, model: str, number: int | None) -> bool:
        """As `is_coming`, for a request that waits by now: the load that it asked for may have failed before."""
        try:
            status = self._status(model, number)
        except (ModelNotFound, NotReady):
            return False
        if status.state is VersionState.ON_DEMAND:
            self._want(model, status.number)
        return self._is_awaited(status)

    def has_failed(self, model: str, number: int) -> bool:
        """Whether a version failed to load, or waits for its build, and has no servable."""
        status = self._statuses.get(model, {}).get(number)
        return status is not None and (status.state is VersionState.FAILED or status.state.is_being_made)

    def is_being_made(self, model: str, number: int) -> bool:
        """Whether a version waits for its build, and has no servable."""
        status = self._statuses.get(model, {}).get(number)
        return status is not None and status.state.is_being_made

    def take_wanted(self) -> list[tuple[str, int]]:
        """Return the versions on demand that were asked for since the last call. Thread: the loader's.

        A request that asks once a load has failed asks anew, so they are taken before they are loaded.
        """
        with self._wanted_lock:
            wanted, self._wanted = sorted(self._wanted), set()
        return wanted

    def publish(self, servable: Servable) -> Servable | None:
        """Make a servable the live one of its version; return the one it replaces, which the caller closes."""
        live = dict(self._live.get(servable.model, {}))
        replaced = live.get(servable.number)
        self._keep_ending(replaced)
        live[servable.number] = servable
        self._live[servable.model] = live
        self.set_status(VersionStatus(servable.model, servable.number, VersionState.READY))
        self.generation += 1
        return replaced

    def home_of(self, model: str, number: int | None, step: SequenceStep) -> Servable | None:
        """Return the version on which a sequence runs, where the model has several, or one that left the table.

        None: it begins, or is asked as any other request. number: of the version that it names. Thread: any.
        """
        live = self._live.get(model, {})
        others = self._beside.get(model, ()) + self._ending.get(model, ())
        if step.start or (len(live) < 2 and not others):
            return None
        for servable in sorted((*live.values(), *others), key=lambda each: each.number, reverse=True):
            is_named = number in (None, servable.number)
            if is_named and servable.sequences is not None and servable.sequences.has(step.id):
                return servable
        return None

    def let_go(self, servable: Servable) -> None:
        """Forget a version that left the table: it answers no sequence any more, and its chain has ended."""
        left = tuple(each for each in self._ending.get(servable.model, ()) if each is not servable)
        if left:
            self._ending[servable.model] = left
        else:
            self._ending.pop(servable.model, None)

    def _keep_ending(self, servable: Servable | None) -> None:
        """Have a version that leaves the table answer its sequences, and what its chain has begun, until `let_go`."""
        if servable is not None and (servable.sequences is not None or servable.chain is not None):
            self._ending[servable.model] = (*self._ending.get(servable.model, ()), servable)

    def withdraw(self, model: str, number: int, state: VersionState, reason: str = "") -> Servable | None:
        """Take a version out of the table; return its servable, which the caller closes."""
        # First, so that a request that finds it gone finds the reason too.
        self.set_status(VersionStatus(model, number, state, reason))
        live = dict(self._live.get(model, {}))
        gone = live.pop(number, None)
        self._keep_ending(gone)
        if live:
            self._live[model] = live
        else:
            self._live.pop(model, None)
        self.generation += 1
        return gone

    def arrange(
        self, model: str, live: Sequence[Servable], beside: Sequence[Servable], split: Split | None = None
    ) -> None:
        """Set which loaded versions of a model answer, and which stand by, in one step; nothing is closed.

        The caller closes those in neither, and sets their status: before this call where none answers from here on, so
        that requests find it.
        """
        for servable in (*self._live.get(model, {}).values(), *self._beside.get(model, ())):
            if servable not in live and servable not in beside:
                self._keep_ending(servable)
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
            state = VersionState.READY if servable in live else VersionState.STANDBY
            self.set_status(VersionStatus(model, servable.number, state))
        self.generation += 1

    def set_status(self, status: VersionStatus) -> None:
        """Set the status of a version."""
        self._statuses[status.model] = {**self._statuses.get(status.model, {}), status.number: status}
        if status.state is not VersionState.LOADING:
            self.starting -= {(status.model, status.number)}
        self.generation += 1

    def forget(self, model: str, number: int) -> None:
        """Drop the status of a version that is gone from its source."""
        known = {key: value for key, value in self._statuses.get(model, {}).items() if key != number}
        if known:
            self._statuses[model] = known
        else:
            self._statuses.pop(model, None)
        self.starting -= {(model, number)}
        self.generation += 1

    def live(self) -> list[Servable]:
        """Return every live servable."""
        return [servable for versions in list(self._live.values()) for servable in versions.values()]

    def live_of(self, model: str) -> list[Servable]:
        """Return the live servables of one model."""
        return list(self._live.get(model, {}).values())

    def loaded(self) -> list[Servable]:
        """Return every servable that holds memory: live, or kept loaded during a swap of its model."""
        return self.live() + [servable for beside in list(self._beside.values()) for servable in beside]

    def ending(self) -> list[Servable]:
        """Return the servables that left the table, and answer the sequences and chains that run there."""
        return [servable for each in list(self._ending.values()) for servable in each]

    def users(self, model: str, number: int, *, by_number: bool = False) -> list[str]:
        """Return the loaded pipelines whose steps this version answers. by_number: only those that name the version."""
        newest = max((each.number for each in self.live_of(model)), default=None)
        return sorted(
            {
                servable.model
                for servable in self.loaded()
                if servable.chain is not None
                for asked in servable.chain.asks
                if asked.model == model and (asked.version == number or (asked.version is None and number == newest))
                if not by_number or asked.version == number
            }
        )

    def conversions_in_use(self) -> set[Path]:
        """Return the folders of conversions that loaded servables may read again, when a host starts anew."""
        found = (*self.loaded(), *self.ending())
        return {each.about.conversion.folder for each in found if each.about.conversion is not None}

    def memory_bytes(self) -> int:
        """Return the memory of all loaded servables."""
        return sum(servable.memory_bytes for servable in self.loaded())

    def find(self, model: str, number: int) -> Servable | None:
        """Return the live servable of a version, if there is one."""
        return self._live.get(model, {}).get(number)

    def status(self, model: str, number: int) -> VersionStatus | None:
        """Return the status of a version; None where it is unknown."""
        return self._statuses.get(model, {}).get(number)

    def statuses_of(self, model: str) -> list[VersionStatus]:
        """Return the status of every version of one model, by number."""
        return sorted(self._statuses.get(model, {}).values(), key=lambda status: status.number)

    def statuses(self) -> list[VersionStatus]:
        """Return the status of every version, by name and number."""
        found = [status for versions in list(self._statuses.values()) for status in versions.values()]
        return sorted(found, key=lambda status: (status.model, status.number))

    def progress(self) -> str:
        """How far the daemon's start is, in words. Cheap: a start may refuse any number of requests. Thread: any."""
        generation = self.generation
        if self._progress[0] != generation:
            known = self.statuses()
            ready = sum(status.state is VersionState.READY for status in known)
            self._progress = generation, f"starting, {ready} of {len(known)} ready" if known else "starting"
        return self._progress[1]

    def listing(self) -> list[dict[str, Any]]:
        """Return an entry for each version (wire v1)."""
        return [self._entry(status) for status in self.statuses()]

    def count(self, state: VersionState) -> int:
        """Return the number of versions in a state, as `listing` tells them."""
        return sum(self._state(status) is state for status in self.statuses())

    def inventory(self) -> list[dict[str, Any]]:
        """Return the result of the `models` op: each version, and each path in the folder that is none."""
        left = [
            {
                **dict.fromkeys(("backend", "device", "precision", "mode"), ""),
                "name": problem.model,
                "version": None,
                "state": NOT_SERVED,
                "reason": problem.reason,
                "memory_bytes": 0,
                "host": None,
                "path": str(problem.path),
            }
            for problem in self.not_served
        ]
        return [*self.listing(), *left]

    def _entry(self, status: VersionStatus) -> dict[str, Any]:
        servable = self.find(status.model, status.number)
        if servable is None:
            beside = self._beside.get(status.model, ())
            servable = next((each for each in beside if each.number == status.number), None)
        instance = servable.layouts.narrow if servable is not None else None
        host = servable.layouts.host() if servable is not None else None
        return {
            "name": status.model,
            "version": status.number,
            "state": self._state(status).value,
            "reason": status.reason,
            "backend": instance.backend if instance is not None else "",
            "device": instance.device if instance is not None else "",
            "precision": instance.precision if instance is not None else "",
            "mode": servable.mode if servable is not None else "",
            "memory_bytes": servable.memory_bytes if servable is not None else 0,
            "host": asdict(host) if host is not None else None,
        }

    def _state(self, status: VersionStatus) -> VersionState:
        is_live = self.find(status.model, status.number) is not None
        return VersionState.READY if is_live and status.state is not VersionState.UNLOADING else status.state

    def _is_awaited(self, status: VersionStatus) -> bool:
        is_loading = status.state is VersionState.LOADING and (status.model, status.number) not in self.starting
        return is_loading or status.state is VersionState.ON_DEMAND

    def _want(self, model: str, number: int) -> None:
        with self._wanted_lock:
            is_new = (model, number) not in self._wanted
            self._wanted.add((model, number))
        if is_new:
            self._executor.wake()

    def _status(self, model: str, number: int | None) -> VersionStatus:
        known = self._statuses.get(model)
        if not known:
            if not self.is_complete or self.awaits_updates:
                raise NotReady(
                    f"model {model} is not known yet; the daemon is {self.progress()}", retry_after_ms=START_RETRY_MS
                )
            left = next((f"not served: {problem}" for problem in self.not_served if problem.model == model), "")
            there = f"there are: {', '.join(sorted(self._statuses)[:20]) or 'none'}"
            raise ModelNotFound(f"Request for unknown model: '{model}' is not found; {left or there}")
        if number is None:
            hopeful = [each for each in known.values() if each.state in {VersionState.ON_DEMAND, VersionState.LOADING}]
            return max(hopeful or known.values(), key=lambda status: status.number)
        if number not in known:
            versions = ", ".join(str(each) for each in sorted(known))
            raise ModelNotFound(
                f"Request for unknown model: '{model}' version {number} is not found; there are: {versions}"
            )
        return known[number]


def _why_not(status: VersionStatus) -> str:
    """Return the end of a sentence that begins with the version."""
    match status.state:
        case VersionState.FAILED:
            return f"failed to load: {status.reason}"
        case state if state.is_being_made:
            return f"is not ready yet: {status.reason}"
        case VersionState.STANDBY:
            return "is on standby: an update of this model is under way"
        case VersionState.UNLOADED:
            return f"is unloaded; load it with: edge-runtime models load {status.model}"
        case state:
            return f"is {state.value.replace('_', ' ')}"
