"""Bytes within bounds: every wait ends at the deadline, slowness is noticed, a cap holds, redirects go nowhere else."""

from __future__ import annotations

import itertools
import math
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge_runtime.errors import ConfigError, DownloadError, NotPublished
from edge_runtime.updates import http_fetch
from edge_runtime.updates.fetch import FetchedBody, FetchLimits, FolderFetcher, Pace, fetch_bytes
from edge_runtime.updates.http_fetch import MAX_REDIRECTS, HttpFetcher
from edge_runtime.updates.tuf_client import METADATA_LIMITS
from tests.fakes.clock import FakeClock
from tests.fakes.http_server import Answer, HttpServer, Request

FILES = {"file": b"content", "a/b.json": b"{}"}
LIMITS = FetchLimits(total_s=100.0)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer(FILES.get) as it:
        yield it


def fetch(
    server: HttpServer, path: str = "file", *, clock: FakeClock | None = None, limits: FetchLimits = LIMITS
) -> bytes:
    clock = clock or FakeClock()
    return fetch_bytes(HttpFetcher(server.url, clock=clock), path, max_bytes=1 << 20, pace=Pace(limits, clock))


# ---- slow and endless, by a clock that the server itself moves ------------------------------------------------------


def dripping(clock: FakeClock, each_s: float, piece: bytes = b"x", times: int = 10_000) -> Iterator[bytes]:
    """Pieces with time between them."""
    for _ in range(times):
        clock.advance(each_s)
        yield piece


def test_a_byte_each_29_s_ends_at_the_deadline(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HEAD_S", math.inf)  # the server moves the clock before its headers are read
    clock = FakeClock()
    began_s = clock.monotonic_s()
    server.answer = lambda _request: Answer(200, dripping(clock, 29.0, times=100))
    with pytest.raises(DownloadError):
        fetch(server, clock=clock, limits=FetchLimits(total_s=300.0, min_bytes_per_s=0.0))
    assert clock.monotonic_s() - began_s >= 300.0


def test_a_byte_each_29_s_is_too_slow_long_before_a_long_deadline(server: HttpServer) -> None:
    clock = FakeClock()
    pace = Pace(FetchLimits(total_s=86_400.0), clock)
    clock.advance(29.0)
    pace.count(1)
    clock.advance(29.0)
    with pytest.raises(DownloadError, match="2 bytes came in 58 s, wanted 1024 a second"):
        pace.count(1)


def test_headers_that_drip_end_at_the_deadline_too() -> None:
    clock = FakeClock()
    with port_that_says(dripping(clock, 29.0, b"X: y\r\n", times=90), b"HTTP/1.1 200 OK\r\n") as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", clock=clock)
        with pytest.raises(DownloadError, match="deadline"):
            fetch_bytes(fetcher, "file", max_bytes=10, pace=Pace(FetchLimits(total_s=60.0), clock))


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n" * 1000),
        (CHUNKED, b"1;" + b"x" * 60_000 + b"\r\nx\r\n"),
    ],
    ids=["interim answers", "trailers", "extensions of chunks"],
)
def test_bytes_that_come_beside_a_file_without_end_are_not_read_either(first: bytes, then: bytes) -> None:
    with port_that_says(itertools.repeat(then), first) as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", clock=FakeClock())  # at which no deadline ever passes
        with pytest.raises(DownloadError, match="much else than the file"):
            fetch_bytes(fetcher, "file", max_bytes=1 << 20, pace=Pace(LIMITS, FakeClock()))


def test_a_file_in_many_small_chunks_is_a_file_all_the_same() -> None:
    content = bytes(range(256)) * 1000
    chunks = [b"10\r\n" + content[at : at + 16] + b"\r\n" for at in range(0, len(content), 16)]
    with port_that_says(iter([*chunks, b"0\r\n\r\n"]), CHUNKED) as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/")
        assert fetch_bytes(fetcher, "file", max_bytes=1 << 20, pace=Pace(LIMITS)) == content


def test_headers_that_drip_end_long_before_a_long_deadline() -> None:
    clock = FakeClock()
    with port_that_says(dripping(clock, 1.0, b"X: y\r\n", times=90), b"HTTP/1.1 200 OK\r\n") as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", clock=clock)
        with pytest.raises(DownloadError, match=r"no headers within 30 s"):
            fetch_bytes(fetcher, "file", max_bytes=10, pace=Pace(FetchLimits(total_s=86_400.0), clock))


