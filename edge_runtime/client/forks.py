"""Tells a client or a Runtime that it crossed a fork: its sockets, threads and perhaps its locks are the parent's.

libzmq answers every call of a forked child with EINTR, which pyzmq repeats for ever, and a lock that another thread
held at the fork is never released. So every call compares `count` before it takes a lock or touches a socket.
"""

from __future__ import annotations

import os

count = 0
"""Forks between the first process that imported this module and the current one."""


def _count_fork() -> None:
    global count  # noqa: PLW0603 (a process has one history)
    count += 1


os.register_at_fork(after_in_child=_count_fork)


def crossed() -> RuntimeError:
    """Return the error of a client or Runtime that was in use when its process forked."""
    return RuntimeError("this was used before the fork and belongs to the parent process; make a new one here")
