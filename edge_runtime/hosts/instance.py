"""A model in a host, as serving sees it: an instance whose runs happen in a child process.

Owns: the choice of a free runner, what the death of a host means for its runs, and the next host. A runner's side in
the daemon is runner.py's, a run that was begun host_run.py's, one host's life host_life.py's, its process process.py's.
Thread: any number may run; runs that were begun end on the loop of `Hosts.events`, or where that must wait, on a thread
of their own; a death arrives on `edge-hosts`, and the next host is started on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from edge_runtime.answers import steps_of_host
from edge_runtime.backends.base import (
    Backend,
    BeginCall,
    BuildOrder,
    BuildSource,
    HostStatus,
    LoadOptions,
    OnEnd,
    OnResponse,
    Probe,
    RunOwner,
)
from edge_runtime.backends.declaration import Declaration
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import (
    BackendUnavailable,
    EdgeRuntimeError,
    HostEnded,
    LoadFailed,
    NotBuiltYet,
    RunFailed,
    RunTooLong,
)
from edge_runtime.hosts.form_instance import FormInstance
from edge_runtime.hosts.host_life import HostLife
from edge_runtime.hosts.host_run import HostRun
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.memory import SharedMemory
from edge_runtime.hosts.messages import (
    MAX_TASK_BYTES,
    BrokenMessage,
    Built,
    ChannelEnded,
    HostReport,
    HostTask,
    Loaded,
    NotBuilt,
    NotLoaded,
    RequestLine,
    TensorLine,
    WantsBuilt,
    receive,
    send,
)
from edge_runtime.hosts.process import END_TIMEOUT_S, HostProcess
from edge_runtime.hosts.regions import LENDER, RegionOwner
from edge_runtime.hosts.runner import Apart, FirstResponse, RunnerSide
from edge_runtime.hosts.shared_hosts import BusyRuns, HostPlace
from edge_runtime.kept_state import no_sequence
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.steps import Form
from edge_runtime.tensors import Array, Tensors

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Enough to import a large framework from an SD card; `load_timeout_s` in the model's options overrides it."""

INTERRUPT_GRACE_S = 0.5
"""A library that can end a run does so between two of its nodes, within milliseconds; else the host is killed."""

END_GRACE_S = 1.0
"""A `model.py` whose channel is closed ends by itself; it gets this time to clean up, then it is killed."""

DEATHS = 3
DEATHS_WITHIN_S = 60.0
"""The version fails after this many deaths in this time, while it loads or is idle."""

IN_PLACE_BYTES = 4 << 20
"""From this size an input is received where its host reads it. A smaller one is copied to the runner's slot, whose
memory is in the caches: MobileNetV2 by 600 KB frames served .85 and .94 of the best layout so, at 16 and 64 in flight,
and .81 and .86 in place."""


LOST_RUNS = 10
"""So often a run of a load is begun again that was lost for a neighbour's sake: as often as a request's is."""

_OWN_OPTIONS = ("load_timeout_s", "run_timeout_s")
"""Options of every model in a host; its library does not get them."""


class HostedBackend:
    """A backend whose instances live in hosts. Its library is never imported here."""

    def __init__(
        self,
        backend: Backend,
        hosts: Hosts,
        *,
        allows_code: bool = False,
        builds: BuildSource | None = None,
        clock: Clock | None = None,
        begin_call: BeginCall | None = None,
    ) -> None:
        """allows_code, builds: as of `registry.backend`.

        begin_call: calls other models for a run; None: there are none.
        """
        self.declaration = backend.declaration
        self._hosts = hosts
        self._allows_code = allows_code
        self._builds = builds
        self._clock: Clock = clock or SystemClock()
        self._begin_call = begin_call

    def probe(self) -> Probe:
        """Tell the version of the library that is installed, without importing it."""
        from importlib.metadata import PackageNotFoundError, version  # a tenth of all that a start imports

        try:
            found = version(self.declaration.name)
        except PackageNotFoundError:
            found = ""
        return Probe(self.declaration.name, is_available=True, version=found)

    def load(self, artifact: Path, options: LoadOptions) -> HostInstance:
        """Start a host, and wait until it has loaded the model."""
        load_timeout_s = seconds_option(options, "load_timeout_s", LOAD_TIMEOUT_S)
        run_limit_s = seconds_option(options, "run_timeout_s", math.inf)
        extra = {key: value for key, value in options.extra.items() if key not in _OWN_OPTIONS}
        task = HostTask(
            self.declaration,
            str(artifact.absolute()),
            replace(options, extra=extra, steps=options.steps and steps_of_host(options.steps)),
            options.concurrency,
            options.host_memory_bytes,
            self._allows_code,
            options.concurrency if self.declaration.runs_ahead else 0,
            options.shared_by if _may_share(self.declaration, artifact, options) else "",
        )
        nbytes = len(msgspec.msgpack.encode(task))
        if nbytes > MAX_TASK_BYTES:
            raise LoadFailed(
                f"what its host has to know of it is {nbytes} bytes, at most {MAX_TASK_BYTES} can be told; declare "
                "fewer labels"
            )
        instance = HostInstance(
            task,
            self._hosts,
            load_timeout_s=load_timeout_s,
            run_limit_s=run_limit_s,
            builds=self._builds,
            clock=self._clock,
            begin_call=self._begin_call,
        )
        instance.load()
        return instance


