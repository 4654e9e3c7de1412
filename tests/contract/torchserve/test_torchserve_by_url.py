"""TorchServe's `POST /models?url=https://...`: archives from listed servers, and from no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import pytest

from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.torchserve import archives as torchserve_archives
from tests.contract.pictures.test_pictures import picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.contract.torchserve.test_torchserve_import import NAMES, artifact
from tests.fakes.http_server import Answer, HttpServer, Request
from tests.models import onnx_models
from tests.models.torchserve_archives import put_archive

if TYPE_CHECKING:
    from typing_extensions import Self


class Server:
    """Serves `files` by path; a path in `moved` leads elsewhere, those of `endless` never end.

    A path in `held` waits until `let_go`.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.endless: set[str] = set()
        self.held: set[str] = set()
        self.let_go = Event()
        self.http = HttpServer(self.files.get)
        self.http.answer = self._answer

    def __enter__(self) -> Self:
        self.http.start()
        self.place = urlsplit(self.http.url).netloc
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.http.stop()

    def _answer(self, request: Request) -> Answer | None:
        if request.path in self.held:
            self.let_go.wait(ANSWER_S)
        if request.path in self.moved:
            return Answer(302, headers={"Location": self.moved[request.path]})
        return Answer(body=repeat(bytes(1 << 16)), says_length=False) if request.path in self.endless else None


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture
def archive(tmp_path) -> bytes:
    """A classifier of pictures, called `colours`."""
    files = {"net.onnx": artifact(tmp_path, onnx_models.colours), "index_to_name.json": NAMES}
    return put_archive(tmp_path, "colours", files, serializedFile="net.onnx").read_bytes()


@contextmanager
def asking(tmp_path: Path, *hosts: str, **settings: object) -> Iterator[RawHttp]:
    models = tmp_path / "models"
    put_model(models, "mlp", onnx_models.mlp)
    http = HttpSettings(
        **{"endpoint": "127.0.0.1:0", "torchserve": True, "control": True, "torchserve_hosts": hosts, **settings}
    )
    with running_daemon(models, tmp_path / "run", http=http) as daemon, RawHttp(http_url(daemon)) as raw:
        yield raw


def register(http: RawHttp, url: str, **query: str):
    more = "".join(f"&{key}={value}" for key, value in query.items())
    return http.ask("POST", f"/models?url={quote(url, safe='')}{more}")


def url_of(http: RawHttp) -> str:
    host, port = http.socket.getpeername()
    return f"http://{host}:{port}"


def models_of(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "models").iterdir())


def test_an_archive_of_a_listed_server_is_imported_loaded_and_answers(server, archive, tmp_path):
    server.files["zoo/some%20colours.mar"] = archive
    with asking(tmp_path, server.place) as http:
        answer = register(http, f"http://{server.place}/zoo/some%20colours.mar", initial_workers="1")
        assert answer.status == 200, answer
        assert answer.fields["status"].startswith('Model "colours" registered')
        assert http.ask("PUT", "/predictions/colours", picture("red")).status == 200
    assert models_of(tmp_path) == ["colours", "mlp"]
    assert [path.name for path in (tmp_path / "run" / "state").glob("archive-*")] == []


def test_the_caller_may_name_the_model(server, archive, tmp_path):
    server.files["a.mar"] = archive
    with asking(tmp_path, "127.0.0.1") as http:
        assert register(http, f"http://{server.place}/a.mar", model_name="mine").status == 200
        assert register(http, f"http://{server.place}/a.mar", model_name="mine").status != 200  # it is there
        assert register(http, f"http://{server.place}/a.mar", model_name="..%2Fx").status != 200
    assert models_of(tmp_path) == ["mine", "mlp"]


