"""Prints for a person: tables, colours on a terminal, progress while something takes long, and numbers with units.

Owns: how results look. Results go to stdout, everything else to stderr. Colours only on a terminal, never with
NO_COLOR set (no-color.org) or TERM=dumb.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_S = 0.1
BAR_CELLS = 24
"""4 % each; the line stays within 80 columns."""

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}

_CONTROL = re.compile(r"\x1b(?!\[[0-9;]{1,8}m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")

STATE_STYLES = {
    "ready": "green",
    "failed": "red",
    "loading": "yellow",
    "building": "yellow",
    "converting": "yellow",
    "unloading": "yellow",
    "refused": "red",
    "not served": "red",
    "not_served": "yellow",
    "put off": "yellow",
}


class Screen:
    """Prints a verb's results and notes. wants_json: results are one JSON document."""

    def __init__(self, out: TextIO, err: TextIO, *, wants_json: bool = False) -> None:
        self._out = out
        self._err = err
        self.wants_json = wants_json
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._colours = {out: out.isatty() and not is_plain, err: err.isatty() and not is_plain}
        self.is_terminal = out.isatty()

    def line(self, text: str = "") -> None:
        """Print one line of the result."""
        print(harmless(text), file=self._out)

    def piece(self, text: str) -> None:
        """Print a piece of the result at once, without a line's end."""
        print(harmless(text), end="", file=self._out, flush=True)

    def json(self, value: Any) -> None:
        """Print the result as one JSON document."""
        print(json.dumps(value, indent=2, ensure_ascii=False, default=str), file=self._out)

    def note(self, text: str) -> None:
        """Print a line beside the result."""
        print(harmless(text), file=self._err)

    def error(self, text: str) -> None:
        """Print an error as one paragraph."""
        print(f"{self._painted('edge-runtime:', 'red', self._err)} {harmless(text)}", file=self._err, flush=True)

    def failure(self, message: str, code: str, retryable: bool) -> None:
        """Print a failure: for a person on stderr and, with --json, for a program on stdout."""
        if self.wants_json:
            self.json({"error": {"code": code, "message": message, "retryable": retryable}})
        self.error(message)

    def painted(self, text: str, style: str) -> str:
        """Style a text when the result goes to a terminal."""
        return self._painted(text, style, self._out)

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.line(self.painted(text, "bold"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Print columns as wide as their widest cell; those named in `right` are numbers."""
        widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
        self.line(self.painted(self._row(columns, columns, widths, right), "dim"))
        for row in rows:
            line = self._row(columns, row, widths, right)
            style = STATE_STYLES.get(row[columns.index("state")]) if "state" in columns else None
            self.line(self.painted(line, style) if style in ("red", "yellow") else line)

    def fields(self, values: Mapping[str, str]) -> None:
        """Print names and values, one a line, without empty values; further lines of a value below its first."""
        shown = {name: value for name, value in values.items() if value}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            below = value.replace("\n", "\n" + " " * (width + 4))
            self.line(f"  {self.painted(name.ljust(width), 'dim')}  {below}")

    def clear(self) -> None:
        """Empty the terminal before a picture is drawn again."""
        if self.is_terminal:
            print("\x1b[H\x1b[2J", end="", file=self._out)

    def flush(self) -> None:
        """Flush the results."""
        self._out.flush()

    @contextmanager
    def progress(self, label: str, limit_s: float | None = None) -> Iterator[Progress]:
        """Show progress on stderr: a spinner with the time on a terminal, else one line.

        limit_s: how long it will take, if known.
        """
        progress = Progress(self._err, label, limit_s, has_colours=self._colours[self._err])
        progress.start()
        try:
            yield progress
        finally:
            progress.close()

    def _painted(self, text: str, style: str, where: TextIO) -> str:
        return styled(text, style) if self._colours[where] else text

    @staticmethod
    def _row(columns: Sequence[str], cells: Sequence[str], widths: Sequence[int], right: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        )
        return "  ".join(padded).rstrip()


class Progress:
    """Progress of one task on stderr. `start` once, then `close`, which is idempotent."""

    def __init__(self, where: TextIO, label: str, limit_s: float | None = None, *, has_colours: bool) -> None:
        """limit_s: how long it will take, if known."""
        self._where = where
        self._has_colours = has_colours
        self._limit_s = limit_s
        self._shown: tuple[str, str, float | None] = (label, "", None)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show the label."""
        if not self._where.isatty():
            self._print_label()
            return
        self._thread = threading.Thread(target=self._spin, name="spinner")
        self._thread.start()

    def show(self, label: str, detail: str = "", share: float | None = None) -> None:
        """Show the current step. detail: changes often, for a terminal only. share: 0 to 1, drawn as a bar."""
        is_new = label != self._shown[0]
        self._shown = (label, detail, share)
        if is_new and self._thread is None:
            self._print_label()

    def close(self) -> None:
        """Empty the line."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        self._thread = None
        print("\r\x1b[K", end="", file=self._where, flush=True)

    def _print_label(self) -> None:
        print(f"{harmless(self._shown[0])} …", file=self._where, flush=True)

    def _spin(self) -> None:
        began_s = time.monotonic()
        turn = 0
        while not self._is_over.wait(SPIN_S):
            label, detail, share = self._shown
            elapsed = f"{time.monotonic() - began_s:.1f} s"
            if self._limit_s is not None:
                elapsed += f" of {self._limit_s:g} s"
            turn += 1
            parts = (label, "" if share is None else bar_text(share), detail, elapsed)
            sign = SPINNER[turn % len(SPINNER)]
            sign = styled(sign, "blue") if self._has_colours else sign
            import shutil

            # A text longer than a line would stay on the screen.
            text = harmless("  ".join(filter(None, parts)))[: shutil.get_terminal_size().columns - 3]
            print(f"\r\x1b[K{sign} {text}", end="", file=self._where, flush=True)


def harmless(text: str) -> str:
    """Return a text whose control characters are written out, but for line's ends, tabs and styles.

    Names in an archive, labels and answers are other people's: a terminal would obey what is in them.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def styled(text: str, style: str) -> str:
    """Return a text with the escape sequences of a style."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def bar_text(share: float) -> str:
    """Draw a share of 0 to 1 as a bar."""
    full = int(min(max(share, 0.0), 1.0) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)


def size_text(nbytes: float | None) -> str:
    """Write bytes: 9.1 MiB. Empty for None."""
    if nbytes is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape, with a question mark for an open dimension."""
    return f"[{', '.join('?' if length < 0 else str(length) for length in shape)}]"


def ms_text(milliseconds: float | None) -> str:
    """Write milliseconds with three significant digits; a dash for None."""
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
    """Write requests per second; a dash for None."""
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def duration_text(seconds: float | None) -> str:
    """Write a length of time: 3 d 4 h, 2 min 5 s. Empty for None."""
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
    """Read all of standard input."""
    return sys.stdin.read()