class HostInstance:
    """One loaded copy of a version, in a host of its own or a shared one, which is replaced at once when it dies.

    But DEATHS in DEATHS_WITHIN_S while loading, warming up or idle end it for good: `Hosts` keeps the reason, and runs
    raise it. Deaths during runs never do once it `is_warm`, nor do signals from outside. functions: of a pipeline's
    Python steps, in the order of its options.
    """

    def __init__(
        self,
        task: HostTask,
        hosts: Hosts,
        *,
        load_timeout_s: float,
        run_limit_s: float,
        builds: BuildSource | None,
        clock: Clock,
        begin_call: BeginCall | None = None,
    ) -> None:
        self.backend = task.backend
        self.spec = ModelSpec((), ())
        self.forms: dict[Form, FormInstance] = {}
        self.functions: tuple[FormInstance, ...] = ()
        self.device = ""
        self.precision = ""
        self.concurrency = 1
        self.ahead = task.ahead
        self.memory_bytes = 0
        self.is_warm = False
        self._task = task
        self._hosts = hosts
        self.load_timeout_s = load_timeout_s
        self._run_limit_s = run_limit_s
        self._builds = builds
        self._clock = clock
        self._begin_call = begin_call
        self._changed = threading.Condition()
        self._life: HostLife | None = None
        self._loading: HostProcess | HostPlace | None = None
        self._mover: threading.Thread | None = None
        self._busy = BusyRuns()
        self._starter: threading.Thread | None = None
        self._deaths_s: deque[float] = deque(maxlen=DEATHS)
        self._failure = ""
        self._last_end = ""
        self._restarts = 0
        self._is_closed = False
        self.hands_over = False
        self._lender = RegionOwner(LENDER)

    def load(self) -> None:
        """Start the first host. Raises LoadFailed, BackendUnavailable, leaving nothing behind."""
        self._hosts.begin_load(self._give_up)
        if self._hosts.regions is not None:
            self._hosts.regions.on_end.append(self._forget_regions)
        try:
            self._load()
        except BaseException:
            self._hosts.end_load(self._give_up)
            self._leave_regions()
            raise

    def _load(self) -> None:
        while True:
            try:
                life = self._bring_up()
            except _EndedFromOutside as error:
                if not isinstance(error, _EndedAmongOthers) and self._count_death():
                    raise LoadFailed(error.message) from error
                continue
            with self._changed:
                if not life.is_dead:
                    self._life = life
                    return
            life.close()
            if not life.process.is_one_of_many:
                raise LoadFailed(f"{self._task.artifact}: {life.process.how_it_ended}")

    @property
    def host(self) -> HostStatus:
        """The status of the host now. Thread: any."""
        with self._changed:
            life, restarts, last_end = self._life, self._restarts, self._last_end
        if life is None:
            return HostStatus(0, restarts, 0, last_end)
        memory_bytes = life.memory_bytes(self._clock.monotonic_s())
        return HostStatus(life.process.pid, restarts, memory_bytes, last_end, life.process.models)

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once; the host may be replaced first, or end meanwhile.

        The limit is the load's: without deadlines of their own, warm-up and calibration run on the loader's thread. Of
        a model that streams, the first response counts.
        """
        parts = [[np.asarray(inputs[spec.name]) for spec in self.spec.inputs]]
        results = self.run_for_load(parts)
        if outputs is None or not results:
            return results
        by_name = {spec.name: array for spec, array in zip(self.spec.outputs, results, strict=True)}
        try:
            return [by_name[name] for name in outputs]
        except KeyError as error:
            raise RunFailed(f"the model has no output {error}") from error

    def run_for_load(self, parts: Sequence[Sequence[Array]], *, form: int = 0) -> list[Array]:
        """Run as `run` does, once more where a shared host ended meanwhile: no load fails for a neighbour's sake."""
        if self.spec.sequences is not None:
            parts = [[*inputs, no_sequence()] for inputs in parts]
        for _ in range(LOST_RUNS):
            try:
                return self._run_joined(parts, self.load_timeout_s, form)
            except _EndedBeside:
                continue
        return self._run_joined(parts, self.load_timeout_s, form)

    def run_parts(
        self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool = False, form: int = 0
    ) -> list[Array]:
        """Run requests together, joined in the host's memory. Raises RunFailed, RunTooLong, HostEnded.

        form: of its steps, as `Run` has it. A model that sees each request by itself sees one, of the joined rows.
        """
        del alone  # the caller starts no other run beside it, and each runner is one run
        if not self._task.shared_by:
            return self._run_joined(parts, limit_s, form)
        began_s = time.monotonic()
        try:
            return self._run_joined(parts, limit_s, form)
        finally:
            self.count_run(time.monotonic() - began_s)

    def _run_joined(self, parts: Sequence[Sequence[Array]], limit_s: float, form: int) -> list[Array]:
        if self.spec.by_request is None:
            return self._run(parts, limit_s, form, None)
        first = FirstResponse()
        return self._run(parts, limit_s, form, Apart((), (), first)) or first.outputs()

    def run_requests(
        self,
        parts: Sequence[Sequence[Array]],
        limit_s: float,
        rows: tuple[int, ...],
        lines: Sequence[RequestLine],
        on_response: OnResponse,
    ) -> list[Array]:
        """Run requests together that the model sees each by itself; an empty list where each was answered alone.

        parts: as of `run_parts`. rows: of each request, in the order of the parts, which may hold several. lines: more
        of each, empty where there are none. limit_s: between two responses. Raises as `run_parts`.
        """
        return self._run(parts, limit_s, 0, Apart(rows, tuple(lines), on_response))

    @property
    def lives(self) -> int:
        """How many hosts ended so far: the state that one kept between requests is gone with it. Thread: any."""
        return self._restarts

    @property
    def begins(self) -> bool:
        """Whether runs may be begun: there is a loop that hears of their ends."""
        return self._hosts.events is not None

    def begin(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: RunOwner, on_end: OnEnd, *, form: int = 0
    ) -> HostRun:
        """Begin a run as `HostedInstance.begin`. form: as of `run_parts`."""
        if self.spec.by_request is None:
            return self._begin(parts, limit_s, owner, on_end, form, None)
        first = FirstResponse()

        def end(result: list[Array] | EdgeRuntimeError) -> None:
            try:
                on_end(result or first.outputs())
            except RunFailed as error:
                on_end(error)

        return self._begin(parts, limit_s, owner, end, form, Apart((), (), first))

    def begin_requests(  # noqa: PLR0917 (as of `run_requests`)
        self,
        parts: Sequence[Sequence[Array]],
        limit_s: float,
        owner: RunOwner,
        on_end: OnEnd,
        rows: tuple[int, ...],
        lines: Sequence[RequestLine],
        on_response: OnResponse,
    ) -> HostRun:
        """Begin a run as `run_requests` does; on_response is called on the loop's thread."""
        return self._begin(parts, limit_s, owner, on_end, 0, Apart(rows, tuple(lines), on_response))

    def _begin(  # noqa: PLR0917 (on the data path, where keywords cost)
        self,
        parts: Sequence[Sequence[Array]],
        limit_s: float,
        owner: RunOwner,
        on_end: OnEnd,
        form: int,
        apart: Apart | None,
    ) -> HostRun:
        with self._changed:
            life = self._life
            if life is None or not life.free:
                if self._is_closed or self._failure:
                    raise RunFailed(self._failure or "the instance is closed")
                how = f": the last one ended ({self._last_end})" if self._last_end else ""
                raise HostEnded(f"the model has no host now{how}", is_outside=True, has_begun=False)
            life.running += 1
            runner = life.free.pop()
        run = HostRun(self, life, runner, min(limit_s, self._run_limit_s), owner, on_end)
        runner.hands_over = self.hands_over
        life.runs[runner.fd] = run
        try:
            runner.begin(parts, form, apart)
        except ChannelEnded as error:
            run.lose(error)
            return run
        except BaseException:
            run.is_over = True
            run.leave_runner()
            raise
        run.await_report()
        return run

    def _run(self, parts: Sequence[Sequence[Array]], limit_s: float, form: int, apart: Apart | None) -> list[Array]:
        life, runner = self._take_runner()
        limit_s = min(limit_s, self._run_limit_s)
        runner.hands_over = self.hands_over
        try:
            return runner.run(parts, limit_s, form, apart)
        except TimeoutError:
            raise self.end_run(life, runner, limit_s) from None
        except ChannelEnded as error:
            raise self.lost_run(life, error) from error
        finally:
            self.give_back(life, runner)

    def room(self, nbytes: int) -> Array | None:
        """Memory that a host of this model maps, see base.HostedInstance."""
        regions = self._hosts.regions
        return None if regions is None or nbytes < IN_PLACE_BYTES else regions.lend(self._lender, nbytes)

    def restore(self) -> None:
        """Wait until a host can run again, and has a runner for it. Raises LoadFailed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._life is not None and self._life.free) or self._failure or self._is_closed
            )
            if self._life is None:
                raise LoadFailed(self._failure or "the instance is closed")

    def finish_warm_up(self) -> None:
        """From here on deaths during runs are the requests' fault. Raises LoadFailed: too many came before."""
        self._hosts.end_load(self._give_up)
        with self._changed:
            self.is_warm = True
            if self._failure:
                raise LoadFailed(self._failure)

    def bind(self, max_rows: int) -> None:
        """Return None: a run in a host is waited for, and the I/O thread may not wait."""

    def close(self) -> None:
        """End the host and all that it started."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            life, self._life = self._life, None
            loading, starters = self._loading, (self._starter, self._mover)
            self._changed.notify_all()
        self._hosts.end_load(self._give_up)
        if loading is not None:
            loading.leave("it is unloaded", 0.0)
        if life is not None:
            self._end(life)
        for starter in starters:
            if starter is not None:
                starter.join()
        self._lender.idle.clear()
        self._leave_regions()

    def _forget_regions(self) -> None:
        """Have the host unmap regions that ended; a runner at work does it before its next run. Thread: any."""
        with self._changed:
            free = self._life.free if self._life is not None else []
            for runner in free:
                with contextlib.suppress(ChannelEnded):  # `edge-hosts` tells it
                    runner.forget_regions()

    def _leave_regions(self) -> None:
        if self._hosts.regions is not None and self._forget_regions in self._hosts.regions.on_end:
            self._hosts.regions.on_end.remove(self._forget_regions)

    def _give_up(self, reason: str) -> None:
        """End a load or a warm-up, which may take for ever. Thread: any."""
        with self._changed:
            if self.is_warm or self._is_closed:
                return
            self._failure = reason
            life, loading = self._life, self._loading
            self._changed.notify_all()
        for process in (loading, life.process if life is not None else None):
            if process is not None:
                process.leave(reason, 0.0)

    # ---- runners -----------------------------------------------------------------------------------------------------

    def _take_runner(self) -> tuple[HostLife, RunnerSide]:
        """Wait for a host and a free runner of it. Raises RunFailed: there will be none."""
        with self._changed:
            while True:
                if self._is_closed or self._failure:
                    raise RunFailed(self._failure or "the instance is closed")
                life = self._life
                if life is not None and life.free:
                    life.running += 1
                    return life, life.free.pop()
                self._changed.wait()

    def give_back(self, life: HostLife, runner: RunnerSide) -> None:
        """Have a runner take another run."""
        with self._changed:
            life.running -= 1
            if life.is_left and not life.running:
                life.process.leave("it has a host of its own", 0.0)
                life.close()
            elif not life.is_dead:
                if runner.given:
                    with contextlib.suppress(ChannelEnded):  # `edge-hosts` tells it
                        runner.forget_regions()
                life.free.append(runner)
                self._changed.notify_all()  # those that wait for a runner, and those that wait until there is one
            elif not life.running and self._life is not life:
                life.close()

    def end_run(self, life: HostLife, runner: RunnerSide, limit_s: float) -> RunTooLong | HostEnded:
        """End a run that is over its limit: by the library where it can, else with its host. Waits."""
        try:
            has_ended = life.can_interrupt and runner.interrupt(life.process.control, INTERRUPT_GRACE_S)
        except ChannelEnded as error:  # another run ended the host
            return self.lost_run(life, error)
        if not has_ended:
            life.was_killed_for_limit = True
            life.process.end(f"it was killed: a run took longer than its limit, {limit_s:g} s")
            self._leave(life)
        return RunTooLong(f"the run took longer than its limit, {limit_s:g} s, and was ended")

    def lost_run(self, life: HostLife, error: ChannelEnded) -> HostEnded:
        """End a host whose channel ended during a run, or cannot be used again. Waits."""
        if isinstance(error, BrokenMessage):
            life.process.kill(f"it was killed, because {error}")
        return self._ended(life)

    def _leave(self, life: HostLife) -> None:
        """Use a host no more, also one that does not end: the result of a run given up would answer the next one."""
        with self._changed:
            is_dead = life.is_dead
        if not is_dead:
            life.process.hang_up()
            self._host_ended(life)

    def _ended(self, life: HostLife) -> HostEnded:
        """Say how a host ended, whose channel ended during a run."""
        process = life.process
        if not life.is_dead and not process.has_ended.wait(END_TIMEOUT_S):
            process.end("it closed its channel")
            self._leave(life)
        how = process.signal_name or ("" if process.status is None else f"exit status {process.status}")
        kind = _EndedBeside if process.is_one_of_many else HostEnded
        return kind(
            f"the model's process ended during this run ({process.ended_for or how or process.how_it_ended}); "
            "another one is started, see the log",
            signal_name=how,
            is_outside=process.was_ended_from_outside or life.was_killed_for_limit,
            was_alone=life.running_at_end <= 1 and not (process.is_suspect and process.is_one_of_many),
        )

    # ---- a host's life -----------------------------------------------------------------------------------------------

    def _bring_up(self) -> HostLife:
        """Fork a host and have it load. Raises LoadFailed, BackendUnavailable, leaving nothing behind."""
        process = self._hosts.start(self._task, str(Path(self._task.artifact).parent))
        life = HostLife(process, self._hosts.events)
        process.on_end = lambda _: self._host_ended(life)
        if isinstance(process, HostPlace):
            process.is_at_work = lambda: self._loading is process or life.running > 0
        with self._changed:
            self._loading = process
            failure = "the instance is closed" if self._is_closed else self._failure
        try:
            if failure:
                raise LoadFailed(failure)
            loaded = self._wait_for_load(process)
            kept = loaded.sequences
            spec = ModelSpec(_specs(loaded.inputs), _specs(loaded.outputs), loaded.max_rows, loaded.by_request, kept)
            form_specs = [
                ModelSpec(_specs(each.inputs), _specs(each.outputs), loaded.max_rows, sequences=kept)
                for each in loaded.forms
            ]
            if self.spec.outputs and spec != self.spec:
                raise LoadFailed(f"{self._task.artifact} was changed: it has other tensors than before")
        except BaseException:
            process.leave("it is not used")
            process.close()
            raise
        finally:
            with self._changed:
                self._loading = None
        self.spec, self.device, self.precision = spec, loaded.device, loaded.precision
        if self._task.options.functions:
            specs_of_all = enumerate((spec, *form_specs))
            self.functions = self.functions or tuple(FormInstance(self, number, made) for number, made in specs_of_all)
        elif not self.forms:
            named = zip(loaded.forms, form_specs, strict=True)
            self.forms = {line.form: FormInstance(self, number, made) for number, (line, made) in enumerate(named, 1)}
        self.concurrency = min(loaded.concurrency, self._task.runners)
        self.memory_bytes = loaded.memory_bytes
        used = process.runners[: max(self.concurrency, 1) + self.ahead]
        life.can_interrupt = loaded.can_interrupt
        regions = self._hosts.regions
        specs = [spec, *form_specs]
        life.free = [
            RunnerSide(index, channel, specs, regions, self._begin_call, lender=self._lender)
            for index, channel in enumerate(used)
        ]
        life.watch()
        return life

    def _wait_for_load(self, process: HostProcess | HostPlace) -> Loaded:
        artifact = self._task.artifact
        deadline_s = time.monotonic() + self.load_timeout_s
        while True:
            try:
                process.control.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                report = receive(process.control, HostReport)
                if isinstance(report, Loaded):
                    process.control.settimeout(None)
                    return report
                if isinstance(report, NotLoaded):
                    if report.wants_own_host and self._task.shared_by:
                        self._live_alone()
                        raise _EndedAmongOthers(report.message)
                    raise _not_loaded(report)
                if isinstance(report, WantsBuilt):
                    self._send_built(process, report)
            except TimeoutError:
                raise LoadFailed(f"{artifact} was not loaded within {self.load_timeout_s:g} s") from None
            except BrokenMessage as error:
                raise LoadFailed(f"{artifact}: its process sent what is not a message: {error}") from error
            except ChannelEnded as error:
                process.has_ended.wait(END_TIMEOUT_S)
                how = process.ended_for or process.signal_name or process.how_it_ended
                kind = _EndedFromOutside if process.was_ended_from_outside else LoadFailed
                if process.is_one_of_many:
                    kind = _EndedAmongOthers
                if process.is_suspect:
                    self._live_alone()
                raise kind(f"{artifact} ended its process while loading: {how}; see the log") from error

    def _send_built(self, process: HostProcess | HostPlace, wanted: WantsBuilt) -> None:
        """Answer the backend's question for the bytes that it has built of the model."""
        try:
            if self._builds is None:
                raise BackendUnavailable("nothing that was built is kept here")
            built = self._builds.built(BuildOrder(self.backend, self._task.artifact, wanted.key, wanted.plan))
        except EdgeRuntimeError as error:
            send(process.control, NotBuilt(str(error), isinstance(error, NotBuiltYet)))
            return
        memory = SharedMemory.new(max(len(built), 1))
        memory.bytes[: len(built)] = np.frombuffer(built, np.uint8)
        send(process.control, Built(len(built)), [memory.descriptor])
        memory.close()

    def _host_ended(self, life: HostLife) -> None:
        """A host is gone, or is left: have the next one started. Thread: `edge-hosts`, or a run's."""
        with self._changed:
            if life.is_dead:
                return
            life.is_dead = True
            if life.process.is_suspect:
                self._live_alone()
            life.running_at_end = life.running
            if life.is_left:
                return
            self._last_end = life.process.how_it_ended
            if self._life is not life or self._is_closed:
                return
            self._life = None
            log.warning("a host ended", extra={"path": life.process.label, "reason": self._last_end})
            if not life.running:
                life.close()
            if self._failure:
                return
            counts = not self.is_warm or not life.running
            if counts and not life.process.was_ended_from_outside and self._count_death():
                self._fail(f"its process ended {DEATHS} times within {DEATHS_WITHIN_S:g} s: {self._last_end}")
                return
            if self._mover is not None and self._mover.is_alive():
                return  # it brings up the next one already
            self._starter = threading.Thread(target=self._start_again, name="edge-host-start", daemon=True)
            self._starter.start()

    def _start_again(self) -> None:
        """Start a host in place of one that ended; a load that fails counts as a death."""
        while True:
            error: EdgeRuntimeError | None = None
            try:
                life = self._bring_up()
            except EdgeRuntimeError as failed:
                error = failed
            with self._changed:
                if self._is_closed or self._failure:
                    break
                if error is None and not life.is_dead:
                    self._life = life
                    self._restarts += 1
                    self._changed.notify_all()
                    return
                if error is None:
                    life.close()
                reason = error.message if error is not None else life.process.how_it_ended
                is_among_others = life.process.is_one_of_many if error is None else isinstance(error, _EndedAmongOthers)
                if not is_among_others and self._count_death():
                    self._fail(f"its process ended, and cannot be started again: {reason}")
                    return
        if error is None:
            self._end(life)

    def _count_death(self) -> bool:
        """Count a death that may fail the version; whether it does."""
        now_s = self._clock.monotonic_s()
        self._deaths_s.append(now_s)
        return len(self._deaths_s) == DEATHS and now_s - self._deaths_s[0] <= DEATHS_WITHIN_S

    def _fail(self, reason: str) -> None:
        """End for good. Under the lock."""
        log.error("a model's host is not started again", extra={"path": self._task.artifact, "reason": reason})
        self._failure = reason
        self._changed.notify_all()
        self._hosts.report_failure(self, reason)

    def _end(self, life: HostLife) -> None:
        grace_s = self._hosts.grace_s(END_GRACE_S) if self._task.declaration.ends_softly else 0.0
        life.process.leave("it was unloaded", self._hosts.grace_s(END_TIMEOUT_S), grace_s)
        life.close()

    # ---- from a shared host to one of its own ------------------------------------------------------------------------

    def _live_alone(self) -> None:
        """Have every host from now on for itself."""
        self._task = replace(self._task, shared_by="")

    def count_run(self, took_s: float) -> None:
        """Count a run in a shared host, and move out once there are too many."""
        with self._changed:
            is_busy = self._busy.count(took_s, self._clock.monotonic_s())
            if is_busy and self._task.shared_by and not self._is_closed:
                self._live_alone()
                self._mover = threading.Thread(target=self._move, name="edge-host-start", daemon=True)
                self._mover.start()

    def _move(self) -> None:
        """Bring up a host of its own beside the shared one, then have all runs begin there. No request is lost."""
        try:
            life = self._bring_up()
        except EdgeRuntimeError as error:
            log.warning("a busy model keeps its shared host", extra={"path": self._task.artifact, "reason": str(error)})
            with self._changed:
                self._mover = None
                is_without = self._life is None and not (self._is_closed or self._failure)
            if is_without:
                self._start_again()
            return
        with self._changed:
            before, is_wanted = self._life, not (self._is_closed or self._failure or life.is_dead)
            self._mover = None
            if is_wanted:
                self._life = life
                self._restarts += before is None
                self._changed.notify_all()
                if before is not None and not before.is_dead:
                    before.is_left = True
                    if not before.running:
                        before.process.leave("it has a host of its own", 0.0)
                        before.close()
        if not is_wanted:
            self._end(life)