def test_without_the_setting_no_archive_is_fetched_and_the_answer_names_it(server, archive, tmp_path):
    server.files["a.mar"] = archive
    with asking(tmp_path) as http:
        answer = register(http, f"http://{server.place}/a.mar")
    assert answer.status == 501
    assert "torchserve_hosts" in answer.fields["message"]
    assert server.http.paths == []


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/a.mar", "http://127.0.0.1:1/a.mar", "http://127.0.0.1.:{port}/a.mar",
        "http://127.0.0.1:{port}@localhost/a.mar", "http://user@127.0.0.1:{port}/a.mar", "file:///tmp/a.mar",
        "ftp://127.0.0.1:{port}/a.mar", "http://127.0.0.1:{port}/a.zip", "http://127.0.0.1:{port}/a.mar?b=.mar",
        "http://127.0.0.1:{port}/a#/a.mar", "http://2130706433:{port}/a.mar", "http://[::1]:{port}/a.mar", "http://[/a.mar",
        "http:///a.mar", "gopher://127.0.0.1:{port}/a.mar", "http://127.0.0.1:x/a.mar", "http://127.0.0.1:{port}/../.mar",
        "://a.mar", "http://127.0.0.1:{port}\r\nHost: x/a.mar", "http://127.0.0.1:{port}\0/a.mar", "http://ä\ud800/a.mar",
    ],
)  # fmt: skip
def test_another_address_is_refused_and_nothing_is_asked_of_it(server, archive, tmp_path, url):
    server.files["a.mar"] = archive
    with asking(tmp_path, server.place) as http:
        answer = http.ask(
            "POST", f"/models?url={quote(url.format(port=server.place[10:]), safe='', errors='surrogatepass')}"
        )
        assert answer.status in {400, 403}, answer
        assert answer.fields["message"]
    assert server.http.paths == []
    assert models_of(tmp_path) == ["mlp"]


def test_a_redirect_leads_to_listed_servers_only(server, archive, tmp_path):
    with Server() as other:
        other.files["b.mar"] = archive
        server.moved = {"a.mar": f"http://{other.place}/b.mar", "f.mar": "file:///etc/passwd"}
        with asking(tmp_path, server.place) as http:
            for name in ("a", "f"):
                answer = register(http, f"http://{server.place}/{name}.mar")
                assert answer.status != 200, answer
            assert "torchserve_hosts" in register(http, f"http://{server.place}/a.mar").fields["message"]
        assert other.http.paths == []
        with asking(tmp_path, server.place, other.place) as http:
            assert register(http, f"http://{server.place}/a.mar").status == 200


def test_an_archive_without_end_is_cut_off_and_leaves_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(torchserve_archives, "MAX_ARCHIVE_BYTES", 1 << 20)
    server.files["a.mar"], server.endless = b"PK", {"a.mar"}
    with asking(tmp_path, server.place) as http:
        answer = register(http, f"http://{server.place}/a.mar")
        assert answer.status != 200
        assert "1048576 bytes" in answer.fields["message"]
    assert models_of(tmp_path) == ["mlp"]
    assert list((tmp_path / "run" / "state").glob("archive-*")) == []


@pytest.mark.parametrize(
    "content", [b"", b"no archive", None, b"PK\x03\x04" * 100], ids=["empty", "text", "absent", "cut"]
)
def test_a_file_that_is_not_an_archive_is_reported_and_leaves_nothing(server, tmp_path, content):
    if content is not None:
        server.files["a.mar"] = content
    with asking(tmp_path, server.place) as http:
        answer = register(http, f"http://{server.place}/a.mar")
        assert answer.status == 400, answer
        assert str(tmp_path) not in answer.fields["message"]
    assert models_of(tmp_path) == ["mlp"]


def test_while_one_is_fetched_others_are_answered_and_a_second_one_waits_its_turn(server, archive, tmp_path):
    server.files["a.mar"], server.held = archive, {"a.mar"}
    with asking(tmp_path, server.place) as http:
        with RawHttp(url_of(http)) as second:
            http.send(_post(f"/models?url={quote(f'http://{server.place}/a.mar', safe='')}"))
            assert register(second, f"http://{server.place}/a.mar").status == 503
            assert second.ask("GET", "/ping").status == 200
            server.let_go.set()
        assert http.response().status == 200


def test_a_daemon_that_stops_waits_for_no_server(server, archive, tmp_path):
    server.files["a.mar"], server.held = archive, {"a.mar"}
    with asking(tmp_path, server.place) as http:
        http.send(_post(f"/models?url={quote(f'http://{server.place}/a.mar', safe='')}"))
        with RawHttp(url_of(http)) as second:
            assert register(second, f"http://{server.place}/a.mar").status == 503
    assert models_of(tmp_path) == ["mlp"]


def test_a_client_that_may_not_control_has_nothing_fetched(server, archive, tmp_path):
    server.files["a.mar"] = archive
    with asking(tmp_path, server.place, control=False) as http:
        assert register(http, f"http://{server.place}/a.mar").status == 403
    assert server.http.paths == []


def _post(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
