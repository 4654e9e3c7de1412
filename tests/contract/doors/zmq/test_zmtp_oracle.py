"""What a client hears of our ZeroMQ endpoint, byte by byte, is what it hears of a ROUTER of libzmq."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from edge_runtime.doors.zmq.zmtp import COMMAND, LONG, MORE, command, cut_frame, frame_head, properties
from tests.fakes.zmq_site import ANSWER_S, ZmqSite

MAX_FRAME_BYTES = 1 << 20
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
NULL = b"NULL".ljust(20, b"\0")


def greeting(minor: int = 1, mechanism: bytes = NULL) -> bytes:
    return SIGNATURE + bytes((3, minor)) + mechanism + bytes(32)


def ready(kind: bytes = b"DEALER", **more: bytes) -> bytes:
    return command(
        b"READY", properties({b"Socket-Type": kind, **{name.encode(): value for name, value in more.items()}})
    )


def frames(*parts: bytes) -> bytes:
    last = len(parts) - 1
    return b"".join(frame_head(MORE if index < last else 0, len(part)) + part for index, part in enumerate(parts))


END = frames(b"end")
HELLO = greeting() + ready()

# Not SUBSCRIBE, which libzmq hands to a ROUTER as a message of its bytes.
CONVERSATIONS = {
    "one frame": HELLO + frames(b"x"),
    "version 3.0": greeting(0) + ready() + frames(b"x"),
    "a later version": SIGNATURE + b"\x04\x00" + NULL + bytes(32) + ready() + frames(b"x"),
    "version 2.0": SIGNATURE + b"\x01\x05" + b"\0\0" + frames(b"x", b"y"),
    "version 2.0, a name": SIGNATURE + b"\x01\x05" + b"\0\x03own" + frames(b"x", b"y"),
    "version 2.0 of a REQ": SIGNATURE + b"\x01\x03" + b"\0\0" + frames(b"", b"x"),
    "a REQ": greeting() + ready(b"REQ", Identity=b"") + frames(b"", b"x"),
    "a ROUTER": greeting() + ready(b"ROUTER", Identity=b"") + frames(b"x", b"y"),
    "a name": greeting() + ready(Identity=b"own name") + frames(b"x"),
    "other properties": greeting() + ready(Identity=b"", Resource=b"r", **{"X-Own": b"\0" * 300}) + frames(b"x"),
    "names in any case": greeting() + command(b"READY", properties({b"socket-type": b"DEALER"})) + frames(b"x"),
    "empty frames": HELLO + frames(b"") + frames(b"", b"") + frames(b"", b"", b"x", b""),
    "many frames": HELLO + frames(*(b"%d" % each for each in range(300))),
    "every length": HELLO + b"".join(frames(bytes(each)) for each in (0, 1, 254, 255, 256, 257, 16383, 16384, 16385)),
    "large frames": HELLO + frames(b"a", bytes(300_000), b"b") + frames(bytes(range(256)) * 4096),
    "a short frame in the long form": HELLO + bytes((LONG,)) + (5).to_bytes(8, "big") + b"short",
    "a ping": HELLO + command(b"PING", b"\0\0") + frames(b"x"),
    "a ping with a context": HELLO + command(b"PING", b"\0\0" + b"context of 16 b.") + frames(b"x"),
    "a pong": HELLO + command(b"PONG", b"") + frames(b"x"),
    "a ping between two frames": HELLO + b"\x01\x01a" + command(b"PING", b"\0\0c") + b"\x00\x01b",
    "an unknown command": HELLO + command(b"NOSUCH", b"anything") + frames(b"x"),
    "much at once": HELLO + b"".join(frames(b"h" * 60, b"%d" % each, bytes(64)) for each in range(500)),
    "alternating headers": HELLO + b"".join(frames(b"h%d" % (each % 3), b"%d" % each, bytes(64)) for each in range(99)),
}

CLOSED = {
    "no greeting": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "another mechanism": greeting(mechanism=b"PLAIN".ljust(20, b"\0")) + command(b"HELLO", b"\x01a\x01b"),
    "a SUB": greeting() + ready(b"SUB"),
    "a nameless socket": greeting() + command(b"READY", b""),
    "a message in place of READY": greeting() + frames(b"x"),
    "another command in place of READY": greeting() + command(b"NOSUCH", b""),
    "properties that end in the middle": greeting() + command(b"READY", properties({b"Socket-Type": b"DEALER"})[:-2]),
    "a frame over the limit": HELLO + bytes((LONG,)) + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
    "a frame of 2^63 bytes": HELLO + bytes((LONG,)) + (1 << 63).to_bytes(8, "big"),
}
"""Each ends its connection, whatever comes behind it."""


class Echo:
    """Sends each message back to its sender."""

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Any, peer: Any, parts: list[Any]) -> None:
        endpoint.send(peer.envelope, [bytes(each) for each in parts])

    def gone(self, sender: Any) -> None:
        """Nothing waits."""

    def unheard(self, sender: Any) -> None:
        raise AssertionError("a reply was dropped")

    def owes(self, sender: Any) -> bool:
        return False


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site = ZmqSite(
        tmp_path_factory.mktemp("ours"),
        Echo(),
        max_frame_bytes=MAX_FRAME_BYTES,
        message_frames=1000,
        message_bytes=2 * MAX_FRAME_BYTES,
    )
    thread = threading.Thread(target=site.loop.run, args=(site.loop.sweep, 0.05))
    thread.start()
    yield site.address.removeprefix("ipc://")
    site.loop.stop()
    thread.join()
    site.close()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("theirs") / "s")
    context: zmq.Context[Any] = zmq.Context()
    router, told = context.socket(zmq.ROUTER), context.socket(zmq.PAIR)
    router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    router.set(zmq.LINGER, 0)
    router.bind(f"ipc://{path}")
    told.bind("inproc://stop")

    def echo() -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(told, zmq.POLLIN)
        while True:
            ready_ = dict(poller.poll())
            if told in ready_:
                return
            router.send_multipart(router.recv_multipart())

    thread = threading.Thread(target=echo)
    thread.start()
    yield path
    with context.socket(zmq.PAIR) as stop:
        stop.connect("inproc://stop")
        stop.send(b"")
        thread.join()
    told.close()
    router.close()
    context.term()


def converse(
    path: str, pieces: Sequence[bytes], *, ends: bool, in_step: bool = False
) -> tuple[bytes, list[tuple[int, bytes]], bool]:
    """Say something in pieces; return the greeting, all frames that came, and whether the connection was ended.

    ends: it should be; else the last message is END, whose echo is the last thing that is read. in_step: wait for the
    server's greeting and READY, as libzmq's clients do; it closes some connections that do not.
    """
    data = b""
    with socket.socket(socket.AF_UNIX) as bare:
        bare.settimeout(ANSWER_S)
        bare.connect(path)
        was_ended = False
        if in_step:
            (said,) = pieces
            bare.sendall(said[:64])
            data += bare.recv(64, socket.MSG_WAITALL)
            _, _, end = cut_frame(said, 64) or (0, 0, 64)
            bare.sendall(said[64:end])
            data += bare.recv(2, socket.MSG_WAITALL)
            data += bare.recv(data[-1], socket.MSG_WAITALL)
            pieces = [said[end:]]

        def has_come() -> bool:
            return not ends and data.endswith(END)

        def say() -> None:
            with contextlib.suppress(OSError):  # it was ended meanwhile
                for piece in pieces:
                    bare.sendall(piece)

        speaker = threading.Thread(target=say)
        speaker.start()
        while not has_come():
            try:
                got = bare.recv(1 << 16)
            except ConnectionResetError:
                got = b""
            if not got:
                was_ended = True
                break
            data += got
        speaker.join()
    head = 64 if len(data) > 11 and data[10] == 3 and b"NULL" in data[:64] else min(len(data), 12)
    rest, found = data[head:], []
    while rest and (cut := cut_frame(rest, 0)) is not None and cut[2] <= len(rest):
        flags, begin, end = cut
        found.append((flags & (MORE | COMMAND), rest[begin:end]))
        rest = rest[end:]
    return data[:head], found, was_ended


def sorted_properties(found: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same, with READY's properties as a set: their order is free."""
    return [(flags, bytes(sorted(body)) if body.startswith(b"\x05READY") else body) for flags, body in found]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_goes_as_with_libzmq(ours: str, theirs: str, name: str) -> None:
    said = CONVERSATIONS[name] + END
    in_step = said[10] > 2
    here, there = (converse(path, [said], ends=False, in_step=in_step) for path in (ours, theirs))
    assert sorted_properties(here[1]) == sorted_properties(there[1])
    assert not here[2]
    assert not there[2]


