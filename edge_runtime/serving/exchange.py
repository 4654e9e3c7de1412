"""A release in the place of what serves of its model, both at hand until it is decided which of them stays.

Owns: which of the two answers meanwhile, and that nobody loses a request at any change. Who decides, and by what, is
the updater's. Thread: the updater's calls; what they do is done on the loader's thread, and they wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from edge_runtime.errors import EdgeRuntimeError, LoadFailed, NotReady
from edge_runtime.repository.folder import ModelFolder
from edge_runtime.repository.golden import DEFAULT_TOLERANCE, TOLERANCES
from edge_runtime.repository.manifest import Tolerance
from edge_runtime.serving.exchange_bench import ExchangeBench
from edge_runtime.serving.lifecycle import log_loaded
from edge_runtime.serving.loading import Loaded
from edge_runtime.serving.mirror import Mirror
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Standing, State
from edge_runtime.serving.split import Split, why_not_alike

log = logging.getLogger(__name__)

T = TypeVar("T")


class Exchange:
    """One release beside what serves of its model.

    model: whose. incumbent: what answered before, None when nothing did. gap_s: how long nothing of the model answered,
    where memory holds only one of the two; None where it holds both. Each method waits until it is done, and raises
    Draining when the daemon stops meanwhile, LoadFailed when the exchange is over. Thread: any but the loader's.
    """

    def __init__(
        self, bench: ExchangeBench, folder: ModelFolder, before_alone: Callable[[], None] = lambda: None
    ) -> None:
        """before_alone: called where memory holds only one, when nothing of the model is loaded any more."""
        self.model = folder.name
        self.incumbent: Servable | None = None
        self.gap_s: float | None = None
        self._bench = bench
        self._folder = folder
        self._before_alone = before_alone
        (self._version,) = folder.versions.values()
        self._before: Standing | None = None
        self._origin: ModelFolder | None = None
        self._release_before: ModelFolder | None = None
        self._loaded: Loaded | None = None
        self._incumbents: list[Servable] = []
        self._unloaded: list[Servable] = []
        self._mirror: Mirror | None = None
        self._is_swapped = False
        self._is_over = False

    @property
    def newcomer(self) -> Servable:
        """The release's servable; it counts in `metrics` of its own, which what is told of the model contains."""
        assert self._loaded is not None, "load() comes first"
        return self._loaded.servable

    def load(self) -> None:
        """Load the newcomer beside what serves; where memory holds only one, in its place: swapped, so to speak.

        Raises LoadFailed, and what `before_alone` raises: all is as before. Thread: the loader's; once, first.
        """
        bench, model, number = self._bench, self.model, self._version.number
        bench.check_free(model)
        bench.placement.held.add(model)
        self._before = bench.servables.standing(model, number)
        self._origin = bench.folder_of(model)
        self._release_before = bench.releases.get(model)
        self._incumbents = bench.servables.live_of(model)
        self.incumbent = max(self._incumbents, key=lambda servable: servable.number, default=None)
        started_s = bench.clock.monotonic_s()
        if bench.servables.find(model, number) is None:
            bench.servables.stand(Standing(model, number, State.LOADING))
        try:
            self._loaded = self._load_newcomer()
        except EdgeRuntimeError as error:
            self._stand_as_before()
            bench.lobby.open(model, NotReady(f"model {model} version {number} failed to load: {error.message}"))
            raise
        finally:
            if self._loaded is None:
                self._end()
        if self._incumbents:
            bench.servables.arrange(model, self._incumbents, [self.newcomer])
        log_loaded(self._loaded, bench.clock.monotonic_s() - started_s)

    def split(self, percent: float) -> None:
        """Canary: so many percent of the requests that name no version go to the newcomer; 0 ends it.

        After `swap` too: then both answer again. A request that names a version is answered by it; by the incumbent
        where both have the same. Inline models run each request alone meanwhile. Raises LoadFailed: nothing to share
        with, or specs that differ.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent: got {percent}; wanted 0 to 100")
        self._ask(lambda: self._split(percent))

    def mirror(self, share: float, tolerance: Tolerance | None = None) -> Mirror:
        """Shadow: the newcomer runs copies of what the incumbent answers, until the next change.

        share: of one core's time for copies, above 0 and at most 1. tolerance: of outputs, None for what is usual at
        the newcomer's precision. Inline models run each request alone meanwhile. Raises LoadFailed as `split`, and
        after `swap`.
        """
        return self._ask(lambda: self._mirror_copies(share, tolerance))

    def swap(self) -> None:
        """From now on the newcomer answers everything; what answered stays loaded, out of the table."""
        self._ask(self._swap)

    def commit(self) -> None:
        """The newcomer stays; what it replaced is closed when it has answered what it admitted."""
        self._ask(self._commit)

    def roll_back(self) -> None:
        """What answered before answers again; the newcomer is closed when it has answered what it admitted.

        Raises LoadFailed: it had to be loaded again, and did not; then nothing of the model serves.
        """
        self._ask(self._roll_back)

    # ---- on the loader's thread: load -------------------------------------------------------------------------------

    def _load_newcomer(self) -> Loaded:
        """Beside the incumbents if memory allows. Before it was ever loaded its size is a guess, so try and see."""
        if self._must_be_alone():
            return self._load_alone()
        try:
            return self._place()
        except LoadFailed:
            if not self._must_be_alone():
                raise
            return self._load_alone()

    def _must_be_alone(self) -> bool:
        """Whether memory holds the newcomer, but not beside what serves."""
        has_room, incumbents = self._bench.placement.has_room, self._incumbents
        return bool(incumbents) and not has_room(self._version) and has_room(self._version, without=incumbents)

    def _place(self) -> Loaded:
        metrics = self._bench.metrics
        own = metrics.apart(self.model)
        try:
            return self._bench.placement.load(self._folder, self._version, metrics=own)
        except LoadFailed:
            metrics.retire(self.model, own)
            raise

    def _load_alone(self) -> Loaded:
        """Unload the incumbents, load the newcomer and let it answer; who asks meanwhile waits in the lobby."""
        bench, began_s = self._bench, self._bench.clock.monotonic_s()
        log.warning("memory holds one version only: unloading what serves first", extra={"model": self.model})
        self._clear(self._incumbents)
        try:
            self._before_alone()
            loaded = self._place()
        except EdgeRuntimeError:
            self._bring_back(self._incumbents, began_s)
            raise
        self._unloaded, self._incumbents = self._incumbents, []
        self._let_answer([loaded.servable], began_s)
        bench.releases[self.model] = self._folder
        self._is_swapped = True
        return loaded

    def _clear(self, leaving: Sequence[Servable]) -> None:
        """Nothing of the model answers from here on, and whoever asks waits."""
        servables = self._bench.servables
        for number in {self._version.number, *(servable.number for servable in leaving)}:
            servables.stand(Standing(self.model, number, State.LOADING))
        servables.arrange(self.model, (), ())
        for servable in leaving:
            self._bench.placement.retire(servable)

    def _let_answer(self, live: Sequence[Servable], began_s: float) -> None:
        """The gap ends."""
        bench = self._bench
        bench.servables.arrange(self.model, live, ())
        self.gap_s = bench.clock.monotonic_s() - began_s
        bench.lobby.open(self.model, None)
        log.warning("nothing of the model answered", extra={"model": self.model, "for_s": round(self.gap_s, 3)})

    def _bring_back(self, gone: Sequence[Servable], began_s: float) -> None:
        """Load the incumbents again. Raises LoadFailed: nothing of the model serves, and where it stands says why."""
        bench, origin = self._bench, self._origin
        again: list[Servable] = []
        try:
            for servable in gone:
                if origin is None or servable.number not in origin.versions:
                    raise LoadFailed(f"model {self.model} version {servable.number} is gone from where it was")
                again.append(bench.placement.load(origin, origin.versions[servable.number]).servable)
        except LoadFailed as error:
            for servable in gone:
                bench.servables.stand(Standing(self.model, servable.number, State.FAILED, error.message))
            if not again:
                bench.lobby.open(self.model, NotReady(f"model {self.model} failed to load again: {error.message}"))
                raise
        self.incumbent = max(again, key=lambda servable: servable.number)
        self._let_answer(again, began_s)

    # ---- on the loader's thread: decide -----------------------------------------------------------------------------

    def _ask(self, step: Callable[[], T]) -> T:
        return self._bench.orders.ask(lambda: self._if_not_over(step))

    def _if_not_over(self, step: Callable[[], T]) -> T:
        if self._is_over:
            raise LoadFailed(f"the exchange of model {self.model} version {self._version.number} is over")
        return step()

    def _split(self, percent: float) -> None:
        others = self._incumbents if self._is_swapped else self._others()
        incumbent = self._check_both(others)
        self._end_trial()
        self._is_swapped = False
        self._give_name_back()
        live, beside = others, [self.newcomer]
        if not percent:
            self._bench.servables.arrange(self.model, live, beside)
            return
        if self.newcomer.number not in {servable.number for servable in live}:
            live, beside = [*live, self.newcomer], []
        split = Split(incumbent, self.newcomer, percent)
        self._bench.servables.arrange(self.model, live, beside, split)

    def _mirror_copies(self, share: float, tolerance: Tolerance | None) -> Mirror:
        others = [] if self._is_swapped else self._others()
        incumbent, newcomer, bench = self._check_both(others), self.newcomer, self._bench
        self._end_trial()
        precision = newcomer.layouts.narrow.precision
        mirror = Mirror(
            incumbent,
            newcomer,
            share=share,
            tolerance=tolerance or TOLERANCES.get(precision, DEFAULT_TOLERANCE),
            dispatcher=bench.dispatcher,
            clock=bench.clock,
            run_soon=bench.orders.give,
        )
        incumbent.follower = self._mirror = mirror
        bench.servables.arrange(self.model, self._others(), [newcomer])
        return mirror

    def _check_both(self, others: Sequence[Servable]) -> Servable:
        """The incumbent of these. Raises LoadFailed: there is none to try the newcomer beside."""
        if not others:
            raise LoadFailed(f"model {self.model}: nothing answers beside the newcomer; use swap")
        incumbent = max(others, key=lambda servable: servable.number)
        reason = why_not_alike(incumbent, self.newcomer)
        if reason is not None:
            raise LoadFailed(f"model {self.model}: the two cannot stand in for one another: {reason}; use swap")
        return incumbent

    def _end_trial(self) -> None:
        """End what goes on beside; the next arrangement of the table brings the lean path back."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        for servable in self._others():
            servable.follower = None

    def _swap(self) -> None:
        if self._is_swapped:
            return
        self._end_trial()
        bench, newcomer = self._bench, self.newcomer
        # Asked again: one that waited for its first request may have been loaded since.
        self._incumbents = self._others()
        bench.servables.arrange(self.model, [newcomer], self._incumbents)
        bench.releases[self.model] = self._folder
        self._is_swapped = True
        bench.lobby.open(self.model, None)
        log.info("swapped in", extra={"model": self.model, "version": newcomer.number})

    def _commit(self) -> None:
        self._swap()
        bench = self._bench
        bench.servables.arrange(self.model, [self.newcomer], ())
        for servable in self._incumbents:
            bench.placement.retire(servable)
        for servable in (*self._incumbents, *self._unloaded):
            servable.metrics.unwatch()
        for standing in bench.servables.standings_of(self.model):
            if standing.number != self._version.number:
                bench.servables.forget(self.model, standing.number)
        assert self._loaded is not None
        bench.lifecycle.calibrate(self._loaded)
        self._end()

    def _roll_back(self) -> None:
        bench, newcomer = self._bench, self.newcomer
        self._end_trial()
        self._give_name_back()
        try:
            if self._unloaded:
                self._exchange_back()
            else:
                bench.servables.arrange(self.model, self._incumbents if self._is_swapped else self._others(), ())
                self._stand_as_before()
                bench.lobby.open(self.model, None)
                bench.placement.retire(newcomer)
        finally:
            self._end()
        log.warning("rolled back", extra={"model": self.model, "version": newcomer.number})

    def _give_name_back(self) -> None:
        """On demand the model is loaded from where it was before."""
        if self._release_before is not None:
            self._bench.releases[self.model] = self._release_before
        else:
            self._bench.releases.pop(self.model, None)

    def _exchange_back(self) -> None:
        """Memory holds only one: the newcomer leaves, then the incumbents are loaded."""
        began_s = self._bench.clock.monotonic_s()
        self._clear([self.newcomer])
        try:
            self._bring_back(self._unloaded, began_s)
        finally:
            self._stand_as_before()

    def _others(self) -> list[Servable]:
        return [servable for servable in self._bench.servables.live_of(self.model) if servable is not self.newcomer]

    def _stand_as_before(self) -> None:
        """Of the newcomer's number, unless one that serves has it too."""
        servables, number = self._bench.servables, self._version.number
        if servables.find(self.model, number) is not None:
            return
        if self._before is None:
            servables.forget(self.model, number)
        else:
            servables.stand(self._before)

    def _end(self) -> None:
        self._is_over = True
        self._bench.placement.held.discard(self.model)
        self._bench.on_end(self.model)
