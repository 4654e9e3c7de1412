"""Versions in memory: makes room for a version, loads, publishes and calibrates it, and closes it in the end.

Owns: the order of these steps, so that no request is lost on the way; the measured memory of versions. It
does not decide which versions to load: served_folder.py, loader.py and swap.py do. Thread: the loader's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import HostStatus
from edge_runtime.errors import LoadFailed, NotBuiltYet, NotConvertedYet, NotReady, WaitsForModels
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.models.calibration import Calibrator
from edge_runtime.models.chains import MAX_DEPTH, Chains
from edge_runtime.models.context import ModelContext
from edge_runtime.models.folder import Fingerprint, ModelFolder, VersionFolder
from edge_runtime.models.kept_interfaces import KeptInterfaces
from edge_runtime.models.load_threads import LoadThreads
from edge_runtime.models.loading import LoadedVersion, VersionLoader
from edge_runtime.models.model_table import VersionState, VersionStatus
from edge_runtime.models.servable import Servable
from edge_runtime.telemetry.metrics import ModelMetrics

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""A replaced version has this long to answer the requests that it admitted; these carry shorter deadlines than this."""

BESIDE_FACTOR = 2
"""A load begins beside others where this many times the bytes of all their files fit: what a library makes of a file is
known only once it is loaded, and seldom more."""

Check = Callable[[LoadedVersion], None]
"""Checks a loaded version before it answers. Raises LoadFailed to reject it."""


class Resident(Struct, frozen=True):
    """A loaded version: its memory, when a request last used it (monotonic seconds), and whether it must stay."""

    model: str
    number: int
    memory_bytes: int
    used_s: float
    is_pinned: bool


class Eviction(Struct, frozen=True):
    """Versions to unload, in order; `missing_bytes` > 0: even without them there is not enough memory."""

    leave: tuple[Resident, ...]
    missing_bytes: int


def plan_eviction(residents: Sequence[Resident], wanted_bytes: int, budget_bytes: int) -> Eviction:
    """Make room for `wanted_bytes` under the budget: least recently used first, pinned ones never. Pure.

    Nothing leaves when even all of it would not be enough.
    """
    free = budget_bytes - sum(resident.memory_bytes for resident in residents)
    leave: list[Resident] = []
    for resident in sorted(residents, key=lambda each: each.used_s):
        if free >= wanted_bytes:
            break
        if not resident.is_pinned:
            leave.append(resident)
            free += resident.memory_bytes
    if free < wanted_bytes:
        return Eviction((), wanted_bytes - free)
    return Eviction(tuple(leave), 0)


