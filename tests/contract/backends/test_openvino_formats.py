"""Formats of other libraries that OpenVINO reads itself (SavedModel, TensorFlow Lite, PaddlePaddle); IR with state."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.openvino.backend import OpenVinoBackend
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.artifacts import Want, choose_artifacts
from edge_runtime.models.folder import VersionFolder
from edge_runtime.profiles.profile import BackendChoice
from tests.models import ir_models, litert_models, onnx_models, paddle_models

TENSORFLOW = Path(__file__).parents[2] / "models" / "tensorflow"


def saved_model(folder: Path) -> Path:
    shutil.copytree(TENSORFLOW / "saved_model", folder, dirs_exist_ok=True)
    return folder / "saved_model.pb"


def tflite(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(TENSORFLOW / "model.tflite", folder))


MAKERS: dict[str, Callable[[Path], Path]] = {
    "saved_model": saved_model,
    "tflite": tflite,
    "paddle": paddle_models.mlp,
}


def load(artifact: Path) -> Instance:
    return OpenVinoBackend().load(artifact, LoadOptions())


def digits() -> tuple[dict[str, np.ndarray], np.ndarray]:
    with np.load(TENSORFLOW / "expected.npz") as kept:
        return {"image": kept["image"]}, kept["chances"]


def numbers() -> tuple[dict[str, np.ndarray], np.ndarray]:
    x = np.random.default_rng(7).normal(size=(8, 16)).astype(np.float32)
    first, second = onnx_models.mlp_weights()
    return {"x": x}, np.maximum(x @ first, 0) @ second


def expected(kind: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Eight rows, and what the library that made the model answers to them."""
    return numbers() if kind == "paddle" else digits()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_any_number_of_rows_is_answered_as_the_source_does(kind: str, rows: int, tmp_path: Path) -> None:
    instance = load(MAKERS[kind](tmp_path))
    try:
        inputs, wanted = expected(kind)
        assert instance.spec.may_batch
        (got,) = instance.run({name: array[:rows] for name, array in inputs.items()})
        np.testing.assert_allclose(got, wanted[:rows], rtol=1e-4, atol=1e-5)
    finally:
        instance.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_inputs_and_outputs_have_the_names_of_the_signature(kind: str, tmp_path: Path) -> None:
    instance = load(MAKERS[kind](tmp_path))
    instance.close()
    names = ModelSpec((TensorSpec("image", "FP32", (-1, 64)),), (TensorSpec("chances", "FP32", (-1, 10)),))
    if kind == "paddle":
        names = ModelSpec((TensorSpec("x", "FP32", (-1, 16)),), (TensorSpec("y", "FP32", (-1, 4)),))
    assert instance.spec == names


def test_a_tflite_file_without_a_signature_has_its_tensors_names_without_their_ports(tmp_path: Path) -> None:
    artifact = tflite(tmp_path)
    content = bytearray(artifact.read_bytes())
    (model,) = struct.unpack_from("<I", content)
    fields = model - struct.unpack_from("<i", content, model)[0]
    struct.pack_into("<H", content, fields + 4 + 2 * 7, 0)  # signature_defs
    artifact.write_bytes(content)
    instance = load(artifact)
    instance.close()
    assert [each.name for each in instance.spec.inputs] == ["serving_default_image"]
    assert [each.name for each in instance.spec.outputs] == ["StatefulPartitionedCall"]


def test_a_tflite_file_of_one_row_takes_any_number_where_each_is_answered_as_alone(tmp_path: Path) -> None:
    instance = load(litert_models.mlp(tmp_path, rows=1))
    try:
        inputs, wanted = numbers()
        assert instance.spec.may_batch
        np.testing.assert_allclose(instance.run(inputs)[0], wanted, rtol=1e-4, atol=1e-5)
    finally:
        instance.close()


@pytest.mark.parametrize("model", ["running_sum", "reshaped", "shared_maximum"])
def test_a_tflite_file_of_one_row_that_would_mix_rows_keeps_to_one(model: str, tmp_path: Path) -> None:
    instance = load(getattr(litert_models, model)(tmp_path, rows=1))
    try:
        assert instance.spec.inputs[0].shape == (1, 4)
        (got,) = instance.run({"x": np.array([[1, 2, 3, 4]], np.float32)})
        wanted = [0, 0, 0, 0] if model == "shared_maximum" else [1, 2, 3, 4]
        np.testing.assert_array_equal(got.ravel(), wanted)
    finally:
        instance.close()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("isolation", ["auto", "never"])
