"""Other work on a machine, as a script: `other_load.py SHARE BURST_S [SEED]` takes a share of each core until it ends.

Each core has a process of its own that works and rests by turns of random length, BURST_S of work on average. The same
SEED gives the same turns, so that two measurements meet the same work.
"""

from __future__ import annotations

import os
import random
import sys
import time


def main(share: float, burst_s: float, seed: int = 0) -> None:
    """Start one process a core; this one is the first."""
    cores = sorted(os.sched_getaffinity(0))
    parent = os.getpid()
    for core in cores[1:]:
        if os.fork() == 0:
            _work(core, share, burst_s, parent, seed)
    _work(cores[0], share, burst_s, None, seed)


def _work(core: int, share: float, burst_s: float, parent: int | None, seed: int) -> None:
    os.sched_setaffinity(0, {core})
    turns = random.Random(f"{seed} {core}")
    while parent is None or os.getppid() == parent:
        # Of CPU time, not of wall time: work that others hold up takes longer.
        end_s = time.process_time() + turns.expovariate(1 / burst_s)
        while time.process_time() < end_s:
            pass
        time.sleep(turns.expovariate(share / (burst_s * (1 - share))))
    sys.exit(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:]))
