"""The daemons that a tune keeps running, and the other work that it sees beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.tuning.candidates import Candidate, ThreadLayout, Way
from edge_runtime.tuning.daemons import DaemonPool, ServingFailed
from edge_runtime.tuning.other_work import OtherWork

ONE, TWO, THREE = (Candidate(Way("onnxruntime"), ThreadLayout(threads, 1)) for threads in (1, 2, 3))


class Daemons:
    """Serves candidates of 100 bytes each; knows which run. crowd: how many a device has memory for."""

    def __init__(self, crowd: int = 10) -> None:
        self.running: list[Candidate] = []
        self.started: list[Candidate] = []
        self._crowd = crowd

    @contextmanager
    def serve(self, candidate: Candidate) -> Iterator[Any]:
        if len(self.running) >= self._crowd:
            raise ServingFailed("out of memory")
        self.running.append(candidate)
        self.started.append(candidate)
        try:
            yield self
        finally:
            self.running.remove(candidate)

    def memory_bytes(self) -> int:
        return 100


def test_daemons_run_on_and_the_one_not_asked_for_longest_makes_room() -> None:
    daemons = Daemons()
    pool = DaemonPool(daemons.serve, budget_bytes=250)
    for each in (ONE, TWO, ONE, THREE):
        pool.daemon(each)
    assert daemons.running == [ONE, THREE]
    assert daemons.started == [ONE, TWO, THREE]
    pool.close()
    assert daemons.running == []


def test_a_candidate_measured_alone_has_the_machine_alone() -> None:
    daemons = Daemons()
    pool = DaemonPool(daemons.serve, budget_bytes=1000)
    pool.daemon(ONE)
    pool.daemon(TWO)
    pool.daemon(ONE, alone=True)
    assert (daemons.running, daemons.started) == ([ONE], [ONE, TWO])
    pool.close()


def test_a_daemon_that_fails_beside_others_is_tried_alone_before_it_counts_as_failed() -> None:
    daemons = Daemons(crowd=1)
    pool = DaemonPool(daemons.serve, budget_bytes=1000)
    pool.daemon(ONE)
    pool.daemon(TWO)
    assert daemons.running == [TWO]
    pool.close()
    with pytest.raises(ServingFailed, match="out of memory"):
        DaemonPool(Daemons(crowd=0).serve, budget_bytes=1000).daemon(ONE)


def counters(root: Path, busy: int, idle: int, processes: dict[int, tuple[int, int]]) -> None:
    """Write /proc after so many ticks of every core, and of each process: (parent, its ticks)."""
    lines = [f"cpu{core} {busy} 0 0 {idle} 0 0 0 0 0 0\n" for core in os.sched_getaffinity(0)]
    (root / "stat").write_text(f"cpu 9 9 9 9 0 0 0 0 0 0\n{''.join(lines)}intr 5\nbtime 1\n")
    for number, (parent, ticks) in processes.items():
        (root / str(number)).mkdir(exist_ok=True)
        after = f"S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 100 {'0 ' * 30}"
        (root / str(number) / "stat").write_text(f"{number} (a) b) {after}\n")


def test_other_work_is_what_neither_this_process_nor_its_descendants_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, cores = os.getpid(), len(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    counters(tmp_path, 0, 0, {own: (1, 5), 70: (own, 0), 71: (70, 0), 90: (1, 0)})
    others = OtherWork()
    assert others.share() == 0.0
    ticks = {own: (1, 5 + 10 * cores), 70: (own, 5 * cores), 71: (70, 25 * cores), 90: (1, 30 * cores)}
    counters(tmp_path, 70, 30, ticks)
    assert others.share() == pytest.approx(0.3)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "nowhere"))
    assert OtherWork().share() == 0.0