def test_metadata_that_comes_byte_by_byte_ends_after_30_s() -> None:
    clock = FakeClock()
    pace = Pace(METADATA_LIMITS, clock)
    for _ in range(29):
        clock.advance(1.0)
        pace.count(1)
    clock.advance(1.0)
    with pytest.raises(DownloadError, match=r"30 bytes came in 30 s, wanted 16 a second"):
        pace.count(1)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"], ids=["headers", "body"])
def test_a_daemon_that_stops_ends_a_transfer_that_waits(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "LOOK_S", 0.01)
    stop, is_over = threading.Event(), threading.Event()

    def says_and_holds() -> Iterator[bytes]:
        yield says
        stop.set()
        assert is_over.wait(60)

    with port_that_says(says_and_holds()) as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", stop=stop)
        try:
            with pytest.raises(DownloadError, match="the daemon stops"):
                fetch_bytes(fetcher, "file", max_bytes=10, pace=Pace(LIMITS))
        finally:
            is_over.set()


def test_nothing_at_all_ends_when_the_patience_with_silence_is_over() -> None:
    with silent_port() as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", stall_s=0.05)
        with pytest.raises(DownloadError, match="nothing came in time"):
            fetch_bytes(fetcher, "file", max_bytes=10, pace=Pace(LIMITS))


def test_nothing_is_asked_for_after_the_deadline(server: HttpServer) -> None:
    clock = FakeClock()
    pace = Pace(LIMITS, clock)
    clock.advance(LIMITS.total_s)
    with pytest.raises(DownloadError, match="deadline"):
        fetch_bytes(HttpFetcher(server.url, clock=clock), "file", max_bytes=10, pace=pace)
    assert server.requests == []


def test_an_endless_file_is_not_read_beyond_its_bound(server: HttpServer) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 65536

    server.answer = lambda _request: Answer(200, endless())
    with pytest.raises(DownloadError, match="more than the 1048576 bytes"):
        fetch(server)
    server.stop()
    assert taken < 1000  # what buffers between the two took; an endless loop would never get here
    server.start()


def test_a_small_transfer_within_a_window_is_never_too_slow() -> None:
    clock = FakeClock()
    pace = Pace(FetchLimits(total_s=100.0), clock)
    clock.advance(29.9)
    pace.count(1)


def test_a_slow_start_does_not_count_against_a_later_window() -> None:
    clock = FakeClock()
    pace = Pace(FetchLimits(total_s=1000.0), clock)
    for _ in range(10):
        clock.advance(30.0)
        pace.count(40_000)


