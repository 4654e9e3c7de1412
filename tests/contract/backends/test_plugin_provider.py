"""ONNX Runtime's plug-in execution providers, named by a profile as `delegate`: QNN where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import why_not_inside
from edge_runtime.backends.onnxruntime import BACKEND
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.backends.onnxruntime.plugin_provider import plugin_device
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.testing import mlp_answer, mlp_input
from tests.models import onnx_models

onnxruntime = pytest.importorskip("onnxruntime")
takes_plugins = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24), reason="ONNX Runtime 1.23 takes no plug-ins"
)


def qnn_options(**more: object) -> LoadOptions:
    """Of onnxruntime-qnn, whose HTP library emulates the NPU on x86-64."""
    spec = find_spec("onnxruntime_qnn")
    if spec is None or spec.origin is None:
        pytest.skip("onnxruntime-qnn is not installed")
    folder = Path(spec.origin).parent
    options = {"backend_path": str(folder / "libQnnHtp.so")}
    return LoadOptions(
        delegate=str(folder / "libonnxruntime_providers_qnn.so"),
        delegate_options=options,
        **more,  # type: ignore[arg-type]
    )


def test_an_onnx_runtime_before_1_24_says_that_it_takes_no_plugins() -> None:
    old = SimpleNamespace(__version__="1.23.2")
    with pytest.raises(BackendUnavailable, match=r"1\.23\.2 takes no plug-in providers; wanted 1\.24 .* Python 3\.11"):
        plugin_device(old, LoadOptions(delegate="/opt/libonnxruntime_providers_x.so"))  # type: ignore[arg-type]


@takes_plugins
def test_a_library_that_is_not_there_is_unavailable_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"cannot load the provider /no/libx\.so: .*No such file"):
        OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path), LoadOptions(delegate="/no/libx.so"))


@takes_plugins
def test_a_library_that_is_not_a_provider_is_unavailable(tmp_path: Path) -> None:
    other = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_shared.so"
    with pytest.raises(BackendUnavailable, match="cannot load the provider"):
        OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path), LoadOptions(delegate=str(other)))


def test_a_model_of_a_plugin_provider_runs_in_a_host(tmp_path: Path) -> None:
    artifact = onnx_models.mlp(tmp_path)
    assert why_not_inside(BACKEND, artifact, LoadOptions()) is None
    assert "covers the CPU alone" in str(why_not_inside(BACKEND, artifact, LoadOptions(delegate="/opt/libx.so")))


@takes_plugins
def test_qnn_runs_a_model_and_says_so_after_the_load(tmp_path: Path) -> None:
    instance = OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path, rows=2), qnn_options())
    try:
        assert instance.device.startswith("QNN:")
        x = mlp_input(2)
        np.testing.assert_allclose(instance.run({"x": x})[0], mlp_answer(x), rtol=1e-3, atol=1e-3)
    finally:
        instance.close()


@takes_plugins
def test_a_device_that_the_provider_has_not_is_unavailable_and_names_those_there(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="has no device GPU:7; it has"):
        OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path), qnn_options(device="GPU:7"))


@takes_plugins
def test_options_of_the_provider_are_the_profiles_not_the_models(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="'backend_path' is not ONNX Runtime's own"):
        OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path), qnn_options(extra={"backend_path": "/tmp/x.so"}))
