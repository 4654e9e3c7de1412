"""A model in a host, as serving sees it: an instance whose runs happen in a child process.

Owns: the slots, the choice of a free runner, what the death of a host means for its runs, and the next host. The
host's process is hosts.py's. Thread: any number may run; a death is told on `edge-hosts`, and the next host is started
on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge_runtime.backends.base import Backend, BeginCall, Called, HostStatus, LoadOptions, OnResponse, Probe
from edge_runtime.backends.host_memory import (
    MAX_SLOT_BYTES,
    SharedMemory,
    lay_out,
    lay_out_named,
    payload_of,
    slot_bytes,
)
from edge_runtime.backends.host_messages import (
    MAX_ERROR_CHARACTERS,
    MAX_TASK_BYTES,
    Answered,
    BrokenMessage,
    CallModel,
    ChannelEnded,
    Engine,
    Forget,
    HostReport,
    HostTask,
    Interrupt,
    Loaded,
    Memory,
    NeedsMemory,
    NoEngine,
    NotCalled,
    NotLoaded,
    NotRun,
    RequestLine,
    RequestLines,
    Respond,
    Responded,
    Run,
    RunnerReport,
    SlotPlace,
    Taken,
    TensorLine,
    WantsEngine,
    decode,
    receive,
    receive_bytes,
    send,
    send_bytes,
)
from edge_runtime.backends.hosts import END_TIMEOUT_S, HostProcess, Hosts
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import (
    WIRE_ERRORS,
    BackendUnavailable,
    CalledTooSoon,
    DecodeFailed,
    EdgeRuntimeError,
    HostEnded,
    LoadFailed,
    NotBuiltYet,
    Refused,
    RunFailed,
    RunTooLong,
    Unsupported,
    error_from_wire,
)
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.regions import LENDER, MappedFile, RegionOwner, Regions
from edge_runtime.steps import Form, steps_of_host
from edge_runtime.tensors import DATATYPES, Array, Tensors

if TYPE_CHECKING:
    from edge_runtime.backends.tensorrt_backend import EngineSource

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Enough to import a large framework from an SD card; `load_timeout_s` in the model's options overrides it."""

INTERRUPT_GRACE_S = 0.5
"""A library that can end a run does so between two of its nodes, within milliseconds; else the host is killed."""

END_GRACE_S = 1.0
"""A `model.py` whose channel is closed ends by itself; it gets this time to clean up, then it is killed."""

DEATHS = 3
DEATHS_WITHIN_S = 60.0
"""So many deaths in such a time, while loading or idle, and the version has failed."""

HANDED_BYTES = 64 << 10
"""From this size a step's results lie in memory that the next step's host maps: less is copied as quickly."""

KEPT_LAYOUTS = 64
"""Of one runner: the messages and views of shapes that come again and again are made once."""

_HANDED_AHEAD = ("onnxruntime", "openvino")
"""Backends whose hosts take a run while others are on. A `model.py` runs on its host's main thread, one at a time, and
TensorRT has a stream a run."""

_OWN_OPTIONS = ("load_timeout_s", "run_timeout_s")
"""Options of every model in a host; its library does not get them."""


class HostedBackend:
    """A backend whose instances live in hosts. Its library is never imported here."""

    def __init__(
        self,
        backend: Backend,
        hosts: Hosts,
        *,
        allow_python: bool = False,
        engines: EngineSource | None = None,
        clock: Clock | None = None,
        begin_call: BeginCall | None = None,
    ) -> None:
        """allow_python: whether `model.py` may be loaded. engines: the source of TensorRT's.

        begin_call: calls other models for a run; None: there are none.
        """
        self.name = backend.name
        self.artifacts = backend.artifacts
        self._hosts = hosts
        self._allow_python = allow_python
        self._engines = engines
        self._clock: Clock = clock or SystemClock()
        self._begin_call = begin_call

    def probe(self) -> Probe:
        """Tell the version of the library that is installed, without importing it."""
        from importlib.metadata import PackageNotFoundError, version  # a tenth of all that a start imports

        try:
            found = version(self.name)
        except PackageNotFoundError:
            found = ""
        return Probe(self.name, is_available=True, version=found)

    def load(self, artifact: Path, options: LoadOptions) -> HostInstance:
        """Start a host, and wait until it has loaded the model."""
        load_timeout_s = seconds_option(options, "load_timeout_s", LOAD_TIMEOUT_S)
        run_limit_s = seconds_option(options, "run_timeout_s", math.inf)
        extra = {key: value for key, value in options.extra.items() if key not in _OWN_OPTIONS}
        task = HostTask(
            self.name,
            str(artifact.absolute()),
            replace(options, extra=extra, steps=options.steps and steps_of_host(options.steps)),
            options.concurrency,
            options.host_memory_bytes,
            self._allow_python,
            options.concurrency if self.name in _HANDED_AHEAD else 0,
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
            engines=self._engines,
            clock=self._clock,
            begin_call=self._begin_call,
        )
        instance.load()
        return instance


