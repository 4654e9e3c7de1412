"""One request through a pipeline: order, conditions, maps, crops, failures, cancel, drain, and exactly one reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings, ModelSettings
from edge_runtime.daemon.runtime import InferFuture, Runtime
from edge_runtime.errors import (
    DeadlineUnmeetable,
    Draining,
    EdgeRuntimeError,
    RunFailed,
    TensorMismatch,
)
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.servable import InlineBuffers, Layouts, Servable
from edge_runtime.pipelines.chain import Chain, chain_model
from edge_runtime.pipelines.definition import Pipeline, Place, Step, read_pipeline
from edge_runtime.pipelines.inline_chain import bind_inline_chain
from tests.models import onnx_models, python_models

WAIT_S = 60.0

FLOATS = ("FP32", (-1, 2))


class PipelineFake:
    """The instance of a pipeline, which nobody runs."""

    backend, device, precision, concurrency, memory_bytes = "pipeline", "", "", 1, 0

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def close(self) -> None:
        pass


class Kit:
    """A runtime with its models, and pipelines put over them."""

    def __init__(self, folder: Path, cores: int = 2) -> None:
        self.models = folder / "models"
        self.models.mkdir(exist_ok=True)
        limits = LimitSettings(cores=cores)
        self.config = Config(
            watch=False, calibrate=False, state=str(folder / "state"), python_models=True, limits=limits
        )

    def add(self, name: str, constant: float, settings: str = "") -> None:
        """x FP32 [rows, 2] -> y, with `constant` added."""
        onnx_models.added(self.models / name / "1", constant)
        (self.models / name / "model.toml").write_text(settings)

    def python(self, name: str, body: str, **tensors: Any) -> None:
        """A model x FP32 [rows, 2] -> y the same, in a host, with this body of `infer(inputs)`."""
        inputs = tensors.get("inputs", [("x", "FP32", [-1, 2])])
        outputs = tensors.get("outputs", [("y", "FP32", [-1, 2])])
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        source = f"import time, os\nfrom pathlib import Path\nimport numpy as np\ndef infer(inputs):\n{lines}\n"
        python_models.write(self.models / name / "1", inputs, outputs, source)
        (self.models / name / "model.toml").write_text(tensors.get("settings", "batch = true\n"))

    @contextmanager
    def serving(self) -> Iterator[Kit]:
        with Runtime(self.models, config=self.config) as self.runtime:
            self.core = self.runtime.core
            assert {each["state"] for each in self.runtime.models()} <= {"ready"}, self.runtime.models()
            yield self

    def pipeline(
        self,
        text: str | Pipeline,
        inputs: Mapping[str, tuple[str, tuple[int, ...]]],
        outputs: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        name: str = "whole",
        batches: bool = True,
        is_inline: bool = False,
        max_queue_bytes: int = 64 << 20,
    ) -> Servable:
        core = self.core
        pipeline = read_pipeline(text, "pipeline.toml") if isinstance(text, str) else text
        spec = ModelSpec(
            tuple(TensorSpec(key, *value) for key, value in inputs.items()),
            tuple(TensorSpec(key, *value) for key, value in outputs.items()),
        )
        metrics = core.metrics.model(name)
        scheduled = chain_model(name, max_queue_rows=4096, max_queue_bytes=max_queue_bytes, metrics=metrics)
        parts: dict[str, Any] = {"table": core.table, "clock": core.clock}
        chain = Chain(
            pipeline, spec, scheduled=scheduled, infer=core.infer, dispatcher=core.dispatcher, metrics=core.metrics,
            **parts,
        )  # fmt: skip
        chain.seed([1, 32])
        bound = None
        if is_inline:
            bound = bind_inline_chain(pipeline, spec, metrics=metrics, max_rows=32, limit_s=1.0, **parts)
        instance: Any = PipelineFake(spec)
        servable = Servable(
            name, 1, ModelSettings(), Layouts(instance), batches=batches, mode="pipeline",
            max_rows=32 if batches else 1,
            inline=InlineBuffers(bound) if bound is not None else None, scheduled=scheduled, dispatcher=core.dispatcher,
            clock=core.clock, metrics=metrics, chain=chain,
        )  # fmt: skip
        replaced = core.table.publish(servable)
        if replaced is not None:
            replaced.close(5.0)
        return servable

    def ask(self, value: float = 1.0, rows: int = 1, name: str = "whole", **options: Any) -> Any:
        given = {"x": np.full((rows, 2), value, np.float32)}
        return self.runtime.submit(name, given, **options)

    def value(self, future: InferFuture, output: str = "y") -> float:
        return float(future.result(WAIT_S)[output][-1, -1])


THREE = """
[[step]]
name = "c"
model = "plus3"
inputs = {x = "b.y"}
[[step]]
name = "a"
model = "plus1"
inputs = {x = "input.x"}
[[step]]
name = "b"
model = "plus2"
inputs = {x = "a.y"}
[output]
y = "c.y"
"""


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    for index in (1, 2, 3):
        made.add(f"plus{index}", float(index), 'mode = "workers"\n' if index == 2 else "")
    with made.serving():
        yield made


def test_steps_run_in_the_order_that_their_inputs_ask_for(kit: Kit) -> None:
    kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
    assert kit.value(kit.ask(10.0)) == 16.0
    got = kit.ask(1.0, rows=3).result(WAIT_S)
    assert got["y"].tolist() == [[7.0, 7.0]] * 3
    assert got.model == "whole"


def test_many_requests_at_once_each_get_their_own_answer(kit: Kit) -> None:
    kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
    futures = [kit.ask(float(index), timeout_ms=WAIT_S * 1e3) for index in range(300)]
    assert [kit.value(each) for each in futures] == [index + 6.0 for index in range(300)]
    assert kit.core.dispatcher.is_idle()


def test_branches_meet_again_and_what_nobody_reads_is_not_kept(kit: Kit) -> None:
    text = """
