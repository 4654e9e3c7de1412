"""HTTP/2 without I/O: calls and their answers, windows, known headers, and what peers may not do."""

from __future__ import annotations

import gzip
import random
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as some

from edge_runtime.doors.grpc import http2 as rules
from edge_runtime.doors.grpc.http2 import ENDED, GONE, ROOM, Http2, PackedMessage
from edge_runtime.doors.grpc.http2_head import HeadReader, Http2Error
from edge_runtime.doors.grpc.transport import GrpcMethod
from edge_runtime.telemetry.tracing import TraceParent
from tests.fakes import http2_peer as peer
from tests.fakes.http2_peer import BEGIN, DATA, END_HEADERS, END_STREAM, HEADERS, Frame, block, call, frame, message

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
METHODS = {
    peer.INFER: GrpcMethod(lambda data, call: None),
    STREAM: GrpcMethod(lambda data, call: None, is_stream=True),
}
MOST_BYTES = 4 << 20


class Served:
    """A connection of a server, and what it said."""

    def __init__(self, *sent: bytes, begin: bytes = BEGIN) -> None:
        self.now_s = 0.0
        self.http2 = Http2(METHODS.get, lambda: None, max_message_bytes=MOST_BYTES, now_s=0.0)
        self.replies = peer.Replies()
        self.first = self.said()
        self.take(begin)
        self.first += self.said()
        self.events = self.take(*sent)

    def take(self, *sent: bytes) -> list[Any]:
        """Take bytes as a transport does; return the events."""
        events = []
        for data in sent:
            left = data
            while left:
                place = self.http2.place
                if place is None:
                    events += self.http2.receive(left, self.now_s)
                    break
                count = min(len(place), len(left))
                place[:count] = left[:count]
                left = left[count:]
                events += self.http2.placed(count, self.now_s)
        return events

    def said(self, *kinds: int) -> list[Frame]:
        """The frames that were said since the last time; kinds: of those alone."""
        found = self.replies.take(b"".join(self.http2.take()))
        return [each for each in found if not kinds or each.kind in kinds]

    def why_it_ends(self, *sent: bytes) -> tuple[int, str]:
        """Code and text of the GOAWAY that what is sent leads to."""
        with pytest.raises(Http2Error):
            self.take(*sent)
        payload = self.said()[-1].payload
        return struct.unpack(">I", payload[4:8])[0], payload[8:].decode()


def messages(events: Iterable[Any]) -> list[Any]:
    return [(found.number, bytes(item) if isinstance(item, bytes | memoryview) else item) for found, item in events]


OPEN = [(":status", "200"), ("content-type", "application/grpc")]
ACCEPTS = ("grpc-accept-encoding", "identity, deflate, gzip")


def test_a_call_gets_one_message_and_its_status() -> None:
    served = Served(call(1, b"ask"))
    ((found, data),) = served.events
    assert (found.number, data) == (1, b"ask")
    found.answer(b"answer")
    assert served.said() == [
        (HEADERS, END_HEADERS, 1, [*OPEN, ACCEPTS]),
        (DATA, 0, 1, message(b"answer")),
        (HEADERS, END_HEADERS | END_STREAM, 1, [("grpc-status", "0")]),
    ]
    assert not served.http2.calls
    found.answer(b"another")  # it has ended
    assert served.said() == []


def test_an_error_is_trailers_alone_whose_text_is_percent_encoded() -> None:
    served = Served(call(1))
    served.events[0][0].end("NOT_FOUND", "no müdel\n100 %" + "x" * 2000, [("edge-runtime-code", "model_not_found")])
    (only,) = served.said()
    fields = dict(only.payload)
    assert (only.kind, only.flags) == (HEADERS, END_HEADERS | END_STREAM)
    assert fields["grpc-status"] == "5"
    assert fields["grpc-message"].startswith("no m%C3%BCdel%0A100 %25xxx")
    assert fields["edge-runtime-code"] == "model_not_found"
    assert len(fields["grpc-message"]) == 1024 + 5 + 2 + 2


