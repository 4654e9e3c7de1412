"""The output of a build: each step while it runs, and at the end the file that was built, or the failure.

Owns: the last line (path, size, digest, time) and the exit status. Called by `make image` and `make deb`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.cli.screen import Screen, duration_text
from edge_runtime.errors import EdgeRuntimeError

ShowStep = Callable[[str], None]
"""Called with the name of each step that takes time."""

LAST_LINES = 15
"""Lines shown of a failed program's errors."""


def show_nothing(step: str) -> None:
    """Show no steps, as in tests."""


@contextmanager
def watched(label: str) -> Iterator[ShowStep]:
    """Show each step on stderr: beside a spinner with the time on a terminal, else one a line."""
    with Screen(sys.stdout, sys.stderr).progress(label) as progress:
        yield progress.show


def run_program(name: str, build: Callable[[], object]) -> int:
    """Run a build and return the exit status: 0; 1 after a failure, with the reason on stderr; 130 after Ctrl-C."""
    screen = Screen(sys.stdout, sys.stderr)
    began_s = time.monotonic()
    try:
        build()
    except KeyboardInterrupt:
        return 130
    except subprocess.TimeoutExpired as error:
        screen.note(f"{name}: {_command(error.cmd)} took more than {error.timeout:g} s")
        return 1
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        lines = [f"{name}: {_command(error.cmd)} failed with exit status {error.returncode}"]
        screen.note("\n".join([*lines, *output.splitlines()[-LAST_LINES:]]))
        return 1
    except (EdgeRuntimeError, OSError, ValueError) as error:
        screen.note(f"{name}: {error}")
        return 1
    screen.note(f"{name}: {duration_text(time.monotonic() - began_s)} in all")
    return 0


def made_line(path: Path, what: str = "", digest: str | None = None) -> str:
    """A line about a built file: path, size or `what`, and SHA-256 or `digest`."""
    digest = digest or f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return f"{path}  {what or f'{path.stat().st_size / 1e6:.1f} MB'}  {digest}"


def _command(words: object) -> str:
    """The beginning of a command, for a person who did not type it."""
    return " ".join(str(word) for word in words[:4]) if isinstance(words, list) else str(words)
