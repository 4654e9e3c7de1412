"""A pipeline whose step answers a million boxes: the bound is told, and neighbours and memory do not notice."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import RunFailed
from tests.contract.running_daemon import floats, put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess
from tests.models import onnx_models

FAN = """
import numpy as np
INPUTS = [{"name": "n", "datatype": "INT64", "shape": [1]}]
OUTPUTS = [{"name": "boxes", "datatype": "FP32", "shape": [-1, 16]}]

def infer(inputs):
    return {"boxes": np.zeros((int(inputs["n"][0]), 16), np.float32)}
"""

PIPELINE = """
[input.n]
datatype = "INT64"
shape = [1]
[[step]]
name = "fan"
model = "fan"
inputs = {n = "input.n"}
[[step]]
name = "classify"
model = "mlp"
inputs = {x = "fan.boxes"}
map = "fan.boxes"
[output]
y = "classify.y"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    models = folder / "models"
    put_model(models, "mlp", onnx_models.mlp, toml='mode = "workers"\n')
    toml = "batch = false\n[warmup]\nruns = 0\n"
    put_model(models, "fan", lambda place: (place / "model.py").write_text(FAN), toml=toml)
    put_model(models, "wide", lambda place: (place / "pipeline.toml").write_text(PIPELINE))
    with DaemonProcess(folder, "--python-models") as daemon:
        daemon.wait_ready()
        yield daemon


def test_a_million_boxes_are_refused_by_their_bound_and_cost_no_neighbour_an_answer(daemon):
    x = floats(1, 16)
    with Client(daemon.endpoint) as wide, Client(daemon.endpoint) as neighbour:
        for round_ in range(6):
            if round_ == 1:
                before = daemon.resident_bytes()
            with pytest.raises(RunFailed, match=r"fan\.boxes has 1000000 items, at most 16384"):
                wide.infer("wide", {"n": np.array([1_000_000], np.int64)})
            for _ in range(20):
                assert neighbour.infer("mlp", {"x": x})["y"].shape == (1, 4)
        assert wide.infer("wide", {"n": np.array([3], np.int64)})["y"].shape == (3, 4)
    assert daemon.resident_bytes() - before < GROWTH_BYTES
    assert not [line for line in daemon.log() if "exception" in line]
