"""Signed paths, manifests, assignments and golden tensors, and those that are refused though they are signed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import UpdateError
from edge_runtime.tensors import Array, bf16_from_fp32
from edge_runtime.updates.golden import TOLERANCES, WRITTEN_TOLERANCES, differences, pack, unpack
from edge_runtime.updates.manifest import (
    MAX_MANIFEST_BYTES,
    Artifact,
    Assignment,
    Golden,
    Manifest,
    ReleaseBounds,
    StepModel,
    TensorForm,
    decode_assignments,
    decode_manifest,
    encode_assignments,
    encode_manifest,
)
from edge_runtime.updates.release_paths import ReleasePath, parse_release_file

RELEASE = ReleasePath("vision", "digits", 3)
HASH = "0" * 64
MANIFEST = Manifest(
    model="digits",
    version=2,
    release_counter=3,
    min_runtime="0.1.0",
    inputs=(TensorForm("x", "FP32", (-1, 2)),),
    outputs=(TensorForm("y", "FP32", (-1, 2)),),
    artifacts=(Artifact(RELEASE.file("model.onnx"), HASH, 10, "onnxruntime"),),
    golden=Golden(RELEASE.file("golden.bin"), HASH, 0, "f32", (), (), (), {}),
    peak_memory_bytes=1,
)


def changed(**values: Any) -> bytes:
    document = msgspec.json.decode(encode_manifest(MANIFEST))
    return msgspec.json.encode({**document, **values})


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decode_manifest(encode_manifest(MANIFEST), RELEASE.manifest) == MANIFEST


def test_bounds_and_going_back_come_back_as_they_were_and_are_written_only_where_they_are_there() -> None:
    bounds = ReleaseBounds({"rpi5": 40.0, "*": 20.0}, 0.01, 0.99)
    bounded = msgspec.structs.replace(MANIFEST, bounds=bounds)
    assert decode_manifest(encode_manifest(bounded), RELEASE.manifest) == bounded
    assert b"bounds" not in encode_manifest(MANIFEST)
    usual = Assignment("digits", RELEASE.manifest, HASH, 100.0)
    for entry in (usual, msgspec.structs.replace(usual, going_back_from=4)):
        data = encode_assignments([entry])
        assert decode_assignments(data, "fleet/line/assign.json") == (entry,)
        assert (b"going_back_from" in data) == bool(entry.going_back_from)


@pytest.mark.parametrize(
    "bounds", [{"max_p95_ms": {"rpi5": 0}}, {"max_failure_share": 2}, {"min_agreement": -1}, {"max_p95_ms": 5}]
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(UpdateError):
        decode_manifest(changed(bounds=bounds), RELEASE.manifest)


def test_keys_that_a_newer_publisher_writes_are_passed_over() -> None:
    assert decode_manifest(changed(invented="later"), RELEASE.manifest) == MANIFEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        changed(model="other"),
        changed(release_counter=4),
        changed(version=0),
        changed(artifacts=[]),
        changed(artifacts=[{"path": "team/b/digits/3/x", "sha256": HASH, "length": 1, "backend": ""}]),
        changed(artifacts=[{"path": RELEASE.file("x"), "sha256": HASH + "\n", "length": 1, "backend": ""}]),
        changed(artifacts=[{"path": RELEASE.file("x"), "sha256": HASH, "length": -1, "backend": ""}]),
        changed(artifacts=[{"path": f"{RELEASE.folder}/../x", "sha256": HASH, "length": 1, "backend": ""}]),
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_a_signed_manifest_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(UpdateError):
        decode_manifest(data, RELEASE.manifest)


def test_a_manifest_found_elsewhere_than_it_says_is_refused() -> None:
    for path in (ReleasePath("vision", "digits", 4).manifest, RELEASE.file("other.json")):
        with pytest.raises(UpdateError):
            decode_manifest(encode_manifest(MANIFEST), path)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "team/vision/digits/3", "team/vision/digits/3/", "team/vision/digits/3/a/b", "team/vision/digits/03/a",
        "team/vision/digits/0/a", "team/Vision/digits/3/a", "team//digits/3/a", "team/vision/../3/a",
        "team/vision/digits/3/..", "team/vision/digits/3/.hidden", "fleet/vision/digits/3/a",
        "team/vision/digits/3/a\n",
        "team/vision/digits/3/a\0", "team/vision/digits/³/a", "../team/vision/digits/3/a", "team\\vision\\digits\\3\\a",
    ],
)  # fmt: skip
def test_a_path_that_is_none_of_a_release_is_refused(path: str) -> None:
    with pytest.raises(UpdateError):
        parse_release_file(path)


@given(st.text())
def test_any_path_is_a_release_or_an_update_error(text: str) -> None:
    for path in (text, f"team/vision/digits/3/{text}", f"team/{text}/digits/3/x", f"team/vision/{text}/3/x"):
        try:
            release, name = parse_release_file(path)
        except UpdateError:
            continue
        assert f"{release.folder}/{name}" == path
        assert not {"..", "."} & set(path.split("/"))


def test_assignments_come_back_as_they_were() -> None:
    assignments = (Assignment("digits", RELEASE.manifest, HASH, 12.5),)
    assert decode_assignments(encode_assignments(assignments), "fleet/line/assign.json") == assignments


@pytest.mark.parametrize(
    "change",
    [
        {"percent": 0}, {"percent": 101}, {"manifest_path": "x"}, {"manifest_sha256": "x"}, {"model": "other"},
        {"manifest_path": RELEASE.file("model.onnx")},
    ],
)  # fmt: skip
def test_a_signed_assignment_that_makes_no_sense_is_refused(change: Mapping[str, Any]) -> None:
    entry = {"model": "digits", "manifest_path": RELEASE.manifest, "manifest_sha256": HASH, "percent": 100, **change}
    with pytest.raises(UpdateError):
        decode_assignments(msgspec.json.encode([entry]), "fleet/line/assign.json")


# ---- golden tensors -------------------------------------------------------------------------------------------------


def described(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> tuple[Golden, bytes]:
    first, second = pack(inputs), pack(outputs)
    data = first.data + second.data
    lengths = (*first.lengths, *second.lengths)
    return Golden("golden.bin", HASH, len(data), "f32", first.forms, second.forms, lengths, {}), data


def test_golden_tensors_of_any_datatype_come_back_as_they_were() -> None:
    inputs: dict[str, Array] = {
        "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
        "text": np.array([b"a", b"", b"long"], dtype=object),
    }
    outputs: dict[str, Array] = {"flag": np.array([True, False]), "none": np.zeros((0, 4), np.int64)}
    got_inputs, got_outputs = unpack(*described(inputs, outputs))
    for wanted, got in ((inputs, got_inputs), (outputs, got_outputs)):
        assert list(wanted) == list(got)
        assert all(np.array_equal(wanted[name], got[name]) for name in wanted)


def test_golden_bytes_that_are_not_what_the_manifest_says_are_refused() -> None:
    golden, data = described({"x": np.ones(4, np.float32)}, {"y": np.ones(2, np.float32)})
    with pytest.raises(UpdateError):
        unpack(golden, data[:-1])
    with pytest.raises(UpdateError):
        unpack(msgspec.structs.replace(golden, lengths=(8, 16)), data)
    with pytest.raises(UpdateError):
        unpack(msgspec.structs.replace(golden, lengths=(24,)), data)


@pytest.mark.parametrize(
    ("golden", "got", "precision", "is_near"),
    [
        (b"the river", b"the sea", "f32", True),
        (b"the river", b"a river", "f32", False),
        (b"the river", b"", "f32", False),
        ("Ähre".encode(), "Äpfel".encode(), "f32", True),
        ("Ähre".encode(), "Öfen".encode(), "f32", False),  # the first byte is the same, the character is not
        (b"", b"anything", "f32", True),
        (b"the river", b"a river", "int8", True),
    ],
)
def test_texts_that_a_language_model_writes_need_the_golden_beginning_where_its_weights_have_32_bits(
    golden: bytes, got: bytes, precision: str, is_near: bool
) -> None:
    forms = [TensorForm("text", "BYTES", (1,)), TensorForm("finish_reason", "BYTES", (1,))]

    def written(text: bytes, reason: bytes) -> dict[str, Array]:
        return {"text": np.array([text], object), "finish_reason": np.array([reason], object)}

    tolerance = WRITTEN_TOLERANCES[precision]
    found = differences(forms, written(golden, b"length"), written(got, b"stop"), tolerance)
    assert (found == []) == is_near, found
    assert tolerance == msgspec.json.decode(msgspec.json.encode(tolerance), type=type(tolerance))


@pytest.mark.parametrize(
    ("datatype", "golden", "got", "precision", "is_near"),
    [
        ("FP32", [1.0, 100.0], [1.001, 100.1], "f32", True),
        ("FP32", [1.0, 100.0], [1.1, 100.0], "f32", False),
        ("FP32", [1.0, 100.0], [1.1, 100.0], "bf16", True),
        ("FP32", [0.0, 1.0], [1e-5, 1.0], "f32", True),
        ("FP32", [1.0], [np.nan], "bf16", False),
        ("FP32", [1.0], [np.inf], "bf16", False),
        ("FP32", [1.0], [1.0, 1.0], "bf16", False),
        ("INT64", [3], [4], "f32", False),
        ("INT64", [3], [4], "f16", True),
        ("FP32", [], [], "f32", True),
    ],
)
def test_outputs_are_near_the_golden_ones_as_the_precision_allows(
    datatype: str, golden: list[float], got: list[float], precision: str, is_near: bool
) -> None:
    dtype = np.float32 if datatype == "FP32" else np.int64
    form = TensorForm("y", datatype, (len(golden),))
    found = differences([form], {"y": np.array(golden, dtype)}, {"y": np.array(got, dtype)}, TOLERANCES[precision])
    assert (found == []) is is_near


def test_bf16_is_compared_as_numbers_and_a_missing_output_is_named() -> None:
    form = TensorForm("y", "BF16", (2,))
    golden = {"y": bf16_from_fp32(np.array([1.0, -2.0], np.float32))}
    near = {"y": bf16_from_fp32(np.array([1.01, -2.01], np.float32))}
    far = {"y": bf16_from_fp32(np.array([1.0, 2.0], np.float32))}
    assert differences([form], golden, near, TOLERANCES["bf16"]) == []
    assert "1 of 2 values" in differences([form], golden, far, TOLERANCES["bf16"])[0]
    assert differences([form], golden, {}, TOLERANCES["bf16"]) == ["y: is missing"]


PIPELINE = msgspec.structs.replace(
    MANIFEST,
    artifacts=(
        Artifact(RELEASE.file("detect--model.onnx.step"), HASH, 10, "onnxruntime", "", "detect"),
        Artifact(RELEASE.file("read--model.onnx.step"), HASH, 10, "onnxruntime", "", "read"),
    ),
    pipeline="[[step]]",
    models=(StepModel("detect", {"max_batch_rows": 2}), StepModel("read")),
)


def test_a_pipelines_manifest_comes_back_with_its_models_and_where_their_files_lie() -> None:
    found = decode_manifest(encode_manifest(PIPELINE), RELEASE.manifest)
    assert found == PIPELINE
    assert [each.place for each in found.artifacts] == ["models/detect/model.onnx", "models/read/model.onnx"]


def test_a_models_manifest_has_the_bytes_that_it_had_before_there_were_pipelines() -> None:
    digest = "2e57a71e1cc67aae59818ba5110fa0b25eb0fb7bfbd9410f6d5a2a4b68f56007"
    assert hashlib.sha256(encode_manifest(MANIFEST)).hexdigest() == digest


@pytest.mark.parametrize(
    "changes",
    [
        {"models": ()},
        {"models": (StepModel("detect"), StepModel("detect"), StepModel("read"))},
        {"models": (StepModel("../detect"), StepModel("read"))},
        {"models": (StepModel("detect"), StepModel("read"), StepModel("other"))},
        {"artifacts": PIPELINE.artifacts[:1]},
        {"artifacts": (*PIPELINE.artifacts, Artifact(RELEASE.file("read--model.onnx"), HASH, 1, "", "", "read"))},
        {"artifacts": (*PIPELINE.artifacts, Artifact(RELEASE.file("detect--x.step"), HASH, 1, "", "", "read"))},
        {"artifacts": (*PIPELINE.artifacts, Artifact(RELEASE.file("read--.x.step"), HASH, 1, "", "", "read"))},
        {"artifacts": (*PIPELINE.artifacts, Artifact(RELEASE.file("model.onnx"), HASH, 1, "onnxruntime"))},
    ],
)
def test_a_signed_pipeline_whose_models_and_files_do_not_belong_together_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UpdateError, match=r"models|wanted a name like"):
        decode_manifest(encode_manifest(msgspec.structs.replace(PIPELINE, **changes)), RELEASE.manifest)
