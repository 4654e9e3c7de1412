"""Which files go to PyTorch at all, decided by an archive's names, without the library."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.pytorch.backend import PyTorchBackend, check_archive
from edge_runtime.errors import LoadFailed

SCRIPT = ("data.pkl", "code/__torch__.py", "constants.pkl", "version")
PROGRAM = ("models/model.json", "data/weights/weight_0", "archive_format", "archive_version")


def archive(path: Path, *names: str, folder: str = "net/") -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(folder + name, b"")
    return path


def test_torchscript_and_programs_are_distinguished_by_content_whatever_their_suffix(tmp_path: Path) -> None:
    assert check_archive(archive(tmp_path / "model.pt", *SCRIPT))
    assert check_archive(archive(tmp_path / "model.pt2", *SCRIPT))
    assert not check_archive(archive(tmp_path / "model.pt", *PROGRAM))
    assert not check_archive(archive(tmp_path / "old.pt2", "serialized_exported_program.json", folder=""))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("data.pkl", "data/0", "version"), r"model.pt is a pickle .*never loaded.*safetensors"),
        ((*PROGRAM, "data/aotinductor/model/x.wrapper.so"), "libraries compiled for one machine"),
        (("word/document.xml",), "neither TorchScript nor an exported program"),
        ((), "neither TorchScript nor an exported program"),
    ],
)
def test_other_archives_are_refused_with_what_they_are(tmp_path: Path, names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        check_archive(archive(tmp_path / "model.pt", *names))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02ccollections\nOrderedDict\n", "is a pickle"),
        (b"", "copy it again"),
        (b"<html>not found</html>", "copy it again"),
        (b"PK\x03\x04" + bytes(500), "copy it again"),
    ],
)
def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(LoadFailed, match=reason):
        check_archive(tmp_path / "model.pt")


def test_a_cut_archive_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.pt", *SCRIPT).read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / "model.pt").write_bytes(whole[:end])
        with pytest.raises(LoadFailed):
            check_archive(tmp_path / "model.pt")


def test_an_unknown_option_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    artifact = archive(tmp_path / "model.pt", *SCRIPT)
    with pytest.raises(LoadFailed, match='no option fuse = \'1\'; wanted layout = "fastest" or "as-saved"'):
        PyTorchBackend().load(artifact, LoadOptions(extra={"fuse": "1"}))
