"""A start begins the process that prepares hosts before anything else: it is used, or gone, whatever becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.daemon.early_parent import LEAST_BYTES
from edge_runtime.doors.zmq.client import Client
from tests.attacks.test_hostile_hosts import left_of, until
from tests.conftest import PREPARED
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core nothing overlaps")

WIDE = 1100
"""Of a matrix of more than LEAST_BYTES, small enough for the daemon itself."""


def prepared_by(daemon: DaemonProcess) -> list[psutil.Process]:
    """The daemon's children that prepare hosts."""
    return [each for each in psutil.Process(daemon.process.pid).children() if PREPARED in " ".join(each.cmdline())]


def test_a_hosted_model_uses_the_parent_that_was_begun_and_no_other(tmp_path: Path) -> None:
    file = onnx_models.wide(tmp_path / "models" / "m" / "1", size=WIDE)
    assert file.stat().st_size >= LEAST_BYTES
    (tmp_path / "models" / "m" / "model.toml").write_text('isolation = "always"\n')
    with DaemonProcess(tmp_path, config="calibrate = false\n") as daemon:
        until(lambda: prepared_by(daemon))
        (begun,) = prepared_by(daemon)
        daemon.wait_ready()
        with Client(daemon.endpoint) as client:
            assert client.infer("m", {"x": np.ones((1, WIDE), np.float32)})["y"].shape[0] == 1
            host = psutil.Process(client.models()[0]["host"]["pid"])
        assert host.ppid() == begun.pid
        assert prepared_by(daemon) == [begun]
        assert daemon.stop() == 0
        assert left_of([begun, host]) == []


def test_a_parent_that_no_model_wants_is_gone_when_the_daemon_is_ready(tmp_path: Path) -> None:
    onnx_models.wide(tmp_path / "models" / "m" / "1", size=WIDE)
    with DaemonProcess(tmp_path, config="calibrate = false\n") as daemon:
        until(lambda: prepared_by(daemon))
        (begun,) = prepared_by(daemon)
        daemon.wait_ready()
        until(lambda: left_of([begun]) == [])
        with Client(daemon.endpoint) as client:
            assert client.models()[0]["host"] is None
        assert daemon.stop() == 0


def test_a_daemon_that_cannot_start_takes_the_parent_along(tmp_path: Path) -> None:
    onnx_models.wide(tmp_path / "models" / "m" / "1", size=WIDE)
    with DaemonProcess(tmp_path, "--profile", "no-such-profile") as daemon:
        until(lambda: daemon.process.poll() is not None or prepared_by(daemon))
        begun = [] if daemon.process.poll() is not None else prepared_by(daemon)
        assert daemon.process.wait(60) == 2
        assert left_of(begun) == []
