"""What was changed lately, for long tests of what rarely changes: they run while a week has touched it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def when_changed(*paths: str) -> pytest.MarkDecorator:
    """Skip a test where no commit of the last seven days touched these. Without git's history it runs."""
    return pytest.mark.skipif(_nothing_changed(paths), reason=f"no commit of a week touched {' '.join(paths)}")


def _nothing_changed(paths: tuple[str, ...]) -> bool:
    try:
        done = subprocess.run(
            ["git", "log", "--since=7 days ago", "--format=%h", "--", *paths],
            cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        return False
    return done.returncode == 0 and not done.stdout
