"""The share of the machine that other work takes while this process and its children measure.

Owns: the difference of two readings. Busy time of the cores that this process may use, less the CPU time of this
process and all that it started. Time that a hypervisor took away (steal) is other work too. Thread: one owner.
"""

from __future__ import annotations

import os
from typing import Any


class OtherWork:
    """Other work since it was made."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._busy_s, self._total_s = self._machine()
        self._own_s = own_cpu_s()

    def share(self) -> float:
        """The share of the cores' time that other work took, 0 to 1; 0 where the kernel does not report it."""
        busy_s, total_s = self._machine()
        if total_s <= self._total_s:
            return 0.0
        others_s = busy_s - self._busy_s - max(own_cpu_s() - self._own_s, 0.0)
        return min(max(others_s / (total_s - self._total_s), 0.0), 1.0)

    def _machine(self) -> tuple[float, float]:
        """Busy and whole time of the cores, in seconds."""
        import psutil

        try:
            cores: list[Any] = psutil.cpu_times(percpu=True)
        except OSError:
            return 0.0, 0.0
        if len(cores) != len(self._cores):  # else offline ones, which have no times, would shift the numbers
            cores = [each for core, each in enumerate(cores) if core in self._cores]
        # `user` has the time of virtual machines in it: proc_stat(5).
        busy_s = sum(each.user + each.nice + each.system + each.irq + each.softirq + each.steal for each in cores)
        return busy_s, busy_s + sum(each.idle + each.iowait for each in cores)


def own_cpu_s() -> float:
    """CPU time of this process and its descendants, with that of their ended children."""
    import psutil

    found = 0.0
    try:
        own = psutil.Process()
        family = [own, *own.children(recursive=True)]
    except (psutil.Error, OSError):
        return found
    for each in family:
        try:
            times = each.cpu_times()
        except (psutil.Error, OSError):  # it ended meanwhile; its parent has its time
            continue
        found += times.user + times.system + times.children_user + times.children_system
    return found
