"""The client over HTTP and gRPC, and the command line with `--connect http://` and `grpc://`, against a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.errors import ConfigError, Forbidden, ModelNotFound, TensorMismatch, Unauthenticated, Unsupported
from tests.contract.running_daemon import ANSWER_S, floats, put_model, running_daemon
from tests.models import onnx_models

PROTOCOLS = ("http", "grpc")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "digits", onnx_models.mlp)
    put_model(models, "other", onnx_models.mlp)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0", control=True),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0", control=True),
    }
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        yield daemon


@pytest.fixture(params=PROTOCOLS)
def url(daemon, request) -> str:
    return daemon.doors[request.param].endpoints[0]


@pytest.fixture
def client(url) -> Iterator[OipClient]:
    with OipClient(url) as client:
        yield client


def shown(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What a command line printed, or complained of."""
    assert main(words) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return err if status else out


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


# ---- the client -----------------------------------------------------------------------------------------------------


def test_an_answer_is_the_models_and_writable(client):
    x = floats(3, 16)
    result = client.infer("digits", {"x": x}, timeout_ms=20_000, priority=1)

    np.testing.assert_allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4)
    result["y"][...] = 0
    assert (result.model, result.version) == ("digits", 1)


def test_times_come_with_an_answer_where_they_are_asked_for(client):
    for outputs in (None, ("y",)):
        timing = client.infer("digits", {"x": floats(2, 16)}, outputs=outputs, timing=True).timing
        assert timing is not None
        assert timing.run_ms > 0
        assert timing.batch_rows >= 2
    assert client.infer("digits", {"x": floats(2, 16)}).timing is None


def test_lists_and_texts_take_the_models_datatype_and_outputs_go_where_they_are_wanted(client):
    into = np.zeros((1, 4), np.float32)
    result = client.infer("digits", {"x": [[1] * 16]}, outputs={"y": into})

    assert result["y"] is into
    np.testing.assert_allclose(into, expected(np.ones((1, 16), np.float32)), rtol=1e-4, atol=1e-4)
    assert client.infer("text", {"x": [["né", ""]]})["y"].tolist() == [["né".encode(), b""]]


@pytest.mark.smoke
def test_futures_get_each_their_own_answer_or_error(client):
    inputs = [floats(1, 16, seed=seed) for seed in range(100)]
    futures = [client.submit("digits", {"x": x}) for x in inputs]
    bad = client.submit("nope", {"x": inputs[0]})

    for x, future in zip(inputs, futures, strict=True):
        np.testing.assert_allclose(future.result(ANSWER_S)["y"], expected(x), rtol=1e-4, atol=1e-4)
    assert isinstance(bad.exception(ANSWER_S), ModelNotFound)


def test_the_server_reports_itself_and_its_models(client):
    client.wait_ready(ANSWER_S)
    client.wait_ready(ANSWER_S, "digits")
    assert client.is_live()
    assert not client.is_ready("nope")
    assert {(each["name"], each["version"]) for each in client.models()} == {("digits", 1), ("other", 1), ("text", 1)}
    assert client.metadata("digits")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert client.model_config("digits")["name"] == "digits"
    assert [each["name"] for each in client.model_statistics("digits")] == ["digits"]
    with pytest.raises(Unsupported, match="ask over ZeroMQ"):
        client.update_status()


def test_models_are_unloaded_and_loaded_where_control_is_allowed(client):
    client.unload("other")
    assert not client.is_ready("other")
    client.load("other")
    assert client.is_ready("other")
    with pytest.raises(ModelNotFound):
        client.load("nope")


def test_a_request_that_cannot_be_sent_is_refused_by_the_client(client):
    with pytest.raises(Unsupported, match="parameter 'where'"):
        client.infer("digits", {"x": floats(1, 16)}, parameters={"where": [1]})
    with pytest.raises(TensorMismatch, match="objects"):
        client.infer("text", {"x": np.array([[object(), b""]])})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_that_listens_is_a_connection_error_that_says_so(protocol, tmp_path):
    with (
        OipClient(f"{protocol}+unix://{tmp_path}/none.sock", timeout_ms=5_000) as client,
        pytest.raises(ConnectionError, match="nothing listens"),
    ):
        client.infer("digits", {"x": floats(1, 16)})


