"""`edge-runtime repo` as a person and a script use it: what it says before it signs, whom it asks, how it exits."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.extras import install_advice
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import BOUNDS_RUNTIME
from edge_runtime.publish.roles import rotate
from tests.fakes.publishing import PASSPHRASE, Publisher, TufDevice
from tests.models.onnx_models import wide

DIGITS = Path(__file__).parents[3] / "demo" / "models" / "digits"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Publisher(tmp_path / "repository").found().path
    monkeypatch.setenv("EDGE_RUNTIME_REPO", str(path))
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a verb that succeeds says as JSON."""
    status = main(["repo", *words, "--json"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    result: dict[str, Any] = json.loads(shown.out)
    return result


@pytest.mark.smoke
def test_init_makes_a_repository_that_devices_believe_and_says_what_it_signs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    path = tmp_path / "new"
    words = ("--root-keys", "2", "--root-threshold", "2", "--targets-keys", "1", "--days", "timestamp=2")
    done = run(capsys, "init", str(path), *words, "--yes")
    assert {each["role"]: each["keys"] for each in done["signed"]} == {
        "root": ["root-1", "root-2"],
        "targets": ["targets-1"],
        "snapshot": ["snapshot-1"],
        "timestamp": ["timestamp-1"],
    }
    root = Path(done["root"]).read_bytes()
    TufDevice(path, tmp_path / "device", root).check()
    monkeypatch.setenv("EDGE_RUNTIME_REPO", str(path))
    status = run(capsys, "status")
    assert [role["days_left"] for role in status["roles"] if role["role"] == "timestamp"] == [2.0]
    assert not [path for path in (path / "metadata").rglob("*") if "key" in path.name]


def test_the_files_that_will_be_signed_are_said_before(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repo", "add-team", "vision", "--yes"]) == 0
    shown = capsys.readouterr()
    assert "To add the team vision, this will sign:\n  team-vision version 1, good until " in shown.err
    assert "targets version 2, good until " in shown.err
    assert "with targets-1" in shown.err
    assert shown.out == "Done: add the team vision.\n"


@pytest.mark.parametrize("words", [["--json"], []])
def test_offline_keys_sign_nothing_without_yes_where_nobody_can_be_asked(
    words: list[str], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repo", "add-team", "vision", *words]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert not (repository / "metadata" / "2.targets.json").exists()


def test_refresh_by_cron_asks_nobody_and_needs_no_passphrase(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGE_RUNTIME_PASSPHRASE")
    assert [each["version"] for each in run(capsys, "refresh")["signed"]] == [2]


def test_a_wrong_passphrase_is_a_clear_error_and_changes_nothing(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "phrase").write_text("something else\n")
    words = ["repo", "add-team", "vision", "--online", "--yes", "--json", "--passphrase-file", str(tmp_path / "phrase")]
    assert main(words) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "publish_failed"
    assert "targets-1: wrong passphrase; nothing was signed" in error["message"]
    assert not (repository / "metadata" / "2.targets.json").exists()


def test_keys_are_rotated_and_revoked_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "add-group", "line", "--online", "--yes")
    run(capsys, "rotate", "fleet-line", "--yes")
    run(capsys, "revoke", "root-1", "--yes")
    roles = {role["role"]: role for role in run(capsys, "status")["roles"]}
    assert [key["name"] for key in roles["fleet-line"]["keys"]] == ["fleet-line-2"]
    assert [key["name"] for key in roles["root"]["keys"]] == ["root-2"]


def test_a_release_is_published_under_the_counter_that_was_asked_for(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "add-team", "vision", "--online", "--yes")
    published = run(capsys, "publish", str(DIGITS), "--team", "vision", "--counter", "5000", "--yes")
    assert published["manifest"]["release_counter"] == 5000
    assert main(["repo", "publish", str(DIGITS), "--team", "vision", "--counter", "4999", "--yes"]) == 1
    assert "digits has release 5000 already" in capsys.readouterr().err
    assert run(capsys, "status")["releases"][0]["release_counter"] == 5000


def test_status_shows_roles_and_what_is_to_be_done(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "keys" / "root-1.key").unlink()
    assert main(["repo", "status"]) == 0
    shown = capsys.readouterr().out
    assert "root-1 (not here)" in shown
    assert "root: 0 of its keys are within reach here, 1 must sign" in shown


def test_a_folder_that_is_not_a_repository_is_an_error_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repo", "status", "--repo", str(tmp_path)]) == 1
    assert "make one with `edge-runtime repo init" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "repo wants an action"),
        (["init"], "DIR"),
        (["init", "x", "--days", "roots=3"], "--days roots=3: wanted ROLE=N"),
        (["add-tem", "x"], "invalid choice"),
        (["publish", "x", "--team", "vision", "--counter", "0"], "wanted 1 or more"),
    ],
)
def test_a_wrong_command_line_is_status_2(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repo", *words]) == 2
    assert complaint in capsys.readouterr().err


class Terminal:
    """A person at a terminal in front of `edge-runtime repo`. `seen`: all that was shown."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "EDGE_RUNTIME_PASSPHRASE"}
        # A session of its own, or getpass would ask on the terminal that the tests run in.
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore::getpass.GetPassWarning", "-m", "edge_runtime", "repo", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def answer(self, question: str, text: str) -> None:
        """Wait for a question and type an answer."""
        while question not in self.seen:
            self.seen += os.read(self._ours, 1 << 16).decode()
        self.seen = self.seen.partition(question)[2]
        os.write(self._ours, f"{text}\n".encode())

    def wait(self) -> int:
        """The exit status."""
        return self._child.wait(60)

    def close(self) -> None:
        """Leave."""
        self._child.kill()
        self._child.wait()
        os.close(self._ours)


@pytest.mark.parametrize(("answer", "status", "version"), [("y", 0, 2), ("n", 1, 1), ("", 1, 1)])
def test_on_a_terminal_a_person_is_asked(answer: str, status: int, version: int, repository: Path) -> None:
    with closing(Terminal("add-team", "vision", "--online")) as terminal:
        terminal.answer("Sign? [y/N]", answer)
        if answer == "y":
            terminal.answer("Passphrase of targets-1: ", PASSPHRASE)
        assert terminal.wait() == status
    with Publisher(repository).opened() as opened:
        assert opened.catalog.targets.version == version


def test_a_person_makes_a_repository_with_a_passphrase_that_is_typed_twice(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with closing(Terminal("init", str(path), "--root-keys", "1", "--root-threshold", "1")) as terminal:
        terminal.answer("Passphrase for the new keys: ", PASSPHRASE)
        terminal.answer("The same again: ", PASSPHRASE)
        terminal.answer("Sign? [y/N]", "yes")
        assert terminal.wait() == 0
    with Publisher(path).opened() as repository:
        assert not rotate(repository, "root", NewKeys(is_online=True)).signings[0].is_online


@pytest.mark.parametrize("package", ["tuf", "securesystemslib", "cryptography"])
def test_without_the_extra_the_verb_says_what_to_install_and_help_still_helps(package: str) -> None:
    for words, status, complaint in ((["status"], 1, install_advice("publish")), (["--help"], 0, "")):
        program = (
            f"import sys; sys.modules[{package!r}] = None\n"
            f"from edge_runtime.cli.main import main; sys.exit(main(['repo', *{words!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert complaint in done.stderr


def test_a_team_may_need_more_than_one_signature(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, "add-team", "vision", "--keys", "3", "--threshold", "2", "--yes")
    assert [each["keys"] for each in done["signed"] if each["role"] == "team-vision"] == [
        ["team-vision-1", "team-vision-2"]
    ]
    done = run(capsys, "rotate", "team-vision", "--keys", "1", "--threshold", "1", "--yes")
    assert [each["keys"] for each in done["signed"] if each["role"] == "team-vision"] == [["team-vision-4"]]
    TufDevice(repository, tmp_path / "device", Publisher(repository).root_1).check()


# ---- the next step, going back, bounds ------------------------------------------------------------------------------


def tiny(folder: Path, version: int) -> Path:
    wide(folder / "tiny" / str(version), size=version + 1)
    return folder / "tiny"


def test_each_step_of_a_release_names_the_next_one_and_a_group_goes_back_by_its_own_key(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "add-team", "vision", "--online", "--yes")
    published = run(capsys, "publish", str(tiny(tmp_path, 1)), "--team", "vision", "--yes")
    assert published["next"] == "Next: edge-runtime repo add-group GROUP, for devices to run it"
    run(capsys, "add-group", "line", "--online", "--yes")
    published = run(capsys, "publish", str(tiny(tmp_path, 2)), "--team", "vision", "--yes")
    assert published["next"].startswith(
        "Next: edge-runtime repo assign line tiny=2 --percent 10, or edge-runtime repo ro"
    )
    assert main(["repo", "assign", "line", "tiny=1"]) == 0
    assert "\nNext: copy the repository to its server; edge-runtime fleet wake line" in capsys.readouterr().out
    part = run(capsys, "assign", "line", "tiny=2", "--percent", "10")
    assert part["next"].endswith("then edge-runtime repo assign line tiny=2")
    assert main(["repo", "assign", "line", "tiny=2"]) == 0
    assert main(["repo", "assign", "line", "tiny=1"]) == 1
    assert "go back with --going-back" in capsys.readouterr().err
    assert main(["repo", "assign", "line", "tiny=1", "--going-back", "--percent", "5"]) == 2
    assert run(capsys, "assign", "line", "tiny=1", "--going-back")["done"] == (
        "have line go back to tiny version 1 (release 1)"
    )
    assert main(["repo", "assign", "line", "tiny=2", "--going-back"]) == 1
    assert "is not older than what line was given, release 2" in capsys.readouterr().err
    assert run(capsys, "assign", "line", "tiny=2")["done"].startswith("give line tiny version 2")
    assert "move the new key files below" in run(capsys, "rotate", "fleet-line", "--yes")["next"]
    assert "reads the new key" in run(capsys, "rotate", "timestamp", "--yes")["next"]
    assert "keep every N.root.json" in run(capsys, "rotate", "root", "--yes")["next"]


def test_bounds_are_signed_with_a_release_and_need_what_they_are_held_by(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "add-team", "vision", "--online", "--yes")
    words = ["publish", str(tiny(tmp_path, 1)), "--team", "vision", "--yes"]
    bounds = ["--max-p95-ms", "rpi5=40", "--max-p95-ms", "*=20", "--max-failures", "1%", "--min-agreement", "99%"]
    assert main(["repo", *words, *bounds]) == 1
    assert "give them with --golden" in capsys.readouterr().err
    for wrong in (["--max-p95-ms", "40"], ["--max-p95-ms", "rpi5=0"], ["--max-failures", "101%"]):
        assert main(["repo", *words, *wrong]) == 2
    assert main(["repo", *words, "--max-p95-ms", "No Name=1"]) == 1
    capsys.readouterr()
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(tmp_path / "golden.npz", x=rows)
    manifest = run(capsys, *words, *bounds, "--golden", str(tmp_path / "golden.npz"))["manifest"]
    assert manifest["bounds"] == {
        "max_p95_ms": {"rpi5": 40.0, "*": 20.0}, "max_failure_share": 0.01, "min_agreement": 0.99,
    }  # fmt: skip
    assert manifest["min_runtime"] == BOUNDS_RUNTIME
