"""Pipelines as their owner meets them at load: what they wait for, what does not fit, and what holds their steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import LoadFailed, ModelNotFound, NotReady, RunFailed
from tests.fakes.clock import FakeClock
from tests.models import onnx_models

TWO = """
[[step]]
name = "first"
model = "a"
inputs = {x = "input.x"}

[[step]]
name = "second"
model = "b"
inputs = {x = "first.y"}

[output]
y = "second.y"
"""


@contextmanager
def serving(tmp_path: Path, clock: FakeClock | None = None, **settings: Any) -> Iterator[Runtime]:
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"), **settings)
    with Runtime(tmp_path / "models", config=config, clock=clock) as runtime:
        yield runtime


def put(tmp_path: Path, model: str, constant: float = 1.0, version: int = 1, columns: int = 2, toml: str = "") -> None:
    """Write a model x FP32 [rows, 2] -> y FP32 [rows, columns] = x + constant."""
    onnx_models.added(tmp_path / "models" / model / str(version), constant, columns)
    if toml:
        (tmp_path / "models" / model / "model.toml").write_text(toml)


def put_pipeline(tmp_path: Path, text: str, name: str = "p", toml: str = "", steps: str = "") -> None:
    folder = tmp_path / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.toml").write_text(text)
    if toml:
        (folder / "model.toml").write_text(toml)
    if steps:
        (folder / "steps.py").write_text(steps)


def states(runtime: Runtime) -> dict[str, str]:
    return {f"{each['name']}/{each['version']}": each["state"] for each in runtime.models()}


def reason(runtime: Runtime, model: str = "p", version: int = 1) -> str:
    return next(each["reason"] for each in runtime.models() if (each["name"], each["version"]) == (model, version))


def ask(runtime: Runtime, x: object = ((1.0, 2.0),), model: str = "p") -> list[list[float]]:
    return runtime.infer(model, {"x": np.array(x, np.float32)})["y"].tolist()


def settle(runtime: Runtime) -> None:
    """Return once the loader has looked at all that changed: its steps come one after another."""
    for _ in range(2):
        with pytest.raises(ModelNotFound):
            runtime.unload("nothing")


def settle_folder(runtime: Runtime, clock: FakeClock) -> None:
    """Have what changed in the folder taken."""
    runtime.core.loader.rescan()
    settle(runtime)
    clock.advance(10.0)
    runtime.core.loader.rescan()
    settle(runtime)


def test_a_pipeline_answers_as_one_model(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        (entry,) = (each for each in runtime.models() if each["name"] == "p")
        assert (entry["state"], entry["backend"], entry["mode"]) == ("ready", "pipeline", "pipeline"), entry
        assert ask(runtime) == [[12.0, 13.0]]
        servable = runtime.core.table.find("p", 1)
        assert servable.batches
        assert [(each.name, each.datatype, each.shape) for each in servable.spec.inputs] == [("x", "FP32", (-1, 2))]


def test_a_pipeline_whose_models_come_later_is_loaded_by_itself(tmp_path: Path) -> None:
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        assert states(runtime)["p/1"] == "failed"
        assert reason(runtime) == "step 'first': there is no model 'a'"
        put(tmp_path, "a", 1.0)
        runtime.load("a")
        settle(runtime)
        assert states(runtime)["p/1"] == "ready"
        assert ask(runtime) == [[12.0, 13.0]]


def test_a_pipeline_loads_models_that_wait_on_demand_and_keeps_them(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0, toml="on_demand = true")
    put(tmp_path, "b", 10.0, toml="on_demand = true")
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        assert states(runtime) == {"a/1": "ready", "b/1": "ready", "p/1": "ready"}


def test_a_pipeline_on_demand_comes_with_its_models_at_the_first_request(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0, toml="on_demand = true")
    put(tmp_path, "b", 10.0, toml="on_demand = true")
    put_pipeline(tmp_path, TWO, toml="on_demand = true")
    with serving(tmp_path) as runtime:
        assert set(states(runtime).values()) == {"on_demand"}
        assert ask(runtime) == [[12.0, 13.0]]


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0, columns=3)
    put(tmp_path, "b", 10.0)
    wrong = TWO.replace('"first.y"}', '"first.y", z = "input.x"}').replace('y = "second.y"', 'y = "second.q"')
    put_pipeline(tmp_path, wrong)
    with serving(tmp_path) as runtime:
        assert states(runtime)["p/1"] == "failed"
        assert reason(runtime).split("; ") == [
            "step 'second': input 'x' of model 'b' is FP32 [-1,2]",
            "first.y is FP32 [-1,3]",
            "step 'second': model 'b' has no input 'z'",
            "it takes x",
            "step 'second': model 'b' has no output 'q'",
            "it gives y",
        ]
        with pytest.raises(NotReady, match="failed to load: step 'second'"):
            ask(runtime)


def test_a_file_that_cannot_be_read_is_the_pipelines_own_failure(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, TWO.replace("inputs", "input"))
    with serving(tmp_path) as runtime:
        assert states(runtime) == {"a/1": "ready", "p/1": "failed"}
        assert "step[0].input: unknown key 'input'; did you mean 'inputs'?" in reason(runtime)


def test_pipelines_that_ask_each_other_in_a_circle_are_named(tmp_path: Path) -> None:
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO.replace('"a"', '"q"'), "p")
    put_pipeline(tmp_path, TWO.replace('"a"', '"p"'), "q")
    with serving(tmp_path) as runtime:
        assert states(runtime) == {"b/1": "ready", "p/1": "failed", "q/1": "failed"}
        assert "pipelines ask each other in a circle: q → p → q" in reason(runtime, "q")


def test_a_pipeline_asks_a_pipeline(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO.replace('"a"', '"p"'), "above")
    put_pipeline(tmp_path, TWO, "p")
    with serving(tmp_path) as runtime:
        assert ask(runtime, model="above") == [[22.0, 23.0]]


def test_a_steps_new_version_that_does_not_fit_is_failed_and_the_old_one_serves_on(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        put(tmp_path, "a", 2.0, version=2, columns=3)
        with pytest.raises(LoadFailed):
            runtime.load("a")
        settle(runtime)
        assert states(runtime) == {"a/1": "ready", "a/2": "failed", "b/1": "ready", "p/1": "ready"}
        assert reason(runtime, "a", 2) == (
            "pipeline 'p' cannot go on with it: step 'second': input 'x' of model 'b' is FP32 [-1,2]; first.y is FP32 "
            "[-1,3]"
        )
        assert ask(runtime) == [[12.0, 13.0]]


def test_a_steps_new_version_that_fits_answers_the_pipeline(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        put(tmp_path, "a", 2.0, version=2)
        runtime.load("a")
        assert ask(runtime) == [[13.0, 14.0]]
        settle(runtime)
        assert states(runtime) == {"a/1": "unloaded", "a/2": "ready", "b/1": "ready", "p/1": "ready"}


def test_a_step_and_its_pipeline_that_change_together_are_both_taken(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        onnx_models.scaled(tmp_path / "models" / "c" / "1", 10.0, size=3)
        runtime.load("c")
        put(tmp_path, "a", 2.0, version=2, columns=3)
        put_pipeline(tmp_path, TWO.replace('"b"', '"c"'))
        with pytest.raises(LoadFailed, match=r"input 'x' of model 'c' is FP32 \[-1,3\]; first.y is FP32 \[-1,2\]"):
            runtime.load("p")
        assert ask(runtime) == [[12.0, 13.0]]
        runtime.load("a")
        settle(runtime)
        assert ask(runtime) == [[30.0, 40.0, 20.0]]


def test_a_version_that_a_step_names_stays_when_a_newer_one_comes(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO.replace('model = "a"', 'model = "a"\nversion = 1'))
    with serving(tmp_path) as runtime:
        put(tmp_path, "a", 2.0, version=2)
        runtime.load("a", 2)
        runtime.load("a")
        settle(runtime)
        assert states(runtime)["a/1"] == "ready"
        assert ask(runtime) == [[12.0, 13.0]]


def test_a_model_that_a_pipeline_asks_is_not_unloaded_by_hand(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    with serving(tmp_path) as runtime:
        with pytest.raises(LoadFailed, match="model 'a' version 1 is a step of the pipeline 'p'; unload that first"):
            runtime.unload("a")
        assert ask(runtime) == [[12.0, 13.0]]
        runtime.unload("p")
        runtime.unload("a")
        assert states(runtime) == {"a/1": "unloaded", "b/1": "ready", "p/1": "unloaded"}
        runtime.load("p")
        assert states(runtime) == {"a/1": "ready", "b/1": "ready", "p/1": "ready"}


def test_a_model_whose_folder_is_removed_takes_the_pipeline_with_it_until_it_is_back(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    clock = FakeClock()
    with serving(tmp_path, clock=clock) as runtime:
        (tmp_path / "models" / "a").rename(tmp_path / "away")
        settle_folder(runtime, clock)
        assert states(runtime) == {"b/1": "ready", "p/1": "failed"}
        assert reason(runtime) == "step 'first': there is no model 'a'"
        (tmp_path / "away").rename(tmp_path / "models" / "a")
        settle_folder(runtime, clock)
        assert states(runtime) == {"a/1": "ready", "b/1": "ready", "p/1": "ready"}


PYTHON = """
import numpy as np

