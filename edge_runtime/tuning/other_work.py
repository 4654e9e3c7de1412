"""The share of the machine that other work takes while this process and its children measure. Linux, from /proc.

Owns: reading the kernel's counters. Busy time of the cores that this process may use, less the CPU time of this process
and all that it started. Time that a hypervisor took away (steal) is other work too. Thread: one owner.
"""

from __future__ import annotations

import os
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of a core's line in /proc/stat (proc(5)): user, nice, system, irq, softirq, steal; 3 and 4 are idle."""


class OtherWork:
    """Other work since it was made. root: where the files lie, for tests."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._busy, self._total = self._machine_ticks()
        self._own = self._own_ticks()

    def share(self) -> float:
        """The share of the cores' time that other work took, 0 to 1; 0 where the kernel does not tell."""
        busy, total = self._machine_ticks()
        if total <= self._total:
            return 0.0
        others = busy - self._busy - max(self._own_ticks() - self._own, 0)
        return min(max(others / (total - self._total), 0.0), 1.0)

    def _machine_ticks(self) -> tuple[int, int]:
        busy = total = 0
        for line in _text(self._root / "stat").splitlines():
            name, *ticks = line.split()
            if name in self._cores:
                busy += sum(int(ticks[each]) for each in _BUSY if each < len(ticks))
                total += sum(map(int, ticks[:8]))
        return busy, total

    def _own_ticks(self) -> int:
        """CPU time of this process and its descendants, with that of their ended children."""
        ticks: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        for folder in self._root.glob("[0-9]*"):
            # After the command's name, which may hold anything: state, parent, ..., utime, stime, cutime, cstime.
            fields = _text(folder / "stat").rpartition(")")[2].split()
            if len(fields) > 14:
                number = int(folder.name)
                ticks[number] = sum(map(int, fields[11:15]))
                children.setdefault(int(fields[1]), []).append(number)
        found, waiting = 0, [os.getpid()]
        while waiting:
            number = waiting.pop()
            found += ticks.get(number, 0)
            waiting += children.get(number, [])
        return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
