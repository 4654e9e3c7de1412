"""One table says what an ending means: causes, and texts that stand alone or after a colon."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from edge_runtime.sandbox.ending import (
    Cause,
    ChildError,
    ChildLimits,
    ChildResult,
    Ending,
    is_from_outside,
    judge_ending,
    signal_name,
)

RESULT = ChildResult(msgspec.Raw(b"5"))
LIMITS = ChildLimits(2.5, 1000, folder="work", folder_bytes=2000)


@pytest.mark.parametrize(
    ("status", "ended_for", "cause", "reason"),
    [
        (-9, Cause.STOPPED, Cause.STOPPED, "it was stopped"),
        (-9, Cause.TIMED_OUT, Cause.TIMED_OUT, "it was not done within 2.5 s"),
        (-9, Cause.TOO_LARGE, Cause.TOO_LARGE, "it took more than the 1000 bytes of memory that it may have"),
        (-9, Cause.CROWDED, Cause.CROWDED, "it had more than 64 processes, and was ended"),
        (-9, Cause.OVERFULL, Cause.OVERFULL, "it wrote more than the 2000 bytes or 16384 files that it may have"),
        (-9, None, Cause.KILLED, "its process was killed (SIGKILL); is the device out of memory?"),
        (-11, None, Cause.CRASHED, "its process was ended by SIGSEGV: bad luck"),
        (-int(signal.SIGRTMIN) - 1, None, Cause.CRASHED, "its process was ended by signal 35: bad luck"),
        (0, None, Cause.SILENT, "its process ended with exit status 0 and no result: bad luck"),
        (3, None, Cause.SILENT, "its process ended with exit status 3 and no result: bad luck"),
    ],
)
def test_each_ending_without_a_report_has_its_cause_and_text(
    status: int, ended_for: Cause | None, cause: Cause, reason: str
) -> None:
    ending = judge_ending(status, ended_for=ended_for, output_text="bad luck", limits=LIMITS)
    assert (ending.cause, ending.reason, ending.result) == (cause, reason, None)


def test_a_child_that_another_process_of_ours_killed_ended_for_its_reason() -> None:
    ending = judge_ending(-9, killed_for="it had too many processes")
    assert (ending.cause, ending.reason) == (Cause.KILLED, "it had too many processes")


def test_a_result_and_an_error_are_the_childs_own_words() -> None:
    assert judge_ending(0, report=RESULT, result_type=int) == Ending(Cause.RETURNED, result=5)
    assert judge_ending(1, report=ChildError("no", "load_failed")) == Ending(Cause.RAISED, "no", code="load_failed")


def test_a_function_may_return_nothing() -> None:
    assert judge_ending(0, report=ChildResult(msgspec.Raw(b"null")), result_type=None).cause is Cause.RETURNED


def test_a_crash_counts_more_than_a_result_before_it_and_a_result_more_than_a_kill_after_it() -> None:
    assert judge_ending(-6, report=RESULT, result_type=int).cause is Cause.CRASHED
    assert judge_ending(-9, report=RESULT, result_type=int).cause is Cause.RETURNED
    assert judge_ending(-9, report=RESULT, result_type=int, ended_for=Cause.TIMED_OUT).cause is Cause.TIMED_OUT


@pytest.mark.parametrize("data", [b'"text"', b"{", b""])
def test_a_result_of_another_type_or_half_of_one_is_none(data: bytes) -> None:
    assert judge_ending(0, report=ChildResult(msgspec.Raw(data)), result_type=int).cause is Cause.SILENT


def test_a_result_that_is_nested_without_end_is_none() -> None:
    report = ChildResult(msgspec.Raw(b"[" * 100_000))
    assert judge_ending(0, report=report, result_type=dict[str, Any]).cause is Cause.SILENT
    assert judge_ending(0, report=report).cause is Cause.SILENT


def test_an_error_that_a_hostile_child_did_not_cut_is_cut() -> None:
    assert len(judge_ending(1, report=ChildError("x" * 100_000)).reason) == 2000


@pytest.mark.parametrize(
    ("status", "memory_ran_out", "is_outside"),
    [
        (-signal.SIGTERM, True, True),
        (-signal.SIGKILL, False, True),
        (-signal.SIGKILL, True, False),
        (-signal.SIGSEGV, False, False),
        (0, False, False),
        (signal.SIGTERM, False, False),
    ],
)
def test_only_a_signal_that_is_not_a_crash_comes_from_outside_unless_memory_ran_out(
    status: int, memory_ran_out: bool, is_outside: bool
) -> None:
    assert is_from_outside(status, memory_ran_out=memory_ran_out) is is_outside


def test_a_status_names_its_signal_also_one_without_a_name() -> None:
    assert [signal_name(status) for status in (0, 3, -11, -40)] == ["", "", "SIGSEGV", "signal 40"]
