"""Ctrl-C and SIGTERM while the daemon starts: it says that it stops, ends at once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.doors.zmq.client import Client
from tests.fakes.daemon_process import START_S, DaemonProcess
from tests.fakes.tuf_repository import TufRepository
from tests.models import onnx_models, python_models
from tests.models.harmful_models import looping

STOP_S = 15.0
"""A second is promised, for machines that do nothing else. What hangs below hangs for an hour."""

HANG = "print('hangs here', flush=True); time.sleep(3600)"
X, Y = [("x", "FP32", [-1, 1])], [("y", "FP32", [-1, 1])]

both = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])


def hanging_import(version: Path) -> None:
    python_models.write(version, X, Y, f"import time\n{HANG}\n")


def hanging_load(version: Path) -> None:
    python_models.write(version, X, Y, f"import time\ndef load(folder):\n    {HANG}\ndef infer(inputs):\n    pass\n")


def hanging_run(version: Path, rows: int = 1) -> None:
    """A run of so many rows or more hangs: 1 is met in the warm-up, 4 in the calibration."""
    body = f"import time\ndef infer(inputs):\n    if len(inputs['x']) >= {rows}:\n        {HANG}\n"
    python_models.write(version, X, Y, f"{body}    return {{'y': inputs['x']}}\n")


def hanging_inside(version: Path) -> None:
    """A warm-up inside the daemon, in a library: no other thread can end it."""
    looping(version)
    (version / "warmup.json").write_text('{"x": [[1, 1]], "times": [1152921504606846976]}')
    toml = 'isolation = "never"\nmode = "workers"\n[warmup]\ninputs = "warmup.json"\n'
    (version.parent / "model.toml").write_text(toml)


def put(folder: Path, maker: Callable[[Path], None]) -> None:
    """A quick model in a host, and one that hangs; it comes second."""
    for model, make in (("a", onnx_models.mlp), ("hanging", maker)):
        version = folder / "models" / model / "1"
        version.mkdir(parents=True)
        make(version)
    (folder / "models" / "a" / "model.toml").write_text('isolation = "always"\n')


def stop(daemon: DaemonProcess, number: int) -> list[str]:
    """Send the signal, wait for the end, and return what the log says. No process is left of the daemon."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    daemon.process.send_signal(number)
    assert daemon.process.wait(STOP_S) == 0
    assert psutil.wait_procs(children, STOP_S)[1] == []
    said = daemon.messages()
    assert "stopping" in said
    assert not any("Traceback" in str(line) for line in daemon.log())
    return said


def left(folder: Path) -> list[str]:
    """What a stopped daemon must not leave: sockets, files half written, marks of loads."""
    found = [path for path in folder.rglob("*") if path.is_socket() or path.suffix == ".part"]
    return [str(path) for path in (*found, *folder.glob("state/loads/*"))]


@both
@pytest.mark.parametrize("maker", [hanging_import, hanging_load, hanging_run])
def test_a_stop_ends_a_host_that_hangs_at_the_start(tmp_path, number, maker):
    put(tmp_path, maker)
    with DaemonProcess(tmp_path, "--python-models") as daemon:
        daemon.wait_said("hangs here")
        said = stop(daemon, number)
    assert "ready" not in said
    assert said[-1] == "stopped"
    assert left(tmp_path) == []


def test_a_stop_at_the_start_ends_a_run_inside_that_nothing_can_end(tmp_path):
    put(tmp_path, hanging_inside)
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_said("loaded")  # the model before it
        said = stop(daemon, signal.SIGTERM)
    assert "ready" not in said
    assert said[-1] == "stopped"
    assert left(tmp_path) == []


def test_a_stop_ends_a_calibration_that_hangs(tmp_path):
    put(tmp_path, partial(hanging_run, rows=4))
    with DaemonProcess(tmp_path, "--python-models") as daemon:
        daemon.wait_said("hangs here")
        assert stop(daemon, signal.SIGINT)[-1] == "stopped"
    assert left(tmp_path) == []


def test_a_stop_at_the_start_does_not_wait_for_a_repository_that_says_nothing(tmp_path):
    put(tmp_path, hanging_load)
    (tmp_path / "root.json").write_bytes(TufRepository().published["root"][0])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        config = f'python_models = true\n[update]\nurl = "{url}"\nroot_file = "{tmp_path}/root.json"\n'
        config += "wake_jitter_s = 0.0\nrequire_signed = false\n"
        with DaemonProcess(tmp_path, config=config) as daemon:
            daemon.wait_said("hangs here")
            silent.settimeout(START_S)
            accepted = silent.accept()[0]
            with accepted:
                assert stop(daemon, signal.SIGTERM)[-1] == "stopped"
    assert left(tmp_path) == []


@both
def test_a_stop_before_there_is_anything_ends_it_at_once(tmp_path, number):
    put(tmp_path, onnx_models.mlp)
    os.mkfifo(tmp_path / "root.json")
    config = f'[update]\nurl = "http://127.0.0.1:9/"\nroot_file = "{tmp_path}/root.json"\n'
    # Opening it waits until the daemon reads it.
    with DaemonProcess(tmp_path, config=config) as daemon, (tmp_path / "root.json").open("wb"):
        assert stop(daemon, number)[0] == "stopping"
    assert left(tmp_path) == []


def test_a_second_ctrl_c_ends_a_daemon_that_waits_for_admitted_requests(tmp_path):
    put(tmp_path, partial(hanging_run, rows=4))
    config = "python_models = true\ncalibrate = false\ndrain_s = 600.0\n"
    with DaemonProcess(tmp_path, config=config) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        client.submit("hanging", {"x": np.ones((4, 1), np.float32)}, timeout_ms=600_000)
        daemon.wait_said("hangs here")
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_said("stopping")
        assert children
        assert daemon.process.poll() is None
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(STOP_S) == -signal.SIGINT
    assert psutil.wait_procs(children, STOP_S)[1] == []