def test_a_request_answered_before_it_came_whole_need_not_be_sent_to_its_end() -> None:
    served = Served(frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, 0, 1, message(b"ask")))
    served.events[0][0].answer(b"answer")
    assert served.said()[-1] == (peer.RESET, 0, 1, bytes(4))
    assert served.take(frame(DATA, 0, 1, b"more"), call(3, b"next"))[0][1] == b"next"


def test_headers_come_padded_with_priorities_and_in_pieces() -> None:
    head = block()
    padded = frame(HEADERS, END_HEADERS | peer.PADDED | peer.WITH_PRIORITY, 1, b"\x03" + bytes(5) + head + bytes(3))
    pieces = frame(HEADERS, 0, 3, head[:10]) + frame(peer.CONTINUATION, 0, 3, head[10:40])
    pieces += frame(peer.CONTINUATION, END_HEADERS, 3, head[40:])
    body = message(b"ask")
    served = Served(
        padded + frame(DATA, END_STREAM | peer.PADDED, 1, b"\x04" + body + bytes(4)),
        pieces + frame(DATA, 0, 3, body[:4]) + frame(DATA, 0, 3, body[4:]) + frame(DATA, END_STREAM, 3),
    )
    assert messages(served.events) == [(1, b"ask"), (3, b"ask")]


def test_a_known_block_is_read_anew_once_the_table_has_changed() -> None:
    encoder = Encoder()
    found = []
    served = Served()
    for number, timeout in enumerate(("1S", "1S", "1S", "2S", "2S", "1S", "3S", "3S", "1S"), start=1):
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", peer.INFER), (":authority", "x"), ("te", "trailers"),
            ("content-type", "application/grpc"), ("grpc-timeout", timeout),
        ]  # fmt: skip
        ((taken, _),) = served.take(call(2 * number - 1, b"x", encoder.encode(fields)))
        found.append(taken.head.timeout_s)
    assert found == [1, 1, 1, 2, 2, 1, 3, 3, 1]


def test_a_block_that_names_the_newest_entry_means_another_after_each_new_one() -> None:
    """The same bytes, with an entry added between: what an attacker of a cache by bytes would send."""
    head = block()
    newest = b"\xbe"  # entry 62: the newest of the dynamic table
    served = Served()
    found = []
    for number, timeout in enumerate(("1S", "2S", "3S")):
        added = head + peer.field("grpc-timeout", timeout, 0x40)
        for twice in range(3):
            sent = added if not twice else head + newest
            ((taken, _),) = served.take(call(6 * number + 2 * twice + 1, b"x", sent))
            found.append(taken.head.timeout_s)
    assert found == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_block_that_empties_the_table_is_not_a_known_one() -> None:
    head = block()
    added = head + peer.field("grpc-timeout", "1S", 0x40)
    served = Served(call(1, b"", added), call(3, b"", head + b"\xbe"), call(5, b"", b"\x20" + head))
    assert [found.head.timeout_s for found, _ in served.events] == [1, 1, None]
    assert served.why_it_ends(call(7, b"", head + b"\xbe"))[0] == 9


def test_a_peer_that_wants_a_smaller_table_learns_that_it_is_empty() -> None:
    served = Served(begin=peer.PREFACE + peer.settings({1: 0}))
    for number in (1, 3):
        ((found, _),) = served.take(call(number))
        found.answer(b"y")
        raw = b"".join(served.http2.take())
        assert raw[9:10] == (b"\x20" if number == 1 else b"\x88")
    served = Served(call(1), begin=peer.PREFACE + peer.settings({1: 100}))
    served.events[0][0].end("NOT_FOUND", "x")
    assert b"".join(served.http2.take())[9:11] == b"\x20\x88"


