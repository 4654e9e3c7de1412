"""A TCP proxy on 127.0.0.1 that spoils the connection on demand: what a test puts between a client and a broker.

One thread moves all bytes, in an asyncio loop of its own. A fault holds for connections that exist and for new ones,
until `heal` or the method that undoes it; each method returns when it is in force. Memory is bounded: a direction that
cannot be written is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

Direction: TypeAlias = Literal["up", "down"]
"""up: from the client to the server behind. down: back."""

BOTH: tuple[Direction, ...] = ("up", "down")

READ_BYTES = 16 << 10
MAX_QUEUED = 512
"""Pieces of at most READ_BYTES under way in one direction of one connection: 8 MiB, or 512 small messages."""

SLICE_S = 0.01
"""A slow link sends as much at a time as it carries in this time, so that it flows rather than stutters."""

ANSWER_S = 60.0
"""How long the thread may take to put a fault in force before the test fails: it takes less than 1 ms."""

UNACCEPTABLE_PROTOCOL_VERSION = b"\x20\x02\x00\x01"
"""MQTT 3.1.1, section 3.2.2.3: what a broker answers that does not know the CONNECT's protocol level."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: close sends RST and drops what is unsent."""


class FaultProxy:
    """Forwards to 127.0.0.1:`upstream_port` from `port`, which the system picks, while the context lasts.

    refuse_mqtt5: stands for a broker of before MQTT 5, which answers such a CONNECT as MQTT 3.1.1 has it, and closes.
    close_mqtt5: for one that only closes.
    """

    def __init__(self, upstream_port: int, *, refuse_mqtt5: bool = False, close_mqtt5: bool = False) -> None:
        self.port = 0
        self.connections = 0
        """How many were made so far, those refused included."""
        self.bytes_up = 0
        """Bytes delivered to the server."""
        self.bytes_down = 0
        """Bytes delivered to clients."""
        self._upstream = ("127.0.0.1", upstream_port)
        self._refuses_mqtt5 = refuse_mqtt5 or close_mqtt5
        self._answer_to_mqtt5 = b"" if close_mqtt5 else UNACCEPTABLE_PROTOCOL_VERSION
        self._forget_faults()
        self._open: set[_Connection] = set()
        self._broken: list[BaseException] = []
        self._came = threading.Condition()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(ANSWER_S), "the proxy does not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        assert not self._broken, self._broken

    # ---- what a test calls ----

    def cut(self) -> None:
        """Reset every connection now, on both sides. New ones are served."""
        self._call(self._reset(self._open))

    def refuse(self) -> None:
        """Reset each new connection at once. Those that exist stay."""
        self._set(_refuses=True)

    def accept(self) -> None:
        """Serve new connections again: undoes `refuse` and `hold_accept`."""
        self._set(_refuses=False, _holds=False)

    def hold_accept(self) -> None:
        """Take new connections, and never forward or answer a byte of theirs, not even after `heal`."""
        self._set(_holds=True)

    def black_hole(self, direction: Direction | None = None) -> None:
        """Let every byte vanish, and every FIN and RST: both sides believe in the connection. One direction, or both.

        New connections are taken, and nothing more. `heal` resets those that lost something: TCP never shows a stream
        with a hole in it.
        """
        self._set(_holes=frozenset(BOTH if direction is None else (direction,)))

    def delay(self, seconds: float) -> None:
        """Let each byte that comes from now on take that much longer, each way."""
        self._set(_delay_s=seconds)

    def limit(self, bytes_per_s: float) -> None:
        """Be a slow link: so many bytes a second each way, all connections together."""
        self._set(_bytes_per_s=bytes_per_s)

    def corrupt(self, every_n_bytes: int, direction: Direction | None = None) -> None:
        """Flip the lowest bit of each n-th byte from now on, counted for each connection and direction."""

        async def spoil() -> None:
            self._corrupt_every = dict.fromkeys(BOTH if direction is None else (direction,), every_n_bytes)
            for connection in self._open:
                connection.passed_bytes.clear()

        self._call(spoil())

    def heal(self) -> None:
        """Undo every fault. What `black_hole` broke is reset; what `hold_accept` took stays held."""

        async def undo() -> None:
            self._forget_faults()
            await self._reset({connection for connection in self._open if connection.has_lost})

        self._call(undo())

    def wait_connections(self, count: int, timeout_s: float = ANSWER_S) -> None:
        """Wait until so many connections were made in all."""
        with self._came:
            assert self._came.wait_for(lambda: self.connections >= count, timeout_s), (
                f"{self.connections} connections in {timeout_s} s, wanted {count}"
            )

    def _set(self, **faults: Any) -> None:
        async def change() -> None:
            for name, value in faults.items():
                setattr(self, name, value)

        self._call(change())

    def _call(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result(ANSWER_S)

    # ---- in the thread ----

    def _forget_faults(self) -> None:
        self._refuses = False
        self._holds = False
        self._holes: frozenset[Direction] = frozenset()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._link_free_s: dict[Direction, float] = dict.fromkeys(BOTH, 0.0)
        self._corrupt_every: dict[Direction, int] = {}

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            taking = asyncio.create_task(self._take(listener))
            self._is_ready.set()
            await self._stop.wait()
            taking.cancel()
            await asyncio.wait([taking])
            await self._reset(self._open)

    async def _take(self, listener: socket.socket) -> None:
        while True:
            client = await self._accept(listener)
            if self._refuses:
                _close(client, resets=True)
            else:
                connection = _Connection(client)
                self._open.add(connection)
                connection.task = asyncio.create_task(self._carry(connection))
                connection.task.add_done_callback(self._note_failure)
            with self._came:
                self.connections += 1
                self._came.notify_all()

    async def _accept(self, listener: socket.socket) -> socket.socket:
        """Accept without `sock_accept`: cancelled at the wrong moment, that loses the connection it has accepted."""
        while True:
            is_readable = self._loop.create_future()
            self._loop.add_reader(listener, lambda ready=is_readable: ready.done() or ready.set_result(None))
            try:
                await is_readable
            finally:
                self._loop.remove_reader(listener)
            with contextlib.suppress(BlockingIOError):
                client, _ = listener.accept()
                client.setblocking(False)
                return client

    async def _carry(self, connection: _Connection) -> None:
        """Own a connection from its beginning to its end. However it ends but cleanly, both sides are reset."""
        is_clean = False
        try:
            await self._join(connection)
            is_clean = True
        except OSError:
            pass  # one side was reset, or no server listens; so the other side is reset too
        finally:
            for side in filter(None, (connection.client, connection.server)):
                _close(side, resets=not is_clean)
            self._open.discard(connection)

    async def _join(self, connection: _Connection) -> None:
        if self._holds or self._holes:
            connection.has_lost = not self._holds
            await self._swallow(connection.client)
            return
        first = await self._first_bytes(connection.client) if self._refuses_mqtt5 else b""
        if protocol_level(first) == 5:
            await self._loop.sock_sendall(connection.client, self._answer_to_mqtt5)
            connection.client.shutdown(socket.SHUT_WR)
            # Closing before the client does would reset the connection, the answer included, if more had come.
            await self._swallow(connection.client)
            return
        connection.server = server = socket.socket()
        server.setblocking(False)
        await self._loop.sock_connect(server, self._upstream)
        up, down = _Pipe("up", connection.client, server), _Pipe("down", server, connection.client)
        if first:
            up.queue.put_nowait((0.0, first))
        works = [
            asyncio.create_task(work)
            for pipe in (up, down)
            for work in (self._read(connection, pipe), self._write(connection, pipe))
        ]
        try:
            await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _swallow(self, client: socket.socket) -> None:
        while await self._loop.sock_recv(client, READ_BYTES):
            pass

    async def _first_bytes(self, client: socket.socket) -> bytes:
        """As many as tell the protocol level, or all there are."""
        first = b""
        while protocol_level(first) is None:
            data = await self._loop.sock_recv(client, READ_BYTES)
            if not data:
                break
            first += data
        return first

    async def _read(self, connection: _Connection, pipe: _Pipe) -> None:
        """Send what comes from the pipe's source on its way, b"" for its end."""
        while True:
            try:
                data = await self._loop.sock_recv(pipe.source, READ_BYTES)
            except OSError:
                if pipe.direction not in self._holes:
                    raise
                connection.has_lost = True
                return
            await pipe.queue.put((self._loop.time() + self._delay_s, self._spoil(connection, pipe.direction, data)))
            if not data:
                return

    def _spoil(self, connection: _Connection, direction: Direction, data: bytes) -> bytes:
        every = self._corrupt_every.get(direction)
        if not every:
            return data
        passed = connection.passed_bytes.get(direction, 0)
        connection.passed_bytes[direction] = passed + len(data)
        spoiled = bytearray(data)
        for index in range(every - 1 - passed % every, len(data), every):
            spoiled[index] ^= 1
        return bytes(spoiled)

    async def _write(self, connection: _Connection, pipe: _Pipe) -> None:
        """Deliver each piece when it is due, unless it vanishes."""
        while True:
            due_s, data = await pipe.queue.get()
            if due_s > self._loop.time():
                await asyncio.sleep(due_s - self._loop.time())
            rest = data
            while rest:
                rest = rest[await self._deliver(connection, pipe, rest) :]
            if not data:
                if pipe.direction in self._holes:
                    connection.has_lost = True
                else:
                    pipe.target.shutdown(socket.SHUT_WR)
                return

    async def _deliver(self, connection: _Connection, pipe: _Pipe, data: bytes) -> int:
        """Deliver as much as may pass at once; return how many bytes are done with."""
        rate = self._bytes_per_s
        part = data[: max(1, int(rate * SLICE_S))] if rate else data
        if rate:
            now_s = self._loop.time()
            turn_s = max(self._link_free_s[pipe.direction], now_s)
            self._link_free_s[pipe.direction] = turn_s + len(part) / rate
            await asyncio.sleep(turn_s + len(part) / rate - now_s)
        if pipe.direction in self._holes:
            connection.has_lost = True
            return len(part)
        if pipe.direction == "up":
            self.bytes_up += len(part)  # before it is sent: its reader may ask for the count at once
        else:
            self.bytes_down += len(part)
        await self._loop.sock_sendall(pipe.target, part)
        return len(part)

    async def _reset(self, connections: set[_Connection]) -> None:
        tasks = [connection.task for connection in connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in connections & self._open:  # cancelled before its first step
            _close(connection.client, resets=True)
            self._open.discard(connection)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken.append(error)


@dataclass(eq=False)
class _Connection:
    """One client, its server (none while it is held or not yet known), and what happened to its stream."""

    client: socket.socket
    server: socket.socket | None = None
    task: asyncio.Task[None] | None = None
    has_lost: bool = False
    passed_bytes: dict[Direction, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pipe:
    """One direction of a connection: when each piece is due, and the piece."""

    direction: Direction
    source: socket.socket
    target: socket.socket
    queue: asyncio.Queue[tuple[float, bytes]] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))


def protocol_level(first: bytes) -> int | None:
    """The protocol level of an MQTT CONNECT that starts so: None when more bytes must tell, 0 when it is not a CONNECT.

    MQTT 5.0, sections 2.1.4 and 3.1.2: type, remaining length (1 to 4 bytes), protocol name with its length, level.
    """
    if not first:
        return None
    if first[0] != 0x10:
        return 0
    rest = first[1:]
    length_bytes = next((index + 1 for index, byte in enumerate(rest[:4]) if byte < 0x80), None)
    if length_bytes is None:
        return 0 if len(rest) >= 4 else None
    rest = rest[length_bytes:]
    level_at = 2 + int.from_bytes(rest[:2], "big") if len(rest) >= 2 else None
    if level_at not in (None, 2 + len("MQTT"), 2 + len("MQIsdp")):
        return 0
    return rest[level_at] if level_at is not None and len(rest) > level_at else None


def _close(side: socket.socket, *, resets: bool) -> None:
    if resets:
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    side.close()
