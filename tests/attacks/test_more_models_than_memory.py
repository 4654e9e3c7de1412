"""More hosted models than memory holds: those that do not fit are told, all are answered in turn, the daemon lives."""

from __future__ import annotations

import numpy as np

from edge_runtime.doors.zmq.client import Client
from tests.attacks.test_hostile_hosts import good_work, number
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models, python_models

MODELS = 10
BUDGET_BYTES = 72 << 20
"""For about five hosts of small models: each is measured as 13 to 15 MB."""


def test_models_beyond_the_budget_wait_for_requests_and_each_is_answered(tmp_path):
    names = [f"m{index}" for index in range(MODELS)]
    for name in names:
        onnx_models.mlp(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "model.toml").write_text('isolation = "always"\n')
    python_models.on_first_value(tmp_path / "models" / "good" / "1", "")
    (tmp_path / "models" / "good" / "model.toml").write_text("pinned = true\nbatch = false\n")
    config = f"python_models = true\ncalibrate = false\n[limits]\nmemory_bytes = {BUDGET_BYTES}\n"
    with DaemonProcess(tmp_path, config=config) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        told = {each["name"]: (each["state"], each["reason"]) for each in client.models()}
        assert told.pop("good") == ("ready", "")
        assert set(told.values()) == {("ready", ""), ("on_demand", "left to free memory")}
        with good_work(daemon.endpoint) as answered:
            assert client.infer("good", number(1))["y"].tolist() == [[1]]
            before = answered()
            for name in names:
                asked = {"x": np.ones((1, 16), np.float32)}
                assert client.infer(name, asked, timeout_ms=60_000)["y"].shape == (1, 4)
            assert answered() > before
        assert {each["state"] for each in client.models()} == {"ready", "on_demand"}
        assert daemon.stop() == 0


def test_a_model_that_never_fits_says_what_it_needs_and_the_others_are_answered(tmp_path):
    onnx_models.wide(tmp_path / "models" / "large" / "1", size=5000)
    (tmp_path / "models" / "large" / "model.toml").write_text('isolation = "always"\n')
    python_models.on_first_value(tmp_path / "models" / "good" / "1", "")
    config = f"python_models = true\ncalibrate = false\n[limits]\nmemory_bytes = {BUDGET_BYTES}\n"
    with DaemonProcess(tmp_path, config=config) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_said("is not loaded")
        (large,) = [each for each in client.models() if each["name"] == "large"]
        assert large["state"] == "failed"
        assert f"missing in the memory budget of {BUDGET_BYTES}" in large["reason"]
        assert client.infer("good", number(2), timeout_ms=60_000)["y"].tolist() == [[2]]
        assert daemon.stop() == 0
