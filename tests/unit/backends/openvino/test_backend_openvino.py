"""What is particular to OpenVINO: precision, streams, devices, properties, and names out of ONNX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.openvino.backend import OpenVinoBackend, import_openvino
from edge_runtime.errors import BackendUnavailable, LoadFailed
from tests.models import ir_models, onnx_models

BACKEND = OpenVinoBackend()


def cpu_capabilities() -> list[str]:
    found: list[str] = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return found


def test_precision_is_f32_unless_asked_for_even_where_the_machine_has_bf16(tmp_path: Path) -> None:
    instance = BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions())
    assert instance.precision == "f32"
    instance.close()


def test_bf16_that_was_asked_for_is_read_back_or_unavailable(tmp_path: Path) -> None:
    artifact = onnx_models.wide(tmp_path, 64)
    if "BF16" not in cpu_capabilities():
        with pytest.raises(BackendUnavailable, match="precision bf16"):
            BACKEND.load(artifact, LoadOptions(precision="bf16"))
        return
    instance = BACKEND.load(artifact, LoadOptions(precision="bf16"))
    assert instance.precision == "bf16"
    assert instance.run({"x": np.ones((1, 64), np.float32)})[0].dtype == np.float32
    instance.close()


def test_auto_runs_and_reports_the_device_it_chose(tmp_path: Path) -> None:
    instance = BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(device="AUTO"))
    assert instance.device in ("CPU", "GPU", "NPU")
    assert instance.run({"x": np.ones((2, 16), np.float32)})[0].shape == (2, 4)
    instance.close()


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(threads=2, concurrency=3), LoadOptions(device="AUTO")])
def test_each_run_of_a_model_that_keeps_state_begins_anew(tmp_path: Path, options: LoadOptions) -> None:
    instance = BACKEND.load(ir_models.remembering(tmp_path), options)
    bound = instance.bind(4)
    assert bound is not None
    for turn, rows in enumerate((1, 3, 2, 2), 1):
        x = np.full((rows, 2), turn, np.float32)
        np.testing.assert_array_equal(instance.run({"x": x})[0], x + 1)
        bound.inputs[0][:rows] = x
        bound.run(rows)
        np.testing.assert_array_equal(bound.outputs[0][:rows], x + 1)
    instance.close()


def test_an_output_keeps_its_name_where_openvino_folds_what_comes_after_it(tmp_path: Path) -> None:
    instance = BACKEND.load(onnx_models.renamed(tmp_path), LoadOptions())
    assert [tensor.name for tensor in instance.spec.outputs] == ["y"]
    instance.close()


def test_it_promises_as_many_callers_as_it_was_asked_for(tmp_path: Path) -> None:
    instance = BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(concurrency=3))
    assert instance.concurrency == 3
    instance.close()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"CONFIG_FILE": "/tmp/kernels.xml"}, "names a file"),
        ({"NO_SUCH_PROPERTY": "1"}, "Unsupported property NO_SUCH_PROPERTY"),
    ],
)
def test_properties_it_does_not_know_fail_to_load(tmp_path: Path, extra: dict[str, str], reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        BACKEND.load(onnx_models.mlp(tmp_path), LoadOptions(extra=extra))


def test_a_property_in_its_own_words_is_taken(tmp_path: Path) -> None:
    options = LoadOptions(extra={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
    BACKEND.load(onnx_models.mlp(tmp_path), options).close()


def test_weights_outside_the_folder_never_reach_the_library(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    artifact = onnx_models.add_weights(tmp_path / "1", onnx_models.external_tensor("../secret"))
    with pytest.raises(LoadFailed, match="leaves the model's folder"):
        BACKEND.load(artifact, LoadOptions())


def test_onnx_with_weights_beside_it_loads(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.array([1, 2], np.float32).tobytes())
    artifact = onnx_models.add_weights(tmp_path, onnx_models.external_tensor("w.bin", offset="0", length="8"))
    instance = BACKEND.load(artifact, LoadOptions())
    np.testing.assert_array_equal(instance.run({"x": np.zeros((1, 2), np.float32)})[0], [[1, 2]])
    instance.close()


def test_an_ir_whose_weights_were_cut_is_refused(tmp_path: Path) -> None:
    artifact = ir_models.from_onnx(onnx_models.mlp(tmp_path / "onnx"), tmp_path)
    weights = artifact.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(LoadFailed, match="copy both again"):
        BACKEND.load(artifact, LoadOptions())


def test_replacing_the_weights_of_a_loaded_ir_leaves_it_running(tmp_path: Path) -> None:
    """A mapped file that is cut would end the process."""
    artifact = ir_models.from_onnx(onnx_models.wide(tmp_path / "onnx", 256), tmp_path)
    instance = BACKEND.load(artifact, LoadOptions())
    x = np.ones((1, 256), np.float32)
    before = instance.run({"x": x})[0]
    artifact.with_suffix(".bin").write_bytes(b"")
    np.testing.assert_array_equal(instance.run({"x": x})[0], before)
    instance.close()


def test_a_signal_finds_its_stack_after_models_that_were_there_together_are_gone(tmp_path: Path) -> None:
    """Each Core changes the signal stack of its thread; the handler then ran on one that was freed."""
    onnx_models.mlp(tmp_path)
    script = """
import faulthandler, signal, sys, threading
from pathlib import Path
from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.openvino.backend import OpenVinoBackend
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
def use():
    BACKEND.probe()
    first, second = (BACKEND.load(Path(sys.argv[1]), LoadOptions()) for _ in range(2))
    first.close(); del first
    second.close(); del second
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
BACKEND = OpenVinoBackend()
use()
faulthandler.enable()
use()
for _ in range(2):
    thread = threading.Thread(target=use); thread.start(); thread.join()
assert len(heard) == 4, heard
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.onnx")], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
