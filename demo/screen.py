"""The output of a demonstration: steps with their time, tables, colours on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Screen:
    """Plain lines on standard output; colours and lines that change only on a terminal without NO_COLOR."""

    def __init__(self) -> None:
        self.is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = self.is_live and not os.environ.get("NO_COLOR")

    def paint(self, text: str, *styles: str) -> str:
        """The text in styles of `_STYLES`; plain without colours."""
        if not self._has_colours or not styles:
            return text
        return f"\033[{';'.join(_STYLES[style] for style in styles)}m{text}\033[0m"

    def line(self, text: str = "") -> None:
        """One line, at once."""
        print(text, flush=True)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A titled part; its end shows its time."""
        self.line("\n" + self.paint(title, "bold", "cyan"))
        start = time.perf_counter()
        yield
        self.line(self.paint(f"  {time.perf_counter() - start:.1f} s", "dim"))

    def progress(self, text: str) -> None:
        """Show a line that the next one replaces; nothing without a terminal."""
        if self.is_live:
            print(f"\r\033[K  {text}", end="", flush=True)

    def end_progress(self) -> None:
        """Erase the changing line."""
        if self.is_live:
            print("\r\033[K", end="", flush=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> None:
        """Columns as wide as they need; the first `words` columns to the left, numbers to the right."""
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for number, row in enumerate((head, *rows)):
            cells = [
                text.ljust(width) if column < words else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line(self.paint("  " + "  ".join(cells).rstrip(), *(["dim"] if number == 0 else [])))
