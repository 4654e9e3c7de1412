"""A wall clock that a test steps by years, of a process of its own; the monotonic clock and waits stay the kernel's.

faketime shifts the ends of the kernel's waits too, so that every sleep fails or ends late: as no stepped clock does.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from threading import Event, Thread

import pytest

YEAR_S = 31_557_600
STEPS_S = (10 * YEAR_S, -10 * YEAR_S, 30 * YEAR_S, 0, -20 * YEAR_S, 5 * YEAR_S, 12 * 86_400, -7 * 3600, -1, 1, 0)
"""How far the clock is ahead, one after another."""

STEP_EACH_S = 0.001


class SteppedClock:
    """environment: of the process that has this clock."""

    def __init__(self, folder: Path) -> None:
        """Compile it. Skips the test where no C compiler is."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler: apt-get install gcc libc6-dev")
        library, self._file = folder / "stepped_clock.so", folder / "ahead"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True)
        self.step(0)
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def step(self, ahead_s: int) -> None:
        """Set the clock so far ahead of this machine's; behind it where it is negative."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # the same file: it is mapped
            file.write(struct.pack("<q", ahead_s))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step it again and again."""
        ended = Event()

        def steps() -> None:
            for ahead_s in cycle(STEPS_S):
                self.step(ahead_s)
                if ended.wait(STEP_EACH_S):
                    return

        thread = Thread(target=steps)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.step(0)
