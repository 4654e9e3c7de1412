"""Labels of classes: a file beside `model.toml`, or in a version's folder, one a line. Thread: the loader's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_runtime.durable import open_within
from edge_runtime.errors import LoadFailed

MAX_LABELS_BYTES = 4 << 20
"""Of one file: 100 000 labels of 40 bytes."""


def read_labels(name: str, places: Sequence[Path], within: Sequence[str] = ()) -> tuple[str, ...]:
    """Labels of a file, one a line. Raises LoadFailed.

    places: the version's folder, and that of `model.toml`. within: where the file must lie, as of a version.
    """
    if Path(name).name != name:
        raise LoadFailed(f"labels = {name!r}: wanted the name of a file beside model.toml or in the version's folder")
    for place in (folder / name for folder in places):
        try:
            with open_within(place, within) as file:
                data = file.read(MAX_LABELS_BYTES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LoadFailed(f"{place}: {error.strerror}") from error
        if len(data) > MAX_LABELS_BYTES:
            raise LoadFailed(f"{place}: labels have over {MAX_LABELS_BYTES} bytes")
        try:
            lines = data.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise LoadFailed(f"{place}: labels are not UTF-8: {error}") from error
        while lines and not lines[-1]:  # editors leave empty lines at the end
            lines.pop()
        return tuple(line.strip() or line for line in lines)  # a line of one space is that character
    raise LoadFailed(f"labels = {name!r}: no such file in {' nor in '.join(map(str, places))}")
