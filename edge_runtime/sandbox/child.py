"""Child processes, seen from their parent: start one, feed it its task, watch it, end it with all that it started.

Owns: the process, its environment, and how much of its output is kept. `run_child` is for a task with an end;
`start_child` is for a child that lives on and is talked to over a channel of its own. The thread that starts a child
must outlive it, because the kernel ends a child with the thread that made it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

import edge_runtime
from edge_runtime import plugins
from edge_runtime.sandbox.confinement import Confinement
from edge_runtime.sandbox.ending import (
    MAX_FILES,
    NO_LIMITS,
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
from edge_runtime.sandbox.folder_tree import FILE_BYTES, tree_bytes
from edge_runtime.sandbox.process_memory import proportional_bytes, resident_bytes
from edge_runtime.sandbox.processes import (
    GONE_S,
    LEAVE_S,
    MAX_PROCESSES,
    cpu_ticks,
    end_followers,
    leaders_below,
    members,
)

if TYPE_CHECKING:
    import subprocess

log = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")

MAX_REPORT_BYTES = 1 << 20
"""Of one line: a description of a model with a thousand tensors has a tenth of it."""

SHOWN_CHARACTERS = 600
"""Of the end of what a child prints, and of a stage."""

_LOOK_S = 0.1
"""How long a stop, a limit or the child's end goes unnoticed at most."""

_LOOK_CLOSELY_S = 1.0
"""How long what a child started and wrote goes unnoticed at most, but for what such a look takes, five times over."""

_LAST_READS = 4
"""After a child's end; one takes all that a pipe holds by default (64 KiB, pipe(7))."""

_READS_A_LOOK = 16
"""A child that prints more than 10 MB a second waits: reading it without end would cost its parent a core."""

_PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"
)  # fmt: skip

_NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
"""ONNX Runtime reads it at import, also where a `model.py` imports it; the parent's own value goes before."""

Show = Callable[[str, float | None], None]
"""Takes a stage of a child's work, and the share done, from 0 to 1, where it is known."""

ChildFunction = Callable[[TaskT, ShowProgress], ResultT]
"""A module-level function that a child calls: typed for msgspec, with its heavy imports inside."""

_REPORTS = msgspec.json.Decoder(ChildReport)
"""Made by the thread that imports this module: msgspec 0.22 reads a type half made where several begin with it."""


def named_files(*places: Path) -> Iterator[Path]:
    """Yield files and folders that a person named, for `reads`, and the plain files that they or links in them are."""
    for place in places:
        yield place
        links = [place] if not place.is_dir() else [each for each in place.iterdir() if each.is_symlink()]
        yield from (each.resolve() for each in links if each.is_file())


def run_child(
    function: ChildFunction[TaskT, ResultT],
    task: TaskT,
    *,
    limit_s: float,
    memory_bytes: int | None = None,
    written: ChildLimits = NO_LIMITS,
    niceness: int = 0,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    within: tuple[str, ...] = (),
    has_children: bool = False,
    starts_none: bool = False,
    stop: threading.Event | None = None,
    show: Show | None = None,
) -> Ending[ResultT]:
    """Call `function(task, progress)` in a child process, and wait until it ends or is ended.

    reads, writes: the folders and files that it may read, and those that it may change too; of the disk it sees only
    these and what every program needs, where the kernel has Landlock. memory_bytes: resident memory that it may take,
    checked every tenth of a second; None where it limits itself. written: limits of what it writes and does. within,
    has_children, starts_none: as of Confinement. stop: set to end it early. show: gets its progress, on this thread.
    Leaves no process. Raises OSError: no process can be made now.
    """
    limits = replace(written, limit_s=limit_s, memory_bytes=memory_bytes)
    with ChildOutput() as output:
        child = start_child(
            function,
            task,
            niceness=niceness,
            reads=reads,
            writes=writes,
            within=within,
            has_children=has_children,
            starts_none=starts_none,
            stdout=output.prints,
            reports=output.reports,
        )
        return follow_child(child, function, output, limits=limits, stop=stop, show=show)


class WatchedChild(Protocol):
    """A child process at work on a function, whichever process made it."""

    @property
    def pid(self) -> int:
        """Its number, which is its group's too."""
        ...

    @property
    def ended_for(self) -> str:
        """Why a process of ours killed it that is not this one; "" where none did."""
        ...

    def is_alive(self) -> bool:
        """Return whether it runs."""
        ...

    def end(self) -> int:
        """Kill it with all that it started; returns its exit status, negative for a signal's number. Idempotent."""
        ...


