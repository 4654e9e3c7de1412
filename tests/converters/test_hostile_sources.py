"""Broken and hostile models end in one clear sentence; nothing of theirs runs, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.formats import SourceFormat
from edge_runtime_converters.options import ConversionOptions, Target
from tests.converters.sources import DIGITS, TENSORFLOW, needs, present, source_of


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(source: Path, match: str, target: Target = "onnx", **options: Any) -> None:
    """Convert, and hold that it fails with these words, leaving the folder as it was."""
    before = sorted(path.name for path in Path().rglob("*"))
    with pytest.raises(ConversionFailed, match=match):
        convert(ConversionOptions(source=str(source), target=target, output=f"out{_SUFFIX[target]}", **options))
    assert sorted(path.name for path in Path().rglob("*")) == before
    assert not Path("canary").exists()


_SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "ort": ".ort"}


def onnx_model(location: str | None = None, domain: str = "") -> Path:
    """A model whose weight lies in another file, or whose operator is somebody's."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4], np.zeros(4, np.float32).tobytes(), raw=True)
    if location is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"], domain=domain)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])], [weight],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path = Path("model.onnx")
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return path


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret"])
@pytest.mark.parametrize("target", ["ort", "openvino"])
def test_onnx_data_outside_the_models_folder_is_never_read(location: str, target: Target) -> None:
    refused(onnx_model(location), "is refused", target)


def test_onnx_data_that_is_a_link_elsewhere_is_never_read() -> None:
    Path("data").symlink_to("/etc/passwd")
    refused(onnx_model("data"), "symbolic link", "ort")


def test_an_operator_that_nobody_knows_is_named() -> None:
    refused(onnx_model(domain="somebody.else"), "somebody.else", "ort")


@pytest.mark.parametrize("length", [1, 100, 10_000, 154_000])
@pytest.mark.parametrize("target", ["ort", "openvino"])
def test_a_truncated_onnx_file_is_refused(length: int, target: Target) -> None:
    Path("model.onnx").write_bytes(DIGITS.read_bytes()[:length])
    refused(Path("model.onnx"), "model.onnx", target)


def test_an_onnx_file_of_another_kind_is_refused() -> None:
    Path("model.onnx").write_bytes(b"GIF89a" + bytes(100))
    refused(Path("model.onnx"), "not a sound ONNX file", "ort")


def test_an_onnx_tensor_that_declares_more_than_there_is_is_refused() -> None:
    model = onnx.load(onnx_model())
    model.graph.initializer[0].dims[0] = 1 << 40
    Path("model.onnx").write_bytes(model.SerializeToString())
    refused(Path("model.onnx"), "model.onnx", "ort")


def pickled(path: Path, member: str | None = None) -> Path:
    """A pickle that makes a file when it is read (written by hand: nothing here can unpickle)."""
    content = b"\x80\x02cos\nsystem\n(S'touch canary'\ntR."
    if member is None:
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
            archive.writestr(member.replace("data.pkl", "version"), b"3")
    return path


@pytest.mark.parametrize("name", ["model.pt", "model.pkl", "model.joblib", "model.bin"])
def test_a_pickle_is_refused_with_advice_whatever_it_is_called(name: str) -> None:
    refused(pickled(Path(name)), r"torch\.export\.save.*skops\.io\.dump")


def test_a_pickled_pytorch_module_is_refused_with_advice() -> None:
    refused(pickled(Path("model.pt"), "model/data.pkl"), r"torch\.export\.save")


def test_a_saved_model_that_calls_python_is_refused_by_the_operators_name() -> None:
    refused(TENSORFLOW / "py_function", "EagerPyFunc", "openvino")


def test_a_saved_model_with_a_link_is_refused() -> None:
    shutil.copytree(TENSORFLOW / "saved_model", "saved")
    target = Path("saved/variables/variables.index")
    target.unlink()
    target.symlink_to("/etc/passwd")
    refused(Path("saved"), "symbolic link", "openvino")


@pytest.mark.parametrize("length", [12, 3_000, 10_000])
def test_a_truncated_tflite_file_is_refused(length: int) -> None:
    Path("model.tflite").write_bytes((TENSORFLOW / "model.tflite").read_bytes()[:length])
    refused(Path("model.tflite"), "model.tflite", "openvino")


def test_a_truncated_saved_model_is_refused() -> None:
    shutil.copytree(TENSORFLOW / "saved_model", "saved")
    model = Path("saved/saved_model.pb")
    model.write_bytes(model.read_bytes()[:4_000])
    refused(Path("saved"), "saved", "openvino")


def test_a_fifo_and_a_device_are_not_waited_for() -> None:
    os.mkfifo("model.pipe")
    refused(Path("model.pipe"), "regular file")
    refused(Path("/dev/zero"), "regular file")


def test_a_skops_file_with_a_type_that_runs_code_is_refused(tmp_path: Path) -> None:
    _, skops = needs("sklearn", "skops.io")

    class Payload:
        pass

    skops.dump(Payload(), "model.skops")
    with zipfile.ZipFile("model.skops") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(members["schema.json"])
    schema |= {"__class__": "system", "__module__": "os", "__loader__": "FunctionNode", "content": "os.system"}
    members["schema.json"] = json.dumps(schema).encode()
    with zipfile.ZipFile("model.skops", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    refused(Path("model.skops"), "which could run code|skops cannot read it")


@pytest.mark.parametrize("child", [-5, 0, 1 << 30])
def test_a_tree_that_leads_out_of_itself_is_refused(tmp_path: Path, child: int) -> None:
    tree, skops = needs("sklearn.tree", "skops.io")
    model = tree.DecisionTreeClassifier().fit(np.arange(8).reshape(-1, 1), np.arange(8) % 2)
    nodes = model.tree_.__getstate__()["nodes"]
    skops.dump(model, "model.skops")
    with zipfile.ZipFile("model.skops") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    damaged = nodes.copy()
    damaged["left_child"][0] = child
    found = [name for name, content in members.items() if nodes.tobytes() in content]
    assert found, "the nodes lie in the archive as they are"
    for name in found:
        members[name] = members[name].replace(nodes.tobytes(), damaged.tobytes())
    with zipfile.ZipFile("model.skops", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    refused(Path("model.skops"), "leads out of itself")


@pytest.mark.parametrize("content", [b'{"learner": {}}', b'{"learner": ' + b"[" * 10_000, b'{"learner": 1e999}'])
def test_a_damaged_xgboost_file_is_refused(content: bytes) -> None:
    present("xgboost")
    Path("model.json").write_bytes(content)
    refused(Path("model.json"), "model.json")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "source",
    [SourceFormat.XGBOOST, SourceFormat.LIGHTGBM, SourceFormat.CATBOOST, SourceFormat.SKLEARN, SourceFormat.PYTORCH],
)
def test_a_truncated_file_of_any_library_is_refused(source: SourceFormat, share: float, tmp_path: Path) -> None:
    whole = source_of(source, tmp_path)
    content = whole.read_bytes()
    whole.unlink()
    cut = Path(f"cut{whole.suffix}")
    cut.write_bytes(content[: int(len(content) * share)])
    refused(cut, "cut")


def test_a_model_that_wants_more_memory_than_there_is_fails_in_its_own_process() -> None:
    size = helper.make_tensor("size", TensorProto.INT64, [1], [1 << 42])
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["size"], ["big"]), helper.make_node("ReduceSum", ["big"], ["sum"]),
         helper.make_node("Add", ["x", "sum"], ["y"])],
        "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])], [size],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    Path("model.onnx").write_bytes(model.SerializeToString())
    refused(Path("model.onnx"), "model.onnx|memory", "ort")