def test_answers_wait_for_the_windows_of_their_peer_and_for_its_largest_frame() -> None:
    served = Served(call(1), call(3), begin=peer.PREFACE + peer.settings({4: 20_000}))
    data = bytes(range(256)) * 200
    for found, _ in served.events:
        found.answer(data)
    got = {1: b"", 3: b""}

    def collect() -> list[Frame]:
        said = served.said()
        for each in said:
            if each.kind == DATA:
                assert len(each.payload) <= 16_384
                got[each.number] += each.payload
        return [each for each in said if each.kind != DATA]

    assert [each.number for each in collect()] == [1, 3]
    assert {number: len(each) for number, each in got.items()} == {1: 20_000, 3: 20_000}
    assert served.http2.blocked_bytes == 2 * (len(data) + 5 - 20_000)
    served.take(peer.window(1 << 20, 1))
    collect()
    assert sum(map(len, got.values())) == 65_535  # the connection's
    served.take(peer.window(1 << 20))
    assert [each.number for each in collect()] == [1]
    assert got[1] == message(data)
    served.take(peer.settings({4: 1 << 20}))
    assert [each.number for each in collect() if each.kind == HEADERS] == [3]
    assert got[3] == message(data)
    assert not served.http2.calls
    assert not served.http2.blocked_bytes


def test_a_stream_sends_and_gets_many_messages_and_hears_when_there_is_room() -> None:
    sent = message(b"one") + message(b"") + message(b"three")
    served = Served(
        frame(HEADERS, END_HEADERS, 1, block(STREAM)) + frame(DATA, 0, 1, sent[:9]), frame(DATA, 0, 1, sent[9:])
    )
    assert messages(served.events) == [(1, b"one"), (1, b""), (1, b"three")]
    found = served.events[0][0]
    assert found.write(b"1")
    assert not found.write(bytes(70_000))
    assert served.take(peer.window(1 << 20)) == []
    assert served.take(peer.window(1 << 20, 1)) == [(found, ROOM)]
    assert served.take(frame(DATA, END_STREAM, 1)) == [(found, ENDED)]
    found.end()
    assert served.said()[-1] == (HEADERS, END_HEADERS | END_STREAM, 1, [("grpc-status", "0")])


def test_a_paused_stream_is_granted_nothing_and_goes_on_where_it_was() -> None:
    served = Served(frame(HEADERS, END_HEADERS, 1, block(STREAM)) + frame(DATA, 0, 1, message(b"0")))
    found = served.events[0][0]
    found.pause()
    part = message(bytes(1000))
    for _ in range(1000):
        assert served.take(frame(DATA, 0, 1, part)) == []
    assert served.said(peer.WINDOW) == []
    assert served.http2.held_bytes > 1_000_000
    assert served.take(frame(DATA, END_STREAM, 1)) == []
    items = found.resume()
    assert len(items) == 1001
    assert items[-1] is ENDED
    assert served.http2.held_bytes == 0


def test_a_large_message_is_received_in_its_place_and_granted_its_length() -> None:
    data = random.Random(1).randbytes(3 << 20)
    whole = message(data)
    served = Served(frame(HEADERS, END_HEADERS, 1, block()), frame(DATA, 0, 1, whole[:100_000]))
    assert served.said(peer.WINDOW)[0].number == 1
    served.take(struct.pack(">I", len(whole) - 100_000)[1:] + struct.pack(">BBI", DATA, END_STREAM, 1))
    place = served.http2.place
    assert place is not None
    assert len(place) == len(whole) - 100_000
    assert served.http2.held_bytes > 99_000
    ((found, got),) = served.take(whole[100_000:])
    assert type(got) is memoryview
    assert got == data
    assert found.is_half_closed
    assert served.http2.held_bytes == 0


def test_a_compressed_message_is_handed_on_as_it_is() -> None:
    packed = gzip.compress(b"ask")
    served = Served(
        frame(HEADERS, END_HEADERS, 1, block(grpc_encoding="gzip")) + frame(DATA, END_STREAM, 1, message(packed, 1))
    )
    assert messages(served.events) == [(1, PackedMessage("gzip", packed))]


