"""The life of the HTTP door, and who may use it: start, stop, tokens, TLS, Unix sockets, clients that leave."""

from __future__ import annotations

import ssl
import threading
import time
from pathlib import Path

import pytest

from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import AddressTaken, ConfigError
from tests.contract.raw_http import RawHttp, binary_infer, json_infer, request
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.fakes.certificates import Certificates
from tests.models import onnx_models

INFER = "/v2/models/mlp/infer"
WAITING = 'mode = "workers"\nmax_queue_delay_ms = 600_000\nmax_batch_rows = 2_000\n'
"""Requests of this model wait for a batch that never comes."""


@pytest.fixture
def models(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    put_model(tmp_path / "models", "waiting", onnx_models.mlp, toml=WAITING)
    return tmp_path / "models"


def serving(models, tmp_path, *, endpoint="127.0.0.1:0", **settings):
    return running_daemon(models, tmp_path / "run", http=HttpSettings(endpoint=endpoint, **settings))


def tokens(folder: Path) -> tuple[str, dict[str, str]]:
    """A file of two tokens, and the tokens."""
    file, asker = TokenFile().with_token("asker", ("infer",))
    file, owner = file.with_token("owner", ("infer", "control"))
    path = folder / "tokens.toml"
    path.write_text(file.text())
    return str(path), {"asker": f"Bearer {asker}", "owner": f"Bearer {owner}"}


def test_a_token_says_what_its_bearer_may(models, tmp_path):
    path, bearer = tokens(tmp_path)
    with serving(models, tmp_path, tokens_file=path) as daemon, RawHttp(http_url(daemon)) as raw:
        assert raw.ask("GET", "/v2/health/live").status == 200
        for authorization in (None, "Bearer ert_unknown", "Basic eDp5"):
            answer = raw.ask("POST", INFER, json_infer([0.0] * 16), authorization=authorization)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "bearer"
        for _ in range(4):
            body, length = binary_infer(bytes(64))
            answer = raw.ask("POST", INFER, body, authorization=bearer["asker"], inference_header_content_length=length)
            assert answer.status == 200
        unload = "/v2/repository/models/mlp/unload"
        assert raw.ask("POST", unload, b"{}", authorization=bearer["asker"]).status == 403
        assert raw.ask("POST", unload, b"{}", authorization=bearer["owner"]).status == 200
        answer = raw.ask("POST", INFER, json_infer([0.0] * 16), authorization=bearer["asker"])
        assert (answer.status, answer.code) == (404, "not_ready")


def test_a_token_that_was_withdrawn_is_refused_after_a_reload(models, tmp_path):
    path, bearer = tokens(tmp_path)
    with serving(models, tmp_path, tokens_file=path) as daemon, RawHttp(http_url(daemon)) as raw:
        assert raw.ask("GET", "/v2", authorization=bearer["asker"]).status == 200
        Path(path).write_text(TokenFile().with_token("other", ("infer",))[0].text())
        daemon.doors["http"].reload()
        assert raw.ask("GET", "/v2", authorization=bearer["asker"]).status == 401


def test_a_strange_web_page_may_not_call(models, tmp_path):
    settings = {"allowed_origins": ("https://ours.example",)}
    with serving(models, tmp_path, **settings) as daemon, RawHttp(http_url(daemon)) as raw:
        assert raw.ask("GET", "/v2", origin="https://evil.example").status == 403
        assert raw.ask("GET", "/v2", host="evil.example").status == 403
        assert raw.ask("GET", "/v2", origin="https://ours.example").status == 200


def test_a_listed_page_may_ask_first_and_read_the_answer(models, tmp_path):
    _, bearer = tokens(tmp_path)
    ours = "https://ours.example"
    settings = {"allowed_origins": (ours,), "tokens_file": str(tmp_path / "tokens.toml")}
    with serving(models, tmp_path, **settings) as daemon, RawHttp(http_url(daemon)) as raw:
        asked = {
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization,content-type",
        }
        first = raw.ask("OPTIONS", INFER, origin=ours, **asked)
        assert first.status == 200
        assert first.headers["access-control-allow-origin"] == ours
        assert first.headers["access-control-allow-headers"] == "authorization,content-type"
        body = json_infer([0.0] * 16)
        answer = raw.ask("POST", INFER, body, origin=ours, authorization=bearer["asker"])
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ours)
        refused = raw.ask("POST", INFER, body, origin=ours)  # it has to read why
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ours)
        strange = raw.ask("OPTIONS", INFER, origin="https://evil.example", **asked)
        assert strange.status == 403
        assert "access-control-allow-origin" not in strange.headers
        plain = raw.ask("POST", INFER, body, authorization=bearer["asker"])
        assert "access-control-allow-origin" not in plain.headers


def test_control_has_an_address_of_its_own(models, tmp_path):
    path = tmp_path / "control.sock"
    with serving(models, tmp_path, control=f"unix:{path}") as daemon:
        infer, control = daemon.doors["http"].endpoints
        with RawHttp(infer) as raw:
            assert raw.ask("POST", "/v2/repository/models/mlp/unload", b"{}").status == 403
        with RawHttp(control) as raw:
            assert raw.ask("POST", "/v2/repository/models/mlp/unload", b"{}").status == 200
            assert raw.ask("POST", "/v2/repository/models/mlp/load", b"{}").status == 200
        assert oct(path.stat().st_mode & 0o777) == "0o660"
        (tmp_path / "other").mkdir()
        with pytest.raises(AddressTaken), serving(models, tmp_path / "other", control=f"unix:{path}"):
            pass
    assert not path.exists()


