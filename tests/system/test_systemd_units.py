"""The service's unit, by systemd's own judgement: it loads, and it may do little. Booted devices are tests/device's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.run import EXIT_CONFIG, EXIT_FAILED

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICE = UNITS / "edge-runtime.service"
DROP_INS = sorted((UNITS / "drop-ins").glob("*.conf"))

WORST = 12
"""Exposure 1.2, of 100: a network socket, a shared root and /proc are what it keeps."""

WORST_WITH_DEVICE = 15

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze; apt: systemd")


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, words)], capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The service in a folder of its own, with a command that is there."""
    copy = tmp_path / SERVICE.name
    copy.write_text(SERVICE.read_text().replace("/usr/bin/edge-runtime", "/bin/true"))
    shutil.copy(UNITS / "edge-runtime-retry.timer", tmp_path)
    return copy


def lay_over(unit: Path, drop_in: Path) -> None:
    folder = unit.with_name(f"{unit.name}.d")
    folder.mkdir()
    shutil.copy(drop_in, folder)


@pytest.mark.parametrize("drop_in", [None, *DROP_INS], ids=lambda path: path.stem if path else "alone")
def test_systemd_understands_every_line(unit: Path, drop_in: Path | None) -> None:
    if drop_in is not None:
        lay_over(unit, drop_in)
    done = analyze("verify", "--man=no", "--recursive-errors=no", unit, unit.with_name("edge-runtime-retry.timer"))
    assert [line for line in done.stderr.splitlines() if "edge-runtime" in line] == []
    assert done.returncode == 0


def test_the_service_is_exposed_as_little_as_promised(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={WORST}", unit)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda path: path.stem)
def test_no_drop_in_opens_more_than_promised(unit: Path, drop_in: Path) -> None:
    lay_over(unit, drop_in)
    done = analyze("security", "--offline=true", f"--threshold={WORST_WITH_DEVICE}", unit)
    assert done.returncode == 0, done.stdout


def test_children_may_confine_themselves() -> None:
    allowed = {name for line in settings("SystemCallFilter") for name in line.split()}
    assert {f"landlock_{name}" for name in ("create_ruleset", "add_rule", "restrict_self")} | {"setrlimit"} <= allowed


def test_only_drop_ins_that_say_so_let_code_be_made_at_run_time(unit: Path) -> None:
    assert setting("MemoryDenyWriteExecute") == "yes"
    allowing = {path.stem for path in DROP_INS if "MemoryDenyWriteExecute=no" in path.read_text()}
    assert allowing == {"openvino", "gpu", "npu"}


def test_systemd_waits_longer_than_the_daemon_drains_and_starts() -> None:
    config = Config()
    assert float(setting("TimeoutStopSec")) > 2 * config.drain_s
    assert float(setting("TimeoutStartSec")) > config.start_limit_s


def test_a_wrong_setting_is_not_tried_again_and_again_and_everything_else_is() -> None:
    assert setting("Restart") == "on-failure"
    assert setting("RestartPreventExitStatus").split() == [str(EXIT_CONFIG)]
    assert EXIT_CONFIG not in (0, EXIT_FAILED)
    assert setting("OnFailure") == "edge-runtime-retry.timer"


def setting(name: str) -> str:
    return settings(name)[0]


def settings(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", SERVICE.read_text(), re.MULTILINE)
