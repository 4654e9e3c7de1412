"""Mutated files of every kind, dropped into a real daemon: a share of bench/mutated_files.py, the same each time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.mutated_files import is_good, soak
from tests.models.mutated_files import FOLDERS, MISSING, REAL

LIMIT_S = 120.0
EACH = 2


@pytest.mark.long  # it is about the libraries, whatever the Python
def test_mutated_files_of_every_kind_end_with_a_state_and_a_reason_and_harm_nothing(tmp_path: Path) -> None:
    home = tmp_path / "daemon"
    home.mkdir()
    kinds = [kind for kind in (*REAL, *FOLDERS) if kind not in MISSING]
    report = soak(home, kinds, EACH, EACH * len(kinds), time.monotonic() + LIMIT_S)
    assert is_good(report), report
    assert report["good_requests"] > 10
    assert {kind: sum(states.values()) for kind, states in report["states"].items()} == dict.fromkeys(kinds, EACH)
