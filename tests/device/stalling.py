"""Stops one thread of a device's daemon, as a bug that blocks it would: its process and the other threads go on."""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path

import psutil

from demo.booted_device import BootedDevice
from edge_runtime.doors.io_loop import ROUND_EVENTS
from tests.device.asking import LIMIT_S, main_pid

PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
WAIT_ALL = 0x40000000
"""__WALL: also of threads."""

WAITS = re.compile(rf"232 0x[0-9a-f]+ 0x[0-9a-f]+ {ROUND_EVENTS:#x} ")
"""epoll_wait(2) on x86-64 for as many events as the loop takes in a round, as /proc tells it."""

LOOK_S = 0.05


def serving_thread(device: BootedDevice) -> int:
    """The host's number of the thread that reads requests."""
    threads = list(Path(f"/proc/{_on_host(device)}/task").iterdir())
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        for thread in threads:
            if WAITS.match((thread / "syscall").read_text()):
                return int(thread.name)
    raise AssertionError("no thread waits for requests")


def stall_until_killed(thread: int) -> float:
    """Stop a thread, and return when somebody killed its process for it: how long that took. Raises AssertionError."""
    began = time.monotonic()
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, thread, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")
    _, status = os.waitpid(thread, WAIT_ALL)
    assert os.WIFSTOPPED(status)
    while time.monotonic() < began + LIMIT_S:
        # Its parent hears of the end only after we have: that is how it is with whom one traces.
        ended, status = os.waitpid(thread, WAIT_ALL | os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return time.monotonic() - began
        time.sleep(LOOK_S)
    raise AssertionError("nobody noticed that the daemon has stalled")


def _on_host(device: BootedDevice) -> int:
    """The host's number of the daemon's process."""
    inside = str(main_pid(device))
    for process in psutil.Process(device.leader).children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        if next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1] == inside:
            return process.pid
    raise AssertionError("the daemon does not run")
