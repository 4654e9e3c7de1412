"""Versions whose hosts die while they load or wait: what serves then, and what is told of them."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edge_runtime import Client
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import EdgeRuntimeError, NotReady
from edge_runtime.hosts.process import LOG_BYTES_A_SECOND
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.marked_processes import wait_for_marked
from tests.models import harmful_models, onnx_models, python_models

WAIT_S = 60.0


@contextmanager
def serving(tmp_path: Path, **settings: Any) -> Iterator[Runtime]:
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"), **settings)
    with Runtime(tmp_path / "models", config=config) as runtime:
        yield runtime


def entry(runtime: Runtime, model: str = "m", version: int = 1) -> dict[str, Any]:
    return next(each for each in runtime.models() if (each["name"], each["version"]) == (model, version))


def settle(runtime: Runtime) -> None:
    """Wait until the loader has done what it was told before: steps are done in order."""
    with pytest.raises(EdgeRuntimeError):
        runtime.unload("no-such-model")


def added(runtime: Runtime, model: str = "m") -> float:
    (got,) = runtime.infer(model, {"x": np.zeros((1, 2), np.float32)}).outputs.values()
    return float(got[0, 0])


def crash_idle_host(runtime: Runtime) -> None:
    """Send the host of version 2 of `m` the signal of a crash, and wait until another one serves, or none will."""
    instance = runtime.core.table.find("m", 2).layouts.narrow
    before = instance.host
    process = psutil.Process(before.pid)
    os.kill(before.pid, signal.SIGSEGV)
    psutil.wait_procs([process], timeout=WAIT_S)
    while instance.host.pid in (0, before.pid):
        instance.restore()


def test_a_model_that_crashes_at_load_fails_with_the_signal_and_the_others_answer(tmp_path: Path) -> None:
    onnx_models.added(tmp_path / "models" / "good" / "1", 2.0)
    for name in ("one_hot_at_load", "crashing_at_load"):
        harmful_models.HARMFUL[name].make(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "model.toml").write_text('backend = "onnxruntime"\n')
    with serving(tmp_path) as runtime:
        assert added(runtime, "good") == 2.0
        for name in ("one_hot_at_load", "crashing_at_load"):
            told = entry(runtime, name)
            assert (told["state"], "onnxruntime" in told["reason"]) == ("failed", True)
            assert "ended its process while loading: SIG" in told["reason"]
            with pytest.raises(NotReady, match="SIG"):
                added(runtime, name)


def test_a_version_that_crashes_at_load_leaves_the_one_before_serving(tmp_path: Path) -> None:
    onnx_models.added(tmp_path / "models" / "m" / "1", 1.0)
    with serving(tmp_path, isolation="always") as runtime:
        assert added(runtime) == 1.0
        harmful_models.crashing_at_load(tmp_path / "models" / "m" / "2")
        with pytest.raises(EdgeRuntimeError, match="SIG"):
            runtime.load("m", 2)
        assert (entry(runtime, version=2)["state"], added(runtime)) == ("failed", 1.0)
        assert entry(runtime)["host"]["restarts"] == 0


def test_three_deaths_of_an_idle_host_fail_the_version_and_the_one_before_serves(tmp_path: Path) -> None:
    for version in (1, 2):
        onnx_models.added(tmp_path / "models" / "m" / str(version), float(version))
    with serving(tmp_path, isolation="always") as runtime:
        for restarts in (1, 2):
            crash_idle_host(runtime)
            told = entry(runtime, version=2)["host"]
            assert (told["restarts"], told["last_end"]) == (restarts, "its process was ended by SIGSEGV")
            assert added(runtime) == 2.0
        with pytest.raises(EdgeRuntimeError, match="3 times"):
            crash_idle_host(runtime)
        settle(runtime)
        assert entry(runtime, version=2)["state"] == "failed"
        assert "SIGSEGV" in entry(runtime, version=2)["reason"]
        assert added(runtime) == 1.0


def test_unloading_ends_the_host(tmp_path: Path) -> None:
    onnx_models.added(tmp_path / "models" / "m" / "1")
    with serving(tmp_path, isolation="always") as runtime:
        process = psutil.Process(entry(runtime)["host"]["pid"])
        runtime.unload("m")
        assert not process.is_running()
        assert entry(runtime)["host"] is None


@pytest.mark.parametrize(
    ("daemon", "model", "is_hosted"),
    [
        ("auto", "", False), ("auto", "always", True), ("auto", "never", False),
        ("always", "", True), ("always", "never", True), ("never", "", False), ("never", "always", True),
    ],
)  # fmt: skip
def test_isolation_of_the_daemon_and_of_the_model_decide_where_it_runs(
    tmp_path: Path, daemon: str, model: str, is_hosted: bool
) -> None:
    onnx_models.mlp(tmp_path / "models" / "m" / "1")
    said = f'isolation = "{model}"\n' if model else ""
    (tmp_path / "models" / "m" / "model.toml").write_text(f'mode = "inline"\n{said}')
    with serving(tmp_path, isolation=daemon) as runtime:
        told = entry(runtime)
        assert told["state"] == "ready"
        assert (told["host"] is not None, told["mode"] == "workers") == (is_hosted, is_hosted)


def test_a_model_that_the_rule_does_not_admit_runs_in_a_host_and_its_reason_says_why_not_inline(tmp_path: Path) -> None:
    harmful_models.dividing(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.toml").write_text('mode = "inline"\n')
    with serving(tmp_path) as runtime:
        told = entry(runtime)
        assert (told["state"], told["mode"], told["host"]["restarts"]) == ("ready", "workers", 0)
        assert told["reason"].startswith("it runs in a host, and not inline as mode says: ")


def test_code_is_never_run_inside_the_daemon(tmp_path: Path) -> None:
    python_models.mlp(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.toml").write_text('isolation = "never"\n')
    with serving(tmp_path, python_models=True) as runtime:
        assert 'isolation = "never" is refused for model.py' in entry(runtime)["reason"]
    (tmp_path / "models" / "m" / "model.toml").write_text("")
    with serving(tmp_path, python_models=True, isolation="never") as runtime:
        assert entry(runtime)["host"]["pid"] > 0


def test_a_daemon_ends_whatever_its_hosts_do(tmp_path: Path) -> None:
    """One is stopped, one prints without end, one starts what prints on, one hangs in a run, one in its load."""
    mark = f"mark-{uuid.uuid4()}"
    flood = [sys.executable, "-c", "import os\nwhile True: os.write(1, b'y\\n' * 32768)", mark]
    start = f"subprocess.Popen({flood!r})"
    models = {
        "stopped": ("", ""),
        "chatty": ("", f"import threading; threading.Thread(target=lambda: subprocess.run({flood!r})).start()"),
        "starting": (f"{start}\nif value == 13: os.kill(os.getpid(), signal.SIGKILL)", ""),
        "hanging": ("if value == 13: signal.pause()", ""),
        "loading": ("", "import os\nif os.path.exists(__file__ + '.slow'): signal.pause()"),
    }
    for name, (body, preamble) in models.items():
        python_models.on_first_value(tmp_path / "models" / name / "1", body, preamble=preamble)
        (tmp_path / "models" / name / "model.toml").write_text("batch = false\n[limits]\nrun_limit_ms = 600_000\n")
    config = "python_models = true\ncalibrate = false\ndrain_s = 2.0\n"
    began_s = time.monotonic()
    with DaemonProcess(tmp_path, config=config) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        thirteen = {"x": np.array([[13]], np.float32)}
        for _ in range(2):  # its host dies, and what it started prints on
            with pytest.raises(EdgeRuntimeError):
                client.infer("starting", thirteen, timeout_ms=60_000)
        client.submit("hanging", thirteen)
        listed = {each["name"]: each["host"]["pid"] for each in client.models() if each["host"]}
        psutil.Process(listed["stopped"]).suspend()
        (tmp_path / "models" / "loading" / "1" / "model.py.slow").touch()
        os.kill(listed["loading"], signal.SIGKILL)
        assert daemon.stop() == 0
        assert any("are left out" in message for message in daemon.messages())
    assert wait_for_marked(mark, 0) == []
    assert {name for name, pid in listed.items() if psutil.pid_exists(pid)} == set()
    log, most = (tmp_path / "log").stat().st_size, len(models) * LOG_BYTES_A_SECOND * (time.monotonic() - began_s)
    assert log < most + (2 << 20), "a model may log so much at once, and so much a second"
