"""The runtime in process: the daemon's semantics behind plain calls."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter

import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import (
    ConfigError,
    DeadlineUnmeetable,
    Draining,
    LoadFailed,
    ModelNotFound,
    NotReady,
    TensorMismatch,
)
from tests.contract.running_daemon import floats, put_model, replace_model
from tests.models import onnx_models, python_models


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def runtime(models, tmp_path, **settings):
    return Runtime(models, config=Config(state=str(tmp_path / "state"), watch=False, calibrate=False, **settings))


@pytest.fixture
def models(tmp_path):
    models = tmp_path / "models"
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    return models


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_numpy_goes_in_and_numpy_comes_out(models, tmp_path, model):
    x = floats(3, 16)
    with runtime(models, tmp_path) as rt:
        result = rt.infer(model, {"x": x}, timing=True)

    np.testing.assert_allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4)
    assert (result.model, result.version, result.timing.batch_rows) == (model, 1, 3)


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_no_outputs_are_wanted_and_none_come(models, tmp_path, model):
    with runtime(models, tmp_path) as rt:
        for _ in range(3):
            assert rt.infer(model, {"x": floats(1, 16)}, outputs=[]).outputs == {}


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_a_worker_that_waits_keeps_nothing_of_the_request_that_it_ran_last(models, tmp_path, model):
    x, is_gone = floats(1, 16), threading.Event()
    weakref.finalize(x, is_gone.set)
    with runtime(models, tmp_path, limits=LimitSettings(cores=1)) as rt:
        rt.infer(model, {"x": x})
        del x
        # The request and its future name each other, so that it goes with the next collection.
        assert any(gc.collect() >= 0 and is_gone.wait(0.05) for _ in range(100))


def test_lists_and_big_endian_arrays_are_taken(models, tmp_path):
    x = floats(1, 16)
    with runtime(models, tmp_path) as rt:
        big_endian = rt.infer("mlp", {"x": x.astype(">f4")})["y"]
        strided = rt.infer("mlp", {"x": np.repeat(x, 2, axis=1)[:, ::2]})["y"]

    np.testing.assert_allclose(big_endian, expected(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(strided, expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_answers_from_many_threads_are_each_ones_own(models, tmp_path, model):
    wrong = []

    def ask(seed):
        x = floats(2, 16, seed=seed)
        for _ in range(50):
            if not np.allclose(rt.infer(model, {"x": x})["y"], expected(x), rtol=1e-4, atol=1e-4):
                wrong.append(seed)

    with runtime(models, tmp_path) as rt:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_errors_are_the_wires_errors(models, tmp_path):
    with runtime(models, tmp_path) as rt:
        with pytest.raises(TensorMismatch, match="It takes x"):
            rt.infer("mlp", {"z": floats(1, 16)})
        with pytest.raises(TensorMismatch, match="FP64"):
            rt.infer("mlp", {"x": floats(1, 16).astype(np.float64)})
        with pytest.raises(ModelNotFound, match="there are: mlp, queued"):
            rt.infer("nope", {})
        with pytest.raises(ModelNotFound, match="version 4 is not found"):
            rt.infer("mlp", {"x": floats(1, 16)}, version=4)
        with pytest.raises(DeadlineUnmeetable):
            rt.infer("mlp", {"x": floats(1, 16)}, timeout_ms=0)


def test_a_closed_runtime_refuses_and_closing_twice_is_fine(models, tmp_path):
    rt = runtime(models, tmp_path)
    rt.close()
    rt.close()

    with pytest.raises(Draining):
        rt.infer("mlp", {"x": floats(1, 16)})


def test_every_future_has_one_end_whatever_happens_meanwhile(models, tmp_path):
    """Cancel, expiry, reload and shutdown at random moments: each request still ends exactly once."""
    generator = np.random.default_rng(3)
    futures = []
    rt = runtime(models, tmp_path)
    stop = threading.Event()

    def reload():
        while not stop.is_set():
            rt.load("queued")

    reloader = threading.Thread(target=reload)
    reloader.start()
    for index in range(2_000):
        timeout_ms = [None, 0.01, 1.0, 50.0][generator.integers(4)]
        future = rt.submit("queued", {"x": floats(1, 16)}, timeout_ms=timeout_ms)
        futures.append(future)
        if generator.random() < 0.2:
            futures[generator.integers(len(futures))].cancel()
        if index == 1_900:
            stop.set()
            reloader.join()
    rt.close()

    assert all(future.done() for future in futures), "an end for every request"
    ends = Counter(end_of(future) for future in futures)
    allowed = {"answered", "cancelled", "deadline_unmeetable", "deadline_exceeded", "draining", "not_ready"}
    assert set(ends) <= allowed, ends
    assert sum(ends.values()) == 2_000
    assert ends["answered"] > 0


def test_requests_that_fail_amid_others_end_once_and_fail_nobody_else(tmp_path):
    models = tmp_path / "models"
    body = "if (inputs['x'] < -1.5).any():\n    raise ValueError('negative')"
    put_model(models, "moody", lambda folder: python_models.on_first_value(folder, body))
    generator = np.random.default_rng(5)
    signs = generator.choice([-2.0, 1.0, 1.0, 1.0], 300)
    with runtime(models, tmp_path, python_models=True) as rt:
        futures = [rt.submit("moody", {"x": np.full((1, 1), sign, np.float32)}) for sign in signs]
        cancelled = [future.cancel() for future in futures[::7]]

    for index, (sign, future) in enumerate(zip(signs, futures, strict=True)):
        if index % 7 == 0 and cancelled[index // 7]:
            assert end_of(future) == "cancelled"
        else:
            assert end_of(future) == ("answered" if sign > 0 else "run_failed")


def end_of(future):
    if future.cancelled():
        return "cancelled"
    error = future.exception(timeout=0)
    return "answered" if error is None else getattr(error, "code", repr(error))


def test_the_newest_version_answers_unless_one_is_named(tmp_path):
    models = tmp_path / "models"
    put_model(models, "m", onnx_models.mlp, version=1, toml="[versions]\nall = true\n")
    put_model(models, "m", onnx_models.mlp, version=3)
    with runtime(models, tmp_path) as rt:
        assert rt.infer("m", {"x": floats(1, 16)}).version == 3
        assert rt.infer("m", {"x": floats(1, 16)}, version=1).version == 1
        rt.unload("m", 3)
        assert rt.infer("m", {"x": floats(1, 16)}).version == 1
        with pytest.raises(NotReady, match="unloaded"):
            rt.infer("m", {"x": floats(1, 16)}, version=3)


def test_a_reload_that_fails_leaves_the_old_one_serving(models, tmp_path):
    with runtime(models, tmp_path) as rt:
        (models / "mlp" / "1" / "model.onnx").write_bytes(b"rubbish")

        with pytest.raises(LoadFailed):
            rt.load("mlp")

        assert rt.infer("mlp", {"x": floats(1, 16)}).version == 1
        (entry,) = [entry for entry in rt.models() if entry["name"] == "mlp"]
        assert entry["state"] == "ready"
        assert "failed to load" in entry["reason"]


def test_a_new_version_that_is_broken_leaves_the_old_one_serving(tmp_path):
    models = tmp_path / "models"
    put_model(models, "m", onnx_models.mlp, version=1)
    with runtime(models, tmp_path) as rt:
        (models / "m" / "2").mkdir()
        (models / "m" / "2" / "model.onnx").write_bytes(b"rubbish")
        with pytest.raises(LoadFailed):
            rt.load("m")

        assert rt.infer("m", {"x": floats(1, 16)}).version == 1
        assert {entry["version"]: entry["state"] for entry in rt.models()} == {1: "ready", 2: "failed"}


def test_loading_a_new_version_lets_the_old_one_go(tmp_path):
    models = tmp_path / "models"
    put_model(models, "m", onnx_models.mlp, version=1)
    with runtime(models, tmp_path) as rt:
        put_model(models, "m", onnx_models.mlp, version=2)
        rt.load("m")

        assert rt.infer("m", {"x": floats(1, 16)}).version == 2
        assert {entry["version"]: entry["state"] for entry in rt.models()} == {1: "unloaded", 2: "ready"}


def test_where_the_newest_version_is_broken_from_the_start_the_next_one_serves(tmp_path):
    models = tmp_path / "models"
    put_model(models, "m", onnx_models.mlp, version=1)
    put_model(models, "m", onnx_models.mlp, version=2)
    (models / "m" / "3").mkdir()
    (models / "m" / "3" / "model.onnx").write_bytes(b"rubbish")
    with runtime(models, tmp_path) as rt:
        assert rt.infer("m", {"x": floats(1, 16)}).version == 2
        with pytest.raises(NotReady, match="version 3 failed to load"):
            rt.infer("m", {"x": floats(1, 16)}, version=3)


def test_a_folder_of_models_that_is_not_there_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        Runtime(tmp_path / "nope")


def test_a_reload_takes_the_new_files(models, tmp_path):
    with runtime(models, tmp_path) as rt:
        replace_model(models / "mlp" / "1", onnx_models.running_sum)
        rt.load("mlp")

        assert rt.infer("mlp", {"x": np.ones((2, 4), np.float32)})["y"].tolist() == [[1.0] * 4, [2.0] * 4]


def test_a_model_that_cannot_be_loaded_says_why_and_hurts_nobody(models, tmp_path):
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"\x08\x09not a model")
    with runtime(models, tmp_path) as rt:
        with pytest.raises(NotReady, match="failed"):
            rt.infer("broken", {})
        assert rt.infer("mlp", {"x": floats(1, 16)}).version == 1


def test_a_python_model_is_refused_unless_the_configuration_allows_it(tmp_path):
    models = tmp_path / "models"
    put_model(models, "code", python_models.mlp)
    with runtime(models, tmp_path) as rt, pytest.raises(NotReady, match="python_models"):
        rt.infer("code", {"x": floats(1, 16)})
    with runtime(models, tmp_path, python_models=True) as rt:
        np.testing.assert_allclose(
            rt.infer("code", {"x": floats(1, 16)})["y"], expected(floats(1, 16)), rtol=1e-4, atol=1e-4
        )


def test_models_on_demand_load_when_asked_and_leave_for_others_under_the_memory_budget(tmp_path):
    models = tmp_path / "models"
    wide = onnx_models.wide(tmp_path / "wide", 2048)
    for name in "abcdefg":
        put_model(models, name, lambda folder: shutil.copy(wide, folder), toml="on_demand = true\n")
    put_model(models, "stay", onnx_models.mlp, toml="pinned = true\n")
    # Room for one, not for seven: each is seen to take one to three times its file, by what the process freed before.
    limits = LimitSettings(memory_bytes=int(wide.stat().st_size * 5.5))
    with runtime(models, tmp_path, limits=limits) as rt:
        states = lambda: {entry["name"]: entry["state"] for entry in rt.models()}  # noqa: E731
        assert states() == {**dict.fromkeys("abcdefg", "on_demand"), "stay": "ready"}
        spec = rt.infer("a", {"x": np.ones((1, 2048), np.float32)})
        assert spec.model == "a"
        for name in "bcdefgbac":
            assert rt.infer(name, {"x": np.ones((1, 2048), np.float32)}).model == name
            held = sum(entry["memory_bytes"] for entry in rt.models())
            assert held <= limits.memory_bytes
        assert states()["stay"] == "ready"
        assert "on_demand" in states().values()


def test_a_model_larger_than_the_budget_is_refused_with_the_numbers(tmp_path):
    models = tmp_path / "models"
    put_model(models, "big", onnx_models.wide, size=1024)
    limits = LimitSettings(memory_bytes=1_000_000)
    with runtime(models, tmp_path, limits=limits) as rt, pytest.raises(NotReady, match="memory budget of 1000000"):
        rt.infer("big", {"x": np.ones((1, 1024), np.float32)})


def test_the_child_of_a_fork_learns_that_the_runtime_is_its_parents(models, tmp_path):
    program = f"""
import os, signal
import numpy as np
from edge_runtime import Runtime
from edge_runtime.config.settings import Config
X = np.zeros((1, 16), np.float32)
runtime = Runtime({str(models)!r}, config=Config(state={str(tmp_path / "state")!r}, watch=False, calibrate=False))
runtime.infer("queued", {{"x": X}})
if (pid := os.fork()) == 0:
    signal.alarm(10)
    told = 0
    for name in ("infer", "load", "unload"):
        try:
            getattr(runtime, name)("queued", **({{"inputs": {{"x": X}}}} if name == "infer" else {{}}))
        except RuntimeError as error:
            told += "make a new one" in str(error)
    runtime.close()
    os._exit(0 if told == 3 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
runtime.infer("queued", {{"x": X}})
runtime.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_runtime_in_process_imports_no_door():
    program = "import sys, edge_runtime.daemon.runtime; print(sorted({'zmq', 'paho', 'tuf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"
