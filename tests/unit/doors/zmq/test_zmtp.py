"""The protocol of ZeroMQ's connections, without I/O: any bytes end in a handshake, or in one of our errors."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.zmq.zmtp import (
    COMMAND,
    LONG,
    MORE,
    Null,
    ZmtpError,
    ZmtpHandshake,
    command,
    cut_command,
    cut_frame,
    frame_head,
    message,
    properties,
    read_properties,
)
from tests.fakes.zmq_site import ZmqSite

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
"""The signature as the specification has it, not as libzmq sends it."""
READY = command(b"READY", properties({b"Socket-Type": b"DEALER", b"Identity": b"own"}))
HELLO = GREETING[:9] + b"\x01" + GREETING[10:]


def shaken(pieces: list[bytes]) -> tuple[ZmtpHandshake, bytes]:
    handshake, out = ZmtpHandshake(Null()), b""
    for piece in pieces:
        out += handshake.take(piece)
    return handshake, out


@given(st.lists(st.binary(max_size=80)), st.sampled_from([b"", GREETING[:11], GREETING, GREETING + READY[:9]]))
def test_any_bytes_are_a_handshake_or_one_of_our_errors(pieces, begins):
    handshake = ZmtpHandshake(Null())
    with contextlib.suppress(ZmtpError):
        for piece in [begins, *pieces]:
            handshake.take(piece)
            if handshake.identity is not None:
                break


@given(st.lists(st.integers(0, len(GREETING + READY)), max_size=8))
def test_a_handshake_may_come_in_any_pieces(cuts):
    said = GREETING + READY
    places = [0, *sorted(cuts), len(said)]
    handshake, out = shaken([said[begin:end] for begin, end in pairwise(places)])
    assert handshake.identity == b"own"
    assert handshake.rest == b""
    assert out == shaken([said])[1]


@given(st.dictionaries(st.binary(min_size=1, max_size=255).map(bytes.lower), st.binary(max_size=300), max_size=5))
def test_properties_are_read_as_they_were_written(written):
    assert read_properties(properties(written)) == written


@given(st.binary(max_size=100))
def test_any_properties_are_read_or_refused(data):
    with contextlib.suppress(ZmtpError):
        read_properties(data)
    with contextlib.suppress(ZmtpError):
        cut_command(data)


@given(st.lists(st.binary(max_size=600), min_size=1, max_size=5))
def test_a_message_is_cut_as_it_was_written(frames):
    data, found = b"".join(message(frames)), []
    while data:
        flags, begin, end = cut_frame(data, 0)
        found.append(data[begin:end])
        data = data[end:]
        assert bool(flags & MORE) == bool(data)
    assert found == frames


@pytest.mark.parametrize("size", [0, 255, 256, 1 << 40])
@pytest.mark.parametrize("flags", [0, MORE, COMMAND])
def test_the_head_of_a_frame_says_its_size(flags, size):
    head = frame_head(flags, size)
    assert cut_frame(head, 0) == (flags | (LONG if size > 255 else 0), len(head), len(head) + size)
    assert [cut_frame(head[:cut], 0) for cut in range(1, len(head))] == [None] * (len(head) - 1)


class Echo:
    """Knows no header, and sends each message back."""

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Any, peer: Any, frames: list[Any]) -> None:
        endpoint.send(peer.envelope, [bytes(each) for each in frames])

    def refuse(self, endpoint: Any, peer: Any, frames: list[Any], error: Any) -> None:
        endpoint.send(peer.envelope, [error.code.encode()])

    def owes(self, sender: Any) -> bool:
        return False

    def gone(self, sender: Any) -> None:
        """Nothing waits."""

    unheard = gone


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ZmqSite]:
    site = ZmqSite(tmp_path, Echo())
    yield site
    site.close()


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, left out or doubled."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(3):
            case 0:
                changed[at] = chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 127, 255, chance.randrange(256)))
            case 1:
                del changed[at : at + chance.randint(1, 9)]
            case 2:
                changed[at:at] = changed[at : at + chance.randint(1, 9)]
    return bytes(changed)


def test_mutated_bytes_cost_no_other_connection_its_answer(site: ZmqSite) -> None:
    chance = random.Random(24)
    good = site.client()
    said = HELLO + READY + b"".join(map(b"".join, (message([b"h" * 60, b"%d" % n, bytes(64)]) for n in range(4))))
    for number in range(600):
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect(site.address.removeprefix("ipc://"))
            with contextlib.suppress(OSError):
                bad.sendall(mutated(chance, said))
            good.send_multipart([b"x", b"%d" % number])
            assert site.replies(good, 1) == [[b"x", b"%d" % number]]
    site.turn_until(lambda: len(site.endpoint.connections) == 1)
    assert "io_errors" not in site.metrics.counters()


def test_unfinished_messages_of_all_connections_are_bounded_together(tmp_path: Path) -> None:
    site = ZmqSite(tmp_path, Echo(), unfinished_bytes=1 << 20)
    try:
        with contextlib.ExitStack() as stack:
            good = site.client()
            for number in range(64):
                bare = stack.enter_context(socket.socket(socket.AF_UNIX))
                bare.connect(site.address.removeprefix("ipc://"))
                bare.sendall(HELLO + READY + frame_head(MORE, 100_000) + bytes(100_000))
                good.send_multipart([b"x", b"%d" % number])
                assert site.replies(good, 1) == [[b"x", b"%d" % number]]
            assert len(site.endpoint.connections) <= 12
            assert site.metrics.counters()["connections_closed_unfinished"] >= 52
    finally:
        site.close()


def test_a_connection_that_says_nothing_is_closed_in_time(site: ZmqSite) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as dripping:
        for each in (silent, dripping):
            each.connect(site.address.removeprefix("ipc://"))
        site.turn_until(lambda: len(site.endpoint.connections) == 2)
        began_s = site.loop.now_s
        dripping.sendall(HELLO[:5])
        site.loop.turn(1.0)
        site.endpoint.sweep(began_s + 1.9)
        assert len(site.endpoint.connections) == 2
        site.endpoint.sweep(began_s + 2.1)
        assert not site.endpoint.connections


def test_a_peer_whose_time_to_live_is_over_is_closed(site: ZmqSite) -> None:
    with socket.socket(socket.AF_UNIX) as bare:
        bare.connect(site.address.removeprefix("ipc://"))
        bare.sendall(HELLO + READY + command(b"PING", b"\x00\x14"))  # 2 s
        site.turn_until(lambda: any(each.ttl_s for each in site.endpoint.connections.values()))
        site.endpoint.sweep(site.loop.now_s + 1.9)
        assert site.endpoint.connections
        site.endpoint.sweep(site.loop.now_s + 2.1)
        assert not site.endpoint.connections


def test_more_connections_than_there_may_be_close_the_silent_ones(site: ZmqSite) -> None:
    site.bound.max_connections = 3
    good = site.client()
    good.send(b"x")
    assert site.replies(good, 1) == [[b"x"]]
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(site.address.removeprefix("ipc://"))
        for _ in range(10):  # each accepts ROUND_ACCEPTS
            site.loop.turn(0.0)
        assert len(site.endpoint.connections) == 3
        good.send(b"y")
        assert site.replies(good, 1) == [[b"y"]]
