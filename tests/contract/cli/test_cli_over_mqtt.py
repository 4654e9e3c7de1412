"""The command line through a broker: `--connect mqtt://broker/device`, against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.cli.completion import NAMES
from edge_runtime.cli.main import main
from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.contract.running_daemon import online_daemon, put_model, running_daemon
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        with Peer(broker.url) as peer:
            peer.publish("edge/dev2/status", b"stopped", 1, retain=True)
            peer.publish("edge/dev3/status", b"online", 1, retain=True)
        yield broker


@pytest.fixture(scope="module")
def daemon(broker, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "digits", onnx_models.mlp)
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1") as daemon:
        yield daemon


@pytest.fixture
def connect(broker, daemon) -> list[str]:
    """The option that names the device."""
    return ["--connect", f"{broker.url}/dev1"]


def shown(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What a command line printed, or complained of."""
    assert main(words) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return err if status else out


@pytest.mark.smoke
def test_infer_shows_the_answer(connect, capsys):
    words = ["infer", "digits", "--random", "--timing", "--repeat", "3", "--timeout-ms", "20000", "--priority", "2"]
    text = shown([*words, *connect], capsys)
    assert "digits version 1" in text
    assert "FP32 [1, 4]" in text
    assert "3 times: p50" in text


def test_the_answer_is_json_when_json_is_wanted(connect, capsys):
    answer = json.loads(shown(["infer", "digits", "--zeros", "--json", *connect], capsys))
    assert answer["model_name"] == "digits"
    assert answer["outputs"][0]["data"] == [0.0] * 4


def test_models_are_listed_and_shown(connect, capsys):
    assert "digits" in shown(["models", "list", *connect], capsys)
    text = shown(["models", "show", "digits", *connect], capsys)
    assert "x     FP32" in text


def test_status_has_a_line_for_the_broker(broker, daemon, connect, capsys):
    text = shown(["status", *connect], capsys)
    assert f"ready  {broker.url}/dev1" in text
    assert f"{broker.url}, device dev1, connected, MQTT 5" in text
    over_zmq = shown(["status", "--connect", daemon.endpoints[1]], capsys)
    assert f"{broker.url}, device dev1, connected, MQTT 5" in over_zmq
    assert json.loads(shown(["status", "--json", *connect], capsys))["mqtt"]["device_id"] == "dev1"


def test_status_says_why_there_is_no_broker(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    mqtt = MqttSettings(url="mqtt://127.0.0.1:1/dev1")
    with running_daemon(tmp_path / "models", tmp_path / "run", mqtt=mqtt) as daemon:
        text = shown(["status", "--connect", daemon.endpoints[1]], capsys)
    assert "mqtt://127.0.0.1:1, device dev1, not connected: " in text


def test_the_environment_may_name_the_device(connect, capsys, monkeypatch):
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", connect[1])
    assert "digits" in shown(["models", "list", "--names"], capsys)


def test_completion_finds_model_names_through_a_broker(connect):
    program = Path(sys.executable).parent
    environment = {**os.environ, "EDGE_RUNTIME_ENDPOINT": connect[1], "PATH": f"{program}:{os.environ['PATH']}"}
    names = NAMES.replace("edge-runtime", f"{sys.executable} -m edge_runtime")
    done = subprocess.run(
        ["bash", "-c", names], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["digits"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_options_for_a_broker(shell, capsys):
    script = shown(["completion", shell], capsys)
    assert all(option in script for option in ("password-file", "ca-file", "cert-file", "key-file", "prefix"))


# ---- what cannot be -------------------------------------------------------------------------------------------------


def test_without_a_device_the_error_lists_those_that_are_online(broker, daemon, capsys):
    for words in (["infer", "digits", "--zeros"], ["models", "list"], ["status"]):
        text = shown([*words, "--connect", broker.url], capsys, 1)
        assert f"{broker.url} names no device; wanted {broker.url}/DEVICE" in text
        assert "online there: dev1, dev3" in text


@pytest.mark.parametrize(
    ("device", "complaint"), [("dev2", "is stopped; online there: dev1, dev3"), ("dve1", "no device is known at")]
)
def test_a_device_that_will_not_answer_is_an_error_at_once(broker, daemon, device, complaint, capsys):
    text = shown(["models", "list", "--connect", f"{broker.url}/{device}"], capsys, 1)
    assert complaint in text
    assert "dev1" in text


def test_no_broker_is_one_paragraph(capsys):
    text = shown(["status", "--connect", "mqtt://127.0.0.1:1/dev1"], capsys, 1)
    assert "mqtt://127.0.0.1:1: nothing listens there" in text
    assert len(text.splitlines()) == 1
    assert main(["status", "--json", "--connect", "mqtt://127.0.0.1:1/dev1"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "no_daemon"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["models", "load", "digits"], "models load"),
        (["models", "unload", "digits"], "models unload"),
        (["update", "check"], "update check"),
        (["update", "apply"], "update apply"),
        (["update", "import", "/media/stick"], "update import"),
        (["update", "rollback", "digits"], "update rollback"),
        (["bench", "digits"], "bench"),
    ],
)
def test_a_command_that_only_zeromq_offers_says_so(connect, words, what, capsys):
    text = shown([*words, *connect], capsys, 1)
    assert f"{what} is not offered over MQTT" in text
    assert "ipc:// or tcp://" in text


def test_an_unknown_model_names_the_nearest(connect, capsys):
    assert "did you mean 'digits'?" in shown(["infer", "digit", "--zeros", *connect], capsys, 1)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--connect", "mqtt://h/d", "--control", "/x/y"], "--control is for ZeroMQ"),
        (["--connect", "mqtt://h/d", "--curve-keys", "/x"], "--curve-keys is for ZeroMQ"),
        (["--connect", "/x/y.sock", "--ca-file", "/x"], "--ca-file is for MQTT"),
        (["--connect", "mqtt://h/d", "--ca-file", "/nowhere"], "there is no file '/nowhere'"),
        (["--connect", "mqtt://alice:secret@h/d"], "password_file"),
        (["--connect", "mqtt://h/d", "--prefix", "#"], "prefix"),
    ],
)
def test_options_that_do_not_go_together_are_an_error(words, complaint, capsys):
    text = shown(["models", "list", *words], capsys, 1)
    assert complaint in text
    assert "secret" not in text


def test_the_prefix_is_the_sites(broker, capsys):
    text = shown(["models", "list", "--connect", broker.url, "--prefix", "other/site"], capsys, 1)
    assert "online there: none" in text
