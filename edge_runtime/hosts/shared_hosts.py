"""Hosts that quiet models share, seen from the daemon: which process has room for a model, and who ended one.

Owns: the shared processes, and each model's place in one, which instance.py uses as it uses a host. Only models of
one kind share (`HostTask.shared_by`), of one backend and with one limit of memory. The daemon opens their files. Hosts
forks the processes. Thread: any; ends arrive on `edge-hosts`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.model_files import open_artifact
from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.messages import (
    STUCK_STATUS,
    ChannelEnded,
    HostTask,
    Join,
    SharedTask,
    close_all,
    new_channel,
    send,
)
from edge_runtime.hosts.process import END_TIMEOUT_S, HostProcess
from edge_runtime.sandbox.descriptors import Descriptors

MAX_PLACES = 32
"""Of one process: at most this many models are loaded again after a crash, and a hundred need four processes."""

MAX_FILE_BYTES = 64 << 20
"""Of a model that shares: a larger one would keep its neighbours waiting after a crash, and saves little by sharing."""

JOIN_TRIES = 3
"""A process may end, of another model's run, while a model is sent there."""

BUSY_S, BUSY_WITHIN_S = 3.0, 30.0
"""A model whose runs take this long within that time gets a host of its own: a tenth of a core."""

_MEASURED_S = 1.0
"""The age that a reported memory of a process may have."""

ForkHost = Callable[[SharedTask, str], HostProcess]


class BusyRuns:
    """How busy a model in a shared process is."""

    def __init__(self) -> None:
        self._taken_s = self._since_s = 0.0

    def count(self, took_s: float, now_s: float) -> bool:
        """Count a run; return whether the model is to have a host of its own."""
        if now_s - self._since_s > BUSY_WITHIN_S:
            self._taken_s, self._since_s = 0.0, now_s
        self._taken_s += took_s
        return self._taken_s >= BUSY_S


