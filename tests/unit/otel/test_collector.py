"""The settings of a collector, and what its answers mean."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_runtime.addresses import read_proxy
from edge_runtime.config.settings import TracingSettings
from edge_runtime.enrolment.certificates import Issuer, key_pem, new_authority, new_key, pem
from edge_runtime.errors import ConfigError
from edge_runtime.otel.collector import Collector
from tests.fakes.otlp_receiver import OtlpReceiver
from tests.fakes.proxy import Proxy


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


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """The folder of `ca.crt` and of a certificate for collector.test."""
    now, key, server_key = datetime.now(timezone.utc), new_key(), new_key()
    authority = new_authority(key, now)
    (tmp_path / "ca.crt").write_bytes(pem(authority))
    certificate = Issuer(authority, key).for_server(["collector.test"], server_key, now, timedelta(days=1))
    (tmp_path / "server.pem").write_bytes(pem(certificate) + key_pem(server_key))
    return tmp_path


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_collector_is_reached_by_the_devices_proxy(scheme: str, certificates: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem")
    with OtlpReceiver(tls=tls if scheme == "https" else None) as receiver:
        proxy = Proxy(("127.0.0.1", int(receiver.url.rpartition(":")[2])))
        settings = TracingSettings(
            endpoint=f"{scheme}://collector.test", allow_http=True, ca_file=str(certificates / "ca.crt")
        )
        collector = Collector(settings, read_proxy(proxy.url))
        try:
            answer = collector.send("traces", gzip.compress(b"{}"))
        finally:
            collector.close()
            proxy.close()
    assert answer.is_taken, answer.reason
    (head,) = proxy.heads
    sent = b"CONNECT collector.test:4318" if scheme == "https" else b"POST http://collector.test/v1/traces"
    assert head.startswith(sent + b" HTTP/1.")


def test_collector_that_no_proxy_names_is_not_asked_of_the_proxy() -> None:
    with OtlpReceiver() as receiver:
        url = receiver.url.replace("127.0.0.1", "127.1")  # no address by its form, so not known as this machine's
        settings = TracingSettings(endpoint=url, allow_http=True)
        collector = Collector(settings, read_proxy("http://127.0.0.1:9", ["127.1"]))
        assert collector.send("traces", gzip.compress(b"{}")).is_taken
        collector.close()


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
