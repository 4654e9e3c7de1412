"""What is checked of an OpenVINO IR before OpenVINO reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.backends.model_files import check_ir_files
from edge_runtime.errors import LoadFailed

CONSTANT = '<net version="11"><layers><layer type="Const"><data offset="{}" size="{}"/></layer></layers></net>'


def write(folder: Path, xml: str, weights: bytes | None = bytes(8)) -> Path:
    artifact = folder / "model.xml"
    artifact.write_text(xml, encoding="utf-8")
    if weights is not None:
        (folder / "model.bin").write_bytes(weights)
    return artifact


def test_an_ir_with_its_weights_passes(tmp_path: Path) -> None:
    artifact = write(tmp_path, CONSTANT.format(4, 4))
    files = check_ir_files(artifact)
    assert files.locations == ("model.bin",)
    assert files.total_bytes == artifact.stat().st_size + 8


def test_an_ir_without_constants_needs_no_weights(tmp_path: Path) -> None:
    assert check_ir_files(write(tmp_path, "<net/>", None)).locations == ()


@pytest.mark.parametrize(
    ("xml", "reason"),
    [
        (CONSTANT.format(5, 4), "8 bytes, but model.xml wants 9"),
        (CONSTANT.format(-1, 4), "offset '-1'"),
        (CONSTANT.format(0, "9" * 30), "offset '0'"),
        ("<other/>", "wanted 'net'"),
        ("<net>", "not an OpenVINO IR"),
        ("", "not an OpenVINO IR"),
        ('<!DOCTYPE net SYSTEM "http://127.0.0.1/x"><net/>', "document type"),
        ('<!DOCTYPE net [<!ENTITY x SYSTEM "file:///etc/passwd">]><net>&x;</net>', "document type"),
        ('<!DOCTYPE net [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><net>&b;</net>', "document type"),
        ("<net>&x;</net>", "not an OpenVINO IR"),
    ],
)
def test_an_ir_that_is_not_sound_is_refused(tmp_path: Path, xml: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        check_ir_files(write(tmp_path, xml))


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"needs model.bin beside it"):
        check_ir_files(write(tmp_path, CONSTANT.format(0, 8), None))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "symbolic link"),
        (lambda path: path.mkdir(), "a folder"),
        (os.mkfifo, "a fifo"),
        (lambda path: os.link(path.with_name("model.xml"), path), "hard links"),
    ],
)
def test_weights_that_are_not_a_plain_file_are_refused(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    artifact = write(tmp_path, CONSTANT.format(0, 8), None)
    make(tmp_path / "model.bin")
    with pytest.raises(LoadFailed, match=reason):
        check_ir_files(artifact)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_pass_or_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    artifact = tmp_path_factory.getbasetemp() / "random.xml"
    artifact.write_bytes(content)
    try:
        files = check_ir_files(artifact)
    except LoadFailed:
        return
    assert files.locations == ()