def test_a_daemon_serves_it_in_a_host_whatever_its_isolation(kind: str, isolation: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.toml").write_text('backend = "openvino"\n')
    inputs, wanted = expected(kind)
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"), isolation=isolation)
    with Runtime(tmp_path / "models", config=config) as runtime:
        (told,) = runtime.models()
        assert (told["state"], told["backend"]) == ("ready", "openvino")
        assert told["host"]["pid"] not in (0, os.getpid())
        (got,) = runtime.infer("m", inputs).outputs.values()
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ['isolation = "always"', 'isolation = "never"', "instances = 3"])
def test_each_request_to_a_model_that_keeps_state_is_for_itself(where: str, tmp_path: Path) -> None:
    ir_models.remembering(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.toml").write_text(f"{where}\n")
    config = Config(watch=False, state=str(tmp_path / "state"))
    with Runtime(tmp_path / "models", config=config) as runtime, ThreadPoolExecutor(4) as pool:
        given = [np.full((1 + turn % 3, 2), turn, np.float32) for turn in range(60)]
        for x, result in zip(given, pool.map(lambda x: runtime.infer("m", {"x": x}), given), strict=True):
            np.testing.assert_array_equal(result.outputs["sum"], x + 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_that_asks_to_run_inside_is_refused(kind: str, tmp_path: Path) -> None:
    artifact = MAKERS[kind](tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.toml").write_text('isolation = "never"\n')
    with Runtime(tmp_path / "models", config=Config(watch=False, state=str(tmp_path / "state"))) as runtime:
        (told,) = runtime.models()
        assert told["state"] == "failed"
        assert f'isolation = "never" is refused for {artifact.name}' in told["reason"]


def test_of_several_the_ir_is_taken_then_onnx_then_the_saved_model_then_tflite(tmp_path: Path) -> None:
    made = [
        ir_models.from_onnx(onnx_models.mlp(tmp_path), tmp_path),
        tmp_path / "model.onnx",
        saved_model(tmp_path),
        tflite(tmp_path),
        paddle_models.mlp(tmp_path),
    ]
    want = Want(BackendChoice(name="openvino").name, OpenVinoBackend.declaration.artifacts)
    for first, artifact in enumerate(made):
        files = {path.name: path for path in (*made[first:], tmp_path / "model.bin")}
        assert choose_artifacts(VersionFolder("m", 1, tmp_path, files, ()), [want]) == [artifact]


def test_a_saved_model_that_calls_python_is_refused_by_the_operators_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadFailed, match="No conversion rule found for operations: EagerPyFunc"):
        load(TENSORFLOW / "py_function" / "saved_model.pb")
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    ("kind", "location"),
    [("saved_model", "variables/variables.index"), ("saved_model", "variables"), ("paddle", "model.pdiparams")],
)
def test_data_that_is_a_link_elsewhere_is_never_read(kind: str, location: str, tmp_path: Path) -> None:
    artifact = MAKERS[kind](tmp_path / "m")
    outside = tmp_path / "outside"
    (tmp_path / "m" / location).rename(outside)
    (tmp_path / "m" / location).symlink_to(outside)
    with pytest.raises(LoadFailed, match=f"'{location}' is refused.*symbolic link"):
        load(artifact)


def test_a_file_of_variables_with_two_names_is_refused(tmp_path: Path) -> None:
    artifact = saved_model(tmp_path / "m")
    os.link(tmp_path / "m" / "variables" / "variables.index", tmp_path / "second")
    with pytest.raises(LoadFailed, match="hard links"):
        load(artifact)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"<html>not found</html>", b"\x08\x01\x12\xff\xff\xff\x0f"])
def test_a_file_that_is_not_such_a_model_is_refused_before_the_library_sees_it(
    kind: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = MAKERS[kind](tmp_path)
    artifact.write_bytes(content)
    monkeypatch.setattr("edge_runtime.backends.openvino.backend.import_openvino", lambda: pytest.fail("was imported"))
    with pytest.raises(LoadFailed, match=artifact.name):
        load(artifact)


def test_a_tflite_file_whose_signature_leads_out_of_it_fails_with_a_reason(tmp_path: Path) -> None:
    artifact = tflite(tmp_path)
    content = bytearray(artifact.read_bytes())
    struct.pack_into("<I", content, 0, len(content) * 2)
    artifact.write_bytes(content)
    with pytest.raises(LoadFailed, match=r"model\.tflite"):
        load(artifact)
