"""The thread that updates: whoever wakes it without a pause keeps it from nothing."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, cast

from edge_runtime.clock import SystemClock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.updates.report import CheckResult
from edge_runtime.updates.source import Source
from edge_runtime.updates.updater import Updater
from edge_runtime.updates.worker import UpdateWorker

LIMIT_S = 60.0


class Looking:
    """An updater that notes that it was asked to look."""

    is_rolling_out = False

    def __init__(self) -> None:
        self.has_looked = threading.Event()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def check(self, source: Source, *, installs: bool) -> CheckResult:
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
