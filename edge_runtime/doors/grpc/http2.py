"""HTTP/2 as gRPC speaks it, server side, without I/O: bytes in, calls and messages out, bytes to send.

Owns: frames, windows of both directions, the messages inside DATA, and every bound on what a peer may make this side do
or hold. http2_head.py reads and writes headers; transport.py moves the bytes. Knows no sockets, threads, protobuf
and models. RFC 9113, and gRPC's own protocol (PROTOCOL-HTTP2.md). Thread: the caller's, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple, Protocol

import numpy as np

from edge_runtime.doors.grpc.http2_head import (
    EMPTY_TABLE,
    ENHANCE_YOUR_CALM,
    MAX_BLOCK_BYTES,
    MAX_METADATA_BYTES,
    OK_BLOCK,
    OPEN_BLOCK,
    OPEN_BLOCK_ALONE,
    PROTOCOL_ERROR,
    TABLE_BYTES,
    CallHead,
    HeadReader,
    Http2Error,
    ServedMethod,
    trailers,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

MAX_STREAMS = 1024
"""Calls of one connection at once; a client queues further ones. Many times the number that keeps all cores busy."""

WINDOW_BYTES = 1 << 20
"""The bytes that a call may send at first: a larger message is granted its length once that is known."""

CONNECTION_BYTES = 1 << 30
"""The window of a connection, renewed at half: what a peer may make this side hold is bounded by bytes held."""

FRAME_BYTES = 4 << 20
"""Largest DATA frame: it is taken in pieces. Others are bounded by MAX_BLOCK_BYTES."""

PLACED_BYTES = 16 << 10
"""From this size a message that has not come whole gets memory of its own, into which its bytes are received."""

KEPT_BYTES, CALL_BYTES = 128, 768
"""The memory that a waiting message costs beside its bytes, and a call whose first message is not there."""

PING_INTERVAL_S, PING_STRIKES = 10.0, 2
"""A client may ping this often, with or without calls; one that pings more, with no answer between, is disconnected.
Triton allows one in 300 s without calls, so what its clients are set to is allowed here."""

MOST_CREDIT, CREDIT_S, RESET_COST = 32_768, 8_000, 8
"""Frames that ask for nothing, and calls that are taken back, cost credit, which comes back with time and with what is
answered: 4 096 resets at once and 1 000 a second, some 2 % of a core. The rapid reset of CVE-2023-44487, floods of
settings, empty frames and continuations, and headers that are dear to read, end their connection when there is none
left."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 0x20

FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 3, 5, 6, 7, 8

_HEAD = Struct(">HBBBI")
_SETTING = Struct(">HI")
_LARGEST_WINDOW = (1 << 31) - 1
_FIRST_WINDOW, _FIRST_FRAME = 65_535, 16_384


class CallMark:
    """An event that is not a message."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ENDED, GONE, ROOM = CallMark("ENDED"), CallMark("GONE"), CallMark("ROOM")
"""The peer sends no further message; it took its call back, or broke the protocol in it; it reads again."""


class PackedMessage(NamedTuple):
    """A compressed message. encoding: "gzip" or "deflate"."""

    encoding: str
    data: Any


class GrpcReceiver(Protocol):
    """The `receiver` of a call, set by its method. Thread: the transport's."""

    def gone(self) -> None:
        """Drop all that waits: the caller took the call back, or it is over otherwise."""
        ...

    def ended(self) -> None:
        """Note that the call has sent its last message."""
        ...

    def may_write(self) -> None:
        """Go on with messages: the caller reads again."""
        ...


