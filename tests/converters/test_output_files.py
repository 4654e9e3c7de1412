"""What a conversion writes gets its name whole and alone; what a killed one left goes with the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.folder_lock import lock_folder
from edge_runtime_converters.output_files import place, whole, work_folder

_KILLED = """
import os, sys
from pathlib import Path
from edge_runtime_converters.output_files import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
"""


def made(folder: Path, content: str) -> Path:
    """A folder with a graph and its weights, both of one conversion."""
    folder.mkdir()
    (folder / "model.xml").write_text(content)
    (folder / "model.bin").write_text(content)
    return folder


def test_the_remains_of_a_killed_conversion_go_with_the_next_to_the_same_target(tmp_path: Path) -> None:
    target = tmp_path / "mod[e]l.onnx"
    subprocess.run([sys.executable, "-c", _KILLED, str(target)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with whole(target) as output:
        output.write_bytes(b"new")
    assert list(tmp_path.iterdir()) == [target]


def test_the_remains_go_also_where_a_child_of_the_killed_one_still_has_them_locked_at_the_beginning(
    tmp_path: Path,
) -> None:
    target = tmp_path / "model.onnx"
    left = tmp_path / ".model.onnx.abcd1234.part"
    left.mkdir()
    lock = lock_folder(left)
    with work_folder(target):
        os.close(lock)
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_in_use_is_left_alone_and_so_is_what_only_looks_like_one(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (tmp_path / ".model.onnx.abcd1234.part").symlink_to("elsewhere")
    with work_folder(target) as one, work_folder(target) as other:
        assert one.is_dir()
        assert other.is_dir()
    assert not one.exists()
    assert (tmp_path / "elsewhere" / "mine").is_file()


def test_a_name_that_was_taken_meanwhile_is_not_replaced_without_leave(tmp_path: Path) -> None:
    folder, target = made(tmp_path / "made", "mine"), tmp_path / "model.xml"
    (tmp_path / "model.bin").write_text("theirs")
    with pytest.raises(ConversionFailed, match=r"model\.bin is there already; name another"):
        place(folder, target, may_replace=False)
    assert not target.exists()
    assert (tmp_path / "model.bin").read_text() == "theirs"


def test_an_old_graph_is_never_there_with_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model.xml"
    place(made(tmp_path / "old", "old"), target)
    seen: list[tuple[str | None, str | None]] = []
    rename = Path.replace  # not os.replace, which Python 3.10's Path takes before any test can

    def content(path: Path) -> str | None:
        return path.read_text() if path.exists() else None

    def watched(source: Path, destination: Path) -> Path:
        placed = rename(source, destination)
        seen.append((content(target), content(target.with_suffix(".bin"))))
        return placed

    monkeypatch.setattr(Path, "replace", watched)
    place(made(tmp_path / "new", "new"), target)
    assert seen == [(None, "new"), ("new", "new")]


def test_a_folder_in_the_targets_place_is_named_as_what_it_is(tmp_path: Path) -> None:
    folder, target = made(tmp_path / "made", "mine"), tmp_path / "model.xml"
    target.with_suffix(".bin").mkdir()
    with pytest.raises(ConversionFailed, match="Is a directory; name another with --output"):
        place(folder, target)
