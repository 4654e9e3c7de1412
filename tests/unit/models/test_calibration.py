"""The curve of run time by rows: what it decides, and what is kept of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.models import calibration
from edge_runtime.models.calibration import Calibrator, CurveCache, RunCurve, measure, row_counts
from edge_runtime.models.warmup import FirstRuns
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import Allowance
from tests.fakes.clock import FakeClock
from tests.models import onnx_models


@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ({1: 0.005, 2: 0.010, 4: 0.020}, 1),
        ({1: 0.005, 2: 0.0096, 4: 0.019}, 1),
        ({1: 0.005, 2: 0.005, 4: 0.005, 8: 0.010}, 4),
        ({1: 0.005, 2: 0.008, 4: 0.015, 8: 0.030}, 2),
    ],
)
def test_the_batch_limit_is_the_fewest_rows_that_serve_nearly_the_most(times, rows):
    assert RunCurve(times).best_rows() == rows


def test_row_counts_are_powers_of_two_up_to_the_limit():
    assert row_counts(1) == [1]
    assert row_counts(20) == [1, 2, 4, 8, 16]


def test_a_curve_comes_back_from_the_cache_and_damage_counts_as_none(tmp_path):
    cache = CurveCache(tmp_path / "calibration")
    cache.write("key", RunCurve({1: 0.005, 2: 0.009}, wide_s=0.003))

    assert cache.read("key") == RunCurve({1: 0.005, 2: 0.009}, 0.003)
    assert cache.read("other") is None
    for damage in (b"", b"{", b'{"times": {"1": -1}, "wide_s": null}', b'{"times": {}, "wide_s": null}', b"[]"):
        (tmp_path / "calibration" / "key.json").write_bytes(damage)
        assert cache.read("key") is None


def test_the_oldest_of_too_many_curves_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_CURVES", 2)
    cache = CurveCache(tmp_path)
    for number, key in enumerate("abc"):
        cache.write(key, RunCurve({1: 0.005}))
        os.utime(tmp_path / f"{key}.json", (number, number))
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["b", "c"]


def test_without_a_state_folder_nothing_is_kept_and_nothing_fails():
    CurveCache(None).write("key", RunCurve({1: 0.005}))
    assert CurveCache(None).read("key") is None


def test_a_state_folder_that_cannot_be_written_costs_only_the_memory_of_it(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    cache = CurveCache(tmp_path / "taken")
    cache.write("key", RunCurve({1: 0.005}))
    assert cache.read("key") is None


def test_a_real_model_is_measured_one_number_of_rows_a_step(tmp_path):
    instance = OnnxRuntimeBackend().load(onnx_models.mlp(tmp_path), LoadOptions())
    try:
        first = FirstRuns(batches=True, times={})
        steps = list(measure(instance, 8, lambda rows: first.inputs(instance.spec, rows, {})))
    finally:
        instance.close()

    assert list(steps[0]) == [1]
    assert set(steps[-1]) <= {1, 2, 4, 8}
    assert all(run_s > 0 for run_s in steps[-1].values())


def test_a_model_is_not_measured_while_its_device_is_slowed():
    dispatcher = Dispatcher(FakeClock(), 2)
    context = SimpleNamespace(executor=None, dispatcher=dispatcher, table=None, marks=None)
    calibrator = Calibrator(context, CurveCache(None), is_on=True, hardware="", budget_bytes=None)
    servable = SimpleNamespace(mode="workers", chain=None)
    calibrator.add(SimpleNamespace(owned=(), servable=servable, first_runs=SimpleNamespace(times={1: 0.1})))
    assert calibrator.has_work
    dispatcher.allow(Allowance(1, 6, 0.5))
    assert not calibrator.has_work
    dispatcher.allow(None)
    assert calibrator.has_work
