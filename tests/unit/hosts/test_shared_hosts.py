"""Hosts that quiet models share: the same answers, and what the end of one model means for its neighbours."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend, declaration_of
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.errors import HostEnded, LoadFailed, RunFailed, RunTooLong
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.hosts.messages import HostReport, HostTask, NotLoaded, receive
from edge_runtime.hosts.shared_hosts import MAX_PLACES
from edge_runtime.tensors import Array
from tests.fakes.loop_thread import LoopThread
from tests.models import harmful_models, onnx_models
from tests.unit.backends.test_begun_runs import LIMIT_S, Begun, first, row

BAD = [[np.array([[1, harmful_models.SMALLEST]], np.float32)]]

Load = Callable[..., HostInstance]


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    with LoopThread() as thread:
        yield thread.loop


@pytest.fixture
def hosts(loop: IoLoop) -> Iterator[Hosts]:
    made = Hosts()
    made.events = loop
    yield made
    made.close()


@pytest.fixture
def load(hosts: Hosts) -> Iterator[Load]:
    """Load an artifact where it may share a host; closed when the test ends."""
    made: list[HostInstance] = []

    def load_one(artifact: Path, name: str = "onnxruntime", **options: Any) -> HostInstance:
        made.append(HostedBackend(backend(name), hosts).load(artifact, options_of(**options)))
        made[-1].finish_warm_up()
        return made[-1]

    yield load_one
    for instance in made:
        instance.close()


def options_of(**options: Any) -> LoadOptions:
    return LoadOptions(**{"concurrency": 2, "shared_by": "a folder", **options})


def looping(times: int) -> list[list[Array]]:
    """The inputs of a run of `harmful_models.looping`."""
    return [[np.ones((1, 2), np.float32), np.array([times])]]


ENDLESS = looping(2**40)
ENDLESS_S = 0.03
"""Of a processor: a run that takes that long is on."""


def wait_for_end(pid: int) -> None:
    """Wait until a process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LIMIT_S)


def wait_for_next(instance: HostInstance, before: int) -> None:
    """Wait until an instance can run in another process."""
    while instance.host.pid in (0, before):
        instance.restore()


def test_models_of_one_kind_share_a_process_and_answer_as_the_library_does_here(tmp_path: Path, load: Load) -> None:
    mlp, adding, text = onnx_models.mlp(tmp_path / "a"), onnx_models.added(tmp_path / "b"), tmp_path / "c"
    shared = [load(mlp), load(adding), load(onnx_models.identity(text, "BYTES"))]
    assert len({each.host.pid for each in shared}) == 1
    assert [each.host.models for each in shared] == [3, 3, 3]
    here = backend("onnxruntime").load(mlp, LoadOptions())
    try:
        assert (shared[0].spec, shared[0].precision) == (here.spec, here.precision)
        for count in (1, 3, 1, 200):
            inputs = {"x": np.random.default_rng(count).random((count, 16), np.float32)}
            assert [each.tolist() for each in shared[0].run(inputs)] == [each.tolist() for each in here.run(inputs)]
    finally:
        here.close()
    assert first(Begun(shared[1], row(1, 2)).end()) == [[2, 3]]
    sent = np.array([[b"a" * 300_000, b"b"]], object)
    assert first(Begun(shared[2], [[sent]]).end()) == sent.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"shared_by": ""},
        {"threads": 2},
        {"spin": True},
        {"extra": {"load_timeout_s": "30"}},
        {"extra": {"run_timeout_s": "30"}},
        {"name": "openvino"},
    ],
    ids=str,
)
def test_a_model_that_may_not_share_has_a_host_of_its_own(tmp_path: Path, load: Load, options: dict[str, Any]) -> None:
    artifact = onnx_models.added(tmp_path)
    other, own = load(artifact), load(artifact, **options)
    assert own.host.pid != other.host.pid
    assert own.host.models == 1