class GrpcCall:
    """One call: a stream of its connection.

    receiver: the owner's, None while there is none. moved_s: when it began, or bytes of it came. deadline_s: by the
    connection's clock; None: none. room: bytes that the peer may still send. extra: of the peer's window for this call,
    beside the one that each begins with. prefix, body, filled: a message under way: its first bytes, while they are not
    five, then the others. backlog: waits for `resume`. unsent: parts that the peer's windows do not take yet, before
    `trailers`. cost: of its headers, in credit, which an answer gives back. told: more fields of its trailers.
    """

    __slots__ = (
        "backlog", "body", "connection", "cost", "deadline_s", "extra", "filled", "flag", "has_begun", "has_message",
        "head", "is_half_closed", "is_open", "moved_s", "number", "pauses", "prefix", "receiver", "room", "sid", "told",
        "trailers", "unsent", "wants_room",
    )  # fmt: skip

    def __init__(self, connection: Http2, number: int, head: CallHead, now_s: float) -> None:
        self.connection = connection
        self.number = number
        self.sid = number.to_bytes(4, "big")
        self.head = head
        self.moved_s = now_s
        self.deadline_s = None if head.timeout_s is None else now_s + head.timeout_s
        self.receiver: GrpcReceiver | None = None
        self.is_open = True
        self.is_half_closed = self.has_message = self.has_begun = self.wants_room = False
        self.room = WINDOW_BYTES
        self.extra = self.cost = 0
        self.prefix = b""
        self.body: Any = None
        self.filled = self.flag = self.pauses = 0
        self.backlog: list[Any] | None = None
        self.unsent: deque[memoryview] | None = None
        self.trailers: bytes | None = None
        self.told = b""

    @property
    def is_under_way(self) -> bool:
        """Whether its message is not whole, of which the last bytes came at `moved_s`."""
        return self.body is not None or bool(self.prefix) or not (self.has_message or self.head.is_stream)

    def answer(self, message: bytes) -> None:
        """Send the only message, and OK. Nothing where the call has ended."""
        connection = self.connection
        size = len(message) + 5
        if (
            size > connection.lean_bytes
            or size > connection.send_window
            or self.extra < 0
            or not self.is_open
            or not self.is_half_closed
            or self.has_begun
            or connection.table_update
            or self.told
        ):
            self.write(message)
            self.end()
            return
        # The lean path: an answer that the peer's windows take whole.
        connection.send_window -= size
        sid = self.sid
        known = _MIDDLES.get(size)
        if known is None:
            known = _middle(size)
        middle, prefix = known
        connection.put(b"".join((_OPEN_HEAD, sid, middle, sid, prefix, message, _OK_HEAD, sid, OK_BLOCK)))
        connection.has_answered(self)

    def write(self, message: bytes) -> bool:
        """Send one message; return whether more may be sent at once: else ROOM comes when the peer reads again."""
        if not self.is_open:
            return True
        connection = self.connection
        if not self.has_begun:
            self.has_begun = True
            connection.put(connection.open_frame(self.sid))
        if self.unsent is None:
            self.unsent = deque()
        prefix = b"\0" + len(message).to_bytes(4, "big")
        if len(message) < PLACED_BYTES:
            self.unsent.append(memoryview(prefix + message))
        else:
            self.unsent += (memoryview(prefix), memoryview(message))
        connection.blocked_bytes += len(prefix) + len(message)
        connection.pump(self)
        self.wants_room = bool(self.unsent) or connection.is_choked
        return not self.wants_room

    def end(self, status: str = "OK", text: str = "", metadata: Iterable[tuple[str, str]] = ()) -> None:
        """End it. status: its name. Nothing where it has ended."""
        if not self.is_open or self.trailers is not None:
            return
        block = (OK_BLOCK if status == "OK" else trailers(status, text, metadata)) + self.told
        if self.unsent:
            self.trailers = block
        else:
            self.connection.finish(self, block)

    def cancel(self, status: str, text: str) -> None:
        """End it with an error, also where its peer has not taken all of its answer yet."""
        if self.unsent and self.is_open:
            self.connection.reset(self, CANCEL)
        else:
            self.end(status, text)

    def time_left_s(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        return None if self.deadline_s is None else self.deadline_s - self.connection.now_s

    def pause(self) -> None:
        """Keep the messages that come, and let its peer send no more than it may, until `resume` is called as often."""
        self.pauses += 1

    def keep(self, item: Any) -> None:
        """Have a message, or ENDED, wait for `resume`."""
        if self.backlog is None:
            self.backlog = []
        self.backlog.append(item)
        self.connection.held_bytes += _kept_bytes((item,))

    def resume(self) -> list[Any]:
        """Take back one `pause`; return messages that came meanwhile if it was the last, ENDED behind the last one."""
        self.pauses -= 1
        if self.pauses:
            return []
        backlog, self.backlog = self.backlog or [], None
        self.connection.held_bytes -= _kept_bytes(backlog)
        self.connection.grant(self)
        return backlog


Event = tuple[GrpcCall, Any]
"""A call, and its message: bytes, a view of memory of their own, `PackedMessage`, or a mark."""


class Http2:
    """One connection.

    calls: under way, by number. held_bytes: of messages that are not whole, or wait; blocked_bytes: of
    answers for which the peer has no window. now_s: when bytes came last.
    send_window: of the peer, for the connection; lean_bytes: the longest piece that each call's window and a frame take
    at first. is_choked: bytes sent before wait for the socket. is_met: the peer's settings have come. ping_s: when
    this side pinged, None where that was answered. table_update: stands before the next block. owner: the caller's.
    """

    def __init__(
        self,
        find: Callable[[str], ServedMethod | None],
        wants_flush: Callable[[], None],
        *,
        max_message_bytes: int,
        now_s: float,
        owner: Any = None,
    ) -> None:
        """find: the method of a path, None where there is none. wants_flush: called for the first part since `take`."""
        self.owner = owner
        self.calls: dict[int, GrpcCall] = {}
        self.held_bytes = self.blocked_bytes = 0
        self.send_window = _FIRST_WINDOW
        self.lean_bytes = _FIRST_FRAME
        self.is_choked = self.is_met = self.is_leaving = False
        self.table_update = b""
        self.sent_s = self.idle_s = now_s
        self.ping_s: float | None = None
        self.out: list[Any] = []
        self._wants_flush = wants_flush
        self._max_message_bytes = max_message_bytes
        self.now_s = now_s
        self._rest = b""
        self._preface = PREFACE
        self._heads = HeadReader(find)
        self._known = self._heads.known
        self._last = 0
        self._final: int | None = None
        # A header block under way: its call, its flags, and its bytes.
        self._block: bytearray | None = None
        self._block_call = self._block_flags = 0
        # A DATA frame under way, or another that is left out.
        self._left = self._padding = 0
        self._current: GrpcCall | None = None
        self._ends = False
        self._room = _LARGEST_WINDOW
        self._initial = _FIRST_WINDOW
        self._frame = _FIRST_FRAME
        # Calls whose answers wait: for their own windows, and for the connection's.
        self._blocked: dict[int, GrpcCall] = {}
        self._starved: dict[int, GrpcCall] = {}
        self._credit, self._credit_s = MOST_CREDIT, now_s
        self._pinged_s, self._strikes = -PING_INTERVAL_S, 0
        self._events: list[Event] = []
        self._gone: list[GrpcCall] = []
        self.put(_FIRST_FRAMES)

    # ---- bytes in ---------------------------------------------------------------------------------------------------

    @property
    def place(self) -> memoryview | None:
        """Where the next bytes belong, at least one: receive them there and call `placed`. None: `receive` them."""
        call = self._current
        if not self._left or call is None or call.body is None or type(call.body) is bytearray or not call.is_open:
            return None
        body: memoryview = call.body
        return body[call.filled : call.filled + self._left]

    def placed(self, count: int, now_s: float) -> list[Event]:
        """Take bytes that lie where `place` said."""
        self.now_s = now_s
        events: list[Event] = []
        self._events = events
        call = self._current
        assert call is not None
        self._left -= count
        call.moved_s = now_s
        call.filled += count
        self.held_bytes += count
        if call.filled == len(call.body):
            self._finish_body(call)
        if not self._left:
            self._end_data()
        self._events = []
        return events

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Take bytes; return calls with their messages and marks, in order. Raises Http2Error: `out` has the GOAWAY."""
        self.now_s = now_s
        events: list[Event] = []
        self._events = events
        try:
            self._receive(data)
        except Http2Error as error:
            self._put_goaway(self._last if self._final is None else self._final, error.code, str(error))
            self._gone = [call for call, item in events if item is GONE]
            raise
        finally:
            self._events = []  # an idle connection keeps no message
        return events

    def _receive(self, data: bytes) -> None:  # noqa: PLR0912 (the lean loop: calls cost)
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, size = 0, len(data)
        if self._preface:
            at = self._take_preface(data)
        calls, events, unpack = self.calls, self._events, _HEAD.unpack_from
        while True:
            if self._left:
                at = self._take_data(data, at, size)
                if self._left:
                    return
            begin = at + 9
            if begin > size:
                break
            high, low, kind, flags, number = unpack(data, at)
            length = high << 8 | low
            end = begin + length
            if kind == DATA and self._block is None:
                call = calls.get(number)
                # The lean path: a call's only message, whole.
                if (
                    call is not None
                    and flags == END_STREAM
                    and end <= size
                    and not call.has_message
                    and call.room == WINDOW_BYTES >= length > 4
                    and not call.head.is_stream
                    and data[begin] == 0
                    and int.from_bytes(data[begin + 1 : begin + 5], "big") == length - 5 <= self._max_message_bytes
                ):
                    self._room -= length
                    if self._room < CONNECTION_BYTES:
                        self._renew()
                    call.has_message = call.is_half_closed = True
                    self.held_bytes -= CALL_BYTES
                    events.append((call, data[begin + 5 : end]))
                    at = end
                    continue
                at = self._begin_data(data, begin, size, length, flags, number)
                if at < 0:
                    at = begin - 9
                    break
                continue
            if length > MAX_BLOCK_BYTES:
                if length > FRAME_BYTES or kind <= CONTINUATION:
                    raise Http2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                self._spend(RESET_COST)
                self._current, self._left, self._ends = None, length, False
                at = begin
                continue
            if end > size:
                break
            if kind == HEADERS and flags & ~END_STREAM == END_HEADERS and self._block is None and self.is_met:
                self._take_headers(number, data[begin:end], flags)
            else:
                self._take_frame(kind, flags, number & _LARGEST_WINDOW, data[begin:end])
            at = end
        self._rest = data[at:] if at < size else b""

    def _take_preface(self, data: bytes) -> int:
        """Check the first bytes of the connection; return how far."""
        wanted = self._preface
        count = min(len(wanted), len(data))
        if data[:count] != wanted[:count]:
            raise Http2Error(PROTOCOL_ERROR, "not HTTP/2: wanted its preface")
        self._preface = wanted[count:]
        return count

    def _take_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:  # noqa: PLR0912 (one case a kind)
        if self._block is not None and (kind != CONTINUATION or number != self._block_call):
            raise Http2Error(PROTOCOL_ERROR, "a header block was interrupted")
        if not self.is_met and kind != SETTINGS:
            raise Http2Error(PROTOCOL_ERROR, "wanted settings first")
        length = len(payload)
        if kind == HEADERS:
            self._begin_block(flags, number, payload)
        elif kind == CONTINUATION:
            self._continue_block(flags, payload)
        elif kind == WINDOW_UPDATE:
            self._update_window(number, payload)
        elif kind == SETTINGS:
            if number or length % 6 or (flags & ACK and length):
                raise Http2Error(FRAME_SIZE_ERROR, "settings of a wrong form")
            if not flags & ACK:
                self._spend(1 + len(self.calls) // 16)  # each is looked at
                self._take_settings(payload)
        elif kind == PING:
            if number or length != 8:
                raise Http2Error(FRAME_SIZE_ERROR, "a ping of a wrong form")
            self._take_ping(flags, payload)
        elif kind == RST_STREAM:
            if length != 4 or not number or number > self._last:
                raise Http2Error(PROTOCOL_ERROR, "a reset of a wrong form")
            self._spend(1)
            call = self.calls.get(number)
            if call is not None:
                self._spend(RESET_COST)
                self._forget(call)
                self._events.append((call, GONE))
        elif kind == GOAWAY:
            if number:
                raise Http2Error(PROTOCOL_ERROR, "a GOAWAY of one call")
            self._spend(1)
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "a client pushes nothing")
        else:  # PRIORITY, and kinds to come
            if kind == PRIORITY and (length != 5 or not number):
                raise Http2Error(FRAME_SIZE_ERROR if number else PROTOCOL_ERROR, "a priority of a wrong form")
            self._spend(1)

    def _spend(self, cost: int) -> None:
        """Count a frame that asks for nothing, or a call that is taken back."""
        self._credit -= cost
        if self._credit > 0:
            return
        earned = int((self.now_s - self._credit_s) * CREDIT_S)
        self._credit = min(self._credit + earned, MOST_CREDIT)
        self._credit_s = self.now_s
        if self._credit <= 0:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many frames that ask for nothing, or calls taken back")

    # ---- headers ----------------------------------------------------------------------------------------------------

    def _begin_block(self, flags: int, number: int, payload: bytes) -> None:
        begin, end = 0, len(payload)
        if flags & PADDED:
            if not payload or payload[0] >= len(payload):
                raise Http2Error(PROTOCOL_ERROR, "more padding than bytes")
            begin, end = 1, len(payload) - payload[0]
        if flags & WITH_PRIORITY:
            begin += 5
        if begin > end:
            raise Http2Error(PROTOCOL_ERROR, "headers of a wrong form")
        if flags & END_HEADERS:
            self._take_headers(number, payload[begin:end], flags)
        else:
            self._block, self._block_call, self._block_flags = bytearray(payload[begin:end]), number, flags

    def _continue_block(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2Error(PROTOCOL_ERROR, "a continuation of nothing")
        self._spend(RESET_COST)
        block += payload
        if len(block) > MAX_BLOCK_BYTES:
            raise Http2Error(ENHANCE_YOUR_CALM, f"headers of over {MAX_BLOCK_BYTES} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._take_headers(self._block_call, bytes(block), self._block_flags)

    def _take_headers(self, number: int, block: bytes, flags: int) -> None:
        """Begin a call, or end the messages of one."""
        if not number & 1 or number > _LARGEST_WINDOW:
            raise Http2Error(PROTOCOL_ERROR, f"a call has the number {number}")
        head, cost = self._known.get(block), 0
        if head is None:
            head = self._heads.read(block)
            cost = self._heads.cost
            self._spend(cost)
        ends = flags & END_STREAM
        if number <= self._last:
            call = self.calls.get(number)
            if call is None:
                self._spend(1)
            elif call.is_half_closed or not ends:
                self._reset(call, STREAM_CLOSED if call.is_half_closed else PROTOCOL_ERROR)
            else:
                self._half_close(call)
            return
        self._last = number
        if self._final is not None:  # its client asks again elsewhere
            self._spend(1)
            return
        if len(self.calls) >= MAX_STREAMS:
            self._spend(1)
            self.put(_frame(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big")))
            return
        if head.code:
            self._spend(1)
            self.put(_frame(RST_STREAM, 0, number, head.code.to_bytes(4, "big")))
            return
        call = GrpcCall(self, number, head, self.now_s)
        self.calls[number] = call
        self.held_bytes += CALL_BYTES
        call.cost = cost
        if head.status:
            call.cost = -RESET_COST - 1
            call.is_half_closed = bool(ends)
            call.end(head.status, head.text)
        elif ends:
            self._half_close(call)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _begin_data(  # noqa: PLR0917 (where it lies, and what its head says)
        self, data: bytes, begin: int, size: int, length: int, flags: int, number: int
    ) -> int:
        """Begin with a DATA frame; return where its messages begin, -1 while that has not come."""
        if length > FRAME_BYTES:
            raise Http2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if not number or number > self._last or not self.is_met:
            raise Http2Error(PROTOCOL_ERROR, f"data of the call {number}, which has not begun")
        padding = 0
        at = begin
        if flags & PADDED:
            if begin == size and length:
                return -1
            if not length or data[begin] >= length:
                raise Http2Error(PROTOCOL_ERROR, "more padding than bytes")
            padding = data[begin]
            at += 1
        if not length and not flags & END_STREAM:
            self._spend(RESET_COST)
        elif length < 64:
            self._spend(1)
        self._room -= length
        if self._room < CONNECTION_BYTES:
            self._renew()
        call = self.calls.get(number)
        if call is not None:
            call.room -= length
            if call.is_half_closed or call.room < 0:
                self._reset(call, STREAM_CLOSED if call.is_half_closed else FLOW_CONTROL_ERROR)
                call = None
        self._current, self._ends = call, bool(flags & END_STREAM)
        self._left, self._padding = length - padding - (at - begin), padding
        if not self._left:
            self._end_data()
        return at

    def _take_data(self, data: bytes, at: int, size: int) -> int:
        """Take the bytes that have come of a frame; return how far."""
        end = min(at + self._left, size)
        self._left -= end - at
        call = self._current
        if call is not None and call.is_open:
            self._feed(call, data, at, end)
        if self._left:
            return end
        has_padding = self._padding > 0
        self._end_data()
        return self._take_data(data, end, size) if has_padding else end

    def _end_data(self) -> None:
        call, ends = self._current, self._ends
        self._current, self._ends = None, False
        self._left, self._padding = self._padding, 0
        if call is None or not call.is_open:
            return
        if ends:
            self._half_close(call)
        else:
            self.grant(call)

    def _feed(self, call: GrpcCall, data: bytes, at: int, end: int) -> None:
        """Take messages out of bytes: each has a flag and four bytes of its length before it."""
        call.moved_s = self.now_s
        while at < end and call.is_open:
            body = call.body
            if body is not None:
                count = min(end - at, len(body) - call.filled)
                body[call.filled : call.filled + count] = memoryview(data)[at : at + count]
                call.filled += count
                self.held_bytes += count
                at += count
                if call.filled == len(body):
                    self._finish_body(call)
                continue
            if call.has_message and not call.head.is_stream:
                return  # one message counts
            count = min(5 - len(call.prefix), end - at)
            prefix = call.prefix + data[at : at + count]
            at += count
            call.prefix = prefix if len(prefix) < 5 else b""
            if call.prefix:
                return
            length = int.from_bytes(prefix[1:], "big")
            if length > self._max_message_bytes:
                text = f"SERVER: Received message larger than max ({length} vs. {self._max_message_bytes})"
                self._refuse(call, "RESOURCE_EXHAUSTED", text)
            elif length <= end - at:
                self._whole(call, prefix[0], data[at : at + length])
                at += length
            else:
                call.flag, call.filled = prefix[0], 0
                call.body = self._body_for(call, data[at:end], length)
                self.held_bytes += KEPT_BYTES
                self.grant(call, length - (end - at))

    @staticmethod
    def _body_for(call: GrpcCall, first: bytes, length: int) -> Any:
        """Memory for a message of which `first` has come."""
        if length < PLACED_BYTES:
            return bytearray(length)
        room = call.head.method.room
        found = room(call, first, length) if room is not None and not call.flag else None
        return _placed(length) if found is None else found

    def _finish_body(self, call: GrpcCall) -> None:
        body, call.body = call.body, None
        self.held_bytes -= len(body) + KEPT_BYTES
        self._whole(call, call.flag, bytes(body) if type(body) is bytearray else body)

    def _whole(self, call: GrpcCall, flag: int, data: Any) -> None:
        if not call.has_message:
            call.has_message = True
            self.held_bytes -= CALL_BYTES
        if self._credit < MOST_CREDIT:
            self._credit += 1
        item = data
        if flag:
            if flag != 1 or call.head.encoding == "identity":
                self._refuse(call, "INTERNAL", "Compression bit set but no encoding configured")
                return
            item = PackedMessage(call.head.encoding, data)
        if call.pauses:
            call.keep(item)
        else:
            self._events.append((call, item))

    def _half_close(self, call: GrpcCall) -> None:
        call.is_half_closed = True
        if call.body is not None or call.prefix:
            self._refuse(call, "INTERNAL", "the last message ended before its length")
        elif not call.head.is_stream:
            if not call.has_message:
                self._refuse(call, "UNIMPLEMENTED", "the call has no message; this method takes one")
        elif call.pauses:
            call.keep(ENDED)
        else:
            self._events.append((call, ENDED))

    def grant(self, call: GrpcCall, wanted: int = 0) -> None:
        """Let a call send more, where it is not paused. wanted: the rest of a message under way."""
        if call.is_half_closed or not call.is_open or call.pauses:
            return
        if call.has_message and not call.head.is_stream:
            return
        if call.body is not None and not wanted:
            wanted = len(call.body) - call.filled
        if call.room < wanted or call.room < WINDOW_BYTES // 2:
            count = max(wanted, WINDOW_BYTES) - call.room
            call.room += count
            self.put(_frame(WINDOW_UPDATE, 0, call.number, count.to_bytes(4, "big")))

    def _renew(self) -> None:
        """Let the connection send more; what each call may is another bound."""
        if self._room < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the window of the connection")
        count = _LARGEST_WINDOW - self._room
        self._room += count
        self.put(_frame(WINDOW_UPDATE, 0, 0, count.to_bytes(4, "big")))

    # ---- what a peer says of itself ---------------------------------------------------------------------------------

    def _take_settings(self, payload: bytes) -> None:
        for identifier, value in _SETTING.iter_unpack(payload):
            if identifier == 1 and value < TABLE_BYTES:
                self.table_update = EMPTY_TABLE  # RFC 7541, 4.2: the next block says that the table is empty
            elif identifier == 2 and value > 1:
                raise Http2Error(PROTOCOL_ERROR, "a setting of a wrong value")
            elif identifier == 4:
                most = max((call.extra for call in self.calls.values()), default=0)
                if value + max(most, 0) > _LARGEST_WINDOW:
                    raise Http2Error(FLOW_CONTROL_ERROR, "a window of more than 2 GiB")
                self._initial = value
            elif identifier == 5:
                if not _FIRST_FRAME <= value < 1 << 24:
                    raise Http2Error(PROTOCOL_ERROR, "a setting of a wrong value")
                self._frame = value
        self.lean_bytes = min(self._initial, self._frame)
        self.is_met = True
        self.put(_SETTINGS_ACK)
        self._pump_blocked()

    def _take_ping(self, flags: int, payload: bytes) -> None:
        self._spend(1)
        if flags & ACK:
            self.ping_s = None
            return
        if self.now_s - self._pinged_s < PING_INTERVAL_S:
            self._strikes += 1
        self._pinged_s = self.now_s
        self.put(_frame(PING, ACK, 0, payload))
        if self._strikes > PING_STRIKES:
            raise Http2Error(ENHANCE_YOUR_CALM, "too_many_pings")

    def _update_window(self, number: int, payload: bytes) -> None:
        count = int.from_bytes(payload, "big") & _LARGEST_WINDOW
        if len(payload) != 4 or number > self._last:
            raise Http2Error(FRAME_SIZE_ERROR, "a window of a wrong form")
        self._spend(1)
        if not number:
            self.send_window += count
            if not count or self.send_window > _LARGEST_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR if count else PROTOCOL_ERROR, "a window of a wrong size")
            self._pump_starved()
            return
        call = self.calls.get(number)
        if call is None:
            return
        call.extra += count
        if not count or self._initial + call.extra > _LARGEST_WINDOW:
            self._reset(call, FLOW_CONTROL_ERROR if count else PROTOCOL_ERROR)
        elif call.unsent:
            self.pump(call)
            self._tell_room(call)

    # ---- bytes out --------------------------------------------------------------------------------------------------

    def put(self, part: Any) -> None:
        """Have a part sent behind those that wait."""
        if not self.out:
            self._wants_flush()
        self.out.append(part)

    def take(self) -> list[Any]:
        """Return the parts that are to be sent."""
        parts, self.out = self.out, []
        return parts

    def drained(self) -> list[Event]:
        """Note that the socket takes more; return the calls that may write again."""
        self.is_choked = False
        events: list[Event] = []
        self._events = events
        for call in list(self.calls.values()):
            self._tell_room(call)
        self._events = []
        return events

    def open_frame(self, sid: bytes) -> bytes:
        """The headers of an answer with messages."""
        update = self.table_update
        if not update:
            return _OPEN_HEAD + sid + OPEN_BLOCK
        self.table_update = b""
        return _frame_head(len(OPEN_BLOCK) + 1, HEADERS, END_HEADERS) + sid + update + OPEN_BLOCK

    def has_answered(self, call: GrpcCall) -> None:
        """Note that a call was answered whole."""
        call.is_open = False
        del self.calls[call.number]
        self._earn(RESET_COST + call.cost)

    def pump(self, call: GrpcCall) -> None:
        """Send as much of a call as the peer's windows take."""
        unsent = call.unsent
        while unsent:
            part = unsent[0]
            count = min(len(part), self.send_window, self._initial + call.extra, self._frame)
            if count <= 0:
                blocked, other = self._blocked, self._starved
                if self.send_window <= 0:
                    blocked, other = other, blocked
                other.pop(call.number, None)
                blocked[call.number] = call
                return
            self.put(_frame_head(count, DATA, 0) + call.sid)
            self.put(part[:count])
            self._has_sent(call, count)
            unsent[0] = part[count:]
            if not unsent[0]:
                unsent.popleft()
        self._blocked.pop(call.number, None)
        self._starved.pop(call.number, None)
        if call.trailers is not None:
            self.finish(call, call.trailers)

    def _has_sent(self, call: GrpcCall, count: int) -> None:
        self.send_window -= count
        self.blocked_bytes -= count
        call.extra -= count
        self._earn(1 if count >= 64 else 0)

    def _earn(self, credit: int) -> None:
        """Note that something was sent that was asked for."""
        self.sent_s = self.now_s
        self._strikes, self._pinged_s = 0, -PING_INTERVAL_S
        if self._credit < MOST_CREDIT:
            self._credit += credit

    def _pump_blocked(self) -> None:
        """Go on with calls that wait for their own windows, once these have changed together."""
        for call in list(self._blocked.values()):
            self.pump(call)
            self._tell_room(call)
        self._pump_starved()

    def _pump_starved(self) -> None:
        """Go on with calls that wait for the connection's window, in turn, as far as that goes."""
        for _ in range(len(self._starved)):
            if self.send_window <= 0:
                return
            call = self._starved.pop(next(iter(self._starved)))
            self.pump(call)
            self._tell_room(call)

    def _tell_room(self, call: GrpcCall) -> None:
        if call.wants_room and call.is_open and not call.unsent and not self.is_choked:
            call.wants_room = False
            self._events.append((call, ROOM))

    def finish(self, call: GrpcCall, block: bytes) -> None:
        """Send the trailers of a call, its headers too where none were sent, and forget it."""
        if not call.has_begun:
            block = self.table_update + OPEN_BLOCK_ALONE + block
            self.table_update = b""
        self.put(_frame_head(len(block), HEADERS, END_HEADERS | END_STREAM) + call.sid + block)
        is_whole = call.is_half_closed
        self._forget(call)
        self._earn(RESET_COST + call.cost)
        if not is_whole:  # its peer need send no more
            self.put(_frame(RST_STREAM, 0, call.number, bytes(4)))

    def ping(self, now_s: float) -> None:
        """Ask whether the peer is there; `ping_s` is None once it has said so."""
        self.ping_s = now_s
        self.put(_frame(PING, 0, 0, b"edge run"))

    def leave(self, text: str, *, is_final: bool) -> None:
        """Say that this side ends the connection. is_final: calls that come later are not answered."""
        if self._final is not None:
            return
        self.is_leaving = True
        last = _LARGEST_WINDOW
        if is_final:
            self._final = last = self._last
        self._put_goaway(last, 0, text)

    def _put_goaway(self, last: int, code: int, text: str) -> None:
        self.put(_frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()))

    def _refuse(self, call: GrpcCall, status: str, text: str) -> None:
        """End a call for its fault, and call its receiver."""
        call.cost = -RESET_COST  # it was not an answer
        call.end(status, text)
        self._events.append((call, GONE))

    def _reset(self, call: GrpcCall, code: int) -> None:
        """End a call whose peer broke the protocol, and call its receiver."""
        self._spend(RESET_COST)
        self.reset(call, code)
        self._events.append((call, GONE))

    def reset(self, call: GrpcCall, code: int) -> None:
        """End a call without a status."""
        self._forget(call)
        self.put(_frame(RST_STREAM, 0, call.number, code.to_bytes(4, "big")))

    def drop_unfinished(self, most_bytes: int, text: str) -> list[GrpcCall]:
        """Refuse calls whose messages are not whole, or wait, oldest first, down to `most_bytes`; return them."""
        dropped = []
        for call in list(self.calls.values()):
            if self.held_bytes <= most_bytes:
                break
            if call.body is not None or call.backlog or not call.has_message:
                call.cancel("RESOURCE_EXHAUSTED", text)
                dropped.append(call)
        return dropped

    def forget_all(self) -> list[GrpcCall]:
        """End every call without a word, as its connection has; return those whose receivers have not heard of it."""
        calls = list(self.calls.values())
        for call in calls:
            self._forget(call)
        gone, self._gone = self._gone, []
        self._events, self.owner, self._wants_flush = [], None, _nothing  # which hold this
        return [*gone, *calls]

    def _forget(self, call: GrpcCall) -> None:
        call.is_open = False
        self.calls.pop(call.number, None)
        self._blocked.pop(call.number, None)
        self._starved.pop(call.number, None)
        if call.body is not None:
            self.held_bytes -= call.filled + KEPT_BYTES
        if not call.has_message:
            self.held_bytes -= CALL_BYTES
        self.held_bytes -= _kept_bytes(call.backlog or ())
        self.blocked_bytes -= sum(map(len, call.unsent or ()))
        call.body = call.backlog = call.unsent = None
        if self._current is call:
            self._current = None