calls = 0

def double(x):
    global calls
    calls += 1
    return x * 2

def describe(y, before):
    global calls
    calls += 1
    return {"text": np.array([f"{before.tolist()} {y.tolist()}".encode()], object), "calls": np.array([calls])}
"""

WITH_PYTHON = """
[input.x]
datatype = "FP32"
shape = [-1, 2]

[[step]]
name = "double"
python = "steps.py:double"
inputs = {x = "input.x"}
outputs = {doubled = {datatype = "FP32", shape = [-1, 2]}}

[[step]]
name = "add"
model = "a"
inputs = {x = "double.doubled"}

[[step]]
name = "describe"
python = "steps.py:describe"
inputs = {y = "add.y", before = "input.x"}
outputs = {text = {datatype = "BYTES", shape = [1]}, calls = {datatype = "INT64", shape = [1]}}

[output]
y = "add.y"
text = "describe.text"
calls = "describe.calls"
"""


def test_python_steps_run_in_one_host_of_the_pipeline(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON, steps=PYTHON)
    with serving(tmp_path, python_models=True) as runtime:
        for call in (1, 2):
            answer = runtime.infer("p", {"x": np.ones((1, 2), np.float32)})
            assert answer["y"].tolist() == [[3.0, 3.0]]
            assert answer["text"].tolist() == [b"[[1.0, 1.0]] [[3.0, 3.0]]"]
            assert answer["calls"].tolist() == [2 * call]
        (entry,) = (each for each in runtime.models() if each["name"] == "p")
        assert entry["host"]["pid"] > 0
        assert entry["memory_bytes"] > 0


def test_python_steps_are_refused_without_python_models(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON, steps=PYTHON)
    with serving(tmp_path) as runtime:
        assert states(runtime)["p/1"] == "failed"
        assert "is Python code, which is off by default; serve with --python-models" in reason(runtime)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ("", "has no function double"),
        ("def double(y): return y\ndef describe(y, before): return y", "double cannot be called with the inputs x"),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        (None, "holds no steps.py"),
    ],
)
def test_a_fault_of_steps_py_is_said(tmp_path: Path, steps: str | None, wanted: str) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON)
    if steps is not None:
        (tmp_path / "models" / "p" / "steps.py").write_text(steps)
    with serving(tmp_path, python_models=True) as runtime:
        assert states(runtime)["p/1"] == "failed"
        assert wanted in reason(runtime)


@pytest.mark.parametrize(
    ("double", "wanted"),
    [
        ("return x.astype(int)", "step double: double gave 'doubled' as INT64; its outputs say FP32"),
        ("return x[0]", "step double: double gave 'doubled' of shape [2]; its outputs say [-1, 2]"),
        ("return {'other': x}", "step double: double gave no 'doubled'; got other"),
        ("raise ValueError('no')", "step double: double failed: ValueError: no"),
        ("return 1j * x", "step double: double gave 'doubled': numpy dtype complex64"),
    ],
)
def test_a_python_step_that_gives_something_else_fails_its_request_under_its_name(
    tmp_path: Path, double: str, wanted: str
) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON, steps=f"def double(x):\n    {double}\ndef describe(y, before): return y\n")
    with serving(tmp_path, python_models=True) as runtime, pytest.raises(RunFailed) as failed:
        runtime.infer("p", {"x": np.ones((1, 2), np.float32)})
    assert failed.value.message.startswith(wanted)


def test_an_input_that_only_python_reads_must_be_described(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON.replace("[input.x]", "[input.y]").replace('"input.x"', '"input.z"', 1))
    with serving(tmp_path, python_models=True) as runtime:
        assert "input.y: no step reads it" in reason(runtime)
    put_pipeline(tmp_path, WITH_PYTHON.partition("[[step]]")[1] + WITH_PYTHON.partition("[[step]]")[2], steps=PYTHON)
    with serving(tmp_path, python_models=True) as runtime:
        assert "nobody says what input.x is: add [input.x] with datatype and shape" in reason(runtime)


def test_a_changed_file_is_taken_and_a_broken_one_leaves_the_old_serving(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put(tmp_path, "b", 10.0)
    put_pipeline(tmp_path, TWO)
    clock = FakeClock()
    with serving(tmp_path, clock=clock) as runtime:
        put_pipeline(tmp_path, TWO.replace('"first.y"', '"input.x"'))
        settle_folder(runtime, clock)
        assert ask(runtime) == [[11.0, 12.0]]
        put_pipeline(tmp_path, TWO.replace('"first.y"', '"thrid.y"'))
        settle_folder(runtime, clock)
        assert reason(runtime).startswith("a newer copy of its files failed to load: ")
        assert "there is no step 'thrid'; wanted input, first, second" in reason(runtime)
        assert ask(runtime) == [[11.0, 12.0]]


def test_models_that_a_pipeline_asks_never_leave_for_others(tmp_path: Path) -> None:
    put(tmp_path, "a", toml="on_demand = true")
    put(tmp_path, "b", toml="on_demand = true")
    put_pipeline(tmp_path, TWO)
    wide = onnx_models.wide(tmp_path / "wide", 2048)
    for model in "cdefghi":
        shutil.copytree(wide.parent, tmp_path / "models" / model / "1")
        (tmp_path / "models" / model / "model.toml").write_text("on_demand = true")
    # Room for one, not for seven: each is seen to take one to three times its file, by what the process freed before.
    with serving(tmp_path, limits=LimitSettings(memory_bytes=int(wide.stat().st_size * 5.5))) as runtime:
        x = np.zeros((1, 2048), np.float32)
        for model in "cdefghicd":  # the pipeline's models were used longest ago
            assert runtime.infer(model, {"x": x}).model == model
        found = states(runtime)
        assert (found["a/1"], found["b/1"], found["p/1"]) == ("ready", "ready", "ready")
        assert "on_demand" in found.values()


DYING = """
import os, signal