@pytest.mark.parametrize(
    ("headers", "sent", "status"),
    [
        (block("/a/b"), message(b""), 12),
        (block(te="x"), message(b""), 13),
        (block(grpc_timeout="soon"), message(b""), 13),
        (block(grpc_timeout="0S"), message(b""), 4),
        (block(grpc_encoding="snappy"), message(b""), 13),
        (block(more=[("a-bin", "!!")]), message(b""), 13),
        (block(more=[("Abc", "x")]), message(b""), 13),
        (block(more=[("x", "y" * 17_000)]), message(b""), 8),
        (block(), message(b"", 1), 13),
        (block(), message(b"", 2), 13),
        (block(), b"", 12),
        (block(), message(b"ask")[:-1], 13),
        (block(), b"\0" + struct.pack(">I", MOST_BYTES + 1), 8),
    ],
)  # fmt: skip
def test_a_call_that_is_none_gets_a_status(headers: bytes, sent: bytes, status: int) -> None:
    served = Served(
        frame(HEADERS, 0, 1, headers[:100]) + frame(peer.CONTINUATION, END_HEADERS, 1, headers[100:]),
        frame(DATA, END_STREAM, 1, sent),
    )
    assert all(item is GONE for _, item in served.events)
    (told,) = served.said(HEADERS)
    assert dict(told.payload)["grpc-status"] == str(status)
    assert not served.http2.calls
    assert messages(served.take(call(3, b"next"))) == [(3, b"next")]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        (block("/a/b"), "Method not found!"),
        (block(te="x"), "Error parsing 'te' metadata"),
        (block(grpc_timeout="soon"), "Error parsing 'grpc-timeout' metadata"),
        (block(grpc_timeout="0m"), "Deadline Exceeded"),
        (block(more=[("a-bin", "!!")]), "Error parsing 'a-bin' metadata: illegal base64 encoding"),
        (block(more=[("Abc", "x")]), "Illegal header key: Abc"),
    ],
)
def test_a_call_that_is_refused_for_its_headers_is_reported_as_grpcio_does(headers: bytes, text: str) -> None:
    (told,) = Served(call(1, b"", headers)).said(HEADERS)
    assert dict(told.payload)["grpc-message"] == text


@pytest.mark.parametrize("without", ["method", "path", "scheme", "te", "authority"])
def test_a_call_without_what_each_has_is_reset(without: str) -> None:
    served = Served(call(1, b"x", block(**{without: None})))
    assert (served.events, served.said(peer.RESET, HEADERS)) == ([], [(peer.RESET, 0, 1, b"\0\0\0\1")])


@pytest.mark.parametrize(
    "more",
    [
        (":status", "200"),
        (":test", "x"),
        (":authority", "late"),
        ("connection", "keep-alive"),
        ("transfer-encoding", "chunked"),
    ],
)
def test_headers_that_http2_forbids_reset_their_call_alone(more: tuple[str, str]) -> None:
    """RFC 9113, 8.2.2 and 8.3, as h2spec has them."""
    sent = call(1, b"x", block(authority=None, more=[("host", "a"), more])) + call(3, b"y")
    served = Served(sent)
    assert (messages(served.events), served.said(peer.RESET)) == ([(3, b"y")], [(peer.RESET, 0, 1, b"\0\0\0\1")])


