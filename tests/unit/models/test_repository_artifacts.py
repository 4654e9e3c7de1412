"""Which backend may load which file, in the profile's order, and why none can."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import LoadFailed
from edge_runtime.models.artifacts import Want, choose_artifacts
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.names import variant_of

ONNX = ("onnxruntime", ("model.onnx",))
VINO = ("openvino", ("model.xml", "model.onnx"))
TRT = ("tensorrt", ("model.plan",))
PYTHON = ("python", ("model.py",))


Backend = tuple[str, tuple[str, ...]]


def chosen_of(names: list[str], backends: list[Backend], precision: str = "") -> list[tuple[str, Path]]:
    paths = choose_artifacts(version_of(*names), [Want(name, files, precision) for name, files in backends])
    return [(name, path) for (name, _), path in zip(backends, paths, strict=True) if path is not None]


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
    names: list[str], backends: list[Backend], chosen: list[tuple[str, str]]
) -> None:
    found = chosen_of(names, backends)
    assert found == [(backend, Path("/models/digits/3") / name) for backend, name in chosen]


@pytest.mark.parametrize(
    ("left_out", "of_language", "of_graphs"),
    [
        ((), "openvino_model.xml", None),
        (("openvino_detokenizer.xml", "openvino_detokenizer.bin"), None, None),
        (
            tuple(f"openvino_{name}.{suffix}" for name in ("tokenizer", "detokenizer") for suffix in ("xml", "bin")),
            None,
            "openvino_model.xml",
        ),
    ],
)
def test_a_backend_with_files_beside_its_artifact_takes_no_folder_without_one(
    left_out: tuple[str, ...], of_language: str | None, of_graphs: str | None
) -> None:
    names = [f"openvino_{name}.{suffix}" for name in ("model", "tokenizer", "detokenizer") for suffix in ("xml", "bin")]
    version = version_of("config.json", *(name for name in names if name not in left_out))
    beside = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
    language = Want("openvino-genai", ("openvino_model.xml",), beside=beside).find(version)
    graphs = Want("openvino", ("model.xml", "model.onnx")).find(version)
    assert (language and language.name, graphs and graphs.name) == (of_language, of_graphs)


@pytest.mark.parametrize(
    ("names", "backends", "parts"),
    [
        ([], [ONNX], ["holds nothing", "wanted model.onnx for onnxruntime"]),
        (["labels.txt", "model.pt"], [ONNX, VINO], ["holds labels.txt, model.pt", "model.onnx or model.xml"]),
        (["a.onnx", "b.onnx"], [ONNX], ["a.onnx and b.onnx", "which one", "Name it model.onnx"]),
        (["other.py"], [PYTHON], ["holds other.py; wanted model.py"]),
        (["model.onnx"], [], ["no backend is available"]),
        (["net.xml"], [VINO], ["holds net.xml"]),
    ],
)
def test_no_artifact_says_what_is_there_and_what_is_wanted(
    names: list[str], backends: list[Backend], parts: list[str]
) -> None:
    with pytest.raises(LoadFailed) as caught:
        chosen_of(names, backends)
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("names", "precision", "backend", "chosen"),
    [
        (["model.onnx", "model.int8.onnx"], "", ONNX, "model.onnx"),
        (["model.onnx", "model.int8.onnx"], "f32", ONNX, "model.onnx"),
        (["model.onnx", "model.int8.onnx"], "int8", ONNX, "model.int8.onnx"),
        (["model.onnx", "model.int8.onnx"], "int8", VINO, "model.int8.onnx"),
        (["model.onnx", "model.xml", "model.int8.onnx"], "int8", VINO, "model.int8.onnx"),
        (["model.int8.xml", "model.int8.bin", "model.int8.onnx"], "int8", VINO, "model.int8.xml"),
        (["net.onnx", "net.int8.onnx"], "int8", ONNX, "net.int8.onnx"),
        (["net.onnx", "net.int8.onnx"], "", ONNX, "net.onnx"),
        (["model.onnx"], "int8", ONNX, "model.onnx"),
        (["model.onnx", "model.f16.onnx"], "bf16", ONNX, "model.onnx"),
        (["model.onnx", "model.f16.onnx"], "f16", ONNX, "model.f16.onnx"),
        (["model.py", "model.int8.onnx"], "int8", PYTHON, "model.py"),
    ],
)
def test_a_variant_is_taken_where_its_precision_is_asked_for(
    names: list[str], precision: str, backend: Backend, chosen: str
) -> None:
    assert [path.name for _, path in chosen_of(names, [backend], precision)] == [chosen]


@pytest.mark.parametrize("precision", ["", "f32", "f16"])
def test_a_variant_that_is_all_there_is_is_the_model(precision: str) -> None:
    found = chosen_of(["model.f16.xml", "model.f16.bin"], [ONNX, VINO], precision)
    assert [(name, path.name) for name, path in found] == [("openvino", "model.f16.xml")]


@pytest.mark.parametrize("precision", ["", "f32"])
def test_which_of_several_variants_is_the_model_must_be_asked_for(precision: str) -> None:
    names = ["net.int8.onnx", "net.f16.onnx"]
    with pytest.raises(LoadFailed, match=r"holds .*only when it is asked for, with precision = 'f16' or 'int8'"):
        chosen_of(names, [ONNX, VINO], precision)


def test_the_same_backend_may_be_asked_twice_with_the_plain_model_second() -> None:
    wants = [Want(*ONNX, "int8"), Want(*ONNX)]
    paths = choose_artifacts(version_of("model.onnx", "model.int8.onnx"), wants)
    assert [path and path.name for path in paths] == ["model.int8.onnx", "model.onnx"]


FILES = st.lists(
    st.sampled_from(
        [
            "model.onnx", "a.onnx", "b.onnx", "model.xml", "a.xml", "a.bin", "model.py",
            "model.int8.onnx", "a.int8.onnx", "model.int8.xml", "a.f16.onnx", "a.bf16.xml", "a.bf16.bin",
        ]
    ),
    unique=True,
)  # fmt: skip


@given(FILES, st.lists(st.sampled_from([ONNX, VINO, TRT, PYTHON]), unique=True), st.sampled_from(["", "f32"]))
def test_no_variant_is_ever_chosen_unasked_beside_another_model(
    names: list[str], backends: list[Backend], precision: str
) -> None:
    try:
        chosen = chosen_of(names, backends, precision)
    except LoadFailed:
        return
    precisions = {variant_of(name) for name in names if name.endswith((".onnx", ".xml"))}
    assert all(variant_of(path.name) == "" or len(precisions) == 1 for _, path in chosen)


@given(FILES, st.lists(st.sampled_from([ONNX, VINO, TRT, PYTHON]), unique=True))
def test_a_chosen_file_is_there_and_of_a_kind_the_backend_loads(names: list[str], backends: list[Backend]) -> None:
    try:
        chosen = chosen_of(names, backends)
    except LoadFailed:
        return
    order = [name for name, _ in backends]
    assert [backend for backend, _ in chosen] == [name for name in order if name in dict(chosen)]
    for backend, file in chosen:
        assert file.name in names
        assert file.suffix in {Path(wanted).suffix for wanted in dict(backends)[backend]}


def test_a_file_of_the_kind_under_another_usual_suffix_stands_for_the_artifact(tmp_path: Path) -> None:
    for name, member in (("best.torchscript", "best/code/x.py"), ("weights.pth", "weights/data.pkl")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, b"")
    files = {path.name: path for path in tmp_path.iterdir()}
    wants = [Want("pytorch", ("model.pt", "model.pt2")), Want("onnxruntime", ("model.onnx",))]
    found = choose_artifacts(VersionFolder("m", 1, tmp_path, files, ()), wants)
    assert found == [tmp_path / "best.torchscript", None]