def double(x):
    if x[0, 0] == 666:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x * 2

def describe(y, before):
    return {"text": [b""], "calls": [1]}
"""


def test_a_python_step_that_ends_its_host_costs_its_own_request_alone(tmp_path: Path) -> None:
    put(tmp_path, "a", 1.0)
    put_pipeline(tmp_path, WITH_PYTHON, steps=DYING)
    with serving(tmp_path, python_models=True) as runtime:
        with pytest.raises(RunFailed, match=r"^step double: "):
            runtime.infer("p", {"x": np.full((1, 2), 666, np.float32)})
        answer = runtime.infer("p", {"x": np.ones((1, 2), np.float32)})
        assert answer["y"].tolist() == [[3.0, 3.0]]
        (entry,) = (each for each in runtime.models() if each["name"] == "p")
        assert entry["host"]["restarts"] >= 1


def test_a_queue_is_refused_since_a_pipelines_requests_wait_in_those_of_its_steps(tmp_path):
    put(tmp_path, "a")
    put(tmp_path, "b")
    put_pipeline(tmp_path, TWO, toml="[queue]\nkeep_order = true\n")
    with serving(tmp_path) as runtime:
        assert reason(runtime) == "[queue]: a pipeline has no queue of its own; set it for the models of its steps"


def test_pipelines_of_pipelines_have_a_bound_on_their_depth(tmp_path: Path) -> None:
    put(tmp_path, "b", 10.0)
    put(tmp_path, "p0", 1.0, toml="on_demand = true")
    for depth in range(1, 150):
        put_pipeline(tmp_path, TWO.replace('"a"', f'"p{depth - 1}"'), f"p{depth}", toml="on_demand = true")
    put_pipeline(tmp_path, TWO.replace('"a"', '"p149"'), "top")
    with serving(tmp_path) as runtime:
        found = states(runtime)
        assert (found["top/1"], found["b/1"]) == ("failed", "ready")
        assert {found[f"p{depth}/1"] for depth in range(141)} == {"on_demand"}, "those far below were not loaded for it"
        assert ask(runtime, model="p3") == [[32.0, 33.0]]
