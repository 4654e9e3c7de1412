"""A language model through the clients' streams and `edge-runtime infer --prompt`: one tiny model, one daemon."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed
from tests.contract.running_daemon import ANSWER_S, grpc_url, http_url, running_daemon
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("streams")
    tiny_model(folder / "models" / "words" / "1")
    (folder / "models" / "words" / "model.toml").write_text("[language]\nmax_streams = 2\nkv_cache_mb = 16\n")
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(folder / "models", folder / "daemon", **doors) as daemon:
        with Client(daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
        yield daemon


@pytest.fixture(params=["zmq", "http", "grpc"])
def client(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Client | OipClient]:
    urls = {"http": http_url, "grpc": grpc_url}
    with Client(daemon.endpoints[0]) if request.param == "zmq" else OipClient(urls[request.param](daemon)) as client:
        yield client


@pytest.mark.smoke
def test_stream_of_a_language_model_is_its_whole_answer_in_parts(client, daemon: Daemon) -> None:
    with Client(daemon.endpoints[0]) as other:
        whole = other.infer("words", {"text": [b"Hello"]}, parameters={"max_tokens": 12, "temperature": 0})
    parts = list(client.stream("words", text="Hello", max_tokens=12, temperature=0))
    assert b"".join(each["text"][0] for each in parts) == whole["text"][0]
    assert [each["finish_reason"][0] for each in parts] == [b""] * (len(parts) - 1) + [b"length"]
    assert [each.final for each in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["usage"].tolist()[1] == 12


def test_streams_that_are_left_free_their_slots(client) -> None:
    for _ in range(6):  # of two slots
        for part in client.stream("words", text="Hello", max_tokens=400, ignore_eos=True):
            assert not part.final
            break
    assert list(client.stream("words", text="Hello", max_tokens=2, ignore_eos=True))[-1].final


def test_stream_with_a_wrong_parameter_is_refused_before_a_part(client) -> None:
    with pytest.raises(DecodeFailed, match="temperature"):
        next(client.stream("words", text="Hello", temperature="warm"))


def test_infer_with_a_prompt_prints_what_a_language_model_writes(daemon: Daemon, capsys) -> None:
    words = ["infer", "words", "--prompt", "Hello", "-p", "max_tokens=3", "-p", "ignore_eos=true", "--json"]
    assert main([*words, "--connect", daemon.endpoints[0]]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finish_reason"], told["usage"]["completion_tokens"]) == ("length", 3)


def test_chat_talks_to_a_language_model(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd more\n"))
    words = ["chat", "words", "-p", "max_tokens=8", "-p", "ignore_eos=true", "--json"]
    assert main([*words, "--connect", daemon.endpoints[0]]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["usage"]["completion_tokens"] for each in told["answers"]] == [8, 8]
    assert [each["role"] for each in told["messages"]] == ["user", "assistant"] * 2
    assert (
        main(["infer", "words", "--prompt", "Hello", "-p", "max_tokens=3", "--json", "--connect", daemon.endpoints[0]])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["finish_reason"] in {"length", "stop"}
