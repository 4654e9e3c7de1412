"""What a person sees on stderr while something takes long: a spinner with a bar on a terminal, else a line a step.

Owns: one line of the terminal, from `start` to `close`. Thread: any; the spinner has a thread of its own.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_S = 0.1
BAR_CELLS = 24
"""A cell is 4 %; the line stays within 80 columns."""

Paint = Callable[[str, str], str]
"""Text and the name of a style to text in it, where there are colours."""


class Progress:
    """What is waited for. `start` once, `close` at the end; idempotent."""

    def __init__(self, where: TextIO, label: str, paint: Paint, limit_s: float | None = None) -> None:
        """limit_s: how long it will take, where that is known."""
        self._where = where
        self._paint = paint
        self._limit_s = limit_s
        self._shown: tuple[str, str, float | None] = (label, "", None)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Say what is begun."""
        if not self._where.isatty():
            self._print_label()
            return
        self._thread = threading.Thread(target=self._spin, name="spinner")
        self._thread.start()

    def show(self, label: str, detail: str = "", share: float | None = None) -> None:
        """What is done now. detail: what changes often, for a terminal only. share: 0 to 1, drawn as a bar."""
        is_new = label != self._shown[0]
        self._shown = (label, detail, share)
        if is_new and self._thread is None:
            self._print_label()

    def close(self) -> None:
        """Give the line back, empty."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        self._thread = None
        print("\r\x1b[K", end="", file=self._where, flush=True)

    def _print_label(self) -> None:
        print(f"{self._shown[0]} …", file=self._where, flush=True)

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
            sign = self._paint(SPINNER[turn % len(SPINNER)], "blue")
            # What is longer than a line would stay on the screen.
            text = "  ".join(filter(None, parts))[: shutil.get_terminal_size().columns - 3]
            print(f"\r\x1b[K{sign} {text}", end="", file=self._where, flush=True)


def bar_text(share: float) -> str:
    """A share of 0 to 1 as a bar; what is beyond is cut off."""
    full = int(min(max(share, 0.0), 1.0) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)