class PassingTime(threading.Event):
    """An event that nobody sets: waiting for it moves a clock on by the whole timeout."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.advance(timeout or 0.0)
        return False


@pytest.mark.parametrize("cap", [100.0, 10_000.0, 1e6, 1e9])
def test_a_cap_holds_within_a_tenth_over_any_second(cap: float) -> None:
    clock = FakeClock()
    pace = Pace(FetchLimits(total_s=1e6, cap_bytes_per_s=cap), clock, PassingTime(clock))
    began_s, sent = clock.monotonic_s(), 0
    while sent < 10 * cap:
        sent += pace.piece_bytes
        pace.count(pace.piece_bytes)
        took_s = clock.monotonic_s() - began_s
        assert sent <= 1.1 * cap * max(took_s, 0.001) + pace.piece_bytes
    assert sent / (clock.monotonic_s() - began_s) == pytest.approx(cap, rel=0.1)


def test_a_cap_below_the_slowest_rate_allowed_is_not_called_slow() -> None:
    clock = FakeClock()
    pace = Pace(FetchLimits(total_s=1e6, min_bytes_per_s=1024, cap_bytes_per_s=100), clock, PassingTime(clock))
    for _ in range(1000):
        pace.count(pace.piece_bytes)


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_with_a_plain_get(server: HttpServer) -> None:
    assert fetch(server, "a/b.json") == b"{}"
    (request,) = server.requests
    assert (request.method, request.path) == ("GET", "a/b.json")
    assert request.headers["User-Agent"].startswith("edge-runtime/")
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Range" not in request.headers


@pytest.mark.parametrize(
    ("status", "why"), [(403, "does not have it, or the server lets nobody read it"), (404, "does not have it$")]
)
def test_a_file_that_is_not_there_is_not_published(server: HttpServer, status: int, why: str) -> None:
    server.answer = lambda _request: Answer(status)
    with pytest.raises(NotPublished, match=f"{status} .*{why}"):
        fetch(server)


@pytest.mark.parametrize("status", [204, 206, 400, 401, 416, 429, 500, 503])
def test_another_answer_is_a_failure_but_says_nothing_of_what_is_published(server: HttpServer, status: int) -> None:
    server.answer = lambda _request: Answer(status)
    with pytest.raises(DownloadError, match=rf"{status}|bytes from 0") as error:
        fetch(server)
    assert not isinstance(error.value, NotPublished)


def test_a_body_that_ends_early_is_a_failure(server: HttpServer) -> None:
    server.answer = lambda _request: Answer(200, b"cont", {"Content-Length": "7"})
    with pytest.raises(DownloadError, match="3 bytes before"):
        fetch(server)


def test_a_body_without_a_length_ends_with_its_connection(server: HttpServer) -> None:
    server.answer = lambda _request: Answer(200, b"content", says_length=False)
    assert fetch(server) == b"content"


def test_a_packed_body_is_refused(server: HttpServer) -> None:
    server.answer = lambda _request: Answer(200, b"content", {"Content-Encoding": "gzip"})
    with pytest.raises(DownloadError, match="packed"):
        fetch(server)


GARBAGE = [
    b"",
    b"\0" * 100,
    b"HTTP/9 banana\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"x" * 70_000,
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_an_answer_that_is_not_http_is_a_failure_and_not_a_crash(garbage: bytes) -> None:
    with port_that_says(iter([garbage])) as port:
        fetcher = HttpFetcher(f"http://127.0.0.1:{port}/", stall_s=5.0)
        try:
            got = fetch_bytes(fetcher, "file", max_bytes=10, pace=Pace(LIMITS))
        except DownloadError:
            got = b""
        assert got == b""


# ---- redirects and addresses ----------------------------------------------------------------------------------------


def test_a_redirect_of_the_same_scheme_is_followed(server: HttpServer) -> None:
    server.answer = _redirect_from("old", lambda: "/file?token=1")
    server.find = lambda path: FILES.get(path.partition("?")[0])
    assert fetch(server, "old") == b"content"
    assert server.paths == ["old", "file?token=1"]


@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/file",
        "ftp://127.0.0.1/file",
        "file:///etc/passwd",
        "http://192.0.2.1/file",
        "http://[half",
        "",
    ],
)
def test_a_redirect_elsewhere_is_refused(server: HttpServer, location: str) -> None:
    server.answer = _redirect_from("file", lambda: location)
    with pytest.raises(DownloadError, match="leads to"):
        fetch(server)
    assert len(server.requests) == 1


def test_a_redirect_to_another_server_is_followed_only_where_it_is_named(server: HttpServer) -> None:
    with HttpServer({"file": b"elsewhere"}.get) as other:
        server.answer = _redirect_from("file", lambda: f"{other.url}file")
        with pytest.raises(DownloadError, match=r"leads to another server, 127\.0\.0\.1:\d+; name it"):
            fetch(server)
        assert other.requests == []
        named = HttpFetcher(server.url, redirect_hosts=[other.url.split("/")[2]])
        assert fetch_bytes(named, "file", max_bytes=1 << 20, pace=Pace(LIMITS)) == b"elsewhere"


def test_redirects_in_a_circle_end(server: HttpServer) -> None:
    server.answer = _redirect_from("file", lambda: f"{server.url}file")
    with pytest.raises(DownloadError, match="redirects"):
        fetch(server)
    assert len(server.requests) <= MAX_REDIRECTS + 2


@pytest.mark.parametrize(
    "address",
    [
        "http://192.0.2.1/",
        "http://example.org/",
        "http://localhost.example.org/",
        "http://127.0.0.1:port/",
        "https://user:word@host/",
        "https://host/?a=b",
        "https://host/#a",
        "https://",
        "ftp://127.0.0.1/",
        "//host/",
        "host",
    ],
)
def test_an_address_that_is_not_safe_to_ask_is_refused_before_any_request(address: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted|Port"):
        HttpFetcher(address)


@pytest.mark.parametrize(
    "address", ["https://example.org/repo", "http://localhost:8080", "http://[::1]/", "http://127.1.2.3/"]
)
def test_https_and_this_host_are_allowed(address: str) -> None:
    HttpFetcher(address)


def test_plain_http_to_others_is_a_setting() -> None:
    HttpFetcher("http://repository.lan/", allow_plain=True)


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", ".", "a/./b"])
def test_a_path_that_leaves_the_repository_is_not_asked_for(server: HttpServer, path: str) -> None:
    with pytest.raises(NotPublished):
        fetch(server, path)
    assert server.requests == []


def test_a_path_cannot_smuggle_a_header_or_a_query(server: HttpServer) -> None:
    with pytest.raises(NotPublished):
        fetch(server, "a?b#c\r\nX-Evil: 1\r\n\r\n")
    assert server.paths == ["a%3Fb%23c%0D%0AX-Evil:%201%0D%0A%0D%0A"]


def test_a_port_where_nobody_listens_is_a_failure() -> None:
    with pytest.raises(DownloadError, match="refused"):
        fetch_bytes(HttpFetcher("http://127.0.0.1:1/"), "file", max_bytes=10, pace=Pace(LIMITS))


# ---- TLS ------------------------------------------------------------------------------------------------------------


def test_a_certificate_of_a_known_authority_is_accepted_and_another_is_not(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
         "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with HttpServer(FILES.get, tls=context) as server:
        trusting = HttpFetcher(server.url, tls=ssl.create_default_context(cafile=str(certificate)))
        assert fetch_bytes(trusting, "file", max_bytes=10, pace=Pace(LIMITS)) == b"content"
        with pytest.raises(DownloadError, match="certificate was not accepted"):
            fetch_bytes(HttpFetcher(server.url.upper()), "file", max_bytes=10, pace=Pace(LIMITS))
        assert server.paths == ["file"]


# ---- ranges ---------------------------------------------------------------------------------------------------------


def read_from(server: HttpServer, start: int) -> tuple[int, bytes]:
    with HttpFetcher(server.url).open("file", start_bytes=start, deadline_s=float("inf")) as body:
        return body.start_bytes, read_all(body)


def read_all(body: FetchedBody) -> bytes:
    got = b""
    while piece := body.read(3):
        got += piece
    return got


def test_a_range_begins_where_it_was_asked_to(server: HttpServer) -> None:
    assert read_from(server, 3) == (3, b"tent")


def test_a_server_without_ranges_gives_the_whole_file(server: HttpServer) -> None:
    server.has_ranges = False
    assert read_from(server, 3) == (0, b"content")


def test_a_range_beyond_the_file_gives_the_whole_file(server: HttpServer) -> None:
    assert read_from(server, 100) == (0, b"content")
    assert len(server.requests) == 2


@pytest.mark.parametrize("given", ["bytes 4-6/7", "bytes 0-6/7", "bytes */7", "", "items 3-6/7", "bytes 3-"])
def test_a_range_that_begins_elsewhere_is_refused(server: HttpServer, given: str) -> None:
    server.answer = lambda _request: Answer(206, b"tent", {"Content-Range": given})
    with pytest.raises(DownloadError, match="wanted the bytes from 3 on"):
        read_from(server, 3)


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stick = tmp_path / "stick"
    (stick / "a").mkdir(parents=True)
    (stick / "file").write_bytes(b"content")
    (stick / "a" / "b.json").write_bytes(b"{}")
    (tmp_path / "secret").write_bytes(b"secret")
    return stick


def from_folder(folder: Path, path: str) -> bytes:
    return fetch_bytes(FolderFetcher(folder), path, max_bytes=100, pace=Pace(LIMITS))


def test_a_folder_gives_its_files(folder: Path) -> None:
    assert from_folder(folder, "file") == b"content"
    assert from_folder(folder, "a/b.json") == b"{}"


def test_a_file_in_a_folder_is_resumed(folder: Path) -> None:
    with FolderFetcher(folder).open("file", start_bytes=3, deadline_s=float("inf")) as body:
        assert (body.start_bytes, read_all(body)) == (3, b"tent")


STRANGE = ["nothing", "a", "file/x", "", "/file", "../secret", "a/../../secret", ".", "a//b.json", "x\0y", "x" * 300,
           "link", "linked/secret", "pipe"]  # fmt: skip


@pytest.mark.parametrize("path", STRANGE)
def test_nothing_but_regular_files_within_the_folder_is_opened(folder: Path, path: str) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "linked").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotPublished):
        from_folder(folder, path)


def test_a_folder_that_is_not_there_is_a_failure_and_no_empty_repository(tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as error:
        from_folder(tmp_path / "unplugged", "2.root.json")
    assert not isinstance(error.value, NotPublished)


def test_reading_a_folder_ends_at_the_deadline(folder: Path) -> None:
    clock = FakeClock()
    with FolderFetcher(folder, clock=clock).open("file", deadline_s=clock.monotonic_s() + 10) as body:
        assert body.read(3) == b"con"
        clock.advance(10)
        with pytest.raises(DownloadError, match="deadline"):
            body.read(3)


# ---- servers that are not servers ------------------------------------------------------------------------------------


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def port_that_says(pieces: Iterator[bytes], first: bytes = b"") -> Iterator[int]:
    """A port that says this to the first who connects, whatever was asked."""

    def speak() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(first)
            for piece in pieces:
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def _redirect_from(path: str, to: Callable[[], str]) -> Callable[[Request], Answer | None]:
    return lambda request: Answer(302, b"", {"Location": to()}) if request.path == path else None
