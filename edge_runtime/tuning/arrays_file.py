"""Runs' inputs or outputs in one file, between this process and its children: an .npz, read without unpickling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.tensors import Array


def write_arrays(path: Path, runs: Iterable[Mapping[str, Array]]) -> int:
    """One entry a run and tensor, in order; returns how many runs there were. Text is written as bytes."""
    entries: dict[str, Any] = {}
    count = 0
    for number, run in enumerate(runs):
        count += 1
        for name, array in run.items():
            entries[f"{number}/{name}"] = array.astype(np.bytes_) if array.dtype.kind == "O" else array
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **entries)
    return count


def read_arrays(path: Path) -> list[dict[str, Array]]:
    """The runs that were written. Raises ValueError, OSError: it is no such file."""
    runs: list[dict[str, Array]] = []
    with np.load(path, allow_pickle=False) as file:
        for entry in file.files:
            number, _, name = entry.partition("/")
            while len(runs) <= int(number):
                runs.append({})
            array = file[entry]
            runs[int(number)][name] = array.astype(object) if array.dtype.kind == "S" else array
    return runs