[[step]]
name = "left"
model = "plus1"
inputs = {x = "input.x"}
[[step]]
name = "right"
model = "plus2"
inputs = {x = "input.x"}
[[step]]
name = "onleft"
model = "plus3"
inputs = {x = "left.y"}
[output]
a = "onleft.y"
b = "right.y"
given = "input.x"
"""
    kit.pipeline(text, {"x": FLOATS}, {"a": FLOATS, "b": FLOATS, "given": FLOATS})
    got = kit.ask(1.0).result(WAIT_S)
    assert {name: float(array[0, 0]) for name, array in got.outputs.items()} == {"a": 5.0, "b": 3.0, "given": 1.0}


def test_a_thousand_inline_steps_do_not_fill_the_stack(kit: Kit) -> None:
    places = [Place("input", "x"), *(Place(f"s{index}", "y") for index in range(1000))]
    steps = tuple(Step(f"s{index}", "plus1", inputs={"x": places[index]}) for index in range(1000))
    pipeline = Pipeline(steps, tuple((each.name,) for each in steps), {"y": places[-1]})
    kit.pipeline(pipeline, {"x": FLOATS}, {"y": FLOATS})
    assert kit.value(kit.ask(0.0)) == 1000.0


def test_a_pipeline_may_be_a_step(kit: Kit) -> None:
    kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS}, name="inner")
    text = '[[step]]\nname = "all"\nmodel = "inner"\ninputs = {x = "input.x"}\n[output]\ny = "all.y"\n'
    kit.pipeline(text, {"x": FLOATS}, {"y": FLOATS})
    assert kit.value(kit.ask(1.0)) == 7.0


CONDITION = """
[[step]]
name = "first"
model = "plus1"
inputs = {x = "input.x"}
[[step]]
name = "second"
model = "plus2"
when = "first.y > 5"
inputs = {x = "first.y"}
[[step]]
name = "third"
model = "plus3"
inputs = {x = "second.y"}
[output]
first = "first.y"
second = "second.y"
third = "third.y"
"""


def test_a_step_whose_condition_does_not_hold_gives_zero_rows_as_does_the_model_after_it(kit: Kit) -> None:
    kit.pipeline(CONDITION, {"x": FLOATS}, {"first": FLOATS, "second": FLOATS, "third": FLOATS})
    skipped = kit.ask(1.0).result(WAIT_S).outputs
    assert [skipped[name].shape for name in ("first", "second", "third")] == [(1, 2), (0, 2), (0, 2)]
    ran = kit.ask(10.0).result(WAIT_S).outputs
    assert [float(ran[name][0, 0]) for name in ("first", "second", "third")] == [11.0, 13.0, 16.0]


def test_a_failing_step_answers_the_whole_with_its_code_and_name(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    for index in (1, 3):
        kit.add(f"plus{index}", float(index))
    kit.python("plus2", "raise ValueError('no luck')", settings="batch = true\n[warmup]\nruns = 0\n")
    with kit.serving():
        kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
        with pytest.raises(RunFailed, match=r"^step b: .*no luck"):
            kit.ask().result(WAIT_S)
        assert kit.core.dispatcher.is_idle()
        stats = kit.core.metrics.snapshot()["models"]
        assert stats["whole"]["refused"] == {"run_failed": 1}
        assert stats["whole"]["steps"]["a"]["requests"] == 1
        assert stats["plus3"]["requests"] == 0


def test_a_step_that_does_not_fit_is_named(kit: Kit) -> None:
    text = '[[step]]\nname = "odd"\nmodel = "plus1"\ninputs = {x = "input.x"}\n[output]\ny = "odd.y"\n'
    kit.pipeline(text, {"x": ("FP32", (-1, 3))}, {"y": ("FP32", (-1, 3))})
    with pytest.raises(TensorMismatch, match=r"^step odd: "):
        kit.runtime.infer("whole", {"x": np.zeros((1, 3), np.float32)})


MAPPED = """
[[step]]
name = "each"
model = "plus1"
map = "input.x"
inputs = {x = "input.x"}
[output]
y = "each.y"
"""


def test_a_map_joins_the_answers_of_all_items(kit: Kit) -> None:
    text = (
        '[[step]]\nname = "each"\nmodel = "plus1"\nmap = "input.x"\ninputs = {x = "input.x"}\n[output]\ny = "each.y"\n'
    )
    kit.pipeline(text, {"x": FLOATS}, {"y": FLOATS}, batches=False)
    for count in (0, 1, 7, 100):
        items = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
        got = kit.runtime.infer("whole", {"x": items})["y"]
        assert got.shape == (count, 2)
        assert (got == items + 1).all()


@pytest.mark.parametrize("count", [0, 1, 80])
def test_a_map_over_a_model_that_does_not_batch_asks_for_each_item(tmp_path: Path, count: int) -> None:
    kit = Kit(tmp_path)
    kit.python("one", "return {'y': inputs['x'] * 2}", inputs=[("x", "FP32", [1, 2])], outputs=[("y", "FP32", [1, 2])],
               settings="")  # fmt: skip
    with kit.serving():
        kit.pipeline(MAPPED.replace("plus1", "one"), {"x": FLOATS}, {"y": FLOATS}, batches=False)
        items = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
        got = kit.runtime.infer("whole", {"x": items})["y"]
        assert got.shape == (count, 2)
        assert (got == items * 2).all()


def test_a_map_of_too_many_items_fails_before_it_asks(kit: Kit) -> None:
    text = (
        '[[step]]\nname = "each"\nmodel = "plus1"\nmap = "input.x"\ninputs = {x = "input.x"}\n[output]\ny = "each.y"\n'
    )
    kit.pipeline(text, {"x": FLOATS}, {"y": FLOATS}, batches=False)
    with pytest.raises(RunFailed, match=r"step each: map: input.x has 1000000 items, at most 16384"):
        kit.runtime.infer("whole", {"x": np.zeros((1_000_000, 2), np.float32)})


def test_each_box_is_cut_out_of_the_picture(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    body = "p = inputs['picture']\nreturn {'size': np.array([[p.shape[1], p.shape[2], p.sum()]], np.int64)}"
    kit.python("size", body, inputs=[("picture", "UINT8", [1, -1, -1, 3])], outputs=[("size", "INT64", [1, 3])],
               settings="[warmup]\nruns = 0\n")  # fmt: skip
    with kit.serving():
        text = """
