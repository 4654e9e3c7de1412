"""Models in Python that call other served models: answers, errors, deadlines, circles, and hosts that die meanwhile."""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import DeadlineExceeded, DeadlineUnmeetable, NotReady, RunFailed
from tests.models import onnx_models, python_models

WAIT_S = 60.0

UNTRIED = "batch = true\n[warmup]\nruns = 0\n"


@contextmanager
def serving(tmp_path: Path, cores: int = 2) -> Iterator[Runtime]:
    limits = LimitSettings(cores=cores)
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"), python_models=True, limits=limits)
    with Runtime(tmp_path / "models", config=config) as runtime:
        yield runtime


def caller(tmp_path: Path, name: str, body: str, settings: str = "batch = true\n") -> None:
    """Write a model x FP32 [rows, 2] -> y the same, whose `infer(model, inputs, context)` has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    source = f"""
import os, signal, threading, time
import numpy as np
from edge_runtime import errors

def infer(model, inputs, context):
    x = inputs["x"]
{lines}
"""
    tensors = [("x", "FP32", [-1, 2])], [("y", "FP32", [-1, 2])]
    python_models.write(tmp_path / "models" / name / "1", *tensors, source)
    (tmp_path / "models" / name / "model.toml").write_text(settings)


def adding(tmp_path: Path, name: str, number: float) -> None:
    """Write an ONNX model x FP32 [rows, 2] -> y, with `number` added."""
    onnx_models.added(tmp_path / "models" / name / "1", number)


def ask(runtime: Runtime, model: str, value: float = 1.0, rows: int = 1, **options: Any) -> float:
    given = {"x": np.full((rows, 2), value, np.float32)}
    result = runtime.infer(model, given, **options).outputs
    (array,) = result.values()
    assert array.shape == (rows, 2)
    return float(array[-1, -1])


PLUS = 'return {"y": list(context.infer("plus", {"x": x}).values())[0] * 10}'


@pytest.mark.smoke
@pytest.mark.parametrize("isolation", ["never", "always"])
def test_a_model_gets_the_outputs_of_another_by_name(tmp_path: Path, isolation: str) -> None:
    adding(tmp_path, "plus", 2.0)
    (tmp_path / "models" / "plus" / "model.toml").write_text(f'isolation = "{isolation}"\n')
    caller(tmp_path, "front", PLUS)
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 1.0) == 30.0
        assert ask(runtime, "front", 2.0, rows=3) == 40.0


def test_text_and_large_outputs_go_both_ways(tmp_path: Path) -> None:
    tensors = [("x", "BYTES", [-1])], [("y", "BYTES", [-1]), ("n", "UINT8", [-1, 300_000])]
    echo = """
import numpy as np
def infer(inputs):
    texts = [b"<" + text + b">" for text in inputs["x"]]
    return {"y": np.array(texts, object), "n": np.full((len(texts), 300_000), 7, np.uint8)}
"""
    python_models.write(tmp_path / "models" / "echo" / "1", *tensors, echo)
    front = """
def infer(model, inputs, context):
    got = context.infer("echo", {"x": inputs["x"]}, outputs=["n", "y"])
    assert list(got) == ["n", "y"]
    return context.infer("echo", {"x": got["y"]}, version=1)
