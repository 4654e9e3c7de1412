"""Series as windows of a model's input, in the host: read, cut, brought to a level, and made features of.

Owns: which series are read, how many windows one may have, and how the answers of its windows become one row. Thread:
any runner of the host; nothing changes after the constructor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edge_runtime.answers import WINDOW_TIMES, kind_of
from edge_runtime.errors import LoadFailed, UnreadableSeries
from edge_runtime.hosts.steps_instance import ModelRun
from edge_runtime.kept_state import KeptSteps, row_type
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.series.features import Features
from edge_runtime.series.series_steps import SeriesSteps
from edge_runtime.series.sound_files import read_samples
from edge_runtime.steady import SteadyLabels
from edge_runtime.steps import InputKind, ModelSteps, OutputSteps
from edge_runtime.tensors import DATATYPES, Array, Tensors

Floats = npt.NDArray[np.float32]

SERIES, SAMPLES = "series", "samples"
"""The forms of what is sent: a file, or samples."""

MOST_NUMBERS = 1 << 24
"""Of all windows of one row, as samples and as the model gets them: 64 MiB, 1048 windows of a second at 16 kHz."""

WINDOWS_AT_ONCE = 32
"""Of a run, where the model takes any number of rows."""

QUANTISED = ("INT8", "UINT8", "INT16")
"""Datatypes of an input whose numbers are (number - zero point) * scale."""

QUIET = np.float32(1e-9)
"""A window that is weaker is silent, and is not brought to a level: it would be noise."""


class SentPart(NamedTuple):
    """How a row was read: the number of its windows, and where the first begins, in samples since the beginning.

    steady: of each output of classes, what windows before agree on, which these move on; empty where none are to agree.
    """

    windows: int
    begin: int
    steady: tuple[SteadyLabels, ...] = ()


class SeriesInput:
    """A model's input that takes series. Its attributes are those of an `InputReader`.

    joins: itself, so that its methods are also those of an `OutputJoin`: it knows which windows are of which row.
    keeps: the rests of sequences, where the model has them. steady_words: of each output of classes, on what windows
    are to agree; empty where they are not.
    """

    sides = None

    def __init__(
        self, spec: TensorSpec, steps: SeriesSteps, model: ModelSpec, outputs: Mapping[str, OutputSteps] | None = None
    ) -> None:
        """Raises LoadFailed: the input does not take such windows. outputs: the declared ones."""
        self.name = spec.name
        self.fills = (spec.name,)
        self.kinds: tuple[InputKind, ...] = (SERIES, SAMPLES)
        self.source_specs = (TensorSpec(WINDOW_TIMES, "FP64", (DYNAMIC, DYNAMIC, 2)),)
        self.joins = self
        self.keeps: SeriesRests | None = None
        self._steps = steps
        declared = outputs or {}
        told = [each.name for each in model.outputs if each.name in declared]
        self._classes = [at for at, name in enumerate(told) if kind_of(declared[name]) == "classes"]
        self.steady_words = [
            f"{declared[told[at]].top_k} classes of '{told[at]}', {steps.steady[0]} of {steps.steady[1]} windows"
            for at in self._classes
            if steps.steady is not None
        ]
        if steps.steady is not None and not self._classes:
            raise LoadFailed(f"[input.{spec.name}]: steady is of classes, and no [output.NAME] gives any")
        if model.sequences is not None:
            if model.sequences.has_states:
                raise LoadFailed(
                    f"[input.{spec.name}] cuts what a request sends into windows, and [sequence] has states or "
                    "controls of the model: each of its runs is a request then; send such a model its own tensors"
                )
            self.keeps = SeriesRests(self, model.sequences.slots)
        self._silence: dict[tuple[str, ...] | None, list[Array]] = {}
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

    def tensors(self, kind: InputKind, sent_array: Array) -> tuple[Mapping[str, Array], Sequence[SentPart]]:
        """All windows, one behind the other, as the model takes them. Raises UnreadableSeries."""
        if not len(sent_array):
            raise UnreadableSeries("there is no series")
        series = [self.samples(kind, row, number) for number, row in enumerate(sent_array)]
        window = self._steps.window
        for number, samples in enumerate(series):
            if len(samples) < window:
                raise UnreadableSeries(
                    f"series {number}: it has {len(samples):,} samples, {len(samples) / self._steps.rate:.3g} s; "
                    f"wanted at least one window, {window:,}, which are {window / self._steps.rate:.3g} s"
                )
        return self.windows(series, [0] * len(series), [self.unsteady() for _ in series])

    def samples(self, kind: InputKind, sent: Array, number: int) -> Floats:
        """The samples of one row. Raises UnreadableSeries."""
        try:
            found: Floats = (
                sent.astype(np.float32, copy=False) if kind == SAMPLES else read_samples(bytes(sent), self._steps.rate)
            )
            if not np.isfinite(found).all():
                raise UnreadableSeries("it has samples that are not numbers: NaN, or infinite")
        except UnreadableSeries as error:
            raise UnreadableSeries(f"series {number}: {error.message}") from None
        return found

    def unsteady(self) -> tuple[SteadyLabels, ...]:
        """Return labels on which no window has agreed yet; empty where none are to."""
        steady = self._steps.steady
        return () if steady is None else tuple(SteadyLabels("classes", *steady) for _ in self._classes)

    def windows(
        self, series: Sequence[Floats], begins: Sequence[int], steady: Sequence[tuple[SteadyLabels, ...]]
    ) -> tuple[Mapping[str, Array], Sequence[SentPart]]:
        """All windows of several series; where there is none, one of silence, which nothing is answered of.

        begins: where each series begins, in samples. steady: what windows before it agree on; answers move it on.
        Raises UnreadableSeries: one has too many.
        """
        places = [
            SentPart(self.count(len(samples)), begin, agreed)
            for samples, begin, agreed in zip(series, begins, steady, strict=True)
        ]
        made = [
            self._cut(samples, place.windows, number)
            for number, (samples, place) in enumerate(zip(series, places, strict=True))
            if place.windows
        ] or [np.zeros((1, *self._inner), self._dtype)]
        return {self.name: made[0] if len(made) == 1 else np.concatenate(made)}, places

    def count(self, samples: int) -> int:
        """Count the windows that begin and end within this number of samples."""
        return max(1 + (samples - self._steps.window) // self._steps.hop_samples, 0)

    @property
    def cut_words(self) -> str:
        """How series are cut."""
        steps = self._steps
        return f"{steps.window} samples at {steps.rate} Hz, one window each {steps.hop_samples}"

    @property
    def hop(self) -> int:
        """Samples from window to window."""
        return self._steps.hop_samples

    def source_rows(self, places: Sequence[SentPart]) -> list[Array]:
        """When each window began and ended, FP64 [rows, windows, 2]; NaN behind the last of a row."""
        steps = self._steps
        found: Array = np.full((len(places), max(each.windows for each in places), 2), np.nan)
        for row, (count, begin, _) in enumerate(places):
            starts = begin + np.arange(count) * steps.hop_samples
            found[row, :count, 0] = starts / steps.rate
            found[row, :count, 1] = (starts + steps.window) / steps.rate
        return [found]

    # ---- what comes out ---------------------------------------------------------------------------------------------

    def spec(self, model: ModelSpec) -> ModelSpec:
        """The model as it is: each window has an answer."""
        return model

    def run(self, run: ModelRun, tensors: Tensors, places: Sequence[SentPart]) -> list[Array]:
        """Run the model on all windows, as many at a time as it takes."""
        if places and not any(each.windows for each in places):
            # The outputs of no window have shapes, which one run shows.
            if run.outputs not in self._silence:
                self._silence[run.outputs] = run(tensors)
            return self._silence[run.outputs]
        rows = len(tensors[self.name])
        if not places or rows <= self._most_rows:
            return run(tensors)
        found = []
        for at in range(0, rows, self._most_rows):
            found.append(run({name: each[at : at + self._most_rows] for name, each in tensors.items()}))
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    def join(
        self, results: Mapping[str, Array], tensors: Tensors, places: Sequence[SentPart]
    ) -> tuple[Mapping[str, Array], Tensors]:
        """As they are."""
        del places
        return results, tensors

    def bare(self, outputs: Sequence[Array], places: Sequence[SentPart]) -> list[Array]:
        """The model's own outputs, each window's."""
        return self._by_row(outputs, places)

    def by_row_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Of what `by_row` gives."""
        return tuple(replace(each, shape=(each.shape[0], DYNAMIC, *each.shape[1:])) for each in specs)

    def by_row(self, outputs: Sequence[Array], places: Sequence[SentPart]) -> list[Array]:
        """Answers of all windows as [rows, windows, …]; behind a row's last are NaN, -1, or what is empty."""
        found = self._by_row(outputs, places)
        if self._steps.steady is not None:
            for number, at in enumerate(self._classes):
                found[at] = _agreed(found[at], [(each.windows, each.steady[number]) for each in places])
        return found

    # ---- private ----------------------------------------------------------------------------------------------------

    def _by_row(self, outputs: Sequence[Array], places: Sequence[SentPart]) -> list[Array]:
        if not places:
            return list(outputs)
        counts = [each.windows for each in places]
        most, ends = max(counts), np.cumsum(counts)
        found = []
        for each in outputs:
            if len(set(counts)) == 1:
                found.append(each[: ends[-1]].reshape(len(places), most, *each.shape[1:]))
                continue
            padded: Array = np.full((len(places), most, *each.shape[1:]), _nothing(each.dtype), each.dtype)
            for row, end in enumerate(ends):
                padded[row, : counts[row]] = each[end - counts[row] : end]
            found.append(padded)
        return found

    def _cut(self, samples: Floats, count: int, number: int) -> Array:
        """The windows of one row, as the model takes them. Raises UnreadableSeries: there are too many."""
        steps = self._steps
        most = max(MOST_NUMBERS // max(steps.window, math.prod(self._inner)), 1)
        if count > most:
            raise UnreadableSeries(
                f"series {number}: it has {count:,} windows; at most {most:,} are read, send it in parts"
            )
        if steps.scale != 1:
            samples = samples * np.float32(steps.scale)
        shared = self._shared_frames(samples, count)
        made = self._of_each(samples, count) if shared is None else shared
        if self._turned:
            made = made.transpose(0, 2, 1)
        if steps.quantization is not None:
            scale, zero = steps.quantization
            limits = np.iinfo(self._dtype.name)
            made = np.clip(np.rint(made / np.float32(scale)) + np.float32(zero), limits.min, limits.max)
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


class _Rest(NamedTuple):
    """Samples from where the next window begins, which is `begin`, counted from a sequence's start.

    steady: what the windows before it agree on, once their answers are made.
    """

    samples: Floats
    begin: int
    steady: tuple[SteadyLabels, ...]


class SeriesRests:
    """Samples that requests of sequences sent behind their last whole window: their next requests go on from there.

    They are `KeptStates`, so that a snapshot carries them. Thread: any runner of the host; no two runs of one sequence
    are on at the same time.
    """

    def __init__(self, reader: SeriesInput, slots: int) -> None:
        self._reader = reader
        self._steps = KeptSteps(slots)
        # By what decides which windows they become: a model whose table changed since takes no rest of before.
        self.state_specs = [
            TensorSpec(reader.cut_words, "FP32", (DYNAMIC,)),
            TensorSpec("begins at", "INT64", (1,)),
            *(
                TensorSpec(f"{what} of {words}", "FP32", (DYNAMIC, DYNAMIC, 2))
                for words in reader.steady_words
                for what in ("the last", "the agreed")
            ),
        ]
        self._rests: list[list[_Rest | None]] = [[None] * slots for _ in range(KeptSteps.KEPT)]

    def continued(
        self, kind: InputKind, sent_array: Array, rows: Array
    ) -> tuple[Mapping[str, Array], Sequence[SentPart]]:
        """The windows that are whole with what was sent now. Raises UnreadableSeries, SequenceLost: nothing moved."""
        lines = np.ascontiguousarray(rows).view(row_type())[:, 0]
        if not lines["serial"][0]:
            return self._reader.tensors(kind, sent_array)
        self._steps.check(lines)
        series: list[Floats] = []
        following: list[_Rest] = []
        begins: list[int] = []
        for number, (sent, line) in enumerate(zip(sent_array, lines, strict=True)):
            rest = self._rest(int(line["steps"]), int(line["slot"]))
            samples = self._reader.samples(kind, sent, number)
            joined = np.concatenate([rest.samples, samples])
            used = self._reader.count(len(joined)) * self._reader.hop  # a hop is no longer than a window
            series.append(joined)
            begins.append(rest.begin)
            agreed = tuple(each.copy() for each in rest.steady)
            following.append(_Rest(joined[used:].copy(), rest.begin + used, agreed))
        made = self._reader.windows(series, begins, [each.steady for each in following])
        for line, rest in zip(lines, following, strict=True):
            self._put(line, rest)
        self._steps.move_on(lines)
        return made

    def states_of(self, row: Any) -> list[Array]:
        """Return the samples that the next chunk goes on from, and where they begin. Raises SequenceLost."""
        self._steps.check(row)
        rest = self._rest(int(row["steps"][0]), int(row["slot"][0]))
        return [rest.samples, np.array([rest.begin]), *(array for each in rest.steady for array in each.history())]

    def keep(self, row: Any, states: Sequence[Array]) -> None:
        """Have the next chunk go on from these, as `states_of` has them."""
        samples, begin, *kept = states
        steady = self._reader.unsteady()
        for each, last, best in zip(steady, kept[::2], kept[1::2], strict=True):
            each.take(last, best)
        self._put(row[0], _Rest(samples.copy(), int(begin[0]), steady))
        self._steps.move_on(row)

    def _put(self, line: Any, rest: _Rest) -> None:
        """Keep the rest after a step. line: of `kept_state.row_type`."""
        self._rests[(int(line["steps"]) + 1) % KeptSteps.KEPT][int(line["slot"])] = rest

    def _rest(self, steps: int, slot: int) -> _Rest:
        kept = self._rests[steps % KeptSteps.KEPT][slot] if steps else None
        return kept or _Rest(np.empty(0, np.float32), 0, self._reader.unsteady())


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
    return SeriesInput(found, declared, spec, steps.outputs)


def _layout(spec: TensorSpec, steps: SeriesSteps) -> tuple[tuple[int, ...], bool]:
    """The lengths of a row of the model, and whether frames come behind the numbers of each. Raises LoadFailed."""
    if steps.quantization is not None and spec.datatype not in QUANTISED:
        raise LoadFailed(
            f"[input.{spec.name}]: it takes {spec.datatype}, and quantization is for {', '.join(QUANTISED)}"
        )
    if steps.quantization is None and spec.datatype not in ("FP32", "FP16"):
        raise LoadFailed(
            f"[input.{spec.name}]: it takes {spec.datatype}; wanted FP32 or FP16, or for {', '.join(QUANTISED)} "
            "quantization = [scale, zero point], as the model's file says"
        )
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


def _agreed(array: Array, parts: Sequence[tuple[int, SteadyLabels]]) -> Array:
    """Classes of windows, each as those up to it agree; none before they do.

    array: [rows, windows, classes, 2], index and score. parts: of each row, its windows, and what those before say.
    """
    found: Array = np.zeros_like(array)
    found[..., 0] = -1
    for row, (count, labels) in enumerate(parts):
        for window in range(count):
            labels.look(array[row, window].copy())  # it is kept, and the others are not
            if labels.steady is not None:
                found[row, window] = labels.agreed(array[row, window : window + 1])[0]
    return found


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