[[step]]
name = "crop"
model = "size"
crop = {picture = "input.image", box = "input.boxes"}
inputs = {picture = "input.boxes"}
[output]
sizes = "crop.size"
"""
        inputs = {"image": ("UINT8", (1, -1, -1, 3)), "boxes": ("FP32", (-1, -1, -1))}
        kit.pipeline(text, inputs, {"sizes": ("INT64", (-1, 3))}, batches=False)
        image = np.zeros((1, 40, 60, 3), np.uint8)
        image[0, 10:20, 30:50] = 1
        boxes = np.array([[[0, 0.9, 30, 10, 50, 20], [1, 0.5, -5, -5, 7.2, 400], [-1, 0, 0, 0, 0, 0]]], np.float32)
        got = kit.runtime.infer("whole", {"image": image, "boxes": boxes})["sizes"]
        assert got.tolist() == [[10, 20, 600], [40, 8, 0]]


def test_large_tensors_go_from_host_to_host_whole_and_their_memory_is_used_again(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    large = [("x", "FP32", [1, 150_000])], [("y", "FP32", [1, 150_000])]
    for index in (1, 2, 3):
        kit.python(f"plus{index}", f"return {{'y': inputs['x'] + {index}}}", inputs=large[0], outputs=large[1],
                   settings="")  # fmt: skip
    with kit.serving():
        shape = ("FP32", (1, 150_000))
        kit.pipeline(THREE, {"x": shape}, {"y": shape}, batches=False)
        given = [np.full((1, 150_000), value, np.float32) for value in range(16)]
        asked = [kit.runtime.submit("whole", {"x": each}) for each in given]
        for each, future in zip(given, asked, strict=True):
            assert (future.result(WAIT_S)["y"] == each + 6).all()
        del future, asked
        for each in given:
            assert (kit.runtime.infer("whole", {"x": each})["y"] == each + 6).all()
        first, second = (kit.core.table.live_of(f"plus{index}")[0].layouts.narrow for index in (1, 2))
        assert first.hands_over
        assert second.hands_over
        assert 1 <= kit.core.regions.snapshot()["regions"] <= 16


def test_boxes_are_cut_out_of_a_picture_that_another_host_decoded(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    picture = ("picture", "UINT8", [1, -1, -1, 3])
    body = "p = np.zeros((1, 200, 300, 3), np.uint8)\np[0, 20:30, 30:50] = inputs['x'][0, 0]\nreturn {'picture': p}"
    kit.python("decode", body, inputs=[("x", "FP32", [1, 2])], outputs=[picture], settings="")
    body = "p = inputs['picture']\nreturn {'size': np.array([[p.shape[1], p.shape[2], p.sum()]], np.int64)}"
    kit.python("size", body, inputs=[picture], outputs=[("size", "INT64", [1, 3])], settings="[warmup]\nruns = 0\n")
    with kit.serving():
        text = """
