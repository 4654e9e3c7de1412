"""The page of a device as its browser asks for it: files, calls, logins, and where it is shown."""

from __future__ import annotations

import gzip
import json
import ssl

import numpy as np
import pytest

from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.store import ArtifactStore
from tests.contract.pages.viewer import Viewer
from tests.contract.raw_http import RawHttp, json_infer
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.contract.triton.test_triton_repository import WARM
from tests.fakes.certificates import Certificates
from tests.fakes.releases import make_release
from tests.fakes.updates import FakeUpdates
from tests.models import onnx_models

BODY = json_infer([0.0] * 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    put_model(folder, "mlp", onnx_models.mlp)
    return folder


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings) as daemon:
        yield http_url(daemon)


@pytest.fixture
def viewer(url):
    with Viewer(url) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """The file of tokens, and each by its name."""
    file, found = TokenFile(), {}
    for name, may in (("reader", ("infer",)), ("owner", ("infer", "control", "view"))):
        file, found[name] = file.with_token(name, may)
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(file.text())
    return str(path), found


@pytest.fixture(scope="module")
def guarded(models, tmp_path_factory, tokens):
    """The address of a door that wants tokens."""
    settings = HttpSettings(endpoint="127.0.0.1:0", tokens_file=tokens[0])
    with running_daemon(models, tmp_path_factory.mktemp("guarded"), http=settings) as daemon:
        yield http_url(daemon)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("path", ["/", "/page/", "/page/index.html"])
