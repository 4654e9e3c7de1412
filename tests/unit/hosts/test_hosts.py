"""Models in hosts: the same answers, in memory that grows; what a crash, a hang, a kill and garbage do to a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import HostEnded, LoadFailed, RunFailed, RunTooLong
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.models.warmup import warm_up
from edge_runtime.tensors import DATATYPES, Array
from tests.models import harmful_models, onnx_models, python_models

LIMIT_S = 60.0
"""Longer than any run here, and shorter than a test that hangs."""
ENDLESS_S = 0.03
"""Of a processor: no leftover of an answered run takes that long."""

Load = Callable[..., HostInstance]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def load(hosts: Hosts) -> Iterator[Load]:
    """Load an artifact in a host; closed when the test ends."""
    made: list[HostInstance] = []

    def load_one(artifact: Path, name: str = "onnxruntime", **options: Any) -> HostInstance:
        hosted = HostedBackend(backend(name, allows_code=True), hosts, allows_code=True)
        made.append(hosted.load(artifact, LoadOptions(**options)))
        made[-1].finish_warm_up()
        return made[-1]

    yield load_one
    for instance in made:
        instance.close()


def rows(*values: float) -> dict[str, Array]:
    return {"x": np.array([values], np.float32)}


def kill(instance: HostInstance) -> None:
    """Kill the host from outside, and wait until the next one can run."""
    before = instance.host
    os.kill(before.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(before.pid).wait(LIMIT_S)
    while instance.host.restarts == before.restarts:
        instance.restore()


@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
def test_a_host_answers_as_the_library_does_here(tmp_path: Path, load: Load, library: str) -> None:
    artifact = onnx_models.mlp(tmp_path)
    hosted, here = load(artifact, library), backend(library).load(artifact, LoadOptions())
    try:
        assert (hosted.spec, hosted.device, hosted.precision) == (here.spec, here.device, here.precision)
        assert hosted.backend == library
        for count in (1, 3, 1, 200):
            inputs = {"x": np.random.default_rng(count).random((count, 16), np.float32)}
            assert [array.tolist() for array in hosted.run(inputs)] == [array.tolist() for array in here.run(inputs)]
    finally:
        here.close()


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_comes_back_as_it_went(tmp_path: Path, load: Load, datatype: str) -> None:
    instance = load(onnx_models.identity(tmp_path, datatype))
    sent = np.array([[0, 1], [1, 1], [1, 0]]).astype(DATATYPES[datatype].dtype)
    (got,) = instance.run({"x": sent})
    assert (got.dtype, got.tolist()) == (sent.dtype, sent.tolist())


def test_text_of_any_length_comes_back_as_it_went(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.identity(tmp_path, "BYTES"))
    for length in (0, 5, 300_000):
        sent = np.array([[b"a" * length, b"b"]], object)
        assert instance.run({"x": sent})[0].tolist() == sent.tolist()


def test_slots_grow_with_inputs_and_results(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path, 1.0, columns=64))
    for count in (1, 40_000, 2, 300_000, 1):
        sent = np.full((count, 2), count % 7, np.float32)
        (got,) = instance.run({"x": sent})
        assert got.shape == (count, 64)
        assert (got[:, :2] == sent + 1).all()


def test_results_without_rows_or_with_more_than_inputs_are_whole(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.where_nonzero(tmp_path))
    assert instance.run(rows(0, 0))[0].shape == (0, 2)
    assert instance.run({"x": np.ones((3, 2), np.float32)})[0].shape == (6, 2)


def test_results_are_the_callers_own(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path))
    (first,) = instance.run(rows(1, 2))
    instance.run(rows(5, 6))
    assert first.tolist() == [[2, 3]]


def test_requests_are_joined_in_the_hosts_memory(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.two_in_two_out(tmp_path))
    parts = [[np.full((count, 3), count, np.float32), np.full((count, 2), count, np.int64)] for count in (1, 2, 3)]
    summed, twice = instance.run_parts(parts, LIMIT_S, alone=False)
    assert summed[:, 0].tolist() == twice[:, 0].tolist() == [2, 4, 4, 6, 6, 6]


def test_a_run_that_the_library_refuses_fails_alone(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.picky(tmp_path, 1.0))
    with pytest.raises(RunFailed, match="ONNX Runtime"):
        instance.run(rows(9, 9))
    assert instance.run(rows(1, 2))[0].tolist() == [[2, 3]]
    assert instance.host.restarts == 0


def test_runs_of_several_threads_keep_apart(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path), concurrency=2)
    wrong: list[object] = []

    def ask(number: int) -> None:
        for count in range(1, 50):
            (got,) = instance.run({"x": np.full((count, 2), number, np.float32)})
            if got.shape != (count, 2) or (got != number + 1).any():
                wrong.append(got)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_that_crashes_its_host_at_load_fails_with_the_signal(tmp_path: Path, load: Load) -> None:
    for make in (onnx_models.crashing, harmful_models.crashing_at_load):
        with pytest.raises(LoadFailed, match=r"ended its process while loading: SIG(SEGV|FPE|ABRT)"):
            load(make(tmp_path / make.__name__))


def test_a_model_that_fails_to_load_says_what_the_library_says(tmp_path: Path, load: Load) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model at all")
    with pytest.raises(LoadFailed, match=r"model\.onnx"):
        load(tmp_path / "model.onnx")


def test_a_crash_by_a_clients_data_ends_that_run_and_the_next_is_answered(tmp_path: Path, load: Load) -> None:
    instance = load(harmful_models.dividing(tmp_path))
    with pytest.raises(HostEnded, match="SIGFPE") as failed:
        instance.run(rows(1, harmful_models.SMALLEST))
    assert (failed.value.is_outside, failed.value.was_alone) == (False, True)
    assert instance.run(rows(1, 2))[0].tolist() == [[-1, -2]]


def test_deaths_during_runs_never_end_an_instance(tmp_path: Path, load: Load, hosts: Hosts) -> None:
    instance = load(harmful_models.dividing(tmp_path))
    for _ in range(5):
        with pytest.raises(HostEnded):
            instance.run(rows(1, harmful_models.SMALLEST))
    assert instance.run(rows(1, 2))[0].tolist() == [[-1, -2]]
    assert (instance.host.restarts, hosts.take_failures()) == (5, [])


def test_a_host_that_is_killed_from_outside_is_replaced_as_often_as_it_takes(
    tmp_path: Path, load: Load, hosts: Hosts
) -> None:
    instance = load(onnx_models.added(tmp_path))
    for _ in range(5):
        kill(instance)
    assert instance.run(rows(1, 2))[0].tolist() == [[2, 3]]
    assert (instance.host.restarts, hosts.take_failures()) == (5, [])
    assert "SIGKILL" in instance.host.last_end


def test_a_warm_up_that_never_ends_is_ended_at_the_limit_of_loads(load: Load, tmp_path: Path) -> None:
    instance = load(onnx_models.endless(tmp_path), extra={"load_timeout_s": "1"})
    with pytest.raises(LoadFailed, match="longer than its limit, 1 s"):
        warm_up(instance, ModelSettings())


def test_an_endless_run_is_ended_by_the_library_and_the_host_stays(tmp_path: Path, load: Load) -> None:
    instance = load(harmful_models.looping(tmp_path))
    before = instance.host.pid
    x = np.ones((1, 2), np.float32)
    for _ in range(2):
        with pytest.raises(RunTooLong, match=r"its limit, 0\.2 s"):
            instance.run_parts([[x, np.array([2**40])]], 0.2, alone=False)
        assert instance.run({"x": x, "times": np.array([3])})[0].tolist() == [[4, 4]]
    assert instance.host.pid == before


def test_a_run_that_is_handed_over_waits_for_the_one_before_and_runs_when_that_was_ended(
    tmp_path: Path, load: Load
) -> None:
    instance = load(harmful_models.looping(tmp_path), concurrency=1)
    x = np.ones((1, 2), np.float32)
    ends: dict[str, object] = {}

    def never_end() -> None:
        try:
            instance.run_parts([[x, np.array([2**40])]], 2.0, alone=False)
        except RunTooLong as error:
            ends["first"] = error

    host = psutil.Process(instance.host.pid)
    idle_s = host.cpu_times().user
    began_s = time.monotonic()
    first = threading.Thread(target=never_end)
    first.start()
    while host.cpu_times().user <= idle_s + ENDLESS_S and first.is_alive():
        pass  # it has not begun
    assert instance.run_parts([[x, np.array([3])]], LIMIT_S, alone=False)[0].tolist() == [[4, 4]]
    assert time.monotonic() - began_s >= 2.0
    first.join()

    assert "limit" in str(ends["first"])
    assert (instance.ahead, instance.host.restarts) == (1, 0)


def test_memory_beyond_the_limit_fails_the_run_alone(tmp_path: Path, load: Load) -> None:
    instance = load(harmful_models.sized_by_client(tmp_path), host_memory_bytes=256 << 20)
    with pytest.raises(RunFailed):
        instance.run({"shape": np.array([24_000, 24_000])})
    assert instance.run({"shape": np.array([2, 1])})[0].tolist() == [[1], [1]]
    assert instance.host.restarts == 0


GARBAGE = """
def write_garbage(message):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            try:
                os.write(descriptor, message)
            except OSError:
                pass
