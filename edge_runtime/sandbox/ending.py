"""How a child process ended: the reports that it sends, and the one table that turns an ending into a cause and a text.

Owns: the causes and their texts. Does no I/O. Used by child.py, child_main.py, and by every caller that decides what an
ending means for a release, an engine or a model.
"""

from __future__ import annotations

import math
import signal
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from edge_runtime.errors import shortened
from edge_runtime.sandbox.processes import MAX_PROCESSES

ResultT = TypeVar("ResultT")


class Cause(Enum):
    """Why a child ended."""

    RETURNED = "returned"
    RAISED = "raised"
    STOPPED = "stopped"
    TIMED_OUT = "timed out"
    TOO_LARGE = "too large"
    CROWDED = "crowded"
    OVERFULL = "overfull"
    IDLE = "idle"
    KILLED = "killed"
    CRASHED = "crashed"
    SILENT = "silent"


MAX_FILES = 16 << 10
"""In a folder that a child writes to: none needs a hundredth, and they are counted and removed while a stop waits."""

_REASONS = {
    Cause.RETURNED: "",
    Cause.RAISED: "{error}",
    Cause.STOPPED: "it was stopped",
    Cause.TIMED_OUT: "it was not done within {limit_s:g} s",
    Cause.TOO_LARGE: "it took more than the {memory_bytes} bytes of memory that it may have",
    Cause.CROWDED: f"it had more than {MAX_PROCESSES} processes, and was ended",
    Cause.OVERFULL: f"it wrote more than the {{folder_bytes}} bytes or {MAX_FILES} files that it may have",
    Cause.IDLE: "it did nothing for {idle_s:g} s, and was ended",
    # The parent kills a child only for the causes above; else the kernel does, which frees memory so.
    Cause.KILLED: "{killed_for}",
    Cause.CRASHED: "its process was ended by {signal}{said}",
    Cause.SILENT: "its process ended with exit status {status} and no result{said}",
}
"""Each text is a sentence about "it", the work, so that it can stand alone or after a colon."""


_BY_THE_KERNEL = "its process was killed (SIGKILL); is the device out of memory?"

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ChildStage(Struct, frozen=True, tag="stage"):
    """A line from a child: its present stage of work, and the share done, from 0 to 1, where it is known."""

    stage: str
    share: float | None = None


class ChildResult(Struct, frozen=True, tag="result"):
    """The last line from a child whose function returned."""

    result: msgspec.Raw


class ChildError(Struct, frozen=True, tag="error"):
    """The last line from a child whose function raised. code: of an EdgeRuntimeError, "" for any other exception."""

    error: str
    code: str = ""


ChildReport = ChildStage | ChildResult | ChildError


class ShowProgress(Protocol):
    """Called with each step of the work, by a child's function or its parent."""

    def __call__(self, stage: str, share: float | None = None, /) -> None:
        """Take a stage of work, and the share done, from 0 to 1, where it is known."""
        ...


class ChildLimits(Struct, frozen=True):
    """When the parent ends a child. memory_bytes: resident memory of it and all that it started, None for no limit.

    idle_s: how long they may take no CPU. folder: that it writes to; "" where that is not looked at. folder_bytes: what
    may be in it. spared_bytes: what is to stay free of its disk.
    """

    limit_s: float = 0.0
    memory_bytes: int | None = None
    idle_s: float = math.inf
    folder: str = ""
    folder_bytes: int = 0
    spared_bytes: int = 0


NO_LIMITS = ChildLimits()


class Ending(Struct, Generic[ResultT], frozen=True):
    """How a child ended. result: of the function, where the cause is RETURNED. reason: a sentence, "" for RETURNED.

    code: of the EdgeRuntimeError that the child's function raised, else "".
    """

    cause: Cause
    reason: str = ""
    result: ResultT | None = None
    code: str = ""


def judge_ending(
    status: int,
    *,
    ended_for: Cause | None = None,
    report: ChildResult | ChildError | None = None,
    result_type: Any = Any,
    output_text: str = "",
    killed_for: str = "",
    limits: ChildLimits = NO_LIMITS,
) -> Ending[Any]:
    """Judge a child by its exit status (negative: a signal's number) and its last report.

    ended_for: why the parent ended it, None where it ended by itself. output_text: the end of what it printed.
    killed_for: why another process of ours killed it, "" where none did. A crash counts more than a report sent before
    it; a report counts more than a SIGKILL after it.
    """
    has_result, result = _decoded(report, result_type)
    error = report if isinstance(report, ChildError) else ChildError("")
    if ended_for is not None:
        cause = ended_for
    elif status < 0 and -status != signal.SIGKILL:
        cause = Cause.CRASHED
    elif has_result:
        cause = Cause.RETURNED
    elif isinstance(report, ChildError):
        cause = Cause.RAISED
    else:
        cause = Cause.KILLED if status < 0 else Cause.SILENT
    reason = _REASONS[cause].format(
        error=shortened(error.error),  # the child cuts it too, unless it is hostile
        limit_s=limits.limit_s,
        memory_bytes=limits.memory_bytes,
        folder_bytes=limits.folder_bytes,
        idle_s=limits.idle_s,
        killed_for=killed_for or _BY_THE_KERNEL,
        signal=signal_name(status),
        status=status,
        said=f": {output_text}" if output_text else "",
    )
    return Ending(
        cause,
        reason,
        result if cause is Cause.RETURNED else None,
        error.code if cause is Cause.RAISED else "",
    )


def is_from_outside(status: int, *, memory_ran_out: bool) -> bool:
    """Whether a person or a service manager ended a process: by a signal that no crash is.

    memory_ran_out: whether the kernel killed some process for its memory meanwhile.
    """
    return -status in _FROM_OUTSIDE and not (-status == signal.SIGKILL and memory_ran_out)


def signal_name(status: int) -> str:
    """Return the name of the signal in an exit status; "" where the process ended by itself."""
    if status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {-status}"


def _decoded(report: ChildResult | ChildError | None, result_type: Any) -> tuple[bool, Any]:
    """Whether there is a result of this type, and the result."""
    if not isinstance(report, ChildResult):
        return False, None
    try:
        return True, msgspec.json.decode(report.result, type=result_type)
    except (msgspec.MsgspecError, RecursionError):  # a hostile one is nested without end
        return False, None
