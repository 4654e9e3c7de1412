"""A `model.py` in its child process: crashes, hangs, noise, and nothing left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.python_backend import PythonBackend, PythonInstance
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from tests.conftest import children_now
from tests.fakes.clock import FakeClock
from tests.models import python_models

Load = Callable[..., PythonInstance]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def load(clock: FakeClock) -> Iterator[Load]:
    """Load an artifact; closed when the test ends."""
    made: list[PythonInstance] = []

    def load_one(artifact: Path, **extra: str) -> PythonInstance:
        made.append(PythonBackend(allow=True, clock=clock).load(artifact, LoadOptions(extra=extra)))
        return made[-1]

    yield load_one
    for instance in made:
        instance.close()


def value(number: float) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"x": np.array([[number]], np.float32)}


def children() -> list[psutil.Process]:
    return list(children_now())


CRASH = "if value == 13: os.kill(os.getpid(), signal.SIGSEGV)"


def test_a_crash_fails_that_run_only_and_the_next_one_gets_a_new_child(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, CRASH))
    (before,) = children()
    with pytest.raises(RunFailed, match="process ended during this run"):
        instance.run(value(13))
    assert instance.run(value(2))[0].tolist() == [[2.0]]
    (after,) = children()
    assert after.pid != before.pid


def test_how_a_child_ended_is_in_the_log(tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    instance = load(python_models.on_first_value(tmp_path, f"{CRASH}\nif value == 14: os._exit(3)"))
    for crash in (13, 14):
        with pytest.raises(RunFailed, match="see the log"):
            instance.run(value(crash))
    told = [(record.getMessage(), vars(record)["reason"]) for record in caplog.records if "reason" in vars(record)]
    assert told == [
        ("a model's process ended", "signal 11 (Segmentation fault)"), ("a model's process ended", "exit status 3"),
    ]  # fmt: skip


def test_a_child_that_died_between_runs_costs_no_run(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, ""))
    (child,) = children()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert instance.run(value(2))[0].tolist() == [[2.0]]


def test_a_child_that_crashes_again_and_again_is_restarted_less_and_less_often(
    tmp_path: Path, load: Load, clock: FakeClock
) -> None:
    instance = load(python_models.on_first_value(tmp_path, CRASH))
    for wait_s in (0.0, 0.5, 1.0, 2.0, 4.0):
        with pytest.raises(RunFailed, match="process ended during this run"):
            instance.run(value(13))
        if wait_s:
            with pytest.raises(RunFailed, match=f"started again in {wait_s:.1f} s"):
                instance.run(value(1))
            assert children() == []
            clock.advance(wait_s)
    assert instance.run(value(1))[0].tolist() == [[1.0]]
    with pytest.raises(RunFailed, match="process ended during this run"):
        instance.run(value(13))
    assert instance.run(value(1))[0].tolist() == [[1.0]], "an answer makes the waits begin anew"


def test_a_model_that_cannot_be_loaded_again_fails_runs_until_it_can(
    tmp_path: Path, load: Load, clock: FakeClock
) -> None:
    artifact = python_models.on_first_value(tmp_path, CRASH)
    instance = load(artifact)
    good = artifact.read_text(encoding="utf-8")
    artifact.write_text("raise RuntimeError('half written')", encoding="utf-8")
    with pytest.raises(RunFailed):
        instance.run(value(13))
    with pytest.raises(RunFailed, match="half written"):
        instance.run(value(1))
    artifact.write_text(good, encoding="utf-8")
    clock.advance(1.0)
    assert instance.run(value(1))[0].tolist() == [[1.0]]


def test_an_exception_in_infer_fails_that_run_with_its_words_and_keeps_the_child(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, "if value == 13: raise ValueError('thirteen is unlucky')"))
    before = children()
    with pytest.raises(RunFailed, match="ValueError: thirteen is unlucky"):
        instance.run(value(13))
    assert instance.run(value(1))[0].tolist() == [[1.0]]
    assert children() == before


def test_a_hung_run_fails_in_time_and_its_child_is_replaced(tmp_path: Path, load: Load) -> None:
    instance = load(python_models.on_first_value(tmp_path, "if value == 13: signal.pause()"), run_timeout_s="0.2")
    with pytest.raises(RunFailed, match=r"no answer within 0.2 s"):
        instance.run(value(13))
    assert children() == []
    with pytest.raises(RunFailed, match=r"no answer within 0.2 s"):
        instance.run(value(13))


def test_a_model_that_loads_for_ever_is_given_up(tmp_path: Path, load: Load) -> None:
    artifact = python_models.on_first_value(tmp_path, "", preamble="signal.pause()")
    with pytest.raises(LoadFailed, match=r"not loaded within 0.3 s"):
        load(artifact, load_timeout_s="0.3")
    assert children() == []


def test_closing_ends_what_the_model_started_too(tmp_path: Path, load: Load) -> None:
    body = "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    instance = load(python_models.on_first_value(tmp_path, body))
    instance.run(value(1))
    found = children()
    assert len(found) == 2
    instance.close()
    psutil.wait_procs(found, timeout=10)
    assert [child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


def test_the_child_dies_when_the_daemon_is_killed(tmp_path: Path) -> None:
    artifact = python_models.on_first_value(tmp_path, "signal.pause()")
    program = """
