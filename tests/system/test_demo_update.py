"""The demonstration of updates from outside: its summary is what it promises, and it leaves nothing behind."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.update_demo import what_is_wrong
from tests.fakes.demo_process import LIMIT_S, demo_process, read_until, stop

pytestmark = pytest.mark.long


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demonstration with its output as a pipe."""
    with demo_process("demo.update_demo", "--json") as started:
        yield started


def test_a_better_release_is_taken_and_two_bad_ones_are_rolled_back_with_no_request_lost(
    demo: subprocess.Popen[str],
) -> None:
    shown, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, shown
    summary = json.loads(shown.splitlines()[-1])
    assert what_is_wrong(summary) == []
    assert summary["lost"] == 0
    assert summary["asked"] == sum(summary["answered_by"].values()) > 1000
    assert summary["accuracy"]["1"] < 0.9 < 0.97 < summary["accuracy"]["2"]
    assert summary["serves"] == 2
    assert re.search(r"^digits +3 +its golden output is wrong", shown, re.MULTILINE), shown
    assert re.search(r"^digits +4 +a run takes p95 .* ms; before it took", shown, re.MULTILINE), shown


def test_a_summary_that_breaks_a_promise_is_named() -> None:
    good = {
        "accuracy": {"1": 0.8, "2": 0.99}, "asked": 30, "answered_by": {"1": 10, "2": 20}, "lost": 0,
        "refused": {"3": "its golden output is wrong", "4": "a run takes p95 20 ms"}, "serves": 2,
        "ended_in_order": True,
    }  # fmt: skip
    assert what_is_wrong(good) == []
    assert what_is_wrong({**good, "lost": 1}) == ["a request was lost"]
    assert what_is_wrong({**good, "serves": 4}) == ["version 2 does not serve"]
    assert what_is_wrong({**good, "refused": {}})[0] == "versions 3 and 4 were not both refused"


def test_stopped_in_the_middle_it_leaves_no_process_and_no_folder(demo: subprocess.Popen[str]) -> None:
    shown = read_until(demo, "ready after")
    found = re.search(r"ipc://(\S+)/infer\.sock", shown)
    assert found is not None
    children = psutil.Process(demo.pid).children()
    assert len(children) == 2
    stop(demo)
    assert not Path(found[1]).exists()
    assert psutil.wait_procs(children, timeout=60)[1] == []
