"""The table `[input.NAME]` of series: how samples become a model's windows. Values only; series_input.py does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from edge_runtime.answers import kind_of
from edge_runtime.model_spec import TensorSpec
from edge_runtime.steps import InputKind, InputSteps, OutputSteps, why_not_steady
from edge_runtime.tensors import Array

Rate = Annotated[int, Meta(ge=1, le=10_000_000)]
Samples = Annotated[int, Meta(ge=1, le=1 << 22)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=100)]

FEWEST_POINTS = 32
"""Of a transform, where nothing says how many."""


class SeriesSteps(InputSteps, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """Series of samples in place of this input: sound, vibration, current. The model is asked once for each window."""

    element: ClassVar[str] = "series"
    is_file: ClassVar[bool] = True

    source: Literal["series"] = "series"
    """BYTES `[rows]`: a WAV or FLAC file each, or bare samples, 16 bits, little-endian, one channel; or FP32 `[rows,
    samples]`, such as those of a sensor."""

    rate: Rate = 16_000
    """Samples a second that the model was trained with. A file with another is refused."""

    window: Samples = 16_000
    """Samples that the model sees at once. What is sent has at least so many."""

    hop: Samples | None = None
    """Samples from the beginning of one window to that of the next. When absent: `window`, so that none overlap."""

    normalise: Literal["none", "mean", "peak", "zscore"] = "none"
    """What is done with each window: `"mean"`, its mean is taken away; `"peak"`, divided by its largest; `"zscore"`,
    both its mean taken away and divided by its standard deviation."""

    steady: tuple[Count, Count] | None = None
    """Two numbers: a class is told when the first number of windows, of the second number of last ones, have it as
    their best, and then until another is; before the first there is none. A stream goes on from chunk to chunk. When
    absent: each window's classes are its own."""

    scale: Positive = 1.0
    """Multiplies samples before that: those of files are -1 to 1. 32768 for a model that was trained on 16 bits."""

    features: Literal["none", "log-mel", "mfcc", "spectrum"] = "none"
    """What the model gets of a window: its samples; for each frame of it the logarithms of its mel bands, their
    cepstrum, or the strength of each frequency."""

    frame: Samples | None = None
    """With features: samples of a frame. When absent: 25 ms; of `"spectrum"` the whole window."""

    step: Samples | None = None
    """With features: samples from frame to frame. When absent: 10 ms; of `"spectrum"` a frame."""

    fft: Annotated[int, Meta(ge=FEWEST_POINTS, le=1 << 20)] | None = None
    """With features: points of the transform of a frame, zeros behind it. When absent: the next power of two."""

    bands: Annotated[int, Meta(ge=1, le=512)] = 40
    """Of mel, with `"log-mel"` and `"mfcc"`."""

    low: Annotated[float, Meta(ge=0, le=1e7)] = 20.0
    """Where the lowest band begins, in Hz."""

    high: Positive | None = None
    """Where the highest band ends, in Hz. When absent: half of `rate`."""

    mel: Literal["htk", "slaney"] = "htk"
    """The scale of mel: `"htk"`, as HTK, Kaldi and TensorFlow have it, bands straight in mel; `"slaney"`, as librosa
    and Whisper, bands straight in Hz, each divided by its width."""

    log: Literal["none", "ln", "db"] | None = None
    """`"ln"`, or `"db"`, which is ten times the logarithm to 10. When absent: `"ln"`; of `"spectrum"` `"none"`."""

    power: Literal[1, 2] = 2
    """With `"log-mel"` and `"mfcc"`: 2 for bands of the power spectrum, 1 for those of the magnitude, as YAMNet has."""

    offset: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Added to each number before its logarithm is taken: 0.001 for YAMNet."""

    floor: Positive = 1e-10
    """What is smaller counts as this before its logarithm is taken."""

    quantization: tuple[Positive, Annotated[int, Meta(ge=-32_768, le=32_767)]] | None = None
    """Scale and zero point of an input of INT8, UINT8 or INT16, as the model's file says: `[0.1, -128]`. What the model
    gets is its features, or samples, divided by the one plus the other, rounded."""

    coefficients: Annotated[int, Meta(ge=1, le=512)] = 13
    """Of `"mfcc"`: the first of each frame."""

    def __post_init__(self) -> None:
        if self.hop is not None and self.hop > self.window:
            raise ValueError(f"hop is {self.hop}, and a window has {self.window} samples; wanted at most as many")
        if self.steady is not None and (reason := why_not_steady(*self.steady)):
            raise ValueError(f"{reason} windows")
        if self.features == "none":
            return
        if self.frame_samples > self.window:
            raise ValueError(f"frame is {self.frame_samples}, and a window has {self.window} samples; wanted no more")
        if self.points < self.frame_samples:
            raise ValueError(f"fft is {self.points}, and a frame has {self.frame_samples} samples; wanted no less")
        if self.features != "spectrum" and not self.low < self.highest <= self.rate / 2:
            raise ValueError(
                f"bands from {self.low:g} to {self.highest:g} Hz; wanted from lower to higher, within half of rate, "
                f"{self.rate / 2:g} Hz"
            )
        if self.features == "mfcc" and self.coefficients > self.bands:
            raise ValueError(f"coefficients is {self.coefficients}, of {self.bands} bands; wanted at most as many")

    def kept_bytes(self, outputs: Mapping[str, OutputSteps]) -> int:
        """Of samples in FP32 less than a window, and the classes of the last windows, where they are to agree."""
        told = [each.top_k for each in outputs.values() if kind_of(each) == "classes"]
        return 4 * self.window + (0 if self.steady is None else 8 * (self.steady[1] + 1) * sum(told))

    @property
    def hop_samples(self) -> int:
        """From the beginning of one window to that of the next."""
        return self.hop or self.window

    @property
    def frame_samples(self) -> int:
        """Of one frame."""
        return self.frame or (self.window if self.features == "spectrum" else max(round(self.rate * 0.025), 1))

    @property
    def step_samples(self) -> int:
        """From frame to frame."""
        return self.step or (self.frame_samples if self.features == "spectrum" else max(round(self.rate * 0.01), 1))

    @property
    def points(self) -> int:
        """Of the transform of a frame."""
        return self.fft or max(1 << (self.frame_samples - 1).bit_length(), FEWEST_POINTS)

    @property
    def highest(self) -> float:
        """Where the highest band ends, in Hz."""
        return self.high or self.rate / 2

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The lengths of one window as a model gets it: samples, or frames and numbers of a frame."""
        if self.features == "none":
            return (self.window,)
        numbers = {"log-mel": self.bands, "mfcc": self.coefficients, "spectrum": self.points // 2 + 1}
        return 1 + (self.window - self.frame_samples) // self.step_samples, numbers[self.features]

    def title(self) -> str:
        """Return the words for samples."""
        return "a series of samples"

    def words(self, spec: TensorSpec | None) -> dict[str, str]:
        """How a series becomes the model's windows."""
        del spec
        said = {
            "rate": f"{self.rate} Hz",
            "window": f"{self.window} samples, one each {self.hop_samples}",
            "normalise": self.normalise,
        }
        if self.features == "none":
            return said
        return {**said, "features": f"{self.features}, {' x '.join(map(str, self.row_shape))}"}

    def made_up(self, sent: TensorSpec, kind: InputKind) -> Array:
        """One window of silence a row: bare samples, which say no rate, or as floats."""
        rows = max(sent.shape[0], 1)
        if kind == "series":
            series: Array = np.empty(rows, object)
            series[:] = [bytes(2 * self.window)] * rows
            return series
        return np.zeros((rows, self.window), np.float32)

    def noise(self, shape: tuple[int, ...], level: float, random: np.random.Generator) -> Array:
        """Samples of -`level` to `level`, or features of about the size that those of such samples have."""
        if self.features == "none":
            return random.uniform(-level, level, shape) * self.scale
        return random.normal(size=shape) * level