def test_models_of_two_sources_or_with_two_limits_of_memory_never_share(tmp_path: Path, load: Load) -> None:
    artifact = onnx_models.added(tmp_path)
    limits = {"host_memory_bytes": 1 << 29}
    kinds = [load(artifact), load(artifact, shared_by="releases"), load(artifact, **limits)]
    assert len({each.host.pid for each in kinds}) == 3
    assert load(artifact, **limits).host.pid == kinds[2].host.pid


def test_a_model_with_a_second_file_has_a_host_of_its_own(tmp_path: Path, load: Load) -> None:
    (tmp_path / "weights").write_bytes(np.array([2, 3], np.float32).tobytes())
    artifact = onnx_models.add_weights(tmp_path, onnx_models.external_tensor("weights"))
    other, own = load(onnx_models.added(tmp_path / "b")), load(artifact)
    assert first(Begun(own, row(1, 1)).end()) == [[3, 4]]
    assert (own.host.pid != other.host.pid, own.host.restarts, own.host.models) == (True, 0, 1)


def test_a_file_outside_of_what_a_host_may_see_comes_to_no_shared_host(tmp_path: Path, load: Load) -> None:
    outside = onnx_models.added(tmp_path / "outside")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").symlink_to(outside)
    neighbour = load(onnx_models.added(tmp_path / "b"))
    for within in ((), (str(tmp_path / "m"),)):
        with pytest.raises(LoadFailed):
            load(tmp_path / "m" / "model.onnx", within=within)
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]


def test_a_shared_host_opens_no_models_file_by_its_path(tmp_path: Path, hosts: Hosts, load: Load) -> None:
    neighbour = load(onnx_models.added(tmp_path), "onnxruntime")
    options = options_of()
    # OpenVINO has no way to load what is opened, so in a shared host it tries the path.
    place = hosts.start(
        HostTask(declaration_of("openvino"), str(tmp_path / "model.onnx"), options, 1, shared_by="x"), "test"
    )
    try:
        report = receive(place.control, HostReport)
        assert isinstance(report, NotLoaded)
        assert "Permission denied" in report.message
    finally:
        place.leave("the test ends")
        place.close()
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]


def test_a_process_has_a_bounded_number_of_models(tmp_path: Path, load: Load) -> None:
    artifact = onnx_models.added(tmp_path)
    made = [load(artifact) for _ in range(MAX_PLACES + 1)]
    assert len({each.host.pid for each in made}) == 2
    assert made[-1].host.models == 1
    begun = [Begun(each, row(index, 0)) for index, each in enumerate(made) for _ in range(4)]
    assert [first(each.end())[0][0] for each in begun] == [index + 1 for index in range(len(made)) for _ in range(4)]


def test_a_crash_costs_the_culprit_alone_which_lives_alone_from_then_on(tmp_path: Path, load: Load) -> None:
    culprit = load(harmful_models.dividing(tmp_path / "a"))
    neighbours = [load(onnx_models.added(tmp_path / f"{number}", number)) for number in range(5)]
    before = culprit.host.pid
    ended = Begun(culprit, BAD).end()
    assert isinstance(ended, HostEnded)
    assert (ended.was_alone, ended.is_outside, ended.signal_name) == (True, False, "SIGFPE")
    for number, each in enumerate(neighbours):
        wait_for_next(each, before)
        assert first(Begun(each, row(1, 2)).end()) == [[1 + number, 2 + number]]
    assert len({each.host.pid for each in neighbours}) == 1
    assert [each.host.models for each in neighbours] == [5] * 5
    assert neighbours[0].host.last_end.startswith("the host that it shared ended")
    wait_for_next(culprit, before)
    assert first(Begun(culprit, row(1, 2)).end()) == [[-1, -2]]
    assert (culprit.host.pid != neighbours[0].host.pid, culprit.host.models) == (True, 1)

    again, shared = culprit.host.pid, neighbours[0].host.pid
    assert isinstance(Begun(culprit, BAD).end(), HostEnded)
    wait_for_next(culprit, again)
    assert {each.host.pid for each in neighbours} == {shared}


