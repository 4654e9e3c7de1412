"""Web pages of others that would use the page of a device: by a name, a form, a frame, a stolen or made-up cookie."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.pages.stream import MOST_VIEWERS
from tests.contract.pages.viewer import Viewer
from tests.contract.raw_http import RawHttp, json_infer
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.models import onnx_models

BODY = json_infer([0.0] * 16)
OPEN, CALL = ("GET", "/"), ("POST", "/page/call/models")
EVIL = "http://evil.example"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    put_model(folder, "mlp", onnx_models.mlp)
    return folder


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    """A door where everyone who reaches it may do everything."""
    settings = HttpSettings(endpoint="127.0.0.1:0", control=True, allowed_origins=("https://listed.example",))
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings) as daemon:
        yield http_url(daemon)


@pytest.fixture
def viewer(url):
    with Viewer(url) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    file, token = TokenFile().with_token("owner", ("infer", "control", "view"))
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(file.text())
    return path, token


@pytest.fixture(scope="module")
def guarded(models, tmp_path_factory, token):
    settings = HttpSettings(endpoint="127.0.0.1:0", tokens_file=str(token[0]), allowed_origins=("*",))
    with running_daemon(models, tmp_path_factory.mktemp("guarded"), http=settings) as daemon:
        yield http_url(daemon)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", ""])
@pytest.mark.parametrize(("method", "path"), [OPEN, CALL, ("GET", "/page/session"), ("POST", "/page/login")])
def test_a_name_that_dns_turned_to_this_machine_opens_nothing(viewer, method, path, host):
    answer = viewer.ask(method, path, b"{}" if method == "POST" else b"", host=host, x_edge_page="1")
    assert answer.status == 403
    assert b"allowed_origins" in answer.body


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example"])
def test_a_name_that_dns_turned_to_a_door_of_all_origins_opens_no_page(guarded, host):
    with Viewer(guarded) as viewer:
        assert viewer.get("/v2/health/live", host=host).status == 200  # its owner allows all pages
        assert viewer.get("/", host=host).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL}, {"origin": "null"}, {"origin": "https://listed.example"}, {"origin": "https://localhost"},
        {"origin": "http://localhost:1"}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"},
        {"x_edge_page": None}, {"x_edge_page": "0"}, {"x_edge_page": "1, 1"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("operation", ["models", "unload"])
def test_a_request_that_another_page_made_changes_nothing(viewer, headers, operation):
    headers = {"x_edge_page": "1", "content_type": "text/plain", **headers}
    answer = viewer.ask("POST", f"/page/call/{operation}", b'{"model":"mlp"}', **headers)
    assert answer.status == 403
    (entry,) = viewer.call("models")
    assert entry["state"] == "ready"


@pytest.mark.parametrize(
    "headers", [{"origin": EVIL}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}]
)
@pytest.mark.parametrize("path", ["/page/session", "/page/stream"])
def test_a_page_of_another_origin_reads_nothing(viewer, path, headers):
    assert viewer.get(path, **headers).status == 403


def test_the_page_itself_may_call_by_its_own_origin(viewer, url):
    own = url.replace("127.0.0.1", "localhost")
    headers = {"origin": own, "host": own.removeprefix("http://"), "sec_fetch_site": "same-origin"}
    assert viewer.post("/page/call/models", {}, **headers).status == 200


def test_a_page_that_asks_first_is_not_let_send_the_header_of_the_page(viewer):
    wanted = {"access_control_request_method": "POST", "access_control_request_headers": "x-edge-page"}
    answer = viewer.ask("OPTIONS", "/page/call/unload", origin=EVIL, **wanted)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/page/../protocol.py", "/page/%2e%2e/protocol.py", "/page/..%2fprotocol.py", "/page/%2e%2e%2fprotocol.py",
        "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/page/./index.html", "/page/index.html%00.js",
        "/page/index.html/", "/page/.hidden", "/page/..\\protocol.py", "/page/%5c..%5cprotocol.py",
        "/page/index.html%20", "/page/INDEX.HTML",
    ],
)  # fmt: skip
def test_a_path_leads_out_of_no_folder(viewer, path):
    answer = viewer.get(path)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


@pytest.mark.parametrize(
    "cookie",
    [
        "edge_page=", "edge_page=x", "edge_page=" + "A" * 43, "edge_page=" + "x" * 8_000, 'edge_page="\\"',
        "edge_page", "=", ";;;", "edge_page=\xe4", "edge_page=None",
    ],
)  # fmt: skip
def test_a_cookie_that_was_made_up_lets_nobody_in(guarded, cookie):
    with Viewer(guarded, cookie=cookie) as viewer:
        assert viewer.post("/page/call/models", {}).status == 401
        assert viewer.ask("POST", "/v2/models/mlp/infer", BODY, cookie=cookie, x_edge_page="1").status == 401


def test_a_cookie_alone_changes_nothing_and_infers_nothing(guarded, token):
    with Viewer(guarded) as viewer:
        cookie = viewer.login(token[1])
        for path in ("/v2/models/mlp/infer", "/v2/repository/models/mlp/unload"):
            assert viewer.ask("POST", path, BODY, cookie=cookie).status == 401
        assert viewer.refused("/page/call/unload", {"model": "mlp"}, cookie=cookie, x_edge_page=None)[0] == 403
        assert viewer.post("/page/call/models", {}, cookie=cookie).status == 200


def test_a_cookie_is_another_one_at_each_login(guarded, token):
    with Viewer(guarded) as viewer:
        cookies = {viewer.login(token[1]) for _ in range(3)}
        assert len(cookies) == 3
        for each in cookies:
            assert viewer.post("/page/call/models", {}, cookie=each).status == 200


def test_more_logins_than_are_kept_end_the_oldest(guarded, token):
    with Viewer(guarded) as viewer:
        first, *_, last = [viewer.login(token[1]) for _ in range(257)]
        assert viewer.post("/page/call/models", {}, cookie=last).status == 200
        assert viewer.post("/page/call/models", {}, cookie=first).status == 401


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"token": {}}', b"\xff" * 100, b"[" * 60_000, b'{"a":' * 9_000])
def test_a_login_of_any_bytes_is_refused(guarded, body):
    with Viewer(guarded) as viewer:
        answer = viewer.ask("POST", "/page/login", body, x_edge_page="1")
        assert answer.status in {400, 401}
        assert viewer.get("/page/session").status == 200


def test_two_hundred_streams_leave_the_door_to_others(url):
    with ExitStack() as kept, Viewer(url) as viewer:
        answers = []
        for _ in range(200):
            raw = kept.enter_context(RawHttp(url))
            raw.send(b"GET /page/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answers.append(_status(raw))
        assert answers.count(200) == MOST_VIEWERS
        assert answers.count(503) == 200 - MOST_VIEWERS
        assert viewer.ask("POST", "/v2/models/mlp/infer", BODY).status == 200
    end_s = time.monotonic() + ANSWER_S
    while not _may_look(url):
        assert time.monotonic() < end_s, "viewers that left still count"


def _may_look(url: str) -> bool:
    with RawHttp(url) as raw:
        raw.send(b"GET /page/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return _status(raw) == 200


def _status(raw: RawHttp) -> int:
    """The status of a response that may go on."""
    while b"\r\n" not in raw._got:
        assert raw._more()
    return int(raw._got.split()[1])
