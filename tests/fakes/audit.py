"""What a piece of code asks of the file system, seen through the interpreter's audit events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

FILE_EVENTS = frozenset(
    ("open", "os.listdir", "os.scandir", "os.chdir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link",
     "os.symlink", "os.truncate", "shutil.rmtree", "glob.glob")
)  # fmt: skip

_listeners: list[list[str]] = []


@contextmanager
def files_touched() -> Iterator[list[str]]:
    """Paths of every audited file event while the block runs, in order. Events that carry no path are left out."""
    if _hook not in _installed:
        # An audit hook cannot be taken off again: one for the process, silent while nobody listens.
        sys.addaudithook(_hook)
        _installed.append(_hook)
    touched: list[str] = []
    _listeners.append(touched)
    try:
        yield touched
    finally:
        # By identity: two lists may be equal.
        _listeners[:] = [listener for listener in _listeners if listener is not touched]


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _listeners and event in FILE_EVENTS and arguments and not isinstance(arguments[0], int):
        for listener in _listeners:
            listener.append(str(arguments[0]))


_installed: list[object] = []