def test_of_two_that_ran_in_a_crash_neither_is_known_and_both_live_alone(tmp_path: Path, load: Load) -> None:
    culprit, running = load(harmful_models.dividing(tmp_path / "a")), load(harmful_models.looping(tmp_path / "b"))
    idle = load(onnx_models.added(tmp_path / "c"))
    before = idle.host.pid
    long = Begun(running, ENDLESS)
    ends = [Begun(culprit, BAD).end(), long.end()]
    for ended in ends:
        assert isinstance(ended, HostEnded)
        assert (ended.was_alone, ended.is_outside) == (False, False)
    for each in (culprit, running, idle):
        wait_for_next(each, before)
    assert len({each.host.pid for each in (culprit, running, idle)}) == 3
    assert first(Begun(running, looping(3)).end()) == [[4, 4]]
    assert isinstance(again := Begun(culprit, BAD).end(), HostEnded)
    assert (again.was_alone, again.is_outside) == (True, False)


def test_a_signal_from_outside_is_nobodys_fault_and_all_share_again(tmp_path: Path, load: Load) -> None:
    running, idle = load(harmful_models.looping(tmp_path / "a")), load(onnx_models.added(tmp_path / "b"))
    for _ in range(4):  # more than the deaths that end an instance for good
        before = idle.host.pid
        long = Begun(running, ENDLESS)
        os.kill(before, signal.SIGKILL)
        ended = long.end()
        assert isinstance(ended, HostEnded)
        assert ended.is_outside
        for each in (running, idle):
            wait_for_next(each, before)
        assert running.host.pid == idle.host.pid
    assert first(Begun(running, looping(3)).end()) == [[4, 4]]


def test_neighbours_of_crash_after_crash_are_never_given_up(tmp_path: Path, load: Load) -> None:
    neighbour = load(onnx_models.added(tmp_path / "good"))
    for number in range(6):
        culprit = load(harmful_models.dividing(tmp_path / f"{number}"))
        before = neighbour.host.pid
        assert culprit.host.pid == before
        assert isinstance(Begun(culprit, BAD).end(), HostEnded)
        wait_for_next(neighbour, before)
        assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]
        culprit.close()


def test_a_model_that_crashes_its_host_at_load_fails_alone(tmp_path: Path, load: Load) -> None:
    neighbour = load(onnx_models.added(tmp_path / "good"))
    before = neighbour.host.pid
    with pytest.raises(LoadFailed, match="ended its process while loading"):
        load(onnx_models.crashing(tmp_path / "bad"))
    wait_for_next(neighbour, before)
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]
    assert neighbour.host.restarts == 1


def test_a_warm_up_that_a_neighbours_crash_ends_is_run_again(tmp_path: Path, load: Load) -> None:
    culprit, warming = load(harmful_models.dividing(tmp_path / "a")), load(harmful_models.looping(tmp_path / "b"))
    (inputs,) = looping(300_000)
    answers: list[list[Array]] = []
    runs = threading.Thread(target=lambda: answers.append(warming.run(dict(zip(("x", "times"), inputs, strict=True)))))
    process = psutil.Process(warming.host.pid)
    until_s = process.cpu_times().user + ENDLESS_S
    runs.start()
    while process.cpu_times().user < until_s:
        pass
    assert isinstance(Begun(culprit, BAD).end(), HostEnded)
    runs.join()
    assert answers[0][0].tolist() == [[300_001, 300_001]]
    assert warming.host.restarts == 1