def test_data_behind_the_end_of_a_call_resets_it_as_closed() -> None:
    served = Served(call(1, b"x") + frame(DATA, 0, 1, b"y"))
    assert served.said(peer.RESET) == [(peer.RESET, 0, 1, b"\0\0\0\5")]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(HEADERS, END_HEADERS, 1, b"\xff" * 50), 9),
        (frame(HEADERS, END_HEADERS, 2, block()), 1),
        (frame(HEADERS, END_HEADERS, 0, block()), 1),
        (frame(DATA, 0, 1, b"x"), 1),
        (frame(DATA, 0, 0, b"x"), 1),
        (frame(peer.PRIORITY, 0, 0, bytes(5)), 1),
        (frame(peer.GOAWAY, 0, 1, bytes(8)), 1),
        (frame(HEADERS, 0, 1, block()) + frame(peer.PING, 0, 0, bytes(8)), 1),
        (frame(HEADERS, 0, 1, block()) + frame(DATA, 0, 1, b"x"), 1),
        (frame(peer.CONTINUATION, END_HEADERS, 1, block()), 1),
        (frame(HEADERS, END_HEADERS | peer.PADDED, 1, b"\xff" + block()), 1),
        (frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, peer.PADDED, 1, b"\x05abc"), 1),
        (frame(peer.SETTINGS, 0, 0, bytes(5)), 6),
        (frame(peer.SETTINGS, 0, 1), 6),
        (peer.settings({2: 2}), 1),
        (peer.settings({4: 1 << 31}), 3),
        (peer.settings({5: 100}), 1),
        (frame(peer.PING, 0, 0, b"x"), 6),
        (frame(peer.PING, 0, 1, bytes(8)), 6),
        (frame(peer.RESET, 0, 1, bytes(4)), 1),
        (frame(peer.WINDOW, 0, 0, bytes(4)), 1),
        (peer.window((1 << 31) - 1), 3),
        (frame(peer.PUSH, 0, 1, bytes(8)), 1),
        (frame(peer.PRIORITY, 0, 1, bytes(4)), 6),
        (frame(HEADERS, END_HEADERS, 1, bytes(300_000)), 6),
        (struct.pack(">I", 1 << 23)[1:] + struct.pack(">BBI", DATA, 0, 1), 6),
    ],
)  # fmt: skip
def test_a_frame_that_breaks_the_protocol_ends_the_connection(sent: bytes, code: int) -> None:
    assert Served().why_it_ends(sent)[0] == code


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", peer.PREFACE + frame(peer.PING, 0, 0, bytes(8))])
def test_a_connection_that_begins_otherwise_is_not_http2(sent: bytes) -> None:
    served = Served(begin=b"")
    assert served.why_it_ends(sent)[0] == 1


def test_a_window_of_a_call_that_overflows_ends_the_call_alone() -> None:
    served = Served(call(1), peer.window((1 << 31) - 1, 1), call(3, b"next"))
    assert messages(served.events) == [(1, b""), (1, GONE), (3, b"next")]
    assert served.said(peer.RESET) == [(peer.RESET, 0, 1, b"\0\0\0\3")]


def test_more_data_than_a_call_was_granted_ends_the_call_alone() -> None:
    served = Served(frame(HEADERS, END_HEADERS, 1, block(STREAM)) + frame(DATA, 0, 1, message(b"0")))
    served.events[0][0].pause()
    part = message(bytes(100_000))
    events = [event for _ in range(11) for event in served.take(frame(DATA, 0, 1, part))]
    assert [item for _, item in events] == [GONE]
    assert served.said(peer.RESET) == [(peer.RESET, 0, 1, b"\0\0\0\3")]
    assert served.http2.held_bytes == 0


def test_more_calls_than_there_may_be_are_for_their_client_to_ask_again() -> None:
    heads = [frame(HEADERS, END_HEADERS, number, block()) for number in range(1, 2 * rules.MAX_STREAMS + 3, 2)]
    served = Served(b"".join(heads))
    assert served.said(peer.RESET) == [(peer.RESET, 0, 2 * rules.MAX_STREAMS + 1, b"\0\0\0\7")]
    assert len(served.http2.calls) == rules.MAX_STREAMS


