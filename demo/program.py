"""A demonstration as a program: Ctrl-C, failures, the last line and the exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from demo.daemon import DemoFailed
from demo.screen import Screen
from edge_runtime.errors import EdgeRuntimeError


def run(screen: Screen, show: Callable[[], bool], last_words: str) -> int:
    """Show it. Returns the exit status: 0 when `show` says that all was right, 1, or 130 after Ctrl-C.

    SIGTERM and SIGHUP unwind it, so that what it started ends with it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    began = time.perf_counter()
    try:
        is_right = show()
    except KeyboardInterrupt:
        screen.end_progress()
        return 130
    except (DemoFailed, EdgeRuntimeError, ConnectionError, TimeoutError, subprocess.CalledProcessError) as error:
        screen.end_progress()
        said = f"\n{error.stderr}" if isinstance(error, subprocess.CalledProcessError) and error.stderr else ""
        screen.line(screen.paint(f"\nThe demonstration failed: {error}{said}", "red"))
        return 1
    screen.line(f"\n{time.perf_counter() - began:.0f} s in all. {last_words}")
    return 0 if is_right else 1


def keeps_its_promises(screen: Screen, wrong: Sequence[str]) -> bool:
    """Show the faults. Returns whether there are none."""
    for sentence in wrong:
        screen.line(screen.paint(f"Wrong: {sentence}", "red"))
    return not wrong
