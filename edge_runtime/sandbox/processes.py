"""Processes of this machine as /proc lists them: which follow one leader, and the end of all of them.

Owns: reading /proc/PID/stat, and killing all followers of a leader. A child leads a session, setsid(2), since child.py
starts it so, and nothing that it starts can leave that (confinement.py): an orphan follows it too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

GONE_S = 5.0
"""A killed process is gone at once, unless the kernel writes its pages back meanwhile."""

LEAVE_S = 1.0
"""A child's own children that end by themselves once it is gone, as prepared parents do, have this time to clean up."""

MAX_PROCESSES = 64
"""That a child may have at once. RLIMIT_NPROC counts a user's processes, and does not hold for root."""

_LOOK_S = 0.005


class Process(NamedTuple):
    """A process that has not ended. group: its process group. leader: of its session."""

    pid: int
    parent: int
    group: int
    leader: int


def processes() -> Iterator[Process]:
    """Return those that this process may see; zombies are none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                # Its name, in brackets, may hold anything: proc_pid_stat(5).
                state, *numbers = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
                if state not in (b"Z", b"X"):
                    yield Process(int(folder.name), *map(int, numbers))


def members(group: int) -> list[int]:
    """Return the processes of a group: a child leads one, which nothing that it starts can leave."""
    return [each.pid for each in processes() if each.group == group]


def cpu_ticks(pid: int) -> int:
    """Return the CPU time that a process took, with that of what it started and reaped; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15]))
    except (OSError, ValueError):
        return 0


def leaders_below(pid: int) -> set[int]:
    """Return the leaders of all that descends from a process and does not follow it."""
    found = new = {pid}
    everybody = list(processes())
    while new:
        new = {each.pid for each in everybody if each.parent in found} - found
        found = found | new
    return {each.leader for each in everybody if each.pid in found} - {pid, os.getsid(0)}


def end_followers(leaders: Collection[int], spared: int, limit_s: float, leave_s: float = 0.0) -> bool:
    """Kill all that follow these leaders, themselves too but for one, and wait; False: some are left after a limit.

    leave_s: how long they may take to end by themselves.
    """
    began_s = time.monotonic()
    while True:
        left = [each for each in processes() if each.leader in leaders and each.pid != spared] if leaders else []
        if not left:
            return True
        past_s = time.monotonic() - began_s
        if past_s >= limit_s:
            return False
        if past_s >= leave_s:
            for group in {each.group for each in left}:  # whole groups: one that forks quickly is never caught singly
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        time.sleep(_LOOK_S)
