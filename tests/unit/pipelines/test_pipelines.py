"""`pipeline.toml` as values: what is read, what is refused and in which words, and what follows from it alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ConfigError
from edge_runtime.model_spec import TensorSpec
from edge_runtime.pipelines.definition import (
    INPUT,
    MAX_STEPS,
    Condition,
    Crop,
    Pipeline,
    Place,
    Step,
    critical_path,
    make_pipeline,
    may_be_skipped,
    read_condition,
    read_pipeline,
    readers,
    tensors_wanted,
)

WHOLE = """
[[step]]
name = "join"
python = "steps.py:join"
inputs = {labels = "crop.labels", boxes = "detect.boxes"}
outputs = {text = {datatype = "BYTES", shape = [-1]}}

[[step]]
name = "crop"
model = "classify"
version = 3
inputs = {image = "detect.boxes"}
when = "detect.count > 0"
map = "detect.boxes"
crop = {picture = "input.image", box = "detect.boxes"}

[[step]]
name = "detect"
model = "detect"
inputs = {image = "input.image"}

[output]
text = "join.text"
labels = "crop.labels"

[input.image]
datatype = "UINT8"
shape = [1, -1, -1, 3]
"""


def read(text: str) -> Pipeline:
    return read_pipeline(text, "pipeline.toml")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as failed:
        read(text)
    return failed.value.message


def model_step(name: str, *needs: str) -> Step:
    return Step(name, model=name, inputs={f"x{index}": Place(need, "y") for index, need in enumerate(needs)})


def test_a_whole_file_is_read_and_put_into_order() -> None:
    pipeline = read(WHOLE)
    assert [step.name for step in pipeline.steps] == ["detect", "crop", "join"]
    assert pipeline.levels == (("detect",), ("crop",), ("join",))
    assert pipeline.inputs == {"image": TensorSpec("image", "UINT8", (1, -1, -1, 3))}
    assert pipeline.outputs == {"text": Place("join", "text"), "labels": Place("crop", "labels")}
    crop, join = pipeline.step("crop"), pipeline.step("join")
    boxes = Place("detect", "boxes")
    assert (crop.model, crop.version, crop.map) == ("classify", 3, (boxes,))
    assert crop.when == Condition(Place("detect", "count"), ">", 0)
    assert crop.crop == Crop(Place(INPUT, "image"), boxes)
    assert join.python == "join"
    assert join.outputs == {"text": TensorSpec("text", "BYTES", (-1,))}
    assert pipeline.models == ("detect", "classify")


def test_a_crop_without_a_map_runs_over_its_boxes() -> None:
    assert read(WHOLE.replace('map = "detect.boxes"\n', "")).step("crop").map == (Place("detect", "boxes"),)


def test_readers_wanted_tensors_and_skippable_steps_follow_from_a_pipeline() -> None:
    pipeline = read(WHOLE)
    assert readers(pipeline) == {"input": ("detect", "crop"), "detect": ("crop", "join"), "crop": ("join",), "join": ()}
    assert tensors_wanted(pipeline) == {"detect": ("boxes", "count"), "crop": ("labels",), "join": ("text",)}
    assert may_be_skipped(pipeline) == {"crop"}
    assert pipeline.input_names == ("image",)


def test_a_model_behind_a_skipped_step_may_be_skipped_too() -> None:
    first = Step("a", model="a", inputs={"x": Place(INPUT, "x")}, when=read_condition("input.go"))
    pipeline = make_pipeline([first, model_step("b", "a")], {"y": Place("b", "y")})
    assert may_be_skipped(pipeline) == {"a", "b"}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (('name = "detect"', 'name = "input"'), "step 'input': wanted a name of 1 to 64 letters"),
        (('name = "detect"', 'name = "a.b"'), "step 'a.b': wanted a name"),
        (('name = "detect"', 'name = "crop"'), "step 'crop': 2 steps have this name"),
        (('\nlabels = "crop', '\nlabels = "corp'), "output.labels: corp.labels: there is no step 'corp'"),
        (('"input.image"}\n\n', '"image"}\n\n'), "step 'detect': inputs.image: got 'image', wanted \"input.NAME\""),
        (('model = "detect"', ""), "step 'detect': wanted exactly one of model and python"),
        (('python = "steps.py:join"', 'python = "join"'), 'wanted "steps.py:FUNCTION"'),
        (('python = "steps.py:join"', 'python = "other.py:join"'), 'wanted "steps.py:FUNCTION"'),
        (('outputs = {text = {datatype = "BYTES", shape = [-1]}}\n', ""), "a Python step says its outputs"),
        (('text = "join.text"', 'text = "join.words"'), "join.words: step 'join' has no output 'words'; it has text"),
        (("count > 0", "count >> 0"), "step 'crop': when: got 'detect.count >> 0', wanted"),
        (("count > 0", "count > many"), "when: got 'many' to compare with, wanted a number"),
        (('box = "detect.boxes"', 'box = "detect.other"'), "crop.box is detect.other, which is not among map"),
        (('map = "detect.boxes"', 'map = "detect.rows"'), "map: no input reads detect.rows"),
        (("version = 3", "version = 0"), "version: got 0, wanted an integer, 1 or more"),
        (("version = 3", "verson = 3"), "unknown key 'verson'; did you mean 'version'?"),
        (('"UINT8"', '"UINT9"'), "input.image.datatype: got 'UINT9'"),
        (("[input.image]", "[input.picture]"), "input.picture: no step reads it"),
    ],
)  # fmt: skip
def test_a_fault_is_named(change: tuple[str, str], wanted: str) -> None:
    assert change[0] in WHOLE
    assert wanted in refused(WHOLE.replace(*change))


def test_every_fault_is_named_at_once() -> None:
    said = refused(WHOLE.replace("count > 0", "count >").replace('python = "steps.py:join"', 'python = "join"'))
    assert len(said.splitlines()) == 2
    assert all(line.startswith("pipeline.toml: step ") for line in said.splitlines())


def test_a_circle_is_named_step_by_step() -> None:
    steps = [model_step("a", "input"), model_step("b", "a", "d"), model_step("c", "b"), model_step("d", "c")]
    with pytest.raises(ConfigError, match="form a circle: b → d → c → b; each needs the one after it"):
        make_pipeline(steps, {"y": Place("d", "y")})


def test_a_step_that_reads_itself_is_a_circle() -> None:
    with pytest.raises(ConfigError, match="a → a"):
        make_pipeline([model_step("a", "a")], {"y": Place("a", "y")})


def test_too_many_steps_are_refused() -> None:
    steps = [model_step(f"s{index}", "input") for index in range(MAX_STEPS + 1)]
    with pytest.raises(ConfigError, match=f"got {MAX_STEPS + 1}, at most {MAX_STEPS} are run"):
        make_pipeline(steps, {"y": Place("s0", "y")})


@pytest.mark.parametrize(
    ("text", "array", "holds"),
    [
        ("d.count > 0", np.array([0, 1]), True),
        ("d.count > 0", np.array([0, 0]), False),
        ("d.count>=2", np.array(2), True),
        ("d.count != 1.5e0", np.array([1.5], np.float32), False),
        ("d.count", np.array([0.0, -1.0]), True),
        ("d.count", np.array([], np.float32), False),
        ("d.is_on == true", np.array([True]), True),
        ("d.is_on == false", np.array([True]), False),
        ("d.word == 'cat'", np.array([b"dog", b"cat"], object), True),
        ("d.word == 'cat'", np.array(["dog"], object), False),
        ("d.word", np.array([b""], object), False),
        ("d.word > 3", np.array([b"a"], object), False),
        ("d.count == 'cat'", np.array([1]), False),
        ("d.StatefulCall:0 < -1", np.array([-2]), True),
    ],
)
def test_a_condition_compares_each_element(text: str, array: np.ndarray, holds: bool) -> None:
    assert read_condition(text).holds(array) is holds


def test_the_critical_path_waits_for_the_slowest_branch_and_for_queues() -> None:
    steps = [model_step("a", "input"), model_step("b", "a"), model_step("c", "a"), model_step("d", "b", "c")]
    pipeline = make_pipeline(steps, {"y": Place("d", "y")})
    run_s = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 1.0}
    assert critical_path(pipeline, run_s) == (7.0, ("a", "c", "d"))
    assert critical_path(pipeline, run_s, {"b": 9.0}) == (12.0, ("b", "d"))


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    """Steps that need any others: with and without circles."""
    names = [f"s{index}" for index in range(draw(st.integers(1, 8)))]
    needs = st.lists(st.sampled_from([INPUT, *names]), min_size=1, max_size=3, unique=True)
    return [model_step(name, *draw(needs)) for name in names]


def has_circle(steps: list[Step]) -> bool:
    """Whether a step needs itself by any way: the closure of the relation, which the order is not made by."""
    reach = {step.name: set(step.needs) for step in steps}
    for _ in steps:
        reach = {name: found.union(*(reach[each] for each in found)) for name, found in reach.items()}
    return any(name in found for name, found in reach.items())


@given(graphs())
def test_steps_are_ordered_or_a_true_circle_is_named(steps: list[Step]) -> None:
    by_name = {step.name: step for step in steps}
    try:
        pipeline = make_pipeline(steps, {"y": Place(steps[0].name, "y")})
    except ConfigError as error:
        assert has_circle(steps)
        named = error.message.split("circle: ")[1].split(";")[0].split(" → ")
        assert named[0] == named[-1]
        assert len(named) > 1
        assert all(after in by_name[before].needs for before, after in itertools.pairwise(named))
        return
    assert not has_circle(steps)
    done: set[str] = set()
    for level in pipeline.levels:
        assert all(set(pipeline.step(name).needs) <= done for name in level)
        assert all(pipeline.step(name).needs or not done for name in level)
        done |= set(level)
    assert done == set(by_name)
    assert [step.name for step in pipeline.steps] == [n for lv in pipeline.levels for n in lv]


@given(graphs(), st.data())
def test_the_critical_path_is_the_longest_of_all_ways(steps: list[Step], data: st.DataObject) -> None:
    if has_circle(steps):
        return
    pipeline = make_pipeline(steps, {"y": Place(steps[0].name, "y")})
    run_s = {step.name: float(data.draw(st.integers(0, 9))) for step in steps}

    def longest(name: str) -> float:
        return run_s[name] + max((longest(need) for need in pipeline.step(name).needs), default=0.0)

    found = critical_path(pipeline, run_s)
    assert found.seconds == max(longest(step.name) for step in steps)
    assert sum(run_s[name] for name in found.steps) == found.seconds
    assert all(a in pipeline.step(b).needs for a, b in zip(found.steps, found.steps[1:], strict=False))


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_is_refused_in_words(text: str) -> None:
    try:
        condition = read_condition(text)
    except ValueError as error:
        said = str(error)
    else:
        said = "wanted"
    assert "wanted" in said
    if said != "wanted":
        return
    assert read_condition(str(condition)) == condition or "'" in text or '"' in text
    assert condition.holds(np.zeros(2)) in (True, False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["a", "input.x", "a.y", "steps.py:f", ""]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "step",
                        "output",
                        "input",
                        "name",
                        "model",
                        "python",
                        "inputs",
                        "when",
                        "map",
                        "crop",
                        "outputs",
                        "x",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_any_toml_is_a_pipeline_or_is_refused_in_words(value: object) -> None:
    said = "pipeline.toml"
    try:
        read(_toml(value))
    except ConfigError as error:
        said = error.message
    assert said.startswith("pipeline.toml")


def _toml(value: object) -> str:
    """A value as the body of a document, tables inline."""
    if not isinstance(value, dict):
        return f"step = {_inline(value)}"
    return "\n".join(f"{name} = {_inline(each)}" for name, each in value.items())


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_inline(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f'"{value or ""}"'