"""
    python_models.write(tmp_path / "models" / "front" / "1", *tensors, front)
    for name in ("echo", "front"):
        (tmp_path / "models" / name / "model.toml").write_text("batch = true\n")
    with serving(tmp_path) as runtime:
        got = runtime.infer("front", {"x": np.array([b"one", b"", b"\0three"], object)}).outputs
        assert got["y"].tolist() == [b"<<one>>", b"<<>>", b"<<\0three>>"]
        assert (got["n"] == 7).all()


def test_every_run_may_call_many_models_one_after_another(tmp_path: Path) -> None:
    for index in range(3):
        adding(tmp_path, f"plus{index}", float(index))
    caller(
        tmp_path,
        "front",
        'return {"y": sum(context.infer(f"plus{i % 3}", {"x": x})["y"] for i in range(300))}',
    )
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 1.0) == 300 * 1.0 + 100 * (0 + 1 + 2)


@pytest.mark.parametrize("cores", [1, 2])
def test_callers_on_every_core_wait_for_a_third_model_without_a_deadlock(tmp_path: Path, cores: int) -> None:
    adding(tmp_path, "plus", 1.0)
    (tmp_path / "models" / "plus" / "model.toml").write_text('mode = "workers"\nisolation = "always"\n')
    for index in range(3):
        caller(tmp_path, f"front{index}", PLUS)
    with serving(tmp_path, cores=cores) as runtime, ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, runtime, f"front{index % 3}", float(index)) for index in range(60)]
        assert [each.result(WAIT_S) for each in asked] == [(index + 1.0) * 10 for index in range(60)]
        assert runtime.core.dispatcher.has_spare_core()
        assert runtime.core.dispatcher.is_idle()


def test_a_chain_of_callers_passes_one_core_on(tmp_path: Path) -> None:
    adding(tmp_path, "m4", 1.0)
    (tmp_path / "models" / "m4" / "model.toml").write_text('mode = "workers"\n')
    for index in range(4):
        caller(tmp_path, f"m{index}", f'return {{"y": context.infer("m{index + 1}", {{"x": x}})["y"] + 1}}')
    with serving(tmp_path, cores=1) as runtime:
        assert ask(runtime, "m0", 0.0) == 5.0


def test_a_call_that_would_wait_for_itself_is_refused_at_once(tmp_path: Path) -> None:
    caller(tmp_path, "self", 'return {"y": context.infer("self", {"x": x})["y"]}')
    caller(tmp_path, "ping", 'return {"y": context.infer("pong", {"x": x})["y"]}')
    caller(tmp_path, "pong", 'return {"y": context.infer("ping", {"x": x})["y"]}')
    with serving(tmp_path) as runtime:
        with pytest.raises(RunFailed, match=r"model self cannot call self, .*: self -> self \(model.py:[0-9]+\)$"):
            ask(runtime, "self")
        with pytest.raises(RunFailed, match=r"model pong cannot call ping, .*: pong -> ping -> pong"):
            ask(runtime, "ping")
        # Without a circle in one request either: each could else hold what the other waits for.
        with pytest.raises(RunFailed, match="pong -> ping -> pong"):
            ask(runtime, "pong")


def test_a_model_that_is_replaced_takes_its_calls_with_it(tmp_path: Path) -> None:
    caller(tmp_path, "a", 'return {"y": context.infer("b", {"x": x})["y"] + 1}')
    caller(tmp_path, "b", 'return {"y": x}')
    with serving(tmp_path) as runtime:
        assert ask(runtime, "a", 0.0) == 1.0
        caller(tmp_path, "a", 'return {"y": x}')
        caller(tmp_path, "b", 'return {"y": context.infer("a", {"x": x})["y"] + 2}')
        runtime.load("a")
        runtime.load("b")
        assert ask(runtime, "b", 0.0) == 2.0


def test_errors_of_the_called_model_are_the_wires_and_may_be_caught(tmp_path: Path) -> None:
    adding(tmp_path, "plus", 1.0)
    caller(tmp_path, "failing", "if x[0, 0] == 13: raise ValueError('thirteen')\nreturn {'y': x}")
    caller(
        tmp_path,
        "front",
        """
seen = []
for name, given, kind in [
    ("nobody", {"x": x}, errors.ModelNotFound),
    ("plus", {"z": x}, errors.TensorMismatch),
    ("plus", {"x": x[:, :1]}, errors.TensorMismatch),
    ("failing", {"x": np.full((1, 2), 13, np.float32)}, errors.RunFailed),
]:
    try:
        context.infer(name, given)
    except kind as error:
        seen.append(error.code)
if x[0, 0] == 7:
    context.infer("nobody", {"x": x})
return {"y": np.full_like(x, len(seen))}
""".strip(),
    )
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front") == 4.0
        with pytest.raises(RunFailed, match=r"ModelNotFound.*nobody"):  # its own fault, not its caller's
            ask(runtime, "front", 7.0)
        assert ask(runtime, "front") == 4.0


def test_a_model_that_is_not_ready_refuses_the_caller_with_its_own_code(tmp_path: Path) -> None:
    adding(tmp_path, "plus", 1.0)
    caller(tmp_path, "front", PLUS)
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front") == 20.0
        runtime.unload("plus")
        with pytest.raises(NotReady, match="plus"):
            ask(runtime, "front")
        runtime.load("plus")
        assert ask(runtime, "front") == 20.0


def test_the_earliest_deadline_of_the_run_ends_the_call_and_the_model_hears_of_it(tmp_path: Path) -> None:
    caller(tmp_path, "slow", "time.sleep(float(x[0, 0]))\nreturn {'y': x}", UNTRIED)
    caller(
        tmp_path,
        "front",
        """
