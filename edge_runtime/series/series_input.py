"""Series as windows of a model's input, in the host: read, cut, brought to a level, and made features of.

Owns: which series are read, how many windows one may have, and how the answers of its windows become one row. Thread:
any runner of the host; nothing changes after the constructor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edge_runtime.answers import WINDOW_TIMES
from edge_runtime.errors import LoadFailed, UnreadableSeries
from edge_runtime.hosts.steps_instance import Run
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.series.features import Features
from edge_runtime.series.series_steps import SeriesSteps
from edge_runtime.series.sound_files import read_samples
from edge_runtime.steps import InputKind, ModelSteps
from edge_runtime.tensors import DATATYPES, Array, Tensors

Floats = npt.NDArray[np.float32]

SERIES, SAMPLES = "series", "samples"
"""The forms of what is sent: a file, or samples."""

MOST_NUMBERS = 1 << 24
"""Of all windows of one row, as samples and as the model gets them: 64 MiB, 1048 windows of a second at 16 kHz."""

WINDOWS_AT_ONCE = 32
"""Of a run, where the model takes any number of rows."""

QUIET = np.float32(1e-9)
"""A window that is weaker is silent, and is not brought to a level: it would be noise."""


class SeriesInput:
    """A model's input that takes series. Its attributes are those of an `InputReader`.

    How a row was read is the number of its windows. joins: itself, so that its methods are also those of an
    `OutputJoin`: it knows which windows are of which row.
    """

    sides = None

    def __init__(self, spec: TensorSpec, steps: SeriesSteps, model: ModelSpec) -> None:
        """Raises LoadFailed: the input does not take such windows."""
        self.name = spec.name
        self.fills = (spec.name,)
        self.kinds: tuple[InputKind, ...] = (SERIES, SAMPLES)
        self.source_specs = (TensorSpec(WINDOW_TIMES, "FP64", (DYNAMIC, DYNAMIC, 2)),)
        self.joins = self
        self._steps = steps
        self._spec = spec
        self._features = None if steps.features == "none" else Features(steps)
        self._inner, self._turned = _layout(spec, steps)
        self._dtype = DATATYPES[spec.datatype].dtype
        self._most_rows = model.max_rows or (spec.shape[0] if spec.shape[0] > 0 else WINDOWS_AT_ONCE)

    # ---- what is sent -----------------------------------------------------------------------------------------------

    def sent_spec(self, kind: InputKind) -> TensorSpec:
        """BYTES [rows]; of samples FP32 [rows, samples]."""
        rows = self._spec.shape[0]
        if kind == SERIES:
            return TensorSpec(self.name, "BYTES", (rows,))
        return TensorSpec(self.name, "FP32", (rows, DYNAMIC))

    def tensors(self, kind: InputKind, sent_array: Array) -> tuple[Mapping[str, Array], Sequence[int]]:
        """All windows, one behind the other, as the model takes them. Raises UnreadableSeries."""
        if not len(sent_array):
            raise UnreadableSeries("there is no series")
        made = [self._windows(kind, row, number) for number, row in enumerate(sent_array)]
        rows = made[0] if len(made) == 1 else np.concatenate(made)
        return {self.name: rows}, [len(each) for each in made]

    def source_rows(self, places: Sequence[int]) -> list[Array]:
        """When each window began and ended, FP64 [rows, windows, 2]; NaN behind the last of a row."""
        steps = self._steps
        found: Array = np.full((len(places), max(places), 2), np.nan)
        for row, count in enumerate(places):
            starts = np.arange(count) * steps.hop_samples
            found[row, :count, 0] = starts / steps.rate
            found[row, :count, 1] = (starts + steps.window) / steps.rate
        return [found]

    # ---- what comes out ---------------------------------------------------------------------------------------------

    def spec(self, model: ModelSpec) -> ModelSpec:
        """The model as it is: each window has an answer."""
        return model

    def run(self, run: Run, tensors: Tensors, places: Sequence[int]) -> list[Array]:
        """Run the model on all windows, as many at a time as it takes."""
        rows = len(tensors[self.name])
        if not places or rows <= self._most_rows:
            return run(tensors)
        found = []
        for at in range(0, rows, self._most_rows):
            found.append(run({name: each[at : at + self._most_rows] for name, each in tensors.items()}))
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    def join(
        self, results: Mapping[str, Array], tensors: Tensors, places: Sequence[int]
    ) -> tuple[Mapping[str, Array], Tensors]:
        """As they are."""
        del places
        return results, tensors

    def bare(self, outputs: Sequence[Array], places: Sequence[int]) -> list[Array]:
        """The model's own outputs, `by_row`."""
        return self.by_row(outputs, places)

    def by_row_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Of what `by_row` gives."""
        return tuple(replace(each, shape=(each.shape[0], DYNAMIC, *each.shape[1:])) for each in specs)

    def by_row(self, outputs: Sequence[Array], places: Sequence[int]) -> list[Array]:
        """Outputs of all windows as [rows, windows, …]; behind a row's last are NaN, -1, or what is empty."""
        if not places:
            return list(outputs)
        most, ends = max(places), np.cumsum(places)
        found = []
        for each in outputs:
            if len(set(places)) == 1:
                found.append(each.reshape(len(places), most, *each.shape[1:]))
                continue
            padded: Array = np.full((len(places), most, *each.shape[1:]), _nothing(each.dtype), each.dtype)
            for row, end in enumerate(ends):
                padded[row, : places[row]] = each[end - places[row] : end]
            found.append(padded)
        return found

    # ---- private ----------------------------------------------------------------------------------------------------

    def _windows(self, kind: InputKind, sent: Array, number: int) -> Array:
        """The windows of one row, as the model takes them."""
        steps = self._steps
        try:
            samples: Floats = (
                sent.astype(np.float32, copy=False) if kind == SAMPLES else read_samples(bytes(sent), steps.rate)
            )
            if len(samples) < steps.window:
                raise UnreadableSeries(
                    f"it has {len(samples):,} samples, {len(samples) / steps.rate:.3g} s; wanted at least one window, "
                    f"{steps.window:,}, which are {steps.window / steps.rate:.3g} s"
                )
            count = 1 + (len(samples) - steps.window) // steps.hop_samples
            if count * max(steps.window, math.prod(self._inner)) > MOST_NUMBERS:
                most = max(MOST_NUMBERS // max(steps.window, math.prod(self._inner)), 1)
                raise UnreadableSeries(f"it has {count:,} windows; at most {most:,} are read, send it in parts")
            if not np.isfinite(samples).all():
                raise UnreadableSeries("it has samples that are not numbers: NaN, or infinite")
        except UnreadableSeries as error:
            raise UnreadableSeries(f"series {number}: {error.message}") from None
        if steps.scale != 1:
            samples = samples * np.float32(steps.scale)
        shared = self._shared_frames(samples, count)
        made = self._of_each(samples, count) if shared is None else shared
        if self._turned:
            made = made.transpose(0, 2, 1)
        return np.ascontiguousarray(made, self._dtype).reshape(count, *self._inner)

    def _shared_frames(self, samples: Floats, count: int) -> Floats | None:
        """The features of windows that have frames in common, each made once; None where they have none."""
        steps = self._steps
        if self._features is None or steps.normalise != "none" or steps.hop_samples % steps.step_samples:
            return None
        if steps.hop_samples >= steps.window:
            return None
        frames = self._features.frames(samples[: (count - 1) * steps.hop_samples + steps.window])
        cut = np.lib.stride_tricks.sliding_window_view(frames, steps.row_shape[0], axis=0)
        shared: Floats = cut[:: steps.hop_samples // steps.step_samples].transpose(0, 2, 1)
        return shared

    def _of_each(self, samples: Floats, count: int) -> Floats:
        """Samples, or features, of each window by itself."""
        steps = self._steps
        cut = np.lib.stride_tricks.sliding_window_view(samples, steps.window)[:: steps.hop_samples]
        windows = _levelled(cut, steps.normalise)
        if self._features is None:
            return windows
        found = np.empty((count, *steps.row_shape), np.float32)
        for index, window in enumerate(windows):
            found[index] = self._features.frames(window)
        return found


def series_input(spec: ModelSpec, steps: ModelSteps, threads: int, runs: int) -> SeriesInput | None:
    """The reader of series; None: no steps declare it. Raises LoadFailed: they do not fit the model."""
    del threads, runs
    if not steps.inputs:
        return None
    if len(steps.inputs) > 1 or len(spec.inputs) > 1:
        there = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in spec.inputs)
        raise LoadFailed(f"series are declared for {', '.join(steps.inputs)}; wanted a model with one input: {there}")
    ((name, declared),) = steps.inputs.items()
    found = spec.inputs[0]
    if found.name != name:
        raise LoadFailed(f"[input.{name}]: the model has no such input; it has {found.name}")
    assert isinstance(declared, SeriesSteps)
    return SeriesInput(found, declared, spec)


def _layout(spec: TensorSpec, steps: SeriesSteps) -> tuple[tuple[int, ...], bool]:
    """The lengths of a row of the model, and whether frames come behind the numbers of each. Raises LoadFailed."""
    if spec.datatype not in ("FP32", "FP16"):
        raise LoadFailed(f"[input.{spec.name}]: it takes {spec.datatype}; wanted FP32 or FP16")
    shape, inner = steps.row_shape, spec.shape[1:]
    able = [(shape, False), ((1, *shape), False), ((*shape, 1), False)]
    if len(shape) == 2:
        turned = shape[::-1]
        able += [(turned, True), ((1, *turned), True), ((*turned, 1), True), ((math.prod(shape),), False)]
    for lengths, is_turned in able:
        if len(lengths) == len(inner) and all(want in (DYNAMIC, got) for got, want in zip(lengths, inner, strict=True)):
            return lengths, is_turned
    made = " x ".join(map(str, shape))
    what = "samples" if steps.features == "none" else f"frames and numbers of {steps.features}"
    raise LoadFailed(
        f"[input.{spec.name}]: its shape is {list(spec.shape)}, and a window becomes {made} {what}; wanted "
        f"{[-1, *shape]}: see window, features, frame, step and bands"
    )


def _levelled(windows: Floats, normalise: str) -> Floats:
    """Windows, each brought to a level by itself. windows: [windows, samples]."""
    if normalise in ("mean", "zscore"):
        windows = windows - windows.mean(axis=1, keepdims=True)
    if normalise == "zscore":
        windows = windows / np.maximum(windows.std(axis=1, keepdims=True), QUIET)
    if normalise == "peak":
        windows = windows / np.maximum(np.abs(windows).max(axis=1, keepdims=True), QUIET)
    return windows


def _nothing(dtype: np.dtype[np.generic]) -> object:
    """The value behind the last window of a row."""
    return {"f": np.nan, "i": -1, "O": b""}.get(dtype.kind, 0)
