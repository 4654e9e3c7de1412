"""A child process in which something is tried that may crash, hang or eat memory: started, watched, ended.

Owns: the process, what it is told of the environment, and how much of what it says is kept. Loads nothing itself.
Called by the publisher before a release is signed, and by a device before one is loaded.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import edge_runtime
from edge_runtime.backends.process_memory import resident_bytes

MAX_ANSWER_BYTES = 1 << 20
"""Of standard output: a description of a model with a thousand tensors has a tenth of it."""

SHOWN_CHARACTERS = 600

_LOOK_S = 0.1
"""How long a stop or the end of the child's life is not noticed at most."""

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. answer: its standard output, cut. said: the end of what it printed otherwise.

    signal: that ended it by itself, "" for none. is_late: it was ended when its time was over. is_stopped: it was ended
    because the caller stops. is_too_large: because it took more memory than it may.
    """

    answer: bytes
    said: str
    signal: str = ""
    is_late: bool = False
    is_stopped: bool = False
    is_too_large: bool = False


def run_child(
    module: str,
    request: bytes,
    *,
    limit_s: float,
    stop: threading.Event | None = None,
    heard: Callable[[bytes], None] | None = None,
    memory_bytes: int | None = None,
) -> Ended:
    """Run `python -m <module> <our process id>` with a request on its standard input, until it ends or is ended.

    heard: gets each piece of its standard output as it comes. memory_bytes: resident memory that it may take, looked
    at every tenth of a second; None where it bounds itself. Leaves no process behind. Raises OSError: no process can
    be made now.
    """
    with os.fdopen(os.memfd_create("request"), "w+b", buffering=0) as source:
        source.write(request)
        source.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # `-m` puts the working folder on the path; it could hold anything
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for us, and we end it
        )
    with child:
        try:
            bounds = _Bounds(time.monotonic() + limit_s, stop or threading.Event(), memory_bytes)
            return _watch(child, bounds, heard or (lambda _: None))
        finally:
            # Its session is its group's name: what it left behind goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()


@dataclass(frozen=True, slots=True)
class _Bounds:
    """When a child is ended."""

    deadline_s: float
    stop: threading.Event
    memory_bytes: int | None


def _watch(child: subprocess.Popen[bytes], bounds: _Bounds, heard: Callable[[bytes], None]) -> Ended:
    assert child.stdout is not None
    assert child.stderr is not None
    kept = {child.stdout.fileno(): b"", child.stderr.fileno(): b""}
    is_late = is_stopped = is_too_large = False
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        while child.poll() is None and not (is_late or is_stopped or is_too_large):
            if selector.get_map():
                _read(selector, kept, _LOOK_S, child.stdout.fileno(), heard)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_S)
            is_late, is_stopped = time.monotonic() >= bounds.deadline_s, bounds.stop.is_set()
            is_too_large = bounds.memory_bytes is not None and resident_bytes(child.pid) > bounds.memory_bytes
        if is_late or is_stopped or is_too_large:
            child.kill()
        # A process of its own making may hold the pipes open: what is in them now is all that is waited for.
        while selector.get_map() and _read(selector, kept, 0.0, child.stdout.fileno(), heard):
            pass
    status = child.wait()
    answer, said = kept.values()
    return Ended(
        answer,
        said.decode(errors="replace").strip()[-SHOWN_CHARACTERS:],
        signal.Signals(-status).name if status < 0 and not (is_late or is_stopped or is_too_large) else "",
        is_late=is_late,
        is_stopped=is_stopped,
        is_too_large=is_too_large,
    )


def _read(
    selector: selectors.DefaultSelector,
    kept: dict[int, bytes],
    wait_s: float,
    answer: int,
    heard: Callable[[bytes], None],
) -> bool:
    """Read what is there; false where nothing is. Of an answer the beginning is kept, of other words the end."""
    ready = selector.select(wait_s)
    for key, _ in ready:
        piece = os.read(key.fd, 1 << 16)
        if not piece:
            selector.unregister(key.fd)
        elif key.fd == answer:
            heard(piece)
        both = kept[key.fd] + piece
        kept[key.fd] = both[:MAX_ANSWER_BYTES] if key.fd == answer else both[-4 * SHOWN_CHARACTERS :]
    return bool(ready)


def _environment() -> dict[str, str]:
    """What libraries need of the environment; keys and passphrases may be in it too, and a model may be hostile."""
    package = str(Path(edge_runtime.__file__).resolve().parents[1])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "PYTHONPATH": os.pathsep.join(paths)}
