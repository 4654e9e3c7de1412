"""A model that ends the daemon while it loads: the others answer, and after the second time it is left out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_runtime import Client
from tests.contract.running_daemon import floats, put_model, replace_model
from tests.fakes.daemon_process import START_S, DaemonProcess
from tests.models import onnx_models

X = {"x": floats(1, 16)}

INSIDE = 'isolation = "never"\n'
"""In a host such a load ends the host alone."""


@contextmanager
def kept_running(folder: Path, starts: int):
    """The last of so many daemons, each started when the one before has ended, as a service manager does."""
    for _ in range(starts - 1):
        with DaemonProcess(folder) as daemon:
            daemon.process.wait(START_S)
            assert daemon.process.returncode < 0, said(folder)
    with DaemonProcess(folder) as daemon, Client(daemon.endpoint, timeout_ms=START_S * 1e3) as client:
        wait_for(lambda: "ready" in [line["message"] for line in said(folder)])
        yield daemon, client


def said(folder: Path) -> list[dict]:
    """The log of the last daemon, but for what a library wrote before it ended the process."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines() if line.startswith("{")]


def listed(client: Client, model: str) -> dict[int, dict]:
    return {each["version"]: each for each in client.models() if each["name"] == model}


def models_load(daemon: DaemonProcess, *arguments: str) -> int:
    """`models load`, as a person types it."""
    command = [sys.executable, "-m", "edge_runtime", "models", "load", *arguments, "--connect", daemon.endpoint]
    return subprocess.run(command, capture_output=True, timeout=START_S, check=False).returncode


def wait_for(condition) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    put_model(tmp_path / "models", "new", onnx_models.mlp, toml=INSIDE)
    put_model(tmp_path / "models", "new", onnx_models.crashing, version=2)
    return tmp_path


def test_a_version_that_crashed_twice_at_load_is_left_out_and_the_one_before_serves(folder):
    with kept_running(folder, starts=3) as (daemon, client):
        assert client.infer("mlp", X).version == 1
        assert client.infer("new", X).version == 1
        bad = listed(client, "new")[2]
        assert bad["state"] == "failed"
        for word in ("ended 2 times", "Aborted", "models load new --version 2"):
            assert word in bad["reason"], bad["reason"]
        assert listed(client, "new")[1]["state"] == "ready"
        assert not daemon.stop()
    with kept_running(folder, starts=1) as (_, client):
        assert client.infer("new", X).version == 1, "it is remembered after a clean stop too"


def test_healthy_models_answer_while_a_suspect_is_tried_again(folder):
    """Its second load comes after readiness: a client that asks at once is answered before the daemon ends."""
    with DaemonProcess(folder) as daemon:
        daemon.process.wait(START_S)
    with DaemonProcess(folder) as daemon:
        daemon.process.wait(START_S)
    messages = [line["message"] for line in said(folder)]
    assert "the daemon ended while a version was loaded" in messages
    assert [line["model"] for line in said(folder) if line["message"] == "loaded"] == ["mlp"]
    assert "ready" in messages


def test_asked_for_by_hand_it_is_tried_again_and_remembered(folder):
    with kept_running(folder, starts=3) as (daemon, client):
        assert client.infer("mlp", X).version == 1
        models_load(daemon, "new", "--version", "2")
        assert daemon.process.wait(START_S) < 0
    with kept_running(folder, starts=1) as (_, client):
        assert client.infer("new", X).version == 1
        assert "ended 3 times" in listed(client, "new")[2]["reason"]


def test_changed_files_are_tried_again(folder):
    with kept_running(folder, starts=3) as (daemon, client):
        assert client.infer("new", X).version == 1
        replace_model(folder / "models" / "new" / "2", onnx_models.mlp)
        wait_for(lambda: listed(client, "new").get(2, {}).get("state") == "ready")
        assert client.infer("new", X).version == 2
        assert not daemon.stop()
    assert not list((folder / "state" / "loads").iterdir())


def test_several_that_crash_are_each_found(folder):
    put_model(folder / "models", "also", onnx_models.crashing, toml=INSIDE)
    with kept_running(folder, starts=5) as (_, client):
        assert client.infer("mlp", X).version == 1
        assert {each["name"]: each["state"] for each in client.models() if each["state"] == "failed"} == {
            "also": "failed",
            "new": "failed",
        }


def test_a_daemon_that_is_killed_during_a_load_suspects_the_version_and_loads_it(folder):
    put_model(folder / "models", "new", onnx_models.endless, version=2)
    with DaemonProcess(folder) as daemon:
        wait_for(lambda: any((folder / "state").glob("loads/new-2.json")))
        daemon.process.kill()
        daemon.process.wait()
    with kept_running(folder, starts=1) as (_, client):
        assert client.infer("mlp", X).version == 1, "readiness does not wait for a suspect"
        assert listed(client, "new")[2]["state"] == "loading"
