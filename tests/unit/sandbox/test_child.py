"""A child is fed, watched, bounded and ended; nothing that it does or leaves behind stays."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_runtime.sandbox.child import run_child, start_child
from edge_runtime.sandbox.ending import Cause, ChildLimits, judge_ending
from tests.conftest import children_now
from tests.fakes.marked_processes import marked
from tests.fakes.sandboxed_work import WAYS_TO_FAIL, Sum, Work, add, count_lines, describe, misbehave

LIMIT_S = 60.0
"""Far more than any of these needs."""


def test_a_task_goes_in_and_stages_and_a_result_come_out() -> None:
    stages: list[tuple[str, float | None]] = []
    ending = run_child(add, Work(amount=10), limit_s=LIMIT_S, show=lambda *stage: stages.append(stage))
    assert (ending.cause, ending.result, ending.reason) == (Cause.RETURNED, Sum(45), "")
    assert stages == [("adding", 0.0), ("adding", 0.25), ("adding", 0.5), ("adding", 0.75), ("resting", None)]


@pytest.mark.parametrize(("name", "cause", "reason"), WAYS_TO_FAIL)
def test_a_failure_in_a_child_has_a_cause_and_a_reason(name: str, cause: Cause, reason: str) -> None:
    ending = run_child(misbehave, Work(name), limit_s=LIMIT_S)
    assert (ending.cause, ending.reason, ending.result) == (cause, reason, None)
    assert list(children_now()) == []


def test_the_code_of_an_error_comes_with_it() -> None:
    assert run_child(misbehave, Work("raise"), limit_s=LIMIT_S).code == "load_failed"
    assert run_child(misbehave, Work("surprise"), limit_s=LIMIT_S).code == ""


def test_a_child_over_its_time_or_its_memory_or_stopped_is_ended() -> None:
    assert run_child(misbehave, Work("hang"), limit_s=1.0).reason == "it was not done within 1 s"
    ending = run_child(misbehave, Work("hungry"), limit_s=LIMIT_S, memory_bytes=200 << 20)
    assert ending.reason == f"it took more than the {200 << 20} bytes of memory that it may have"
    stop = threading.Event()
    stop.set()
    assert run_child(misbehave, Work("hang"), limit_s=LIMIT_S, stop=stop).cause is Cause.STOPPED
    assert list(children_now()) == []


def test_a_child_that_takes_no_cpu_for_too_long_is_ended_and_a_busy_one_is_not() -> None:
    idle = ChildLimits(idle_s=1.5)
    ending = run_child(misbehave, Work("hang"), limit_s=LIMIT_S, written=idle)
    assert (ending.cause, ending.reason) == (Cause.IDLE, "it did nothing for 1.5 s, and was ended")
    assert run_child(misbehave, Work("busy"), limit_s=LIMIT_S, written=idle).result == Sum(1)
    assert list(children_now()) == []


def test_text_that_a_library_prints_is_not_a_report_and_costs_no_memory() -> None:
    ending = run_child(misbehave, Work("print"), limit_s=LIMIT_S)
    assert ending.result == Sum(1)


@pytest.mark.parametrize(("rests_s", "limit_s", "cause"), [(1, LIMIT_S, Cause.RETURNED), (600, 3.0, Cause.TIMED_OUT)])
def test_an_endless_stream_from_a_process_that_left_the_group_is_cut_off(
    rests_s: int, limit_s: float, cause: Cause
) -> None:
    mark = f"mark-{uuid.uuid4()}"
    flood = Work("flood", mark, amount=rests_s)
    assert run_child(misbehave, flood, limit_s=limit_s, has_children=True).cause is cause
    assert marked(mark) == []


def test_an_error_of_any_length_is_cut() -> None:
    assert len(run_child(misbehave, Work("large"), limit_s=LIMIT_S).reason) <= 2000


def test_a_process_that_a_child_started_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # what the child starts holds it open as long as it lives
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(fifo.read_bytes)
        assert run_child(misbehave, Work("leave", str(fifo)), limit_s=LIMIT_S, writes=[fifo]).result == Sum(1)
        assert ended.result(60) == b""


def test_a_child_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    facts = run_child(describe, Work(), limit_s=LIMIT_S, niceness=3).result
    assert facts is not None
    network = {facts.pop("ipv4"), facts.pop("ipv6")}
    assert facts == {
        "core": "(0, 0)",
        "parent": str(os.getpid()),
        "niceness": str(os.nice(0) + 3),
        "folder": "/",
        "key": "",
        "stdin": "b''",
        "no_new_privileges": "1",
        "capabilities": "0",
        "goes_first": "1000",
        "descriptors": "True",
        "unix": "allowed",
    }
    assert network <= {"Permission denied", "Address family not supported by protocol"}


def test_a_child_that_lives_on_is_talked_to_over_its_own_channel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = start_child(count_lines, Work(amount=theirs.fileno()), pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            ours.settimeout(LIMIT_S)
            for count in (1, 2):
                ours.send(b"x")
                assert ours.recv(1) == bytes((count,))
            assert child.is_alive()
            os.kill(child.pid, 9)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert not child.is_alive()
        finally:
            status = child.end()
        assert child.end() == status
    assert judge_ending(status).cause is Cause.KILLED
