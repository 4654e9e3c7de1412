"""Which releases a device takes: the rule of percent, and the reasons against one."""

from __future__ import annotations

import dataclasses
import re
from pydoc import locate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backends.registry import declaration_of, known_backends
from edge_runtime.errors import UpdateError
from edge_runtime.models.names import suffix_of
from edge_runtime.updates import release_checks
from edge_runtime.updates.manifest import Artifact, Assignment, Golden, Manifest, StepModel
from edge_runtime.updates.release_checks import (
    DeviceTraits,
    KnownReleases,
    check_served,
    choose_offers,
    share,
    takes_part,
    version_numbers,
    why_not_fit,
    why_not_offered,
)
from edge_runtime.updates.release_paths import LONGEST_LEAP
from edge_runtime.updates.states import Release

DEVICE = DeviceTraits("cam-7", "x86-avx2", (0, 3), frozenset({".onnx"}), 1 << 30)


def sha(number: int) -> str:
    return f"{number:064x}"


def assignment(counter: int = 1, percent: float = 100.0, model: str = "digits", team: str = "vision") -> Assignment:
    return Assignment(model, f"team/{team}/{model}/{counter}/manifest.json", sha(counter), percent)


def manifest(**changes: object) -> Manifest:
    folder = "team/vision/digits/4"
    whole = Manifest(
        model="digits",
        version=4,
        release_counter=4,
        min_runtime="0.1",
        inputs=(),
        outputs=(),
        artifacts=(Artifact(f"{folder}/model.onnx", sha(1), 10, "onnxruntime"),),
        golden=Golden(f"{folder}/golden.bin", sha(2), 0, "f32", (), (), (), {}),
        peak_memory_bytes=1 << 20,
    )
    return msgspec.structs.replace(whole, **changes)


@given(st.text(min_size=1, max_size=64), st.integers(0, 1 << 200), st.floats(0, 100), st.floats(0, 100))
def test_raising_the_percentage_only_adds_devices(device_id: str, number: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    has_low = takes_part(device_id, Assignment("m", "", sha(number), low))
    has_high = takes_part(device_id, Assignment("m", "", sha(number), high))
    assert has_high or not has_low


def test_all_devices_take_part_at_a_hundred_percent_and_about_a_tenth_at_ten() -> None:
    devices = [f"cam-{number}" for number in range(5000)]
    assert all(takes_part(each, assignment(percent=100.0)) for each in devices)
    tenth = sum(takes_part(each, assignment(percent=10.0)) for each in devices)
    assert 400 < tenth < 600


def test_not_the_same_devices_go_first_each_time() -> None:
    devices = [f"cam-{number}" for number in range(2000)]
    first, second = ({each for each in devices if takes_part(each, assignment(counter, 10.0))} for counter in (1, 2))
    assert len(first & second) < len(first) / 2


def test_the_share_of_a_device_is_a_promise_and_never_changes() -> None:
    """Another value here would let devices of different versions of this runtime disagree on who is a canary."""
    assert share("cam-7", sha(1)) == pytest.approx(99.11598, abs=1e-4)


def test_of_several_releases_the_one_with_the_highest_counter_that_includes_the_device_is_meant() -> None:
    found = choose_offers(
        [assignment(3), assignment(5, percent=1e-9), assignment(4), assignment(1, model="other")], "cam-7"
    )
    assert {model: each.release.counter for model, each in found.items()} == {"digits": 4, "other": 1}


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (KnownReleases({}, {}, {}), None),
        (KnownReleases({"digits": 4}, {"digits": Release("digits", 1, 4, sha(4))}, {}), ""),
        (KnownReleases({"digits": 4}, {}, {}), None),
        (KnownReleases({"digits": 5}, {}, {}), "older than 5"),
        (KnownReleases({"digits": 4}, {}, {sha(4): "too slow"}), "refused here before: too slow"),
    ],
)
def test_a_release_is_passed_over_for_a_reason(memory: KnownReleases, reason: str | None) -> None:
    found = why_not_offered(assignment(4), memory)
    assert found == reason if not reason else reason in str(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"profiles": ("x86-avx2", "rpi5")}, None),
        ({"profiles": ("jetson-orin",)}, "is for jetson-orin; this device's profile is x86-avx2"),
        ({"min_runtime": "0.3.1"}, "needs edge-runtime 0.3.1"),
        ({"min_runtime": "0.3.0"}, None),
        ({"peak_memory_bytes": 1 << 40}, "bytes of memory"),
        (
            {"artifacts": (Artifact("team/vision/digits/4/model.xml", sha(1), 1, "openvino"),)},
            "has model.xml; backends here load .onnx",
        ),
        (
            {"artifacts": (Artifact("team/vision/digits/4/openvino_model.xml", sha(1), 1, "openvino-genai"),)},
            "has openvino_model.xml; backends here load .onnx",
        ),
        ({"artifacts": (Artifact("team/vision/digits/4/model.py", sha(1), 1, "onnxruntime"),)}, "never brings code"),
    ],
)
def test_a_release_fits_the_device_or_says_why_not(changes: dict[str, object], reason: str | None) -> None:
    found = why_not_fit(manifest(**changes), DEVICE)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1.2.3", (1, 2, 3)), ("1.2.0", (1, 2)), ("2", (2,)), ("1.2rc1", (1, 2)), ("", ()), ("x.1", ()), ("0.0", ())],
)
def test_versions_compare_by_their_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


def test_a_counter_that_leaps_is_passed_over_so_that_there_is_always_one_after_a_thiefs() -> None:
    for highest in (0, 5, LONGEST_LEAP):
        memory = KnownReleases({"digits": highest}, {}, {})
        assert why_not_offered(assignment(highest + LONGEST_LEAP), memory) is None
        reason = why_not_offered(assignment((1 << 63) - 1), memory)
        assert reason is not None
        assert f"leaps from {highest}" in reason


