"""Queues that a `config.pbtxt` asks for, with Triton's own clients: levels, timeouts and bounds as in Triton."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import LimitSettings, ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.daemon.core import Core
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import ANSWER_S
from tests.models import python_models, triton_repository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}

UNAVAILABLE = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}

CONFIG = """
name: "%s"
backend: "python"
max_batch_size: 1
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { %s }
"""

REJECTS = """
  priority_levels: 12
  default_priority_level: 11
  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 60000000
    allow_timeout_override: true
    max_queue_size: 2
  }
"""

DELAYS = """
  default_queue_policy {
    timeout_action: DELAY
    default_timeout_microseconds: 60000000
    allow_timeout_override: true
  }
"""

SOURCE = """
import os, time
runs = 0
def infer(inputs):
    global runs
    while not os.path.exists(GATE):
        time.sleep(0.002)
    runs += 1
    return {"y": inputs["x"] * 0 + runs}
"""
"""Each run waits for the gate, and answers the how manieth it is."""


WHOLE = """
name: "whole"
platform: "ensemble"
max_batch_size: 1
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "rejects"
      model_version: -1
      input_map { key: "x" value: "x" }
      output_map { key: "y" value: "y" }
    }
  ]
}
"""


class Server:
    """A daemon with models that wait for a gate, as one of Triton's clients sees it."""

    def __init__(self, daemon: Daemon, core: Core, kind: str, gate: Path, threads: ThreadPoolExecutor) -> None:
        self._address = daemon.doors[kind].endpoints[0].partition("://")[2]
        self._kind = kind
        self._gate = gate
        self._threads = threads
        self._core = core

    def open_gate(self) -> None:
        self._gate.touch()

    def ask(self, model: str, **options) -> Future[float]:
        return self._threads.submit(self._ask, model, options)

    def _ask(self, model: str, options) -> float:
        module = CLIENTS[self._kind]
        with module.InferenceServerClient(self._address) as client:
            tensor = module.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
            return float(client.infer(model, [tensor], **options).as_numpy("y")[0, 0])

    def hold(self, model: str) -> Future[float]:
        """Ask, and return once the run is on, which waits for the gate."""
        asked = self.ask(model)
        self._wait_until(lambda: not self._core.dispatcher.is_idle())
        self.wait(model, rows=0)
        return asked

    def wait(self, model: str, *, rows: int) -> None:
        """Until so many requests wait in the queue of a model."""
        scheduled = self._core.table.resolve(model, None).scheduled
        self._wait_until(lambda: self._core.dispatcher.queued(scheduled)[0] == rows)

    @staticmethod
    def _wait_until(is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + ANSWER_S
        while not is_so():
            assert time.monotonic() < until_s

    def refused(self, asked: Future[float]) -> str:
        """The message of a request that is refused as Triton refuses what waited too long, or found a full queue."""
        with pytest.raises(InferenceServerException) as caught:
            asked.result(ANSWER_S)
        assert caught.value.status() == UNAVAILABLE[self._kind]
        return caught.value.message()


@pytest.fixture(params=list(CLIENTS))
def server(request, tmp_path) -> Iterator[Server]:
    repository, gate = tmp_path / "repository", tmp_path / "gate"
    gate.touch()
    tensor = [[("x", "FP32", [-1, 1])], [("y", "FP32", [-1, 1])]]
    for name, batching in (("rejects", REJECTS), ("delays", DELAYS)):
        folder = triton_repository.put(repository, name, CONFIG % (name, batching))
        python_models.write(folder, *tensor, SOURCE.replace("GATE", repr(str(gate))))
    triton_repository.put(repository, "whole", WHOLE)
    config = configured(
        models=str(repository),
        state=str(tmp_path / "state"),
        calibrate=False,
        python_models=True,
        limits=LimitSettings(run_limit_ms=600_000),
        zmq=ZmqSettings(endpoints=(f"ipc://{tmp_path}/infer.sock",)),
        http=HttpSettings(endpoint="127.0.0.1:0"),
        grpc=GrpcSettings(endpoint="127.0.0.1:0"),
    )
    core = assemble_core(config)
    daemon = assemble_daemon(config, core)
    try:
        daemon.start()
        gate.unlink()
        with ThreadPoolExecutor(8) as threads:
            server = Server(daemon, core, request.param, gate, threads)
            try:
                yield server
            finally:
                server.open_gate()
    finally:
        daemon.stop()


def test_a_queue_of_a_config_has_tritons_levels_bounds_and_timeouts(server):
    first = server.hold("rejects")
    low = server.ask("rejects", priority=12)
    server.wait("rejects", rows=1)
    high = server.ask("rejects", priority=3)
    server.wait("rejects", rows=2)

    late = server.ask("rejects", timeout=1_000)
    assert server.refused(late).startswith("Request timeout expired")

    by_default = [server.ask("rejects", priority=number) for number in (0, 99)]
    server.wait("rejects", rows=4)
    assert server.refused(server.ask("rejects", priority=11)).startswith("Exceeds maximum queue size")

    server.open_gate()
    order = [asked.result(ANSWER_S) for asked in (first, high, *by_default, low)]
    assert order[0] < order[1] < min(order[2:4])
    assert max(order[2:4]) < order[4]


def test_a_step_whose_queue_is_full_ends_its_ensembles_request_at_once(server):
    waiting = [server.hold("rejects")]
    for rows in (1, 2):
        waiting.append(server.ask("rejects"))
        server.wait("rejects", rows=rows)

    assert server.refused(server.ask("whole")).startswith("step rejects: Exceeds maximum queue size")
    waiting.append(server.ask("whole", priority=1))
    server.wait("rejects", rows=3)

    server.open_gate()
    order = [asked.result(ANSWER_S) for asked in waiting]
    assert order[3] < order[1] < order[2]


def test_a_delayed_request_runs_behind_those_that_came_later(server):
    first = server.hold("delays")
    delayed = server.ask("delays", timeout=1)
    server.wait("delays", rows=1)
    others = [server.ask("delays") for _ in range(2)]
    server.wait("delays", rows=3)

    server.open_gate()
    order = [asked.result(ANSWER_S) for asked in (first, *others, delayed)]
    assert max(order[:3]) < order[3]
