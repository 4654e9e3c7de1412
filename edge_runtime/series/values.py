"""Windows as values: out of their times and the answers of each, to JSON and back, and as lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from edge_runtime.answers import Answer, AnswerLayout, AnswerRow, answer_fields, answers_from_fields, layout_of
from edge_runtime.tensors import Array

SHOWN_WINDOWS = 3
"""In one line."""


class Window(Struct, frozen=True):
    """One window, and the answer of the model to it. start_s, end_s: from the beginning of what was sent."""

    start_s: float
    end_s: float
    answer: Answer


def window_count(times: Array) -> int:
    """How many windows a row has: its times are NaN behind the last."""
    return int(np.isfinite(times[:, 0]).sum())


def read_windows(row: AnswerRow) -> tuple[Window, ...]:
    """Read FP64 [windows, 2], when each began and ended, with the answers of `row.parts`."""
    return tuple(
        Window(round(start, 6), round(end, 6), answer)
        for (start, end), answer in zip(row.array.tolist(), row.parts, strict=False)
    )


def windows_to_json(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return a list of start_s and end_s, each with the answer's fields."""
    return [
        {"start_s": each.start_s, "end_s": each.end_s, **answer_fields([each.answer], as_list=False)}
        for each in windows
    ]


def windows_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[Window, ...]:
    """Return the windows. Raises KeyError, TypeError, ValueError: it is not such a list."""
    return tuple(Window(each["start_s"], each["end_s"], answers_from_fields(each)[0]) for each in fields)


def window_lines(windows: Sequence[Window], _: Sequence[str]) -> list[str]:
    """Return a line for each window: when it is, and its answer in short."""
    return [f"{each.start_s:.2f}..{each.end_s:.2f} s  {_short(each.answer)}" for each in windows]


def short_windows(windows: Sequence[Window]) -> list[str]:
    """Return the first windows, and the number of the others."""
    more = len(windows) - SHOWN_WINDOWS
    shown = [f"{each.start_s:.2f} s {_short(each.answer)}" for each in windows[:SHOWN_WINDOWS]]
    return [*shown, *([f"and {more} more"] if more > 0 else [])]


def _short(answer: Answer) -> str:
    return ", ".join(word for kind, value in answer.values().items() for word in layout_of(kind).short(value))


WINDOWS = AnswerLayout(
    "windows",
    "",
    read=read_windows,
    to_json=windows_to_json,
    from_json=windows_from_json,
    lines=window_lines,
    short=short_windows,
    count=window_count,
)
"""Of the output WINDOW_TIMES: when each window began and ended, and its answer."""
