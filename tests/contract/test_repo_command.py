"""`edge-runtime repo` as a person and a script use it: what it says before it signs, whom it asks, how it exits."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from tests.fakes.publishing import PASSPHRASE, Publisher, TufDevice


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


def test_what_will_be_signed_is_said_before(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_status_shows_roles_and_what_is_to_be_done(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "keys" / "root-1.key").unlink()
    assert main(["repo", "status"]) == 0
    shown = capsys.readouterr().out
    assert "root-1 (not here)" in shown
    assert "root: 0 of its keys are within reach here, 1 must sign" in shown


def test_a_folder_that_is_no_repository_is_an_error_with_advice(
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
    ],
)
def test_a_wrong_command_line_is_status_2(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repo", *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "status", "version"), [(b"y\n", 0, 2), (b"n\n", 1, 1), (b"\n", 1, 1)])
def test_on_a_terminal_a_person_is_asked(answer: bytes, status: int, version: int, repository: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", "repo", "add-team", "vision", "--online"],
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while b"Sign? [y/N]" not in seen:
            seen += os.read(ours, 1 << 16)
        assert b"targets version 2" in seen
        os.write(ours, answer)
        assert child.wait(60) == status
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    with Publisher(repository).opened() as opened:
        assert opened.catalog.targets.version == version
