"""Results that `tune` left beside a model: reasons in `model.toml`, and the picture. Thread: any; reads two files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_runtime.models.names import SETTINGS_FILE
from edge_runtime.tuning.applying import MARK, PICTURE_FILE

MOST_BYTES = 1 << 20
"""Of each file; a picture has some 20 KB."""


def found_by_tune(folder: Path | None) -> dict[str, Any]:
    """Return the sentences that a tune wrote, and its picture as SVG. folder: the model's; None: it has none here.

    No sentences, and None, where the files are not there or cannot be read.
    """
    if folder is None:
        return {"reasons": [], "picture": None}
    lines = _text(folder / SETTINGS_FILE).splitlines()
    reasons = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    return {"reasons": reasons, "picture": _text(folder / PICTURE_FILE) or None}


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError):
        return ""
    return text if len(text) <= MOST_BYTES else ""
