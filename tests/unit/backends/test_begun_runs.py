"""Runs in hosts that no thread waits for: each ends once, on the loop or beside it, whatever its host does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.base import HostedRun, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.errors import EdgeRuntimeError, HostEnded, RunFailed, RunTooLong
from edge_runtime.hosts import host_run
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.hosts.runner import RunnerSide
from edge_runtime.tensors import Array
from tests.fakes.loop_thread import LoopThread
from tests.models import harmful_models, onnx_models, python_models

LIMIT_S = 60.0
"""Longer than any run here, and shorter than a test that hangs."""

Load = Callable[..., HostInstance]


class Owner:
    """Whose runs they are."""

    thread = 0


class Begun:
    """A run that was begun: what it ended with, each time it was told."""

    def __init__(self, instance: HostInstance, parts: Sequence[Sequence[Array]], limit_s: float = LIMIT_S) -> None:
        self.ends: SimpleQueue[list[Array] | EdgeRuntimeError] = SimpleQueue()
        self.run: HostedRun = instance.begin(parts, limit_s, Owner(), self.ends.put)

    def end(self) -> list[Array] | EdgeRuntimeError:
        """What it ended with; it is told once."""
        ended = self.ends.get(timeout=LIMIT_S)
        assert self.ends.empty()
        return ended


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    with LoopThread() as thread:
        yield thread.loop


@pytest.fixture
def load(loop: IoLoop) -> Iterator[Load]:
    """Load an artifact in a host; closed when the test ends."""
    hosts = Hosts()
    hosts.events = loop
    made: list[HostInstance] = []

    def load_one(artifact: Path, name: str = "onnxruntime", **options: Any) -> HostInstance:
        hosted = HostedBackend(backend(name, allows_code=True), hosts, allows_code=True)
        made.append(hosted.load(artifact, LoadOptions(**options)))
        made[-1].finish_warm_up()
        return made[-1]

    yield load_one
    for instance in made:
        instance.close()
    hosts.close()


def row(*values: float) -> list[list[Array]]:
    return [[np.array([values], np.float32)]]


def first(ended: list[Array] | EdgeRuntimeError) -> list[Any]:
    assert isinstance(ended, list), ended
    rows: list[Any] = ended[0].tolist()
    return rows


def on_the_loop(loop: IoLoop) -> bool:
    """Whether the loop still goes round."""
    came = threading.Event()
    loop.call(came.set)
    return came.wait(LIMIT_S)


def comes_to_wait(thread: threading.Thread) -> bool:
    """Whether a thread waits for a condition, and does not end before."""
    while thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and frame.f_code is threading.Condition.wait.__code__:
            return True
    return False


def test_runs_end_as_events_one_after_another_and_side_by_side(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path), concurrency=2)
    assert first(Begun(instance, row(1, 2)).end()) == [[2, 3]]
    begun = [Begun(instance, row(value, value)) for value in range(2 + instance.ahead)]
    assert [first(each.end())[0][0] for each in begun] == [1, 2, 3, 4][: len(begun)]


def test_a_run_that_needs_a_larger_slot_and_one_of_text_end_as_events(tmp_path: Path, load: Load) -> None:
    wide, text = load(onnx_models.added(tmp_path / "wide", 1.0, columns=64)), tmp_path / "text"
    assert len(first(Begun(wide, [[np.zeros((40_000, 2), np.float32)]]).end())) == 40_000
    sent = np.array([[b"a" * 300_000, b"b"]], object)
    assert first(Begun(load(onnx_models.identity(text, "BYTES")), [[sent]]).end()) == sent.tolist()


def test_a_run_that_fails_ends_with_its_error_and_the_next_runs(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.picky(tmp_path, 1.0))
    assert isinstance(Begun(instance, row(9, 9)).end(), RunFailed)
    assert first(Begun(instance, row(1, 2)).end()) == [[2, 3]]


def test_a_run_whose_host_is_killed_ends_once_and_the_next_host_runs(tmp_path: Path, load: Load) -> None:
    instance = load(harmful_models.looping(tmp_path))
    begun = Begun(instance, [[np.ones((1, 2), np.float32), np.array([2**40])]])
    os.kill(instance.host.pid, signal.SIGKILL)
    ended = begun.end()
    assert isinstance(ended, HostEnded)
    assert (ended.is_outside, ended.signal_name) == (True, "SIGKILL")
    instance.restore()
    again = Begun(instance, [[np.ones((1, 2), np.float32), np.array([3])]])
    assert first(again.end()) == [[4, 4]]


class SoonEnded(threading.Thread):
    """A thread that has done its work when `start` returns, as one of a busy machine may have."""

    def start(self) -> None:
        super().start()
        self.join(LIMIT_S)


def test_a_run_that_is_lost_at_once_ends_once_and_nothing_reaches_the_loop(
    tmp_path: Path, load: Load, loop: IoLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = load(harmful_models.looping(tmp_path))
    begun = Begun(instance, [[np.ones((1, 2), np.float32), np.array([2**40])]])
    # Its own name alone: the threads that start the next host wait for this one.
    monkeypatch.setattr(host_run, "threading", SimpleNamespace(Thread=SoonEnded, get_ident=threading.get_ident))
    os.kill(instance.host.pid, signal.SIGKILL)
    assert isinstance(begun.end(), HostEnded)
    assert on_the_loop(loop)
    assert "reached the I/O loop" not in caplog.text


def test_a_run_whose_host_ends_before_its_report_is_awaited_ends_once(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = load(onnx_models.added(tmp_path))
    begin, ends = RunnerSide.begin, SimpleQueue[list[Array] | EdgeRuntimeError]()
    is_over = threading.Event()

    def end(result: list[Array] | EdgeRuntimeError) -> None:
        ends.put(result)
        is_over.set()

    def begin_and_lose_the_host(*arguments: Any) -> None:
        os.kill(instance.host.pid, signal.SIGSTOP)  # it shall not answer first
        begin(*arguments)
        os.kill(instance.host.pid, signal.SIGKILL)
        assert is_over.wait(LIMIT_S), "a loop hears of a host's end whether or not it waits for a report"

    with monkeypatch.context() as patch:
        patch.setattr(RunnerSide, "begin", begin_and_lose_the_host)
        instance.begin(row(1, 2), LIMIT_S, Owner(), end)
    assert isinstance(ends.get(timeout=LIMIT_S), HostEnded)
    assert ends.empty()
    instance.restore()
    assert first(Begun(instance, row(1, 2)).end()) == [[2, 3]]


def test_a_run_that_finds_no_host_has_not_begun_and_nobody_is_to_blame(tmp_path: Path, load: Load) -> None:
    instance = load(harmful_models.looping(tmp_path))
    taken = [
        Begun(instance, [[np.ones((1, 2), np.float32), np.array([2**40])]], 0.01) for _ in range(1 + instance.ahead)
    ]
    with pytest.raises(HostEnded) as raised:
        Begun(instance, row(1, 2))
    assert (raised.value.is_outside, raised.value.has_begun) == (True, False)
    restores = threading.Thread(target=instance.restore)
    restores.start()
    assert comes_to_wait(restores), "a host is there, but all its runners are at work"
    for each in taken:
        each.run.give_up()
        assert isinstance(each.end(), RunTooLong | HostEnded)
    restores.join()


def test_a_run_over_its_limit_is_given_up_and_its_host_stays_where_the_library_can_end_it(
    tmp_path: Path, load: Load
) -> None:
    instance = load(harmful_models.looping(tmp_path))
    before = instance.host.pid
    endless = Begun(instance, [[np.ones((1, 2), np.float32), np.array([2**40])]], 0.2)
    while endless.run.left_s() > 0:
        pass
    endless.run.give_up()
    assert isinstance(endless.end(), RunTooLong)
    assert first(Begun(instance, [[np.ones((1, 2), np.float32), np.array([3])]]).end()) == [[4, 4]]
    assert instance.host.pid == before


def test_giving_up_a_run_that_has_ended_does_nothing(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path))
    begun = Begun(instance, row(1, 2))
    assert first(begun.end()) == [[2, 3]]
    begun.run.give_up()
    assert begun.ends.empty()
    assert first(Begun(instance, row(3, 4)).end()) == [[4, 5]]


FLOOD = """
if value == 13:
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as other:
                    for _ in range(1000):
                        other.send(MESSAGE, socket.MSG_DONTWAIT)
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    "message",
    [
        b"garbage",
        b"\x92\xacneeds memory\x01",
        b"\x92\xacneeds memory\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x91\xa9responded",
    ],
    ids=["no message", "memory that it has", "memory without end", "an answer to nobody"],
)
def test_a_host_that_floods_its_runner_ends_and_the_loop_goes_round(
    tmp_path: Path, loop: IoLoop, load: Load, message: bytes
) -> None:
    good = load(onnx_models.added(tmp_path / "good"))
    artifact = python_models.on_first_value(
        tmp_path / "bad", FLOOD.replace("MESSAGE", repr(message)), "import os, socket, stat"
    )
    bad = load(artifact, "python")
    begun = Begun(bad, [[np.array([[13]], np.float32)]])
    assert on_the_loop(loop)
    assert first(Begun(good, row(1, 2)).end()) == [[2, 3]]
    assert isinstance(begun.end(), RunFailed)


def test_calls_of_many_threads_end_each_once(tmp_path: Path, load: Load) -> None:
    instance = load(onnx_models.added(tmp_path), concurrency=2)
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask(caller: int) -> None:
        for number in range(200):
            while True:
                try:
                    begun = Begun(instance, row(caller, number))
                except HostEnded:
                    continue  # all runners are at work
                break
            answers.put((caller, number, first(begun.end())))

    threads = [threading.Thread(target=partial(ask, caller)) for caller in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    got = [answers.get_nowait() for _ in range(800)]
    assert all(rows == [[caller + 1, number + 1]] for caller, number, rows in got)
