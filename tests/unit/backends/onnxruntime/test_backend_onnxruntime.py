"""What is particular to ONNX Runtime: options, precision, external data, and an environment that must not count."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnx.files import check_onnx_files, weight_precision
from edge_runtime.backends.onnxruntime.backend import (
    NOTHING,
    PROVIDERS,
    OnnxRuntimeBackend,
    choose_providers,
    prepare_onnxruntime,
)
from edge_runtime.errors import BackendUnavailable, LoadFailed
from tests.models import onnx_models

BACKEND = OnnxRuntimeBackend()


def test_weights_in_a_subfolder_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(np.array([9, 1, 2], np.float32).tobytes())
    artifact = onnx_models.add_weights(tmp_path, onnx_models.external_tensor("data/w.bin", offset="4", length="8"))
    instance = BACKEND.load(artifact, LoadOptions())
    try:
        np.testing.assert_array_equal(instance.run({"x": np.zeros((1, 2), np.float32)})[0], [[1, 2]])
    finally:
        instance.close()


def test_weights_outside_the_folder_never_reach_the_library(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    artifact = onnx_models.add_weights(tmp_path / "1", onnx_models.external_tensor("../secret"))
    with pytest.raises(LoadFailed, match="leaves the model's folder"):
        BACKEND.load(artifact, LoadOptions())


def test_a_model_cannot_configure_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ORT_LOAD_CONFIG_FROM_MODEL=1` lets a model's metadata set session options; a broken one would fail the load."""
    artifact = onnx_models.mlp(tmp_path)
    entry = helper.make_model(helper.make_graph([], "g", [], [])).metadata_props.add()
    entry.key, entry.value = "ort_config", "this is not JSON"
    content = entry.SerializeToString()
    artifact.write_bytes(artifact.read_bytes() + b"\x72" + bytes([len(content)]) + content)
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    BACKEND.load(artifact, LoadOptions()).close()


@pytest.mark.parametrize("device", ["CUDA", "CUDA:1", "TENSORRT", "OPENVINO:GPU"])
def test_a_provider_that_is_not_built_in_is_unavailable_with_what_there_is(tmp_path: Path, device: str) -> None:
    if device.partition(":")[0] in BACKEND.probe().devices:
        pytest.skip(f"this ONNX Runtime has {device}")
    with pytest.raises(BackendUnavailable, match=r"built without .*ExecutionProvider; it has .*CPUExecutionProvider"):
        BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(device=device))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"trt_extra_plugin_lib_paths": "/tmp/evil.so"}, "loads code from a path"),
        ({"arenas": "1"}, "no option 'arenas'; known: allow_cpu_nodes, arena, optimization"),
        ({"optimization": "most"}, "wanted one of disabled, basic, extended, all"),
    ],
)
def test_options_it_does_not_know_fail_to_load(tmp_path: Path, extra: dict[str, str], reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(extra=extra))


def test_a_dla_is_asked_for_by_the_options_of_the_tensorrt_provider(tmp_path: Path) -> None:
    """What ONNX Runtime for Jetson is given; the choice is pure, and takes a library's list of providers."""
    library = SimpleNamespace(__version__="1.23", get_available_providers=lambda: [*PROVIDERS.values()])
    extra = {"trt_dla_enable": "1", "trt_dla_core": "0"}
    files = check_onnx_files(onnx_models.mlp(tmp_path))
    chosen = choose_providers(library, "TENSORRT", "", LoadOptions(precision="f16", extra=extra), files)
    assert chosen == [
        ("TensorrtExecutionProvider", {**extra, "trt_fp16_enable": "1"}),
        ("CUDAExecutionProvider", {"use_tf32": "0"}),
    ]


@pytest.mark.parametrize(("extra", "runs"), [({}, "0"), ({"use_tf32": "1"}, "1")])
def test_a_gpu_multiplies_f32_as_it_is_unless_tf32_is_asked_for(
    tmp_path: Path, extra: dict[str, str], runs: str
) -> None:
    library = SimpleNamespace(__version__="1.31", get_available_providers=lambda: [*PROVIDERS.values()])
    files = check_onnx_files(onnx_models.mlp(tmp_path))
    ((provider, options),) = choose_providers(library, "CUDA", "1", LoadOptions(extra=extra), files)
    assert (provider, options) == ("CUDAExecutionProvider", {"use_tf32": runs, "device_id": "1"})


@pytest.mark.parametrize("extra", [{"arena": "0"}, {"optimization": "disabled"}])
def test_options_it_knows_leave_the_answer_alone(tmp_path: Path, extra: dict[str, str]) -> None:
    artifact, x = onnx_models.mlp(tmp_path), np.ones((3, 16), np.float32)
    answers = []
    for options in (LoadOptions(), LoadOptions(extra=extra, spin=True, threads=2)):
        instance = BACKEND.load(artifact, options)
        answers.append(instance.run({"x": x})[0])
        instance.close()
    np.testing.assert_allclose(*answers, rtol=1e-5)


@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_a_precision_the_cpu_cannot_change_to_is_unavailable(tmp_path: Path, precision: str) -> None:
    if precision == "bf16" and platform.machine() == "aarch64":
        pytest.skip("64-bit ARM has fast bf16 products")
    with pytest.raises(BackendUnavailable, match="precision that it was exported in"):
        BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(precision=precision))


def test_the_exported_precision_is_reported(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones((2,), np.float16), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 2]) for name in ("x", "y")]
    artifact = onnx_models.save(tmp_path, helper.make_graph([node], "g", info[:1], info[1:], [weights]))
    instance = BACKEND.load(artifact, LoadOptions())
    assert instance.precision == "f16"
    instance.close()


@pytest.mark.parametrize(
    ("elements", "precision"),
    [
        ({}, ""),
        ({7: 100}, ""),  # only shapes
        ({1: 5}, "f32"),
        ({10: 95, 1: 5}, "f16"),
        ({16: 95, 1: 5}, "bf16"),
        ({3: 95, 1: 5, 6: 50}, "int8"),  # int32 biases are not judged
        ({2: 50, 3: 45, 1: 5}, "int8"),
        ({1: 50, 10: 50}, "mixed"),
        ({11: 1}, "f64"),
        ({1: 0}, ""),
    ],
)
def test_precision_is_that_of_nine_weights_in_ten(elements: dict[int, int], precision: str) -> None:
    assert weight_precision(elements) == precision


def test_an_output_that_is_not_a_tensor_fails_to_load_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"'y' is seq\(tensor\(float\)\)"):
        BACKEND.load(onnx_models.sequence_output(tmp_path), LoadOptions())


def test_the_model_of_nothing_is_a_sound_one_and_its_session_starts_no_thread() -> None:
    onnx.checker.check_model(onnx.load_from_string(NOTHING), full_check=True)
    before = len(list(Path("/proc/self/task").iterdir()))
    prepare_onnxruntime()
    assert len(list(Path("/proc/self/task").iterdir())) == before
