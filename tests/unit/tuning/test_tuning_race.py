"""The race that finds the best of many ways: simulated machines with other work and noise, on a simulated clock."""

from __future__ import annotations

import math
import os
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime.tuning.candidates import Candidate, ThreadLayout, Way, thread_layouts
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.other_work import OtherWork
from edge_runtime.tuning.plan import Space, TuneStep, choose, has_answer, is_settled, next_step
from edge_runtime.tuning.race import (
    CALM,
    MAX_TAKES,
    MIN_ROUNDS,
    OUT,
    TIE,
    find_lead,
    is_disturbed,
    next_slice,
    with_slice,
)
from edge_runtime.tuning.results import Accuracy, FullMeasurement, QuickLook, Slice, TuneResults, WayResult, with_full

ROOT = Path(__file__).parents[3]

TIME_S, RESERVE_S = 600.0, 80.0
"""The default of `tune --time`, and what tune.py reserves of it."""

WAYS = tuple(Way(name, "CPU", precision) for name in ("onnxruntime", "openvino") for precision in ("", "int8"))
TWELVE = [Candidate(way, layout) for way in WAYS for layout in thread_layouts(2)]
COST_S = {"way": 5.0, "quick": 6.0, "slice": 1.4, "full": 35.0}
"""As on two cores of a server: a daemon's start with its curve, a slice with its warm-up, a search at the objective."""

ONE, TWO = TWELVE[:2]


@dataclass
class Machine:
    """Twelve ways on a machine where other work comes in bursts. burst_s: their mean length. noise: of one slice."""

    seed: int
    burst_s: float = 2.0
    noise: float = 0.05
    load: float = 0.3
    spread: float = 0.5
    clock_s: float = 0.0
    known: TuneResults = field(default_factory=lambda: TuneResults({}, {}, {}))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rates = {each: 100 * math.exp(-self.random.random() * self.spread) for each in TWELVE}
        self.sensitivity = {each: self.random.uniform(0.95, 1.05) for each in TWELVE}
        self._is_on, self._turn_s = False, 0.0

    def truth(self, candidate: Candidate) -> float:
        """The rate of a run without end: other work takes its share."""
        return self.rates[candidate] * (1 - self.sensitivity[candidate] * self.load)

    def tune(self) -> None:
        """All steps within the time, as tune.py takes them."""
        space = Space(WAYS, 2, 1, Objective(0.99, 5.0), 1.0)
        while True:
            left_s = TIME_S - self.clock_s
            step = next_step(space, self.known, is_hurried=left_s < RESERVE_S)
            if step is None or (left_s <= 0 and has_answer(self.known)):
                break
            self._take(step)
        self.settled = is_settled(space, self.known)
        self.chosen = choose(space, self.known)

    def share_of_best(self) -> float:
        assert self.chosen is not None
        return self.truth(self.chosen.candidate) / max(map(self.truth, TWELVE))

    def _take(self, step: TuneStep) -> None:
        candidate, way = step.candidate, step.candidate.way
        others = self._others_over(COST_S[step.kind])
        scatter = math.exp(self.random.gauss(0, self.noise))
        rate = self.rates[candidate] * (1 - self.sensitivity[candidate] * others) * scatter
        if step.kind == "way":
            self.known.ways[way] = WayResult(way, "", way.precision or "f32", "", Accuracy(9, 0, 0, 1.0))
        elif step.kind == "quick":
            self.known.quick[candidate] = QuickLook(candidate, "", 0.01, rate)
        elif step.kind == "slice":
            look = self.known.quick[candidate]
            measured = min(max(others + self.random.gauss(0, 0.02), 0.0), 1.0)
            taken = with_slice(look.slices, Slice(step.round, rate, 0.02, measured))
            self.known.quick[candidate] = msgspec.structs.replace(look, slices=taken)
        else:
            taken_fully = FullMeasurement(candidate, "", rate * 0.8, 0.01, 0.02, 1)
            self.known.full[candidate] = with_full(self.known.full.get(candidate), taken_fully)

    def _others_over(self, seconds: float) -> float:
        """Move the clock; the share that other work took: bursts take one core of two."""
        end_s, busy_s = self.clock_s + seconds, 0.0
        share_on = self.load / 0.5
        while self.clock_s < end_s:
            if self._turn_s <= self.clock_s:
                self._is_on = not self._is_on
                mean_s = self.burst_s if self._is_on else self.burst_s * (1 - share_on) / share_on
                self._turn_s = self.clock_s + self.random.expovariate(1 / mean_s)
            until_s = min(end_s, self._turn_s)
            busy_s += (until_s - self.clock_s) * self._is_on
            self.clock_s = until_s
        return busy_s / seconds * 0.5


@pytest.mark.parametrize("burst_s", [0.3, 2.0, 10.0])
def test_the_best_of_twelve_is_found_within_the_time_beside_30_percent_of_other_work(burst_s: float) -> None:
    machines = [Machine(seed, burst_s) for seed in range(10)]
    for machine in machines:
        machine.tune()
    shares = [machine.share_of_best() for machine in machines]
    found = [each for each, machine in zip(shares, machines, strict=True) if machine.settled and each >= 1 - TIE]
    assert min(shares) >= 0.9
    assert len(found) >= 9


