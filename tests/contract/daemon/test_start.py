"""The start of a daemon: every endpoint answers at once, models load side by side, and ready is one moment."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import LimitSettings, ZmqSettings
from edge_runtime.daemon.assemble import assemble_daemon
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import NotReady
from edge_runtime.telemetry.logs import end_listening, listen_to_log
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model
from tests.models import ir_models, onnx_models, python_models

X = floats(1, 16)
HELD = """    print('holds', folder.parent.name, flush=True)
    while not (folder / 'go').exists():
        time.sleep(0.002)
"""


def held(folder: Path) -> Path:
    """An MLP whose load waits for `go`."""
    file = python_models.mlp(folder)
    file.write_text("import time\n" + file.read_text().replace("def load(folder):\n", f"def load(folder):\n{HELD}"))
    return file


class Held(logging.Handler):
    """Which loads wait for `go`, in the order in which they began."""

    def __init__(self, models: Path) -> None:
        super().__init__(logging.INFO)
        self.models = models
        self.names: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        _, _, name = record.getMessage().partition("holds ")
        if name:
            with self._changed:
                self.names.append(name)
                self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        """Until so many have begun in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.names) >= count, ANSWER_S), self.names
            return list(self.names)

    def let_go(self, model: str) -> None:
        (self.models / model / "1" / "go").touch()


@contextmanager
def starting(folder: Path, *, cores: int = 2, **settings) -> Iterator[tuple[Daemon, Held]]:
    """A daemon that starts on a thread; what is held is let go at the end."""
    models = folder / "models"
    settings.setdefault("start_limit_s", 5 * ANSWER_S)
    config = configured(
        models=str(models),
        state=str(folder / "state"),
        zmq=ZmqSettings(endpoints=(f"ipc://{folder}/i.sock",)),
        python_models=True,
        calibrate=False,
        watch=False,
        limits=LimitSettings(cores=cores),
        **settings,
    )
    waiting = Held(models)
    logger = logging.getLogger("edge_runtime")
    level = logger.level
    logger.setLevel(logging.INFO)
    listen_to_log(waiting)  # where an earlier test configured the log, the level is reckoned from listeners
    daemon = assemble_daemon(config)
    thread = threading.Thread(target=daemon.start)
    thread.start()
    try:
        yield daemon, waiting
    finally:
        for model in models.iterdir():
            waiting.let_go(model.name)
        thread.join()
        daemon.stop()
        end_listening(waiting)
        logger.setLevel(level)


def states(client: Client) -> dict[str, str]:
    return {each["name"]: each["state"] for each in client.models()}


def test_a_model_answers_while_another_loads_and_that_one_is_refused_at_once_with_the_progress(tmp_path):
    put_model(tmp_path / "models", "fast", onnx_models.mlp)
    put_model(tmp_path / "models", "slow", held)
    endpoint = f"ipc://{tmp_path}/i.sock"
    with starting(tmp_path) as (daemon, waiting):
        waiting.wait(1)
        with Client(endpoint) as client:
            client.wait_ready(ANSWER_S, "fast")
            assert client.infer("fast", {"x": X})["y"].shape == (1, 4)
            assert states(client) == {"fast": "ready", "slow": "loading"}
            assert not client.is_ready()
        with RawClient(endpoint) as raw:
            for frames in (
                raw.ask(header("slow"), b"1", X.tobytes()),
                raw.ask(msgpack.packb({"v": 1, "op": "metadata", "model": "slow"}), b"1"),
            ):
                error = msgpack.unpackb(frames[0])["error"]
                assert (error["code"], error["retryable"]) == ("not_ready", True)
                assert error["message"] == "model slow version 1 is loading; the daemon is starting, 1 of 2 ready"
                assert error["retry_after_ms"] > 0
            unknown = msgpack.unpackb(raw.ask(header("nope"), b"2", X.tobytes())[0])["error"]
            assert unknown["code"] == "model_not_found"
        assert not daemon.status.is_ready
        waiting.let_go("slow")
        with Client(endpoint) as client:
            client.wait_ready(ANSWER_S)
            assert states(client) == {"fast": "ready", "slow": "ready"}


def test_our_clients_wait_for_a_model_that_loads_and_say_how_far_the_start_is(tmp_path):
    put_model(tmp_path / "models", "fast", onnx_models.mlp)
    put_model(tmp_path / "models", "slow", held)
    with starting(tmp_path, http=HttpSettings(endpoint="127.0.0.1:0")) as (daemon, waiting):
        waiting.wait(1)
        (url,) = daemon.doors["http"].endpoints
        with Client(f"ipc://{tmp_path}/i.sock") as client, OipClient(url) as oip, ThreadPoolExecutor(3) as callers:
            client.wait_ready(ANSWER_S, "fast")
            for each in (client, oip):
                with pytest.raises(NotReady, match="starting, 1 of 2 ready"):
                    each.infer("slow", {"x": X}, timeout_ms=50)
                with pytest.raises(TimeoutError, match=r"not ready within 0\.0 s: it is starting, 1 of 2 ready"):
                    each.wait_ready(0.01)
            with pytest.raises(TimeoutError, match=r"slow at .* was not ready within 0\.0 s: loading"):
                client.wait_ready(0.01, "slow")
            answers = [
                callers.submit(client.infer, "slow", {"x": X}, timeout_ms=ANSWER_S * 1e3),
                callers.submit(oip.infer, "slow", {"x": [[0.5] * 16]}, timeout_ms=ANSWER_S * 1e3),
            ]
            described = callers.submit(client.metadata, "slow")
            waiting.let_go("slow")
            assert [each.result()["y"].shape for each in answers] == [(1, 4), (1, 4)]
            assert described.result()["inputs"][0]["name"] == "x"


