"""A release that takes the whole daemon down after it was swapped in: the one before it comes back, and stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_runtime import Client
from tests.contract.updates.updated_device import Fleet, update_settings

if TYPE_CHECKING:
    from typing_extensions import Self

ANSWER_S = 180.0


class DaemonProcess:
    """`edge-runtime serve` on the fleet's repository, whose log is followed; killed by id when the test ends."""

    def __init__(self, fleet: Fleet, **changes: object) -> None:
        settings = update_settings(fleet.folder, fleet.site.root, **{"folder": str(fleet.mirror), **changes})
        config = fleet.folder / "config.toml"
        lines = [
            f"{name} = {json.dumps(value)}"
            for name in settings.__struct_fields__
            if (value := getattr(settings, name)) is not None
        ]
        config.write_text("\n".join(["calibrate = false", "[limits]", "cores = 1", "[update]", *lines]))
        self.endpoint = f"ipc://{fleet.folder}/i.sock"
        (fleet.folder / "models").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "edge_runtime", "serve", "--config", str(config), "--zmq", self.endpoint,
                "--models", str(fleet.folder / "models"), "--state", str(fleet.folder / "state"),
            ],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.process.wait()

    def wait_for(self, message: str) -> list[str]:
        """Read the log until it says this; returns what it said."""
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(json.loads(line)["message"])
            if said[-1] == message:
                return said
        raise AssertionError(f"the daemon ended; it said {said}")

    def adds(self) -> float:
        """What the release that answers adds."""
        with Client(self.endpoint) as client:
            return float(client.infer("adder", {"x": np.zeros((1, 2), np.float32)}).outputs["y"][0, 0])


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1 on the device, and release 2 assigned."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
    fleet.release(2)
    return fleet


def crash(daemon: DaemonProcess, number: signal.Signals) -> None:
    """End it as a native abort does: the process is gone at once, with nothing written."""
    os.kill(daemon.process.pid, number)
    assert daemon.process.wait(ANSWER_S) == -number


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_daemon_that_dies_while_it_observes_comes_back_with_the_version_before(
    fleet: Fleet, number: signal.Signals
) -> None:
    with DaemonProcess(fleet, auto=True, wake_jitter_s=0.0, window_s=3600.0) as daemon:
        daemon.wait_for("swapped in")
        assert daemon.adds() == 2.0
        crash(daemon, number)
    with DaemonProcess(fleet) as daemon:
        daemon.wait_for("ready")
        assert daemon.adds() == 1.0


def test_a_release_that_takes_the_daemon_down_three_times_is_refused_for_ever(fleet: Fleet) -> None:
    for _ in range(3):
        with DaemonProcess(fleet, auto=True, wake_jitter_s=0.0, window_s=3600.0) as daemon:
            daemon.wait_for("swapped in")
            crash(daemon, signal.SIGSEGV)
    with fleet.device() as device:
        assert device.adds() == 1.0
        (refused,) = device.status()["refused"]
        assert (refused["release"], refused["reason"]) == (2, "the process ended while it was observing (try 3)")
        assert device.outcome()[0] == "refused before"


def test_a_daemon_that_is_stopped_in_order_holds_nothing_against_the_release_it_was_observing(fleet: Fleet) -> None:
    for _ in range(4):
        with DaemonProcess(fleet, auto=True, wake_jitter_s=0.0, window_s=3600.0) as daemon:
            daemon.wait_for("swapped in")
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(ANSWER_S) == 0
    with fleet.device() as device:
        assert device.adds() == 1.0
        assert device.status()["refused"] == []
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
