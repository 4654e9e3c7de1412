"""A model that crashes its shared host again and again: its neighbours lose no request, and it alone is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from tests.fakes.daemon_process import DaemonProcess
from tests.models.harmful_models import SMALLEST, dividing

NEIGHBOURS = 8
CRASHES = int(os.environ.get("EDGE_RUNTIME_TEST_CRASHES", "6"))
"""A soak by hand asks for more."""


def row(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.array([values], np.float32)}


@contextmanager
def asked_all_the_time(endpoint: str, model: str) -> Iterator[Callable[[], int]]:
    """Ask a model all the time; gives how often it was answered. Fails where a request was not, or wrongly."""
    stop = threading.Event()
    answered: list[bool] = []
    faults: list[EdgeRuntimeError] = []

    def ask() -> None:
        with Client(endpoint) as client:
            while not stop.is_set():
                number = len(answered)
                try:
                    got = client.infer(model, row(number, 1), timeout_ms=60_000)["y"]
                    answered.append(got.tolist() == [[-number, -1]])
                except EdgeRuntimeError as error:
                    faults.append(error)

    thread = threading.Thread(target=ask, name=f"asks {model}")
    thread.start()
    try:
        yield lambda: len(answered)
    finally:
        stop.set()
        thread.join()
        assert not faults
        assert all(answered)


def test_neighbours_of_a_shared_host_lose_no_request_however_often_it_crashes(tmp_path):
    names = [f"good{number}" for number in range(NEIGHBOURS)]
    for name in ("bad", *names):
        dividing(tmp_path / "models" / name / "1")
    with DaemonProcess(tmp_path, config="calibrate = false\n") as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()

        def host_of(name: str) -> dict[str, int]:
            return next(each["host"] for each in client.models() if each["name"] == name)

        assert {host_of(name)["models"] for name in names} == {NEIGHBOURS + 1}
        with ExitStack() as load:
            counts = [load.enter_context(asked_all_the_time(daemon.endpoint, name)) for name in names[:2]]
            for crash in range(CRASHES):
                before = [count() for count in counts]
                # One that was at work when a host crashed lives alone until it is loaded again, as the culprit does.
                for name in ("bad", *names[2:]):
                    if crash and host_of(name)["models"] == 1:
                        client.unload(name)
                        client.load(name)
                assert host_of("bad")["models"] > 1
                with pytest.raises(RunFailed, match="SIGFPE"):
                    client.infer("bad", row(1, SMALLEST), timeout_ms=60_000)
                for name in names[2:]:
                    assert client.infer(name, row(crash, 2), timeout_ms=60_000)["y"].tolist() == [[-crash, -2]]
                while any(count() <= was for count, was in zip(counts, before, strict=True)):
                    pass
        assert {each["state"] for each in client.models()} == {"ready"}
        assert daemon.stop() == 0
