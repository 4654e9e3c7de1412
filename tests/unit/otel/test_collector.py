"""The settings of a collector, and what its answers mean."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from edge_runtime.config.settings import TracingSettings
from edge_runtime.errors import ConfigError
from edge_runtime.otel.collector import Collector
from tests.fakes.otlp_receiver import OtlpReceiver


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("collector.example:4318", "wanted a collector's address"),
        ("ftp://collector.example", "wanted a collector's address"),
        ("https://me:secret@collector.example", "headers_file"),
        ("http://collector.example:4318", "allow_http"),
        ("http://127.0.0.1:70000", "endpoint"),
    ],
)
def test_collector_whose_address_cannot_be_is_refused(endpoint, told):
    with pytest.raises(ConfigError, match=told):
        Collector(TracingSettings(endpoint=endpoint))


def test_collector_beyond_this_machine_may_be_http_where_that_is_allowed():
    Collector(TracingSettings(endpoint="http://collector.example:4318", allow_http=True)).close()


def test_collector_whose_headers_cannot_be_read_is_refused(tmp_path):
    settings = TracingSettings(endpoint="http://127.0.0.1:1", headers_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="headers_file"):
        Collector(settings)
    (tmp_path / "none").write_text("Authorization\n")
    with pytest.raises(ConfigError, match=r"none:1: wanted `Name: value`"):
        Collector(settings)


@pytest.mark.parametrize(
    ("status", "is_taken", "may_repeat"),
    [(200, True, False), (429, False, True), (503, False, True), (400, False, False), (401, False, False)],
)
def test_answer_of_a_collector_says_whether_a_body_may_be_sent_again(status, is_taken, may_repeat):
    with OtlpReceiver() as receiver:
        receiver.answer(status)
        collector = Collector(TracingSettings(endpoint=receiver.url))
        answer = collector.send("traces", b"\x1f")
        collector.close()
        receiver.faults.clear()  # of a body that is none
    assert (answer.is_taken, answer.may_repeat) == (is_taken, may_repeat)


@pytest.mark.parametrize(
    ("retry_after", "after_s"),
    [("7", 7.0), ("99999", 3600.0), ("9" * 400, 0.0), ("²", 0.0), ("-1", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)],
)
def test_collector_cannot_ask_for_silence_without_end(retry_after, after_s):
    with OtlpReceiver() as receiver:
        receiver.answer(429, retry_after=retry_after)
        collector = Collector(TracingSettings(endpoint=receiver.url))
        answer = collector.send("traces", b"")
        collector.close()
    assert (answer.may_repeat, answer.after_s) == (True, after_s)


def test_collector_that_does_not_listen_may_be_tried_again():
    with OtlpReceiver() as receiver:
        url = receiver.url
    collector = Collector(TracingSettings(endpoint=url))
    answer = collector.send("traces", b"")
    assert (answer.is_taken, answer.may_repeat, answer.is_away) == (False, True, True)
    assert "refused" in answer.reason.lower()


@contextmanager
def answering(pieces: Iterable[bytes], between_s: float = 0.0) -> Iterator[tuple[str, list[int]]]:
    """A collector that answers each body in these pieces, and its bodies' connections: one number each."""
    is_over, connections = threading.Event(), list[int]()

    def serve() -> None:
        while not is_over.is_set():
            try:
                peer, address = server.accept()
            except OSError:
                return
            with peer:
                while peer.recv(1 << 16):
                    connections.append(address[1])
                    for piece in pieces:
                        peer.sendall(piece)
                        if between_s and is_over.wait(between_s):
                            return
                    if b"close" in b"".join(pieces):
                        break

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, name="slow-collector")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        finally:
            is_over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_collector_whose_answer_comes_byte_by_byte_is_taken_for_a_dead_one():
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with answering([whole[at : at + 1] for at in range(len(whole))], between_s=0.05) as (url, connections):
        collector = Collector(TracingSettings(endpoint=url))
        answer = collector.send("traces", b"", wait_s=0.3)
        collector.close()
    assert (answer.is_taken, answer.may_repeat, answer.is_away) == (False, True, False)
    assert "TimeoutError" in answer.reason
    assert len(connections) == 1


@pytest.mark.parametrize(("more", "count"), [(b"", 1), (b"Connection: close\r\n", 3)])
def test_collector_is_sent_its_bodies_by_one_connection_as_long_as_it_keeps_that(more, count):
    with answering([b"HTTP/1.1 200 OK\r\n" + more + b"Content-Length: 2\r\n\r\n{}"]) as (url, connections):
        collector = Collector(TracingSettings(endpoint=url))
        assert [collector.send("traces", b"").is_taken for _ in range(3)] == [True] * 3
        collector.close()
    assert len(set(connections)) == count
