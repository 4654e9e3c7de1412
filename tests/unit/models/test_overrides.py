"""Callers' files below the state folder."""

from __future__ import annotations

import os
from pathlib import Path

from edge_runtime.models.overrides import OverrideFiles

FILES = {"1/model.onnx": b"model"}


def test_folders_that_killed_daemons_left_go_and_a_folder_that_another_one_serves_stays(tmp_path: Path) -> None:
    for name in (f"{os.getpid()}-mine-before", "99999999-gone", f"{os.getppid()}-anothers"):
        (tmp_path / name / "1").mkdir(parents=True)
    files = OverrideFiles(tmp_path)
    place = files.write("m", FILES)
    assert (place / "1" / "model.onnx").read_bytes() == b"model"
    assert {each.name for each in tmp_path.iterdir()} == {place.name, f"{os.getppid()}-anothers"}
    second = files.write("m", FILES)
    assert place.is_dir()
    files.close()
    assert not place.exists()
    assert not second.exists()
