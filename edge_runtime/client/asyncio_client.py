"""The same client for an event loop: no thread, no lock, one socket watched by the loop.

Owns: one DEALER a client, driven by the loop's reader callback. Not `zmq.asyncio`, which reaches 0.3 of a blocking
loop, and not the threaded client's futures: a thread in between doubles a lone request's time (tests/bench).
Everything here runs on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from edge_runtime.client import frames
from edge_runtime.client.channel import CONNECT_LIMIT_S, POLLIN, POLLOUT, PROBE_LIMIT_S, Channel, CurveKeys
from edge_runtime.client.frames import Frame, Options
from edge_runtime.client.lateness import LOOK_S, LOOKS, no_reply
from edge_runtime.client.link import closed, lost
from edge_runtime.client.zmq_client import (
    DEFAULT_WAIT_S,
    LOAD_WAIT_S,
    MAX_IN_FLIGHT,
    READY_POLL_S,
    SLACK_S,
    UPDATE_WAIT_S,
)
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.errors import ConfigError, EdgeRuntimeError
from edge_runtime.messages import InferResult

if TYPE_CHECKING:
    from typing_extensions import Self

REPLIES_A_TURN = 64
"""Replies taken before other callbacks of the loop run: under a millisecond of work."""


class AsyncClient:
    """A connection to a daemon for one event loop; same arguments, errors and meaning as `Client`.

    Made anywhere, used inside the loop that uses it first. Cancelling a call discards its answer; the daemon still
    runs it, and it counts as in flight until then. A call beyond `max_in_flight` waits for its turn.

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
        self._timeout_ms = timeout_ms
        self._link = _AsyncLink(Channel(self.endpoint, curve), max_in_flight)
        if control is None and self.endpoint.startswith("ipc://"):
            control = control_endpoint_beside(self.endpoint)
        self._control = _AsyncLink(Channel(client_endpoint(control), curve), max_in_flight) if control else None
        self._encoder = frames.RequestEncoder()
        self._decoder = frames.ReplyDecoder()
        self._metadata: dict[str, Mapping[str, Any]] = {}
        self._asks_metadata = asyncio.Lock()
        self._max_frame_bytes: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail what is pending with ConnectionError and give the sockets back. Idempotent."""
        self._link.close()
        if self._control is not None:
            self._control.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> InferResult:
        """Run a model once; as `Client.infer`. Arrays of 256 KiB or more stay unchanged until this returns."""
        if timeout_ms is None:
            timeout_ms = self._timeout_ms
        options = Options(version, None if outputs is None else tuple(outputs), timeout_ms, priority, timing)
        tensors, guessed = frames.arrays(inputs)
        if guessed:
            frames.fit_datatypes(tensors, guessed, await self._known_metadata(model))
        header, data = self._encoder.encode(model, tensors, options, parameters)
        if frames.largest_bytes(data) >= frames.SIZE_CHECK_BYTES:
            frames.check_frame_sizes(model, tensors, data, await self._frame_limit(model))
        wait_s = frames.wait_s(timeout_ms, DEFAULT_WAIT_S, SLACK_S)
        return self._decoder.result(await self._link.ask(header, data, wait_s))

    async def is_live(self) -> bool:
        """Whether the daemon answers; False when nobody does."""
        return await self._says("live")

    async def is_ready(self, model: str = "") -> bool:
        """Whether the daemon can answer inference, or one model can; False when nobody answers."""
        return await self._says("ready", model)

    async def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the daemon, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        while not await self.is_ready(model):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{model or 'the daemon'} at {self.endpoint} was not ready within {limit_s:.1f} s")
            await asyncio.sleep(READY_POLL_S)

    async def models(self) -> list[dict[str, Any]]:
        """Every version the daemon knows, as `Client.models`."""
        return cast("list[dict[str, Any]]", await self._ask("models"))

    async def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """What a model takes and gives, as `Client.metadata`."""
        return cast("dict[str, Any]", await self._ask("metadata", model, version))

    async def stats(self) -> dict[str, Any]:
        """Counters, latencies by model, memory and uptime, as the daemon tells them."""
        return cast("dict[str, Any]", await self._ask("stats"))

    async def load(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Load a model, or one version; as `Client.load`."""
        return await self._ask_control("load", model, version, timeout_ms=timeout_ms)

    async def unload(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Take a model, or one version, out of service; as `Client.unload`."""
        return await self._ask_control("unload", model, version, timeout_ms=timeout_ms)

    async def update_status(self) -> dict[str, Any]:
        """What runs by updates and what is under way; as `Client.update_status`."""
        return cast("dict[str, Any]", await self._ask("update_status"))

    async def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last things that happened, newest first; as `Client.update_history`."""
        return cast("list[dict[str, Any]]", await self._ask("update_history", parameters={"count": count}))

    async def update_check(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now what is offered; as `Client.update_check`."""
        asked = self._ask_control("update_check", timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S)
        return cast("dict[str, Any]", await asked)

    async def update_apply(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now and install; as `Client.update_apply`."""
        asked = self._ask_control("update_apply", timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S)
        return cast("dict[str, Any]", await asked)

    async def update_import(self, folder: str | os.PathLike[str], *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Install from a folder; as `Client.update_import`."""
        parameters = frames.folder_parameters(folder)
        asked = self._ask_control("update_import", parameters=parameters, timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S)
        return cast("dict[str, Any]", await asked)

    async def update_rollback(self, model: str, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Let the release before serve again; as `Client.update_rollback`."""
        return cast("dict[str, Any]", await self._ask_control("update_rollback", model, timeout_ms=timeout_ms))

    # ---- private ----------------------------------------------------------------------------------------------------

    async def _known_metadata(self, model: str) -> Mapping[str, Any]:
        async with self._asks_metadata:  # many tasks begin at once: one of them asks
            found = self._metadata.get(model)
            if found is None:
                found = self._metadata[model] = await self.metadata(model)
            return found

    async def _frame_limit(self, model: str) -> int:
        if self._max_frame_bytes is None:
            try:
                found = await self._known_metadata(model)
            except EdgeRuntimeError:
                return frames.NO_LIMIT  # the model is not there or not ready: its own refusal says so better
            self._max_frame_bytes = int(found.get("max_frame_bytes", frames.NO_LIMIT))
        return self._max_frame_bytes

    async def _says(self, op: str, model: str = "") -> bool:
        try:
            return bool(await self._ask(op, model))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    async def _ask(
        self, op: str, model: str = "", version: int | None = None, parameters: Mapping[str, Any] | None = None
    ) -> Any:
        wait_s = frames.wait_s(self._timeout_ms, DEFAULT_WAIT_S, SLACK_S)
        return self._decoder.value(await self._link.ask(frames.pack_op(op, model, version, parameters), (), wait_s))

    async def _ask_control(
        self,
        op: str,
        model: str = "",
        version: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_ms: float | None,
        wait_s: float = LOAD_WAIT_S,
    ) -> Any:
        if self._control is None:
            raise ConfigError(f"{op} needs the control endpoint, which a tcp endpoint does not tell; give control=")
        self._metadata.pop(model, None)
        header = frames.pack_op(op, model, version, parameters)
        return self._decoder.value(await self._control.ask(header, (), frames.wait_s(timeout_ms, wait_s, SLACK_S)))


class _AsyncLink:
    """Requests over one channel, on the loop's thread only."""

    def __init__(self, channel: Channel, max_in_flight: int) -> None:
        self._channel = channel
        self._numbers = count(1)
        self._pending: dict[bytes, tuple[asyncio.Future[list[Any]], asyncio.TimerHandle]] = {}
        self._slots = asyncio.Semaphore(max_in_flight)
        self._connected: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._is_scheduled = False

    async def ask(self, header: bytes, tensors: Sequence[Frame], wait_s: float) -> list[Any]:
        loop = asyncio.get_running_loop()
        await self._open(loop)
        await self._slot(wait_s)
        number = next(self._numbers).to_bytes(8, "little")
        try:
            if self._is_closed:
                raise closed()
            if not self._channel.send(number, header, tensors):
                await self._connect(min(CONNECT_LIMIT_S, wait_s))
                if not self._channel.send(number, header, tensors):
                    raise lost(self._channel.endpoint)
        except BaseException:
            self._slots.release()
            raise
        future: asyncio.Future[list[Any]] = loop.create_future()
        # From now: what waited long for its slot, or a connection, has to be given time for its answer, too.
        end_s = loop.time() + wait_s
        self._pending[number] = future, loop.call_at(end_s, self._look_late, number, wait_s, end_s, LOOKS)
        self._look_again()
        return await future

    def close(self) -> None:
        self._is_closed = True
        for number in list(self._pending):
            self._settle(number, error=closed())
        for waiter in self._connected:
            if not waiter.done():
                waiter.set_exception(closed())
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fd)
            self._channel.close()
            self._loop = None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_closed:
            raise closed()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise RuntimeError("this AsyncClient belongs to another event loop; make one for each loop")
        if (missing := await self._missing()) is not None:
            raise missing
        if self._loop is None and not self._is_closed:  # else another task was faster
            self._channel.open()
            self._loop = loop
            loop.add_reader(self._channel.fd, self._take)

    async def _connect(self, limit_s: float) -> None:
        """No connection: what is pending lost its answer. Fail at once when nobody listens, else connect anew."""
        while self._pending and not self._channel.events() & POLLOUT:
            self._take()
        if self._connected:
            is_there = await self._is_connected(limit_s)
        elif (missing := await self._missing()) is not None:
            raise missing
        else:
            is_there = await self._dial(limit_s)
        if not is_there:
            raise (await self._missing()) or self._channel.no_handshake()

    async def _dial(self, limit_s: float) -> bool:
        """As `Channel.wait_connected`."""
        for patience_s in self._channel.patience(limit_s):
            if self._is_closed:
                raise closed()
            self._channel.dial()
            if await self._is_connected(patience_s):
                return True
        return False

    async def _is_connected(self, limit_s: float) -> bool:
        """Whether a connection that somebody asked for is there within so many seconds."""
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
        """As `Channel.missing`, without holding the loop up: a name may be looked up, a host may be silent."""
        if self._channel.endpoint.startswith("ipc://"):
            return self._channel.missing()
        return await asyncio.wait_for(asyncio.to_thread(self._channel.missing), 2 * PROBE_LIMIT_S)

    async def _slot(self, wait_s: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        for limit_s in (wait_s, LOOKS * LOOK_S):  # again: where the loop was held up, replies are yet to be taken
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._slots.acquire(), limit_s)
                return
        raise TimeoutError(
            f"as many requests as this client may have were in flight for {wait_s:.3f} s; raise max_in_flight"
        )

    def _take(self) -> None:
        """Take the replies that are there; called by the loop when the socket has news."""
        self._is_scheduled = False
        channel = self._channel
        if self._is_closed:
            return
        taken = 0
        while (events := channel.events()) & POLLIN:
            while taken < REPLIES_A_TURN and (reply := channel.receive()) is not None:
                taken += 1
                self._settle(reply[1].bytes if len(reply) > 1 else b"", reply)
            if taken >= REPLIES_A_TURN:
                # Invariant: the descriptor tells only once, so what is left must be remembered here.
                self._look_again(must=True)
                return
        if not events & POLLOUT:
            for number in list(self._pending):
                self._settle(number, error=lost(channel.endpoint))
        else:
            for waiter in self._connected:
                if not waiter.done():
                    waiter.set_result(None)

    def _look_again(self, must: bool = False) -> None:
        """After a send, which may have taken the socket's news (a reply, a connection): look once more if so."""
        if self._loop is None or self._is_scheduled:
            return
        if must or self._connected or self._channel.events() != POLLOUT:
            self._is_scheduled = True
            self._loop.call_soon(self._take)

    def _settle(self, number: bytes, reply: list[Any] | None = None, error: Exception | None = None) -> None:
        found = self._pending.pop(number, None)
        if found is None:
            return  # the reply to a request that was given up
        future, timer = found
        timer.cancel()
        self._slots.release()
        if future.done():
            return  # cancelled by its caller
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(reply or [])

    def _look_late(self, number: bytes, wait_s: float, end_s: float, looks_left: int) -> None:
        """Its time was over at `end_s`: after so many further looks its reply is missing (lateness.py)."""
        self._take()  # the loop may have been held up
        if (found := self._pending.get(number)) is None or self._loop is None:
            return
        if looks_left:
            timer = self._loop.call_later(LOOK_S, self._look_late, number, wait_s, end_s, looks_left - 1)
            self._pending[number] = found[0], timer
            return
        late_s = self._loop.time() - end_s - LOOKS * LOOK_S
        self._settle(number, error=no_reply(self._channel.endpoint, wait_s, late_s))
