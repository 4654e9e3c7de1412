"""`repo serve`: python-tuf's client over HTTP, ranges, and nothing but metadata and targets."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tuf.ngclient import Updater

from edge_runtime.errors import PublishError
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.roles import add_group, rotate
from edge_runtime.publish.static_server import BOUNDS, StaticServer
from edge_runtime.updates.release_paths import assignments_path
from tests.fakes.publishing import Publisher

BLOB = bytes(range(256)) * 4096


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "repository").found()
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    (publisher.path / "targets" / "blob").write_bytes(BLOB)
    return publisher


@pytest.fixture
def server(publisher: Publisher) -> Iterator[StaticServer]:
    with StaticServer(publisher.path) as server:
        thread = threading.Thread(target=server.serve, name="static-server")
        thread.start()
        yield server
        server.stop()
        thread.join()


def ask(server: StaticServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.putheader("Connection", "close")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


@pytest.mark.smoke
def test_a_tuf_client_reads_the_repository_over_http(
    server: StaticServer, publisher: Publisher, tmp_path: Path
) -> None:
    for name in ("metadata", "targets"):
        (tmp_path / "device" / name).mkdir(parents=True)
    home = tmp_path / "device"
    updater = Updater(
        str(home / "metadata"),
        f"{server.url}metadata/",
        str(home / "targets"),
        f"{server.url}targets/",
        bootstrap=publisher.root_1,
    )
    updater.refresh()
    target = updater.get_targetinfo(assignments_path("line"))
    assert target is not None
    assert Path(updater.download_target(target)).read_bytes() == b"[]\n"


@pytest.mark.parametrize(
    ("wanted", "status", "start", "end"),
    [
        ("bytes=10-19", 206, 10, 20),
        ("bytes=1048000-", 206, 1048000, len(BLOB)),
        ("bytes=0-", 200, 0, len(BLOB)),
        ("bytes=0-99999999", 200, 0, len(BLOB)),
        ("bytes=-5", 200, 0, len(BLOB)),
        ("bytes=1-2,4-5", 200, 0, len(BLOB)),
        ("bytes=5-2", 200, 0, len(BLOB)),
        ("nonsense", 200, 0, len(BLOB)),
        ("bytes=²-5", 200, 0, len(BLOB)),
        (f"bytes={'9' * 5_000}-", 200, 0, len(BLOB)),  # int() refuses to read so many
    ],
)
def test_a_range_is_answered_where_it_is_one(
    wanted: str, status: int, start: int, end: int, server: StaticServer
) -> None:
    got, headers, body = ask(server, "/targets/blob", Range=wanted)
    assert (got, body) == (status, BLOB[start:end])
    assert headers.get("Content-Range") == (f"bytes {start}-{end - 1}/{len(BLOB)}" if status == 206 else None)


def test_a_range_behind_the_end_is_416_with_the_size(server: StaticServer) -> None:
    status, headers, body = ask(server, "/targets/blob", Range=f"bytes={len(BLOB)}-")
    assert (status, headers["Content-Range"], body) == (416, f"bytes */{len(BLOB)}", b"")


def test_head_says_the_length_and_sends_nothing(server: StaticServer) -> None:
    status, headers, body = ask(server, "/targets/blob", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(BLOB)), b"")


def test_peers_that_ask_nothing_do_not_keep_others_from_files(publisher: Publisher) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(StaticServer(publisher.path, bounds=BOUNDS._replace(connections=2, spared_s=0.0)))
        thread = threading.Thread(target=server.serve)
        thread.start()
        host, _, port = urlsplit(server.url).netloc.partition(":")
        for _ in range(5):
            stack.enter_context(socket.create_connection((host, int(port)), 60))
        assert ask(server, "/targets/blob")[2] == BLOB
        server.stop()
        thread.join()


def test_only_the_timestamp_may_not_be_kept_by_caches(server: StaticServer) -> None:
    assert ask(server, "/metadata/timestamp.json")[1]["Cache-Control"] == "no-cache"
    assert "immutable" in ask(server, "/metadata/1.root.json")[1]["Cache-Control"]


@pytest.mark.parametrize(
    "path",
    [
        "/", "/metadata", "/metadata/", "/keys/ring.json", "/keys/snapshot-1.pem", "/lock", "/repository.toml",
        "/metadata/../keys/ring.json", "/metadata/%2e%2e/keys/ring.json", "/metadata//timestamp.json",
        "/targets/..%2fkeys%2fring.json", "/targets/link", "/targets/folder/ring.json", "/targets/pipe",
        "/targets/%00", "//keys/ring.json", "/targets/absent", "/TARGETS/blob", "/targets/blob/x",
    ],
)  # fmt: skip
def test_nothing_else_is_shown(path: str, server: StaticServer, publisher: Publisher) -> None:
    (publisher.path / "targets" / "link").symlink_to(publisher.path / "keys" / "ring.json")
    (publisher.path / "targets" / "folder").symlink_to(publisher.path / "keys")
    os.mkfifo(publisher.path / "targets" / "pipe")
    assert ask(server, path)[0] == 404


def test_an_address_that_is_taken_is_an_error_with_advice(server: StaticServer, publisher: Publisher) -> None:
    port = urlsplit(server.url).port
    assert port is not None
    with pytest.raises(PublishError, match="give --bind and --port"):
        StaticServer(publisher.path, port=port)


def test_the_command_serves_until_it_is_interrupted(publisher: Publisher) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", "repo", "serve", "--repo", str(publisher.path), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        address = line.partition("http://")[2].partition("/")[0]
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/metadata/timestamp.json", headers={"Connection": "close"})
        assert connection.getresponse().status == 200
        connection.close()
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("place", ["http", "bundle"])
def test_our_own_client_without_cryptography_fetches_from_a_server_and_from_a_bundle(
    place: str, server: StaticServer, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.carry_out(lambda repository: rotate(repository, "root"))
    base = server.url
    if place == "bundle":
        base = f"{tmp_path / 'usb'}/"
        with publisher.opened() as repository:
            write_bundle(repository, "line", tmp_path / "usb")
    root = tmp_path / "root.json"
    root.write_bytes(publisher.root_1)
    home = ["--metadata-dir", str(tmp_path / "device"), "--metadata-url", f"{base}metadata/"]
    wanted = ["--target-name", assignments_path("line"), "--target-dir", str(tmp_path / "out")]
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from edge_runtime.updates.tuf_cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for words in (
        [*home, "init", str(root)],
        [*home, *wanted, "--target-base-url", f"{base}targets/", "download"],
    ):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"[]\n"]
