"""Which backend may load which file, in the profile's order, and why none can."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import LoadFailed
from edge_runtime.repository.artifacts import choose_artifacts
from edge_runtime.repository.folder import VersionFolder

ONNX = ("onnxruntime", ("model.onnx",))
VINO = ("openvino", ("model.xml", "model.onnx"))
TRT = ("tensorrt", ("model.plan",))
PYTHON = ("python", ("model.py",))


def version_of(*names: str) -> VersionFolder:
    folder = Path("/models/digits/3")
    return VersionFolder("digits", 3, folder, {name: folder / name for name in names}, ())


@pytest.mark.parametrize(
    ("names", "backends", "chosen"),
    [
        (["model.onnx"], [ONNX], [("onnxruntime", "model.onnx")]),
        (["model.onnx"], [VINO, ONNX], [("openvino", "model.onnx"), ("onnxruntime", "model.onnx")]),
        (["model.onnx", "model.xml"], [ONNX, VINO], [("onnxruntime", "model.onnx"), ("openvino", "model.xml")]),
        (["net.onnx", "labels.txt"], [ONNX], [("onnxruntime", "net.onnx")]),
        (["net.xml", "net.bin"], [ONNX, VINO], [("openvino", "net.xml")]),
        (["a.onnx", "b.onnx", "model.xml"], [ONNX, VINO], [("openvino", "model.xml")]),
        (["model.plan", "model.onnx"], [TRT, ONNX], [("tensorrt", "model.plan"), ("onnxruntime", "model.onnx")]),
        (["model.py", "other.py"], [ONNX, PYTHON], [("python", "model.py")]),
        (["digits.onnx", "digits.onnx.data"], [ONNX], [("onnxruntime", "digits.onnx")]),
    ],
)
def test_each_backend_gets_its_best_artifact_in_the_profiles_order(
    names: list[str], backends: list[tuple[str, tuple[str, ...]]], chosen: list[tuple[str, str]]
) -> None:
    found = choose_artifacts(version_of(*names), backends)
    assert found == [(backend, Path("/models/digits/3") / name) for backend, name in chosen]


@pytest.mark.parametrize(
    ("names", "backends", "parts"),
    [
        ([], [ONNX], ["model digits version 3", "holds nothing", "wanted model.onnx for onnxruntime"]),
        (["labels.txt", "model.pt"], [ONNX, VINO], ["holds labels.txt, model.pt", "model.onnx or model.xml"]),
        (["a.onnx", "b.onnx"], [ONNX], ["a.onnx and b.onnx", "which one", "Name it model.onnx"]),
        (["other.py"], [PYTHON], ["holds other.py; wanted model.py"]),
        (["model.onnx"], [], ["no backend is available"]),
        (["net.xml"], [VINO], ["holds net.xml"]),
    ],
)
def test_no_artifact_says_what_is_there_and_what_is_wanted(
    names: list[str], backends: list[tuple[str, tuple[str, ...]]], parts: list[str]
) -> None:
    with pytest.raises(LoadFailed) as caught:
        choose_artifacts(version_of(*names), backends)
    for part in parts:
        assert part in caught.value.message


FILES = st.lists(
    st.sampled_from(["model.onnx", "a.onnx", "b.onnx", "model.xml", "a.xml", "a.bin", "model.py"]), unique=True
)


@given(FILES, st.lists(st.sampled_from([ONNX, VINO, TRT, PYTHON]), unique=True))
def test_what_is_chosen_is_there_and_of_a_kind_the_backend_loads(
    names: list[str], backends: list[tuple[str, tuple[str, ...]]]
) -> None:
    try:
        chosen = choose_artifacts(version_of(*names), backends)
    except LoadFailed:
        return
    order = [name for name, _ in backends]
    assert [backend for backend, _ in chosen] == [name for name in order if name in dict(chosen)]
    for backend, file in chosen:
        assert file.name in names
        assert file.suffix in {Path(wanted).suffix for wanted in dict(backends)[backend]}
