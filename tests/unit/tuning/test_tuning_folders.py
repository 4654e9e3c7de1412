"""Folders that a tune works in: gone afterwards, and with the next tune where it was killed; nothing else goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from edge_runtime.errors import ConfigError
from edge_runtime.sandbox.folder_lock import MIN_AGE_S
from edge_runtime.tuning.folders import PREFIX, temporary_folder, tune_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def age(folder: Path) -> None:
    then_s = folder.stat().st_mtime - 2 * MIN_AGE_S
    os.utime(folder, (then_s, then_s))


def test_a_folder_that_a_killed_tune_left_goes_with_the_next(temporary: Path) -> None:
    left = temporary / f"{PREFIX}left"
    (left / "below").mkdir(parents=True)
    age(left)
    with temporary_folder() as folder:
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_folders_in_use_or_just_made_or_somebody_elses_stay(temporary: Path, tmp_path: Path) -> None:
    (temporary / f"{PREFIX}young").mkdir()
    (temporary / "another").mkdir()
    (tmp_path / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    age(temporary / "another")
    with temporary_folder() as one:
        age(one)
        with temporary_folder():
            assert one.is_dir()
    assert {path.name for path in temporary.iterdir()} == {f"{PREFIX}young", "another", f"{PREFIX}link"}
    assert (tmp_path / "precious").is_dir()


def test_a_link_in_the_tunes_place_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "now").symlink_to(tmp_path / "precious")
    with tune_folder(tmp_path) as root:
        assert not root.is_symlink()
        with pytest.raises(ConfigError, match="another tune runs here"), tune_folder(tmp_path):
            pass
    assert not root.exists()
    assert (tmp_path / "precious" / "file").exists()
