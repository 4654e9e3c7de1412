"""Made-up inputs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.models.warmup import FirstRuns, make_inputs, time_steps, warm_up
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.pictures.pictures import open_picture
from edge_runtime.steps import Form, ModelSteps
from edge_runtime.tensors import DATATYPES


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("shape", [(), (DYNAMIC,), (DYNAMIC, 3)])
def test_every_made_up_input_is_an_array_of_the_right_type_and_shape(datatype: str, shape: tuple[int, ...]) -> None:
    spec = ModelSpec((TensorSpec("x", datatype, shape),), ())
    made = make_inputs(spec, 2, 1, {})["x"]
    assert isinstance(made, np.ndarray)
    assert made.dtype == DATATYPES[datatype].dtype
    assert made.shape == tuple(2 if size == DYNAMIC else size for size in shape)


def test_inputs_too_large_to_be_made_up_are_refused_before_they_take_memory() -> None:
    spec = ModelSpec((TensorSpec("x", "FP32", (DYNAMIC,) * 5),), ())
    tracemalloc.start()
    try:
        with pytest.raises(LoadFailed, match=r"10,070,523,904 bytes of made-up inputs are over the bound"):
            make_inputs(spec, 1, 224, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(DYNAMIC,) * 5, (1, 1 << 20, 1 << 20)], ids=["of open axes", "said by the model"])
def test_a_model_of_such_inputs_is_served_without_a_warm_up(clock, shape) -> None:
    refuses = RunFailed("too short")
    form = AskedForm(clock, "FP32", shape, refuses)
    first = warm_up(form, ModelSettings())
    assert (first.times, first.batches) == ({}, False)


class AskedForm:
    """A form of a model with two inputs: it takes a while and keeps what it was asked with."""

    def __init__(self, clock, datatype: str, shape: tuple[int, ...], error: Exception | None = None) -> None:
        self.spec = ModelSpec((TensorSpec("image", datatype, shape), TensorSpec("scale", "FP32", (DYNAMIC, 2))), ())
        self.asked: list = []
        self._clock, self._error = clock, error

    def run(self, inputs, outputs=None):
        if self._error is not None:
            raise self._error
        self.asked.append(inputs)
        self._clock.append(self._clock[-1] + 0.05)
        return []


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: times[-1])
    return times


STEPS = ModelSteps({"image": PictureSteps(range="0..1")})
PICTURE, FRAMES = Form("picture", answers=True), Form("frames", answers=True)


def test_steps_are_run_with_a_picture_and_a_frame_as_cameras_send_them_and_their_time_is_added_to_each_row(clock):
    forms = {
        PICTURE: AskedForm(clock, "BYTES", (DYNAMIC,)),
        FRAMES: AskedForm(clock, "UINT8", (DYNAMIC,) * 4),
        Form("picture", answers=False): AskedForm(clock, "BYTES", (DYNAMIC,)),
    }
    times = time_steps(forms, STEPS, ModelSettings(), FirstRuns(True, {1: 0.01, 2: 0.015}))
    assert {given: {rows: round(run_s, 6) for rows, run_s in each.items()} for given, each in times.items()} == {
        "picture": {1: 0.05, 2: 0.095},
        "frames": {1: 0.05, 2: 0.095},
    }
    sent = forms[PICTURE].asked[-1]
    assert open_picture(sent["image"][0], "rgb").shape == (480, 640, 3)
    assert sent["scale"].shape == (1, 2)
    assert forms[FRAMES].asked[-1]["image"].shape == (1, 480, 640, 3)
    assert not forms[Form("picture", answers=False)].asked


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((DYNAMIC,) * 3, (1, 720, 640)),
        ((DYNAMIC, DYNAMIC, DYNAMIC, 2), (1, 480, 640, 2)),
        ((4, -1, -1, 1), (4, 480, 640, 1)),
    ],
)
def test_frames_are_made_in_the_form_that_the_model_takes(clock, shape, made):
    form = AskedForm(clock, "UINT8", shape)
    time_steps({FRAMES: form}, STEPS, ModelSettings(), FirstRuns(True, {1: 0.01}))
    assert form.asked[-1]["image"].shape == made


def test_steps_that_fail_a_model_that_runs_fail_its_load(clock):
    forms = {PICTURE: AskedForm(clock, "BYTES", (DYNAMIC,), RunFailed("it has no such size"))}
    with pytest.raises(LoadFailed, match="the first run with declared steps failed: it has no such size"):
        time_steps(forms, STEPS, ModelSettings(), FirstRuns(True, {1: 0.01}))


def test_a_model_that_no_made_up_input_fits_is_served_without_a_first_picture(clock):
    forms = {PICTURE: AskedForm(clock, "BYTES", (DYNAMIC,), RunFailed("no such token"))}
    assert time_steps(forms, STEPS, ModelSettings(), FirstRuns(False, {})) == {}