def _nothing() -> None:
    """Send nothing: the connection has ended."""


def _placed(length: int) -> memoryview:
    """Memory for a message, untouched as yet, whose end lies aligned: the tensor that a message ends with begins so."""
    memory = np.empty(length + 64, np.uint8)
    begin = -(memory.ctypes.data + length) % 64
    return memory[begin : begin + length].data


def _kept_bytes(items: Sequence[Any]) -> int:
    return sum(
        len(each.data if type(each) is PackedMessage else each) + KEPT_BYTES for each in items if each is not ENDED
    )


def _frame_head(length: int, kind: int, flags: int) -> bytes:
    """A frame's first bytes but its call."""
    return length.to_bytes(3, "big") + bytes((kind, flags))


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return _frame_head(len(payload), kind, flags) + number.to_bytes(4, "big") + payload


def _middle(size: int) -> tuple[bytes, bytes]:
    """Return the bytes between the numbers of a call in an answer. size: of its message with its length."""
    if len(_MIDDLES) >= 4096:
        _MIDDLES.clear()
    made = _MIDDLES[size] = (OPEN_BLOCK + _frame_head(size, DATA, 0), b"\0" + (size - 5).to_bytes(4, "big"))
    return made


_MIDDLES: dict[int, tuple[bytes, bytes]] = {}

_OPEN_HEAD = _frame_head(len(OPEN_BLOCK), HEADERS, END_HEADERS)
_OK_HEAD = _frame_head(len(OK_BLOCK), HEADERS, END_HEADERS | END_STREAM)
_SETTINGS_ACK = _frame(SETTINGS, ACK, 0, b"")
_FIRST_FRAMES = _frame(
    SETTINGS,
    0,
    0,
    b"".join(
        _SETTING.pack(identifier, value)
        for identifier, value in ((3, MAX_STREAMS), (4, WINDOW_BYTES), (5, FRAME_BYTES), (6, MAX_METADATA_BYTES))
    ),
) + _frame(WINDOW_UPDATE, 0, 0, (_LARGEST_WINDOW - _FIRST_WINDOW).to_bytes(4, "big"))
