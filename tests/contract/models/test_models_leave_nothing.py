"""What a model had in memory goes with it: a device where models come and go for years keeps its size."""

from __future__ import annotations

import gc
import shutil
import time
import weakref

import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import EdgeRuntimeError
from tests.contract.models.release_kits import answer_of, put_adder, runtime


def test_nothing_keeps_a_version_that_was_unloaded(tmp_path):
    put_adder(tmp_path / "models", 3.0)
    with runtime(tmp_path / "models", tmp_path) as rt:
        loaded = weakref.ref(rt.core.table.find("m", 1))
        rt.unload("m")
        gc.collect()
        assert loaded() is None
        assert "m" in rt.core.metrics.models(), "its counts stay while its folder does"


def test_nothing_keeps_a_version_that_another_took_the_place_of_and_gauges_are_the_new_ones(tmp_path):
    put_adder(tmp_path / "models", 3.0)
    with runtime(tmp_path / "models", tmp_path) as rt:
        loaded = weakref.ref(rt.core.table.find("m", 1))
        put_adder(tmp_path / "models", 4.0, version=2)
        rt.load("m")
        assert answer_of(rt) == (2, 4)
        gc.collect()
        assert loaded() is None
        assert rt.core.metrics.snapshot()["models"]["m"]["queue_rows"] == 0


def test_a_model_whose_folder_is_gone_has_no_metrics_any_more(tmp_path):
    models = tmp_path / "models"
    put_adder(models, 3.0)
    put_adder(models, 4.0, name="other")
    with Runtime(models, config=Config(state=str(tmp_path / "state"), calibrate=False)) as rt:
        assert set(rt.core.metrics.models()) == {"m", "other"}
        shutil.rmtree(models / "m")
        while any(each["name"] == "m" for each in rt.models()):
            time.sleep(0)
        with pytest.raises(EdgeRuntimeError):
            rt.unload("no-such-model")  # after the step that took it away
        assert set(rt.core.metrics.models()) == {"other"}