class HostInstance:
    """One loaded copy of a version, in a host of its own. A host that died is replaced at once, but for these deaths.

    DEATHS in DEATHS_WITHIN_S while loading, warming up or idle end it for good: `Hosts` is told why, and runs raise
    that. Deaths during runs never do once it `is_warm`, nor do signals from outside. functions: of a pipeline's Python
    steps, in the order of its options.
    """

    def __init__(
        self,
        task: HostTask,
        hosts: Hosts,
        *,
        load_timeout_s: float,
        run_limit_s: float,
        engines: EngineSource | None,
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
        self._engines = engines
        self._clock = clock
        self._begin_call = begin_call
        self._changed = threading.Condition()
        self._life: _HostLife | None = None
        self._loading: HostProcess | None = None
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
                if self._count_death():
                    raise LoadFailed(error.message) from error
                continue
            with self._changed:
                if not life.is_dead:
                    self._life = life
                    return
            raise LoadFailed(f"{self._task.artifact}: {life.process.how_it_ended}")

    @property
    def host(self) -> HostStatus:
        """What is told of the host now. Thread: any."""
        with self._changed:
            life, restarts, last_end = self._life, self._restarts, self._last_end
        if life is None:
            return HostStatus(0, restarts, 0, last_end)
        return HostStatus(life.process.pid, restarts, life.memory_bytes(self._clock.monotonic_s()), last_end)

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once; the host may be replaced first, or end meanwhile.

        The limit is the load's: without deadlines of their own, warm-up and calibration run on the loader's thread. Of
        a model that streams, the first response counts.
        """
        parts = [[np.asarray(inputs[spec.name]) for spec in self.spec.inputs]]
        results = self.run_parts(parts, self.load_timeout_s)
        if outputs is None or not results:
            return results
        by_name = {spec.name: array for spec, array in zip(self.spec.outputs, results, strict=True)}
        try:
            return [by_name[name] for name in outputs]
        except KeyError as error:
            raise RunFailed(f"the model has no output {error}") from error

    def run_parts(
        self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool = False, form: int = 0
    ) -> list[Array]:
        """Run requests together, joined in the host's memory. Raises RunFailed, RunTooLong, HostEnded.

        form: of its steps, as `Run` has it. A model that sees each request by itself sees one, of the joined rows.
        """
        del alone  # the caller starts no other run beside it, and each runner is one run
        if self.spec.by_request is None:
            return self._run(parts, limit_s, form, None)
        first = _FirstResponse()
        return self._run(parts, limit_s, form, _Apart((), (), first)) or first.outputs()

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
        of each, empty where there is nothing to tell. limit_s: between two responses. Raises as `run_parts`.
        """
        return self._run(parts, limit_s, 0, _Apart(rows, tuple(lines), on_response))

    def _run(self, parts: Sequence[Sequence[Array]], limit_s: float, form: int, apart: _Apart | None) -> list[Array]:
        life, runner = self._take_runner()
        limit_s = min(limit_s, self._run_limit_s)
        runner.hands_over = self.hands_over
        try:
            return runner.run(parts, limit_s, form, apart)
        except TimeoutError:
            self._end_run(life, runner, limit_s)
            raise RunTooLong(f"the run took longer than its limit, {limit_s:g} s, and was ended") from None
        except BrokenMessage as error:
            life.process.kill(f"it was killed, because {error}")
            raise self._ended(life) from error
        except ChannelEnded as error:
            raise self._ended(life) from error
        finally:
            self._give_back(life, runner)

    def restore(self) -> None:
        """Wait until a host can run again. Raises LoadFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._life is not None or self._failure or self._is_closed)
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
            loading, starter = self._loading, self._starter
            self._changed.notify_all()
        self._hosts.end_load(self._give_up)
        if loading is not None:
            loading.kill("it is unloaded")
        if life is not None:
            self._end(life.process)
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
                process.kill(reason)

    # ---- runners -----------------------------------------------------------------------------------------------------

    def _take_runner(self) -> tuple[_HostLife, _RunnerSide]:
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

    def _give_back(self, life: _HostLife, runner: _RunnerSide) -> None:
        with self._changed:
            life.running -= 1
            if not life.is_dead:
                with contextlib.suppress(ChannelEnded):  # `edge-hosts` tells it
                    runner.forget_regions()
                life.free.append(runner)
                self._changed.notify()
            elif not life.running and self._life is not life:
                life.process.close()

    def _end_run(self, life: _HostLife, runner: _RunnerSide, limit_s: float) -> None:
        """End a run that is over its limit: by the library where it can, else with its host."""
        if life.can_interrupt and runner.interrupt(life.process.control, INTERRUPT_GRACE_S):
            return
        life.was_killed_for_limit = True
        life.process.kill(f"it was killed: a run took longer than its limit, {limit_s:g} s")
        life.process.has_ended.wait(END_TIMEOUT_S)

    def _ended(self, life: _HostLife) -> HostEnded:
        """Say how a host ended, whose channel ended during a run."""
        process = life.process
        if not process.has_ended.wait(END_TIMEOUT_S):
            process.kill("it closed its channel")
            process.has_ended.wait(END_TIMEOUT_S)
        how = process.signal_name or ("" if process.status is None else f"exit status {process.status}")
        return HostEnded(
            f"the model's process ended during this run ({process.ended_for or how or process.how_it_ended}); "
            "another one is started, see the log",
            signal_name=how,
            is_outside=process.was_ended_from_outside or life.was_killed_for_limit,
            was_alone=life.running_at_end <= 1,
        )

    # ---- a host's life -----------------------------------------------------------------------------------------------

    def _bring_up(self) -> _HostLife:
        """Fork a host and have it load. Raises LoadFailed, BackendUnavailable, leaving nothing behind."""
        process = self._hosts.start(self._task, str(Path(self._task.artifact).parent))
        life = _HostLife(process)
        process.on_end = lambda _: self._host_ended(life)
        with self._changed:
            self._loading = process
            failure = "the instance is closed" if self._is_closed else self._failure
        try:
            if failure:
                raise LoadFailed(failure)
            loaded = self._wait_for_load(process)
            spec = ModelSpec(_specs(loaded.inputs), _specs(loaded.outputs), loaded.max_rows, loaded.by_request)
            form_specs = [
                ModelSpec(_specs(each.inputs), _specs(each.outputs), loaded.max_rows) for each in loaded.forms
            ]
            if self.spec.outputs and spec != self.spec:
                raise LoadFailed(f"{self._task.artifact} was changed: it has other tensors than before")
        except BaseException:
            process.kill("it is not used")
            process.has_ended.wait(END_TIMEOUT_S)
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
            _RunnerSide(index, channel, specs, regions, self._begin_call, lender=self._lender)
            for index, channel in enumerate(used)
        ]
        return life

    def _wait_for_load(self, process: HostProcess) -> Loaded:
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
                    raise _not_loaded(report)
                if isinstance(report, WantsEngine):
                    self._send_engine(process, report)
            except TimeoutError:
                raise LoadFailed(f"{artifact} was not loaded within {self.load_timeout_s:g} s") from None
            except BrokenMessage as error:
                raise LoadFailed(f"{artifact}: its process sent what is no message: {error}") from error
            except ChannelEnded as error:
                process.has_ended.wait(END_TIMEOUT_S)
                how = process.ended_for or process.signal_name or process.how_it_ended
                kind = _EndedFromOutside if process.was_ended_from_outside else LoadFailed
                raise kind(f"{artifact} ended its process while loading: {how}; see the log") from error

    def _send_engine(self, process: HostProcess, wanted: WantsEngine) -> None:
        """Answer TensorRT's question for an engine."""
        from edge_runtime.backends.tensorrt_plan import EnginePlan

        try:
            if self._engines is None:
                raise BackendUnavailable("no engines are kept here")
            plan = msgspec.json.decode(wanted.plan, type=EnginePlan)
            engine = self._engines.engine(plan, wanted.key)
        except (EdgeRuntimeError, msgspec.MsgspecError) as error:
            send(process.control, NoEngine(str(error), isinstance(error, NotBuiltYet)))
            return
        memory = SharedMemory.new(max(len(engine), 1))
        memory.bytes[: len(engine)] = np.frombuffer(engine, np.uint8)
        send(process.control, Engine(len(engine)), [memory.descriptor])
        memory.close()

    def _host_ended(self, life: _HostLife) -> None:
        """A host is gone: have the next one started. Thread: `edge-hosts`."""
        with self._changed:
            life.is_dead = True
            life.running_at_end = life.running
            self._last_end = life.process.how_it_ended
            if self._life is not life or self._is_closed:
                return
            self._life = None
            log.warning("a host ended", extra={"path": life.process.label, "reason": self._last_end})
            if not life.running:
                life.process.close()
            if self._failure:
                return
            counts = not self.is_warm or not life.running
            if counts and not life.process.was_ended_from_outside and self._count_death():
                self._fail(f"its process ended {DEATHS} times within {DEATHS_WITHIN_S:g} s: {self._last_end}")
                return
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
                reason = error.message if error is not None else life.process.how_it_ended
                if self._count_death():
                    self._fail(f"its process ended, and cannot be started again: {reason}")
                    return
        if error is None:
            self._end(life.process)

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

    def _end(self, process: HostProcess) -> None:
        process.hang_up()
        if self.backend == "python":
            process.has_ended.wait(END_GRACE_S)
        process.kill("it was unloaded")
        process.has_ended.wait(END_TIMEOUT_S)
        process.close()


class FormInstance:
    """A model asked in one form of its steps, or one function of several: the same host and runners, other tensors."""

    def __init__(self, model: HostInstance, number: int, spec: ModelSpec) -> None:
        self.spec = spec
        self._model = model
        self._number = number

        self.forms: dict[Form, FormInstance] = {}
        self.backend, self.device, self.precision = model.backend, model.device, model.precision
        self.concurrency, self.ahead = model.concurrency, model.ahead
        self.memory_bytes = 0  # the model's own

    @property
    def hands_over(self) -> bool:
        """See HostInstance."""
        return self._model.hands_over

    @hands_over.setter
    def hands_over(self, value: bool) -> None:
        self._model.hands_over = value

    @property
    def host(self) -> HostStatus:
        """What is told of its host now."""
        return self._model.host

    def finish_warm_up(self) -> None:
        """See HostInstance. Raises LoadFailed."""
        self._model.finish_warm_up()

    def restore(self) -> None:
        """See HostInstance. Raises LoadFailed."""
        self._model.restore()

    def bind(self, max_rows: int) -> None:
        """Return None, as a host does."""

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once, as HostInstance does; all outputs."""
        del outputs
        parts = [[np.asarray(inputs[spec.name]) for spec in self.spec.inputs]]
        return self.run_parts(parts, self._model.load_timeout_s)

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool = False) -> list[Array]:
        """Run requests of this form together. Raises RunFailed, RunTooLong, HostEnded."""
        return self._model.run_parts(parts, limit_s, alone=alone, form=self._number)

    def close(self) -> None:
        """Nothing: the model's own instance ends the host."""


class _EndedFromOutside(LoadFailed):
    """A signal from outside ended a host while it loaded: nothing speaks against trying again."""


class _HostLife:
    """One host that an instance has, and its free runners. Guarded by the instance's lock."""

    def __init__(self, process: HostProcess) -> None:
        self.process = process
        self.free: list[_RunnerSide] = []
        self.running = 0
        self.running_at_end = 0
        self.can_interrupt = False
        self.is_dead = False
        self.was_killed_for_limit = False
        self._memory_bytes = 0
        self._measured_s = -math.inf

    def memory_bytes(self, now_s: float) -> int:
        """Memory of the process, measured at most once a second: a status must cost its reader's thread nothing."""
        if now_s - self._measured_s >= 1.0:
            self._measured_s = now_s
            self._memory_bytes = self.process.memory_bytes()
        return self._memory_bytes


@dataclass(frozen=True, slots=True)
class _RunOrder:
    """A run of certain shapes: its message, and where each input is written; None: it lies in a region already."""

    message: bytes
    inputs: tuple[Array | None, ...]


@dataclass(frozen=True, slots=True)
class _Apart:
    """What a run tells of its requests by themselves, and who takes their responses."""

    rows: tuple[int, ...]
    lines: tuple[RequestLine, ...]
    on_response: OnResponse


class _FirstResponse:
    """Takes the responses of a run that no request asked for: the first counts."""

    def __init__(self) -> None:
        self._found: Sequence[Array | None] | EdgeRuntimeError | None = None

    def __call__(self, index: int, response: Sequence[Array | None] | EdgeRuntimeError | None, is_last: bool) -> bool:
        del index, is_last
        if self._found is None:
            self._found = response
        return True

    def outputs(self) -> list[Array]:
        """The first response's outputs. Raises its error, RunFailed: there was none."""
        if isinstance(self._found, EdgeRuntimeError):
            raise self._found
        if self._found is None:
            raise RunFailed("the model sent no response")
        return [np.empty(0) if each is None else each for each in self._found]


class _OpenCall:
    """A call of another model that a run waits for."""

    __slots__ = ("began_s", "cancel")

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.cancel: Callable[[], None] = lambda: None


class _RunnerSide:
    """One runner of a host, its slot, and the clients' regions that it was given. One run at a time.

    While a run waits for a call of another model, the slot belongs to whoever ends that call.
    """

    def __init__(
        self,
        index: int,
        channel: socket.socket,
        specs: Sequence[ModelSpec],
        regions: Regions | None,
        begin_call: BeginCall | None,
        *,
        lender: RegionOwner,
    ) -> None:
        """specs: of the model, and of the forms of its steps. begin_call: calls other models; None: there are none.

        lender: whose regions the results of steps lie in.
        """
        self._index = index
        self._channel = channel
        self._specs = specs
        self._form = 0
        self._use_form(0)
        self._slot: SharedMemory | None = None
        self._regions = regions
        self._lender = lender
        self.hands_over = False
        self._given: set[int] = set()
        self._seen_ends = 0
        self._orders: dict[tuple[object, ...], _RunOrder] = {}
        self._results: dict[bytes, list[Array]] = {}
        self._timeout_s: float | None = None
        self._runs = 0
        self._begin_call = begin_call
        self._calls = threading.Lock()
        self._open: _OpenCall | None = None
        self._waited_s = 0.0
        self._began_s = 0.0
        self._too_soon: CalledTooSoon | None = None
        self._apart: _Apart | None = None
        self._count = 1

    def _use_form(self, form: int) -> None:
        """The inputs and outputs of the next runs."""
        spec = self._specs[form]
        self._form = form
        self._inputs, self._outputs = spec.inputs, spec.outputs
        self._has_text_inputs = any(not DATATYPES[each.datatype].itemsize for each in spec.inputs)
        self._has_text_outputs = any(not DATATYPES[each.datatype].itemsize for each in spec.outputs)

    def run(
        self, parts: Sequence[Sequence[Array]], limit_s: float, form: int = 0, apart: _Apart | None = None
    ) -> list[Array]:
        """Write inputs, run, copy results out; an empty list where `apart` took the responses.

        Raises RunFailed, Refused (by a model that it calls), TimeoutError, ChannelEnded.
        """
        if form != self._form:
            self._use_form(form)
            self._orders.clear()
            self._results.clear()
        rows = apart.rows if apart is not None else ()
        message = self._write_text(parts, rows) if self._has_text_inputs else self._write(parts, rows)
        timeout_s = None if limit_s == math.inf else limit_s
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            self._channel.settimeout(timeout_s)
        self._runs += 1
        self._waited_s = 0.0
        self._too_soon = None
        self._apart, self._count = apart, max(len(rows), 1)
        if apart is not None and apart.lines:
            send(self._channel, RequestLines(apart.lines))
        send_bytes(self._channel, message)
        try:
            results = self._receive_results(limit_s)
        except RunFailed as error:
            raise self._too_soon or error from None
        finally:
            if self._open is not None:
                self._drop_call()
        if self._too_soon is not None:
            raise self._too_soon
        return results

    def _write(self, parts: Sequence[Sequence[Array]], rows: tuple[int, ...]) -> bytes:
        """Write inputs that do not lie in a region already; return the message."""
        self.forget_regions()
        order = (self._order_in_regions(parts[0]) if len(parts) == 1 else None) or self._order_for(parts, rows)
        if len(parts) == 1:
            for view, array in zip(order.inputs, parts[0], strict=True):
                if view is not None:
                    view[...] = array
        else:
            for view, arrays in zip(order.inputs, zip(*parts, strict=True), strict=True):
                np.concatenate(arrays, out=view)
        return order.message

    def interrupt(self, control: socket.socket, grace_s: float) -> bool:
        """Have the library end the run; whether it ended in time. Raises ChannelEnded."""
        send(control, Interrupt(self._index, self._runs))
        self._timeout_s = grace_s
        self._channel.settimeout(grace_s)
        try:
            while self._read(receive_bytes(self._channel)) is None:
                pass
        except TimeoutError:
            return False
        except (RunFailed, ChannelEnded):
            pass
        return True

    def _order_for(self, parts: Sequence[Sequence[Array]], rows: tuple[int, ...]) -> _RunOrder:
        """Return the order for requests of these shapes. rows: of each, where the model sees each."""
        first = parts[0]
        if len(parts) == 1:
            shapes = tuple([array.shape for array in first])
        else:
            total = sum([part[0].shape[0] for part in parts])
            shapes = tuple([(total, *array.shape[1:]) for array in first])
        order = self._orders.get((shapes, rows))
        if order is None:
            if len(self._orders) >= KEPT_LAYOUTS:
                self._orders.clear()
            sizes = [
                (shape, math.prod(shape) * DATATYPES[spec.datatype].itemsize)
                for shape, spec in zip(shapes, self._inputs, strict=True)
            ]
            places, end = lay_out(sizes)
            slot = self._slot_of(end)
            views = tuple(slot.view(spec.datatype, place) for spec, place in zip(self._inputs, places, strict=True))
            message = msgspec.msgpack.encode(Run(places, end, self._form, rows))
            order = self._orders[shapes, rows] = _RunOrder(message, views)
        return order

    def _order_in_regions(self, inputs: Sequence[Array]) -> _RunOrder | None:
        """Return the order for a lone request of which inputs lie in its sender's regions; None where none does.

        The host reads those where they are: nothing is copied between a client and the library.
        """
        regions = self._regions
        if regions is None:
            return None
        # A part of a picture that is cut out is no tensor in a row: it is copied.
        found = [
            regions.find(array.__array_interface__["data"][0]) if array.flags.c_contiguous else None for array in inputs
        ]
        if not any(found):
            return None
        key = tuple(
            [
                (array.shape, None if each is None else (each.file.serial, each.offset))
                for array, each in zip(inputs, found, strict=True)
            ]
        )
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= KEPT_LAYOUTS:
                self._orders.clear()
            copied = [(each.shape, each.nbytes) for each, place in zip(inputs, found, strict=True) if place is None]
            places, end = lay_out(copied)
            slot = self._slot_of(end)
            left = iter(places)
            told: list[SlotPlace] = []
            views: list[Array | None] = []
            for spec, array, each in zip(self._inputs, inputs, found, strict=True):
                if each is None:
                    told.append(next(left))
                    views.append(slot.view(spec.datatype, told[-1]))
                else:
                    self._give_region(each.file)
                    told.append(SlotPlace(array.shape, each.offset, array.nbytes, each.file.serial))
                    views.append(None)
            order = _RunOrder(msgspec.msgpack.encode(Run(tuple(told), end, self._form)), tuple(views))
            self._orders[key] = order
        return order

    def _give_region(self, file: MappedFile) -> None:
        if file.serial not in self._given:
            send(self._channel, Memory(file.nbytes, file.serial))
            send_bytes(self._channel, b"\0", [file.fd])
            self._given.add(file.serial)

    def forget_regions(self) -> None:
        """Have the host unmap regions that ended. Raises ChannelEnded."""
        regions = self._regions
        if regions is None or not self._given or regions.ends == self._seen_ends:
            return
        self._seen_ends = regions.ends
        for serial in [each for each in self._given if not regions.is_there(each)]:
            send(self._channel, Forget(serial))
            self._given.remove(serial)
            self._orders.clear()

    def _write_text(self, parts: Sequence[Sequence[Array]], rows: tuple[int, ...]) -> bytes:
        """Write inputs of which some are text, whose bytes differ from run to run; return the message."""
        joined = [np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in zip(*parts, strict=True)]
        payloads = [payload_of(spec.datatype, array) for spec, array in zip(self._inputs, joined, strict=True)]
        sizes = [(array.shape, each.nbytes) for array, each in zip(joined, payloads, strict=True)]
        places, end = lay_out(sizes)
        slot = self._slot_of(end)
        for place, payload in zip(places, payloads, strict=True):
            slot.write(place, payload)
        return msgspec.msgpack.encode(Run(places, end, self._form, rows))

    def _receive_results(self, limit_s: float) -> list[Array]:
        """Receive what the host tells until the run has ended. Its limit does not count its waits for other models.

        It begins anew with each response.
        """
        self._began_s = time.monotonic()
        while True:
            try:
                results = self._read(receive_bytes(self._channel))
            except TimeoutError:
                with self._calls:
                    left_s = limit_s + self._waited_s - (time.monotonic() - self._began_s)
                    if self._open is None and left_s <= 0:
                        raise
                self._timeout_s = limit_s if left_s <= 0 else left_s
                self._channel.settimeout(self._timeout_s)
            else:
                if results is not None:
                    return results

    def _read(self, data: bytes) -> list[Array] | None:
        """Copy results out of the slot; None: the run goes on.

        Raises DecodeFailed: what was sent cannot be read; RunFailed, Refused, BrokenMessage.
        """
        views = self._results.get(data)
        if views is not None:
            return [self._taken(view) for view in views]
        report = decode(data, RunnerReport)
        with self._calls:
            if self._open is not None:
                raise BrokenMessage("it goes on while it waits for another model")
        if isinstance(report, NotRun):
            error = error_from_wire(report.code, report.message, report.retry_after_ms)
            raise error if isinstance(error, Refused | DecodeFailed) else RunFailed(report.message)
        if isinstance(report, NeedsMemory | CallModel | Respond):
            self._serve(report)
            return None
        if isinstance(report, Responded):
            if self._apart is None:
                raise BrokenMessage("it answered requests of which it was not told")
            return []
        slot = self._slot
        if slot is None or len(report.outputs) != len(self._outputs):
            raise BrokenMessage(f"{len(report.outputs)} results for {len(self._outputs)} outputs")
        named = zip(self._outputs, report.outputs, strict=True)
        views = [slot.view(spec.datatype, place) for spec, place in named]
        if self._has_text_outputs:
            return [view if view.dtype == object else view.copy() for view in views]
        if len(self._results) >= KEPT_LAYOUTS:
            self._results.clear()
        self._results[data] = views
        return [self._taken(view) for view in views]

    def _taken(self, view: Array) -> Array:
        """Copy a result out of the slot: a large one to where the host of a pipeline's next step reads it in place."""
        if self.hands_over and view.nbytes >= HANDED_BYTES and self._regions is not None:
            lent = self._regions.lend(self._lender, view.nbytes)
            if lent is not None:
                taken: Array = lent.view(view.dtype).reshape(view.shape)
                taken[...] = view
                return taken
        copied: Array = view.copy()
        return copied

    def _serve(self, wanted: NeedsMemory | CallModel | Respond) -> None:
        """Do what the run waits for. Raises BrokenMessage, ChannelEnded."""
        if isinstance(wanted, NeedsMemory):
            self._grow(wanted.nbytes)
        elif isinstance(wanted, CallModel):
            self._call(wanted)
        else:
            self._respond(wanted)

    def _respond(self, response: Respond) -> None:
        """Hand on a response to one request of the run. Raises BrokenMessage, ChannelEnded."""
        slot, apart = self._slot, self._apart
        if slot is None or apart is None or not 0 <= response.index < self._count:
            raise BrokenMessage(f"a response to request {response.index} of {self._count}")
        found: Sequence[Array | None] | EdgeRuntimeError | None = None
        if response.code:
            # A code becomes the name of a counter, so a host invents none.
            found = WIRE_ERRORS.get(response.code, RunFailed)(response.message)
        elif response.outputs is not None:
            if len(response.outputs) != len(self._outputs):
                raise BrokenMessage(f"{len(response.outputs)} results for {len(self._outputs)} outputs")
            found = [
                None if place is None else slot.view(spec.datatype, place).copy()
                for spec, place in zip(self._outputs, response.outputs, strict=True)
            ]
        self._began_s, self._waited_s = time.monotonic(), 0.0
        send(self._channel, Taken(apart.on_response(response.index, found, response.is_last)))

    # ---- calls of other models ---------------------------------------------------------------------------------------

    def _call(self, call: CallModel) -> None:
        """Begin a call. Raises BrokenMessage."""
        slot = self._slot
        if slot is None or any(each.place.region for each in call.inputs):
            raise BrokenMessage("a call's inputs lie nowhere")
        if any(each.datatype not in DATATYPES for each in call.inputs):
            raise BrokenMessage("a call's inputs have no datatype")
        # Copied: the host may write to the slot while they wait for their run.
        arrays = [slot.view(each.datatype, each.place).copy() for each in call.inputs]
        header = RequestHeader(
            model=call.model,
            version=call.version,
            inputs=tuple(TensorHeader(each.name, each.datatype, each.place.shape) for each in call.inputs),
            outputs=call.outputs,
            timeout_ms=call.timeout_ms,
            parameters=call.parameters,
        )
        self._open = opened = _OpenCall()
        try:
            if self._begin_call is None:
                raise Unsupported(f"there is no other model here to call; got {call.model!r}")
            opened.cancel = self._begin_call(header, arrays, partial(self._end_call, opened))
        except CalledTooSoon as error:
            self._too_soon = error
            self._end_call(opened, error)
        except EdgeRuntimeError as error:
            self._end_call(opened, error)

    def _end_call(self, call: _OpenCall, ended: Called) -> None:
        """Tell the host how a call ended, unless its run has ended. Thread: any."""
        with self._calls:
            if self._open is not call:
                return
            with contextlib.suppress(ChannelEnded):  # the run's thread hears of it
                try:
                    if isinstance(ended, EdgeRuntimeError):
                        raise ended
                    self._send_outputs(*ended)
                except EdgeRuntimeError as error:
                    message = error.message[:MAX_ERROR_CHARACTERS]
                    send(self._channel, NotCalled(message, error.code, error.retry_after_ms))
            self._waited_s += time.monotonic() - call.began_s
            self._open = None

    def _send_outputs(self, headers: Sequence[TensorHeader], arrays: Sequence[Array]) -> None:
        """Write what another model answered into the slot, and say where. Raises RunFailed, ChannelEnded."""
        named, payloads, end = lay_out_named(headers, arrays)
        if end > MAX_SLOT_BYTES:
            raise RunFailed(f"the outputs of the called model have {end} bytes, over {MAX_SLOT_BYTES}")
        slot = self._slot_of(end)
        for tensor, payload in zip(named, payloads, strict=True):
            slot.write(tensor.place, payload)
        send(self._channel, Answered(named))

    def _drop_call(self) -> None:
        """Take a call back whose run has ended."""
        with self._calls:
            call, self._open = self._open, None
        if call is not None:
            call.cancel()

    def _slot_of(self, nbytes: int) -> SharedMemory:
        """Return the slot, replaced where it is smaller than inputs of this size and results of as much."""
        if self._slot is None or self._slot.nbytes < nbytes:
            self._replace_slot(slot_bytes(2 * nbytes))
        assert self._slot is not None
        return self._slot

    def _grow(self, nbytes: int) -> None:
        """Send a slot that holds the results. Raises BrokenMessage: no results are so large."""
        if not 0 < nbytes <= MAX_SLOT_BYTES:
            raise BrokenMessage(f"its results need {nbytes} bytes")
        try:
            self._replace_slot(slot_bytes(nbytes))
        except RunFailed as error:  # the host waits for the slot, and can do nothing else
            raise BrokenMessage(error.message) from error

    def _replace_slot(self, nbytes: int) -> None:
        try:
            slot = SharedMemory.new(nbytes)
        except OSError as error:
            raise RunFailed(f"there is no memory for tensors of {nbytes} bytes: {error.strerror}") from error
        send(self._channel, Memory(nbytes))
        send_bytes(self._channel, b"\0", [slot.descriptor])
        slot.close()
        self._slot = slot
        self._orders.clear()
        self._results.clear()


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
    if report.waits_for_engine:
        return NotBuiltYet(report.message)
    kind = BackendUnavailable if report.code == BackendUnavailable.code else LoadFailed
    return kind(report.message)


def _specs(lines: Sequence[TensorLine]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(line.name, line.datatype, line.shape, line.quantisation, line.is_optional) for line in lines
    )
