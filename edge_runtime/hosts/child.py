"""A host: the process that loads one model and runs it, for the daemon.

Owns: the load, and a runner for each run that may be handed over at once: it waits for an order, then for its turn,
runs on the slot in place, and writes the results behind the inputs. No more run at once than the model may; the others
have their order by the time one ends, so that its core never waits for the daemon. The main thread is a runner, since
the code of a `model.py` may want that; a thread listens for interruptions, and ends the process with the daemon's side
of the channel.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from edge_runtime import plugins
from edge_runtime.backends.base import BuildOrder, HostForm, LibraryBackend, LibraryInstance, SteppedInstance
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.model_files import HasMoreFiles
from edge_runtime.backends.registry import declared_backend
from edge_runtime.errors import (
    BackendUnavailable,
    EdgeRuntimeError,
    LoadFailed,
    NotBuiltYet,
    Refused,
    RunFailed,
    SequenceLost,
    UnreadablePicture,
    UnreadableSeries,
    UnreadableSnapshot,
    UnreadableText,
    error_from_wire,
    shortened,
)
from edge_runtime.hosts.memory import SharedMemory, lay_out, lay_out_named, payload_of
from edge_runtime.hosts.messages import (
    MAX_MESSAGE_BYTES,
    Answered,
    Built,
    CallModel,
    CallReport,
    ChannelEnded,
    Forget,
    FormLines,
    Hello,
    HostOrder,
    HostTask,
    Interrupt,
    Loaded,
    Memory,
    NeedsMemory,
    NotBuilt,
    NotCalled,
    NotLoaded,
    NotRun,
    RequestLine,
    RequestLines,
    Respond,
    Responded,
    RespondReport,
    ResponseTaken,
    Results,
    RunnerOrder,
    TensorLine,
    WantsBuilt,
    close_all,
    decode,
    receive_bytes,
    receive_with_descriptors,
    send,
    send_bytes,
)
from edge_runtime.kept_state import SEQUENCES, KeptStates, SequenceOptions
from edge_runtime.messages import RequestHeader
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import DATATYPES, Array, values_to_bits

_TOLD = (Refused, UnreadablePicture, UnreadableSeries, UnreadableSnapshot, UnreadableText, SequenceLost)
"""Errors of a run whose callers get their code; others are `run_failed`."""

_NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation")

KEPT_ORDERS = 64
"""Of one runner: the arrays of orders that come again and again are made once."""


def serve_host(task: HostTask, control: socket.socket, runners: Sequence[socket.socket]) -> None:
    """Load the model, then run it until the daemon closes the channel."""
    try:
        send(control, Hello())
        loaded = load_model(task, control)
        if loaded is None:
            return
        instance, forms = loaded
        runs = max(min(instance.concurrency, task.runners), 1)
        used = runners[: runs + task.ahead]
        host = _ServedModel(instance, forms, used, runs, task.declaration)
        _start_thread(host.listen, control)
        for index in range(1, len(used)):
            _start_thread(host.run_orders, index)
        host.run_orders(0)
        instance.close()  # a model of Triton's finalises
    except ChannelEnded:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not task.declaration.ends_softly:
            os._exit(0)  # a library's own end takes time, and nothing needs it


def _start_thread(function: Callable[[Any], None], argument: object) -> None:
    """Start a thread that is never joined, without the objects of `threading`: they took 25 KiB of a host each."""
    _thread.start_new_thread(function, (argument,))


# ---- load -----------------------------------------------------------------------------------------------------------


def load_model(
    task: HostTask, control: socket.socket, opened: int = -1
) -> tuple[LibraryInstance, Sequence[HostForm]] | None:
    """Load the model, and report to the daemon; returns None where that failed. Raises ChannelEnded.

    opened: its file, where this process may not open it by its path, which its backend's declaration allows for.
    """
    forms: Sequence[HostForm] = ()
    rests: KeptStates | None = None
    kept: LibraryInstance | None = None
    try:
        made = declared_backend(task.declaration, allows_code=task.allows_code, builds=_BuildsOfDaemon(control))
        instance: LibraryInstance
        if task.options.functions:
            instance, *forms = made.load_functions(Path(task.artifact), task.options)
        else:
            instance, forms = _load_artifact(made, task, opened)
            kept = instance
            if task.options.interface is not None:
                from edge_runtime.backends.declared_instance import as_declared

                instance = as_declared(instance, task.options.interface)
        if task.options.steps is not None:
            from edge_runtime.hosts.steps_instance import make_forms

            # Runs of a form ask for nothing that a library's instance has beside them.
            made_forms = make_forms(instance, task.options.steps, task.options.threads)
            forms = [*forms, *cast("list[HostForm]", made_forms)]
            rests = next((each.keeps for each in made_forms if each.keeps is not None), None)
        if kept is not None and task.options.sequence is not None:
            forms = [_state_form(kept, task.options.sequence, rests), *forms]
    except EdgeRuntimeError as error:
        wants_own_host = opened >= 0 and (isinstance(error, HasMoreFiles) or lacks_memory(error))
        send(control, NotLoaded(error.message, error.code, isinstance(error, NotBuiltYet), wants_own_host))
        return None
    except ChannelEnded:
        raise
    except MemoryError as error:
        message = str(error) or "there is not enough memory for it"
        send(control, NotLoaded(message, LoadFailed.code, wants_own_host=opened >= 0))
        return None
    except Exception as error:  # noqa: BLE001  a library's surprise is a failed load too
        traceback.print_exc()
        send(control, NotLoaded(shortened(f"{type(error).__name__}: {error}"), LoadFailed.code))
        return None
    spec = instance.spec
    loaded = Loaded(
        _lines(spec.inputs),
        _lines(spec.outputs),
        spec.max_rows,
        instance.device,
        instance.precision,
        instance.concurrency,
        instance.memory_bytes,
        can_interrupt=task.declaration.interrupts,
        forms=tuple(FormLines(each.form, _lines(each.spec.inputs), _lines(each.spec.outputs)) for each in forms),
        by_request=spec.by_request,
        sequences=spec.sequences,
    )
    try:
        send(control, loaded)
    except ChannelEnded as error:
        send(control, NotLoaded(f"it cannot be described: {error}", LoadFailed.code))
        return None
    return instance, forms


def _load_artifact(made: LibraryBackend, task: HostTask, opened: int) -> tuple[LibraryInstance, Sequence[HostForm]]:
    """Load the model's file, with the forms that it has by itself. Raises BackendError."""
    artifact, declaration = Path(task.artifact), task.declaration
    if opened >= 0 and declaration.shares:
        instance = made.load_opened(artifact, task.options, opened)
    else:
        instance = made.load(artifact, task.options)
    if task.options.sequence is not None:
        stateful = plugins.named(plugins.declared("states", SEQUENCES).instance)
        return stateful(instance, task.options.sequence), ()
    return instance, (cast("SteppedInstance", instance).step_form,) if declaration.chain else ()


