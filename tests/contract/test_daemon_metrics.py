"""What an operator sees: Prometheus over HTTP beside a daemon that serves."""

from __future__ import annotations

import urllib.request

from edge_runtime.config.settings import MetricsSettings
from tests.contract.running_daemon import RawClient, floats, header, put_model, running_daemon
from tests.models import onnx_models


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