def test_a_connection_that_is_left_answers_what_came_before() -> None:
    served = Served(call(1, b"before"))
    served.http2.leave("bye", is_final=False)
    between = served.take(call(3, b"between"))
    served.http2.leave("bye", is_final=True)
    assert served.take(call(5, b"after"), frame(DATA, 0, 5, b"more")) == []
    for found, _ in (*served.events, *between):
        found.answer(b"answer")
    said = served.said()
    goaways = [struct.unpack(">II", each.payload[:8]) for each in said if each.kind == peer.GOAWAY]
    assert goaways == [((1 << 31) - 1, 0), (3, 0)]
    assert [each.number for each in said if each.kind == DATA] == [1, 3]


# ---- attacks --------------------------------------------------------------------------------------------------------


def test_calls_that_are_taken_back_as_fast_as_they_come_end_the_connection() -> None:
    """CVE-2023-44487."""
    served = Served()
    pair = [call(number) + frame(peer.RESET, 0, number, b"\0\0\0\x08") for number in range(1, 12_000, 2)]
    assert served.why_it_ends(*pair) == (11, "too many frames that ask for nothing, or calls taken back")
    (last,) = served.http2.forget_all()
    assert 2000 < last.number < 9000


def test_a_client_that_takes_back_half_of_its_calls_goes_on() -> None:
    served = Served()
    for number in range(1, 40_000, 4):
        served.take(call(number), frame(peer.RESET, 0, number, b"\0\0\0\x08"))
        ((found, _),) = served.take(call(number + 2))
        found.answer(b"")
        served.http2.take()
        served.take(peer.window(5))
        served.now_s += 0.001
    assert not served.http2.calls


@pytest.mark.parametrize(
    "flood",
    [
        peer.settings(),
        frame(peer.PING, peer.ACK, 0, bytes(8)) + frame(peer.PRIORITY, 0, 1, bytes(5)),
        peer.window(1),
        frame(DATA, 0, 1),
        frame(77, 0, 0, b"unknown"),
        frame(peer.GOAWAY, 0, 0, bytes(8)),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, block()),
    ],
)  # fmt: skip
def test_frames_that_ask_for_nothing_end_the_connection_when_there_are_too_many(flood: bytes) -> None:
    served = Served(frame(HEADERS, END_HEADERS, 1, block(STREAM)))
    code, _ = served.why_it_ends(*[flood * 100] * 400)
    assert code == 11


def test_pings_are_counted_but_for_those_beside_answers() -> None:
    ping = frame(peer.PING, 0, 0, b"12345678")
    served = Served()
    for number in range(1, 2000, 2):
        served.take(call(number), ping)[0][0].answer(b"")
        served.take(ping, ping, peer.window(5))
        served.http2.take()
    assert served.why_it_ends(ping * 5) == (11, "too_many_pings")
    served = Served()
    for _ in range(100):
        served.take(ping)
        served.now_s += 10.0
    assert len(served.said(peer.PING)) == 100


def test_header_bombs_end_the_connection() -> None:
    large = peer.field("x", "y" * 3900, 0x40)  # an entry that fills the table
    served = Served(call(1, b"", block() + large))
    assert [found.number for found, _ in served.events] == [1]
    assert served.why_it_ends(call(3, b"", block() + b"\xbe" * 10_000))[0] == 11  # one byte an entry
    served = Served()
    pieces = [frame(peer.CONTINUATION, 0, 1, b"a" * 4000) for _ in range(80)]
    assert served.why_it_ends(frame(HEADERS, 0, 1, block()), *pieces)[0] == 11
    served = Served()
    empty = frame(peer.CONTINUATION, 0, 1)
    assert served.why_it_ends(frame(HEADERS, 0, 1, block()), *[empty] * 5000)[0] == 11