def test_the_page_comes_with_the_headers_that_keep_others_out(viewer, path):
    answer = viewer.get(path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.startswith(b"<!doctype html>")
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["form-action"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "deny"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_comes_compressed_where_the_browser_takes_it_and_once_where_it_has_it(viewer):
    plain, packed = viewer.get("/"), viewer.get("/", accept_encoding="gzip, br")
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["content-encoding"] == "gzip"
    again = viewer.get("/", if_none_match=plain.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_a_file_that_is_not_there_is_told_as_text(viewer):
    answer = viewer.get("/page/none.js")
    assert (answer.status, answer.headers["content-type"]) == (404, "text/plain; charset=utf-8")
    assert "content-security-policy" in answer.headers


def test_the_page_leaves_the_root_to_a_protocol_that_answers_it(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", tensorflow_serving=True)
    with running_daemon(models, tmp_path, http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        assert viewer.get("/").fields == {"status": "alive"}
        assert viewer.get("/page/").body.startswith(b"<!doctype html>")


def test_the_page_is_not_there_where_it_is_switched_off(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", page=False)
    with running_daemon(models, tmp_path, http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        assert viewer.get("/").status == 404
        assert viewer.get("/page/session").status == 404


def test_the_address_of_the_page_is_told_before_others(models, tmp_path, caplog):
    caplog.set_level("INFO", "edge_runtime")
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with running_daemon(models, tmp_path, http=settings) as daemon:
        (record,) = [each for each in caplog.records if each.getMessage() == "page"]
        assert record.url == f"{http_url(daemon)}/"
        assert daemon.status.pages[0] == record.url


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_a_call_answers_by_the_operation_of_its_name(viewer):
    (entry,) = viewer.call("models")
    assert (entry["name"], entry["state"]) == ("mlp", "ready")
    assert viewer.call("metadata", model="mlp")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert viewer.call("ready", model="mlp", version=1) is True
    assert viewer.call("ready", model="mlp", version=7) is False


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/page/call/nothing", {}, (400, "decode_failed")),
        ("/page/call/metadata", {"model": "none"}, (404, "model_not_found")),
        ("/page/call/metadata", {"model": 3}, (400, "decode_failed")),
        ("/page/call/metadata", ["mlp"], (400, "decode_failed")),
        ("/page/call/update_status", {}, (501, "unsupported")),
        ("/page/call/attach_memory", {"secret": "00"}, (501, "unsupported")),
        ("/page/call/load", {"model": "mlp"}, (403, "forbidden")),
    ],
)
def test_a_call_that_cannot_be_is_refused_with_its_code(viewer, path, fields, told):
    assert viewer.refused(path, fields) == told


def test_a_call_changes_the_device_where_callers_of_the_door_may(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", control=True)
    with running_daemon(models, tmp_path, http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        assert viewer.get("/page/session").fields["may"] == ["infer", "control", "view"]
        (entry,) = viewer.call("load", model="mlp")
        assert entry["state"] == "ready"


def test_a_call_with_a_large_body_is_refused_before_it_is_read(url):
    with Viewer(url) as viewer:
        viewer.send(b"POST /page/call/models HTTP/1.1\r\nhost: localhost\r\nx-edge-page: 1\r\n")
        viewer.send(b"content-length: 65537\r\n\r\n")
        assert viewer.response().status == 413
    with Viewer(url) as viewer:
        assert viewer.post("/page/call/models", {}, transfer_encoding="chunked").status == 411


# ---- logins ---------------------------------------------------------------------------------------------------------


def test_a_session_tells_who_looks_and_what_they_may(viewer, guarded, tokens):
    told = viewer.get("/page/session").fields
    assert told["needs_token"] is told["is_logged_in"] is False
    assert told["may"] == ["infer", "view"]
    with Viewer(guarded) as other:
        told = other.get("/page/session").fields
        assert (told["needs_token"], told["may"], told["name"]) == (True, [], None)
        told = other.get("/page/session", authorization=f"Bearer {tokens[1]['owner']}").fields
        assert (told["needs_token"], told["may"], told["name"]) == (False, ["infer", "control", "view"], "owner")


def test_a_login_lets_a_browser_ask_and_infer_until_it_logs_out(guarded, tokens):
    with Viewer(guarded) as viewer:
        assert viewer.refused("/page/call/models", {}) == (401, "unauthenticated")
        assert viewer.get("/").status == 200
        answer = viewer.post("/page/login", {"token": tokens[1]["reader"]})
        assert (answer.fields["name"], answer.fields["may"]) == ("reader", ["infer"])
        kept = answer.headers["set-cookie"]
        assert {"httponly", "samesite=strict", "path=/"} <= {each.strip() for each in kept.split(";")}
        assert "secure" not in kept
        cookie = viewer.login(tokens[1]["reader"])
        viewer.headers = {"cookie": f"other=1; {cookie}"}
        assert viewer.call("models")
        assert viewer.get("/page/session").fields["is_logged_in"] is True
        assert viewer.post("/v2/models/mlp/infer").status == 400  # no body, but let in
        assert viewer.ask("POST", "/v2/models/mlp/infer", BODY, cookie=cookie, x_edge_page="1").status == 200
        assert viewer.refused("/page/call/load", {"model": "mlp"}) == (403, "forbidden")
        gone = viewer.post("/page/logout")
        assert "max-age=0" in gone.headers["set-cookie"]
        assert gone.fields["is_logged_in"] is False
        assert viewer.refused("/page/call/models", {}) == (401, "unauthenticated")
        assert viewer.ask("POST", "/v2/models/mlp/infer", BODY, cookie=cookie, x_edge_page="1").status == 401


def test_a_login_ends_when_its_token_is_withdrawn(models, tmp_path):
    path = tmp_path / "tokens.toml"
    file, token = TokenFile().with_token("reader", ("infer",))
    path.write_text(file.text())
    settings = HttpSettings(endpoint="127.0.0.1:0", tokens_file=str(path))
    with running_daemon(models, tmp_path / "run", http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        viewer.headers = {"cookie": viewer.login(token)}
        assert viewer.call("models")
        path.write_text(TokenFile().text())
        daemon.doors["http"].reload()
        assert viewer.refused("/page/call/models", {}) == (401, "unauthenticated")


@pytest.mark.parametrize("token", ["", "ert_wrong", 3, None])
def test_a_login_with_another_token_is_refused(guarded, token):
    with Viewer(guarded) as viewer:
        assert viewer.refused("/page/login", {"token": token})[0] in {400, 401}


# ---- places ---------------------------------------------------------------------------------------------------------


def test_the_page_is_shown_over_tls_off_this_machine_and_its_cookie_stays_there(models, tmp_path, tokens):
    made = Certificates(tmp_path)
    settings = HttpSettings(
        endpoint="0.0.0.0:0",
        cert_file=str(made.server),
        key_file=str(made.server_key),
        tokens_file=tokens[0],
        page=True,
    )
    with running_daemon(models, tmp_path / "run", http=settings) as daemon:
        url = http_url(daemon)
        with Viewer(url, context=ssl.create_default_context(cafile=str(made.ca))) as viewer:
            assert viewer.get("/").status == 200
            answer = viewer.post("/page/login", {"token": tokens[1]["reader"]})
            assert "; secure" in answer.headers["set-cookie"]


def test_the_page_says_why_it_is_not_shown_off_this_machine_without_tls(models, tmp_path):
    settings = HttpSettings(endpoint="0.0.0.0:0", insecure=True, page=True)
    with running_daemon(models, tmp_path, http=settings) as daemon, Viewer(http_url(daemon)) as viewer:
        answer = viewer.get("/", host="127.0.0.1")
        assert (answer.status, answer.headers["content-type"]) == (403, "text/plain; charset=utf-8")
        assert b"over TLS" in answer.body
        assert viewer.refused("/page/call/models", {}) == (403, "forbidden")
        assert viewer.get("/v2").status == 200


def test_the_page_is_off_by_itself_where_others_reach_the_door(models, tmp_path):
    settings = HttpSettings(endpoint="0.0.0.0:0", insecure=True)
    with running_daemon(models, tmp_path, http=settings) as daemon, RawHttp(http_url(daemon)) as raw:
        assert raw.ask("GET", "/").code == "decode_failed"


def test_the_session_names_the_operations_that_this_device_answers(viewer, models, tmp_path):
    """So that the page asks for none in vain, which a browser would write into its console."""
    offers = viewer.get("/page/session").fields["offers"]
    assert {"models", "metadata", "stats", "load"} <= set(offers)
    assert not {"update_status", "update_check", "cameras"} & set(offers)
    settings = HttpSettings(endpoint="127.0.0.1:0")
    updating = running_daemon(models, tmp_path, http=settings, updates=FakeUpdates())
    with updating as daemon, Viewer(http_url(daemon)) as other:
        assert {"update_status", "update_check"} <= set(other.get("/page/session").fields["offers"])


def test_the_page_tells_what_a_tune_found_out_about_a_model(models, tmp_path):
    put_model(
        tmp_path / "models", "tuned", onnx_models.mlp, toml='# tune: chosen on a day\n# mine\nbackend = "onnxruntime"\n'
    )
    put_model(tmp_path / "models", "plain", onnx_models.mlp)
    (tmp_path / "models" / "tuned" / "tune.svg").write_text("<svg/>")
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", http=settings) as daemon,
        Viewer(http_url(daemon)) as viewer,
    ):
        assert viewer.call("tuning", model="tuned") == {"reasons": ["chosen on a day"], "picture": "<svg/>"}
        assert viewer.call("tuning", model="plain") == {"reasons": [], "picture": None}
        assert viewer.refused("/page/call/tuning", {"model": "../tuned"}) == (404, "model_not_found")


def test_an_example_is_the_golden_input_of_a_release_or_the_sample_of_a_warm_up(models, tmp_path):
    folder, sample = tmp_path / "models", [[0.5] * 16]
    put_model(folder, "released", onnx_models.mlp)
    put_model(folder, "warm", onnx_models.mlp, toml='[warmup]\ninputs = "sample.json"\n')
    (folder / "warm" / "sample.json").write_text(json.dumps({"x": sample}))
    put_model(folder, "theirs", onnx_models.mlp)
    (folder / "theirs" / "config.pbtxt").write_text(WARM)
    (folder / "theirs" / "warmup").mkdir()
    (folder / "theirs" / "warmup" / "x.raw").write_bytes(np.full(16, 0.25, np.float32).tobytes())
    put_model(folder, "plain", onnx_models.mlp)
    golden = {"x": np.full((1, 16), 2, np.float32)}, {"y": np.zeros((1, 4), np.float32)}
    graph = (folder / "released" / "1" / "model.onnx").read_bytes()
    made = make_release({"model.onnx": ("onnxruntime", graph)}, golden, model="released")
    update = tmp_path / "run" / "state" / "update"
    store = ArtifactStore(update / "artifacts")
    made.store(store)
    Releases(update / "releases", store).lay_out(made.release, made.manifest_data, made.manifest.artifacts)
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(folder, tmp_path / "run", http=settings, updates=FakeUpdates()) as daemon,
        Viewer(http_url(daemon)) as viewer,
    ):
        told = {name: viewer.call("example", model=name) for name in ("released", "warm", "theirs", "plain")}
        kept = (("released", "golden", 1, 2), ("warm", "warm-up", 1, 0.5), ("theirs", "warm-up", 2, 0.25))
        for name, source, rows, value in kept:
            data = {"name": "x", "datatype": "FP32", "shape": [rows, 16], "data": [value] * 16 * rows}
            assert told[name] == {"source": source, "body": {"inputs": [data]}}
            assert viewer.post(f"/v2/models/{name}/infer", told[name]["body"]).status == 200
        assert told["plain"] == {"source": None, "body": None}
        assert viewer.refused("/page/call/example", {"model": "../warm"}) == (404, "model_not_found")
        assert "example" in viewer.get("/page/session").fields["offers"]
