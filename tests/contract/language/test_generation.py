"""A language model in a real daemon: one tiny model, one daemon; answers whole and in parts, each with one end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import ANSWER_S, http_url, running_daemon
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("language")
    tiny_model(folder / "models" / "words" / "1")
    (folder / "models" / "words" / "model.toml").write_text("[language]\nmax_streams = 4\nkv_cache_mb = 16\n")
    with running_daemon(folder / "models", folder / "daemon", http=HttpSettings(endpoint="127.0.0.1:0")) as daemon:
        yield daemon


def asked(daemon: Daemon, action: str, **fields: object) -> tuple[int, str]:
    """Ask by the generate extension; the status, and the body."""
    request = urllib.request.Request(
        f"{http_url(daemon)}/v2/models/words/{action}",
        json.dumps(fields).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def parts_of(body: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]


@pytest.mark.smoke
def test_a_streamed_answer_is_the_whole_one_in_parts_with_one_end(daemon: Daemon) -> None:
    status, whole = asked(daemon, "generate", text="Hello", max_tokens=8)
    _, streamed = asked(daemon, "generate_stream", text="Hello", max_tokens=8)
    parts = parts_of(streamed)

    assert status == 200
    assert "".join(part["text"] for part in parts) == json.loads(whole)["text"]
    assert [part["finish_reason"] for part in parts] == [""] * (len(parts) - 1) + ["length"]
    assert parts[-1]["usage"] == json.loads(whole)["usage"] == [5, 8, 0]
    assert all(part["usage"] == [0, 0, 0] for part in parts[:-1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "Hello", "chat": "{}"}, "got text and chat; wanted exactly one of text and chat"),
        ({"text": "Hello", "temperature": "warm"}, "temperature"),
        ({"text": "Hello", "max_tokens": 0}, "max_tokens"),
        ({"text": "word " * 2000}, "context"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_wrong_in_it(daemon: Daemon, fields: dict, said: str) -> None:
    status, body = asked(daemon, "generate", **fields)

    assert status == 400
    assert said in json.loads(body)["error"]