def test_headers_that_are_dear_to_read_end_the_connection_unless_their_calls_are_answered() -> None:
    def dear(number: int) -> bytes:
        return block(more=[("x", f"{number}" + "y" * 8000)])

    served = Served()
    sent = [frame(HEADERS, END_HEADERS | END_STREAM, number, dear(number)) for number in range(1, 1000, 2)]
    assert served.why_it_ends(*sent)[0] == 11
    served = Served()
    for number in range(1, 2000, 2):
        ((found, _),) = served.take(call(number, b"", dear(number)))
        found.answer(b"")
        served.http2.take()
        served.take(peer.window(5))


@pytest.mark.long
def test_a_text_of_headers_that_is_too_long_refuses_its_call_and_leaves_the_table_as_it_is() -> None:
    ask = Encoder()
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", peer.INFER), (":authority", "x"), ("te", "trailers"),
    ]  # fmt: skip
    served = Served()
    for number, (size, name) in enumerate(((10, "x"), (100_000, "x"), (200_000, "y"), (20_000, "te"), (10, "x"))):
        more = [(name, "z" * size), ("after", str(number))]
        sent = frame(HEADERS, END_HEADERS, 2 * number + 1, ask.encode([*fields, *more]))
        served.take(sent + frame(DATA, END_STREAM, 2 * number + 1, message(b"x")))
        told = served.said(HEADERS)
        assert [dict(each.payload)["grpc-status"] for each in told] == (["8"] if size > 1000 else [])
    assert [each.number for each in served.http2.calls.values()] == [1, 9]


def test_windows_that_are_opened_by_a_byte_each_time_end_the_connection() -> None:
    calls = [call(number) for number in range(1, 400, 2)]
    for number in (0, 1):  # the connection's, and a call's own
        served = Served(*calls, begin=peer.PREFACE + peer.settings({4: 0 if number else 1 << 20}))
        for found, _ in served.events:
            found.answer(bytes(10_000))
        served.http2.take()
        assert served.why_it_ends(*[peer.window(1, number)] * 50_000)[0] == 11


def test_a_number_in_headers_without_an_end_is_refused_at_once() -> None:
    assert Served().why_it_ends(frame(HEADERS, END_HEADERS, 1, b"\x7f" + b"\xff" * 60_000))[0] == 9


# ---- any bytes ------------------------------------------------------------------------------------------------------


def conversation(dice: random.Random, *, is_calm: bool = True) -> bytes:
    """Calls of all kinds, with other frames between. is_calm: none is taken back, and windows have room for answers."""
    parts, number = [], 1
    for _ in range(dice.randint(1, 12)):
        path = dice.choice([peer.INFER, STREAM])
        head = block(path, more=[("x", "y" * dice.randint(0, 300))] if dice.random() < 0.5 else ())
        body = b"".join(message(dice.randbytes(dice.choice([0, 3, 200, 20_000]))) for _ in range(dice.randint(1, 3)))
        cut = dice.randint(0, len(body))
        split = dice.randint(0, len(head))
        parts.append(
            dice.choice(
                [
                    frame(HEADERS, END_HEADERS, number, head),
                    frame(HEADERS, 0, number, head[:split])
                    + frame(peer.CONTINUATION, END_HEADERS, number, head[split:]),
                ]
            )
        )
        pieces = [frame(DATA, 0, number, body[:cut]), frame(DATA, END_STREAM, number, body[cut:])]
        most = peer.settings({4: dice.randint(100_000 if is_calm else 0, 200_000)})
        between = dice.choice([
            b"", frame(peer.PING, peer.ACK, 0, bytes(8)), most, peer.window(dice.randint(1, 1000)),
            peer.window(dice.randint(1, 1000), number), frame(99, 3, number, dice.randbytes(20)),
            b"" if is_calm else frame(peer.RESET, 0, number, bytes(4)),
        ])  # fmt: skip
        parts += [pieces[0], between, pieces[1]]
        number += 2
    return BEGIN + (peer.window(1 << 30) + peer.settings({4: 100_000}) if is_calm else b"") + b"".join(parts)


