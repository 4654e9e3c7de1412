"""A demonstration as a process of its own, with what it shows as a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 1_200.0


@contextmanager
def demo_process(module: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m <module>`; ended when the block is over."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, *options],
        cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
        started.communicate(timeout=LIMIT_S)


def read_until(demo: subprocess.Popen[str], words: str) -> str:
    """What it shows up to the line that has these words."""
    assert demo.stdout is not None
    shown = ""
    while words not in shown:
        line = demo.stdout.readline()
        assert line, shown
        shown += line
    return shown


def stop(demo: subprocess.Popen[str]) -> None:
    """End it as a service manager does, and see that it says so."""
    demo.send_signal(signal.SIGTERM)
    rest, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 128 + signal.SIGTERM, rest
