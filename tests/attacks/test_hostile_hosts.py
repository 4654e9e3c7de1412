"""Harm to the process that prepares hosts, by a model or from outside: other models and other hosts are answered on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.sandbox.folder_tree import remove_tree
from tests.fakes.daemon_process import START_S, DaemonProcess
from tests.models import python_models

CONFIG = "python_models = true\ncalibrate = false\n"
SETTINGS = "batch = false\n[limits]\nrun_limit_ms = 600_000\n"

DEEP = """
if value == 13:
    os.chdir(os.environ["TMPDIR"])
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    os._exit(1)
"""
"""More levels than Python recurses, and than a process may hold descriptors."""

HIDDEN = """
if value == 13:
    os.chdir(os.environ["TMPDIR"])
    for _ in range(30):
        os.mkdir("long" * 60)
        os.chdir("long" * 60)
    for name in "abc":
        os.posix_fallocate(os.open(name, os.O_CREAT | os.O_WRONLY), 0, 100 << 20)
    signal.pause()
"""
"""Beyond the longest path that names anything."""


def until(is_so: Callable[[], object]) -> None:
    """Wait for something in another process."""
    end_s = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def number(value: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[value]], np.float32)}


@contextmanager
def good_work(endpoint: str) -> Iterator[Callable[[], int]]:
    """Ask `good` all the time; gives how often it was answered. Fails where a request was not."""
    stop = threading.Event()
    answers: list[float] = []
    faults: list[Exception] = []

    def ask() -> None:
        with Client(endpoint) as client:
            while not stop.is_set():
                try:
                    answers.append(client.infer("good", number(len(answers)), timeout_ms=60_000)["y"][0, 0])
                except EdgeRuntimeError as error:
                    faults.append(error)

    thread = threading.Thread(target=ask, name="good work")
    thread.start()
    try:
        yield lambda: len(answers)
    finally:
        stop.set()
        thread.join()
    assert faults == []
    assert answers == list(range(len(answers)))


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tmp").mkdir()
    yield tmp_path / "tmp"
    remove_tree(tmp_path / "tmp")  # pytest cannot


def put(tmp_path: Path, **bodies: str) -> None:
    for name, body in {"good": "", **bodies}.items():
        python_models.on_first_value(tmp_path / "models" / name / "1", body)
        (tmp_path / "models" / name / "model.toml").write_text(SETTINGS)


def parent_of(client: Client, model: str) -> psutil.Process:
    """The process that prepared a model's host, once it has one."""
    until(lambda: hosts_of(client)[model]["pid"])
    return psutil.Process(psutil.Process(hosts_of(client)[model]["pid"]).ppid())


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run on; one that ended may wait for whoever reaps orphans here."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def hosts_of(client: Client) -> dict[str, dict]:
    return {each["name"]: each["host"] for each in client.models()}


@pytest.mark.parametrize(("body", "reason"), [(DEEP, "exit"), (HIDDEN, "its temporary folder held more than")])
def test_a_temporary_folder_of_any_form_costs_other_models_nothing(
    tmp_path: Path, temporary: Path, body: str, reason: str
) -> None:
    put(tmp_path, hostile=body)
    with (
        DaemonProcess(tmp_path, config=CONFIG, TMPDIR=str(temporary)) as daemon,
        Client(daemon.endpoint) as client,
    ):
        daemon.wait_ready()
        before = hosts_of(client)["good"]
        with good_work(daemon.endpoint) as answered:
            with pytest.raises(EdgeRuntimeError):
                client.infer("hostile", number(13), timeout_ms=60_000)
            assert client.infer("hostile", number(1), timeout_ms=60_000)["y"].tolist() == [[1]]
            assert answered() > 0
        assert reason in hosts_of(client)["hostile"]["last_end"]
        assert hosts_of(client)["good"] | {"memory_bytes": 0} == before | {"memory_bytes": 0}
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert daemon.stop() == 0
    assert list(temporary.iterdir()) == []
    assert left_of(children) == []


KILLS = 3


def test_a_killed_parent_costs_nobody_an_answer(tmp_path: Path) -> None:
    put(tmp_path, other="")
    with DaemonProcess(tmp_path, config=CONFIG) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        with good_work(daemon.endpoint) as answered:
            for kills in range(1, KILLS + 1):
                parent = parent_of(client, "other")
                before = answered()
                parent.kill()
                for value in range(20):
                    assert client.infer("other", number(value), timeout_ms=60_000)["y"].tolist() == [[value]]
                until(lambda before=before: answered() > before)
                until(lambda kills=kills: {each["restarts"] for each in hosts_of(client).values()} == {kills})
        assert daemon.stop() == 0


def test_a_stopped_parent_costs_nobody_an_answer_and_its_hosts_are_replaced_when_one_is_to_end(tmp_path: Path) -> None:
    put(tmp_path, crashing="if value == 13: os._exit(1)", endless="if value == 13: time.sleep(3600)")
    limited = tmp_path / "models" / "endless" / "model.toml"
    limited.write_text("batch = false\n[limits]\nrun_limit_ms = 500\n")
    with DaemonProcess(tmp_path, config=CONFIG) as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        with good_work(daemon.endpoint) as answered:
            for hostile in ("endless", "crashing"):
                parent, before = parent_of(client, "good"), answered()
                parent.suspend()
                with pytest.raises(EdgeRuntimeError):
                    client.infer(hostile, number(13), timeout_ms=120_000)
                for value in range(3):
                    assert client.infer(hostile, number(value), timeout_ms=120_000)["y"].tolist() == [[value]]
                assert left_of([parent]) == []
                assert answered() > before
        assert daemon.stop() == 0


def test_a_daemon_ends_though_its_parents_are_stopped_and_takes_their_hosts_along(tmp_path: Path) -> None:
    put(tmp_path)
    with DaemonProcess(tmp_path, config=CONFIG + "drain_s = 1.0\n") as daemon, Client(daemon.endpoint) as client:
        daemon.wait_ready()
        assert client.infer("good", number(3))["y"].tolist() == [[3]]
        parent_of(client, "good").suspend()
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert daemon.stop() == 0
        assert left_of(children) == []