class HostPlace:
    """A model's place in a shared process, for which it stands as a HostProcess does for a host of one model.

    `kill` and `end` blame the model and end the process; `leave` ends the place alone. is_suspect: its runs may have
    ended the process: it is to have a host of its own from then on. is_one_of_many: not it alone, so nothing speaks
    against its running again. is_at_work: whether it runs or loads, by its instance.
    """

    def __init__(self, shared: _SharedProcess, task: HostTask, label: str) -> None:
        self.label = label
        self.ended_for = ""
        self.is_suspect = False
        self.is_one_of_many = False
        self.has_ended = threading.Event()
        self.on_end: Callable[[HostPlace], None] | None = None
        self.is_at_work: Callable[[], bool] = lambda: True
        self._shared = shared
        self._lock = threading.Lock()
        self._has_left = False
        self.control, control_there = new_channel()
        pairs = [new_channel() for _ in range(task.runners + task.ahead)]
        self.runners = [mine for mine, _ in pairs]
        self.theirs = [control_there, *(there for _, there in pairs)]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._shared.process.pid

    @property
    def models(self) -> int:
        """How many models live in the process."""
        return max(len(self._shared.places), 1)

    @property
    def status(self) -> int | None:
        """The exit status of the process; 0 for a place that was left."""
        return 0 if self._has_left else self._shared.process.status

    @property
    def signal_name(self) -> str:
        """Return the signal that ended the process, "" for none."""
        return "" if self._has_left else self._shared.process.signal_name

    @property
    def how_it_ended(self) -> str:
        """Return why this place ended, in words: its own reason, else that of the process."""
        if self.ended_for:
            return self.ended_for
        how = self._shared.process.how_it_ended
        return how if self.is_suspect else f"the host that it shared ended: {how}"

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether neither the model nor the daemon ended it: another model did, or a signal from outside."""
        return not self.ended_for and not self.is_suspect

    def memory_bytes(self) -> int:
        """Its share of the process's memory."""
        return self._shared.memory_bytes() // self.models

    def kill(self, reason: str = "it was ended") -> None:
        """Kill the process, for which this model alone is to blame; `has_ended` shows when. Idempotent."""
        if not self.has_ended.is_set():
            self.ended_for = self.ended_for or reason
            self._shared.kill(self, reason)

    def end(self, reason: str = "it was ended", limit_s: float = END_TIMEOUT_S) -> int:
        """Kill the process as `kill` does, and wait. Returns its exit status."""
        self.kill(reason)
        self.has_ended.wait(limit_s)
        return self.status or 0

    def leave(self, reason: str, limit_s: float = END_TIMEOUT_S, grace_s: float = 0.0) -> None:
        """End the place, and wait until its memory is free, as HostProcess has it. The others go on."""
        del grace_s
        with self._lock:
            if self._has_left or self.has_ended.is_set():
                return
            self._has_left = True
            self.ended_for = self.ended_for or reason
        for channel in self.runners:
            _shut(channel, socket.SHUT_RDWR)
        _shut(self.control, socket.SHUT_WR if limit_s else socket.SHUT_RDWR)
        if limit_s:
            self.control.settimeout(limit_s)
            with contextlib.suppress(OSError):
                while self.control.recv(1 << 12):
                    pass
        self._shared.forget(self)
        self.tell_end()

    def tell_end(self) -> None:
        """Tell its instance, then all threads that wait for it."""
        try:
            if self.on_end is not None:
                self.on_end(self)
        finally:
            self.has_ended.set()
            self.hang_up()

    def hang_up(self) -> None:
        """End its channels. Idempotent."""
        for channel in (self.control, *self.runners):
            _shut(channel, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close its sockets, once it has ended and no run uses them. Idempotent."""
        for channel in (self.control, *self.runners, *self.theirs):
            channel.close()


class SharedHosts:
    """The shared processes of a daemon. fork_host: of `Hosts`."""

    def __init__(self, fork_host: ForkHost, order_s: float) -> None:
        """order_s: how long a process may leave an order unread."""
        self._fork_host = fork_host
        self._order_s = order_s
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._processes: dict[_Kind, list[_SharedProcess]] = {}

    def place_for(self, task: HostTask, label: str) -> HostPlace | None:
        """Have a shared process load a model; None where its file may not come opened. Raises LoadFailed."""
        opened = _open_alone(task)
        if opened is None:
            return None
        kind = _Kind(task.declaration, task.shared_by, task.memory_bytes)
        try:
            for _ in range(JOIN_TRIES):
                place = self._process_for(kind).join(task, label, opened)
                if place is not None:
                    return place
        finally:
            os.close(opened)
        return None

    def _process_for(self, kind: _Kind) -> _SharedProcess:
        """Return a process with a free place, which is then taken; forked where there is none."""
        with self._forking:
            found = self._with_place(kind)
            if found is None:
                process = self._fork_host(
                    SharedTask(kind.declaration, kind.memory_bytes), f"shared {kind.declaration.name}"
                )
                found = _SharedProcess(process, self._order_s, lambda: self._forget(kind, made))
                made = found
                with self._lock:
                    self._processes.setdefault(kind, []).append(found)
                found.follow()
        return found

    def _with_place(self, kind: _Kind) -> _SharedProcess | None:
        with self._lock:
            return next((each for each in self._processes.get(kind, ()) if each.take()), None)

    def _forget(self, kind: _Kind, process: _SharedProcess) -> None:
        with self._lock:
            self._processes[kind].remove(process)


class _Kind(NamedTuple):
    """Models that may share: see HostTask."""

    declaration: Declaration
    shared_by: str
    memory_bytes: int | None


class _SharedProcess:
    """One process and its places. taken: places, those of models on their way included."""

    def __init__(self, process: HostProcess, order_s: float, on_end: Callable[[], None]) -> None:
        self.process = process
        self.places: list[HostPlace] = []
        self._taken = 1
        self._lock = threading.Lock()
        self._on_end = on_end
        self._is_over = False
        self._takes_none = False
        self._blamed: HostPlace | None = None
        self._memory_bytes = 0
        self._measured_s = 0.0
        process.control.settimeout(order_s)

    def follow(self) -> None:
        """Hear of the process's end, which may have come already."""
        self.process.on_end = lambda _: self._ended()
        if self.process.has_ended.is_set():
            self._ended()

    def take(self) -> bool:
        """Take a free place; False where there is none."""
        with self._lock:
            if self._is_over or self._taken >= MAX_PLACES:
                return False
            self._taken += 1
            return True

    def join(self, task: HostTask, label: str, opened: int) -> HostPlace | None:
        """Have the process load a model in a place that was taken; None where it has ended. Raises LoadFailed."""
        descriptors = Descriptors()
        if not descriptors.may_open():
            self._give_back()
            limit = descriptors.limit
            raise LoadFailed(f"of the {limit} files that this process may open none is left (ulimit -n)")
        place = HostPlace(self, task, label)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self.places.append(place)
        if is_over:
            place.close()
            return None
        try:
            send(self.process.control, Join(task), [*(each.fileno() for each in place.theirs), opened])
        except ChannelEnded:
            with self._lock:
                if place in self.places:
                    self.places.remove(place)
            self._takes_none = True
            self.process.kill("it took no model")
            place.close()
            return None
        close_all([each.detach() for each in place.theirs])
        return place

    def kill(self, blamed: HostPlace, reason: str) -> None:
        """Kill the process for one model's sake."""
        with self._lock:
            self._blamed = self._blamed or blamed
        self.process.kill(reason)

    def forget(self, place: HostPlace) -> None:
        """Free a place that was left; with the last one the process ends."""
        with self._lock:
            if place in self.places:
                self.places.remove(place)
        self._give_back()

    def memory_bytes(self) -> int:
        """Memory of the process, measured once a second at most."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._measured_s >= _MEASURED_S:
                self._measured_s = now_s
                self._memory_bytes = self.process.memory_bytes()
            return self._memory_bytes

    def _give_back(self) -> None:
        with self._lock:
            self._taken -= 1
            is_empty = not self._taken and not self._is_over
            self._is_over = self._is_over or is_empty
        if is_empty:
            self._on_end()
            self.process.kill("its last model was unloaded")

    def _ended(self) -> None:
        """Judge who ended the process, and notify its models. Thread: `edge-hosts`, which must not wait."""
        self.process.close()
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            places, self.places = self.places, []
        self._on_end()
        suspects = self._suspects(places)
        for place in suspects:
            place.is_suspect = True
        for place in places:
            place.is_one_of_many = suspects != [place]
        for place in places:
            place.tell_end()

    def _suspects(self, places: list[HostPlace]) -> list[HostPlace]:
        """Return the models that may have ended it: those at work, all where none was, and the one that was killed."""
        if self._blamed is not None:
            return [self._blamed]
        if self.process.was_ended_from_outside or self._takes_none or self.process.status == STUCK_STATUS:
            return []
        return [each for each in places if each.is_at_work()] or list(places)


def _open_alone(task: HostTask) -> int | None:
    """Open a model's file for a process that may not; None where it shall load it in a host of its own.

    Judged by the file that was opened: a host of its own would see this file too, whatever links lead to it by then.
    """
    artifact = Path(task.artifact)
    try:
        opened, status = open_artifact(artifact)
    except LoadFailed:
        return None
    place = Path(f"/proc/self/fd/{opened}").readlink()
    folders = task.options.within or (os.path.realpath(artifact.parent),)
    if status.st_size <= MAX_FILE_BYTES and any(place.is_relative_to(each) for each in folders):
        return opened
    os.close(opened)
    return None


def _shut(channel: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        channel.shutdown(how)
