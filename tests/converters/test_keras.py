"""Keras files: what may hold code is refused before Keras is imported; the rest becomes ONNX that answers alike."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.onnx_from_keras import check_keras
from edge_runtime_converters.options import ConversionOptions
from tests.converters.sources import TENSORFLOW, needs, present

DENSE = {
    "module": "keras.layers",
    "class_name": "Dense",
    "registered_name": None,
    "config": {"name": "dense", "units": 4, "activation": "relu"},
}


def keras_file(path: Path, layer: Any) -> Path:
    """A .keras with these layers, beside a good one, in a Sequential."""
    config = {"module": "keras", "class_name": "Sequential", "config": {"layers": [DENSE, layer]}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.h5", b"\x89HDF\r\n\x1a\n")
    return path


HOSTILE = {
    "a lambda": {"module": "keras.layers", "class_name": "Lambda", "config": {"name": "l", "function": {}}},
    "a lambda of Keras 2": {"class_name": "Lambda", "config": {"name": "l"}},
    "a lambda inside a wrapper": {"class_name": "TimeDistributed", "config": {"layer": {"class_name": "Lambda"}}},
    "any module (CVE-2025-1550)": {
        "module": "os",
        "class_name": "function",
        "config": "system",
        "registered_name": "system",
    },
    "a class of any module": {"module": "subprocess", "class_name": "Popen", "config": {"args": "touch canary"}},
    "a function of Keras (CVE-2025-8747)": {"module": "keras.utils", "class_name": "get_file", "config": {}},
    "a switch (CVE-2025-9906)": {"module": "keras.config", "class_name": "enable_unsafe_deserialization", "config": {}},
    "a pickle of PyTorch (CVE-2025-49655)": {
        "module": "keras.layers",
        "class_name": "TorchModuleWrapper",
        "config": {},
    },
    "a SavedModel beside it": {"module": "keras.layers", "class_name": "TFSMLayer", "config": {"filepath": "/etc"}},
    "a vocabulary anywhere": {"class_name": "StringLookup", "config": {"vocabulary": "/etc/passwd"}},
    "somebody's layer": {"module": "mine", "class_name": "Dense", "registered_name": "Mine>Dense", "config": {}},
    "a registered name of somebody": {"module": "keras.layers", "class_name": "Dense", "registered_name": "Mine>Dense"},
    "a class that is not a name": {"module": "keras.layers", "class_name": ["Lambda"], "config": {}},
}


@pytest.mark.parametrize("layer", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_may_hold_code_is_refused_whether_or_not_keras_is_here(layer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match=r"Nothing of it was run\. .*model\.export") as refused:
        check_keras(keras_file(tmp_path / "model.keras", layer))
    assert "model.keras: " in refused.value.message


def test_a_real_file_with_a_lambda_is_refused_by_the_layers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ConversionOptions(source=str(TENSORFLOW / "lambda.keras"), target="onnx", output=str(tmp_path / "m.onnx"))
    with pytest.raises(ConversionFailed, match="its layer 'lambda' is a Lambda"):
        convert(options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_plain_layers_is_let_through(tmp_path: Path) -> None:
    check_keras(TENSORFLOW / "digits.keras")
    check_keras(keras_file(tmp_path / "model.keras", DENSE))


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 200_000, b"\xff\xfe"])
def test_a_damaged_description_is_refused_with_a_reason(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", content)
    with pytest.raises(ConversionFailed, match="damaged"):
        check_keras(path)


def test_a_zip_without_a_description_and_a_cut_one_are_refused(tmp_path: Path) -> None:
    path = keras_file(tmp_path / "model.keras", DENSE)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConversionFailed, match="damaged"):
        check_keras(path)


def test_hdf5_with_a_lambda_or_with_weights_alone_is_refused(tmp_path: Path) -> None:
    (h5py,) = needs("h5py")
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file["dense"] = np.zeros(3)
    with pytest.raises(ConversionFailed, match="weights alone"):
        check_keras(tmp_path / "weights.h5")
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.attrs["model_config"] = json.dumps(
            {"class_name": "Sequential", "config": [HOSTILE["a lambda of Keras 2"]]}
        )
    with pytest.raises(ConversionFailed, match="its layer 'l' is a Lambda"):
        check_keras(tmp_path / "model.h5")


def test_without_keras_the_reason_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ConversionFailed, match=r"edge-runtime\[convert-keras\]|h5py"):
        check_keras(TENSORFLOW / "digits.h5")


@pytest.mark.parametrize("name", ["digits.keras", "digits.h5"])
def test_a_keras_model_becomes_onnx_that_answers_as_tensorflow_did(name: str, tmp_path: Path) -> None:
    present("keras", "h5py", "torch", "onnxscript")
    report = convert(
        ConversionOptions(source=str(TENSORFLOW / name), target="onnx", output=str(tmp_path / "model.onnx"))
    )
    assert report.is_near_enough, report.faults
    assert report.compared_with.startswith("Keras ")
    instance = backend("onnxruntime").load(tmp_path / "model.onnx", LoadOptions())
    try:
        assert [each.name for each in instance.spec.inputs] == ["image"]
        assert [each.name for each in instance.spec.outputs] == ["chances"]
        assert instance.spec.may_batch
        with np.load(TENSORFLOW / "digits.npz") as kept:
            np.testing.assert_allclose(instance.run({"image": kept["image"]})[0], kept["chances"], atol=1e-5)
    finally:
        instance.close()
