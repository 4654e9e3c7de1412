"""The command line against a real daemon that it started itself: from a model file to an answer, and to a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime import AsyncClient, Client
from edge_runtime.errors import NotReady
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models, python_models

LIMIT_S = 300.0
"""How long a command may take on a busy 2-core machine; each takes well under a second alone."""


@dataclass
class Daemon:
    folder: Path
    child: subprocess.Popen[str]

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.folder}/infer.sock"

    def run(self, *words: str, status: int = 0, stdin: str = "") -> str:
        """What a command prints on stdout, or on stderr when it is to fail."""
        done = subprocess.run(
            [sys.executable, "-m", "edge_runtime", *words],
            env={**os.environ, "EDGE_RUNTIME_ENDPOINT": self.endpoint},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout if status == 0 else done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("cli")
    for name, maker in (("mlp", onnx_models.mlp), ("pair", onnx_models.two_in_two_out)):
        (folder / "models" / name / "1").mkdir(parents=True)
        maker(folder / "models" / name / "1")
    words = ["serve", "--models", f"{folder}/models", "--state", f"{folder}/state", "--zmq", f"{folder}/infer.sock"]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-m", "edge_runtime", *words], stdout=log, stderr=log, text=True)
    try:
        with Client(f"ipc://{folder}/infer.sock") as client:
            client.wait_ready(LIMIT_S)
        yield Daemon(folder, child)
    finally:
        child.send_signal(signal.SIGTERM)
        status = child.wait(LIMIT_S)
    assert status == 0, (folder / "log").read_text()


def test_models_are_listed_and_shown(daemon: Daemon) -> None:
    listed = {entry["name"]: entry for entry in daemon.json("models", "list")}
    assert listed["mlp"]["state"] == listed["pair"]["state"] == "ready"
    assert "ready" in daemon.run("models", "list")
    assert daemon.json("models", "show", "mlp")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert "[?, 16]" in daemon.run("models", "show", "mlp")


def test_an_answer_is_the_models_own(daemon: Daemon) -> None:
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    np.save(daemon.folder / "x.npy", x)
    daemon.run("infer", "mlp", "--input", f"{daemon.folder}/x.npy", "--output", f"{daemon.folder}/y.npy", "--timing")
    first, second = onnx_models.mlp_weights()
    np.testing.assert_allclose(np.load(daemon.folder / "y.npy"), np.maximum(x @ first, 0) @ second, rtol=1e-4)


def test_several_inputs_come_by_stdin(daemon: Daemon) -> None:
    said = json.dumps({"a": [[1, 2, 3]], "b": [[4, 5]]})
    answer = json.loads(daemon.run("infer", "pair", "--input", "-", "--outputs", "twice,sum", "--json", stdin=said))
    assert [(output["name"], output["data"]) for output in answer["outputs"]] == [
        ("twice", [8, 10]),
        ("sum", [2, 4, 6]),
    ]


def test_errors_are_the_daemons_words(daemon: Daemon) -> None:
    assert "did you mean 'mlp'?" in daemon.run("infer", "mpl", "--zeros", status=1)
    assert "x" in daemon.run("infer", "mlp", "--input", "x=@[[1, 2]]", status=1)
    assert "nobody" in daemon.run("models", "load", "nobody", status=1)


def test_a_model_is_unloaded_and_loaded_again(daemon: Daemon) -> None:
    daemon.run("models", "unload", "pair")
    assert {entry["name"]: entry["state"] for entry in daemon.json("models", "list")}["pair"] == "unloaded"
    assert "unloaded" in daemon.run("infer", "pair", "--zeros", status=1)
    daemon.run("models", "load", "pair")
    daemon.run("infer", "pair", "--zeros")


def test_status_and_bench_count_what_was_asked(daemon: Daemon) -> None:
    found = daemon.json("bench", "mlp", "--in-flight", "16", "--seconds", "2", "--warmup", "0.2")
    (run,) = found["runs"]
    assert run["answered"] > 0  # how many is for a quiet machine to say
    assert (run["lost"], run["refused"]) == (0, {})
    assert 1 <= run["rows_per_run"] <= 16
    parts = run["mean_ms"]
    assert 0 < parts["daemon"] < run["latency_ms"]["max"]
    assert 0 <= parts["client"] < run["latency_ms"]["max"]
    assert 0 < sum(parts.values()) < run["latency_ms"]["max"]
    stats = daemon.json("status")
    assert stats["metrics"]["models"]["mlp"]["answered"] >= run["answered"]
    assert "mlp" in daemon.run("status")


def test_watching_status_ends_with_130_when_interrupted(daemon: Daemon) -> None:
    words = ["status", "--watch", "0.05", "--connect", daemon.endpoint]
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("mlp"):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 130
    assert "Traceback" not in err


def test_the_clients_of_both_kinds_agree(daemon: Daemon) -> None:
    import asyncio

    x = np.random.default_rng(0).random((3, 16), dtype=np.float32)

    async def ask() -> Any:
        async with AsyncClient(daemon.endpoint) as client:
            return (await client.infer("mlp", {"x": x}, timeout_ms=60_000, timing=True))["y"]

    with Client(daemon.endpoint, timeout_ms=60_000) as client:
        direct = client.infer("mlp", {"x": x})["y"]
        pipelined = [client.submit("mlp", {"x": x}) for _ in range(100)]
        for future in pipelined:
            np.testing.assert_allclose(future.result(LIMIT_S)["y"], direct, rtol=1e-5)
    np.testing.assert_allclose(asyncio.run(ask()), direct, rtol=1e-5)


def test_a_second_daemon_on_the_same_endpoint_is_refused(daemon: Daemon) -> None:
    err = daemon.run("serve", "--models", f"{daemon.folder}/models", "--zmq", daemon.endpoint, status=1)
    assert "infer.sock" in err
    with Client(daemon.endpoint) as client:
        assert client.is_ready("mlp")


@pytest.mark.parametrize("option", ["--zmq", "--control", "--http", "--grpc", "--state"])
def test_no_path_that_is_named_makes_folders_but_its_own(tmp_path: Path, option: str) -> None:
    (tmp_path / "models").mkdir()
    place = tmp_path / "nosuch" / "folder" / "x"
    named = {"--zmq": f"ipc://{tmp_path}/infer.sock", "--state": f"{tmp_path}/state"}
    named[option] = {"--http": f"unix:{place}", "--grpc": f"unix:{place}", "--state": str(place)}.get(
        option, f"ipc://{place}"
    )
    words = [word for pair in named.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "serve", "--models", f"{tmp_path}/models", *words],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"{tmp_path}/nosuch" in done.stderr
    assert "is not there; make it" in done.stderr
    assert not (tmp_path / "nosuch").exists()


def test_ctrl_c_ends_a_daemon_cleanly(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    words = ["serve", "--models", f"{tmp_path}/models", "--zmq", f"{tmp_path}/infer.sock", "--json"]
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", *words, "--state", f"{tmp_path}/state"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with Client(f"ipc://{tmp_path}/infer.sock") as client:
        client.wait_ready(LIMIT_S)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 0
    assert json.loads(err.splitlines()[-1])["message"] == "stopped"


def test_verbs_report_that_a_daemon_is_starting_and_infer_waits_for_its_model(tmp_path: Path) -> None:
    for model, maker in (("a", onnx_models.mlp), ("slow", python_models.mlp)):
        (tmp_path / "models" / model / "1").mkdir(parents=True)
        maker(tmp_path / "models" / model / "1")
    slow = tmp_path / "models" / "slow" / "1"
    source = (slow / "model.py").read_text()
    held = "    print('loads', flush=True)\n    while not (folder / 'go').exists():\n        time.sleep(0.01)\n"
    (slow / "model.py").write_text(
        "import time\n" + source.replace("def load(folder):\n", f"def load(folder):\n{held}")
    )
    with DaemonProcess(tmp_path, "--python-models") as started:
        started.wait_said("loads")
        words = [
            sys.executable,
            "-m",
            "edge_runtime",
            "infer",
            "slow",
            "--zeros",
            "--connect",
            started.endpoint,
            "--json",
        ]
        x = {"x": np.zeros((1, 16), np.float32)}
        with Client(started.endpoint) as client:
            assert client.infer("a", x)["y"].shape == (1, 4)
            with pytest.raises(NotReady, match=r"slow version 1 is loading; the daemon is starting, 1 of 2 ready"):
                client.infer("slow", x, timeout_ms=50)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as infer:
            assert infer.stderr is not None
            assert infer.stderr.readline() == f"the daemon at {started.endpoint} is starting, 1 of 2 ready\n"
            for verb in (["status"], ["models", "list"]):
                done = subprocess.run(
                    [*words[:3], *verb, "--connect", started.endpoint],
                    capture_output=True, text=True, timeout=LIMIT_S, check=True,
                )  # fmt: skip
                assert "is starting, 1 of 2 ready" in done.stderr
                assert "loading" in done.stdout
            (slow / "go").touch()
            assert "outputs" in json.loads(infer.communicate(timeout=LIMIT_S)[0])
        assert infer.returncode == 0
