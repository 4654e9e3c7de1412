"""`.ci/tests` runs failed tests once more, counts those that then pass, and fails where they are too many."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = f"test:\n\t@{sys.executable} -m pytest -q test_it.py $(ARGS)\n"
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""No plug-in is wanted here, and each is imported by each run."""

TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({unsteady}))
def test_unsteady(number):
    mark = pathlib.Path(f"seen-{{number}}")
    was_here = mark.exists()
    mark.touch()
    assert was_here

@pytest.mark.parametrize("number", range({broken}))
def test_broken(number):
    assert False
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, and a Makefile that runs one file of tests."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "build" / "ci").mkdir(parents=True)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    return tmp_path


def run(checkout: Path, unsteady: int, broken: int = 0) -> tuple[int, int]:
    """Run tests of which some fail the first time and some always: exit status, and how many are listed as unsteady."""
    (checkout / "test_it.py").write_text(TESTS.format(unsteady=unsteady, broken=broken))
    for mark in checkout.glob("seen-*"):
        mark.unlink()
    done = subprocess.run(
        [checkout / ".ci" / "tests", "main", "test"],
        cwd=checkout, env=ENVIRONMENT, capture_output=True, text=True, timeout=1200, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    listed = checkout / "build" / "ci" / "unsteady"
    return done.returncode, len(listed.read_text().splitlines()) if listed.exists() else 0


@pytest.mark.parametrize(
    ("unsteady", "broken", "passes", "listed"),
    [(0, 0, True, 0), (1, 0, True, 1), (3, 0, True, 3), (4, 0, False, 0), (0, 1, False, 0), (1, 1, False, 0)],
)
def test_up_to_three_tests_may_fail_once_and_none_twice(
    checkout: Path, unsteady: int, broken: int, passes: bool, listed: int
) -> None:
    status, found = run(checkout, unsteady, broken)
    assert (status == 0, found) == (passes, listed)


def test_unsteady_tests_of_all_phases_are_counted_together(checkout: Path) -> None:
    assert run(checkout, 2) == (0, 2)
    assert run(checkout, 1) == (0, 3)
    status, listed = run(checkout, 1)
    assert status != 0
    assert listed == 4


CRASHING = """
import os, pytest

@pytest.mark.parametrize("number", range(5))
def test_crashing(number):
    if number in (2, 4):
        open("crashes", "a").write(f"{number} ")
        os._exit(1)
"""


def test_a_test_that_ends_its_process_fails_once_and_the_rest_of_its_file_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CRASHING)
    words = ["-p", "xdist", "-p", "tests.runs", "-n", "1", "--dist", "loadfile", "-q", "test_it.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "2 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "crashes").read_text() == "2 4 "