if x[0, 0] == 0.125:  # whether the last call was refused
    return {"y": np.full_like(x, vars(context).get("refused", 0))}
try:
    return {"y": context.infer("slow", {"x": x}, timeout_ms=60_000)["y"]}
except errors.Refused as error:
    context.refused = vars(context).get("refused", 0) + 1
    raise
""".strip(),
    )
    with serving(tmp_path) as runtime:
        with pytest.raises((DeadlineExceeded, DeadlineUnmeetable)):
            ask(runtime, "front", 3.0, timeout_ms=1000.0)
        assert ask(runtime, "front", 0.125) == 1.0  # long before the called run has ended
        assert runtime.core.metrics.model("slow").snapshot()["refused"]


def test_a_timeout_of_the_call_is_its_own(tmp_path: Path) -> None:
    caller(tmp_path, "slow", "time.sleep(float(x[0, 0]))\nreturn {'y': x}", UNTRIED)
    caller(
        tmp_path,
        "front",
        """
try:
    return context.infer("slow", {"x": x}, timeout_ms=100)
except errors.DeadlineExceeded:
    return {"y": x * 0}
""".strip(),
    )
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 1.0) == 0.0


def test_a_host_that_dies_during_a_call_is_replaced_and_the_run_begins_again(tmp_path: Path) -> None:
    pipes = tmp_path / "models" / "slow" / "1"  # all that its host may read
    pipes.mkdir(parents=True)
    for run in (1, 2):
        os.mkfifo(pipes / f"run{run}")
    body = f"context.runs = vars(context).get('runs', 0) + 1\nopen(f'{pipes}/run{{context.runs}}').read()"
    caller(tmp_path, "slow", f"{body}\nreturn {{'y': x}}", f"{UNTRIED}[limits]\nrun_limit_ms = 30000\n")
    caller(tmp_path, "front", 'return {"y": context.infer("slow", {"x": x})["y"] * 2}')
    with serving(tmp_path) as runtime, ThreadPoolExecutor(1) as pool:
        front = runtime.core.table.find("front", 1).layouts.narrow
        before = psutil.Process(front.host.pid)
        asked = pool.submit(ask, runtime, "front", 4.0)
        first = os.open(pipes / "run1", os.O_WRONLY)  # the called model has begun
        before.kill()
        before.wait(WAIT_S)
        os.close(first)
        os.close(os.open(pipes / "run2", os.O_WRONLY))  # the run that began again
        assert asked.result(WAIT_S) == 8.0
        assert front.host.restarts == 1
        assert runtime.core.dispatcher.is_idle()


def test_a_called_host_that_dies_costs_its_caller_an_error_and_nothing_else(tmp_path: Path) -> None:
    caller(tmp_path, "crashing", "if x[0, 0] == 13: os.kill(os.getpid(), signal.SIGSEGV)\nreturn {'y': x}")
    caller(
        tmp_path,
        "front",
        """
try:
    return context.infer("crashing", {"x": x})
except errors.RunFailed as error:
    return {"y": np.full_like(x, 100 if "SIGSEGV" in error.message else 200)}
""".strip(),
    )
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 13.0) == 100.0
        assert ask(runtime, "front", 2.0) == 2.0
        assert runtime.core.table.find("front", 1).layouts.narrow.host.restarts == 0


def test_a_call_is_a_request_like_any_other_of_the_called_model(tmp_path: Path) -> None:
    adding(tmp_path, "plus", 1.0)
    (tmp_path / "models" / "plus" / "model.toml").write_text('mode = "workers"\n')
    caller(tmp_path, "front", PLUS)
    with serving(tmp_path) as runtime:
        ask(runtime, "front")
        ask(runtime, "plus")
        assert runtime.core.metrics.model("plus").snapshot()["requests"] == 2


def test_threads_of_a_run_may_call_and_a_run_that_has_ended_may_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adding(tmp_path, "plus", 1.0)
    caller(
        tmp_path,
        "front",
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    got = list(pool.map(lambda i: context.infer("plus", {"x": x + i})["y"], range(20)))
def call_on():
    while True:
        try:
            context.infer("plus", {"x": x})
        except errors.RunFailed as error:
            print("late:", error.message)
            return
threading.Thread(target=call_on).start()
return {"y": sum(got)}
""".strip(),
    )
    heard = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "late: a run that has ended calls no other model" in record.getMessage():
                heard.set()

    caplog.set_level(logging.INFO)
    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        with serving(tmp_path) as runtime:
            assert ask(runtime, "front", 0.0) == sum(range(20)) + 20
            assert heard.wait(WAIT_S)
            assert ask(runtime, "plus", 0.0) == 1.0
    finally:
        logging.getLogger().removeHandler(listener)


