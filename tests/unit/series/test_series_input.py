"""Windows of a series as a model's rows: cut, brought to a level, laid out, and the same whether frames are shared."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.errors import ConfigError, LoadFailed
from edge_runtime.kept_state import row_type
from edge_runtime.model_spec import KeptSequences, ModelSpec, TensorSpec
from edge_runtime.series.features import Features
from edge_runtime.series.series_input import SeriesInput
from edge_runtime.series.series_steps import SeriesSteps
from edge_runtime.steps import OutputSteps
from edge_runtime.typed_toml import build

SAMPLES = np.random.default_rng(3).uniform(-1, 1, 20_000).astype(np.float32) + np.float32(0.25)


def rows(steps: SeriesSteps, shape: tuple[int, ...], datatype: str = "FP32") -> np.ndarray:
    spec = TensorSpec("x", datatype, shape)
    tensors, places = SeriesInput(spec, steps, ModelSpec((spec,), ())).tensors("samples", SAMPLES[None])
    assert [each[:2] for each in places] == [(len(tensors["x"]), 0)]
    return tensors["x"]


def test_windows_are_cut_each_hop_and_the_rest_is_left():
    found = rows(SeriesSteps(window=6000, hop=4000), (-1, 6000))
    np.testing.assert_array_equal(found, [SAMPLES[at : at + 6000] for at in range(0, 14_001, 4000)])


def smoothed(*best: int, steps: SeriesSteps | None = None, cuts: tuple[int, ...] = ()) -> list[int]:
    """The class of each window, -1 for none, of windows whose own best are these; in chunks that end at `cuts`."""
    spec, scores = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 3))
    model = ModelSpec((spec,), (scores,), sequences=KeptSequences(2, has_states=False))
    declared = steps or SeriesSteps(window=4, steady=(2, 3))
    reader = SeriesInput(spec, declared, model, {"y": OutputSteps()})
    assert reader.keeps is not None
    found: list[int] = []
    ends = (*cuts, len(best))
    for step, (begin, end) in enumerate(zip((0, *cuts), ends, strict=True)):
        row = np.zeros(1, row_type())
        row["serial"], row["steps"] = 1, step
        chunk = np.zeros((1, 4 * (end - begin)), np.float32)
        _, places = reader.keeps.continued("samples", chunk, row.view(np.uint8).reshape(1, -1))
        classes = np.array([[(each, 0.9), (-1, 0)] for each in best[begin:end]], np.float32).reshape(-1, 2, 2)
        (told,) = reader.by_row([classes], places)
        found += told[0, :, 0, 0].astype(int).tolist()
    return found


def test_classes_of_windows_are_those_that_windows_agree_on_where_they_are_to():
    assert smoothed(0, 0, 1, 0, 1, 1, 2) == [-1, 0, 0, 0, 1, 1, 1]
    assert smoothed(0, 1, steps=SeriesSteps(window=4)) == [0, 1]


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4, 5, 6)])
def test_windows_agree_with_those_of_the_chunks_before(cuts):
    assert smoothed(0, 0, 1, 0, 1, 1, 2, cuts=cuts) == [-1, 0, 0, 0, 1, 1, 1]


def test_steady_takes_classes():
    spec, number = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 1))
    with pytest.raises(LoadFailed, match="steady is of classes"):
        SeriesInput(
            spec, SeriesSteps(window=4, steady=(2, 3)), ModelSpec((spec,), (number,)), {"y": OutputSteps("number")}
        )


def test_half_of_the_last_windows_agree_on_nothing():
    with pytest.raises(ConfigError, match="wanted more than half"):
        build(SeriesSteps, {"rate": 1000, "steady": [1, 2]}, "model.toml")


@pytest.mark.parametrize(
    ("normalise", "wanted"),
    [
        ("mean", lambda window: window - window.mean()),
        ("peak", lambda window: window / np.abs(window).max()),
        ("zscore", lambda window: (window - window.mean()) / window.std()),
    ],
)
def test_each_window_is_brought_to_a_level_by_itself(normalise, wanted):
    found = rows(SeriesSteps(window=8000, scale=100, normalise=normalise), (-1, 8000))
    exact = [wanted(SAMPLES[at : at + 8000].astype(np.float64) * 100) for at in (0, 8000)]
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hop", [1600, 1601, 8000])
def test_windows_that_share_frames_are_those_made_one_by_one(hop):
    steps = SeriesSteps(window=8000, hop=hop, features="log-mel")
    made = Features(steps)
    wanted = [made.frames(SAMPLES[at : at + 8000]) for at in range(0, 12_001, hop)]
    np.testing.assert_allclose(rows(steps, (-1, 48, 40)), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((-1, 40, 48), (0, 2, 1)), ((-1, 1, 48, 40), None), ((-1, 48, 40, 1), None), ((-1, 1920), None)],
)
def test_features_are_laid_out_as_the_model_has_them(shape, axes):
    steps = SeriesSteps(window=8000, features="log-mel")
    plain = rows(steps, (-1, 48, 40))
    wanted = plain if axes is None else plain.transpose(axes)
    np.testing.assert_array_equal(rows(steps, shape), wanted.reshape(len(plain), *shape[1:]))
    assert rows(steps, shape, "FP16").dtype == np.float16


@pytest.mark.parametrize(
    ("shape", "datatype", "fault"),
    [((-1, 50, 40), "FP32", r"a window becomes 48 x 40 frames and numbers of log-mel"), ((-1, 48, 40), "INT8", "INT8")],
)
def test_a_model_of_another_shape_or_datatype_is_refused(shape, datatype, fault):
    with pytest.raises(LoadFailed, match=fault):
        rows(SeriesSteps(window=8000, features="log-mel"), shape, datatype)


def test_a_fault_of_a_table_is_named_though_its_key_from_has_another_name_inside():
    """`from` is a word of Python: it was told as an unknown key in the place of the fault."""
    with pytest.raises(ConfigError, match=r"hop is 250, and a window has 100 samples"):
        build(SeriesSteps, {"from": "series", "window": 100, "hop": 250}, "model.toml")


@pytest.mark.parametrize(("datatype", "zero"), [("INT8", -128), ("UINT8", 0), ("INT16", 0)])
def test_a_quantised_input_gets_its_numbers_by_scale_and_zero_point(datatype, zero):
    steps = SeriesSteps(window=1000, hop=1000, scale=200.0, quantization=(0.5, zero))
    found = rows(steps, (-1, 1000), datatype)
    limits = np.iinfo(found.dtype)
    wanted = np.clip(np.rint(SAMPLES[:1000] * 200 / 0.5) + zero, limits.min, limits.max)
    np.testing.assert_allclose(found[0], wanted, atol=1)
    assert found.dtype == np.dtype(datatype.lower())


@pytest.mark.parametrize(("datatype", "quantization"), [("INT8", None), ("FP32", (0.5, 0)), ("INT64", (0.5, 0))])
def test_a_datatype_that_does_not_fit_what_is_declared_is_refused(datatype, quantization):
    with pytest.raises(LoadFailed, match="quantization"):
        rows(SeriesSteps(window=1000, quantization=quantization), (-1, 1000), datatype)