CHAIN = """
[[step]]
name = "boxes"
model = "detect"
inputs = {x = "input.x"}
[[step]]
name = "text"
model = "read"
inputs = {x = "boxes.y"}
[output]
y = "text.y"
"""

PYTHON_STEP = """
[[step]]
name = "join"
python = "steps.py:join"
inputs = {x = "text.y"}
outputs = {y = {datatype = "FP32", shape = [-1, 2]}}
"""


def pipeline_manifest(**changes: object) -> Manifest:
    folder = "team/vision/digits/4"
    artifacts = tuple(
        Artifact(f"{folder}/{model}--model.onnx.step", sha(1), 10, "onnxruntime", "", model)
        for model in ("detect", "read")
    )
    models = (StepModel("detect"), StepModel("read"))
    return manifest(**{"artifacts": artifacts, "models": models, "pipeline": CHAIN, **changes})


def test_a_language_model_fits_a_device_alone_that_loads_its_files_together() -> None:
    files = ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin")
    words = manifest(
        artifacts=tuple(Artifact(f"team/vision/digits/4/{name}", sha(1), 1, "openvino-genai") for name in files)
    )
    assert "backends here load" in (
        why_not_fit(words, dataclasses.replace(DEVICE, suffixes=frozenset((".xml",)))) or ""
    )
    assert why_not_fit(words, dataclasses.replace(DEVICE, suffixes=frozenset((".xml", "openvino_model.xml")))) is None


def test_a_pipeline_fits_a_device_whose_backends_load_each_of_its_models() -> None:
    whole = pipeline_manifest()
    assert why_not_fit(whole, DEVICE) is None
    other = Artifact("team/vision/digits/4/read--model.tflite.step", sha(1), 10, "litert", "", "read")
    lacking = msgspec.structs.replace(whole, artifacts=(whole.artifacts[0], other))
    assert "backends here load .onnx" in (why_not_fit(lacking, DEVICE) or "")


def test_a_pipeline_with_a_python_step_is_passed_over_and_never_served() -> None:
    with_code = pipeline_manifest(pipeline=CHAIN + PYTHON_STEP)
    assert "carries the Python step join; an update never brings code" in (why_not_fit(with_code, DEVICE) or "")
    with pytest.raises(UpdateError, match="has the Python step join, and an update never brings code"):
        check_served(with_code, "here")


def test_a_pipeline_that_brings_code_as_a_file_of_a_model_is_passed_over_and_never_served() -> None:
    code = Artifact("team/vision/digits/4/read--model.py.step", sha(1), 10, "python", "", "read")
    with_code = pipeline_manifest(artifacts=(*pipeline_manifest().artifacts, code))
    assert "carries models/read/model.py" in (why_not_fit(with_code, DEVICE) or "")
    with pytest.raises(UpdateError, match=r"models/read/model\.py, which is code"):
        check_served(with_code, "here")


def test_a_device_that_knows_no_releases_of_pipelines_passes_one_over_with_the_reason() -> None:
    """It ignores the keys that it does not know, and finds files that no backend loads."""
    suffixes = frozenset(suffix_of(name) for each in known_backends() for name in declaration_of(each).artifacts)
    every = dataclasses.replace(DEVICE, suffixes=suffixes)
    as_it_reads = msgspec.structs.replace(
        pipeline_manifest(),
        pipeline="",
        models=(),
        artifacts=tuple(msgspec.structs.replace(each, model="") for each in pipeline_manifest().artifacts),
    )
    assert "has detect--model.onnx.step, read--model.onnx.step; backends here load" in (
        why_not_fit(as_it_reads, every) or ""
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"models": (StepModel("detect"), StepModel("other"))}, "asks detect, read; it brings detect, other"),
        ({"pipeline": "step = 1"}, "pipeline.toml: step"),
        ({"models": (StepModel("detect", {"device": "CUDA"}), StepModel("read"))}, "device is not published"),
    ],
)
def test_a_signed_pipeline_that_makes_no_sense_is_not_served(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UpdateError, match=reason):
        check_served(pipeline_manifest(**changes), "here")


def test_the_list_of_checks_names_what_makes_each_of_them() -> None:
    rows = [line.split("|")[2] for line in (release_checks.__doc__ or "").splitlines() if line.startswith("| ")]
    names = [name for row in rows[1:] for name in re.findall(r"`([\w.]+)`", row)]
    assert len(names) >= len(rows) - 1 > 10
    homes = ("edge_runtime.updates.release_checks", "edge_runtime.updates", "edge_runtime.pipelines", "edge_runtime")
    assert [name for name in names if not any(locate(f"{home}.{name}") for home in homes)] == []


def test_an_older_release_is_taken_where_its_group_goes_back_and_it_ran_here_before() -> None:
    back = msgspec.structs.replace(assignment(4), going_back_from=6)
    ran = KnownReleases({"digits": 6}, {}, {}, {sha(4)})
    assert why_not_offered(back, ran) is None
    for memory, reason in (
        (KnownReleases({"digits": 6}, {}, {}, {sha(5)}), "it was never kept here"),
        (KnownReleases({"digits": 7}, {}, {}, {sha(4)}), "its group goes back from 6 only"),
        (KnownReleases({"digits": 6}, {}, {sha(4): "too slow"}, {sha(4)}), "refused here before"),
    ):
        assert reason in str(why_not_offered(back, memory))
    assert "publish it under a new counter" in str(why_not_offered(assignment(4), ran))
