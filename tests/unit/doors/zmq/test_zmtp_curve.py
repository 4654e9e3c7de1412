"""Endpoints with keys: libzmq's clients that are on the list are answered, and nobody else hears a word."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from edge_runtime.config.settings import Curve
from edge_runtime.doors.zmq.zmtp import command, message
from tests.fakes.zmq_site import ZmqSite

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Echo:
    """Sends each message back, and keeps them."""

    def __init__(self) -> None:
        self.came: list[list[bytes]] = []

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Any, peer: Any, frames: list[Any]) -> None:
        self.came.append([bytes(each) for each in frames])
        endpoint.send(peer.envelope, self.came[-1])

    def refuse(self, endpoint: Any, peer: Any, frames: list[Any], error: Any) -> None:
        endpoint.send(peer.envelope, [error.code.encode()])

    def owes(self, sender: Any) -> bool:
        return False

    def gone(self, sender: Any) -> None:
        """Nothing waits."""

    unheard = gone


class Keyed:
    """A site with keys, and those of one client that is on its list and one that is not."""

    def __init__(self, folder: Path) -> None:
        server, listed, other = (zmq.curve_keypair() for _ in range(3))
        (folder / "secret").write_bytes(server[1])
        (folder / "secret").chmod(0o600)
        (folder / "clients").write_bytes(listed[0])
        self.echo = Echo()
        self.site = ZmqSite(folder, self.echo, curve=Curve(str(folder / "secret"), str(folder / "clients")))
        self.listed, self.other = (server[0], *listed), (server[0], *other)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    keyed = Keyed(tmp_path)
    yield keyed
    keyed.site.close()


def bare(keyed: Keyed) -> socket.socket:
    host, _, port = keyed.site.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, (1 << 20) - 100])
def test_messages_of_any_size_go_and_come_in_boxes(keyed: Keyed, size: int) -> None:
    client = keyed.site.client(keys=keyed.listed)
    for frames in ([bytes(size)], [b"header", b"", bytes(size)], [b"a", bytes(size), b"b"]):
        client.send_multipart(frames)
        assert keyed.site.replies(client, 1) == [frames]


def test_many_messages_in_one_burst_are_answered_in_their_order(keyed: Keyed) -> None:
    client = keyed.site.client(keys=keyed.listed)
    for number in range(300):
        client.send_multipart([b"header", b"%d" % number, bytes(64)])
    assert [reply[1] for reply in keyed.site.replies(client, 300)] == [b"%d" % number for number in range(300)]


def test_a_message_over_its_bound_is_refused_and_the_next_is_answered(keyed: Keyed) -> None:
    client = keyed.site.client(keys=keyed.listed)
    client.send_multipart([b"header", b"1", *([b"."] * 80)])
    client.send_multipart([b"header", b"2", b"."])
    assert keyed.site.replies(client, 2) == [[b"decode_failed"], [b"header", b"2", b"."]]


def test_a_client_whose_key_is_not_listed_is_counted_and_hears_nothing(keyed: Keyed) -> None:
    stranger, client = keyed.site.client(keys=keyed.other), keyed.site.client(keys=keyed.listed)
    stranger.send(b"let me in")
    keyed.site.turn_until(lambda: keyed.site.metrics.counters().get("curve_denied"))
    client.send(b"good")
    assert keyed.site.replies(client, 1) == [[b"good"]]
    assert keyed.echo.came == [[b"good"]]
    assert not stranger.poll(0)


def test_heartbeats_are_answered_in_boxes(keyed: Keyed) -> None:
    client = keyed.site.client(keys=keyed.listed)
    client.set(zmq.HEARTBEAT_IVL, 10)
    client.set(zmq.HEARTBEAT_TIMEOUT, 2_000)
    client.disconnect(keyed.site.address)
    client.connect(keyed.site.address)
    for number in range(10):
        client.send(b"%d" % number)
        assert keyed.site.replies(client, 1) == [[b"%d" % number]]
    assert len(keyed.site.endpoint.connections) == 1


def test_a_client_without_security_is_not_heard(keyed: Keyed) -> None:
    client = keyed.site.client()
    client.send(b"hello")
    good = keyed.site.client(keys=keyed.listed)
    good.send(b"good")
    assert keyed.site.replies(good, 1) == [[b"good"]]
    assert keyed.echo.came == [[b"good"]]


def test_a_message_that_is_not_a_handshake_ends_its_connection_and_no_other(keyed: Keyed) -> None:
    chance = random.Random(26)
    good = keyed.site.client(keys=keyed.listed)
    hello = command(b"HELLO", b"\x01\x00" + bytes(72) + chance.randbytes(32) + bytes(7) + b"\x01" + bytes(80))
    said = [
        hello,
        hello[:60],
        command(b"HELLO", b""),
        command(b"INITIATE", bytes(500)),
        command(b"READY", b""),
        command(b"ERROR", b"\x01x"),
        b"".join(message([b"a message"])),
        *(bytes(chance.choices(range(256), k=300)) for _ in range(40)),
    ]
    for number, each in enumerate(said):
        with bare(keyed) as bad:
            with contextlib.suppress(OSError):
                bad.sendall(GREETING + each)
            good.send(b"%d" % number)
            assert keyed.site.replies(good, 1) == [[b"%d" % number]]
    keyed.site.turn_until(lambda: len(keyed.site.endpoint.connections) == 1)
    assert "io_errors" not in keyed.site.metrics.counters()


class Wire:
    """A wire between a client and the endpoint, which may send a box again. Thread: the test's."""

    def __init__(self, keyed: Keyed) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._keyed = keyed

    def carry(self, until: Any) -> bytes:
        """Carry bytes both ways until something is so; return the client's last piece."""
        self.there = bare(self._keyed)
        self.here, _ = self.listener.accept()
        last = b""
        for each in (self.here, self.there):
            each.setblocking(False)
        while not until():
            for source, sink in ((self.here, self.there), (self.there, self.here)):
                with contextlib.suppress(BlockingIOError):
                    data = source.recv(1 << 16)
                    sink.sendall(data)
                    last = data if source is self.here else last
            self._keyed.site.loop.turn(0.001)
        return last

    def close(self) -> None:
        for each in (self.here, self.there, self.listener):
            each.close()


def test_a_box_that_comes_twice_ends_its_connection_and_is_not_run_twice(keyed: Keyed) -> None:
    wire = Wire(keyed)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client, contextlib.closing(wire):
        client.set(zmq.LINGER, 0)
        client.set(zmq.RECONNECT_IVL, -1)
        options = (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY)
        for option, key in zip(options, keyed.listed, strict=True):
            client.set(option, key)
        client.connect(f"tcp://127.0.0.1:{wire.port}")
        client.send(b"once")
        last = wire.carry(lambda: keyed.echo.came)
        wire.there.sendall(last)
        keyed.site.turn_until(lambda: not keyed.site.endpoint.connections)
    assert keyed.echo.came == [[b"once"]]
