"""Each fault of the fault proxy, against a plain echo server: what passes, what does not, and what each side sees."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import pytest

from tests.fakes.fault_proxy import UNACCEPTABLE_PROTOCOL_VERSION, FaultProxy, protocol_level

SILENCE_S = 0.05
"""How long a side is watched that must see nothing: what passes takes less than 1 ms."""

ANSWER_S = 60.0
"""How long anything that must happen may take: far above anything but a hang."""

CONNECT_5 = b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00"
CONNECT_4 = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"


class EchoServer:
    """Sends back what comes, one thread a connection. `ends`: how each ended, as the server saw it."""

    def __init__(self) -> None:
        self.ends: queue.Queue[str] = queue.Queue()
        self.got: queue.Queue[bytes] = queue.Queue()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="echo-accept")]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for each in self.connections:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self._echo, args=(connection,), name="echo")
            self._threads.append(thread)
            thread.start()

    def _echo(self, connection):
        with connection:
            try:
                while data := connection.recv(65536):
                    self.got.put(data)
                    connection.sendall(data)
                self.ends.put("closed")
            except OSError:
                self.ends.put("reset")


@pytest.fixture
def server():
    with EchoServer() as server:
        yield server


@pytest.fixture
def proxy(server):
    with FaultProxy(server.port) as proxy:
        yield proxy


def connect(proxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=ANSWER_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def durations_s(step, times=5) -> list[float]:
    """How long a step takes, each time. What holds of the shortest alone is not for a busy machine to spoil."""
    found = []
    for _ in range(times):
        start_s = time.monotonic()
        step()
        found.append(time.monotonic() - start_s)
    return found


def receive(client, count) -> bytes:
    data = b""
    while len(data) < count:
        part = client.recv(count - len(data))
        assert part, f"closed after {data!r}"
        data += part
    return data


def echo(client, data=b"hello") -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def is_silent(client) -> bool:
    client.settimeout(SILENCE_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(ANSWER_S)
    return False


def is_reset(client) -> bool:
    try:
        data = client.recv(1)
    except ConnectionResetError:
        return True
    assert data == b"", f"got {data!r}"
    return False  # an orderly end


def is_refused(proxy) -> bool:
    """Whether a new connection is reset; the reset may come before connecting has returned."""
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=ANSWER_S) as client:
            return is_reset(client)
    except ConnectionResetError:
        return True


def test_bytes_pass_both_ways_and_are_counted(proxy):
    payload = bytes(range(256)) * 8192  # 2 MiB, more than the kernel's buffers
    with connect(proxy) as client:
        sending = threading.Thread(target=client.sendall, args=(payload,))
        sending.start()
        assert receive(client, len(payload)) == payload
        sending.join()
    assert (proxy.connections, proxy.bytes_up, proxy.bytes_down) == (1, len(payload), len(payload))


def test_the_end_of_a_stream_passes_after_its_bytes(proxy, server):
    with connect(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 10) == b"last words"
        assert client.recv(1) == b""
    assert server.ends.get(timeout=ANSWER_S) == "closed"


def test_cut_resets_both_sides_and_serves_the_next(proxy, server):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        proxy.cut()
        assert is_reset(client)
    assert server.ends.get(timeout=ANSWER_S) == "reset"
    with connect(proxy) as client:
        assert echo(client) == b"hello"


def test_refuse_resets_new_connections_only_until_accept(proxy):
    with connect(proxy) as old:
        assert echo(old) == b"hello"
        proxy.refuse()
        for _ in range(3):
            assert is_refused(proxy)
        assert echo(old) == b"hello"
        proxy.accept()
        with connect(proxy) as client:
            assert echo(client) == b"hello"
    assert proxy.connections == 5


def test_a_black_hole_swallows_bytes_and_the_close_of_either_side(proxy, server):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        server.got.get(timeout=ANSWER_S)
        proxy.black_hole()
        client.sendall(b"into nothing")
        assert is_silent(client)
    with pytest.raises(queue.Empty):
        server.ends.get(timeout=SILENCE_S)
    assert server.got.empty()
    proxy.heal()
    assert server.ends.get(timeout=ANSWER_S) == "reset"


def test_a_connection_that_lost_nothing_in_a_black_hole_outlives_it(proxy):
    with connect(proxy) as lucky, connect(proxy) as unlucky:
        assert echo(lucky) == echo(unlucky) == b"hello"
        proxy.black_hole()
        unlucky.sendall(b"x")
        assert is_silent(unlucky)
        with connect(proxy) as late:
            assert is_silent(late)
            proxy.heal()
            assert is_reset(late)
        assert is_reset(unlucky)
        assert echo(lucky) == b"hello"


def test_a_black_hole_upwards_lets_the_server_speak(proxy, server):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        server.got.get(timeout=ANSWER_S)
        proxy.black_hole("up")
        server.connections[0].sendall(b"are you there?")
        assert receive(client, 14) == b"are you there?"
        client.sendall(b"yes")
        assert is_silent(client)
        assert server.got.empty()


def test_a_black_hole_downwards_lets_the_client_speak(proxy, server):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        server.got.get(timeout=ANSWER_S)
        proxy.black_hole("down")
        client.sendall(b"hear me")
        assert server.got.get(timeout=ANSWER_S) == b"hear me"
        assert is_silent(client)


def test_delay_holds_each_way_and_keeps_the_order(proxy):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        proxy.delay(0.15)

        def digits() -> None:
            for digit in b"0123456789":
                client.sendall(bytes([digit]))
            assert receive(client, 10) == b"0123456789"

        assert 0.3 <= min(durations_s(digits)) < 1
        proxy.heal()
        assert min(durations_s(lambda: echo(client))) < 0.3


def test_limit_slows_all_connections_together(proxy):
    proxy.limit(100_000)
    payload = bytes(10_000)
    with connect(proxy) as one, connect(proxy) as other:

        def both() -> None:
            one.sendall(payload)
            other.sendall(payload)
            assert receive(one, len(payload)) == receive(other, len(payload)) == payload

        # 20 000 bytes up at 100 000 a second; they come down while they still go up.
        assert 0.19 < min(durations_s(both)) < 1
        proxy.heal()
        assert echo(one, payload) == payload


def test_a_link_slower_than_a_byte_a_slice_still_flows(proxy):
    proxy.limit(50)
    with connect(proxy) as client:
        assert 0.06 < min(durations_s(lambda: echo(client, b"abc"))) < 1


def test_corrupt_flips_one_bit_in_every_nth_byte_over_all_pieces(proxy):
    with connect(proxy) as client:
        assert echo(client) == b"hello"
        proxy.corrupt(4, "up")
        got = echo(client, bytes(3)) + echo(client, bytes(6))
        assert got == bytes([0, 0, 0, 1, 0, 0, 0, 1, 0])
        proxy.heal()
        assert echo(client, bytes(9)) == bytes(9)


def test_hold_accept_takes_connections_and_answers_nothing_for_ever(proxy, server):
    with connect(proxy) as old:
        assert echo(old) == b"hello"
        server.got.get(timeout=ANSWER_S)
        proxy.hold_accept()
        with connect(proxy) as held:
            held.sendall(b"hello?")
            assert is_silent(held)
            assert echo(old) == b"hello"
            proxy.heal()
            assert is_silent(held)
            with connect(proxy) as client:
                assert echo(client) == b"hello"
    assert server.got.get(timeout=ANSWER_S) == b"hello"
    assert proxy.connections == 3


def test_a_server_that_is_away_resets_the_client():
    with EchoServer() as gone:
        port = gone.port
    with FaultProxy(port) as proxy:
        assert is_refused(proxy)


def test_an_old_broker_refuses_mqtt_5_in_its_own_words_and_serves_mqtt_3(server):
    with FaultProxy(server.port, refuse_mqtt5=True) as proxy:
        with connect(proxy) as client:
            client.sendall(CONNECT_5 + b"and more")
            assert receive(client, 4) == UNACCEPTABLE_PROTOCOL_VERSION
            assert client.recv(1) == b""
        with connect(proxy) as client:
            for byte in CONNECT_4[:-1]:
                client.sendall(bytes([byte]))
            assert receive(client, len(CONNECT_4) - 1) == CONNECT_4[:-1]
            assert echo(client) == b"hello"
        with connect(proxy) as client:
            assert echo(client, b"no MQTT at all") == b"no MQTT at all"
    assert server.ends.get(timeout=ANSWER_S) == server.ends.get(timeout=ANSWER_S) == "closed"


def test_a_receiver_that_does_not_read_stops_the_sender(proxy):
    with connect(proxy) as client:
        client.settimeout(0.2)
        sent_bytes = 0
        with contextlib.suppress(TimeoutError):
            while sent_bytes < 256 << 20:
                sent_bytes += client.send(bytes(1 << 16))
        assert sent_bytes < 64 << 20  # the proxy's bound each way, and the kernel's buffers


def test_it_closes_with_connections_open_and_bytes_under_way(server):
    with FaultProxy(server.port) as proxy:
        client = connect(proxy)
        proxy.delay(60)
        client.sendall(b"never to come")
    with client:
        assert is_reset(client)
    assert server.got.empty()


@pytest.mark.parametrize(
    ("first", "level"),
    [
        (b"", None),
        (b"\x10", None),
        (CONNECT_5[:8], None),
        (CONNECT_5[:9], 5),
        (CONNECT_4, 4),
        (b"\x10\x80\x80\x80\x01\x00\x04MQTT\x05", 5),
        (b"\x10\x0e\x00\x06MQIsdp\x03", 3),
        (b"\x10\xff\xff\xff\xff", 0),
        (b"\x10\x0d\xff\xff", 0),
        (b"\x16\x03\x01", 0),
    ],
)
def test_the_protocol_level_is_read_from_as_few_bytes_as_hold_it(first, level):
    assert protocol_level(first) == level