"""


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1\xff garbage",
        b"\x92\xa7results\x91\x94\x91\x01\x00\x08\x00",
        b"\x92\xa7results\x90",
        b"\x92\xa7results\x91\x93\x92\x01\x01\xce\xff\xff\xff\xff\x04",
        b"\x92\xacneeds memory\xcf\x7f\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_a_host_that_writes_garbage_is_killed_and_counts_as_ended(tmp_path: Path, load: Load, message: bytes) -> None:
    body = f"if value == 13: write_garbage({message!r}); signal.pause()"
    instance = load(python_models.on_first_value(tmp_path, body, preamble=GARBAGE), "python")
    with pytest.raises(HostEnded, match="it was killed, because"):
        instance.run_parts([[np.array([[13]], np.float32)]], LIMIT_S, alone=False)
    assert instance.run({"x": np.array([[1]], np.float32)})[0].tolist() == [[1.0]]
    assert instance.host.restarts == 1


def test_closing_ends_the_host_and_later_runs_fail(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path))
    process = psutil.Process(instance.host.pid)
    instance.close()
    assert not process.is_running()
    with pytest.raises(RunFailed, match="closed"):
        instance.run(rows(1, 2))


def test_hosts_share_one_prepared_parent_and_end_with_it(tmp_path: Path, load: Load, hosts: Hosts) -> None:
    artifact = onnx_models.added(tmp_path)
    first, second = load(artifact), load(artifact)
    parents = {psutil.Process(each.host.pid).ppid() for each in (first, second)}
    assert len(parents) == 1
    hosts.close()
    assert not any(psutil.pid_exists(pid) for pid in parents)


def test_a_stopped_parent_costs_its_hosts_and_gives_no_run_the_result_of_another(tmp_path: Path) -> None:
    hosts = Hosts(fork_timeout_s=1.0)
    artifact = python_models.on_first_value(tmp_path / "m", "if value == 13: time.sleep(3600)")
    hosted = HostedBackend(backend("python", allows_code=True), hosts, allows_code=True)
    try:
        sleepy, other = (hosted.load(artifact, LoadOptions()) for _ in range(2))
        for each in (sleepy, other):
            each.finish_warm_up()
        parent = psutil.Process(psutil.Process(sleepy.host.pid).ppid())
        parent.suspend()
        with pytest.raises(RunTooLong):
            sleepy.run_parts([[np.array([[13]], np.float32)]], 0.2)
        for instance in (sleepy, other):
            instance.restore()
            assert instance.run({"x": np.array([[7]], np.float32)})[0].tolist() == [[7]]
            assert instance.host.restarts == 1
        assert not parent.is_running()
    finally:
        hosts.close()
        sleepy.close()
        other.close()


def test_a_parent_that_was_stopped_for_a_moment_keeps_its_hosts(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path))
    host = psutil.Process(instance.host.pid)
    parent = psutil.Process(host.ppid())
    parent.suspend()
    starting = threading.Thread(target=lambda: load(onnx_models.added(tmp_path)).close())
    starting.start()
    parent.resume()
    starting.join()
    assert instance.run(rows(1, 2))[0].tolist() == [[2, 3]]
    assert (instance.host.restarts, instance.host.pid) == (0, host.pid)


@pytest.mark.parametrize("place", ["load", "warm_up"])
def test_a_load_that_never_ends_is_given_up_when_the_daemon_stops(
    tmp_path: Path, hosts: Hosts, load: Load, place: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    wait = "open(str(pathlib.Path(__file__).with_name('fifo'))).read()"
    preamble, body = (f"import pathlib; {wait}", "") if place == "load" else ("import pathlib", wait)
    artifact = python_models.on_first_value(tmp_path, body, preamble=preamble)
    failed: list[Exception] = []

    def load_and_warm_up() -> None:
        try:
            instance = hosted.load(artifact, LoadOptions(extra={"load_timeout_s": "1e6"}))
            try:
                instance.run({"x": np.zeros((1, 1), np.float32)})
            finally:
                instance.close()
        except (LoadFailed, RunFailed) as error:
            failed.append(error)

    hosted = HostedBackend(backend("python", allows_code=True), hosts, allows_code=True)
    healthy_folder = tmp_path / "healthy"
    healthy_folder.mkdir()
    healthy = load(onnx_models.mlp(healthy_folder))
    thread = threading.Thread(target=load_and_warm_up)
    thread.start()
    with (tmp_path / "fifo").open("w"):  # it waits there from now on, until this is closed
        hosts.end_loads()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert "the daemon stops" in str(failed)
    assert healthy.run({"x": np.zeros((1, 16), np.float32)})[0].shape == (1, 4)
    with pytest.raises(LoadFailed, match="the daemon stops"):
        hosted.load(artifact, LoadOptions())
