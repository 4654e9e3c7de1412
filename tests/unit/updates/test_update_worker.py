"""The thread that updates: whoever wakes it without a pause keeps it from nothing."""

from __future__ import annotations

import random
import threading
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.updates.report import CheckResult
from edge_runtime.updates.source import Source
from edge_runtime.updates.updater import Updater
from edge_runtime.updates.worker import UpdateWorker

LIMIT_S = 60.0


class Unconfigured:
    """The configuration of a group that says nothing. windows: of the device's own settings."""

    group = "default"

    def __init__(self, windows: tuple[str, ...] = ()) -> None:
        self.windows = windows

    def restart(self) -> None: ...


class Looking:
    """An updater that notes that it was asked to look. asked: whether to install, and to configure."""

    is_rolling_out = False
    observed = ""

    def __init__(self, windows: tuple[str, ...] = (), local: datetime | None = None) -> None:
        self.has_looked = threading.Event()
        self.configuration = Unconfigured(windows)
        self.asked: list[tuple[bool, bool]] = []
        self._local = local or datetime.now().astimezone()

    def now_utc(self) -> datetime:
        return self._local

    def status(self) -> dict[str, Any]:
        return {}

    def serve_suspects(self) -> None: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def check(self, source: Source, *, installs: bool, configures: bool = True) -> CheckResult:
        self.asked.append((installs, configures))
        self.has_looked.set()
        return CheckResult("", is_ok=installs, source=source.name)


def test_a_device_that_is_woken_without_a_pause_looks_all_the_same(tmp_path: Path) -> None:
    updater = Looking()
    settings = UpdateSettings(root_file="", folder=str(tmp_path), min_check_s=0.0, wake_jitter_s=0.0)
    wakes = iter(range(100_000))

    class Waking(random.Random):
        """Drawn when the worker heard a wake: another one comes at once."""

        def random(self) -> float:
            if not updater.has_looked.is_set():
                next(wakes)
                worker.look()
            return 0.0

    worker = UpdateWorker(
        cast("Updater", cast("Any", updater)), settings, SystemClock(), threading.Event(), chance=Waking()
    )
    worker.start()
    try:
        assert updater.has_looked.wait(LIMIT_S)
        assert next(wakes) < 100
    finally:
        worker.close()


def looked(updater: Looking, settings: UpdateSettings, link: tuple[str, str] = ("eth0", "ethernet")) -> dict[str, Any]:
    """The status of a worker that looked once by itself."""
    worker = UpdateWorker(
        cast("Updater", cast("Any", updater)), settings, SystemClock(), threading.Event(), link=lambda: link
    )
    worker.start()
    try:
        assert updater.has_looked.wait(LIMIT_S)
        return worker.status()
    finally:
        worker.close()


NOON = datetime(2026, 11, 25, 12, 0).astimezone()


def test_a_device_outside_its_window_looks_and_takes_its_configuration_and_installs_nothing(tmp_path: Path) -> None:
    updater = Looking(("01:00-05:00",), NOON)
    told = looked(updater, UpdateSettings(root_file="", folder=str(tmp_path), wake_jitter_s=0.0))
    assert updater.asked[0] == (False, True)
    assert told["waits_for"] == "a window of 01:00-05:00"


def test_a_device_inside_its_window_installs(tmp_path: Path) -> None:
    updater = Looking(("11:00-13:00",), NOON)
    told = looked(updater, UpdateSettings(root_file="", folder=str(tmp_path), wake_jitter_s=0.0))
    assert updater.asked[0] == (True, True)
    assert told["waits_for"] == ""


@pytest.mark.parametrize(
    ("link", "installs", "waits_for"),
    [
        (("eth0", "ethernet"), True, ""),
        (("wwan0", "mobile"), False, "a link that is ethernet or wifi, and wwan0 is mobile"),
        (("", "other"), False, "a link that is ethernet or wifi"),
    ],
)
def test_a_device_over_a_link_that_is_not_listed_installs_nothing(
    link: tuple[str, str], installs: bool, waits_for: str
) -> None:
    updater = Looking()
    settings = UpdateSettings(root_file="", url="http://127.0.0.1:9", only_on=("ethernet", "wifi"), wake_jitter_s=0.0)
    told = looked(updater, settings, link)
    assert updater.asked[0][0] is installs
    assert told["waits_for"] == waits_for


def test_a_device_with_a_folder_asks_for_no_link(tmp_path: Path) -> None:
    updater = Looking()
    settings = UpdateSettings(root_file="", folder=str(tmp_path), only_on=("ethernet",), wake_jitter_s=0.0)
    assert looked(updater, settings, ("wwan0", "mobile"))["waits_for"] == ""


def test_a_device_looks_again_when_its_window_opens(tmp_path: Path) -> None:
    updater = Looking(("12:30-13:00",), NOON)
    settings = UpdateSettings(root_file="", folder=str(tmp_path), wake_jitter_s=0.0, poll_s=86_400.0)
    told = looked(updater, settings)
    assert told["next_check_s"] <= 30 * 60 + 15 * 60
