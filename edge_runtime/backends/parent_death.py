"""A child process that ends with the one that made it, even where that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal this process gets when the thread that made it ends."""


def die_with(parent: int) -> None:
    """Make the kernel end this process with `parent`, whose thread that made it must wait for it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
