"""Samples as features: the frames of a window, their spectrum, mel bands and cepstrum, by matrices made once.

numpy alone: scipy's transform of FP32 takes less CPU, and is 136 MB on disk; frames that windows share are made
once, which saves more (docs/sound.md has figures). Pure; nothing changes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_runtime.series.series_steps import SeriesSteps

Floats = npt.NDArray[np.float32]

FRAMES_AT_ONCE = 64
"""Frames whose spectrum is held: 64 of 257 complex numbers are 131 kB, which stay in a core's cache."""


class Features:
    """The features that a table declares."""

    def __init__(self, steps: SeriesSteps) -> None:
        self._steps = steps
        self._frame, self._step, self._points = steps.frame_samples, steps.step_samples, steps.points
        # Hann's window, periodic, as spectra are made with.
        self._taper = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self._frame) / self._frame)).astype(np.float32)
        self._bands = None if steps.features == "spectrum" else mel_bands(steps)
        self._cepstrum = cosines(steps.coefficients, steps.bands) if steps.features == "mfcc" else None
        self._log = steps.log or ("none" if steps.features == "spectrum" else "ln")

    def frames(self, samples: Floats) -> Floats:
        """The features of each frame of one series, [frames, numbers]. samples: at least as many as a frame has."""
        cut = np.lib.stride_tricks.sliding_window_view(samples, self._frame)[:: self._step]
        found = np.empty((len(cut), self._steps.row_shape[1]), np.float32)
        for at in range(0, len(cut), FRAMES_AT_ONCE):
            found[at : at + FRAMES_AT_ONCE] = self._of(cut[at : at + FRAMES_AT_ONCE])
        return found

    def _of(self, cut: Floats) -> Floats:
        """cut: [frames, samples of a frame]."""
        spectrum = np.fft.rfft(cut * self._taper, self._points)
        strength = np.square(spectrum.real, dtype=np.float32) + np.square(spectrum.imag, dtype=np.float32)
        if self._bands is None or self._steps.power == 1:
            np.sqrt(strength, out=strength)
        told = strength if self._bands is None else strength @ self._bands
        if self._log != "none":
            if self._steps.offset:
                told += np.float32(self._steps.offset)
            np.maximum(told, np.float32(self._steps.floor), out=told)
            np.log(told, out=told)
        if self._log == "db":
            told *= np.float32(10 / math.log(10))
        return told if self._cepstrum is None else told @ self._cepstrum


def mel_bands(steps: SeriesSteps) -> Floats:
    """The weight of each frequency in each band, [points / 2 + 1, bands]: triangles that are even in mel.

    Source: of "htk" HTK's book, 5.4, and TensorFlow's linear_to_mel_weight_matrix: straight in mel; of "slaney"
    the Auditory Toolbox and librosa: straight in hertz, and of the area 1.
    """
    hertz = np.arange(steps.points // 2 + 1) * steps.rate / steps.points
    lowest, highest = np.array(steps.low), np.array(steps.highest)
    if steps.mel == "htk":
        places, edges = _htk_of(hertz), np.linspace(_htk_of(lowest), _htk_of(highest), steps.bands + 2)
    else:
        mel = np.linspace(_slaney_of(lowest), _slaney_of(highest), steps.bands + 2)
        places, edges = hertz, _hertz_of_slaney(mel)
    lower, middle, upper = edges[:-2], edges[1:-1], edges[2:]
    rising = (places[:, None] - lower) / (middle - lower)
    falling = (upper - places[:, None]) / (upper - middle)
    weights = np.maximum(np.minimum(rising, falling), 0)
    if steps.mel == "slaney":
        weights *= 2 / (upper - lower)
    found: Floats = weights.astype(np.float32)
    return found


def cosines(coefficients: int, bands: int) -> Floats:
    """The cosine transform of the second kind, orthonormal, [bands, coefficients]."""
    table = np.cos(np.pi / bands * (np.arange(bands)[:, None] + 0.5) * np.arange(coefficients)) * math.sqrt(2 / bands)
    table[:, 0] = math.sqrt(1 / bands)
    found: Floats = table.astype(np.float32)
    return found


Doubles = npt.NDArray[np.float64]

_LINEAR_END, _LINEAR_STEP, _LOG_STEP = 1000.0, 200 / 3, math.log(6.4) / 27
"""Of Slaney's scale: up to 1 kHz a mel is 66.7 Hz, and from there 27 mel are a factor of 6.4."""


def _htk_of(hertz: Doubles) -> Doubles:
    return 2595 * np.log10(1 + hertz / 700)


def _slaney_of(hertz: Doubles) -> Doubles:
    above = _LINEAR_END / _LINEAR_STEP + np.log(np.maximum(hertz, _LINEAR_END) / _LINEAR_END) / _LOG_STEP
    return np.where(hertz < _LINEAR_END, hertz / _LINEAR_STEP, above)


def _hertz_of_slaney(mel: Doubles) -> Doubles:
    above = _LINEAR_END * np.exp(_LOG_STEP * (mel - _LINEAR_END / _LINEAR_STEP))
    return np.where(mel < _LINEAR_END / _LINEAR_STEP, mel * _LINEAR_STEP, above)
