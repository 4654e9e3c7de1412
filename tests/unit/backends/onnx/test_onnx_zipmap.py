"""Models that end in ZipMap, as scikit-learn's exporter writes them by default, are served with tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnx.zipmap import without_zipmaps, zipmap_classes
from edge_runtime.backends.registry import backend
from edge_runtime.errors import LoadFailed
from edge_runtime.pictures.model_metadata import read_metadata
from tests.models import onnx_models

ROWS = np.array([[0, 1], [2, 0], [1, 1]], np.float32)


def classifier(folder: Path, classes: list[Any], *, own_opset: bool = True, maps: int = 1) -> Path:
    """x FP32 [rows, 2] -> label, and dictionaries of the scores x0, x1, -x0, as skl2onnx lays a model out."""
    kind, key = ("strings", TensorProto.STRING) if isinstance(classes[0], str) else ("int64s", TensorProto.INT64)
    words = {"classlabels_strings" if kind == "strings" else "classlabels_ints": classes}
    nodes = [
        helper.make_node(
            "LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", multi_class=1, post_transform="NONE",
            coefficients=[1.0, 0.0, 0.0, 1.0, -1.0, 0.0], intercepts=[0.0, 0.0, 0.0], **words,
        )
    ]  # fmt: skip
    outputs = [helper.make_tensor_value_info("label", key, ["rows"])]
    for place in range(maps):
        name = f"output_probability{place or ''}"
        nodes.append(
            helper.make_node("ZipMap", ["scores"], [name], domain="ai.onnx.ml", **{f"classlabels_{kind}": classes})
        )
        dictionary = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        outputs.append(helper.make_value_info(name, helper.make_sequence_type_proto(dictionary)))
    described = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2])
    opsets = [helper.make_opsetid("ai.onnx.ml", 1), *([helper.make_opsetid("", 15)] if own_opset else [])]
    model = helper.make_model(
        helper.make_graph(nodes, "classifier", [described], outputs), opset_imports=opsets, ir_version=8
    )
    helper.set_model_props(model, {"about": "kept"})
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("classes", [[3, -1, 1 << 40], ["no", "maybe", "yes"]])
@pytest.mark.parametrize("own_opset", [True, False])
def test_label_and_scores_are_tensors(tmp_path: Path, classes: list[Any], own_opset: bool) -> None:
    instance = backend("onnxruntime").load(classifier(tmp_path, classes, own_opset=own_opset), LoadOptions())
    try:
        found = [(tensor.name, tensor.datatype, tensor.shape) for tensor in instance.spec.outputs]
        kind = "BYTES" if isinstance(classes[0], str) else "INT64"
        assert found == [("label", kind, (-1,)), ("output_probability", "FP32", (-1, 3))]
        assert instance.spec.may_batch
        label, scores = instance.run({"x": ROWS})
        assert scores.tolist() == [[0, 1, 0], [2, 0, -2], [1, 1, -1]]
        named = [name.encode() if isinstance(name, str) else name for name in classes]
        assert label.tolist()[:2] == [named[1], named[0]]
    finally:
        instance.close()


@pytest.mark.parametrize("classes", [[3, -1, 1 << 40], ["no", "maybe", "yes"]])
def test_its_keys_are_the_names_of_the_classes(tmp_path: Path, classes: list[Any]) -> None:
    artifact = classifier(tmp_path, classes)
    assert zipmap_classes(artifact) == tuple(map(str, classes))
    assert read_metadata(artifact).names == tuple(map(str, classes))


def test_several_are_all_rewritten_and_name_no_classes(tmp_path: Path) -> None:
    artifact = classifier(tmp_path, [0, 1, 2], maps=3)
    instance = backend("onnxruntime").load(artifact, LoadOptions())
    assert [tensor.datatype for tensor in instance.spec.outputs] == ["INT64", "FP32", "FP32", "FP32"]
    instance.close()
    assert zipmap_classes(artifact) == ()


def test_nothing_else_of_the_model_changes(tmp_path: Path) -> None:
    artifact = classifier(tmp_path, ["a", "b", "c"])
    content = without_zipmaps(artifact)
    assert content is not None
    before, after = onnx.load(artifact), onnx.load_from_string(content)
    onnx.checker.check_model(after)
    assert after.graph.node[1].op_type == "Identity"
    after.graph.node[1].CopyFrom(before.graph.node[1])
    after.graph.output[1].CopyFrom(before.graph.output[1])
    assert after == before


def test_a_model_without_is_left_alone(tmp_path: Path) -> None:
    assert without_zipmaps(onnx_models.mlp(tmp_path)) is None
    assert zipmap_classes(onnx_models.mlp(tmp_path)) == ()


def test_another_sequence_is_still_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="cannot be sent"):
        backend("onnxruntime").load(onnx_models.sequence_output(tmp_path), LoadOptions())


def test_damaged_models_are_refused_and_never_read_beyond(tmp_path: Path) -> None:
    whole = classifier(tmp_path, ["a", "b", "c"]).read_bytes()
    chance = random.Random(3)
    broken = tmp_path / "broken.onnx"
    refused = 0
    for _ in range(400):
        content = bytearray(whole[: chance.randrange(1, len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        broken.write_bytes(content)
        try:
            without_zipmaps(broken)
            zipmap_classes(broken)
        except LoadFailed:
            refused += 1
    assert 20 < refused < 400


def test_a_missing_locale_is_named_with_the_package_that_brings_it(tmp_path: Path) -> None:
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="xx_XX.UTF-8")
    text = [helper.make_tensor_value_info(name, TensorProto.STRING, ["rows"]) for name in "xy"]
    artifact = onnx_models.save(tmp_path, helper.make_graph([node], "text", text[:1], text[1:]))
    with pytest.raises(LoadFailed, match=r"xx_XX\.UTF-8.*apt-get install locales.*C\.UTF-8"):
        backend("onnxruntime").load(artifact, LoadOptions())


@pytest.mark.parametrize("size", [1_000, 1_000_001])
def test_numbers_without_an_end_are_refused_at_once(tmp_path: Path, size: int) -> None:
    endless = b"\x80" * size
    keys = helper.make_attribute("classlabels_int64s", endless)  # a text, whose field then becomes that of numbers
    node = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml")
    node.attribute.append(keys)
    model = helper.make_model(helper.make_graph([node], "g", [], []), opset_imports=[helper.make_opsetid("", 15)])
    content = bytearray(model.SerializeToString())
    at = content.index(endless)
    text, numbers = 0x22, 0x42  # fields 4 and 8, both with a length
    at = content.rindex(bytes([text]), 0, at)
    content[at] = numbers
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(LoadFailed, match=r"more than (ten bytes|100000 classes)"):
        zipmap_classes(tmp_path / "model.onnx")
    assert read_metadata(tmp_path / "model.onnx").names == ()
