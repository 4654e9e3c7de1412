"""The digest of an artifact is that of its bytes, whatever its size."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edge_runtime.models.digest import sha256_of_file

PIECE = 1 << 20


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_a_file_is_hashed_whole(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    file = tmp_path / "model.onnx"
    file.write_bytes(data[:size])
    assert sha256_of_file(file) == hashlib.sha256(data[:size]).hexdigest()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sha256_of_file(tmp_path / "absent")


def test_a_path_that_is_not_a_plain_file_is_an_error_and_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="plain file"):
            sha256_of_file(path)


def test_a_link_out_of_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "models").mkdir()
    link = tmp_path / "models" / "model.json"
    link.symlink_to(tmp_path / "secret")
    assert sha256_of_file(link) == hashlib.sha256(b"secret").hexdigest()
    with pytest.raises(OSError, match="leads outside the models folder"):
        sha256_of_file(link, (str(tmp_path / "models"),))
