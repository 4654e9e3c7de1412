"""Features are those of their definitions: compared with sums written out in FP64, without a fast transform."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.series.features import Features, mel_bands
from edge_runtime.series.series_steps import SeriesSteps

RANDOM = np.random.default_rng(5)


def strengths(samples: np.ndarray, steps: SeriesSteps) -> np.ndarray:
    """|X|² of each frame by the sum that defines it, [frames, points / 2 + 1]."""
    frame, step, points = steps.frame_samples, steps.step_samples, steps.points
    places = np.arange(frame)
    taper = np.sin(np.pi * places / frame) ** 2
    waves = np.exp(-2j * np.pi * np.outer(places, np.arange(points // 2 + 1)) / points)
    starts = range(0, len(samples) - frame + 1, step)
    return np.abs(np.stack([samples[at : at + frame].astype(np.float64) * taper for at in starts]) @ waves) ** 2


def htk_bands(steps: SeriesSteps) -> np.ndarray:
    """Triangles of HTK's scale, one after another, straight in mel as HTK, Kaldi and TensorFlow have them."""
    edges = np.linspace(*(1127.01048 * np.log1p(np.array([steps.low, steps.highest]) / 700)), steps.bands + 2)
    hertz = np.arange(steps.points // 2 + 1) * steps.rate / steps.points
    mel = 1127.01048 * np.log1p(hertz / 700)
    rows = [np.interp(mel, edges[at : at + 3], [0, 1, 0], left=0, right=0) for at in range(steps.bands)]
    return np.array(rows).T


def test_log_mel_is_the_logarithm_of_triangles_over_the_spectrum():
    steps = SeriesSteps(features="log-mel")
    samples = RANDOM.uniform(-1, 1, 16_000).astype(np.float32)
    wanted = np.log(np.maximum(strengths(samples, steps) @ htk_bands(steps), 1e-10))
    found = Features(steps).frames(samples)
    assert found.shape == (98, 40)
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_mfcc_is_the_cosine_transform_of_log_mel():
    steps = SeriesSteps(features="mfcc")
    samples = RANDOM.uniform(-1, 1, 16_000).astype(np.float32)
    logs = np.log(strengths(samples, steps) @ htk_bands(steps))
    wanted = np.zeros((98, 13))
    for number in range(13):
        weight = np.sqrt((1 if number == 0 else 2) / 40)
        wanted[:, number] = weight * sum(
            logs[:, band] * np.cos(np.pi * number * (2 * band + 1) / 80) for band in range(40)
        )
    np.testing.assert_allclose(Features(steps).frames(samples), wanted, atol=1e-3)


def test_a_spectrum_is_the_strength_of_each_frequency_of_the_window():
    steps = SeriesSteps(rate=1000, window=1000, features="spectrum")
    samples = np.sin(2 * np.pi * 125 * np.arange(1000) / 1000).astype(np.float32)
    found = Features(steps).frames(samples)
    assert found.shape == (1, 513)
    assert found[0].argmax() == 128  # 125 Hz of 1024 points
    np.testing.assert_allclose(found, np.sqrt(strengths(samples, steps)), atol=1e-3)


def test_decibels_are_ten_times_the_logarithm_to_ten():
    samples = RANDOM.uniform(-1, 1, 800).astype(np.float32)
    natural, decibels = (
        Features(SeriesSteps(window=800, features="log-mel", log=log)).frames(samples) for log in ("ln", "db")
    )
    np.testing.assert_allclose(decibels, natural * 10 / np.log(10), rtol=1e-5)


def test_yamnets_features_are_logarithms_of_magnitudes_and_a_thousandth():
    """Source: params.py and features.py of YAMNet (github.com/tensorflow/models): 96 frames of 15 600 samples."""
    steps = SeriesSteps(
        window=15_600, hop=7680, features="log-mel", frame=400, step=160, fft=512, bands=64, low=125, high=7500,
        power=1, offset=0.001,
    )  # fmt: skip
    samples = RANDOM.uniform(-1, 1, 15_600).astype(np.float32)
    found = Features(steps).frames(samples)
    assert found.shape == (96, 64)
    np.testing.assert_allclose(
        found, np.log(np.sqrt(strengths(samples, steps)) @ htk_bands(steps) + 0.001), atol=2e-4
    )  # fmt: skip


def test_silence_is_the_floor():
    steps = SeriesSteps(window=800, features="log-mel", floor=1e-6)
    np.testing.assert_allclose(Features(steps).frames(np.zeros(800, np.float32)), np.log(1e-6), rtol=1e-6)


def test_slaney_bands_have_the_area_of_one_and_are_even_below_a_kilohertz():
    steps = SeriesSteps(features="log-mel", mel="slaney", bands=80, low=0, fft=8192)
    bands = mel_bands(steps)
    np.testing.assert_allclose(bands.sum(axis=0) * steps.rate / steps.points, 1, atol=0.02)
    peaks = bands.argmax(axis=0) * steps.rate / steps.points
    assert np.ptp(np.diff(peaks[peaks < 900])) <= 2 * steps.rate / steps.points


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"hop": 20_000}, "hop is 20000"),
        ({"window": 100, "features": "log-mel"}, "frame is 400"),
        ({"features": "log-mel", "fft": 256}, "fft is 256"),
        ({"features": "log-mel", "high": 9000}, "within half of rate"),
        ({"features": "mfcc", "bands": 12}, "coefficients is 13"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, fault):
    with pytest.raises(ValueError, match=fault):
        SeriesSteps(**table)
