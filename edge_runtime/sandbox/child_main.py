"""The entry of every child process: confine it, decode its task, call its function, report the result.

A process that was forked from a prepared parent does the same without the start: `call_function`.
Started by child.py as `python -m edge_runtime.sandbox.child_main FUNCTION CONFINEMENT REPORTS`, with the task as JSON
on standard input. FUNCTION is `module:name` of a module-level function `(task, progress) -> result`; its annotations
say what the JSON is decoded to. CONFINEMENT is a Confinement as JSON. REPORTS is a file descriptor for one JSON line a
report, "-" for none: standard output and standard error stay free for libraries to print on. The plug-ins in use are
those of the process that started it. Imports only what every child needs.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from edge_runtime import plugins
from edge_runtime.errors import EdgeRuntimeError, shortened
from edge_runtime.sandbox.confinement import Confinement
from edge_runtime.sandbox.ending import ChildError, ChildReport, ChildResult, ChildStage
from edge_runtime.sandbox.processes import GONE_S, LEAVE_S, end_followers, leaders_below


def main(arguments: Sequence[str]) -> int:
    """Do the task on standard input. Exit status 0 when the function returned."""
    name, confinement, descriptor = arguments
    confined = msgspec.json.decode(confinement, type=Confinement)
    confined.apply()
    plugins.use_as_parent(os.environ)
    data = sys.stdin.buffer.read()
    status = call_function(name, data, os.open(os.devnull, os.O_WRONLY) if descriptor == "-" else int(descriptor))
    if confined.has_children:  # once this process has ended, nobody finds those that lead a session of their own
        end_followers(leaders_below(os.getpid()), os.getpid(), GONE_S, LEAVE_S)
    return status


def call_function(name: str, data: bytes, descriptor: int) -> int:
    """Call `module:name` with a task as JSON, and report to a descriptor. Returns 0 when the function returned."""
    with os.fdopen(descriptor, "wb") as reports:
        os.set_inheritable(reports.fileno(), False)
        last = _run(name, data, reports)
        _send(reports, last)
    return 0 if isinstance(last, ChildResult) else 1


def _run(name: str, data: bytes, reports: BinaryIO) -> ChildResult | ChildError:
    """Call the function; an exception of it is a report. An installation that lacks the function ends without one."""
    module, _, function_name = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), function_name)
    task = msgspec.json.decode(data, type=next(iter(typing.get_type_hints(function).values())))
    try:
        result = function(task, lambda stage, share=None: _send(reports, ChildStage(stage, share)))
        return ChildResult(msgspec.Raw(msgspec.json.encode(result)))
    except EdgeRuntimeError as error:
        return ChildError(error.message, error.code)
    except MemoryError as error:
        return ChildError(str(error) or "there is not enough memory for it")
    except Exception as error:  # noqa: BLE001  a library's unexpected exception is a failure of the task too
        traceback.print_exc()
        return ChildError(shortened(f"{type(error).__name__}: {error}"))


def _send(reports: BinaryIO, report: ChildReport) -> None:
    reports.write(msgspec.json.encode(report) + b"\n")
    reports.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
