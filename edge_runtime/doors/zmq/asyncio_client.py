"""The client for an event loop: no thread, no lock, one socket that the loop watches.

Owns: one DEALER for each client, driven by the loop's reader callback. `zmq.asyncio` reaches 0.3 of a blocking loop,
and the threaded client's futures double a lone request's time (bench). Thread: the loop's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.client import forks
from edge_runtime.client.core import MAX_IN_FLIGHT, ClientCore, DaemonCalls, Flow, MetadataOf
from edge_runtime.client.in_flight import (
    LOOK_S,
    LOOKS,
    Call,
    InFlight,
    all_in_flight,
    closed,
    no_control_endpoint,
    no_reply,
    without_parts,
)
from edge_runtime.client.pictures import with_pictures
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.doors.zmq.channel import CONNECT_LIMIT_S, POLLIN, POLLOUT, PROBE_LIMIT_S, Channel, CurveKeys
from edge_runtime.doors.zmq.client_memory import ClientMemory
from edge_runtime.messages import InferResult
from edge_runtime.operations import DEFAULT_WAIT_S, Scope
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture
    from edge_runtime.client.sequence import AsyncClientSequence
    from edge_runtime.client.stream import AsyncClientStream

T = TypeVar("T")

REPLIES_A_TURN = 64
"""Replies taken before other callbacks of the loop run: under a millisecond of work."""


class AsyncClient:
    """A connection to a daemon for one event loop; same arguments, errors and meaning as `Client`.

    Made anywhere; it belongs to the loop that uses it first until that loop is closed, then to the next. Cancelling a
    call discards its answer; the daemon still runs it, and it counts as in flight until then. A call beyond
    `max_in_flight` waits for its turn. In the child of a fork a client that was used before raises RuntimeError.

        async with AsyncClient() as client:
            result = await client.infer("digits", {"image": x}, timeout_ms=20)
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        control: str | None = None,
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        curve: CurveKeys | None = None,
    ) -> None:
        self.endpoint = client_endpoint(endpoint)
        channel = Channel(self.endpoint, curve)
        self._link = _AsyncLink(channel, max_in_flight)
        if control is None and self.endpoint.startswith("ipc://"):
            control = control_endpoint_beside(self.endpoint)
        self._control = _AsyncLink(Channel(client_endpoint(control), curve), max_in_flight) if control else None
        self._memory = ClientMemory(self.endpoint)
        self._core = ClientCore(timeout_ms, DaemonCalls(self.endpoint), self._memory, channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail pending calls with ConnectionError and close the sockets. Idempotent."""
        self._memory.close()
        self._link.close()
        if self._control is not None:
            self._control.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
        cast: bool = False,
        retry: bool = False,
    ) -> InferResult:
        """Run a model once; as `Client.infer`. Arrays of 256 KiB or more stay unchanged until this returns."""
        if pictures is not None or isinstance(picture, str | os.PathLike):  # the loop waits for no disk
            inputs, picture, pictures = await asyncio.to_thread(with_pictures, inputs, picture, pictures), None, None
        asked = self._core.checked_arguments(
            model, inputs, picture, pictures, raw, version, outputs, timeout_ms, priority, timing, parameters, cast
        )
        return await self._run(self._core.infer(asked, retry=retry))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        text: str | None = None,
        chat: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        pictures: Sequence[Picture] | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        retry: bool = False,
        **parameters: Any,
    ) -> AsyncClientStream:
        """Run a model whose answer comes in parts; as `Client.stream`, for `async for`, with `aclose`."""
        from edge_runtime.client.stream import AsyncClientStream, stream_arguments

        asked = stream_arguments(
            self._core, model, inputs, text, chat, pictures, version, outputs, timeout_ms, priority, timing, parameters
        )
        return AsyncClientStream(self._core, asked, retry, self._run, self._link.next_part, self._link.leave)

    def sequence(self, model: str, sequence: int | str | None = None) -> AsyncClientSequence:
        """Begin a sequence of a model that keeps state; as `Client.sequence`."""
        from edge_runtime.client.sequence import AsyncClientSequence

        return AsyncClientSequence(self._core, model, sequence, self._run)

    async def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make an array in memory that is shared with the daemon; as `Client.allocate`."""
        array = await asyncio.to_thread(self._memory.allocate, shape, dtype)
        if array is None:
            return np.zeros(shape, dtype)
        if self._memory.attached != self._link.connection or not self._link.connection:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the next call tells
                await self._run(self._core.attach())
        return array

    async def is_live(self) -> bool:
        """Return whether the daemon answers."""
        return await self._run(self._core.is_live())

    async def is_ready(self, model: str = "") -> bool:
        """Return whether the daemon, or one model, can answer inference; False when the daemon does not answer."""
        return await self._run(self._core.is_ready(model))

    async def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the daemon, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        await self._run(self._core.wait_ready(limit_s, model))

    # ---- operations of scope infer: begin (made by tests/architecture/operation_texts.py from operations.py) ----

    async def models(self) -> list[dict[str, Any]]:
        """List every version that the daemon knows, and each file of its models folder that it does not serve."""
        return cast("list[dict[str, Any]]", await self._call("models"))

    async def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe what a model takes and gives."""
        return cast("dict[str, Any]", await self._call("metadata", model=model, version=version))

    async def model_config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe a loaded model as Triton's ModelConfig."""
        return cast("dict[str, Any]", await self._call("model_config", model=model, version=version))

    async def model_statistics(self, model: str | None = None, version: int | None = None) -> list[dict[str, Any]]:
        """Tell what loaded models have done, in Triton's words."""
        return cast("list[dict[str, Any]]", await self._call("model_statistics", model=model, version=version))

    async def stats(self) -> dict[str, Any]:
        """Tell counters, latencies by model, memory and uptime."""
        return cast("dict[str, Any]", await self._call("stats"))

    async def overview(self) -> dict[str, Any]:
        """Tell in one sentence how the device is, and show its machine and its models."""
        return cast("dict[str, Any]", await self._call("overview"))

    async def history(self, model: str | None = None) -> dict[str, Any]:
        """Tell rates, latencies and refusals of the last fifteen minutes, a sample each five seconds."""
        return cast("dict[str, Any]", await self._call("history", model=model))

    async def events(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last loads, updates, failures and warnings, each with what to do, newest first."""
        return cast("list[dict[str, Any]]", await self._call("events", count=count))

    async def doctor(self) -> dict[str, Any]:
        """Tell what a bug report needs, without passwords, tokens and keys."""
        return cast("dict[str, Any]", await self._call("doctor"))

    async def tuning(self, model: str) -> dict[str, Any]:
        """Tell what `edge-runtime tune` found out about a model: why it is served as it is."""
        return cast("dict[str, Any]", await self._call("tuning", model=model))

    async def example(self, model: str) -> dict[str, Any]:
        """Give an input to try a model with: its release's golden one, or that of its warm-up."""
        return cast("dict[str, Any]", await self._call("example", model=model))

    async def cameras(self) -> list[dict[str, Any]]:
        """List the cameras, and what becomes of their frames."""
        return cast("list[dict[str, Any]]", await self._call("cameras"))

    async def results(self) -> list[dict[str, Any]]:
        """List the last result of each rule of [[publish]]."""
        return cast("list[dict[str, Any]]", await self._call("results"))

    async def update_status(self) -> dict[str, Any]:
        """Tell what runs by updates, what is under way, what was refused and why, and how the last check ended."""
        return cast("dict[str, Any]", await self._call("update_status"))

    async def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last events of updates, newest first."""
        return cast("list[dict[str, Any]]", await self._call("update_history", count=count))

    # ---- operations of scope infer: end ------------------------------------------------------------------------------
    # ---- operations of scope control: begin (made by tests/architecture/operation_texts.py) --------------------------

    async def camera_add(
        self, camera: str, url: str, model: str | None = None, *, timeout_ms: float | None = None
    ) -> Any:
        """Read a camera, in place of one of that name."""
        return await self._call("camera_add", timeout_ms, camera=camera, url=url, model=model)

    async def camera_remove(self, camera: str, *, timeout_ms: float | None = None) -> Any:
        """Stop reading a camera, with the rules that look at it."""
        return await self._call("camera_remove", timeout_ms, camera=camera)

    async def load(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Load a model, or one version, anew, and wait until it is ready."""
        return await self._call("load", timeout_ms, model=model, version=version)

    async def unload(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Take a model, or one version, out of service."""
        return await self._call("unload", timeout_ms, model=model, version=version)

    async def update_check(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now what the repository offers, and install nothing."""
        return cast("dict[str, Any]", await self._call("update_check", timeout_ms))

    async def update_apply(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now and install what is meant for this device."""
        return cast("dict[str, Any]", await self._call("update_apply", timeout_ms))

    async def update_import(self, folder: str | os.PathLike[str], *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Install from a folder, such as a USB stick."""
        return cast("dict[str, Any]", await self._call("update_import", timeout_ms, folder=folder))

    async def update_rollback(self, model: str, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Let the release before serve again, and refuse the current one."""
        return cast("dict[str, Any]", await self._call("update_rollback", timeout_ms, model=model))

    # ---- operations of scope control: end ----------------------------------------------------------------------------

    # ---- private ----------------------------------------------------------------------------------------------------

    async def _call(self, name: str, timeout_ms: float | None = None, **values: Any) -> Any:
        """Ask an operation. timeout_ms: of one with scope control; the others take the client's."""
        return await self._run(self._core.operation(name, values, timeout_ms))

    async def _run(self, flow: Flow[T]) -> T:
        """Carry out a flow of client/core.py."""
        try:
            need = next(flow)
            while True:
                try:
                    found = await (self._ask(need) if isinstance(need, Call) else self._carry_out(need))
                except Exception as error:  # noqa: BLE001 (the flow judges it)
                    need = flow.throw(error)
                else:
                    need = flow.send(found)
        except StopIteration as end:
            return cast("T", end.value)

    async def _carry_out(self, need: MetadataOf | float) -> Any:
        if isinstance(need, MetadataOf):
            async with self._link.turn():
                return await self._run(self._core.fetch(need))
        return await asyncio.sleep(need)

    async def _ask(self, call: Call) -> Any:
        operation = call.operation
        if operation is None or operation.scope is Scope.INFER:
            return await self._link.ask(call)
        if self._control is None:
            raise no_control_endpoint(operation.name)
        return await self._control.ask(call)


class _AsyncLink:
    """Requests over one channel, on the loop's thread only."""

    def __init__(self, channel: Channel, max_in_flight: int) -> None:
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._in_flight = InFlight(max_in_flight)
        self._timer: asyncio.TimerHandle | None = None  # runs at the book's next look, or before
        self._slots = asyncio.Semaphore(max_in_flight)
        self._turn = asyncio.Lock()
        self._connected: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # whose reader watches the socket
        self._forks = forks.count
        self._is_closed = False
        self._is_scheduled = False

    @property
    def connection(self) -> int:
        """The number of the connection that there is, or was last."""
        return self._channel.connection

    def turn(self) -> asyncio.Lock:
        """Return the lock that lets one task at a time fetch metadata."""
        self._leave_closed_loop()
        return self._turn

    async def ask(self, call: Call) -> Any:
        """Send one request, wait for its reply and return what the call decodes from it. Raises as `Link.ask`."""
        loop = asyncio.get_running_loop()
        await self._open(loop)
        await self._slot(call.wait_s)
        self._in_flight.number(call)
        try:
            if self._is_closed:
                raise closed()
            if not call.send(self._channel):
                await self._connect(min(CONNECT_LIMIT_S, call.wait_s))
                if not call.send(self._channel):
                    raise self._channel.ended()
        except BaseException:
            self._slots.release()
            raise
        call.future = loop.create_future()
        # The wait starts now: a long wait for a slot or a connection must not shorten the time for the reply.
        self._in_flight.add(call, loop.time() + call.wait_s)
        self._watch()
        self._look_again()
        await self._wait(call)
        return call.result()

    async def next_part(self, call: Call) -> Any:
        """Wait for the next part of an answer, and return the decoded result. Raises as `ask`. One task at a time."""
        if without_parts(call):
            call.future = asyncio.get_running_loop().create_future()
            self._watch()
            self._look_again()
            await self._wait(call)
        return call.result()

    async def _wait(self, call: Call) -> None:
        try:
            await call.future
        except BaseException:  # cancelled: the rest of an answer in parts is not wanted
            if call.parts is not None:
                self.leave(call)
            raise

    def leave(self, call: Call) -> None:
        """Have the daemon end an answer in parts that its caller leaves. Idempotent. Thread: any."""
        loop = self._loop
        if loop is None or loop.is_closed() or self._forks != forks.count:
            return
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._forget(call)
        else:  # freed by another thread, or between two runs of the loop
            loop.call_soon_threadsafe(self._forget, call)

    def _forget(self, call: Call) -> None:
        if self._in_flight.take(call.number) is not None:
            self._cancel(call)
            self._end(call, call.error)

    def _cancel(self, call: Call) -> None:
        """Have the daemon end an answer whose parts are not taken any more."""
        if call.cancel_header is None or call.is_over:
            return
        call.leave()
        if not self._is_closed and self._channel.connection == call.connection:
            self._channel.send(call.number, call.cancel_header(call.number), ())
            self._look_again()

    def close(self) -> None:
        self._is_closed = True
        if self._forks != forks.count:
            return  # the socket is the parent's
        self._leave_closed_loop()
        for call in self._in_flight.take_all():
            self._end(call, closed())
        for waiter in self._connected:
            if not waiter.done():
                waiter.set_exception(closed())
        if self._loop is not None:
            for fd in self._channel.fds:
                self._loop.remove_reader(fd)
            self._channel.close()
            self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def _leave_closed_loop(self) -> None:
        """Drop the state of a closed loop: its calls have no caller any more, and its locks are never released."""
        if self._loop is None or not self._loop.is_closed():
            return
        self._channel.close()
        self._loop = None
        self._timer = None
        self._in_flight.take_all()
        self._connected.clear()
        self._slots = asyncio.Semaphore(self._max_in_flight)
        self._turn = asyncio.Lock()
        self._is_scheduled = False

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_closed:
            raise closed()
        if self._forks != forks.count:
            if self._loop is not None:
                raise forks.crossed()
            self._forks = forks.count
        if self._loop is loop:
            return
        self._leave_closed_loop()
        if self._loop is not None:
            raise RuntimeError("this AsyncClient belongs to another event loop; make one for each loop")
        if (missing := await self._missing()) is not None:
            raise missing
        if self._loop is None and not self._is_closed:  # else another task opened it
            self._channel.open()
            self._loop = loop
            for fd in self._channel.fds:
                loop.add_reader(fd, self._take)

    async def _connect(self, limit_s: float) -> None:
        """Reconnect after a loss, which ends the pending calls. Raises at once without a listener."""
        while self._in_flight.calls and not self._channel.events() & POLLOUT:
            self._take()
        if not self._connected:
            self._channel.drain()
        if self._connected:
            is_there = await self._is_connected(limit_s)
        elif (missing := await self._missing()) is not None:
            raise missing
        else:
            is_there = await self._dial(limit_s)
        if not is_there:
            raise (await self._missing()) or self._channel.no_handshake()

    async def _dial(self, limit_s: float) -> bool:
        """Connect like `Channel.wait_connected`."""
        for patience_s in self._channel.patience(limit_s):
            if self._is_closed:
                raise closed()
            self._channel.dial()
            if await self._is_connected(patience_s):
                return True
            if await self._missing() is not None:  # it was there a moment ago, and stopped
                return False
        return False

    async def _is_connected(self, limit_s: float) -> bool:
        """Wait for the connection that a task dials; False when it is not there within `limit_s` seconds."""
        if self._is_closed:
            raise closed()
        if self._channel.events() & POLLOUT:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connected.append(waiter)
        try:
            await asyncio.wait_for(waiter, limit_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        finally:
            self._connected.remove(waiter)
        return True

    async def _missing(self) -> ConnectionError | None:
        """Call `Channel.missing` off the loop: a name look-up or a silent host takes seconds."""
        if self._channel.endpoint.startswith("ipc://"):
            return self._channel.missing()
        return await asyncio.wait_for(asyncio.to_thread(self._channel.missing), 2 * PROBE_LIMIT_S)

    async def _slot(self, wait_s: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        for limit_s in (wait_s, LOOKS * LOOK_S):  # twice: after a stall of the loop, replies are still unread
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._slots.acquire(), limit_s)
                return
        raise all_in_flight(self._max_in_flight, wait_s)

    def _take(self) -> None:
        """Take the replies that have arrived; the loop calls this when the socket has news."""
        self._is_scheduled = False
        channel = self._channel
        if self._is_closed:
            return
        taken = 0
        while (events := channel.events()) & POLLIN:
            while taken < REPLIES_A_TURN and (reply := channel.receive()) is not None:
                taken += 1
                call = self._in_flight.take(reply[1].bytes if len(reply) > 1 else b"")
                if call is None:  # its caller gave up, or it is not an answer
                    channel.take_notice(reply)
                    continue
                call.frames = reply
                if call.parts is None or not self._take_part(call, reply):
                    self._end(call, call.error)
            if taken >= REPLIES_A_TURN:
                # Invariant: the descriptor signals once, so remaining replies must be remembered here.
                self._look_again(must=True)
                return
        if not events & POLLOUT:
            for call in self._in_flight.take_all():
                self._end(call, channel.ended())
        else:
            for waiter in self._connected:
                if not waiter.done():
                    waiter.set_result(None)

    def _take_part(self, call: Call, reply: Sequence[Any]) -> bool:
        """Take a reply of an answer in parts; return whether more come."""
        assert self._loop is not None
        if not call.take_part(reply):
            if call.error is not None:
                self._cancel(call)
            return False
        self._in_flight.put_back(call, self._loop.time())
        if not call.future.done():
            call.future.set_result(None)
        return True

    def _look_again(self, must: bool = False) -> None:
        """Schedule a look after a send, which may have consumed the socket's signal (a reply, a connection)."""
        if self._loop is None or self._is_scheduled:
            return
        if must or self._connected or self._channel.events() != POLLOUT:
            self._is_scheduled = True
            self._loop.call_soon(self._take)

    def _end(self, call: Call, error: Exception | None = None) -> None:
        call.error = error
        self._slots.release()
        if not call.future.done():  # else cancelled by its caller
            call.future.set_result(None)

    def _watch(self) -> None:
        """Schedule `_look_for_missing` for the book's next look."""
        if self._loop is None or not self._in_flight.calls:
            return
        look_s = self._in_flight.look_s
        if self._timer is not None:
            if self._timer.when() <= look_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(look_s, self._look_for_missing)

    def _look_for_missing(self) -> None:
        self._timer = None
        self._take()  # the loop may have been held up
        if self._loop is None:
            return
        for call, late_s in self._in_flight.take_missed(self._loop.time()):
            call.error = no_reply(self._channel.endpoint, call.wait_s, late_s)
            self._cancel(call)
            self._end(call, call.error)
        self._watch()
