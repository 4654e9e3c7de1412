"""`stats` beside the thread that answers requests: the kernel walks all memory of the daemon for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edge_runtime.doors.zmq.client import Client
from edge_runtime.telemetry.host import HostProbe
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.models import onnx_models


def test_stats_are_made_beside_the_thread_that_answers_requests_and_each_caller_gets_those_of_after_its_ask(
    tmp_path, monkeypatch
):
    is_asked, may_go_on = threading.Event(), threading.Event()
    measure = HostProbe.pss_bytes

    def held(probe):
        is_asked.set()
        assert may_go_on.wait(ANSWER_S)
        return measure(probe)

    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon:
        monkeypatch.setattr(HostProbe, "pss_bytes", held)
        with (
            Client(daemon.endpoints[0]) as client,
            Client(daemon.endpoints[0]) as second,
            ThreadPoolExecutor(2) as pool,
        ):
            try:
                first = pool.submit(client.stats)
                assert is_asked.wait(ANSWER_S)
                second.infer("mlp", {"x": np.zeros((1, 16), np.float32)})
                later = pool.submit(second.stats)
            finally:
                may_go_on.set()
            assert first.result()["host"]["pss_bytes"] > 0
            assert later.result()["metrics"]["models"]["mlp"]["requests"] == 1
