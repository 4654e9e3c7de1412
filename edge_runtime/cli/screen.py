"""What a person sees: tables, colours on a terminal, a spinner while something takes long, and numbers with units.

Owns: how results look. Results go to stdout, everything else to stderr. Colours only on a terminal, never with
NO_COLOR set (no-color.org) or TERM=dumb.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from edge_runtime.cli.progress import Progress

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}

STATE_STYLES = {
    "ready": "green",
    "failed": "red",
    "loading": "yellow",
    "unloading": "yellow",
    "refused": "red",
    "not served": "red",
    "put off": "yellow",
}


class Screen:
    """Where a verb prints. wants_json: results are one JSON document; `show` and `result` choose."""

    def __init__(self, out: TextIO, err: TextIO, *, wants_json: bool = False) -> None:
        self._out = out
        self._err = err
        self.wants_json = wants_json
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._colours = {out: out.isatty() and not is_plain, err: err.isatty() and not is_plain}
        self.is_terminal = out.isatty()

    def line(self, text: str = "") -> None:
        """One line of the result."""
        print(text, file=self._out)

    def json(self, value: Any) -> None:
        """The result as one JSON document."""
        print(json.dumps(value, indent=2, ensure_ascii=False, default=str), file=self._out)

    def note(self, text: str) -> None:
        """Something that is not the result."""
        print(text, file=self._err)

    def error(self, text: str) -> None:
        """One paragraph that says what went wrong."""
        print(f"{self._painted('edge-runtime:', 'red', self._err)} {text}", file=self._err, flush=True)

    def failure(self, message: str, code: str, retryable: bool) -> None:
        """What went wrong, for the person on stderr and, with --json, for the program on stdout."""
        if self.wants_json:
            self.json({"error": {"code": code, "message": message, "retryable": retryable}})
        self.error(message)

    def painted(self, text: str, style: str) -> str:
        """Text in a colour or weight, when the result goes to a terminal."""
        return self._painted(text, style, self._out)

    def heading(self, text: str) -> None:
        """A line that stands out."""
        self.line(self.painted(text, "bold"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Columns as wide as their widest cell; those named in `right` are numbers."""
        widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
        self.line(self.painted(self._row(columns, columns, widths, right), "dim"))
        for row in rows:
            line = self._row(columns, row, widths, right)
            style = STATE_STYLES.get(row[columns.index("state")]) if "state" in columns else None
            self.line(self.painted(line, style) if style in ("red", "yellow") else line)

    def fields(self, values: Mapping[str, str]) -> None:
        """Names and values, one a line; empty values are left out."""
        shown = {name: value for name, value in values.items() if value}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.line(f"  {self.painted(name.ljust(width), 'dim')}  {value}")

    def clear(self) -> None:
        """Empty the terminal, for a picture that is drawn again."""
        if self.is_terminal:
            print("\x1b[H\x1b[2J", end="", file=self._out)

    def flush(self) -> None:
        """Let everything be seen now."""
        self._out.flush()

    @contextmanager
    def progress(self, label: str, limit_s: float | None = None) -> Iterator[Progress]:
        """Show on stderr that something takes its time: a spinner with the time on a terminal, else one line.

        limit_s: how long it will take, where that is known.
        """
        progress = Progress(self._err, label, lambda text, style: self._painted(text, style, self._err), limit_s)
        progress.start()
        try:
            yield progress
        finally:
            progress.close()

    def _painted(self, text: str, style: str, where: TextIO) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colours[where] else text

    @staticmethod
    def _row(columns: Sequence[str], cells: Sequence[str], widths: Sequence[int], right: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        )
        return "  ".join(padded).rstrip()


def size_text(nbytes: float | None) -> str:
    """Bytes as a person reads them: 9.1 MiB. Empty when nobody knows."""
    if nbytes is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def ms_text(milliseconds: float | None) -> str:
    """Milliseconds with three digits that matter; a dash when nothing was measured."""
    if milliseconds is None:
        return "-"
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    return (
        f"{milliseconds:.1f}"
        if milliseconds >= 10
        else f"{milliseconds:.3f}"
        if milliseconds < 1
        else f"{milliseconds:.2f}"
    )


def rate_text(rate: float | None) -> str:
    """Requests per second."""
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def duration_text(seconds: float | None) -> str:
    """A length of time as a person reads it: 3 d 4 h, 2 min 5 s."""
    if seconds is None:
        return ""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def stdin_text() -> str:
    """All of standard input."""
    return sys.stdin.read()
