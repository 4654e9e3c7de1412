"""Child processes, seen from their parent: start one, feed it its task, watch it, end it with all that it started.

Owns: the process, its environment, and how much of its output is kept. `run_child` is for a task with an end;
`start_child` and `end_child` are for a child that lives on and is talked to over a channel of its own. The thread that
starts a child must outlive it, because the kernel ends a child with the thread that made it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

import edge_runtime
from edge_runtime.sandbox.confinement import Confinement
from edge_runtime.sandbox.ending import (
    Cause,
    ChildError,
    ChildLimits,
    ChildReport,
    ChildResult,
    ChildStage,
    Ending,
    ResultT,
    ShowProgress,
    judge_ending,
)
from edge_runtime.sandbox.process_memory import resident_bytes

TaskT = TypeVar("TaskT")

MAX_REPORT_BYTES = 1 << 20
"""Of one line: a description of a model with a thousand tensors has a tenth of it."""

SHOWN_CHARACTERS = 600
"""Of the end of what a child prints, and of a stage."""

_LOOK_S = 0.1
"""How long a stop, a limit or the child's end goes unnoticed at most."""

_LAST_READS = 4
"""After a child's end; one takes all that a pipe holds by default (64 KiB, pipe(7))."""

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES")


Show = Callable[[str, float | None], None]
"""Takes a stage of a child's work, and the share done, from 0 to 1, where it is known."""

ChildFunction = Callable[[TaskT, ShowProgress], ResultT]
"""A module-level function that a child calls: typed for msgspec, with its heavy imports inside."""


def run_child(
    function: ChildFunction[TaskT, ResultT],
    task: TaskT,
    *,
    limit_s: float,
    memory_bytes: int | None = None,
    niceness: int = 0,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    stop: threading.Event | None = None,
    show: Show | None = None,
) -> Ending[ResultT]:
    """Call `function(task, progress)` in a child process, and wait until it ends or is ended.

    reads, writes: the folders and files that it may read, and those that it may change too; of the disk it sees only
    these and what every program needs, where the kernel has Landlock. memory_bytes: resident memory that it may take,
    checked every tenth of a second; None where it limits itself. stop: set to end it early. show: gets its progress, on
    this thread. Leaves no process. Raises OSError: no process can be made now.
    """
    limits = ChildLimits(limit_s, memory_bytes)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reports:
        try:
            child = start_child(
                function,
                task,
                niceness=niceness,
                reads=reads,
                writes=writes,
                reports=writer,
                stdout=subprocess.PIPE,
            )
        finally:
            os.close(writer)
        assert child.stdout is not None
        with child.stdout as printed:
            pipes = reports.fileno(), printed.fileno()
            return follow_child(_Started(child), function, pipes, limits=limits, stop=stop, show=show)


class WatchedChild(Protocol):
    """A child process at work on a function, whichever process made it."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...

    def end(self) -> int:
        """Kill it with all that it started; returns its exit status, negative for a signal's number."""
        ...


def follow_child(
    child: WatchedChild,
    function: ChildFunction[Any, ResultT],
    pipes: tuple[int, int],
    *,
    limits: ChildLimits,
    stop: threading.Event | None = None,
    show: Show | None = None,
) -> Ending[ResultT]:
    """Wait until a child ends or is ended. pipes: its reports, and what it prints. The rest is as of `run_child`."""
    output = _Output(*pipes, show)
    try:
        ended_for = _watch(child, output, limits, stop or threading.Event())
    finally:
        status = child.end()
    return judge_ending(
        status,
        ended_for=ended_for,
        report=output.last,
        result_type=typing.get_type_hints(function)["return"],
        said=output.said.decode(errors="replace").strip()[-SHOWN_CHARACTERS:],
        limits=limits,
    )