class Placement:
    """Loads and unloads versions, at the start side by side. budget_bytes None: memory is not bounded."""

    def __init__(
        self,
        context: ModelContext,
        *,
        versions: VersionLoader,
        chains: Chains,
        interfaces: KeptInterfaces,
        calibrator: Calibrator,
        hosts: Hosts,
        budget_bytes: int | None,
        drain_s: float = 10.0,
    ) -> None:
        """hosts: reports instances whose host is not started again. drain_s: that sequences have to end."""
        self._versions = versions
        self._chains = chains
        self._interfaces = interfaces
        self._sources = context.sources
        self._table = context.table
        self._pending_loads = context.pending_loads
        self._marks = context.marks
        self._calibrator = calibrator
        self._dispatcher = context.dispatcher
        self._metrics = context.metrics
        self._clock = context.clock
        self._executor = context.executor
        self._budget_bytes = budget_bytes
        self._drain_s = drain_s
        self._hosts = hosts
        self._threads = LoadThreads(
            lambda folder, version: self._load(folder, version, None), context.marks, context.executor, context.clock
        )
        self._held: list[str] = []
        self._left_until_s: dict[Servable, float] = {}
        self._depth = 0
        self._measured: dict[tuple[str, int], tuple[tuple[Path, Fingerprint], int]] = {}

    # ---- a version's life --------------------------------------------------------------------------------------------

    def loads_at_once(self, folder: ModelFolder, version: VersionFolder) -> bool:
        """Whether a version of the folder is loaded as it comes: it waits for no request, and is not left out."""
        return not folder.settings.on_demand and self._marks.why_left_out(folder, version) is None

    def cost(self, folder: ModelFolder, version: VersionFolder) -> tuple[int, int]:
        """Return the cost of a load, to sort by, the cheapest first."""
        return self._versions.cost(folder, version)

    @property
    def is_loading(self) -> bool:
        """Whether loads that were begun are under way. Thread: any."""
        return self._threads.running > 0

    @property
    def has_loads(self) -> bool:
        """Whether some are under way, or were not taken. Thread: any."""
        return not self._threads.is_empty

    def begin_load(self, folder: ModelFolder, version: VersionFolder, done: Callable[[], None]) -> bool:
        """Begin a load on a thread of its own, whose result the next load of these files takes.

        done: called on this thread after its end. False: there are as many as cores, or memory may not hold one more.
        Raises LoadFailed: memory never does.
        """
        wanted = self._bytes_wanted(version)
        if self._threads.running >= self._dispatcher.cores:
            return False
        if not self._threads.running:
            self._make_room(wanted, ())
        elif self._plan(BESIDE_FACTOR * (wanted + self._threads.wanted_bytes), ()) != Eviction((), 0):
            return False
        self._threads.begin(folder, version, wanted, done)
        return True

    def drop_load(self, model: str, number: int) -> None:
        """Close the untaken result of a load. Waits for its end."""
        self._threads.drop(model, number)

    def close_loads(self, limit_s: float | None) -> None:
        """Close versions loaded and not taken. limit_s: as of `Loader.close`. Idempotent."""
        self._threads.close(limit_s)

    def load_or_wait(self, folder: ModelFolder, version: VersionFolder) -> None:
        """Load a version, unless it waits for its first request. A failure is logged, and its status says why."""
        is_absent = self._table.find(folder.name, version.number) is None
        if folder.settings.on_demand and is_absent and self._marks.why_left_out(folder, version) is None:
            self._table.set_status(VersionStatus(folder.name, version.number, VersionState.ON_DEMAND))
        else:
            self.load_or_report(folder, version)

    def load_or_report(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load a version; a failure is logged, and its status says why."""
        try:
            self.load(folder, version, check)
        except (NotBuiltYet, WaitsForModels) as error:
            log.info("%s version %d waits: %s", folder.name, version.number, error.message)
        except LoadFailed as error:
            log.log(
                logging.ERROR if self._hosts.takes_loads else logging.INFO,  # a daemon that stops gives loads up
                "%s version %d is not loaded: %s",
                folder.name,
                version.number,
                error.message,
                extra={"model": folder.name},  # held back a model, not a place: a folder of wrong files tells of each
            )

    def load(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load a version, marked, unless it ended the daemon before.

        Raises LoadFailed, which leaves the old copy serving; NotBuiltYet, where the version is loaded by itself later.
        """
        reason = self._marks.why_left_out(folder, version)
        if reason is not None:
            is_live = self._table.find(folder.name, version.number) is not None
            state = VersionState.READY if is_live else VersionState.FAILED
            words = f"these files are {reason}" if is_live else reason
            self._table.set_status(VersionStatus(folder.name, version.number, state, words))
            self._pending_loads.end(folder.name, NotReady(f"model {folder.name} version {version.number} is {reason}"))
            raise LoadFailed(reason)
        self.load_asked(folder, version, check)

    def load_asked(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load a version that a person asks for, also one that ended the daemon before. Raises as `load`."""
        with contextlib.ExitStack() as marked:
            if self._threads.began_s(folder, version) is None:
                self._threads.drop(version.model, version.number)
                marked.enter_context(self._marks.loading(folder, version))
            self.load_unmarked(folder, version, check)

    def load_unmarked(self, folder: ModelFolder, version: VersionFolder, check: Check | None = None) -> None:
        """Load beside the old copy, publish, drain the old copy; for a release, whose starts the journal counts."""
        with self._steps_held(folder, version):
            self._load_unmarked(folder, version, check)

    def _load_unmarked(self, folder: ModelFolder, version: VersionFolder, check: Check | None) -> None:
        name, number = folder.name, version.number
        old = self._table.find(name, number)
        before = self._table.status(name, number)
        if old is None:
            self._table.set_status(VersionStatus(name, number, VersionState.LOADING))
        started_s = self._threads.began_s(folder, version) or self._clock.monotonic_s()
        try:
            loaded = self.bring_up(folder, version, without=() if old is None else (old,), check=check)
        except LoadFailed as error:
            failed = state_after(error)
            state = failed if old is None else VersionState.READY
            fate = "waits" if failed is not VersionState.FAILED else "failed to load"
            reason = error.message if old is None else f"a newer copy of its files {fate}: {error.message}"
            if before is not None and before.state is VersionState.ON_DEMAND and self._is_held_up(version):
                state, reason = VersionState.ON_DEMAND, "waits for memory until an update of another model is decided"
            self._table.set_status(VersionStatus(name, number, state, reason))
            if state is not VersionState.LOADING:
                failure = NotReady(f"model {name} version {number} failed to load: {error.message}")
                self._pending_loads.end(name, failure)
            raise
        replaced = self._table.publish(loaded.servable)
        self._interfaces.keep_published(loaded.servable, self._table.live_of(name))
        if loaded.note:
            self._table.set_status(VersionStatus(name, number, VersionState.READY, loaded.note))
        self._pending_loads.end(name, None)
        log_loaded(loaded, self._clock.monotonic_s() - started_s)
        self.retire(replaced)
        self._calibrator.add(loaded)

    def unload(self, model: str, number: int, *, forget: bool) -> None:
        """Unload a version after it answered all that it admitted. forget: drop its status, too; its files are gone."""
        self.retire(self._table.withdraw(model, number, VersionState.UNLOADING))
        if forget:
            self._table.forget(model, number)
            self._marks.forget(model, number)
            if not self._table.statuses_of(model):  # else names that come and go would fill the memory
                self.forget(model)
        else:
            self._table.set_status(VersionStatus(model, number, VersionState.UNLOADED, "unloaded"))

    def take_away(self, model: str, number: int, state: VersionState, reason: str) -> None:
        """Unload a version that cannot answer any more, and keep the reason in its status."""
        self.retire(self._table.withdraw(model, number, state, reason))

    def forget(self, model: str) -> None:
        """Drop the counters and sizes of a model whose versions are all gone."""
        self._metrics.forget(model)
        self._measured = {key: known for key, known in self._measured.items() if key[0] != model}

    def take_failures(self) -> list[str]:
        """Withdraw the versions whose hosts kept ending; return their models, which may have an older version."""
        models: list[str] = []
        for instance, reason in self._hosts.take_failures():
            for servable in self._table.live():
                if servable.layouts.holds(instance):
                    gone = self._table.withdraw(servable.model, servable.number, VersionState.FAILED, reason)
                    self.retire(gone)
                    models.append(servable.model)
        return models

    # ---- memory ------------------------------------------------------------------------------------------------------

    def has_room(self, version: VersionFolder, without: Collection[Servable] = (), *, keeping: str = "") -> bool:
        """Whether memory holds a version after evictions.

        without: versions that leave for it in any case. keeping: a model whose versions all stay.
        """
        return not self._plan(self._bytes_wanted(version), without, keeping).missing_bytes

    def bring_up(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        *,
        without: Collection[Servable] = (),
        is_apart: bool = False,
        check: Check | None = None,
    ) -> LoadedVersion:
        """Make room, load, warm up; nothing answers from it yet.

        The models that a pipeline brings with it come first, and answer to it at once.

        without: versions that will leave for it, and are not counted. is_apart: it has counters of its own beside the
        model's other numbers, until it is decided on. Raises LoadFailed only: a library's surprise is a failed load
        too.
        """
        parts: list[LoadedVersion] = []
        metrics = self._metrics.apart(folder.name) if is_apart else None
        try:
            begun = None if is_apart else self._threads.take(folder, version)
            if begun is None:
                self._make_room(self._bytes_wanted(version), without)
                for part in folder.owned:
                    parts.append(self._bring_up_part(part, without, is_apart=is_apart))
                begun = self._load(folder, version, metrics, parts)
            loaded = self._check_loaded(begun, version, without, check)
        except LoadFailed:
            for each in parts:
                self._retire_part(each.servable)
            if metrics is not None:
                self._metrics.retire(folder.name, metrics)
            raise
        self._watch_queue(loaded)
        return loaded

    def retire(self, servable: Servable | None) -> None:
        """Close a version that left the table, after the requests that it admitted were answered.

        Where another answers in its place, and sequences run on it, it is closed later, by `end_left`: no load waits
        for them. One version of a model does so at a time.
        """
        if servable is None:
            return
        self._calibrator.discard(servable)
        sequences = servable.sequences
        if sequences is not None and self._table.live_of(servable.model):
            sequences.on_over = self._executor.wake
            if not sequences.is_over():
                for other in [each for each in self._left_until_s if each.model == servable.model]:
                    self._close(other)
                self._left_until_s[servable] = self._clock.monotonic_s() + self._drain_s
                return
        self._close(servable)

    def end_left(self) -> None:
        """Close the versions whose sequences are over, or have had their time."""
        now_s = self._clock.monotonic_s()
        for servable, until_s in list(self._left_until_s.items()):
            if now_s >= until_s or servable.sequences is None or servable.sequences.is_over():
                self._close(servable)

    def _close(self, servable: Servable) -> None:
        self._left_until_s.pop(servable, None)
        if servable.sequences is not None:
            self._table.let_go(servable)
        servable.close(DRAIN_S)
        self._table.let_go(servable)
        self._metrics.retire(servable.model, servable.metrics, servable)
        log.info("unloaded", extra={"model": servable.model, "version": servable.number})
        for part in servable.owned:
            self._retire_part(part)

    def asked_models(self, folder: ModelFolder) -> set[str]:
        """Return the models that the steps of a model's versions ask; none of one that is not a pipeline."""
        found: set[str] = set()
        for version in folder.versions.values():
            if folder.asks_models(version):
                with contextlib.suppress(LoadFailed):  # which its load says
                    found.update(self._chains.loader(folder, version).asked_models(folder, version))
        return found

    # ---- private ----------------------------------------------------------------------------------------------------

    def _load(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        metrics: ModelMetrics | None,
        owned: Sequence[LoadedVersion] = (),
    ) -> LoadedVersion:
        try:
            if folder.asks_models(version):
                return self._chains.loader(folder, version).load(folder, version, metrics, owned)
            return self._versions.load(folder, version, metrics)
        except LoadFailed:
            raise
        except Exception as error:
            log.exception("loading failed unexpectedly", extra={"model": folder.name, "version": version.number})
            raise LoadFailed(f"{type(error).__name__}: {error}") from error

    def _check_loaded(
        self, loaded: LoadedVersion, version: VersionFolder, without: Collection[Servable], check: Check | None
    ) -> LoadedVersion:
        """Return a new version, with the faults that its clients should know of.

        Raises LoadFailed, and closes it, when it takes too much memory or must not answer.
        """
        servable = loaded.servable
        self._measured[version.model, version.number] = (version.path, version.fingerprint), _whole_bytes(servable)
        try:
            # Files are only a guess at what a library makes of them: hold the budget by what was measured.
            self._make_room(servable.memory_bytes, without)
            self._chains.check_swap(servable)
            fault = self._interfaces.check(servable, self._table.live_of(servable.model))
            if check is not None:
                check(loaded)
        except LoadFailed:
            servable.close(0.0)
            raise
        if not fault:
            return loaded
        log.warning(
            "clients of the version before cannot use this one: %s",
            fault,
            extra={"model": servable.model, "version": servable.number},
        )
        note = f"clients of the version before cannot use it: {fault}"
        return replace(loaded, note="; ".join(filter(None, (note, loaded.note))), breaks_clients=True)

    def _bring_up_part(self, folder: ModelFolder, without: Collection[Servable], *, is_apart: bool) -> LoadedVersion:
        """Load a model that a pipeline brings with it, and let it answer. is_apart: it counts apart, as that does."""
        (version,) = folder.versions.values()
        try:
            loaded = self.bring_up(folder, version, without=without, is_apart=is_apart)
        except LoadFailed as error:
            raise type(error)(f"its model {folder.name}: {error.message}") from error
        self._table.publish(loaded.servable)
        return loaded

    def _retire_part(self, part: Servable) -> None:
        """Close a model that a pipeline brought with it. Another load of the same release may have its place by now."""
        if self._table.find(part.model, part.number) is part:
            self._table.withdraw(part.model, part.number, VersionState.UNLOADING)
            self._table.forget(part.model, part.number)
            part.metrics.unwatch()
        self.retire(part)

    @contextlib.contextmanager
    def _steps_held(self, folder: ModelFolder, version: VersionFolder) -> Iterator[None]:
        """Load the models of a pipeline's steps, and keep them in memory until the pipeline is loaded."""
        if not folder.asks_models(version) or self._depth >= MAX_DEPTH:
            yield
            return
        before = len(self._held)
        self._depth += 1
        try:
            for step_folder, step_version in self._chains.loader(folder, version).steps_to_load(folder, version):
                self._held.append(step_folder.name)
                self.load_or_report(step_folder, step_version)
            yield
        finally:
            self._depth -= 1
            del self._held[before:]

    def _is_held_up(self, version: VersionFolder) -> bool:
        """Whether a version only lacks the memory that models under swap hold now."""
        held = [each for each in self._table.loaded() if each.model in self._sources.swapping]
        return not self.has_room(version) and self.has_room(version, without=held)

    def _bytes_wanted(self, version: VersionFolder) -> int:
        """Return the memory that these very files were measured to take; else their size, which is mostly weights."""
        known = self._measured.get((version.model, version.number))
        if known is not None and known[0] == (version.path, version.fingerprint):
            return known[1]
        return sum(path.stat().st_size for path in version.files.values() if path.exists())

    def _make_room(self, wanted: int, without: Collection[Servable]) -> None:
        left_bytes = sum(map(_whole_bytes, self._left_until_s))
        if left_bytes and self._plan(wanted + left_bytes, without) != Eviction((), 0):
            for servable in list(self._left_until_s):  # their sequences are told
                self._close(servable)
        plan = self._plan(wanted, without)
        if plan.missing_bytes:
            raise LoadFailed(
                f"needs {wanted} bytes; {plan.missing_bytes} are missing in the memory budget of {self._budget_bytes} "
                "even after every model that is not pinned would leave"
            )
        for resident in plan.leave:
            number = resident.number
            gone = self._table.withdraw(resident.model, number, VersionState.ON_DEMAND, "left to free memory")
            self.retire(gone)
            if gone in self._left_until_s:
                self._close(gone)

    def _plan(self, wanted: int, without: Collection[Servable], keeping: str = "") -> Eviction:
        if self._budget_bytes is None:
            return Eviction((), 0)
        loaded = self._table.loaded()
        parts = {part for each in (*loaded, *without) for part in each.owned}
        residents = [
            Resident(each.model, each.number, _whole_bytes(each), each.used_s, self._must_stay(each, keeping))
            for each in loaded
            if each not in without and each not in parts
        ]
        return plan_eviction(residents, wanted, self._budget_bytes)

    def _must_stay(self, servable: Servable, keeping: str) -> bool:
        is_asked = servable.mode == "pipeline" or bool(self._table.users(servable.model, servable.number))
        is_held = servable.model in self._sources.swapping or servable.model in self._held or servable.model == keeping
        return servable.settings.pinned or is_asked or is_held

    def _watch_queue(self, loaded: LoadedVersion) -> None:
        servable = loaded.servable
        servable.metrics.unwatch()  # what is read of the version before would keep that in memory
        servable.metrics.source = servable
        servable.metrics.watch("queue_rows", lambda: self._dispatcher.queued(servable.scheduled)[0])
        servable.metrics.watch("queue_bytes", lambda: self._dispatcher.queued(servable.scheduled)[1])
        if servable.chain is not None:
            for name, read in servable.chain.gauges().items():
                servable.metrics.watch(name, read)
        if loaded.breaks_clients:
            servable.metrics.watch("interface_changed", lambda: 1.0)
        if servable.layouts.host() is not None:
            servable.metrics.watch("host_restarts", lambda: _host_of(servable).restarts)
            servable.metrics.watch("host_memory_bytes", lambda: _host_of(servable).memory_bytes)
            servable.metrics.watch_reason("host_last_end", lambda: _host_of(servable).last_end)


def _whole_bytes(servable: Servable) -> int:
    """Memory of a version, with that of the models that it brought with it."""
    return servable.memory_bytes + sum(part.memory_bytes for part in servable.owned)


def state_after(error: LoadFailed) -> VersionState:
    """Return the state of a version whose load ended by this error."""
    if isinstance(error, WaitsForModels):
        return VersionState.LOADING
    if isinstance(error, NotConvertedYet):
        return VersionState.CONVERTING
    return VersionState.BUILDING if isinstance(error, NotBuiltYet) else VersionState.FAILED


def _host_of(servable: Servable) -> HostStatus:
    host = servable.layouts.host()
    return host if host is not None else HostStatus(0, 0, 0, "")


def log_loaded(loaded: LoadedVersion, took_s: float) -> None:
    """Log which version was loaded, and on which backend and device it runs."""
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
