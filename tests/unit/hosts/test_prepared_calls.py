"""Functions that are called once in processes forked from a prepared parent: as bounded and watched as any child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.sandbox.ending import Cause, ChildLimits
from edge_runtime.sandbox.landlock import guard
from tests.fakes import sandboxed_work
from tests.fakes.sandboxed_work import WAYS_TO_FAIL, Attempt, Sum, Work, add, attempt, misbehave, tell_prepared

LIMITS = ChildLimits(60.0)
"""Far more than any of these needs."""

Call = Callable[..., Any]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def call(hosts: Hosts) -> Call:
    def call_one(function: Any, task: Any, limits: ChildLimits = LIMITS, what: str = "sums", **options: Any) -> Any:
        return hosts.call(function, task, prepare=sandboxed_work.prepare, what=what, limits=limits, **options)

    return call_one


def forked() -> list[psutil.Process]:
    """Processes below the prepared parents of this one."""
    return [each for parent in psutil.Process().children() for each in parent.children()]


def test_calls_share_what_their_parent_imported_and_each_has_a_process_of_its_own(call: Call) -> None:
    first, second = (call(tell_prepared, Work()).result for _ in range(2))
    assert first == second
    assert first["prepared"] == "sums"
    assert first["parent"] != str(os.getpid())
    assert call(tell_prepared, Work(), what="products").result["prepared"] == "products"


def test_a_call_is_confined_as_any_child_is(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    seen = call(tell_prepared, Work(), what="confined", niceness=3).result
    assert seen["niceness"] == str(os.nice(0) + 3)
    assert (seen["core"], seen["no_new_privileges"], seen["key"]) == ("(0, 0)", "1", "")
    assert (seen["capabilities"], seen["goes_first"], seen["descriptors"]) == ("0", "1000", "True")
    assert seen["ipv4"] != "allowed"
    assert (seen["folder"], seen["stdin"]) == ("/", "b''")


@pytest.mark.skipif(bool(guard().unguarded), reason="this kernel's Landlock guards less")
def test_a_call_sees_of_the_disk_what_it_is_given(call: Call, tmp_path: Path) -> None:
    given, work, other = tmp_path / "given", tmp_path / "work", tmp_path / "other"
    for path in (given, other):
        path.write_text("x")
    (work / "part").mkdir(parents=True)
    made = str(work / "part" / "made")
    steps = [("read", str(given)), ("write", str(given)), ("write", made), ("move", made), ("read", str(other))]
    ending = call(attempt, Attempt(steps), reads=[given], writes=[work])
    assert ending.result == ["", "EACCES", "", "", "EACCES"]


def test_stages_and_a_result_come_out(call: Call) -> None:
    stages: list[tuple[str, float | None]] = []
    ending = call(add, Work(amount=10), show=lambda *stage: stages.append(stage))
    assert (ending.cause, ending.result, ending.reason) == (Cause.RETURNED, Sum(45), "")
    assert stages == [("adding", 0.0), ("adding", 0.25), ("adding", 0.5), ("adding", 0.75), ("resting", None)]


@pytest.mark.parametrize(("name", "cause", "reason"), WAYS_TO_FAIL)
def test_a_failure_in_a_call_has_a_cause_and_a_reason(call: Call, name: str, cause: Cause, reason: str) -> None:
    ending = call(misbehave, Work(name))
    assert (ending.cause, ending.reason, ending.result) == (cause, reason, None)
    assert forked() == []


def test_a_call_over_its_time_or_its_memory_or_stopped_is_ended(call: Call) -> None:
    assert call(misbehave, Work("hang"), ChildLimits(1.0)).reason == "it was not done within 1 s"
    ending = call(misbehave, Work("hungry"), ChildLimits(60.0, 200 << 20))
    assert ending.reason == f"it took more than the {200 << 20} bytes of memory that it may have"
    stop = threading.Event()
    stop.set()
    assert call(misbehave, Work("hang"), stop=stop).cause is Cause.STOPPED
    assert forked() == []


def test_text_that_a_library_prints_is_not_a_report(call: Call) -> None:
    assert call(misbehave, Work("print")).result == Sum(1)


def test_a_parent_that_only_lacks_a_library_lets_the_call_say_so(call: Call) -> None:
    assert call(tell_prepared, Work(), what="surprise").result["prepared"] == ""


def test_a_parent_that_dies_of_an_import_calls_nothing(call: Call) -> None:
    with pytest.raises(LoadFailed, match="importing crash failed: its process was ended by SIGSEGV"):
        call(add, Work(), what="crash")


def test_a_stop_ends_the_wait_for_an_import(call: Call) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(LoadFailed, match="it was stopped"):
        call(add, Work(), what="hang", stop=stop)