@pytest.mark.smoke
def test_ready_is_one_moment_for_every_door_and_for_systemd(tmp_path, monkeypatch):
    put_model(tmp_path / "models", "slow", held)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(ANSWER_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with starting(tmp_path, http=HttpSettings(endpoint="127.0.0.1:0")) as (daemon, waiting):
            waiting.wait(1)
            (url,) = daemon.doors["http"].endpoints
            while systemd.recv(1 << 12) != b"STATUS=starting, 0 of 1 ready":
                pass
            with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(f"{url}/v2/health/ready"):
                pass
            with refused.value as answer:
                assert (answer.code, b"starting" in answer.read()) == (400, True)
            with Client(f"ipc://{tmp_path}/i.sock") as client:
                assert not client.is_ready()
                waiting.let_go("slow")
                while not systemd.recv(1 << 12).startswith(b"READY=1"):
                    pass
                assert client.is_ready()
            with urllib.request.urlopen(f"{url}/v2/health/ready") as answer:
                assert json.load(answer) == {"ready": True}


def test_the_daemon_is_ready_after_its_limit_and_a_model_that_still_loads_is_refused_until_it_has(tmp_path):
    put_model(tmp_path / "models", "slow", held)
    with starting(tmp_path, start_limit_s=0.01) as (daemon, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        waiting.wait(1)
        client.wait_ready(ANSWER_S)
        with pytest.raises(NotReady, match="slow version 1 is loading"):
            client.infer("slow", {"x": X}, timeout_ms=10)
        waiting.let_go("slow")
        assert client.infer("slow", {"x": X}, timeout_ms=ANSWER_S * 1e3)["y"].shape == (1, 4)
    assert not daemon.is_stuck


def test_as_many_models_load_at_once_as_there_are_cores(tmp_path):
    for model in ("a", "b", "c"):
        put_model(tmp_path / "models", model, held)
    with starting(tmp_path) as (_, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        assert sorted(waiting.wait(2)) == ["a", "b"]
        waiting.let_go("b")
        client.wait_ready(ANSWER_S, "b")
        assert waiting.wait(3)[2] == "c"
        assert states(client) == {"a": "loading", "b": "ready", "c": "loading"}


def test_models_load_in_the_order_of_what_that_takes(tmp_path, caplog):
    put_model(tmp_path / "models", "a", python_models.mlp)
    (tmp_path / "source").mkdir()
    source = onnx_models.mlp(tmp_path / "source")
    put_model(tmp_path / "models", "b", lambda folder: ir_models.from_onnx(source, folder))
    put_model(tmp_path / "models", "c", onnx_models.mlp)
    caplog.set_level(logging.INFO, "edge_runtime")
    with starting(tmp_path, cores=1) as _, Client(f"ipc://{tmp_path}/i.sock") as client:
        client.wait_ready(ANSWER_S)
    assert [record.model for record in caplog.records if record.getMessage() == "loaded"] == ["c", "b", "a"]


def test_a_model_that_ends_its_host_at_load_costs_the_others_nothing(tmp_path):
    crash = "import os\ndef load(folder):\n    os.abort()\ndef infer(model, inputs):\n    pass\n"
    tensors = ([("x", "FP32", [-1, 1])], [("y", "FP32", [-1, 1])])
    put_model(tmp_path / "models", "bad", lambda folder: python_models.write(folder, *tensors, crash))
    for model in ("fast", "other"):
        put_model(tmp_path / "models", model, python_models.mlp)
    put_model(tmp_path / "models", "slow", held)
    with starting(tmp_path) as (_, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        waiting.wait(1)
        waiting.let_go("slow")
        client.wait_ready(ANSWER_S)
        assert states(client) == {"bad": "failed", "fast": "ready", "other": "ready", "slow": "ready"}
        assert "SIGABRT" in next(each["reason"] for each in client.models() if each["name"] == "bad")


def test_a_model_that_is_unloaded_while_it_loads_stays_away(tmp_path):
    put_model(tmp_path / "models", "slow", held)
    with starting(tmp_path) as (_, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        waiting.wait(1)
        assert client.unload("slow")[0]["state"] == "unloaded"
        waiting.let_go("slow")
        client.wait_ready(ANSWER_S)
        assert states(client) == {"slow": "unloaded"}
        assert client.load("slow")[0]["state"] == "ready"


def test_versions_of_a_model_are_served_together_the_newest_first(tmp_path):
    put_model(tmp_path / "models", "m", held, toml="[versions]\nall = true\n")
    put_model(tmp_path / "models", "m", onnx_models.mlp, version=2)
    with starting(tmp_path, cores=1) as (_, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        waiting.wait(1)
        assert {each["state"] for each in client.models()} == {"loading"}
        waiting.let_go("m")
        client.wait_ready(ANSWER_S)
        assert {each["version"]: each["state"] for each in client.models()} == {1: "ready", 2: "ready"}


def test_a_model_on_demand_answers_while_the_start_is_on(tmp_path):
    put_model(tmp_path / "models", "sleepy", onnx_models.mlp, toml="on_demand = true\n")
    put_model(tmp_path / "models", "slow", held)
    with starting(tmp_path) as (_, waiting), Client(f"ipc://{tmp_path}/i.sock") as client:
        waiting.wait(1)
        assert client.infer("sleepy", {"x": X}, timeout_ms=ANSWER_S * 1e3)["y"].shape == (1, 4)
        assert states(client) == {"sleepy": "ready", "slow": "loading"}
