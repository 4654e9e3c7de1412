"""What an operator sees: Prometheus over HTTP beside a daemon that serves."""

from __future__ import annotations

import urllib.request

import pytest

from edge_runtime import __version__
from edge_runtime.config.settings import MetricsSettings
from tests.contract.running_daemon import RawClient, floats, header, put_model, running_daemon
from tests.contract.updates.updated_device import Fleet
from tests.fakes.update_site import adder
from tests.fakes.updates import FakeUpdates
from tests.models import onnx_models


@pytest.mark.smoke
def test_prometheus_shows_what_was_served_and_refused(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    put_model(tmp_path / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    with running_daemon(tmp_path / "models", tmp_path / "run", metrics=MetricsSettings(port=0)) as daemon:
        with RawClient(daemon.endpoints[1]) as client:
            for model in ("mlp", "queued"):
                for _ in range(3):
                    client.ask(header(model), b"", floats(1, 16).tobytes())
                client.ask(header(model, timeout_ms=0), b"", floats(1, 16).tobytes())
            client.result("stats")
        with urllib.request.urlopen(daemon.metrics_url) as answer:
            text = answer.read().decode()

    for model in ("mlp", "queued"):
        assert f'edge_runtime_answers_total{{model="{model}"}} 3.0' in text
    assert 'phase="run"' in text
    assert "deadline_unmeetable" in text
    assert 'edge_runtime_queue_rows{model="queued"} 0.0' in text


def test_prometheus_shows_which_build_device_and_version_answered(tmp_path):
    put_model(tmp_path / "models", "digits", onnx_models.mlp, version=2)
    put_model(tmp_path / "models", "faces", onnx_models.mlp)
    updates = FakeUpdates()  # of the group line-1, with release 3 of digits as version 2
    with (
        running_daemon(
            tmp_path / "models", tmp_path / "run", metrics=MetricsSettings(port=0), updates=updates
        ) as daemon,
        urllib.request.urlopen(daemon.metrics_url) as answer,
    ):
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    build = one_line(lines, "edge_runtime_build_info")
    assert f'version="{__version__}"' in build
    assert 'device="dev1",group="line-1"' in one_line(lines, "edge_runtime_device_info")
    digits, faces = (line for line in lines if line.startswith("edge_runtime_model_info"))
    assert 'model="digits"' in digits
    assert 'release="3",version="2"' in digits
    assert 'release="",version="1"' in faces
    assert float(one_line(lines, "process_start_time_seconds").split()[-1]) > 1.6e9


def one_line(lines, name):
    (line,) = (each for each in lines if each.startswith(name))
    return line


def test_the_daemon_reports_what_alerts_are_made_of(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    (tmp_path / "models/broken/1").mkdir(parents=True)
    (tmp_path / "models/broken/1/model.onnx").write_bytes(b"no model")
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        gauges = client.result("stats")["metrics"]["gauges"]
    assert (gauges["models_ready"], gauges["models_failed"]) == (1.0, 1.0)
    assert gauges["state_free_bytes"] > 0
    assert "update_failing" not in gauges


def test_a_look_at_a_repository_that_fails_is_reported_until_one_succeeds(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.site.release(adder(tmp_path / "made", 1))
    with fleet.device() as device:
        gauges = device.runtime.core.metrics.gauges
        assert gauges()["update_failing"] == 0.0
        moved = fleet.mirror.rename(tmp_path / "elsewhere")
        device.check()
        assert gauges()["update_failing"] == 1.0
        moved.rename(fleet.mirror)
        device.check()
        assert (gauges()["update_failing"], gauges()["update_refused"]) == (0.0, 0.0)
