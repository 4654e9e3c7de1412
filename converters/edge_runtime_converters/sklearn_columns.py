"""A scikit-learn model of columns: which inputs it is served with, and how they reach its first step.

Owns: what each column holds, text or numbers, by what the first step learnt of it; and rows made up of that. A model of
named columns that begins with a ColumnTransformer, or takes text, gets one input a column. Every other model of numbers
keeps its one input of all features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.tensors import Array
from edge_runtime_converters.forest import INPUT

_SEED = 7
_RUNS, _ROWS = 8, 64
"""As of trees: 512 rows meet each of a hundred categories some five times."""

_ANYWHERE = 0.3
"""The share of numbers that lie anywhere, and of texts that the model may not know."""

_UNKNOWN = "something else"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a model reads. names: of its inputs; one name alone stands for all columns.

    are_text: of each column. known: texts that each column knows. takes_unknown: whether it takes any other text.
    """

    names: tuple[str, ...]
    are_text: tuple[bool, ...]
    known: tuple[tuple[str, ...], ...]
    takes_unknown: tuple[bool, ...]
    numbers: tuple[tuple[float, ...], ...]

    def rows(self, inputs: Mapping[str, Array]) -> Array:
        """One array of all columns, as scikit-learn takes it."""
        parts = list(inputs.values())
        if not any(self.are_text):
            return np.concatenate(parts, axis=1)
        table = np.concatenate([part.astype(object) for part in parts], axis=1)
        for column, is_text in enumerate(self.are_text):
            if is_text:
                table[:, column] = [_text(word) for word in table[:, column]]
        return table

    def made_up(self) -> list[Mapping[str, Array]]:
        """Rows of known texts and of numbers near those that the first step learnt, as runs."""
        random = np.random.default_rng(_SEED)
        return [self._run(random) for _ in range(_RUNS)]

    def _run(self, random: np.random.Generator) -> Mapping[str, Array]:
        columns = [self._column(place, random) for place in range(len(self.are_text))]
        if len(self.names) == len(columns):
            return dict(zip(self.names, columns, strict=True))
        return {INPUT: np.concatenate(columns, axis=1)}

    def _column(self, place: int, random: np.random.Generator) -> Array:
        if not self.are_text[place]:
            middles = random.choice(np.array(self.numbers[place] or (0.0,)), _ROWS)
            sizes = 10 ** random.uniform(-1, 2, _ROWS)
            anywhere = random.standard_normal(_ROWS) * sizes
            near = middles + random.standard_normal(_ROWS) * max(float(np.std(self.numbers[place] or (1.0,))), 1e-3)
            return np.where(random.random(_ROWS) < _ANYWHERE, anywhere, near).astype(np.float32).reshape(-1, 1)
        known = [*self.known[place]] or [_UNKNOWN]
        others = [_UNKNOWN] if self.takes_unknown[place] else known
        words = np.empty((_ROWS, 1), object)
        for row in range(_ROWS):
            words[row, 0] = str(random.choice(others if random.random() < _ANYWHERE else known)).encode()
        return words


def split_columns(model: Any) -> tuple[Any, Columns] | None:
    """A model, changed to take its columns by place, and these columns; None for a model of one kind of features.

    The model that was given stays as it is: the first step is copied.
    """
    first = first_step(model)
    names = getattr(first, "feature_names_in_", None)
    count = int(getattr(first, "n_features_in_", 0))
    parts = list(_parts_of(first, count))
    if not parts or len(getattr(first, "vocabulary_", ())):
        return None
    found = {place: [_learnt(step, at) for step, at in _readers(parts, place)] for place in range(count)}
    used = [place for place in range(count) if found[place]] if _is_by_column(first) else list(range(count))
    are_text = tuple(any(each.is_text for each in found[place]) for place in used)
    if not any(are_text) and (names is None or not _is_by_column(first)):
        return None
    if names is not None:
        inputs = tuple(str(names[place]) for place in used)
    elif all(are_text):
        inputs = (INPUT,)
    else:
        inputs = tuple(f"x{place}" for place in used)  # as scikit-learn calls them
    columns = Columns(
        inputs,
        are_text,
        tuple(tuple(sorted({word for each in found[place] for word in each.known})) for place in used),
        tuple(all(each.takes_unknown for each in found[place]) for place in used),
        tuple(tuple(number for each in found[place] for number in each.numbers) for place in used),
    )
    return _by_place(model, used), columns


def first_step(model: Any) -> Any:
    """The first step of a pipeline, or of the best of a search; the model itself where it is neither."""
    while True:
        model = getattr(model, "best_estimator_", model)
        if not getattr(model, "steps", None):
            return model
        model = model.steps[0][1]


# ---- private --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Learnt:
    is_text: bool = False
    known: tuple[str, ...] = ()
    takes_unknown: bool = True
    numbers: tuple[float, ...] = ()


