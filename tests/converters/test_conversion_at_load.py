"""Real sources in a models folder: converted by their libraries in the sandbox, served, kept over a restart."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from demo.digits import load_held_out
from edge_runtime.builds.conversions import plan_conversion
from edge_runtime.config.settings import BackendSettings, Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, LoadFailed
from edge_runtime.models.walk import scan
from edge_runtime_converters.formats import SourceFormat
from tests.converters.sources import INPUT, needs, source_of
from tests.fakes.daemon_process import DaemonProcess


def _labels_of_skops(source: Path, images: Any) -> Any:
    (skops,) = needs("skops.io")
    return skops.load(source, trusted=skops.get_untrusted_types(file=source)).predict(images)


def _labels_of_xgboost(source: Path, images: Any) -> Any:
    (xgboost,) = needs("xgboost")
    return xgboost.Booster(model_file=source).predict(xgboost.DMatrix(images)).argmax(axis=1)


def _labels_of_lightgbm(source: Path, images: Any) -> Any:
    (lightgbm,) = needs("lightgbm")
    return lightgbm.Booster(model_file=source).predict(images).argmax(axis=1)


def _labels_of_catboost(source: Path, images: Any) -> Any:
    (catboost,) = needs("catboost")
    return catboost.CatBoost().load_model(str(source)).predict(images, prediction_type="Class").reshape(-1)


LABELS: dict[SourceFormat, Callable[[Path, Any], Any]] = {
    SourceFormat.SKLEARN: _labels_of_skops,
    SourceFormat.XGBOOST: _labels_of_xgboost,
    SourceFormat.LIGHTGBM: _labels_of_lightgbm,
    SourceFormat.CATBOOST: _labels_of_catboost,
}
"""What each library itself says of images."""

ROWS = 256

MOST_S = 60.0
"""Of what is at once: a hang's, since others may have the cores."""

ONNX_ONLY = (BackendSettings(name="onnxruntime"),)


def runtime(tmp_path: Path, **settings: Any) -> Runtime:
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False, **settings)
    return Runtime(tmp_path / "models", config=config)


def put(tmp_path: Path, source: Path, toml: str = "") -> Path:
    """A source in a version's folder, under its own name."""
    place = tmp_path / "models" / "m" / "1" / source.name
    place.parent.mkdir(parents=True)
    shutil.copyfile(source, place)
    if toml:
        (tmp_path / "models" / "m" / "model.toml").write_text(toml)
    return place


def finish(rt: Runtime, tmp_path: Path) -> dict[str, Any]:
    """Wait for the end of the conversion, and until the loader has acted on it; what is told of the version."""
    folder = scan(tmp_path / "models").models["m"]
    plan = plan_conversion(folder.settings, folder.versions[1], {"model.onnx"})
    assert plan is not None
    assert rt.core.builds.wait(plan.key(), threading.Event())
    with pytest.raises(EdgeRuntimeError):  # steps of the loader are done in order
        rt.unload("no-such-model")
    return rt.models()[0]


def until(is_so: Callable[[], object]) -> None:
    """Wait for something in another process."""
    end_s = time.monotonic() + 10 * MOST_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("source_format", list(LABELS), ids=lambda each: each.name.lower())
def test_a_trained_model_is_served_as_it_was_saved_and_a_restart_converts_nothing(
    tmp_path: Path, source_format: SourceFormat
) -> None:
    source = put(tmp_path, source_of(source_format, tmp_path))
    images = load_held_out().images[:ROWS].astype(np.float32)
    inputs = {INPUT[source_format]: images}
    with runtime(tmp_path) as rt:
        assert rt.models()[0]["state"] == "converting"
        assert finish(rt, tmp_path)["state"] == "ready", rt.models()
        outputs = dict(rt.infer("m", inputs).outputs)
        label = next(each for each in outputs.values() if each.dtype.kind in "iu" and each.size == ROWS)
        assert (label.reshape(-1) == LABELS[source_format](source, images)).mean() >= 0.99
        report = rt.core.table.resolve("m", None).about.conversion.report
        assert report["source_format"] == source_format.value
        assert report["rows"] > 0
        assert report["faults"] == []
    with runtime(tmp_path) as rt:
        assert rt.models()[0]["state"] == "ready"
        again = rt.infer("m", inputs).outputs
        assert all(np.array_equal(again[name], outputs[name]) for name in outputs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_without_its_backend_says_how_to_give_its_shapes_and_then_is_converted(tmp_path: Path) -> None:
    put(tmp_path, source_of(SourceFormat.TORCHSCRIPT, tmp_path))
    with runtime(tmp_path, backends=ONNX_ONLY) as rt:
        told = finish(rt, tmp_path)
        assert told["state"] == "failed"
        assert "in model.toml: [warmup] shapes = {NAME = [3, 224, 224]}" in told["reason"]
        (tmp_path / "models" / "m" / "model.toml").write_text("[warmup]\nshapes = {image = [64]}\n")
        with pytest.raises(LoadFailed, match="converted"):
            rt.load("m")
        assert finish(rt, tmp_path)["state"] == "ready", rt.models()
        assert rt.infer("m", {"image": np.zeros((3, 64), np.float32)})["output"].shape == (3, 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_daemon_that_ends_during_a_conversion_takes_it_along_and_leaves_no_half_that_is_served(
    tmp_path: Path, number: int
) -> None:
    put(tmp_path, source_of(SourceFormat.SKLEARN, tmp_path))
    kept = tmp_path / "state" / "conversions"
    with DaemonProcess(tmp_path) as daemon:
        until(lambda: list(kept.glob("*.part/steps")))  # the child has begun
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        daemon.process.send_signal(number)
        daemon.process.wait(MOST_S)
    assert psutil.wait_procs(children, MOST_S)[1] == []
    assert list(kept.glob("*.converted")) == []
    assert number == signal.SIGKILL or list(kept.iterdir()) == []
    with DaemonProcess(tmp_path) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        until(lambda: client.models()[0]["state"] == "ready")
    assert [path.suffix for path in kept.iterdir()] == [".converted"]


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_cut_file_is_one_failed_version_with_a_reason(tmp_path: Path, cut: float) -> None:
    place = put(tmp_path, source_of(SourceFormat.XGBOOST, tmp_path))
    content = place.read_bytes()
    place.write_bytes(content[: int(len(content) * cut)])
    with runtime(tmp_path) as rt:
        told = finish(rt, tmp_path)
        assert told["state"] == "failed"
        assert "boosted.json" in told["reason"]
    assert {path.suffix for path in (tmp_path / "state" / "conversions").iterdir()} == {".failure"}
