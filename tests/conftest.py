"""Every test leaves the process as it found it: no thread, socket or child process of its own stays behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests import runs
from tests.fakes.broker import Broker

settings.register_profile("brief", settings.get_profile("ci"), max_examples=20)
"""For the other interpreters: one has tried our code with a hundred examples each."""

SETTLE_S = 60.0
"""How long something that is already stopping may take: on two cores with twenty at work, a second has become ten."""

STDLIB_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Started by the standard library once for a process and kept by it."""

PREPARED = "hosts.parent:prepare_hosts"
"""In the command of each process that prepares hosts, and of the hosts."""

BROWSER = "/chromium "
"""In the command of each process of a browser, which begins and ends further ones as it sees fit."""

SEQPACKET = "0005"
"""SOCK_SEQPACKET in /proc/net/unix."""


@dataclass(frozen=True)
class Held:
    """What the process holds: Python threads, sockets by inode, children by id and start time."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    children: frozenset[psutil.Process]


def held_now() -> Held:
    """Look at this process. Threads that a library started natively are its own, even when they once ran Python."""
    threads = (thread for thread in threading.enumerate() if type(thread).__name__ != "_DummyThread")
    return Held(frozenset(threads), frozenset(_sockets()), frozenset(children_now()))


def leaks(before: Held, after: Held) -> list[str]:
    """One line for each thing that is there now and was not before.

    A daemon that several tests share may have prepared hosts meanwhile, which it ends when they have been idle; a
    browser may have begun processes of its own.
    """
    sockets, children = after.sockets - before.sockets, after.children - before.children
    if children and any(BROWSER in _command(child) for child in before.children):
        children = frozenset(child for child in children if BROWSER not in _command(child))
    has_daemon = before.children or any(thread.name == "edge-loader" for thread in before.threads)
    if (sockets or children) and has_daemon:
        sockets -= _channels()
        children = frozenset(child for child in children if PREPARED not in _command(child))
    return [
        *(f"thread {thread.name!r} still runs" for thread in after.threads - before.threads if thread.is_alive()),
        *(f"socket {inode} is still open" for inode in sorted(sockets)),
        *(f"child process {child.pid} ({_command(child)}) is still there" for child in children),
    ]


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would every child that a test interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _state_of_the_log() -> Iterator[None]:
    """A client may change its level, and a command its handler, for the whole process."""
    logger, root = logging.getLogger("edge_runtime"), logging.getLogger()
    level = logger.level
    yield
    for each in [each for each in root.handlers if each.get_name() == logger.name]:
        root.removeHandler(each)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = held_now()
    yield
    found = leaks(before, held_now())
    if not found:
        return
    # Something is there: let what is stopping stop, and let go of what only a reference cycle holds.
    gc.collect()
    end_s = time.monotonic() + SETTLE_S
    while (found := leaks(before, held_now())) and time.monotonic() < end_s:
        time.sleep(0.01)
    if found:
        pytest.fail("the test left behind: " + "; ".join(found))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that the tests of one file share."""
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


def _channels() -> frozenset[str]:
    """Unix sockets of the kind by which a daemon talks to its hosts."""
    lines = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()[1:]
    kinds = ((fields[4], fields[6]) for fields in map(str.split, lines))
    return frozenset(f"socket:[{inode}]" for kind, inode in kinds if kind == SEQPACKET)


def _sockets() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:"):
            yield target


def children_now() -> Iterator[psutil.Process]:
    """The child processes that somebody here has started and not ended, and theirs."""
    try:
        # Cheap answer first: psutil reads the whole process table, and most tests have no child at all.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    for child in psutil.Process().children(recursive=True):
        if not any(name in _command(child) for name in STDLIB_CHILDREN):
            yield child


def _command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline()) or child.name()
    except psutil.Error:
        return "ended, never waited for"


def pytest_configure(config: pytest.Config) -> None:
    """Have the run say how it goes."""
    config.pluginmanager.register(runs)
