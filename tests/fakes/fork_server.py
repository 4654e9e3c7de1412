"""The process that tests fork their daemons from: one for a whole run, warm with the modules that a test names."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import threading
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess

_LOCK = threading.Lock()
_WARM_WITH: list[str] = []


def forking_from(*modules: str) -> ForkServerContext:
    """Processes of one thread each, forked from one that has imported these: a start costs 0.1 s instead of a second.

    The standard library keeps one such process and ignores what is named after its start, so another list of modules
    starts another one: ask each time, and before the first child that shall live. Thread: any.
    """
    context = multiprocessing.get_context("forkserver")
    with _LOCK:
        if list(modules) != _WARM_WITH:
            end_fork_server()
            _WARM_WITH[:] = modules
            context.set_forkserver_preload(_WARM_WITH)
    return context


def start(process: ForkServerProcess) -> None:
    """Start a process while other threads start and await theirs. Thread: any."""
    with _LOCK:
        process.start()


def exit_status(process: ForkServerProcess, limit_s: float) -> int | None:
    """Wait for its end, kill it at the limit, and let go of it: its exit status, negative for a signal. Thread: any.

    Starting any process polls all of them, and of two threads that poll the same end one reads nothing and notes 255:
    so both happen under one lock.
    """
    if not wait([process.sentinel], limit_s):
        process.kill()
        wait([process.sentinel])
    with _LOCK:
        process.join()
        status = process.exitcode
        process.close()
    return status


def end_fork_server() -> None:
    """Let the next child come from a new one, which sees what this process sees now: its mounts, say. Thread: any."""
    multiprocessing.forkserver._forkserver._stop()
