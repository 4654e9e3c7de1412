"""Which folders may be published, and which are refused before any library sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import PublishError
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.intake import MAX_FILE_BYTES, take_in
from tests.models.ir_models import from_onnx
from tests.models.onnx_models import add_weights, external_tensor, mlp, mlp_int8


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    (tmp_path / "repository").mkdir()
    return RepositoryFolder(tmp_path / "repository")


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """models/digits with the versions 1 and 2."""
    for version in (1, 2):
        mlp(tmp_path / "models" / "digits" / str(version))
    return tmp_path / "models" / "digits"


def test_the_newest_version_is_taken_and_copied_aside(folder: RepositoryFolder, digits: Path) -> None:
    taken = take_in(folder, digits)
    assert (taken.model, taken.version) == ("digits", 2)
    assert [(file.name, file.backend) for file in taken.files] == [("model.onnx", "onnxruntime")]
    copy = taken.files[0].path
    assert copy.is_relative_to(folder.staging)
    assert copy.read_bytes() == (digits / "2" / "model.onnx").read_bytes()


def test_a_version_may_be_named_or_be_the_folder(folder: RepositoryFolder, digits: Path) -> None:
    assert take_in(folder, digits, version=1).version == 1
    assert take_in(folder, digits / "1").version == 1
    assert take_in(folder, digits / "1", "other", 7).model == "other"
    with pytest.raises(PublishError, match="has no version 3; it has 1, 2"):
        take_in(folder, digits, version=3)


def test_labels_become_part_of_what_is_signed(folder: RepositoryFolder, digits: Path) -> None:
    (digits / "labels.txt").write_text("cat\ndog\n")
    (digits / "model.toml").write_text('[output.y]\nlabels = "labels.txt"\ntop_k = 1\n')
    assert take_in(folder, digits).settings == {"output": {"y": {"labels": ["cat", "dog"], "top_k": 1}}}


def test_a_file_of_labels_that_is_missing_is_reported_before_anything_is_published(
    folder: RepositoryFolder, digits: Path
) -> None:
    (digits / "model.toml").write_text('[output.y]\nlabels = "labels.txt"\n')
    with pytest.raises(PublishError, match="no such file in"):
        take_in(folder, digits)


def test_files_in_the_models_own_folder_are_version_1(folder: RepositoryFolder, tmp_path: Path) -> None:
    mlp(tmp_path / "net")
    (tmp_path / "net" / "model.onnx").rename(tmp_path / "net" / "any.onnx")
    taken = take_in(folder, tmp_path / "net")
    assert (taken.model, taken.version, taken.files[0].name) == ("net", 1, "any.onnx")


def test_external_data_and_an_ir_with_its_weights_are_taken_and_other_files_left_out(
    folder: RepositoryFolder, tmp_path: Path
) -> None:
    path = tmp_path / "both" / "1"
    add_weights(path, external_tensor("weights.data"))
    (path / "weights.data").write_bytes(np.ones(2, np.float32).tobytes())
    for name in ("model.xml", "model.bin"):
        (path / name).write_bytes(b"IR")
    (path / "labels.txt").write_text("zero\n")
    (path / ".hidden").write_text("")
    taken = take_in(folder, tmp_path / "both")
    assert sorted((file.name, file.backend) for file in taken.files) == [
        ("model.bin", "openvino"), ("model.onnx", "onnxruntime"), ("model.xml", "openvino"),
        ("weights.data", "onnxruntime"),
    ]  # fmt: skip
    assert taken.left_out == ("labels.txt",)


def test_a_language_model_is_taken_with_all_that_its_backend_reads(folder: RepositoryFolder, tmp_path: Path) -> None:
    path = tmp_path / "words" / "1"
    path.mkdir(parents=True)
    for name in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer"):
        (path / f"{name}.xml").write_bytes(b"IR")
        (path / f"{name}.bin").write_bytes(b"IR")
    for name in ("config.json", "chat_template.jinja", "tokenizer.json"):
        (path / name).write_bytes(b"{}")

    taken = take_in(folder, tmp_path / "words")

    assert [(each.backend, each.path.name) for each in taken.artifacts] == [("openvino-genai", "openvino_model.xml")]
    assert {each.backend for each in taken.files} == {"openvino-genai"}
    assert {each.name for each in taken.files} == {
        f"openvino_{part}.{suffix}" for part in ("model", "tokenizer", "detokenizer") for suffix in ("xml", "bin")
    } | {"config.json", "chat_template.jinja"}
    assert taken.left_out == ("tokenizer.json",)

    (path / "openvino_detokenizer.bin").unlink()
    with pytest.raises(PublishError, match=r"'openvino_detokenizer\.bin' is missing"):
        take_in(folder, tmp_path / "words")


def test_settings_are_taken_as_they_are_said(folder: RepositoryFolder, digits: Path) -> None:
    (digits / "model.toml").write_text("max_batch_rows = 8\n[warmup]\nruns = 2\n")
    assert take_in(folder, digits).settings == {"max_batch_rows": 8, "warmup": {"runs": 2}}


@pytest.mark.parametrize("text", ["device = 'CUDA'", "[options]\nx = 'y'", "versions = {latest = 2}"])
def test_settings_that_are_a_devices_or_could_name_code_are_refused(
    text: str, folder: RepositoryFolder, digits: Path
) -> None:
    (digits / "model.toml").write_text(text)
    with pytest.raises(PublishError, match="is not published"):
        take_in(folder, digits)


def test_settings_that_no_device_would_take_are_refused(folder: RepositoryFolder, digits: Path) -> None:
    (digits / "model.toml").write_text("max_batch_row = 8")
    with pytest.raises(PublishError, match="did you mean 'max_batch_rows'"):
        take_in(folder, digits)


@pytest.mark.parametrize(
    "name",
    [
        "model.py",
        "ops.so",
        "ops.so.1",
        "x.PYC",
        "x.dll",
        "model.plan",
        "model.engine",
        "setup.sh",
        "x.dylib",
        "a.pyd",
        "saved_model.pb",
        "model.pt",
        "net.PT2",
        "weights.pth",
    ],
)
def test_code_is_refused_wherever_it_lies(name: str, folder: RepositoryFolder, digits: Path) -> None:
    (digits / "2" / name).write_bytes(b"")
    with pytest.raises(PublishError, match="is code, or compiled for one machine"):
        take_in(folder, digits)


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.ubj", b"{L\0\0\0\0\0\0\0\x07learner{"), ("model.txt", b"tree\nversion=v4\n"), ("model.cbm", b"CBM1")],
)
def test_a_source_alone_is_refused_with_the_command_that_makes_a_release_of_it(
    name: str, content: bytes, folder: RepositoryFolder, tmp_path: Path
) -> None:
    version = tmp_path / "models" / "churn" / "1"
    version.mkdir(parents=True)
    (version / name).write_bytes(content)
    command = f"edge-runtime convert {version / name} --to onnx --output {version}/"
    for place in (version.parent, version / name):
        with pytest.raises(PublishError, match=re.escape(command)):
            take_in(folder, place)
    mlp(version)
    assert take_in(folder, version.parent).left_out == (name,)


def linked_model(version: Path) -> None:
    (version / "model.onnx").rename(version.parent / "elsewhere.onnx")
    (version / "model.onnx").symlink_to(version.parent / "elsewhere.onnx")


def linked_bystander(version: Path) -> None:
    (version / "labels.txt").symlink_to("/etc/passwd")


def pipe(version: Path) -> None:
    os.mkfifo(version / "pipe")


def linked_version(version: Path) -> None:
    version.rename(version.parent / "real")
    version.symlink_to(version.parent / "real")


def linked_settings(version: Path) -> None:
    (version.parent / "model.toml").symlink_to("/etc/passwd")


def pipe_as_settings(version: Path) -> None:
    os.mkfifo(version.parent / "model.toml")


def data_outside(version: Path) -> None:
    add_weights(version, external_tensor("../../secret"))


def data_linked(version: Path) -> None:
    add_weights(version, external_tensor("w.data"))
    (version.parent / "w").write_bytes(bytes(8))
    (version / "w.data").symlink_to(version.parent / "w")


def data_missing(version: Path) -> None:
    add_weights(version, external_tensor("w.data"))


def data_in_a_folder(version: Path) -> None:
    add_weights(version, external_tensor("data/w"))
    (version / "data").mkdir()
    (version / "data" / "w").write_bytes(bytes(8))


def data_named_like_the_golden_file(version: Path) -> None:
    add_weights(version, external_tensor("golden.bin"))
    (version / "golden.bin").write_bytes(bytes(8))


def data_with_a_blank(version: Path) -> None:
    add_weights(version, external_tensor("my weights"))
    (version / "my weights").write_bytes(bytes(8))


def huge(version: Path) -> None:
    add_weights(version, external_tensor("w.data"))
    with (version / "w.data").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)


def two_models(version: Path) -> None:
    data = (version / "model.onnx").read_bytes()
    (version / "model.onnx").unlink()
    for name in ("a.onnx", "b.onnx"):
        (version / name).write_bytes(data)


def no_model(version: Path) -> None:
    (version / "model.onnx").rename(version / "model.txt")


def junk(version: Path) -> None:
    (version / "model.onnx").write_bytes(b"\x08junk" * 100)


def many_files(version: Path) -> None:
    for number in range(4097):
        (version / str(number)).touch()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (linked_model, "not a plain file"),
        (linked_bystander, "not a plain file"),
        (pipe, "not a plain file"),
        (linked_version, "symbolic link"),
        (linked_settings, "model.toml"),
        (pipe_as_settings, "not a plain file"),
        (data_outside, "leaves the model's folder"),
        (data_linked, "not a plain file"),
        (data_missing, "is not there; copy it"),
        (data_in_a_folder, "export it beside the model"),
        (data_named_like_the_golden_file, "cannot be published"),
        (data_with_a_blank, "cannot be published"),
        (huge, f"wanted at most {MAX_FILE_BYTES}"),
        (two_models, "a.onnx and b.onnx; which one"),
        (no_model, "wanted a model as .onnx"),
        (junk, "model.onnx"),
        (many_files, "more than 4096 files"),
    ],
)
def test_a_hostile_folder_is_refused_and_nothing_of_it_is_published(
    spoil: Callable[[Path], None], complaint: str, folder: RepositoryFolder, digits: Path
) -> None:
    spoil(digits / "2")
    with pytest.raises(PublishError, match=complaint):
        take_in(folder, digits)
    assert not folder.targets.exists()


def test_a_folder_whose_name_is_not_a_model_wants_one(folder: RepositoryFolder, tmp_path: Path) -> None:
    mlp(tmp_path / "-odd")
    with pytest.raises(PublishError, match="give one with --model"):
        take_in(folder, tmp_path / "-odd")
    with pytest.raises(PublishError, match="is not a folder"):
        take_in(folder, tmp_path / "absent")


def test_variants_are_taken_with_the_precision_that_their_names_say(folder: RepositoryFolder, tmp_path: Path) -> None:
    path = tmp_path / "net" / "1"
    mlp(path)
    from_onnx(mlp_int8(path), path, "model.int8.xml")
    taken = take_in(folder, tmp_path / "net")
    assert [(each.backend, each.path.name, each.precision) for each in taken.artifacts] == [
        ("onnxruntime", "model.onnx", ""),
        ("onnxruntime", "model.int8.onnx", "int8"),
        ("openvino", "model.int8.xml", "int8"),
    ]
    assert {file.name: file.precision for file in taken.files} == {
        "model.onnx": "",
        "model.int8.onnx": "int8",
        "model.int8.xml": "int8",
        "model.int8.bin": "int8",
    }
    assert taken.left_out == ()


def test_data_that_a_variant_shares_with_the_model_is_the_models(folder: RepositoryFolder, tmp_path: Path) -> None:
    path = tmp_path / "net" / "1"
    add_weights(path, external_tensor("weights.data"))
    (path / "weights.data").write_bytes(np.ones(2, np.float32).tobytes())
    (path / "model.f16.onnx").write_bytes((path / "model.onnx").read_bytes())
    taken = take_in(folder, tmp_path / "net")
    assert {file.name: file.precision for file in taken.files} == {
        "model.onnx": "",
        "weights.data": "",
        "model.f16.onnx": "f16",
    }


def test_a_variant_alone_is_not_published(folder: RepositoryFolder, tmp_path: Path) -> None:
    mlp_int8(tmp_path / "net" / "1")
    with pytest.raises(PublishError, match=r"holds model\.int8\.onnx; wanted a model as \.onnx"):
        take_in(folder, tmp_path / "net")