def _text(word: object) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


def _is_by_column(step: Any) -> bool:
    return hasattr(step, "transformers_")


def _parts_of(step: Any, count: int) -> Iterator[tuple[Any, Sequence[int]]]:
    """The steps that read columns, each with the places of its columns."""
    if not _is_by_column(step):
        yield step, range(count)
        return
    for _, part, columns in step.transformers_:
        if not isinstance(part, str) or part != "drop":
            yield part, _places(step, columns)


def _places(step: Any, columns: Any) -> list[int]:
    """Where the columns of one part of a ColumnTransformer stand, however it names them."""
    names = list(getattr(step, "feature_names_in_", ()))
    if isinstance(columns, slice):
        ends: list[Any] = [names.index(end) if isinstance(end, str) else end for end in (columns.start, columns.stop)]
        if isinstance(columns.stop, str):  # pandas includes it
            ends[1] += 1
        return list(range(int(step.n_features_in_)))[ends[0] : ends[1] : columns.step]
    several = [columns] if isinstance(columns, (str, int, np.integer)) else list(columns)
    if several and all(isinstance(each, (bool, np.bool_)) for each in several):
        return [place for place, is_taken in enumerate(several) if is_taken]
    found = [names.index(each) if isinstance(each, str) else int(each) for each in several]
    return [place % int(step.n_features_in_) for place in found]


def _readers(parts: Sequence[tuple[Any, Sequence[int]]], place: int) -> Iterator[tuple[Any, int]]:
    """The steps that read a column, and which of their own columns it is."""
    for step, places in parts:
        if place in places:
            yield step, list(places).index(place)


def _learnt(step: Any, column: int) -> _Learnt:  # noqa: PLR0911 (one line a rule)
    """Return the knowledge of a step on a column. A pipeline's first step that learnt something counts."""
    if isinstance(step, str):  # passthrough
        return _Learnt()
    if getattr(step, "steps", None):
        known = [_learnt(each, column) for _, each in step.steps]
        told = [each for each in known if each.known] + [each for each in known if each != _Learnt()]
        return told[0] if told else _Learnt()
    if _is_by_column(step):
        inner = [_learnt(*each) for each in _readers(list(_parts_of(step, int(step.n_features_in_))), column)]
        return next((each for each in inner if each.is_text), inner[0] if inner else _Learnt())
    if hasattr(step, "token_pattern"):
        return _Learnt(is_text=True, known=tuple(getattr(step, "vocabulary_", ())))
    for name in ("categories_", "statistics_"):
        values = getattr(step, name, None)
        if values is not None and column < len(values):
            held = np.atleast_1d(np.asarray(values[column], object))
            words = tuple(word for word in held.tolist() if isinstance(word, str))
            if words:
                handles = getattr(step, "handle_unknown", "ignore") != "error"
                return _Learnt(is_text=True, known=words, takes_unknown=handles and name == "categories_")
            numbers = [float(each) for each in held.tolist() if isinstance(each, (int, float)) and np.isfinite(each)]
            return _Learnt(numbers=tuple(numbers), takes_unknown=getattr(step, "handle_unknown", "") != "error")
    middle, scale = (_at(step, names, column) for names in (("mean_", "center_", "data_min_"), ("scale_",)))
    if middle is None:
        return _Learnt()
    spread = scale if scale is not None and not hasattr(step, "data_min_") else 1.0
    return _Learnt(numbers=(middle - 2 * spread, middle - spread, middle, middle + spread, middle + 2 * spread))


def _at(step: Any, names: Sequence[str], column: int) -> float | None:
    for name in names:
        values = getattr(step, name, None)
        if isinstance(values, np.ndarray) and values.ndim == 1 and column < len(values):
            return float(values[column])
    return None


def _by_place(model: Any, used: Sequence[int]) -> Any:
    """A copy whose first step takes the used columns by their places among these."""
    model = getattr(model, "best_estimator_", model)
    if getattr(model, "steps", None):
        changed = copy.copy(model)
        (name, first), *rest = model.steps
        changed.steps = [(name, _by_place(first, used)), *rest]
        return changed
    changed = copy.copy(model)
    vars(changed).pop("feature_names_in_", None)
    if not _is_by_column(model):
        return changed
    changed.n_features_in_ = len(used)
    parts = []
    for name, part, columns in model.transformers_:
        places = [used.index(place) for place in _places(model, columns)] if not _is_dropped(part) else []
        # One name without a list means one axis: a vectorizer takes texts, not a table of them.
        parts.append((name, part, places[0] if isinstance(columns, (str, int, np.integer)) and places else places))
    changed.transformers_ = [each for each in parts if not _is_dropped(each[1])]
    return changed


def _is_dropped(part: Any) -> bool:
    return isinstance(part, str) and part == "drop"
