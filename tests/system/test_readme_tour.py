"""The README's tour, as a new user runs it: its own commands and programs, against the daemon that it starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = README[README.index("\n## Five minutes") : README.index("\n## The rules")]
START_LIMIT_S = 60.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TOUR, re.DOTALL)


def commands() -> list[str]:
    """Every line of the tour that asks a running daemon."""
    lines = "".join(blocks("sh")).splitlines()
    return [line for line in lines if line.startswith("edge-runtime ") and not line.startswith("edge-runtime serve")]


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tour's folder, with its daemon running; `/tmp/tour` stands for it in the README."""
    folder = tmp_path_factory.mktemp("tour")
    shutil.copytree(ROOT / "demo" / "models" / "digits", folder / "models" / "digits")
    (serve,) = re.findall(r"^edge-runtime serve .+$", TOUR, re.MULTILINE)
    with (folder / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(words(serve, folder), env=environment(folder), stdout=log, stderr=log)
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not (folder / "infer.sock").exists() and daemon.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        assert (folder / "infer.sock").exists(), (folder / "daemon.log").read_text()
        yield folder
    finally:
        daemon.terminate()
        status = daemon.wait(START_LIMIT_S)
    assert status == 0, (folder / "daemon.log").read_text()


def words(line: str, folder: Path) -> list[str]:
    program, *rest = shlex.split(line.replace("/tmp/tour", str(folder)), comments=True)
    return [str(Path(sys.executable).with_name(program)), *rest]


def environment(folder: Path) -> dict[str, str]:
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", "".join(blocks("sh")), re.MULTILINE))
    return {**os.environ, **{name: value.replace("/tmp/tour", str(folder)) for name, value in exported.items()}}


def run(asked: list[str], folder: Path) -> str:
    done = subprocess.run(
        asked, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tour_has_commands_and_programs() -> None:
    assert len(commands()) >= 4
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_tour_succeeds_and_says_something(command: str, tour: Path) -> None:
    assert run(words(command, tour), tour).strip()


@pytest.mark.parametrize(
    ("block", "says"),
    [(0, r"^1 0\.\d+$"), (1, r"^\[\[.*\]\]$"), (2, r'^\{"id": ?null, ?"model_name": ?"digits"')],
    ids=["client", "in process", "json"],
)
def test_a_program_of_the_tour_prints_its_answer(block: int, says: str, tour: Path) -> None:
    program = blocks("python")[block].replace("/tmp/tour", str(tour))
    printed = run([sys.executable, "-W", "error", "-c", program], tour)
    assert re.search(says, printed.replace("\n ", " "), re.MULTILINE), printed