class _EndedFromOutside(LoadFailed):
    """A signal from outside ended a host while it loaded: nothing speaks against trying again."""


class _EndedBeside(HostEnded):
    """A shared host ended during a run, and it is not known that this run is to blame."""


class _EndedAmongOthers(_EndedFromOutside):
    """A shared host ended while a model loaded there, or could not load it: it tries again, and no death counts."""


def _may_share(declaration: Declaration, artifact: Path, options: LoadOptions) -> bool:
    """Whether a model may live in a shared host: it takes one core a run, and nothing but its file.

    A limit of its own for a load or a run is none of the plain options: what goes over it is ended with its host.
    """
    on_cpu = options.device.upper() in ("", "CPU") and not options.delegate
    is_plain = on_cpu and set(options.extra) <= set(declaration.plain_options)
    is_quiet = options.threads == 1 and not (options.spin or options.spins_in_runs)
    is_quiet = is_quiet and options.sequence is None  # who moves to another host leaves its state behind
    is_one_file = not options.functions and not (options.steps is not None and options.steps.files)
    return artifact.suffix in declaration.shares and is_plain and is_quiet and is_one_file


def seconds_option(options: LoadOptions, key: str, default: float) -> float:
    """Read an option in seconds. Raises LoadFailed unless it is a positive number."""
    text = options.extra.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise LoadFailed(f"{key} is {text!r}; wanted a positive number of seconds")
    return value


def _not_loaded(report: NotLoaded) -> EdgeRuntimeError:
    if report.waits_for_build:
        return NotBuiltYet(report.message)
    kind = BackendUnavailable if report.code == BackendUnavailable.code else LoadFailed
    return kind(report.message)


def _specs(lines: Sequence[TensorLine]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(line.name, line.datatype, line.shape, line.quantisation, line.is_optional) for line in lines
    )