def start_child(
    function: ChildFunction[TaskT, Any],
    task: TaskT,
    *,
    stdout: Any,
    niceness: int = 0,
    has_network: bool = False,
    reads: Sequence[Path] | None = None,
    writes: Sequence[Path] = (),
    reports: int | None = None,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child that calls `function(task, progress)`; `end_child` must end it.

    stdout: as for Popen; standard error goes there too. niceness, has_network, reads, writes: see Confinement. One with
    network that sees only a part of the disk opens no Unix sockets.
    reports: the descriptor that it writes its progress and result to, None for nowhere. environment: in place of the
    few variables that a child gets otherwise. Raises OSError.
    """
    own = [] if reports is None else [reports]
    seen = None if reads is None else tuple(map(os.path.abspath, reads))
    confinement = Confinement(
        os.getpid(), niceness, has_network, seen, tuple(map(os.path.abspath, writes)), has_unix=seen is None
    )
    with os.fdopen(os.memfd_create("task"), "w+b", buffering=0) as source:
        source.write(msgspec.json.encode(task))
        source.seek(0)
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "edge_runtime.sandbox.child_main"),
                *(f"{function.__module__}:{function.__name__}", msgspec.json.encode(confinement).decode()),
                "-" if reports is None else str(reports),
            ],
            stdin=source,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            pass_fds=(*own, *pass_fds),
            cwd="/",  # `-m` puts the working folder on the path; it could hold anything
            env=_environment(environment),
            start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends the child
        )


def is_alive(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child still runs. Does not reap it, so that its process group stays its own until `end_child`."""
    if child.returncode is not None:
        return False
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with all that it started, and reap it. Idempotent."""
    if child.returncode is None:
        # Invariant: not reaped yet, so the group's number cannot belong to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


# ---- private --------------------------------------------------------------------------------------------------------


class _Started:
    """A child of this process. A WatchedChild."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid = child.pid

    def is_alive(self) -> bool:
        return is_alive(self._child)

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> int:
        end_child(self._child)
        status: int = self._child.returncode
        return status


class _Output:
    """What a child has reported and printed so far."""

    def __init__(self, reports: int, printed: int, show: Show | None) -> None:
        self.last: ChildResult | ChildError | None = None
        self.said = b""
        self._reports = reports
        self._printed = printed
        self._show = show
        self._line = b""

    def take(self, descriptor: int, piece: bytes) -> None:
        """Keep the end of what it printed; decode its reports line by line."""
        if descriptor == self._printed:
            self.said = (self.said + piece)[-4 * SHOWN_CHARACTERS :]
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            self._take_line(line)
        if len(self._line) > MAX_REPORT_BYTES:
            self._line = b""

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._reports, self._printed

    def _take_line(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=ChildReport)
        except msgspec.MsgspecError:  # a broken or hostile child
            return
        if not isinstance(report, ChildStage):
            self.last = report
        elif self._show is not None:
            share = None if report.share is None else min(max(report.share, 0.0), 1.0)
            self._show(report.stage[:SHOWN_CHARACTERS], share)


def _watch(child: WatchedChild, output: _Output, limits: ChildLimits, stop: threading.Event) -> Cause | None:
    """Read until the child ended or has to be; returns why it has to be ended, None where it ended by itself."""
    deadline_s = time.monotonic() + limits.limit_s
    ended_for: Cause | None = None
    with selectors.DefaultSelector() as selector:
        for descriptor in output.descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while child.is_alive() and ended_for is None:
            if selector.get_map():
                _read(selector, output, _LOOK_S)
            else:
                stop.wait(_LOOK_S)
            if stop.is_set():
                ended_for = Cause.STOPPED
            elif time.monotonic() >= deadline_s:
                ended_for = Cause.TIMED_OUT
            elif limits.memory_bytes is not None and resident_bytes(child.pid) > limits.memory_bytes:
                ended_for = Cause.TOO_LARGE
        if ended_for is not None:
            child.kill()
        # A process that it started may hold the pipes open, and write without end: what they hold now is read, no more.
        for _ in range(_LAST_READS):
            if not (selector.get_map() and _read(selector, output, 0.0)):
                break
    return ended_for


def _read(selector: selectors.BaseSelector, output: _Output, wait_s: float) -> bool:
    """Read what is there; False where nothing is."""
    ready = selector.select(wait_s)
    for key, _ in ready:
        piece = os.read(key.fd, 1 << 16)
        if piece:
            output.take(key.fd, piece)
        else:
            selector.unregister(key.fd)
    return bool(ready)


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """What libraries need of the environment; keys and passphrases may be in it too, and a model may be hostile."""
    if given is None:
        given = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    package = str(Path(edge_runtime.__file__).resolve().parents[1])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}