def test_a_run_over_its_limit_is_ended_in_place(tmp_path: Path, load: Load) -> None:
    endless, neighbour = load(harmful_models.looping(tmp_path / "a")), load(onnx_models.added(tmp_path / "b"))
    for _ in range(5):  # on a busy machine the library may be late, and its host is ended
        restarts, before = neighbour.host.restarts, neighbour.host.pid
        begun = Begun(endless, ENDLESS, 0.1)
        assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]
        begun.run.give_up()
        assert isinstance(begun.end(), RunTooLong)
        endless.restore()
        assert first(Begun(endless, looping(3)).end()) == [[4, 4]]
        if endless.host.pid == before:
            break
        endless.close()
        wait_for_next(neighbour, before)
        endless = load(harmful_models.looping(tmp_path / "a"))
    assert (endless.host.restarts, neighbour.host.restarts) == (0, restarts)


def test_a_run_that_takes_all_memory_ends_for_itself_and_lives_alone(tmp_path: Path, load: Load) -> None:
    limits = {"host_memory_bytes": 64 << 20}
    hungry = load(onnx_models.hungry(tmp_path / "a", 1 << 30), **limits)
    neighbour = load(onnx_models.added(tmp_path / "b"), **limits)
    before = neighbour.host.pid
    ended = Begun(hungry, row(1, 2)).end()
    assert isinstance(ended, HostEnded)
    assert not ended.is_outside
    wait_for_next(hungry, before)
    alone = Begun(hungry, row(1, 2)).end()
    assert isinstance(alone, RunFailed)
    assert not isinstance(alone, HostEnded)
    wait_for_next(neighbour, before)
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]
    assert neighbour.host.pid != hungry.host.pid


def test_an_unloaded_model_leaves_the_others_and_the_last_one_ends_the_process(tmp_path: Path, load: Load) -> None:
    one, other = load(onnx_models.added(tmp_path / "a")), load(onnx_models.added(tmp_path / "b"))
    pid = one.host.pid
    one.close()
    assert (other.host.pid, other.host.models, other.host.restarts) == (pid, 1, 0)
    assert first(Begun(other, row(1, 2)).end()) == [[2, 3]]
    third = load(onnx_models.added(tmp_path / "c"))
    assert third.host.pid == pid
    for each in (other, third):
        each.close()
    wait_for_end(pid)


def test_a_load_that_is_given_up_leaves_the_others(tmp_path: Path, hosts: Hosts, load: Load) -> None:
    neighbour = load(onnx_models.added(tmp_path / "good"))
    loading = HostedBackend(backend("onnxruntime"), hosts).load(harmful_models.looping(tmp_path / "a"), options_of())
    begun = Begun(loading, ENDLESS)
    process = psutil.Process(neighbour.host.pid)
    until_s = process.cpu_times().user + ENDLESS_S
    while process.cpu_times().user < until_s:
        pass
    hosts.end_loads()  # of its warm-up
    assert isinstance(begun.end(), HostEnded)
    loading.close()
    before = neighbour.host.pid
    # The run cannot be ended alone: the process ends, for which its neighbours are not to blame.
    wait_for_next(neighbour, before)
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]


@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "waited for"])
def test_a_busy_model_moves_to_a_host_of_its_own_and_loses_no_request(
    tmp_path: Path, load: Load, is_begun: bool
) -> None:
    busy, neighbour = load(harmful_models.looping(tmp_path / "a")), load(onnx_models.added(tmp_path / "b"))
    shared = busy.host.pid
    rounds = 0
    while busy.host.pid == shared:
        begun = [Begun(busy, looping(100_000)) for _ in range(is_begun)]
        if not is_begun:
            busy.run_parts(looping(100_000), LIMIT_S)
        assert all(isinstance(each.end(), list) for each in begun)
        rounds += 1
    assert rounds > 1
    assert (busy.host.restarts, busy.host.models, busy.host.last_end) == (0, 1, "")
    assert (neighbour.host.pid, neighbour.host.models, neighbour.host.restarts) == (shared, 1, 0)
    assert first(Begun(busy, looping(3)).end()) == [[4, 4]]
    assert first(Begun(neighbour, row(1, 2)).end()) == [[2, 3]]