import os, signal, sys, threading
from pathlib import Path
import numpy as np
from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
instance = backend("python", allow_python=True).load(Path(sys.argv[1]), LoadOptions())
threading.Thread(target=instance.run, args=({"x": np.zeros((1, 1), np.float32)},), daemon=True).start()
print("loaded", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program, str(artifact)], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"loaded\n"
        (child,) = psutil.Process(daemon.pid).children()
        daemon.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert (len(gone), alive) == (1, [])


def test_what_the_model_prints_goes_to_the_log(tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    instance = load(python_models.on_first_value(tmp_path, "print('hello'); print('oh no', file=sys.stderr)"))
    instance.run(value(1))
    instance.close()
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.endswith("hello")]
    assert [line for line in told if line.endswith("oh no")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 5", "wanted a dict"),
        ("return {}", "gave no 'y'"),
        ("return {'y': inputs['x'].astype(np.float64)}", "as FP64, OUTPUTS says FP32"),
        ("return {'y': np.zeros((1, 2), np.float32)}", "of shape \\[1, 2\\], OUTPUTS says \\[-1, 1\\]"),
    ],
)
def test_an_answer_that_is_not_what_outputs_says_fails_the_run(
    tmp_path: Path, load: Load, body: str, reason: str
) -> None:
    instance = load(python_models.on_first_value(tmp_path, body))
    with pytest.raises(RunFailed, match=reason):
        instance.run(value(1))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "must say INPUTS"),
        (
            "INPUTS = [{'name': 'x', 'datatype': 'FLOAT', 'shape': [1]}]\nOUTPUTS = INPUTS",
            "datatype 'FLOAT' is unknown",
        ),
        ("INPUTS = OUTPUTS = [{'name': 'x', 'datatype': 'FP32', 'shape': [1]}]", "no function infer"),
        ("INPUTS = OUTPUTS = [{'name': 'x', 'datatype': 'FP32', 'shape': [1]}] * 2", "each name once"),
        ("def infer(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "ended its process"),
        ("import os; os._exit(0)", "ended its process"),
    ],
)
def test_a_model_that_breaks_the_contract_fails_to_load(tmp_path: Path, load: Load, source: str, reason: str) -> None:
    artifact = tmp_path / "model.py"
    artifact.write_text(source, encoding="utf-8")
    with pytest.raises(LoadFailed, match=reason):
        load(artifact)
    assert children() == []


def test_load_gets_the_version_folder_and_may_import_what_lies_beside(tmp_path: Path, load: Load) -> None:
    (tmp_path / "beside.py").write_text("ADD = 40\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("2", encoding="utf-8")
    body = """
import beside
def load(folder):
    return beside.ADD + int((folder / "two.txt").read_text())
def infer(model, inputs):
    return {"y": inputs["x"] + model}
"""
    tensors = [("x", "INT64", [-1])], [("y", "INT64", [-1])]
    instance = load(python_models.write(tmp_path, *tensors, body))
    assert instance.run({"x": np.array([1, 2])})[0].tolist() == [43, 44]


def test_a_device_is_the_models_own_business(tmp_path: Path) -> None:
    artifact = python_models.mlp(tmp_path)
    with pytest.raises(BackendUnavailable, match="GPU"):
        PythonBackend(allow=True).load(artifact, LoadOptions(device="GPU"))


def test_options_that_are_no_time_fail_to_load(tmp_path: Path, load: Load) -> None:
    with pytest.raises(LoadFailed, match="positive number of seconds"):
        load(python_models.mlp(tmp_path), run_timeout_s="soon")
