"""The question of `tune` to a capability that chooses settings of its own, and its answer. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

Value = str | int | bool


class TableTrial(NamedTuple):
    """A model whose table of `model.toml` is to be chosen.

    now: the table as it is. quantile: of 0 to 1, of the latencies that must stay within limit_s. serve: runs a daemon
    with these keys of the table in place of its own, and gives its endpoint; until_s: when the time is over, of
    time.monotonic. show: a step, and a detail.
    """

    model: str
    now: Mapping[str, Any]
    quantile: float
    limit_s: float
    until_s: float
    serve: Callable[[Mapping[str, Value]], AbstractContextManager[str]]
    show: Callable[[str, str], None]


class TableChoice(NamedTuple):
    """The choice. values: keys of the table, none where nothing keeps the objective. why: a sentence each.

    columns, rows: what was measured, for people.
    """

    values: Mapping[str, Value]
    why: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