def follow_child(
    child: WatchedChild,
    function: ChildFunction[Any, ResultT],
    output: ChildOutput,
    *,
    limits: ChildLimits,
    stop: threading.Event | None = None,
    show: Show | None = None,
) -> Ending[ResultT]:
    """Wait until a child that was given `output` ends or is ended. The other arguments are those of `run_child`."""
    output.close_theirs()
    killed_for = ""
    try:
        ended_for = _watch(child, output, limits, stop or threading.Event(), show)
        killed_for = child.ended_for
    finally:
        status = child.end()
    return judge_ending(
        status,
        ended_for=ended_for,
        report=output.last,
        result_type=typing.get_type_hints(function, include_extras=True)["return"],
        output_text=output.text,
        killed_for=killed_for,
        limits=limits,
    )


def start_child(
    function: ChildFunction[TaskT, Any] | str,
    task: TaskT,
    *,
    stdout: int | None = None,
    niceness: int = 0,
    has_network: bool = False,
    reads: Sequence[Path] | None = None,
    writes: Sequence[Path] = (),
    within: tuple[str, ...] = (),
    has_children: bool = False,
    starts_none: bool = False,
    reports: int | None = None,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a child that calls `function(task, progress)`; `Child.end` must end it.

    function: or its name, as `name_of` gives it, of one that is not imported here.
    stdout: the descriptor for its standard output and standard error; None for nowhere. niceness, has_network, reads,
    writes, within, has_children, starts_none: as of Confinement. One with network that sees only a part of the disk
    opens no Unix sockets. reports: the descriptor that it writes its progress and result to, None for nowhere.
    environment: in place of what `library_environment` gives. Raises OSError.
    """
    import subprocess

    own = [] if reports is None else [reports]
    seen = None if reads is None else tuple(map(os.path.abspath, reads))
    confinement = Confinement(
        os.getpid(),
        niceness,
        has_network,
        seen,
        tuple(map(os.path.abspath, writes)),
        within,
        has_unix=seen is None,
        has_children=has_children,
        starts_none=starts_none,
    )
    with os.fdopen(os.memfd_create("task"), "w+b", buffering=0) as source:
        source.write(msgspec.json.encode(task))
        source.seek(0)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "edge_runtime.sandbox.child_main"),
                function if isinstance(function, str) else name_of(function),
                msgspec.json.encode(confinement).decode(),
                "-" if reports is None else str(reports),
            ],
            stdin=source,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            pass_fds=(*own, *pass_fds),
            cwd="/",  # `-m` puts the working folder on the path; it could hold anything
            env={
                **(library_environment() if environment is None else environment),
                **plugins.for_children(),
                "PYTHONPATH": _python_path(),
            },
            start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends the child
        )
    return Child(process)


def name_of(function: Callable[..., Any]) -> str:
    """Return how a module-level function is named to a child process: `module:name`."""
    return f"{function.__module__}:{function.__name__}"


def library_environment() -> dict[str, str]:
    """Return the variables that libraries need: the environment may hold passphrases, and a model may be hostile."""
    named = (*_PASSED_ON, *_NO_TELEMETRY)
    return {**_NO_TELEMETRY, **{name: os.environ[name] for name in named if name in os.environ}}


class Child:
    """A child of this process. ended_for: as of WatchedChild; no other object ends it. Thread: one owner."""

    ended_for = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def is_alive(self) -> bool:
        """Return whether it runs. Does not reap it, so that its process group stays its own until `end`."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it alone; `end` must still end it."""
        self._process.kill()

    def end(self) -> int:
        """Kill it with all that it started, and reap it; returns its exit status. Idempotent."""
        if self._process.returncode is None:
            # Invariant: not reaped yet, so the numbers of its group and its session cannot belong to anybody else.
            theirs = leaders_below(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if not end_followers({self.pid}, self.pid, GONE_S) or not end_followers(theirs, self.pid, GONE_S, LEAVE_S):
                log.error("processes that a child started do not end", extra={"pid": self.pid})
            self._process.wait()
        return self._process.returncode


class ChildOutput:
    """The two pipes of a child, for its reports and for what it prints, and what has come of them so far.

    reports, prints: the child's ends. last: its last report that is not a stage. A context: its end closes all ends.
    """

    def __init__(self) -> None:
        """Raises OSError: there are no descriptors left."""
        self.last: ChildResult | ChildError | None = None
        self._said = b""
        self._line = b""
        with contextlib.ExitStack() as opened:
            self._theirs = opened.enter_context(contextlib.ExitStack())
            self._reports, self.reports = self._pipe(opened)
            self._printed, self.prints = self._pipe(opened)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(self._reports, selectors.EVENT_READ)
            self._selector.register(self._printed, selectors.EVENT_READ)
            self._opened = opened.pop_all()

    def __enter__(self) -> ChildOutput:  # noqa: PYI034 (typing.Self is 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def text(self) -> str:
        """The end of what it printed, at most SHOWN_CHARACTERS."""
        return self._said.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]

    @property
    def is_open(self) -> bool:
        """Whether anybody may still write."""
        return bool(self._selector.get_map())

    def read(self, wait_s: float, show: Show | None) -> bool:
        """Read the bytes that come within a time. Returns False where none came."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            piece = os.read(key.fd, 1 << 16)
            if not piece:
                self._selector.unregister(key.fd)
            elif key.fd == self._printed:
                self._said = (self._said + piece)[-4 * SHOWN_CHARACTERS :]
            else:
                self._take_reports(piece, show)
        return bool(ready)

    def close_theirs(self) -> None:
        """Close the child's ends here, once the child has them. Idempotent."""
        self._theirs.close()

    def _pipe(self, opened: contextlib.ExitStack) -> tuple[int, int]:
        reader, writer = os.pipe()
        opened.callback(os.close, reader)
        self._theirs.callback(os.close, writer)
        return reader, writer

    def _take_reports(self, piece: bytes, show: Show | None) -> None:
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            try:
                report = _REPORTS.decode(line)
            except (msgspec.MsgspecError, RecursionError):  # a broken or hostile child
                continue
            if not isinstance(report, ChildStage):
                self.last = report
            elif show is not None:
                share = None if report.share is None else min(max(report.share, 0.0), 1.0)
                show(report.stage[:SHOWN_CHARACTERS], share)
        if len(self._line) > MAX_REPORT_BYTES:
            self._line = b""


# ---- private --------------------------------------------------------------------------------------------------------


def _python_path() -> str:
    """This package's folder, then the paths that this process was given."""
    package = str(Path(edge_runtime.__file__).resolve().parents[1])
    return os.pathsep.join([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def _watch(
    child: WatchedChild, output: ChildOutput, limits: ChildLimits, stop: threading.Event, show: Show | None
) -> Cause | None:
    """Read until the child ended or has to be; returns why it has to be ended, None where it ended by itself."""
    deadline_s = time.monotonic() + limits.limit_s
    closely, look_closely_s = _CloseLook(child.pid, limits), time.monotonic() + _LOOK_CLOSELY_S
    ended_for: Cause | None = None
    while child.is_alive() and ended_for is None:
        look_s = time.monotonic() + _LOOK_S
        was_open, reads = output.is_open, 0
        while output.is_open and reads < _READS_A_LOOK and output.read(max(look_s - time.monotonic(), 0.0), show):
            reads += 1
        if not was_open or reads == _READS_A_LOOK:
            stop.wait(max(look_s - time.monotonic(), 0.0))
        if stop.is_set():
            ended_for = Cause.STOPPED
        elif time.monotonic() >= deadline_s:
            ended_for = Cause.TIMED_OUT
        elif limits.memory_bytes is not None and resident_bytes(child.pid) > limits.memory_bytes:
            ended_for = Cause.TOO_LARGE
        elif (began_s := time.monotonic()) >= look_closely_s:
            ended_for = closely.judge()
            took_s = time.monotonic() - began_s
            look_closely_s = began_s + max(_LOOK_CLOSELY_S, 5 * took_s)
    if ended_for is not None:
        child.end()
    # A process that it started may hold the pipes open, and write without end: what they hold now is read, no more.
    for _ in range(_LAST_READS):
        if not (output.is_open and output.read(0.0, show)):
            break
    return ended_for


class _CloseLook:
    """Looks at what a child started, wrote and did."""

    def __init__(self, group: int, limits: ChildLimits) -> None:
        self._group = group
        self._limits = limits
        self._ticks = -1
        self._busy_s = time.monotonic()

    def judge(self) -> Cause | None:
        """Return why the child has to be ended."""
        limits = self._limits
        running = members(self._group)
        if len(running) > MAX_PROCESSES:
            return Cause.CROWDED
        # Of one, `resident_bytes` told already. Of several the shares: what they were forked with counts once.
        held_bytes = sum(map(proportional_bytes, running)) if len(running) > 1 else 0
        if limits.memory_bytes is not None and held_bytes > limits.memory_bytes:
            return Cause.TOO_LARGE
        ticks, now_s = sum(map(cpu_ticks, running)), time.monotonic()
        if ticks != self._ticks:
            self._ticks, self._busy_s = ticks, now_s
        elif now_s - self._busy_s >= limits.idle_s:
            return Cause.IDLE
        return Cause.OVERFULL if limits.folder and self._is_overfull() else None

    def _is_overfull(self) -> bool:
        limits = self._limits
        with contextlib.suppress(OSError):
            found = os.statvfs(limits.folder)
            if found.f_bavail * found.f_frsize < limits.spared_bytes:
                return True
        least_bytes = max(limits.folder_bytes // MAX_FILES, FILE_BYTES)
        return tree_bytes(limits.folder, limits.folder_bytes, least_bytes) > limits.folder_bytes