def test_only_who_may_load_sends_whole_models_as_json(models, tmp_path):
    path, bearer = tokens(tmp_path)
    body = b'{"parameters": {"config": "{}", "file:1/model.onnx": "%b"}}' % (b"AAAA" * (5 << 18))
    with serving(models, tmp_path, tokens_file=path) as daemon, RawHttp(http_url(daemon)) as raw:
        for name, is_read in (("asker", False), ("owner", True)):
            answer = raw.ask("POST", "/v2/repository/models/new/load", body, authorization=bearer[name])
            assert answer.status >= 400
            assert (answer.code != "decode_failed") is is_read
        assert is_there(raw, bearer["asker"])


def is_there(raw: RawHttp, authorization: str) -> bool:
    return raw.ask("POST", INFER, json_infer([0.0] * 16), authorization=authorization).status == 200


def test_a_file_in_the_place_of_a_socket_is_left_alone(models, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError), serving(models, tmp_path, endpoint=f"unix:{path}"):
        pass
    assert path.read_text() == "mine"


@pytest.mark.smoke
def test_tls_answers_large_and_small_requests(tmp_path):
    put_model(tmp_path / "models", "text", onnx_models.identity, datatype="BYTES")
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    made = Certificates(tmp_path)
    certificate, key = made.server, made.server_key
    context = ssl.create_default_context(cafile=str(made.ca))
    word = b"w" * 1_500_000
    data = (len(word).to_bytes(4, "little") + word) * 2
    tensor = b'{"name":"x","datatype":"BYTES","shape":[1,2],"parameters":{"binary_data_size":%d}}' % len(data)
    head = b'{"parameters":{"binary_data_output":true},"inputs":[%b]}' % tensor
    settings = {"cert_file": str(certificate), "key_file": str(key)}
    with serving(tmp_path / "models", tmp_path, **settings) as daemon:
        with RawHttp(http_url(daemon), context=context) as raw:
            for _ in range(3):
                assert raw.ask("POST", INFER, json_infer([0.0] * 16)).status == 200
                raw.send(request("POST", "/v2/models/text/infer", head + data,
                                 inference_header_content_length=len(head)))  # fmt: skip
                assert not raw.is_silent(ANSWER_S)
                answer = raw.response()
                assert answer.status == 200
                assert answer.body.endswith(data)
        with RawHttp(http_url(daemon).replace("https", "http")) as plain:
            plain.send(request("GET", "/v2"))
            assert plain.has_ended()


@pytest.mark.parametrize("has_token", [False, True])
def test_the_waiting_requests_of_a_client_that_left_are_taken_back(models, tmp_path, has_token):
    path, bearer = tokens(tmp_path)
    headers = {"authorization": bearer["asker"]} if has_token else {}
    settings = {"tokens_file": path} if has_token else {}
    body, length = binary_infer(bytes(64))
    with serving(models, tmp_path, **settings) as daemon, RawHttp(http_url(daemon)) as stays:
        whole = request("POST", "/v2/models/waiting/infer", body, inference_header_content_length=length, **headers)
        stays.send(whole)
        wait_for_rows(daemon, 1)
        with RawHttp(http_url(daemon)) as leaves:
            leaves.send(whole * 9)
            wait_for_rows(daemon, 10)
        wait_for_rows(daemon, 1)


def wait_for_rows(daemon, rows: int) -> None:
    """Until so many rows wait."""
    end_s = time.monotonic() + ANSWER_S
    while (found := daemon.status.stats()["metrics"]["models"]["waiting"]["queue_rows"]) != rows:
        assert time.monotonic() < end_s, f"{found} rows wait, wanted {rows}"
        time.sleep(0.01)


def connected(url: str) -> RawHttp:
    """A client as soon as there is a door."""
    end_s = time.monotonic() + ANSWER_S
    while True:
        try:
            return RawHttp(url)
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.001)


def test_the_door_listens_before_models_are_loaded(models, tmp_path):
    path = tmp_path / "http.sock"
    seen = []

    def ask() -> None:
        end_s = time.monotonic() + ANSWER_S
        with connected(f"unix:{path}") as raw:
            seen.append(raw.ask("GET", "/v2/health/live").status)
            while seen[-1:] != [(200, True)] and time.monotonic() < end_s:
                answer = raw.ask("GET", "/v2/health/ready")
                seen.append((answer.status, answer.fields["ready"]))

    asker = threading.Thread(target=ask)
    asker.start()
    with serving(models, tmp_path, endpoint=f"unix:{path}"):
        asker.join()
    assert seen[0] == 200
    assert set(seen[1:]) == {(400, False), (200, True)}


def test_a_door_that_drains_says_so_and_answers_health(models, tmp_path):
    with serving(models, tmp_path) as daemon, RawHttp(http_url(daemon)) as raw:
        assert raw.ask("GET", "/v2/health/ready").fields == {"ready": True}
        daemon.status.is_draining = True
        daemon.doors["http"].stop_admitting(ANSWER_S)
        answer = raw.ask("GET", "/v2/health/ready")
        assert (answer.status, answer.fields["ready"]) == (503, False)
        answer = raw.ask("POST", INFER, json_infer([0.0] * 16))
        assert (answer.status, answer.code) == (503, "draining")
        assert raw.ask("GET", "/v2/health/live").status == 200
