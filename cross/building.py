"""What whoever builds an image or a package sees: what is done now, and at the end what it made, or why it did not.

Owns: the last line (path, size, digest, time) and the exit status. Called by the programs behind `make image` and
`make deb`.
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

Tell = Callable[[str], None]
"""Is told what is done now, in a few words, where that takes its time."""

LAST_LINES = 15
"""Of what a program said that failed."""


def tell_nobody(step: str) -> None:
    """Who builds in a test wants no word of it."""


@contextmanager
def watched(label: str) -> Iterator[Tell]:
    """Show each step on stderr: behind a spinner with the time on a terminal, elsewhere one a line."""
    with Screen(sys.stdout, sys.stderr).progress(label) as progress:
        yield progress.show


def run_program(name: str, build: Callable[[], object]) -> int:
    """Build. Returns the exit status: 0, or 1 and why on stderr. 130 after Ctrl-C."""
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
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        words = [f"{name}: {_command(error.cmd)} failed with exit status {error.returncode}"]
        screen.note("\n".join([*words, *said.splitlines()[-LAST_LINES:]]))
        return 1
    except (EdgeRuntimeError, OSError, ValueError) as error:
        screen.note(f"{name}: {error}")
        return 1
    screen.note(f"{name}: {duration_text(time.monotonic() - began_s)} in all")
    return 0


def made_line(path: Path, what: str = "", digest: str | None = None) -> str:
    """A file that was made: its path, size (or what to say for it) and SHA-256 (or another digest of it)."""
    digest = digest or f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return f"{path}  {what or f'{path.stat().st_size / 1e6:.1f} MB'}  {digest}"


def _command(words: object) -> str:
    """The beginning of a command, for a person who did not type it."""
    return " ".join(str(word) for word in words[:4]) if isinstance(words, list) else str(words)
