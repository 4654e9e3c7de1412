"""Set-up says what is missing before it does anything, and the lock installs the same packages everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements/dev.lock").read_text()


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder before all others in PATH, for commands that a machine might have instead of its own."""
    folder = tmp_path / "commands"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user does: not as a part of the make that may be running these tests."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "VENV", "PYTHON", "ARGS")
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", *arguments], env=inherited | environment, capture_output=True, text=True, timeout=300, check=False
    )


def set_up(commands: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Ask make for a virtual environment beside the checkout's own, which stays as it is."""
    venv = commands.parent / "venv"
    path = f"{commands}:{os.environ['PATH']}"
    return make("--directory", str(ROOT), f"PYTHON={python}", f"VENV={venv}", f"{venv}/.ready", PATH=path)


def without_venv(commands: Path) -> None:
    """A Python as Debian ships it: no module that makes virtual environments."""
    put(commands, "bare-python", f'case "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"')


def test_make_alone_lists_what_a_user_can_ask_for() -> None:
    listed = make("--directory", str(ROOT))
    assert listed.returncode == 0
    for name in ("demo", "demo-update", "test", "bench", "lint", "lock", "wheel", "clean"):
        assert re.search(rf"^  {name} +\S", listed.stdout, re.MULTILINE), name


@pytest.mark.parametrize(("got", "is_wanted"), [((3, 9), False), ((3, 10), True), ((3, 13), True), ((3, 14), False)])
def test_the_python_that_is_accepted_is_the_one_that_the_package_states(got: tuple[int, int], is_wanted: bool) -> None:
    check = re.search(r"^CHECK_VERSION = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert check is not None
    pretend = f"import sys; sys.version_info = {(*got, 0)}; {check[1]}"
    status = subprocess.run([sys.executable, "-c", pretend], timeout=300, check=False).returncode
    assert (status == 0) is is_wanted
    low, high = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].split(",")
    assert ((3, int(low.removeprefix(">=3."))) <= got < (3, int(high.removeprefix("<3.")))) is is_wanted


def test_a_python_too_old_is_refused_by_its_version_and_what_to_install(commands: Path) -> None:
    put(commands, "old-python", 'case "$1" in --version) echo "Python 3.8.10";; *) exit 1;; esac')
    refused = set_up(commands, "old-python")
    assert refused.returncode != 0
    assert "got Python 3.8.10, wanted Python 3.10 to 3.13" in refused.stderr
    assert "apt-get install python3" in refused.stderr
    assert not (commands.parent / "venv").exists()


def test_a_missing_python_is_named_with_its_apt_line(commands: Path) -> None:
    refused = set_up(commands, "python-of-nobody")
    assert refused.returncode != 0
    assert "'python-of-nobody' is not there" in refused.stderr
    assert "sudo apt-get install python3 python3-venv" in refused.stderr


def test_a_user_without_python3_venv_gets_the_apt_line(commands: Path) -> None:
    without_venv(commands)
    put(commands, "id", "echo 1000")
    refused = set_up(commands, "bare-python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert refused.returncode != 0
    assert f"Do: sudo apt-get install python{version}-venv" in refused.stderr
    assert not (commands.parent / "venv").exists()


def test_root_without_python3_venv_gets_it_installed(commands: Path) -> None:
    without_venv(commands)
    put(commands, "id", "echo 0")
    asked = commands / "asked"
    put(commands, "apt-get", f'echo "$*" >> {asked}\ncase "$1" in install) exit 7;; esac')
    stopped = set_up(commands, "bare-python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert asked.read_text().splitlines() == ["update -qq", f"install -y -qq python{version}-venv"]
    # This apt-get failed to install it: set-up ends there, and is not taken for done.
    assert stopped.returncode != 0
    assert not (commands.parent / "venv" / ".ready").exists()


def test_every_locked_package_has_an_exact_version_and_hashes() -> None:
    entries = re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", LOCK, flags=re.MULTILINE).strip())
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==[0-9a-z.]+ ; ", entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_the_lock_names_no_index_and_no_path() -> None:
    for word in ("://", "--index-url", "--extra-index-url", "--find-links", " @ ", "file:"):
        assert word not in LOCK


def test_a_group_that_only_developers_need_is_not_an_extra_of_the_published_package() -> None:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not {"dev", "docs", "demo", "digits", "test"} & read["project"]["optional-dependencies"].keys()
    assert {"dev", "docs", "digits"} <= read["dependency-groups"].keys()


def test_everything_that_the_project_requires_is_locked() -> None:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = read["project"]
    locked = set(re.findall(r"^([a-z0-9-]+)==", LOCK, re.MULTILINE))
    required = [*project["dependencies"], *read["dependency-groups"]["dev"]]
    for extra in ("onnxruntime", "openvino", "mqtt", "prometheus", "update", "publish"):
        required += project["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=; ]", requirement)[0].replace(".", "-") for requirement in required} - {"edge-runtime"}
    assert names <= locked


def test_set_up_is_done_again_when_the_lock_changes(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    for name in ("Makefile", "requirements/dev.lock", "pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    ready = tmp_path / ".venv" / ".ready"
    ready.parent.mkdir()
    ready.touch()
    asked = ("--directory", str(tmp_path), "--question", ".venv/.ready")
    assert make(*asked).returncode == 0
    later = ready.stat().st_mtime + 10
    os.utime(tmp_path / "requirements/dev.lock", (later, later))
    assert make(*asked).returncode == 1
