"""What the child process of a trial does to itself first: limits of memory, no core dump, out of everybody's way.

Owns: these limits and how peak memory is read. Called by children that `trial_process` started, before any library
sees a model, which may crash, hang or eat memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edge_runtime.backends.parent_death import die_with
from edge_runtime.backends.process_memory import resident_bytes

_FIRST_TO_GO = "1000"
"""oom_score_adj: when memory runs out, the kernel ends this process and not the one that serves."""


def confine(parent: int, niceness: int = 0) -> BinaryIO:
    """Leave no core dump, end with the parent, go first where memory runs out. Once, at the beginning.

    Returns what the parent reads as standard output; what libraries print there goes to standard error from now on.
    """
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answer


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Let this process have so many bytes of data meanwhile: heap, stacks and private memory, touched or not.

    Beyond, libraries fail to allocate and Python raises MemoryError.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def data_bytes() -> int:
    """What counts against `limited_memory` now; 0 where the kernel does not say."""
    return _status_bytes("VmData:") or 0


def start_peak() -> int:
    """Begin to look for the highest memory; returns what there is now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes()


def peak_bytes() -> int:
    """The highest memory since `start_peak`."""
    return _status_bytes("VmHWM:") or resident_bytes()


def _status_bytes(field: str) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None