@pytest.mark.parametrize("name", CLOSED)
def test_each_breach_of_the_protocol_ends_its_connection_as_with_libzmq(ours: str, theirs: str, name: str) -> None:
    said = [CLOSED[name] + bytes(64)]
    here, there = (converse(path, said, ends=True) for path in (ours, theirs))
    assert here[2]
    assert there[2]
    assert [each for each in here[1] if not each[0] & COMMAND] == [each for each in there[1] if not each[0] & COMMAND]


@pytest.mark.parametrize("name", ["a REQ", "version 2.0, a name", "a ping between two frames", "empty frames"])
def test_bytes_may_be_cut_at_every_place(ours: str, name: str) -> None:
    said = CONVERSATIONS[name] + END
    whole = converse(ours, [said], ends=False)
    for at in range(1, len(said)):
        assert converse(ours, [said[:at], said[at:]], ends=False) == whole, at


@pytest.mark.parametrize("name", ["many frames", "every length", "alternating headers", "much at once"])
def test_bytes_may_come_in_any_pieces(ours: str, name: str) -> None:
    said = CONVERSATIONS[name] + END
    whole = converse(ours, [said], ends=False)
    chance = random.Random(name)
    for _ in range(5):
        cuts = sorted(chance.sample(range(1, len(said)), 40))
        pieces = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        assert converse(ours, pieces, ends=False) == whole


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER], ids=["DEALER", "REQ", "ROUTER"])
def test_each_kind_of_socket_of_libzmq_is_answered(ours: str, kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as client:
        client.set(zmq.LINGER, 0)
        client.set(zmq.RCVTIMEO, int(ANSWER_S * 1e3))
        client.set(zmq.HEARTBEAT_IVL, 20)
        client.set(zmq.HEARTBEAT_TTL, 2_000)
        name = [b"door"] if kind == zmq.ROUTER else []
        if name:
            client.set(zmq.CONNECT_ROUTING_ID, name[0])
        client.connect(f"ipc://{ours}")
        for size in (0, 1, 300, 70_000, MAX_FRAME_BYTES):
            client.send_multipart([*name, b"x", bytes(size)])
            assert client.recv_multipart() == [*name, b"x", bytes(size)]


def test_replies_of_a_client_with_a_name_find_it_when_it_has_come_again(tmp_path: Path) -> None:
    class Late(Echo):
        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def message(self, endpoint: Any, peer: Any, parts: list[Any]) -> None:
            self.waiting.append((peer.envelope, parts))

        def gone(self, sender: Any) -> None:
            raise AssertionError("a client with a name may come again")

    late = Late()
    site = ZmqSite(tmp_path, late)
    try:
        for message_ in (b"first", b"again"):
            client = site.client(b"own")
            client.send(message_)
            site.turn_until(lambda message_=message_: late.waiting and late.waiting[-1][1] == [message_])
            if message_ == b"first":
                client.close(linger=0)
                site.turn_until(lambda: not site.endpoint.connections)
        for envelope, parts in late.waiting:
            site.endpoint.send(envelope, parts)
        assert site.replies(client, 2) == [[b"first"], [b"again"]]
    finally:
        site.close()
