"""Folders that a hostile process filled: counted and removed, however deep, long, locked or wide."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.sandbox.folder_tree import FILE_BYTES, SUBFOLDER_BYTES, remove_tree, tree_bytes

MOST = 1 << 40
DEEP = 1500
"""Levels: more than Python recurses, and than a process may hold descriptors."""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tree").mkdir()
    yield tmp_path / "tree"
    remove_tree(tmp_path / "tree")  # pytest cannot


def dig(folder: Path, name: str, levels: int, content: bytes) -> None:
    """Folders within each other, with a file in the last one."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(content)
    os.close(here)


def test_a_deep_tree_is_removed(tree: Path) -> None:
    dig(tree, "d", DEEP, b"x")
    remove_tree(tree)
    assert not tree.exists()


def test_a_file_beyond_the_longest_path_is_counted(tree: Path) -> None:
    dig(tree, "long" * 60, 30, b"x" * (1 << 20))
    assert 1 << 20 <= tree_bytes(str(tree), MOST) - 30 * SUBFOLDER_BYTES <= (1 << 20) + FILE_BYTES
    remove_tree(tree)
    assert not tree.exists()


def test_folders_side_by_side_are_counted_and_removed_each_once(tree: Path) -> None:
    for name in "abc":
        dig(tree, name, 2, b"")
        dig(tree / name, "other", 1, b"")
    assert tree_bytes(str(tree), MOST) == 9 * SUBFOLDER_BYTES + 6 * FILE_BYTES
    remove_tree(tree)
    assert not tree.exists()


def test_counting_ends_where_it_is_more_than_matters(tree: Path) -> None:
    dig(tree, "d", DEEP, b"")
    assert 10 * SUBFOLDER_BYTES < tree_bytes(str(tree), 10 * SUBFOLDER_BYTES) < DEEP * SUBFOLDER_BYTES


def test_folders_that_nobody_may_read_go_and_what_links_lead_to_stays(tree: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    (tree / "link").symlink_to(kept)
    dig(tree, "locked", 3, b"x")
    (tree / "locked" / "locked").chmod(0)
    (tree / "locked").chmod(0)
    remove_tree(tree)
    assert not tree.exists()
    assert kept.stat().st_mode & 0o777 == 0o500


def test_a_removal_that_is_over_its_time_leaves_the_rest(tree: Path) -> None:
    dig(tree, "d", 3, b"x")
    remove_tree(tree, 0.0)
    assert (tree / "d" / "d" / "d").is_dir()
    remove_tree(tree)
    assert not tree.exists()


def test_a_link_or_nothing_in_place_of_a_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "none")
    assert (tmp_path / "kept").is_dir()
    assert tree_bytes(str(tmp_path / "none"), MOST) == 0