def _state_form(instance: LibraryInstance, options: SequenceOptions, rests: KeptStates | None) -> HostForm:
    """Return the form for the states of sequences. Raises LoadFailed: it should hand out states, and has none."""
    form: HostForm = plugins.named(plugins.declared("states", SEQUENCES).form)(instance, options, rests)
    return form


def _lines(specs: Sequence[TensorSpec]) -> tuple[TensorLine, ...]:
    return tuple(
        TensorLine(spec.name, spec.datatype, spec.shape, spec.quantisation, spec.is_optional) for spec in specs
    )


class _BuildsOfDaemon:
    """Builds of a backend come from the daemon, which makes and keeps them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def built(self, order: BuildOrder) -> bytes:
        send(self._control, WantsBuilt(order.plan, order.key))
        data, descriptors = receive_with_descriptors(self._control)
        try:
            answer = decode(data, HostOrder)
            if isinstance(answer, Built) and descriptors:
                memory = SharedMemory(descriptors.pop(), answer.nbytes)
                memory.close()
                return memory.bytes.tobytes()
        finally:
            close_all(descriptors)
        if isinstance(answer, NotBuilt):
            raise (NotBuiltYet if answer.is_being_built else LoadFailed)(answer.message)
        raise BackendUnavailable("the daemon builds nothing")

    def wait(self, key: str, stop: threading.Event) -> bool:
        del key
        return not stop.is_set()


# ---- run ------------------------------------------------------------------------------------------------------------


class _ServedModel:
    """A loaded model and its runners."""

    def __init__(
        self,
        instance: LibraryInstance,
        forms: Sequence[HostForm],
        channels: Sequence[socket.socket],
        runs: int,
        declaration: Declaration,
    ) -> None:
        """runs: at once."""
        turns = _Turns(runs) if runs < len(channels) else None
        self._runners = [HostRunner([instance, *forms], channel, turns, declaration) for channel in channels]
        self._instance = instance
        self._declaration = declaration

    def run_orders(self, index: int) -> None:
        """Run the orders of one runner until its channel ends."""
        runner = self._runners[index]
        if self._declaration.calls_models:
            self._instance.attach(runner.call)
        elif self._declaration.interrupts:
            self._instance.attach(None)
        with contextlib.suppress(ChannelEnded):
            runner.serve()

    def listen(self, control: socket.socket) -> None:
        """Interrupt runs when the daemon orders it; end the process when the daemon is gone."""
        try:
            while True:
                data, descriptors = receive_with_descriptors(control)
                close_all(descriptors)
                order = decode(data, HostOrder)
                if isinstance(order, Interrupt) and self._declaration.interrupts:
                    self._runners[order.runner].interrupt(order.run, self._instance)
        except ChannelEnded:
            if not self._declaration.ends_softly:
                os._exit(0)


class _Turns:
    """Admits a number of runs at once; the runner that has waited longest is next.

    Of the kernel: Python's semaphore takes a lock for each wait, and wakes one thread to let it wait again.
    """

    def __init__(self, count: int) -> None:
        self._fd = os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def __enter__(self) -> None:
        os.eventfd_read(self._fd)

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._fd, 1)


class HostRunner:
    """Runs orders of one socket, one after another, on the slot that belongs to it."""

    def __init__(
        self,
        forms: Sequence[LibraryInstance | HostForm],
        channel: socket.socket,
        turns: _Turns | None,
        declaration: Declaration,
        *,
        on_no_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """forms: the model, and behind it the forms of its steps, or a pipeline's other functions.

        turns: None where no run waits for another. on_no_memory: called before a run fails that got none.
        """
        self._on_no_memory = on_no_memory
        self._channel = channel
        self._turns: contextlib.AbstractContextManager[None] = turns or contextlib.nullcontext()
        self._forms = forms
        self._by_request = forms[0] if forms[0].spec.by_request is not None else None
        self._keeps_inputs = declaration.is_code
        self._may_write = not declaration.reads_in_place
        self._memories: dict[int, SharedMemory] = {}
        self._kept: dict[bytes, tuple[dict[str, Array], int, int, tuple[int, ...]]] = {}
        self._replies: dict[tuple[tuple[int, ...], ...], tuple[bytes, list[Array]]] = {}
        self._lock = threading.Lock()
        self._calls = threading.Lock()
        self._thread = 0
        self._runs = 0
        self._is_running = False
        self.rows: tuple[int, ...] = ()
        self.lines: tuple[RequestLine, ...] = ()

    def serve(self) -> None:
        """Run orders. Raises ChannelEnded."""
        while True:
            self.serve_one()

    def serve_one(self, flags: int = 0) -> bool:
        """Take one message; return whether it was a run's order, and that is done.

        Raises ChannelEnded; BlockingIOError: there is none, where the flags do not wait.
        """
        data = receive_bytes(self._channel, flags)
        kept = self._kept.get(data) or self._prepare(data)
        if kept is None:
            return False
        self._thread = threading.get_ident()
        self._serve_run(*kept)
        return True

    def interrupt(self, run: int, instance: LibraryInstance) -> None:
        """End a run, unless it has ended. Thread: the listener's."""
        with self._lock:
            if self._is_running and self._runs == run:
                instance.interrupt(self._thread)

    def call(self, header: RequestHeader, arrays: Sequence[Array]) -> dict[str, Array]:
        """Call another served model, and wait. Raises the errors that any caller of it gets, TypeError, ChannelEnded.

        The slot carries the tensors both ways: the run's own inputs were copied out of it. Thread: any of a run's, one
        at a time.
        """
        named, payloads, end = lay_out_named(header.inputs, arrays)
        more = header.version, header.outputs, header.timeout_ms, dict(header.parameters)
        data = _checked_call(CallModel(header.model, named, *more))
        with self._calls:
            if not self._is_running:
                raise RunFailed("a run that has ended calls no other model: call from infer, and wait for its threads")
            if end > self._memories[0].nbytes:
                send(self._channel, NeedsMemory(end))
                self._take_memory(decode(receive_bytes(self._channel), Memory))
            for tensor, payload in zip(named, payloads, strict=True):
                self._memories[0].write(tensor.place, payload)
            send_bytes(self._channel, data)
            report = decode(receive_bytes(self._channel), CallReport)
            if isinstance(report, Memory):
                self._take_memory(report)
                report = decode(receive_bytes(self._channel), CallReport)
            if isinstance(report, NotCalled):
                raise error_from_wire(report.code, report.message, report.retry_after_ms)
            assert isinstance(report, Answered)
            slot = self._memories[0]
            return {each.name: slot.view(each.datatype, each.place).copy() for each in report.outputs}

    def respond(
        self, index: int, outputs: Sequence[Array | None] | None, fault: tuple[str, str] | None, *, is_last: bool
    ) -> bool:
        """Answer one request of the run that is on, see base.RequestsRun. Raises ChannelEnded."""
        code, message = fault or ("", "")
        specs = self._forms[0].spec.outputs
        named = [(spec, array) for spec, array in zip(specs, outputs or (), strict=False) if array is not None]
        payloads = [payload_of(spec.datatype, values_to_bits(array)) for spec, array in named]
        sizes = [(array.shape, payload.nbytes) for (_, array), payload in zip(named, payloads, strict=True)]
        places, end = lay_out(sizes)
        with self._calls:
            if not self._is_running:
                return False
            if end > self._memories[0].nbytes:
                send(self._channel, NeedsMemory(end))
                self._take_memory(decode(receive_bytes(self._channel), Memory))
            for place, payload in zip(places, payloads, strict=True):
                self._memories[0].write(place, payload)
            left = iter(places)
            told = None if outputs is None else tuple(None if each is None else next(left) for each in outputs)
            send(self._channel, Respond(index, told, code, shortened(message), is_last))
            report = decode(receive_bytes(self._channel), RespondReport)
            assert isinstance(report, ResponseTaken)
            return report.is_waited_for

    def is_cancelled(self, index: int) -> bool:
        """Whether no caller waits for a response to a request of the run any more. Raises ChannelEnded."""
        return not self.respond(index, None, None, is_last=False)

    def _prepare(self, data: bytes) -> tuple[dict[str, Array], int, int, tuple[int, ...]] | None:
        """Return a run's inputs, where its results may begin, its form and rows; None for an order done at once."""
        order = decode(data, RunnerOrder)
        if isinstance(order, Memory):
            self._take_memory(order)
            return None
        if isinstance(order, Forget):
            self._memories.pop(order.region, None)
            self._kept.clear()
            return None
        if isinstance(order, RequestLines):
            self.lines = order.lines
            return None
        inputs = self._forms[order.form].spec.run_inputs
        arrays = {
            spec.name: self._memories[place.region].view(spec.datatype, place)
            for spec, place in zip(inputs, order.inputs, strict=True)
        }
        if all(DATATYPES[spec.datatype].itemsize for spec in inputs):
            if len(self._kept) >= KEPT_ORDERS:
                self._kept.clear()
            self._kept[data] = arrays, order.results_at, order.form, order.rows
        return arrays, order.results_at, order.form, order.rows

    def _take_memory(self, order: Memory) -> None:
        _, descriptors = receive_with_descriptors(self._channel)
        memory = SharedMemory(descriptors.pop(), order.nbytes)
        memory.close()
        close_all(descriptors)
        self._memories[order.region] = memory
        self._kept.clear()
        self._replies.clear()

    def _serve_run(self, arrays: dict[str, Array], results_at: int, form: int, rows: tuple[int, ...]) -> None:
        if self._keeps_inputs or self._may_write:
            arrays = {
                name: array.copy() if self._keeps_inputs or not array.flags.writeable else array
                for name, array in arrays.items()
            }
        with self._lock:
            self._runs += 1
            self._is_running = True
        try:
            try:
                with self._turns:
                    results = self._run(arrays, form, rows)
            finally:
                with self._calls, self._lock:  # a call that a thread of the model still waits for ends first
                    self._is_running = False
                self.lines = ()
            if results is None:
                send(self._channel, Responded())
            else:
                self._reply(results, results_at, form)
        except ChannelEnded:
            raise
        except EdgeRuntimeError as error:
            if lacks_memory(error):
                self._on_no_memory()
            is_told = isinstance(error, _TOLD)
            code = error.code if is_told else RunFailed.code
            send(self._channel, NotRun(error.message, code, error.retry_after_ms))
        except MemoryError as error:
            self._on_no_memory()
            send(self._channel, NotRun(str(error) or "there is not enough memory for this run"))
        except Exception as error:  # noqa: BLE001  a library's surprise is a failed run
            traceback.print_exc()
            send(self._channel, NotRun(shortened(f"{type(error).__name__}: {error}")))

    def _run(self, arrays: dict[str, Array], form: int, rows: tuple[int, ...]) -> list[Array] | None:
        """Return the results of all requests, or None where each was answered by itself."""
        if self._by_request is None or form:
            return self._forms[form].run(arrays)
        self.rows = rows
        return self._by_request.run_requests(arrays, self)

    def _reply(self, results: Sequence[Array], results_at: int, form: int) -> None:
        """Write results behind the inputs, in a larger slot where they do not fit, and send their places."""
        outputs = self._forms[form].spec.outputs
        named = zip(outputs, results, strict=True)
        payloads = [payload_of(spec.datatype, values_to_bits(array)) for spec, array in named]
        # The key holds where results begin too: the same shapes come behind inputs of other sizes.
        key = ((results_at, form), *[array.shape for array in results])
        data, views = self._replies.get(key) or self._lay_out(results, payloads, key)
        for view, payload in zip(views, payloads, strict=True):
            view[...] = payload
        send_bytes(self._channel, data)

    def _lay_out(
        self, results: Sequence[Array], payloads: Sequence[Array], key: tuple[tuple[int, ...], ...]
    ) -> tuple[bytes, list[Array]]:
        """Find the places of results in the slot; return the message with them, and where each is written.

        Those of results without text are kept, for the next ones of these shapes.
        """
        results_at, form = key[0]
        sizes = [(array.shape, each.nbytes) for array, each in zip(results, payloads, strict=True)]
        places, end = lay_out(sizes, results_at)
        if end > self._memories[0].nbytes:
            # The inputs are done with, so results may begin at 0 of the new slot.
            send(self._channel, NeedsMemory(end))
            self._take_memory(decode(receive_bytes(self._channel), Memory))
            places, _ = lay_out(sizes)
        slot = self._memories[0]
        made = (
            msgspec.msgpack.encode(Results(places)),
            [slot.room(place, payload) for place, payload in zip(places, payloads, strict=True)],
        )
        has_text = any(not DATATYPES[spec.datatype].itemsize for spec in self._forms[form].spec.outputs)
        if not has_text and places[0].offset >= results_at:
            if len(self._replies) >= KEPT_ORDERS:
                self._replies.clear()
            self._replies[key] = made
        return made


def lacks_memory(error: EdgeRuntimeError) -> bool:
    """Whether a library says that it got no memory: for that it has no kind of error, only words."""
    return any(words in error.message for words in _NO_MEMORY)


def _checked_call(call: CallModel) -> bytes:
    """Return the message of a call. Raises TypeError: the daemon would take its values for a broken host's."""
    data = msgspec.msgpack.encode(call)
    try:
        msgspec.msgpack.decode(data, type=CallModel)
    except msgspec.ValidationError as error:
        raise TypeError(f"a call of model {call.model!r}: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise TypeError(f"a call's names and shapes have {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are sent")
    return data
