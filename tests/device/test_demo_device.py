"""The demonstration of a device from outside: its summary is what it promises, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.device_demo import what_is_wrong
from tests.fakes.demo_process import LIMIT_S, ROOT, demo_process, read_until, stop

CGROUPS = Path("/sys/fs/cgroup")

pytestmark = pytest.mark.long


@pytest.fixture
def demo(root: Path) -> Iterator[subprocess.Popen[str]]:
    """The demonstration with its output as a pipe."""
    with demo_process("demo.device_demo", "--json") as started:
        yield started


def test_a_device_boots_serves_rolls_a_bad_update_back_and_survives_a_kill_and_a_power_cut(
    demo: subprocess.Popen[str],
) -> None:
    shown, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, shown
    summary = json.loads(shown.splitlines()[-1])
    assert what_is_wrong(summary) == []
    assert summary["first_answer"] == 7
    assert summary["serves"] == 2
    assert "technician@device $ edge-runtime infer" in shown


def test_stopped_while_its_device_runs_it_leaves_no_process_no_mount_and_no_control_group(
    demo: subprocess.Popen[str],
) -> None:
    read_until(demo, "systemd has started everything")
    family = psutil.Process(demo.pid).children(recursive=True)
    assert "systemd" in {process.name() for process in family}
    stop(demo)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert "edge-demo-" not in Path("/proc/mounts").read_text()
    assert list(CGROUPS.glob(f"**/edge-device-{demo.pid}-*")) == []


def test_a_summary_that_breaks_a_promise_is_named() -> None:
    good = {"first_answer": 7, "refused": "a run takes p95 20 ms", "lost": 0, "restarts": 1, "serves": 2}
    assert what_is_wrong(good) == []
    assert what_is_wrong({**good, "lost": 3}) == ["a request was lost while releases came and went"]
    assert what_is_wrong({**good, "serves": 4}) == ["the wrong version serves in the end"]
    assert len(what_is_wrong({**good, "first_answer": 1, "refused": "", "restarts": 0})) == 3


def test_where_no_device_can_be_booted_it_says_why_and_does_not_fail() -> None:
    if os.geteuid() != 0:
        pytest.skip("taking a right away needs root")
    shown = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-m", "demo.device_demo"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(r"Nothing is shown: .+\n", shown.stdout)