def test_a_model_without_a_daemon_says_that_it_cannot_call(tmp_path: Path) -> None:
    from edge_runtime.backends.base import LoadOptions
    from edge_runtime.backends.python.backend import PythonBackend

    caller(tmp_path, "front", PLUS)
    instance = PythonBackend(allow=True).load(tmp_path / "models" / "front" / "1" / "model.py", LoadOptions())
    with pytest.raises(RunFailed, match="only where a daemon, or Runtime, serves it"):
        instance.run({"x": np.zeros((1, 2), np.float32)})


def test_a_request_that_waits_for_a_call_is_answered_when_the_runtime_closes(tmp_path: Path) -> None:
    waiting = tmp_path / "models" / "slow" / "1" / "waiting"
    waiting.parent.mkdir(parents=True)
    os.mkfifo(waiting)
    caller(tmp_path, "slow", f"open({str(waiting)!r}).read()\nreturn {{'y': x}}", UNTRIED)
    caller(tmp_path, "front", 'return {"y": context.infer("slow", {"x": x})["y"] * 2}')
    with serving(tmp_path) as runtime:
        asked = runtime.submit("front", {"x": np.full((1, 2), 4, np.float32)})
        begun = os.open(waiting, os.O_WRONLY)
        closing = threading.Thread(target=runtime.close)
        closing.start()
        os.close(begun)
        closing.join(WAIT_S)
        asked.exception(WAIT_S)  # an answer, or that the daemon stops: it depends on who was first
        assert asked.done()


def test_the_limit_of_a_run_does_not_count_its_wait_for_another_model(tmp_path: Path) -> None:
    caller(tmp_path, "slow", "time.sleep(1.5)\nreturn {'y': x}", UNTRIED)
    body = 'got = context.infer("slow", {"x": x})["y"]\nif x[0, 0] == 7: time.sleep(60)\nreturn {"y": got}'
    caller(tmp_path, "front", body, "[limits]\nrun_limit_ms = 1200\n")
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 2.0) == 2.0
        with pytest.raises(RunFailed, match=r"longer than its limit, 1\.2 s"):
            ask(runtime, "front", 7.0)
        assert ask(runtime, "front", 2.0) == 2.0


def test_a_called_model_that_waits_on_demand_is_loaded(tmp_path: Path) -> None:
    caller(tmp_path, "inner", "return {'y': x + 1}", "on_demand = true\n")
    caller(tmp_path, "front", 'return {"y": context.infer("inner", {"x": x})["y"]}')
    with serving(tmp_path, cores=1) as runtime:
        assert ask(runtime, "front", 1.0, timeout_ms=20_000.0) == 2.0


@pytest.mark.parametrize(
    "options",
    ["timeout_ms=float('nan')", "timeout_ms=-1.0", "timeout_ms='soon'", "version='1'", "parameters={'a': [1]}"],
)
def test_a_call_that_is_not_a_call_is_an_error_of_the_model_and_costs_no_host(tmp_path: Path, options: str) -> None:
    adding(tmp_path, "plus", 1.0)
    body = f"""
try:
    context.infer("plus", {{"x": x}}, {options})
except (errors.RequestError, TypeError):
    return context.infer("plus", {{"x": x}})
"""
    caller(tmp_path, "front", body.strip())
    with serving(tmp_path) as runtime:
        assert ask(runtime, "front", 1.0) == 2.0
        assert runtime.core.table.find("front", 1).layouts.narrow.host.restarts == 0


