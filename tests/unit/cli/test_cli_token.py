"""`edge-runtime token`: what it prints, what it keeps, and who may read that."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.access.tokens import RIGHTS, Rights, read_tokens
from edge_runtime.errors import ConfigError
from edge_runtime.operations import Scope


def _add(file: Path, name: str, capsys: pytest.CaptureFixture[str], may: str = "infer") -> str:
    assert main(["token", "add", name, "--may", may, "--file", str(file)]) == 0
    return capsys.readouterr().out.strip()


def test_the_rights_are_the_scopes_of_the_operations_and_the_view_of_cameras() -> None:
    assert set(RIGHTS) == {scope.value for scope in Scope} | {"view"}


def test_a_token_is_printed_once_and_kept_as_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "tokens.toml"
    token = _add(file, "camera", capsys, "control,infer")
    text = file.read_text()
    assert token not in text
    assert hashlib.sha256(token.encode()).hexdigest() in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_tokens(file, "tokens").rights_of(token) == Rights(True, True, "camera")
    assert main(["token", "list", "--file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "camera" in shown
    assert "infer, control" in shown
    assert token not in shown


def test_a_removed_token_is_unknown_and_the_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    old, new = _add(file, "old", capsys), _add(file, "new", capsys)
    assert main(["token", "remove", "old", "--file", str(file)]) == 0
    assert read_tokens(file, "tokens").rights_of(old) is None
    assert read_tokens(file, "tokens").rights_of(new) == Rights(True, False, "new")
    assert main(["token", "remove", "old", "--file", str(file)]) == 1
    assert "there are: new" in capsys.readouterr().err
    assert main(["token", "remove", "new", "--file", str(file)]) == 0
    assert read_tokens(file, "tokens").tokens == {}


def test_each_action_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    assert main(["token", "add", "a", "--file", str(file), "--json"]) == 0
    added = json.loads(capsys.readouterr().out)
    assert read_tokens(file, "tokens").rights_of(added.pop("token")) is not None
    assert added == {"name": "a", "may": ["infer"], "file": str(file)}
    assert main(["token", "list", "--file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "a", "may": ["infer"]}]
    assert main(["token", "remove", "a", "--file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "a", "removed": True, "file": str(file)}


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a/b", 'a"b', "a" * 65])
def test_a_name_that_is_not_a_name_is_refused_and_nothing_written(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tokens.toml"
    assert main(["token", "add", "--file", str(file), "--", name]) == 1
    assert not file.exists()


def test_a_name_is_taken_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    token = _add(file, "a", capsys)
    assert main(["token", "add", "a", "--file", str(file)]) == 1
    assert "remove it first" in capsys.readouterr().err
    assert read_tokens(file, "tokens").rights_of(token) is not None


@pytest.mark.parametrize("may", ["", "all", "infer,", "infer,load", "Infer"])
def test_other_rights_are_a_wrong_command_line(tmp_path: Path, may: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "add", "a", "--may", may, "--file", str(tmp_path / "t")]) == 2
    assert "wanted infer, control, view or several, as in infer,control" in capsys.readouterr().err


def test_the_configuration_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[grpc]\ntokens_file = "{tmp_path}/of-grpc.toml"\n')
    assert main(["token", "add", "a", "--config", str(config)]) == 0
    assert "a" in read_tokens(tmp_path / "of-grpc.toml", "tokens").tokens
    config.write_text(f'[grpc]\ntokens_file = "{tmp_path}/1"\n[http]\ntokens_file = "{tmp_path}/2"\n')
    assert main(["token", "list", "--config", str(config)]) == 2
    assert "--file" in capsys.readouterr().err


def test_no_file_is_reported_with_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "list", "--file", str(tmp_path / "none")]) == 1
    assert "edge-runtime token add" in capsys.readouterr().err


def test_tokens_added_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    program = "import sys; from edge_runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
    names = [f"n{number}" for number in range(6)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, "token", "add", name, "--file", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in names
    ]
    assert [child.wait(60) for child in children] == [0] * len(names)
    assert set(read_tokens(file, "tokens").tokens) == set(names)


def test_a_link_stays_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _add(tmp_path / "link", "a", capsys)
    assert (tmp_path / "link").is_symlink()
    assert "a" in read_tokens(tmp_path / "real", "tokens").tokens


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_the_file_stays_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    _add(file, "a", capsys)
    os.chown(file, 12, 34)
    _add(file, "b", capsys)
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, 0o600)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tokens.a]\nsha256 = 'x'\nmay = ['infer']\n", r"tokens\.a\.sha256"),
        (f"[tokens.a]\nsha256 = '{'0' * 64}'\nmay = ['all']\n", r"tokens\.a\.may\[0\]"),
        (f"[tokens.a]\nsha256 = '{'0' * 64}'\nmay = []\n", r"tokens\.a\.may"),
        (f"[tokens.'a b']\nsha256 = '{'0' * 64}'\nmay = ['infer']\n", "a b"),
        ("[tokens.a\n", ":1:"),
        ("[token.a]\n", "tokens"),
    ],
)
def test_a_broken_file_is_reported_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_tokens(file, "tokens")