[[step]]
name = "decode"
model = "decode"
inputs = {x = "input.x"}
[[step]]
name = "crop"
model = "size"
crop = {picture = "decode.picture", box = "input.boxes"}
inputs = {picture = "input.boxes"}
[output]
sizes = "crop.size"
"""
        inputs = {"x": ("FP32", (1, 2)), "boxes": ("FP32", (-1, 4))}
        kit.pipeline(text, inputs, {"sizes": ("INT64", (-1, 3))}, batches=False)
        boxes = np.array([[30, 20, 50, 30], [0, 0, 300, 200], [40, 25, 60, 40]], np.float32)
        given = {"x": np.full((1, 2), 2, np.float32), "boxes": boxes}
        for _ in range(3):
            got = kit.runtime.infer("whole", given)["sizes"]
            assert got.tolist() == [[10, 20, 1200], [200, 300, 1200], [15, 20, 5 * 10 * 3 * 2]]


SLOW = """
[[step]]
name = "wait"
model = "slow"
inputs = {x = "input.x"}
[[step]]
name = "then"
model = "plus1"
inputs = {x = "wait.y"}
[output]
y = "then.y"
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Kit, Path]]:
    """A pipeline whose first step runs until a file is there."""
    kit, go = Kit(tmp_path), tmp_path / "go"
    kit.python("slow", f"while not Path({str(go)!r}).exists(): time.sleep(0.002)\nreturn {{'y': inputs['x']}}",
               settings="[warmup]\nruns = 0\n")  # fmt: skip
    kit.add("plus1", 1.0)
    with kit.serving():
        kit.pipeline(SLOW, {"x": FLOATS}, {"y": FLOATS})
        try:
            yield kit, go
        finally:
            go.touch()


def until(told: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S * 500)):
        if told():
            return
        done.wait(0.002)
    raise AssertionError("it did not happen")


def test_cancel_ends_a_chain_at_once_though_a_step_runs(slow: tuple[Kit, Path]) -> None:
    kit, go = slow
    asked = [kit.ask(float(index)) for index in range(8)]
    until(lambda: not kit.core.dispatcher.is_idle())
    assert all(each.cancel() for each in asked)
    assert all(each.cancelled() for each in asked)
    assert not any(each.cancel() for each in asked)
    go.touch()
    assert kit.value(kit.ask(1.0)) == 2.0
    stats = kit.core.metrics.snapshot()["models"]
    assert stats["whole"]["refused"] == {"cancelled": 8}
    assert stats["plus1"]["requests"] == 1


def test_a_sender_that_is_gone_takes_its_chains_with_it(slow: tuple[Kit, Path]) -> None:
    kit, go = slow
    asked = [kit.ask(float(index)) for index in range(8)]
    kit.core.infer.drop("in process")
    assert all(each.cancelled() for each in asked)
    go.touch()
    assert kit.value(kit.ask(1.0)) == 2.0
    assert kit.core.metrics.snapshot()["models"]["whole"]["requests"] == 9


