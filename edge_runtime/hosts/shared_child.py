"""A shared host: the process that loads several quiet models and runs them, for the daemon.

Owns: the place of each model, and the threads that serve them. One thread takes new models, interruptions and ends;
each load has a thread while it lasts; orders of all runners come by one epoll to threads that are started when all
others are at work. A model is read from a descriptor that came with it: the process may open no model's file. Who ended
it, or left it without memory, is the daemon's to judge (shared_hosts.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_runtime.backends.base import LibraryInstance
from edge_runtime.hosts.child import HostRunner, load_model
from edge_runtime.hosts.messages import (
    STUCK_STATUS,
    ChannelEnded,
    Hello,
    HostOrder,
    HostTask,
    Interrupt,
    Join,
    close_all,
    decode,
    receive_with_descriptors,
    send,
)

if TYPE_CHECKING:
    from edge_runtime.backends.base import HostForm

HUNGRY_STATUS = 76
"""The exit status where a run got no memory: who took it all is found by what runs then, as after a crash."""

LEAVE_S = 5.0
"""The time that a run or a load may still take once it was given up; it cannot be ended alone."""

_WAIT_MS, _ANY = 1000, -1


def serve_shared(channel: socket.socket) -> None:
    """Take models and serve them until the daemon closes the channel; never returns."""
    try:
        send(channel, Hello())
        _SharedHost(channel).serve()
    except ChannelEnded:
        pass
    except BaseException:  # noqa: BLE001  no model may go on without the thread that ends it
        traceback.print_exc()
    finally:
        _end(0)


class _Place:
    """One model of the process. Guarded by `lock`."""

    def __init__(self, task: HostTask, control: socket.socket, channels: list[socket.socket], opened: int) -> None:
        self.task = task
        self.control = control
        self.channels = channels
        self.opened = opened
        self.lock = threading.Lock()
        self.instance: LibraryInstance | None = None
        self.ends_runs: LibraryInstance | None = None
        self.runners: list[HostRunner] = []
        self.runs = 1
        self.running = 0
        self.waiting: deque[int] = deque()
        self.threads: set[int] = set()
        self.is_loading = True
        self.is_left = False
        self.has_ended = False
        self.end_by_s = 0.0


class _SharedHost:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._control = select.epoll()
        self._orders = select.epoll()
        self._places: dict[int, _Place] = {}
        self._runners: dict[int, tuple[_Place, int]] = {}
        self._lock = threading.Lock()
        self._idle = 0
        self._trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

    def serve(self) -> None:
        """Take models, interruptions and ends. Raises ChannelEnded."""
        own = self._channel.fileno()
        self._control.register(own, select.EPOLLIN)
        self._start_worker()
        while True:
            leaving = any(place.is_left for place in list(self._places.values()))
            for fd, _ in self._control.poll(_WAIT_MS / 1e3 if leaving else None):
                if fd == own:
                    self._take_model()
                elif fd in self._places:
                    self._hear(self._places[fd])
            now_s = time.monotonic()
            if any(place.is_left and now_s >= place.end_by_s for place in list(self._places.values())):
                sys.stderr.write("a model that was given up does not end, and its host ends\n")
                _end(STUCK_STATUS)

    def _take_model(self) -> None:
        data, descriptors = receive_with_descriptors(self._channel)
        try:
            task = decode(data, Join).task
            control, *runners, opened = descriptors
        except BaseException:
            close_all(descriptors)
            raise
        channels = [socket.socket(fileno=each) for each in runners]
        place = _Place(task, socket.socket(fileno=control), channels, opened)
        self._places[control] = place
        self._control.register(control, select.EPOLLRDHUP)
        threading.Thread(target=self._load, args=(place,), name="host-load", daemon=True).start()

    def _hear(self, place: _Place) -> None:
        """Interrupt a run, or let a place go whose side in the daemon has ended."""
        try:
            data, descriptors = receive_with_descriptors(place.control)
            close_all(descriptors)
            order = decode(data, HostOrder)
            if isinstance(order, Interrupt) and place.ends_runs is not None:
                place.runners[order.runner].interrupt(order.run, place.ends_runs)
        except ChannelEnded:
            self._control.unregister(place.control.fileno())
            self._let_go(place)

    # ---- a place's life ----------------------------------------------------------------------------------------------

    def _load(self, place: _Place) -> None:
        """Load a model, and have its orders served. Thread: its own."""
        loaded: tuple[LibraryInstance, Sequence[HostForm]] | None = None
        with contextlib.suppress(ChannelEnded):  # it was given up
            loaded = load_model(place.task, place.control, place.opened)
        close_all([place.opened])
        with place.lock:
            place.is_loading = False
            is_left = place.is_left
            if loaded is not None:
                place.instance, forms = loaded
                if not is_left:
                    self._open(place, place.instance, forms)
        if is_left:
            self._let_go(place)

    def _open(self, place: _Place, instance: LibraryInstance, forms: Sequence[HostForm]) -> None:
        """Have orders and interruptions of a loaded model served. Under its lock: it does not end meanwhile."""
        place.ends_runs = instance if place.task.declaration.interrupts else None
        place.runs = max(min(instance.concurrency, place.task.runners), 1)
        used = place.channels[: place.runs + place.task.ahead]
        all_forms = [instance, *forms]
        place.runners = [
            HostRunner(all_forms, each, None, place.task.declaration, on_no_memory=_end_hungry) for each in used
        ]
        self._control.modify(place.control.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        for index, each in enumerate(used):
            self._runners[each.fileno()] = place, index
            self._orders.register(each.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _let_go(self, place: _Place) -> None:
        """End a place, once no run of it is on and none begins."""
        with place.lock:
            if not place.is_left:
                place.is_left = True
                place.end_by_s = time.monotonic() + LEAVE_S
            if place.running or place.is_loading or place.has_ended:
                return
            place.has_ended = True
        for each in place.channels:
            self._runners.pop(each.fileno(), None)
            each.close()
        if place.instance is not None:
            place.instance.close()
        place.instance, place.ends_runs, place.runners = None, None, []
        self._trim(0)
        del self._places[place.control.fileno()]
        place.control.close()  # the daemon waits for it

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        with self._lock:
            self._idle += 1
        threading.Thread(target=self._work, name="host-worker", daemon=True).start()

    def _work(self) -> None:
        try:
            while True:
                for fd, _ in self._orders.poll(_ANY, 1):
                    with self._lock:
                        self._idle -= 1
                        is_last = not self._idle
                    if is_last:
                        self._start_worker()
                    found = self._runners.get(fd)
                    if found is not None:
                        self._serve(*found)
                    with self._lock:
                        self._idle += 1
        except BaseException:  # noqa: BLE001  a runner that nobody serves would keep its caller waiting
            traceback.print_exc()
            _end(1)

    def _serve(self, place: _Place, index: int) -> None:
        """Take the messages of one runner, and then of those that waited for a run to end."""
        with place.lock:
            if place.has_ended:
                return
            if place.running >= place.runs:
                place.waiting.append(index)
                return
            place.running += 1
        while True:
            self._take_messages(place, index)
            with place.lock:
                if not place.waiting:
                    place.running -= 1
                    break
                index = place.waiting.popleft()
        if place.is_left:
            self._let_go(place)

    def _take_messages(self, place: _Place, index: int) -> None:
        thread = threading.get_ident()
        if thread not in place.threads and place.ends_runs is not None:
            place.threads.add(thread)
            place.ends_runs.attach(None)
        runner, fd = place.runners[index], place.channels[index].fileno()
        try:
            while not runner.serve_one(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass
        except ChannelEnded:
            return
        self._orders.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)


def _end_hungry() -> None:
    _end(HUNGRY_STATUS)


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
