"""The configuration in `deploy/repository`, run by a real nginx: it shows what devices need and nothing else."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.broker import free_ports
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.roles import add_group
from tests.fakes.publishing import Publisher

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
CONFIGURATION = Path(__file__).parents[3] / "deploy" / "repository" / "nginx.conf"

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt-get install nginx-light)")


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "repository").found()
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    return publisher


@pytest.fixture
def port(publisher: Publisher, tmp_path: Path) -> Iterator[int]:
    (port,) = free_ports(1)
    server = CONFIGURATION.read_text(encoding="utf-8")
    server = server.replace("listen 80;", f"listen 127.0.0.1:{port};")
    server = re.sub(r"root /srv/[a-z-]+;", f"root {publisher.path};", server)
    temporary = "\n".join(
        f"{kind}_temp_path {tmp_path / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Workers of a root's nginx would be somebody else, who may not read a test's files.
    user = "user root root;" if os.geteuid() == 0 else ""
    main = f"{user}\ndaemon off; pid {tmp_path / 'pid'}; error_log stderr notice;\nevents {{}}\n"
    (tmp_path / "nginx.conf").write_text(f"{main}http {{\naccess_log off;\n{temporary}\n{server}\n}}\n")
    assert NGINX is not None
    child = subprocess.Popen(
        [NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    said: list[str] = []
    for line in child.stderr:
        said.append(line)
        if "start worker process" in line:
            break
    else:
        child.wait(60)
        pytest.fail("".join(said))
    rest = threading.Thread(target=child.stderr.read, name="nginx-log")
    rest.start()
    yield port
    child.terminate()
    child.wait(60)
    rest.join(60)
    child.stderr.close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"Connection": "close", **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers["Cache-Control"], answer.read()
    finally:
        connection.close()


def test_every_published_file_is_shown_and_only_the_timestamp_is_not_kept(port: int, publisher: Publisher) -> None:
    for folder in ("metadata", "targets"):
        for path in (publisher.path / folder).rglob("*"):
            if path.is_file():
                status, caching, body = ask(port, f"/{path.relative_to(publisher.path)}")
                assert (status, body) == (200, path.read_bytes())
                assert caching is not None
                assert ("no-cache" if path.name == "timestamp.json" else "immutable") in caching


def test_a_range_is_answered_and_a_file_that_is_not_there_is_not_remembered(port: int) -> None:
    assert ask(port, "/metadata/1.root.json", Range="bytes=0-0")[::2] == (206, b"{")
    assert ask(port, "/metadata/2.root.json")[:2] == (404, None)


@pytest.mark.parametrize(
    "path",
    [
        "/", "/metadata/", "/targets/", "/keys/ring.json", "/keys/snapshot-1.pem", "/lock", "/repository.toml",
        "/metadata/../keys/ring.json", "/targets/%2e%2e/keys/ring.json", "/metadata/1.root.json.7-1.part",
        "/targets/team/a/link",
    ],
)  # fmt: skip
def test_nothing_else_is_shown(path: str, port: int, publisher: Publisher) -> None:
    (publisher.path / "targets" / "team" / "a").mkdir(parents=True)
    (publisher.path / "targets" / "team" / "a" / "link").symlink_to(publisher.path / "keys" / "ring.json")
    assert ask(port, path)[0] in (403, 404)


def test_a_link_with_a_good_name_is_not_followed(port: int, publisher: Publisher) -> None:
    folder = publisher.path / "targets" / "team" / "a"
    folder.mkdir(parents=True)
    (folder / f"{'0' * 64}.model.onnx").symlink_to(publisher.path / "keys" / "ring.json")
    assert ask(port, f"/targets/team/a/{'0' * 64}.model.onnx")[0] == 403


def test_nothing_can_be_written(port: int) -> None:
    for method in ("PUT", "DELETE", "POST"):
        assert ask(port, "/metadata/timestamp.json", method)[0] in (403, 405)
