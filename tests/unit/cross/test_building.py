"""The lines that a build of a package or an image shows: steps, the result, and why there is none."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from cross.building import made_line, run_program, watched


def test_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with watched("laying out") as show_step:
        show_step("packing")
        show_step("packing")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["laying out …", "packing …"]


def test_a_file_that_was_made_is_named_with_its_size_and_digest(tmp_path: Path) -> None:
    made = tmp_path / "made.deb"
    made.write_bytes(b"x" * 1_500_000)
    assert made_line(made) == f"{made}  1.5 MB  sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}"


def test_a_build_that_is_done_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program("deb", lambda: None) == 0
    assert capsys.readouterr().err.endswith(" s in all\n")


def test_a_program_that_fails_is_named_with_its_status_and_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", "import sys; print('no such wheel', file=sys.stderr); sys.exit(3)"]
    assert run_program("deb", lambda: subprocess.run(words, check=True, capture_output=True)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"deb: {sys.executable}")
    assert said.endswith("failed with exit status 3\nno such wheel\n")


def test_a_disk_that_is_full_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> None:
        raise OSError(28, "No space left on device", "dist/x.deb")

    assert run_program("deb", build) == 1
    assert capsys.readouterr().err == "deb: [Errno 28] No space left on device: 'dist/x.deb'\n"