def test_a_deadline_ends_the_chain_while_its_step_runs(slow: tuple[Kit, Path]) -> None:
    kit, _ = slow
    with pytest.raises(Exception, match=r"step wait: Request timeout expired"):
        kit.ask(1.0, timeout_ms=500.0).result(WAIT_S)


def test_closing_answers_what_is_under_way(slow: tuple[Kit, Path]) -> None:
    kit, go = slow
    asked = [kit.ask(float(index)) for index in range(8)]
    servable = kit.core.table.withdraw("whole", 1, kit.core.table.status("whole", 1).state)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(servable.close(WAIT_S)))
    closing.start()
    until(lambda: not servable.scheduled.is_open)
    go.touch()
    closing.join()
    assert closed == [True]
    assert [kit.value(each) for each in asked] == [index + 1.0 for index in range(8)]


def test_closing_refuses_what_is_under_way_for_too_long(slow: tuple[Kit, Path]) -> None:
    kit, _ = slow
    asked = [kit.ask(float(index)) for index in range(8)]
    servable = kit.core.table.withdraw("whole", 1, kit.core.table.status("whole", 1).state)
    assert not servable.close(0.01)
    for each in asked:
        with pytest.raises(Draining):
            each.result(WAIT_S)
    assert not servable.scheduled.running


def test_a_deadline_that_all_steps_together_cannot_make_is_refused_before_any_runs(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    for index in (1, 2, 3):
        kit.add(f"plus{index}", float(index), 'mode = "workers"\n')
    with kit.serving():
        for index in (1, 2, 3):
            (servable,) = kit.core.table.live_of(f"plus{index}")
            for _ in range(100):
                servable.scheduled.layout.run_times.observe(1, 0.1)
        kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
        with pytest.raises(DeadlineUnmeetable, match="for all steps"):
            kit.ask(1.0, timeout_ms=250.0).result(WAIT_S)
        assert kit.core.metrics.snapshot()["models"]["plus1"]["requests"] == 0
        assert kit.value(kit.ask(1.0, timeout_ms=60_000.0)) == 7.0


def test_a_step_may_be_swapped_while_chains_run(kit: Kit) -> None:
    kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
    is_over = threading.Event()
    answers: list[float] = []
    failures: list[EdgeRuntimeError] = []

    def ask() -> None:
        while not is_over.is_set():
            try:
                answers.append(kit.value(kit.ask(1.0)))
            except EdgeRuntimeError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        kit.runtime.load(f"plus{turn % 3 + 1}")
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(answers) == {7.0}


def test_a_step_that_is_gone_is_named(kit: Kit) -> None:
    kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS})
    kit.core.table.withdraw("plus3", 1, VersionState.FAILED, "its host ended").close(5.0)
    with pytest.raises(Exception, match=r"step c: .*plus3"):
        kit.ask(1.0).result(WAIT_S)


def test_an_inline_chain_gives_what_its_steps_give_and_follows_a_swap(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    for index in (1, 2, 3):
        kit.add(f"plus{index}", float(index), 'mode = "inline"\nisolation = "never"\n')
    with kit.serving():
        servable = kit.pipeline(THREE, {"x": FLOATS}, {"y": FLOATS}, is_inline=True)
        assert servable.inline is not None
        rows = np.arange(8, dtype=np.float32).reshape(4, 2)

        def run() -> np.ndarray:
            servable.inline.run_single([rows.tobytes()], 4)
            return servable.inline.bound.outputs[0][:4].copy()

        assert (run() == rows + 6).all()
        kit.runtime.load("plus2")
        assert (run() == rows + 6).all()
        assert kit.core.metrics.snapshot()["models"]["whole"]["steps"]["b"]["requests"] == 2
        (kit.models / "plus2" / "model.toml").write_text('mode = "workers"\n')
        kit.runtime.load("plus2")
        with pytest.raises(Draining):
            run()
        assert kit.value(kit.ask(1.0)) == 7.0


def test_a_cancelled_chain_calls_its_reply_once_whatever_comes_after(slow: tuple[Kit, Path]) -> None:
    kit, go = slow
    future = kit.ask(1.0)
    assert future.cancel()
    go.touch()
    assert future.cancelled()
    until(kit.core.dispatcher.is_idle)
    assert kit.core.metrics.snapshot()["models"]["whole"]["refused"] == {"cancelled": 1}
