"""A rollout raises, waits and stops by counts alone: tables of cases, laws that hold always, and simulated fleets."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_runtime.fleet.fleet import AssignedRelease, Fleet, ReleaseFates
from edge_runtime.rollouts.plan import RolloutAct, RolloutPlan, RolloutPosition, chance_of, decide_rollout
from edge_runtime.updates.release_checks import share

PLAN = RolloutPlan(hold_s=100.0)
WAIT, RAISE, STOP, FINISH = RolloutAct.WAIT, RolloutAct.RAISE, RolloutAct.STOP, RolloutAct.FINISH


def fates(of: int = 1_000, **counts: int) -> ReleaseFates:
    """The rest of the devices are not meant."""
    meant = sum(counts.get(name, 0) for name in ("installed", "refused", "passed_over", "waiting", "silent"))
    return ReleaseFates(**{"devices": of, "not_meant": of - meant, **counts})


@pytest.mark.parametrize(
    ("step", "seen", "after_s", "act", "reason"),
    [
        (0, fates(waiting=10), 1, WAIT, "holds 1 %"),
        (0, fates(installed=10), 99, WAIT, "holds 1 %"),
        (0, fates(installed=10), 100, RAISE, "10 run it, 0 refused it"),
        (3, fates(of=10, installed=10), 100, FINISH, "10 run it"),
        # Refusals: at once where they are two, after the hold where the one is of few.
        (0, fates(refused=2, waiting=8), 1, STOP, "2 of 10 devices refused it"),
        (0, fates(refused=1, waiting=9), 1, WAIT, "holds"),
        (0, fates(refused=1, installed=9), 100, RAISE, "9 run it, 1 refused it"),
        (0, fates(refused=1, installed=8), 100, STOP, "1 of 9 devices refused it"),
        (0, fates(refused=1), 100, STOP, "1 of 1 devices refused it"),
        (1, fates(refused=2, installed=98), 100, RAISE, "98 run it, 2 refused it"),
        (1, fates(refused=3, installed=97), 1, STOP, "3 of 100 devices refused it"),
        (3, fates(refused=20, waiting=980), 1, WAIT, "holds"),
        (3, fates(refused=21, waiting=979), 1, STOP, "21 of 1000 devices refused it"),
        # No evidence: nothing is raised, however long it takes.
        (0, fates(of=0), 1e6, WAIT, "the broker knows no device"),
        (0, fates(waiting=10), 1e6, WAIT, "no device runs it yet; 10 wait for it"),
        (1, fates(installed=79, waiting=21), 1e6, WAIT, "79 of 100 devices have told; 80% must"),
        (1, fates(installed=80, waiting=20), 1e6, RAISE, "80 run it"),
        (1, fates(installed=10, passed_over=90), 1e6, RAISE, "10 run it"),
        (0, fates(), 1, RAISE, "no device falls into 1 %"),
        (3, fates(), 1e6, WAIT, "no device runs it yet"),
        # Silence: what is usual in this fleet is no fault; what the release brought is.
        (0, fates(installed=8, silent=2, went_silent=2), 1e6, RAISE, "8 run it"),
        (0, fates(installed=7, silent=3, went_silent=3), 1, STOP, "3 of the 10 devices that it is for do not answer"),
        (0, fates(installed=10, went_silent=9), 1, STOP, "9 of the 10 devices"),
        (0, fates(installed=1, silent=9, went_silent=9, not_meant_silent=850), 1, WAIT, "holds"),
    ],
)  # fmt: skip
def test_a_look_at_the_fleet_is_decided(
    step: int, seen: ReleaseFates, after_s: float, act: RolloutAct, reason: str
) -> None:
    found = decide_rollout(PLAN, RolloutPosition(step, 1_000.0), seen, 1_000.0 + after_s)
    assert (found.act, reason in found.reason) == (act, True), found


def test_a_stop_tells_the_most_frequent_reason() -> None:
    seen = ReleaseFates(
        devices=10, refused=5, waiting=5, reasons=({"kind": "refused", "reason": "p95 44 ms", "devices": 5},)
    )
    assert decide_rollout(PLAN, RolloutPosition(0, 0.0), seen, 1.0).reason == "5 of 10 devices refused it: p95 44 ms"


def test_a_clock_that_was_set_back_holds_no_longer_than_the_hold() -> None:
    found = decide_rollout(PLAN, RolloutPosition(0, 1e9), fates(installed=10), 1_000.0)
    assert (found.act, found.due_s) == (WAIT, 1_100.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"percents": (5.0,)}, ""),
        ({"percents": ()}, "steps are none"),
        ({"percents": (0.0, 5.0)}, "above 0"),
        ({"percents": (5.0, 101.0)}, "at most 100"),
        ({"percents": (5.0, 5.0)}, "rising"),
        ({"hold_s": -1.0}, "hold is -1 s"),
        ({"stop_share": 1.1}, "stop-at is 110.0%"),
    ],
)
def test_a_plan_that_cannot_be_says_why(changes: dict[str, Any], fault: str) -> None:
    found = RolloutPlan(**changes).fault()
    assert found == fault if not fault else fault in found


# ---- laws -----------------------------------------------------------------------------------------------------------

COUNTS = st.integers(0, 300)
SEEN = st.builds(
    lambda installed, refused, passed_over, waiting, silent, not_meant, went: ReleaseFates(
        devices=installed + refused + passed_over + waiting + silent + not_meant,
        installed=installed,
        refused=refused,
        passed_over=passed_over,
        waiting=waiting,
        silent=silent,
        not_meant=not_meant,
        went_silent=min(silent + went, installed + refused + passed_over + waiting + silent),
    ),
    COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS,
)  # fmt: skip
STEPS = st.integers(0, 3)
TIMES = st.floats(0, 1e5)


@given(SEEN, STEPS, TIMES, st.floats(0, 1))
def test_nothing_is_raised_before_the_hold_is_over_or_without_a_device_that_runs_it(
    seen: ReleaseFates, step: int, after_s: float, silent_share: float
) -> None:
    found = decide_rollout(PLAN, RolloutPosition(step, 0.0, silent_share), seen, after_s)
    if found.act in (RAISE, FINISH) and seen.not_meant < seen.devices:
        assert after_s >= PLAN.hold_s
        assert seen.installed > 0
        assert seen.installed + seen.refused >= 0.8 * (seen.installed + seen.refused + seen.waiting)
    assert (found.act is FINISH) <= (step == 3)
    assert (found.act is RAISE) <= (step < 3)


@given(SEEN, STEPS, TIMES, st.floats(0, 1))
def test_more_than_the_share_of_refusals_never_raises(
    seen: ReleaseFates, step: int, after_s: float, silent_share: float
) -> None:
    assume(seen.refused >= 2)
    assume(seen.refused > PLAN.stop_share * (seen.installed + seen.refused + seen.waiting))
    assert decide_rollout(PLAN, RolloutPosition(step, 0.0, silent_share), seen, after_s).act is STOP


@given(SEEN, STEPS, TIMES, st.integers(1, 300))
def test_a_rollout_that_stops_stops_with_more_refusals_too(
    seen: ReleaseFates, step: int, after_s: float, more: int
) -> None:
    assume(decide_rollout(PLAN, RolloutPosition(step, 0.0), seen, after_s).act is STOP)
    moved = min(more, seen.waiting + seen.installed)
    from_waiting = min(moved, seen.waiting)
    worse = replace(
        seen,
        refused=seen.refused + moved,
        waiting=seen.waiting - from_waiting,
        installed=seen.installed - (moved - from_waiting),
    )
    assert decide_rollout(PLAN, RolloutPosition(step, 0.0), worse, after_s).act is STOP


@given(st.integers(0, 2_000), st.integers(0, 2_000), st.floats(0, 1))
@settings(max_examples=50)
def test_a_chance_is_one_and_falls_with_the_count(count: int, of: int, usual: float) -> None:
    count = min(count, of)
    found = chance_of(count, of, usual)
    assert -1e-9 <= found <= 1 + 1e-6
    assert chance_of(min(count + of // 10, of), of, usual) <= found + 1e-6


# ---- simulated fleets -----------------------------------------------------------------------------------------------

DEVICES = 1_000


class SimulatedFleet:
    """Devices that take the release where its percentage includes them, and refuse it where it is slow for them.

    They speak through the states that daemons publish, so that the count of the fleet is part of what is measured.
    """

    def __init__(self, seed: int, slow_share: float) -> None:
        chooser = random.Random(seed)
        self.now_s = 1_795_752_000.0
        self.fleet = Fleet(self.now_s)
        self.fleet.listening_s = self.now_s
        self.manifest = f"{chooser.getrandbits(256):064x}"
        self.ids = [f"cam-{number}" for number in range(DEVICES)]
        self.slow = {each for each in self.ids if chooser.random() < slow_share}
        self.took: set[str] = set()
        for each in self.ids:
            self.fleet.say_status(each, "online", self.now_s, is_retained=True)
            self.say(each, 1)

    def say(self, device: str, release: int, refused: bool = False) -> None:
        note = {"model": "digits", "release": 2, "reason": "a run takes p95 44 ms; before it took p95 10 ms"}
        state = {
            "health": "ok", "interval_s": 15.0, "models": {"digits": {"version": release, "versions": []}},
            "update": {
                "state": "idle", "group": "line-1", "device_id": device, "refused": [note] if refused else [],
                "models": {"digits": {"release": release}},
            },
        }  # fmt: skip
        self.fleet.say_state(device, json.dumps(state).encode(), self.now_s, is_retained=False)

    def give(self, percent: float) -> None:
        """Let the devices that the percentage adds take the release."""
        for each in self.ids:
            if each not in self.took and share(each, self.manifest) < percent:
                self.took.add(each)
                self.say(each, 1 if each in self.slow else 2, refused=each in self.slow)

    def roll_out(self, plan: RolloutPlan) -> tuple[RolloutAct, float]:
        """How it ended, and the share of the devices that ran the release by then."""
        step, since_s = 0, self.now_s
        self.give(plan.percents[0])
        while True:
            release = AssignedRelease("line-1", "digits", 2, 2, plan.percents[step], self.manifest)
            seen = self.fleet.fates(self.now_s, release)
            found = decide_rollout(plan, RolloutPosition(step, since_s), seen, self.now_s)
            if found.act in (STOP, FINISH):
                return found.act, len(self.took) / DEVICES
            if found.act is RAISE:
                step, since_s = step + 1, self.now_s
                self.give(plan.percents[step])
            else:
                assert found.due_s is not None, found
                self.now_s = found.due_s
                for each in self.ids:  # they publish all the time
                    self.fleet.say_status(each, "online", self.now_s, is_retained=False)


@pytest.mark.parametrize(("slow_share", "most"), [(0.5, 0.03), (0.05, 0.12)])
def test_a_release_that_is_slow_on_some_devices_stops_before_many_ran_it(slow_share: float, most: float) -> None:
    """The promise of the verb: the median of 20 fleets of 1 000 devices, each with other devices that are slow."""
    ends = [SimulatedFleet(seed, slow_share).roll_out(PLAN) for seed in range(20)]
    assert sum(act is STOP for act, _ in ends) >= 19
    assert statistics.median(ran for _, ran in ends) <= most


def test_a_release_that_one_device_in_500_refuses_reaches_all() -> None:
    ends = [SimulatedFleet(seed, 0.002).roll_out(PLAN) for seed in range(5)]
    assert [act for act, _ in ends] == [FINISH] * 5
