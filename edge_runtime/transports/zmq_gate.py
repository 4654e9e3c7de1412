"""Lets libzmq accept one connection at a time, each with our consent.

libzmq accepts whatever comes, and aborts the process when no descriptor is left for an ipc connection
(ipc_listener.cpp); it has no option for that, and 15 000 connections come in a second. So its listener is left in its
poller for one event at a time (EPOLLONESHOT): the next connection waits in the kernel until it is let in here. The
kernel tells which poller has the listener, and by which mark. Owns: that registration. Called by zmq_connections.py.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import re
import struct
import time
from pathlib import Path

log = logging.getLogger(__name__)

EPOLL_CTL_MOD, EPOLLIN, EPOLLONESHOT = 3, 0x001, 1 << 30
"""epoll_ctl(2)."""

REGISTERED_S, LOOK_S = 1.0, 0.001
"""How long libzmq's thread may take to poll a listener that was bound, and between two looks whether it does."""

_EVENT = struct.Struct("=IQ" if platform.machine() in {"x86_64", "AMD64"} else "@IQ")
"""struct epoll_event, which is packed on x86-64 alone."""

_FOUND = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)
"""A descriptor that a poller watches (proc_pid_fdinfo(5))."""


class ListenerGate:
    """The gate before one listener of libzmq's. Thread: any, one at a time."""

    def __init__(self, listener: int, poller: int, mark: int) -> None:
        self._listener = listener
        self._poller = poller
        self._event = ctypes.create_string_buffer(_EVENT.pack(EPOLLIN | EPOLLONESHOT, mark), _EVENT.size)
        self._epoll_ctl = ctypes.CDLL(None).epoll_ctl

    def let_in(self) -> None:
        """Let libzmq accept the next connection, now or when it comes."""
        self._epoll_ctl(self._poller, EPOLL_CTL_MOD, self._listener, self._event)


def find_gate(listener: int) -> ListenerGate | None:
    """Return the gate of a listener, by its descriptor; None where the kernel does not tell of it."""
    until_s = time.monotonic() + REGISTERED_S
    while time.monotonic() < until_s:
        for path in Path("/proc/self/fdinfo").glob("*"):
            try:
                text = path.read_text(encoding="ascii")
            except OSError:  # closed meanwhile
                continue
            for fd, events, mark in _FOUND.findall(text):
                if int(fd) == listener and int(events, 16) & EPOLLIN:
                    return ListenerGate(listener, int(path.name), int(mark, 16))
        time.sleep(LOOK_S)
    log.warning("connections are counted after they are accepted: the kernel does not tell of libzmq's poller")
    return None