def test_a_single_look_that_other_work_spoilt_drops_nothing() -> None:
    """The fault: OpenVINO's int8, twice as quick, met one burst and was gone."""
    slices = {ONE: tuple(Slice(n, 100.0) for n in range(1, 4)), TWO: (Slice(1, 20.0, 0, 0.45), Slice(2, 200.0, 0))}
    running = next_slice([ONE, TWO], slices)
    assert running == (TWO, 3)


def test_a_candidate_sits_out_only_after_enough_rounds() -> None:
    for rounds in range(1, MIN_ROUNDS + 1):
        slices = {ONE: tuple(Slice(n, 100.0) for n in range(1, rounds + 1)),
                  TWO: tuple(Slice(n, 10.0) for n in range(1, rounds + 1))}  # fmt: skip
        lead = find_lead([ONE, TWO], slices)
        assert lead.leader == ONE
        assert (lead.doubts[TWO] < OUT) is (rounds == MIN_ROUNDS)


def test_a_disturbed_slice_is_taken_again_within_a_bound_and_the_calmest_counts() -> None:
    taken = {ONE: (Slice(1, 100.0), Slice(2, 100.0)), TWO: (Slice(1, 90.0), Slice(2, 50.0, 0.0, 0.4))}
    for take in range(2, MAX_TAKES + 1):
        assert next_slice([ONE, TWO], taken) == (TWO, 2)
        taken[TWO] = with_slice(taken[TWO], Slice(2, 60.0, 0.0, 0.5))
        assert (taken[TWO][-1].rate, taken[TWO][-1].takes) == (50.0, take)
    assert next_slice([ONE, TWO], taken) != (TWO, 2)
    assert with_slice(taken[TWO], Slice(2, 88.0, 0.0, 0.0))[-1].rate == 88.0


def test_other_work_that_is_always_there_is_no_reason_to_look_again() -> None:
    always = Slice(3, 100.0, 0.0, 0.3)
    assert not is_disturbed(always, usual=0.29)
    assert is_disturbed(always, usual=0.1)
    assert not is_disturbed(Slice(3, 100.0, 0.0, CALM), usual=0.0)


def test_pairs_that_met_the_same_drift_compare_exactly() -> None:
    drift = [1.0, 0.4, 0.9, 0.3, 0.7, 1.2]
    slices = {ONE: tuple(Slice(n, 100.0 * each) for n, each in enumerate(drift, 1)),
              TWO: tuple(Slice(n, 110.0 * each) for n, each in enumerate(drift, 1))}  # fmt: skip
    lead = find_lead([ONE, TWO], slices)
    assert lead.leader == TWO
    found = lead.behind[ONE]
    assert found is not None
    assert math.exp(found.mean) == pytest.approx(1 / 1.1)
    assert lead.is_settled


def test_a_newcomer_waits_for_a_round_that_it_can_begin() -> None:
    slices = {ONE: tuple(Slice(n, 100.0) for n in range(1, 6))}
    late = Candidate(WAYS[0], ThreadLayout(3, 3))
    assert next_slice([ONE, late], slices) == (late, 6)


def test_a_slice_whose_answers_all_came_late_does_not_undo_the_others() -> None:
    slices = {ONE: tuple(Slice(n, 100.0) for n in range(1, 13)),
              TWO: tuple(Slice(n, 0.0 if n in (4, 9, 11) else 300.0) for n in range(1, 13))}  # fmt: skip
    lead = find_lead([ONE, TWO], slices)
    assert lead.leader == TWO


def test_tuning_and_benchmarks_measure_by_no_clock_that_anybody_can_set() -> None:
    files = [*(ROOT / "edge_runtime" / "tuning").glob("*.py"), *(ROOT / "bench").glob("*.py")]
    files.append(ROOT / "edge_runtime" / "doors" / "zmq" / "load_generator.py")
    assert len(files) > 30
    found = [path.name for path in files if re.search(r"\btime\.time(_ns)?\(", path.read_text(encoding="utf-8"))]
    assert found == []


class SteppingCalendar:
    """The machine's calendar clock, which somebody sets at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return (-1) ** self.looks * 1e9 * self.looks


def test_other_work_is_measured_whatever_the_calendar_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calendar = SteppingCalendar()
    monkeypatch.setattr(time, "time", calendar)
    cores = sorted(os.sched_getaffinity(0))
    lines = ["cpu 9 9 9 9 0 0 0 0 0 0", *(f"cpu{core} 100 0 0 100 0 0 0 0 0 0" for core in cores)]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    others = OtherWork()
    (tmp_path / "stat").write_text("\n".join(line.replace(" 100 0 0 100", " 150 0 0 150") for line in lines))
    assert others.share() == pytest.approx(0.5)
    assert calendar.looks == 0