def test_a_model_that_calls_others_is_not_warmed_up_and_says_so_where_batch_does_not(tmp_path: Path) -> None:
    adding(tmp_path, "plus", 1.0)
    for name, toml in (("unsaid", ""), ("rows", "batch = true\n"), ("alone", "batch = false\n")):
        caller(tmp_path, name, PLUS, toml)
    with serving(tmp_path) as runtime:
        told = {each["name"]: each["reason"] for each in runtime.models()}
        assert told.pop("unsaid").startswith("it was not warmed up, because it calls other models")
        assert told == dict.fromkeys(("plus", "rows", "alone"), "")
        batches = {name: runtime.core.table.find(name, 1).batches for name in ("unsaid", "rows", "alone")}
        assert batches == {"unsaid": False, "rows": True, "alone": False}


def test_a_picture_that_a_model_sends_on_comes_back_as_arrays_of_answers(tmp_path: Path) -> None:
    onnx_models.colours(tmp_path / "models" / "colours" / "1")
    steps = '[input.image]\nrange = "0..1"\n[output.scores]\nanswer = "classes"\ntop_k = 1\n'
    (tmp_path / "models" / "colours" / "model.toml").write_text(steps)
    front = """
def infer(model, inputs, context):
    best = context.infer("colours", {"image": inputs["picture"]})["scores"]
    raw = context.infer("colours", {"image": inputs["picture"]}, parameters={"raw": True})["scores"]
    return {"best": best[:, 0, 0], "scores": raw}
"""
    outputs = [("best", "FP32", [-1]), ("scores", "FP32", [-1, 3])]
    python_models.write(tmp_path / "models" / "front" / "1", [("picture", "BYTES", [-1])], outputs, front)
    (tmp_path / "models" / "front" / "model.toml").write_text("batch = true\n")
    pictures = []
    for colour in ("blue", "red"):
        file = io.BytesIO()
        Image.new("RGB", (30, 20), colour).save(file, "PNG")
        pictures.append(file.getvalue())
    with serving(tmp_path) as runtime:
        got = runtime.infer("front", {"picture": np.array(pictures, object)}).outputs
        assert got["best"].tolist() == [2.0, 0.0]
        assert got["scores"].argmax(axis=1).tolist() == [2, 0]


def call_of(*place: object, datatype: str = "FP32") -> list[object]:
    """The message of a call, whose input lies somewhere."""
    return ["call", "slow", [["x", datatype, list(place)]]]


GOOD = call_of([1, 2], 0, 8, 0)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([call_of([1, 2], 1 << 40, 8, 0)], "a tensor lies at"),
        ([call_of([1, 2], -8, 8, 0)], "a tensor lies at"),
        ([call_of([1, 1 << 60], 0, 8, 0)], "a FP32 tensor of shape"),
        ([call_of([1, 2], 0, 8, 9)], "inputs lie nowhere"),
        ([call_of([1, 2], 0, 8, 0, datatype="FP99")], "have no datatype"),
        ([call_of([1, 2], 0, 8, 0, datatype="BYTES")], "a tensor is malformed"),
        ([["call", 7, []]], "a message is malformed"),
        ([["answered", []]], "a message is malformed"),
        ([GOOD, GOOD], "goes on while it waits"),
        ([GOOD, ["not run", "", "draining"]], "goes on while it waits"),
        ([GOOD, ["needs memory", 1 << 20]], "goes on while it waits"),
    ],
)
def test_a_host_that_breaks_the_protocol_of_calls_costs_itself_alone(
    tmp_path: Path, messages: list[object], told: str
) -> None:
    body = f"""
if x[0, 0] == 13:
    import gc, msgspec
    (runner,) = [each for each in gc.get_objects() if type(each).__name__ == "HostRunner"]
    for each in {messages!r}:
        runner._channel.send(msgspec.msgpack.encode(each))
    time.sleep(60)
return {{"y": x}}
"""
    caller(tmp_path, "slow", "time.sleep(0.1)\nreturn {'y': x}", UNTRIED)
    caller(tmp_path, "front", body.strip(), "rerun = false\n")
    with serving(tmp_path) as runtime:
        with pytest.raises(RunFailed, match=told):
            ask(runtime, "front", 13.0)
        assert ask(runtime, "front", 2.0) == 2.0
        assert ask(runtime, "slow", 2.0) == 2.0
