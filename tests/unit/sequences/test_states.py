"""States in a host: what they are counted as, and what code keeps for its sequences, within a bound."""

from __future__ import annotations

import types

import numpy as np
import pytest

from edge_runtime.errors import RunFailed, SequenceLost
from edge_runtime.kept_state import END, KeptSteps, SequenceOptions, SequenceSettings, row_type
from edge_runtime.sequences.states import KeptValues, size_of, stateful
from tests.fakes.clock import FakeClock
from tests.unit.sequences.test_live import Sum

MEGABYTE = 1 << 20


class Values:
    """The values of two sequences at most, at most 1 MiB of all."""

    def __init__(self, slots=4):
        self.done = KeptSteps(slots)
        self.clock = FakeClock()
        settings = SequenceSettings(values_mb=1, idle_ms=10_000)
        self.kept = KeptValues(slots, settings, self.done, self.clock.monotonic_s)

    def step(self, slot, steps, nbytes, flags=0):
        rows = line(slot, steps, flags)
        if steps:
            self.done.check(rows)
        values = self.kept.gather(rows["slot"], rows["steps"], rows["steps"] == 0)
        values["heard"] = b"x" * nbytes
        self.kept.scatter(rows, values)
        self.done.move_on(rows)


def line(slot, steps, flags=0):
    rows = np.zeros(1, row_type())
    rows["serial"], rows["slot"], rows["steps"], rows["flags"] = slot + 1, slot, steps, flags
    return rows


def test_values_beyond_the_bound_fail_the_run_and_the_state_stays():
    values = Values()
    values.step(0, 0, MEGABYTE // 2)
    with pytest.raises(RunFailed, match="at most 1,048,576 are kept"):
        values.step(0, 1, MEGABYTE)
    values.step(0, 1, 100)
    assert values.kept.gather(*[line(0, 2)[key] for key in ("slot", "steps")], line(0, 2)["steps"] == 0) == {
        "heard": b"x" * 100
    }


def test_values_of_a_sequence_that_ended_are_dropped_where_room_lacks_and_a_late_request_is_told():
    values = Values()
    values.step(0, 0, MEGABYTE // 2)
    values.step(0, 1, MEGABYTE // 2, END)  # what it gave is not kept
    values.step(0, 1, 10, END)  # the step before is, for a request that comes again
    values.step(1, 0, MEGABYTE // 2)
    with pytest.raises(SequenceLost):
        values.step(0, 1, 10, END)
    with pytest.raises(RunFailed):  # the other is not over
        values.step(2, 0, MEGABYTE // 2)


def test_values_of_a_sequence_that_is_idle_for_too_long_are_dropped_where_room_lacks():
    values = Values()
    values.step(0, 0, MEGABYTE // 2)
    values.clock.advance(9)
    values.step(1, 0, 100)
    with pytest.raises(RunFailed):
        values.step(2, 0, MEGABYTE // 2)
    values.clock.advance(2)
    values.step(2, 0, MEGABYTE // 2)
    with pytest.raises(SequenceLost):
        values.step(0, 1, 10)
    values.step(1, 1, 10)


def test_values_of_a_new_sequence_take_the_place_of_those_of_the_one_before_in_its_slot():
    values = Values()
    for _ in range(5):
        for steps in range(3):
            values.step(0, steps, MEGABYTE // 3)


class Tensor:
    """As a library's, whose numbers Python does not see."""

    nbytes = 3000


class Holder:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ({"a": b"x" * 1000}, 1000, 1600),
        ([np.zeros(1000, np.float32)] * 3, 4000, 4400),
        (np.zeros(100_000, np.uint8)[:10], 100_000, 100_400),
        (np.array([b"x" * 5000, None], object), 5000, 5400),
        (Holder({"deep": [b"x" * 2000]}), 2000, 3000),
        ({"module": types, "class": Holder, "function": line, "size": len}, 0, 800),
        (Tensor(), 3000, 3500),
    ],
)
def test_size_of_a_value_is_that_of_all_it_reaches(value, least, most):
    assert least <= size_of(value) <= most


def test_size_of_a_value_that_holds_itself_is_finite():
    value = [b"x" * 1000]
    value.append(value)
    assert 1000 < size_of(value) < 1300


def test_rests_of_declared_inputs_count_as_memory_and_bound_the_sequences_where_no_number_is_set():
    settings = SequenceSettings()
    plain = stateful(Sum(), SequenceOptions(settings))
    assert (plain.spec.sequences.slots, plain.memory_bytes) == (1024, 0)
    resting = stateful(Sum(), SequenceOptions(settings, rest_bytes=MEGABYTE))
    assert (resting.spec.sequences.slots, resting.memory_bytes) == (32, 64 * MEGABYTE)