def test_a_closed_client_says_so(url):
    client = OipClient(url)
    client.close()
    client.close()
    for call in (client.models, lambda: client.infer("digits", {"x": floats(1, 16)})):
        with pytest.raises(ConnectionError, match="closed"):
            call()


def test_a_token_is_sent_from_its_file_or_the_environment(tmp_path, monkeypatch):
    put_model(tmp_path / "models", "digits", onnx_models.mlp)
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    file, token = TokenFile().with_token("camera", ("infer",))
    tokens.write_text(file.text())
    mine.write_text(f"{token}\n")
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0", tokens_file=str(tokens)),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0", tokens_file=str(tokens)),
    }
    with running_daemon(tmp_path / "models", tmp_path / "run", **doors) as daemon:
        for protocol in PROTOCOLS:
            url = daemon.doors[protocol].endpoints[0]
            with OipClient(url) as stranger, pytest.raises(Unauthenticated):
                stranger.infer("digits", {"x": floats(1, 16)})
            with OipClient(url, token_file=str(mine)) as client:
                assert client.infer("digits", {"x": floats(1, 16)}).version == 1
            monkeypatch.setenv("EDGE_RUNTIME_TOKEN", token)
            with OipClient(url) as client, pytest.raises(Forbidden):
                client.unload("digits")
            monkeypatch.delenv("EDGE_RUNTIME_TOKEN")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://a", "wanted http"),
        ("http://", "wanted http"),
        ("http://a/path", "wanted http"),
        ("http://user:secret@a", "a token comes from a file"),
        ("http://a:0", "wanted http"),
        ("http+unix://a/b", "path of a Unix socket"),
        ("grpc+unix:///", "path of a Unix socket"),
    ],
)
def test_a_url_that_is_none_of_the_forms_is_refused_without_its_password(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        OipClient(url)
    assert "secret" not in caught.value.message


def test_files_for_tls_are_refused_without_it(tmp_path):
    with pytest.raises(ConfigError, match="use https://"):
        OipClient("http://a", ca_file=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="no file"):
        OipClient("grpcs://a", ca_file=str(tmp_path / "ca.pem"))


# ---- the command line -----------------------------------------------------------------------------------------------


def test_infer_shows_the_answer(url, capsys):
    text = shown(["infer", "digits", "--random", "--repeat", "3", "--timeout-ms", "20000", "--connect", url], capsys)
    assert "digits version 1" in text
    assert "FP32 [1, 4]" in text
    assert "3 times: p50" in text
    answer = json.loads(shown(["infer", "digits", "--zeros", "--json", "--connect", url], capsys))
    assert answer["outputs"][0]["data"] == [0.0] * 4


def test_models_are_listed_shown_unloaded_and_loaded(url, capsys):
    assert "digits" in shown(["models", "list", "--connect", url], capsys)
    assert "x     FP32" in shown(["models", "show", "digits", "--connect", url], capsys)
    assert "other" in shown(["models", "unload", "other", "--connect", url], capsys)
    assert "ready" in shown(["models", "load", "other", "--connect", url], capsys)
    assert "did you mean 'digits'?" in shown(["models", "show", "digit", "--connect", url], capsys, 1)


def test_status_shows_what_the_protocol_reports(url, capsys):
    shown(["infer", "digits", "--zeros", "--connect", url], capsys)
    text = shown(["status", "--connect", url], capsys)
    assert text.startswith(f"ready  {url}")
    assert "digits" in text
    told = json.loads(shown(["status", "--ready", "--json", "--connect", url], capsys))
    assert told["ready"]
    assert told["metrics"]["models"]["digits"]["answered"] >= 1
    assert [each["state"] for each in told["models"]] == ["ready"] * 3


def test_a_command_that_the_protocol_does_not_have_is_refused_with_what_to_do(url, capsys):
    assert "ask over ZeroMQ" in shown(["update", "status", "--connect", url], capsys, 1)
    assert "ipc:// or tcp://" in shown(["update", "check", "--connect", url], capsys, 1)
    assert "--control is not for HTTP and gRPC" in shown(["status", "--control", "/x/y", "--connect", url], capsys, 1)