def what_comes_of(served: Served, sent: Iterable[bytes]) -> tuple[list[Any], bytes]:
    """Events and all that was said, where each message is answered at once."""
    found, said = [], []
    for each in sent:
        events = served.take(each)
        found += messages(events)
        for taken, item in events:
            if isinstance(item, bytes | memoryview) and not taken.head.is_stream:
                taken.answer(bytes(item)[::-1])
            elif isinstance(item, bytes | memoryview):
                taken.write(bytes(item))
            elif item is ENDED:
                taken.end()
        said += served.http2.take()
    return found, b"".join(said)


@given(some.integers(0, 1 << 32), some.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_bytes_cut_anywhere_mean_the_same(seed: int, pieces: int) -> None:
    dice = random.Random(seed)
    sent = conversation(dice)
    cuts = sorted(dice.randint(0, len(sent)) for _ in range(pieces))
    parts = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    whole = served_messages(Served(begin=b""), [sent])
    assert served_messages(Served(begin=b""), parts) == whole


def test_bytes_cut_at_every_place_mean_the_same() -> None:
    sent = conversation(random.Random(7))[:4000]
    whole = served_messages(Served(begin=b""), [sent])
    assert served_messages(Served(begin=b""), [sent[at : at + 1] for at in range(len(sent))]) == whole
    for at in range(len(sent)):
        assert served_messages(Served(begin=b""), [sent[:at], sent[at:]]) == whole


def served_messages(served: Served, parts: Iterable[bytes]) -> Any:
    """The events and frames of each call: answers of one call may go out before or after another's frames."""
    found, said = what_comes_of(served, parts)
    frames = served.replies.take(said)
    numbers = {number for number, _ in found} | {each.number for each in frames if each.kind in {DATA, HEADERS}}
    return {
        number: (
            [item for owner, item in found if owner == number],
            b"".join(each.payload for each in frames if each.number == number and each.kind == DATA),
            [each.payload for each in frames if each.number == number and each.kind == HEADERS],
        )
        for number in numbers
    }


@pytest.mark.long
def test_any_bytes_end_as_events_or_as_one_reason() -> None:
    fuzz(random.Random(5), 3000)


def fuzz(dice: random.Random, conversations: int) -> int:
    """Take changed conversations; return how many ended by a reason."""
    ended = 0
    for _ in range(conversations):
        sent = bytearray(conversation(dice, is_calm=False))
        for _ in range(dice.randint(0, 6)):
            at = dice.randrange(len(BEGIN), len(sent))
            kind = dice.randrange(3)
            if kind == 0:
                sent[at] = dice.randrange(256)
            elif kind == 1:
                del sent[at : at + dice.randint(1, 30)]
            else:
                odd = frame(dice.randrange(12), dice.randrange(256), dice.randrange(9), dice.randbytes(8))
                sent[at:at] = dice.choice([dice.randbytes(9), odd])
        cut = dice.randrange(len(sent))
        served = Served(begin=b"")
        try:
            what_comes_of(served, [bytes(sent[:cut]), bytes(sent[cut:])])
        except Http2Error:
            ended += 1
            assert served.said()[-1].kind == peer.GOAWAY
        http2 = served.http2
        calls = http2.calls.values()
        held = sum(each.filled + rules.KEPT_BYTES for each in calls if each.body is not None)
        assert http2.held_bytes == held + sum(rules.CALL_BYTES for each in calls if not each.has_message)
        http2.forget_all()
        assert (http2.held_bytes, http2.blocked_bytes) == (0, 0)
    return ended


def test_two_contexts_of_a_call_count_as_none() -> None:
    context = f"00-{7:032x}-{5:016x}-01"
    assert HeadReader(METHODS.get).read(block(traceparent=context)).traceparent == TraceParent(7, 5)
    found = HeadReader(METHODS.get).read(block(more=2 * [("traceparent", context)]))
    assert (found.method, found.traceparent) == (METHODS[peer.INFER], None)
