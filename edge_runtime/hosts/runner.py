"""One runner of a host, as the daemon has it: it writes inputs, sends the order, and copies results out.

Owns: the slot, the messages and views that come again and again, the clients' regions that the runner was given, and a
call of another model that its run waits for. instance.py chooses the runner of each run. A run is waited for
(`run`), or begun, and its reports read as they come (`begin`, `receive`). Thread: one at a time; the thread that ends a
call writes into the slot meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import BeginCall, Called, OnResponse
from edge_runtime.errors import (
    WIRE_ERRORS,
    CalledTooSoon,
    DecodeFailed,
    EdgeRuntimeError,
    Refused,
    RunFailed,
    SequenceLost,
    TensorMismatch,
    Unsupported,
    error_from_wire,
)
from edge_runtime.hosts.memory import (
    MAX_SLOT_BYTES,
    SharedMemory,
    lay_out,
    lay_out_named,
    payload_of,
    slot_bytes,
)
from edge_runtime.hosts.messages import (
    Answered,
    BrokenMessage,
    CallModel,
    ChannelEnded,
    Forget,
    Interrupt,
    Memory,
    NeedsMemory,
    NotCalled,
    NotRun,
    RequestLine,
    RequestLines,
    Respond,
    Responded,
    ResponseTaken,
    Run,
    RunnerReport,
    SlotPlace,
    decode,
    receive_bytes,
    send,
    send_bytes,
)
from edge_runtime.hosts.regions import MappedFile, RegionOwner, Regions
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec
from edge_runtime.tensors import DATATYPES, Array
from edge_runtime.wire.codec import cut_sequence

HANDED_BYTES = 64 << 10
"""From this size a step's results lie in memory that the next step's host maps: less is copied as quickly."""

KEPT_LAYOUTS = 64
"""Of one runner: the messages and views of shapes that come again and again are made once."""


class _RunOrder(Struct, frozen=True):
    """A run of certain shapes: its message, and where each input is written; None: it lies in a region already."""

    message: bytes
    inputs: tuple[Array | None, ...]


class Apart(Struct, frozen=True):
    """The requests of a run: their rows and lines, and the function that takes their responses."""

    rows: tuple[int, ...]
    lines: tuple[RequestLine, ...]
    on_response: OnResponse


class FirstResponse:
    """Takes the responses of a run that no request asked for: the first counts."""

    def __init__(self) -> None:
        self._found: Sequence[Array | None] | EdgeRuntimeError | None = None

    def __call__(self, index: int, response: Sequence[Array | None] | EdgeRuntimeError | None, is_last: bool) -> bool:
        """Keep the first; the run goes on."""
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


class RunnerSide:
    """One runner of a host, its slot, and the clients' regions that it was given. One run at a time.

    While a run waits for a call of another model, the slot belongs to the thread that ends that call. fd: the
    descriptor that is readable when the host reports. given: the regions that the host maps.
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
        self.fd = channel.fileno()
        self._specs = specs
        self._form = 0
        self._use_form(0)
        self._slot: SharedMemory | None = None
        self._regions = regions
        self._lender = lender
        self.hands_over = False
        self.given: set[int] = set()
        self._seen_ends = 0
        self._orders: dict[tuple[object, ...], _RunOrder] = {}
        self._results: dict[bytes, list[Array]] = {}
        self._timeout_s = math.inf
        self._runs = 0
        self._begin_call = begin_call
        self._calls = threading.Lock()
        self._open: _OpenCall | None = None
        self._waited_s = 0.0
        self._began_s = 0.0
        self._too_soon: CalledTooSoon | None = None
        self._apart: Apart | None = None
        self._count = 1

    def _use_form(self, form: int) -> None:
        """The inputs and outputs of the next runs."""
        spec = self._specs[form]
        self._form = form
        self._inputs, self._outputs = spec.run_inputs, spec.outputs
        self._has_text_inputs = any(not DATATYPES[each.datatype].itemsize for each in spec.inputs)
        self._has_text_outputs = any(not DATATYPES[each.datatype].itemsize for each in spec.outputs)

    def run(
        self, parts: Sequence[Sequence[Array]], limit_s: float, form: int = 0, apart: Apart | None = None
    ) -> list[Array]:
        """Write inputs, run, copy results out; an empty list where `apart` took the responses.

        Raises RunFailed, Refused (by a model that it calls), TimeoutError, ChannelEnded.
        """
        self.begin(parts, form, apart)
        try:
            while True:
                left_s = self.left_s(limit_s)
                if left_s <= 0:
                    raise TimeoutError
                self._wait_at_most(limit_s if left_s == math.inf else left_s)
                with contextlib.suppress(BlockingIOError):
                    results = self.receive(0)
                    if results is not None:
                        return results
        finally:
            self.end()

    def begin(self, parts: Sequence[Sequence[Array]], form: int = 0, apart: Apart | None = None) -> None:
        """Write inputs and send the order; `end` follows. Raises RunFailed, ChannelEnded."""
        if form != self._form:
            self._use_form(form)
            self._orders.clear()
            self._results.clear()
        rows = apart.rows if apart is not None else ()
        message = self._write_text(parts, rows) if self._has_text_inputs else self._write(parts, rows)
        self._runs += 1
        self._waited_s = 0.0
        self._too_soon = None
        self._apart, self._count = apart, max(len(rows), 1)
        if apart is not None and apart.lines:
            self._send(RequestLines(apart.lines))
        self._began_s = time.monotonic()
        self._send_bytes(message)

    def receive(self, flags: int = socket.MSG_DONTWAIT) -> list[Array] | None:
        """Read one report of the run: its results, or None: it goes on.

        Raises BlockingIOError: there is no report; else as `run`.
        """
        try:
            results = self._read(receive_bytes(self._channel, flags))
        except RunFailed as error:
            raise self._too_soon or error from None
        if results is not None and self._too_soon is not None:
            raise self._too_soon
        return results

    def left_s(self, limit_s: float) -> float:
        """How long the run may go on: its limit does not count waits for other models, and begins with each response.

        math.inf: it has no limit, or waits now.
        """
        if limit_s == math.inf:
            return limit_s
        with self._calls:
            if self._open is not None:
                return math.inf
            return limit_s + self._waited_s - (time.monotonic() - self._began_s)

    def took_s(self) -> float:
        """How long ago the last run began."""
        return time.monotonic() - self._began_s

    def end(self) -> None:
        """End the open call of the run that has ended."""
        if self._open is not None:
            self._drop_call()

    def _send(self, message: Struct) -> None:
        self._send_bytes(msgspec.msgpack.encode(message))

    def _send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises ChannelEnded, too, where the host reads none: it never blocks."""
        send_bytes(self._channel, data, descriptors, socket.MSG_DONTWAIT)

    def _wait_at_most(self, timeout_s: float) -> None:
        """Bound the wait of `receive`. By the kernel: with a timeout of Python each call would be two."""
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            whole, part = divmod(0 if timeout_s == math.inf else max(timeout_s, 1e-5), 1)
            until = struct.pack("ll", int(min(whole, 1 << 30)), int(part * 1e6))
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, until)

    def _write(self, parts: Sequence[Sequence[Array]], rows: tuple[int, ...]) -> bytes:
        """Write inputs that do not lie in a region already; return the message."""
        if self.given:
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
        """Have the library end the run; returns whether it ended in time. Raises ChannelEnded."""
        send(control, Interrupt(self._index, self._runs))
        self._wait_at_most(grace_s)
        try:
            while self._read(receive_bytes(self._channel)) is None:
                pass
        except BlockingIOError:
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
        if regions is None or regions.are_none:
            return None
        # A part of a picture that is cut out is not a tensor in a row: it is copied.
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
        if file.serial not in self.given:
            self._send(Memory(file.nbytes, file.serial))
            self._send_bytes(b"\0", [file.fd])
            self.given.add(file.serial)

    def forget_regions(self) -> None:
        """Have the host unmap regions that ended. Raises ChannelEnded."""
        regions = self._regions
        if regions is None or regions.ends == self._seen_ends:
            return
        self._seen_ends = regions.ends
        for serial in [each for each in self.given if not regions.is_there(each)]:
            self._send(Forget(serial))
            self.given.remove(serial)
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

    def _read(self, data: bytes) -> list[Array] | None:
        """Copy results out of the slot; None: the run goes on.

        Raises DecodeFailed, TensorMismatch: the data sent cannot be read; RunFailed, Refused, BrokenMessage.
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
            is_told = isinstance(error, Refused | DecodeFailed | TensorMismatch | SequenceLost)
            raise error if is_told else RunFailed(report.message)
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
        """Do the step that the run waits for. Raises BrokenMessage, ChannelEnded."""
        if isinstance(wanted, NeedsMemory):
            self._grow(wanted.nbytes)
        elif isinstance(wanted, CallModel):
            self._call(wanted)
        else:
            self._respond(wanted)

    def _respond(self, response: Respond) -> None:
        """Pass on a response to one request of the run. Raises BrokenMessage, ChannelEnded."""
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
        self._send(ResponseTaken(apart.on_response(response.index, found, response.is_last)))

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
        step, parameters = cut_sequence(call.parameters)
        header = RequestHeader(
            model=call.model,
            version=call.version,
            inputs=tuple(TensorHeader(each.name, each.datatype, each.place.shape) for each in call.inputs),
            outputs=call.outputs,
            timeout_ms=call.timeout_ms,
            parameters=parameters,
            sequence=step,
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
                    self._send(NotCalled(error.message, error.code, error.retry_after_ms))
            self._waited_s += time.monotonic() - call.began_s
            self._open = None

    def _send_outputs(self, headers: Sequence[TensorHeader], arrays: Sequence[Array]) -> None:
        """Write another model's outputs into the slot, and send their places. Raises RunFailed, ChannelEnded."""
        named, payloads, end = lay_out_named(headers, arrays)
        if end > MAX_SLOT_BYTES:
            raise RunFailed(f"the outputs of the called model have {end} bytes, over {MAX_SLOT_BYTES}")
        slot = self._slot_of(end)
        for tensor, payload in zip(named, payloads, strict=True):
            slot.write(tensor.place, payload)
        self._send(Answered(named))

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
        """Send a slot that holds the results. Raises BrokenMessage: no results are so large, or it has the memory."""
        if not (self._slot.nbytes if self._slot is not None else 0) < nbytes <= MAX_SLOT_BYTES:
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
        self._send(Memory(nbytes))
        self._send_bytes(b"\0", [slot.descriptor])
        slot.close()
        self._slot = slot
        self._orders.clear()
        self._results.clear()
