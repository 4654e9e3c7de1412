"""`edge-runtime chat` and `infer --prompt` on a real daemon, with a Python model that writes as language models do."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.models import triton_models


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models: Path = tmp_path_factory.mktemp("models")
    triton_models.writer(models, "writer")
    triton_models.rows(models, "identity", triton_models.IDENTITY)
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True, watch=False) as daemon:
        with Client(daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
        yield daemon.endpoints[0]


@pytest.fixture
def verb(endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a verb with lines of a pipe: its status, and what it printed."""

    def run(*words: str, said: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        status = main([*words, "--connect", endpoint])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.mark.smoke
def test_chat_answers_each_line_of_a_pipe_and_keeps_what_was_said(verb) -> None:
    assert verb("chat", "writer", said="one\n\ntwo words\n") == (0, "1 one \n3 two words \n", "")
    assert (
        verb("chat", "writer", "--system", "Be brief.", "-p", "seed=7", said="one\n/bye\ntwo\n")[1] == "2 one seed=7 \n"
    )
    assert verb("chat", "writer", said="one\n/clear\ntwo\n")[1] == "1 one \n1 two \n"


def test_chat_in_json_has_the_messages_and_what_each_answer_told(verb) -> None:
    status, out, _ = verb("chat", "writer", "--json", said="one\n")
    told = json.loads(out)
    assert (status, told["model_name"]) == (0, "writer")
    assert told["messages"] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1 one "}]
    assert told["answers"][0]["finish_reason"] == "stop"


def test_chat_from_a_pipe_ends_with_its_first_error(verb) -> None:
    status, out, err = verb("chat", "writer", said="a bad word\nmore\n")
    assert (status, out) == (1, "1 a bad word \n")
    assert "a bad word" in err


def test_chat_with_a_model_that_is_none_says_what_it_takes(verb) -> None:
    status, _, err = verb("chat", "identity", said="one\n")
    assert status == 2
    assert "model 'identity' takes x and gives y; wanted a language model, which takes chat and gives text" in err
    status, _, err = verb("chat", "absent", said="one\n")
    assert status == 1
    assert "absent" in err


def test_models_try_writes_on_from_a_prompt_and_says_how_quickly(verb) -> None:
    status, out, _ = verb("models", "try", "writer", "--prompt", "once upon")
    text, told, *rest = out.split("\n")
    assert (status, text, rest) == (0, "once upon ", [""])
    assert "the first part after " in told
    assert told.endswith("ended by stop")
    assert json.loads(verb("models", "try", "writer", "--prompt", "once", "--json")[1])["text"] == "once "


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("writer",), "got neither; wanted PICTURE, or --prompt TEXT for a language model"),
        (("writer", "a.png", "--prompt", "a"), "got both"),
        (("writer", "--prompt", "a", "--save", "b.png"), "--save is of a drawn picture"),
        (("identity", "--prompt", "a"), "takes x and gives y; wanted a language model"),
    ],
)
def test_models_try_says_what_it_wants(verb, words: tuple[str, ...], reason: str) -> None:
    status, _, err = verb("models", "try", *words)
    assert status == 2
    assert reason in err


def test_infer_prints_what_a_model_writes_to_a_prompt(verb) -> None:
    assert verb("infer", "writer", "--prompt", "once upon", "-p", "seed=3") == (0, "once upon seed=3 \n", "")
    assert verb("infer", "writer", "--prompt", "-", said="from a pipe\n")[:2] == (0, "from a pipe \n")
    _, out, err = verb("infer", "writer", "--prompt", "once", "--timing")
    assert (out, "ended by stop" in err) == ("once \n", True)
    status, out, _ = verb("infer", "writer", "--prompt", "once", "--json")
    told = json.loads(out)
    assert (status, told["text"], told["finish_reason"], told["model_version"]) == (0, "once ", "stop", "1")
    assert set(told["latency_ms"]) == {"first", "whole"}
    status, out, err = verb("infer", "writer", "--prompt", "a bad word")
    assert (status, out) == (1, "a bad word \n")
    assert "a bad word" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["identity", "--prompt", "once"], "takes x and gives y; wanted a language model"),
        (["writer", "--prompt", "once", "--text", "more"], "leave --text out"),
        (["writer", "--prompt", "once", "--repeat", "2"], "asked once"),
        (["writer", "--prompt", "once", "-p", "seed"], "wanted NAME=VALUE"),
    ],
)
def test_infer_says_what_does_not_go_with_a_prompt(verb, words: list[str], said: str) -> None:
    status, _, err = verb("infer", *words)
    assert status == 2
    assert said in err


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(endpoint: str) -> None:
    ours, theirs = os.openpty()
    # Who leads a session and opens a terminal gets its Ctrl-C.
    opens = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(theirs)]
    command = [*opens, sys.executable, "-m", "edge_runtime", "chat", "writer", "--connect", endpoint]
    with subprocess.Popen(command, start_new_session=True, env={**os.environ, "TERM": "dumb"}) as chat:
        shown = ""

        def until(text: str) -> None:
            nonlocal shown
            while text not in shown:
                assert select.select([ours], [], [], ANSWER_S)[0], shown
                shown += os.read(ours, 4096).decode()
            shown = shown.partition(text)[2]

        try:
            until(">>> ")
            os.write(ours, b"endless\n")
            until("1 endless ..")
            os.write(ours, b"\x03")
            until("stopped")
            until(">>> ")
            os.write(ours, b"a bad word\n")
            until("edge-runtime: a bad word")
            until(">>> ")
            os.write(ours, b"two\n")
            until("3 two ")
            until(">>> ")
            os.write(ours, b"/bye\n")
            assert chat.wait(ANSWER_S) == 0
        finally:
            chat.kill()
            os.close(theirs)
            os.close(ours)
