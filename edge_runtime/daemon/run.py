"""`serve`: a daemon that runs until a signal ends it. Thread: main; it starts, waits for signals, and stops."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from edge_runtime.daemon.assemble import assemble_daemon
from edge_runtime.daemon.core import ObservedCondition, Reloaded
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.daemon.parts import ReadSettings
from edge_runtime.daemon.state_lock import StateLock
from edge_runtime.doors.binding import EarlySocket
from edge_runtime.doors.door import keeping
from edge_runtime.errors import ConfigError
from edge_runtime.sandbox.descriptors import raise_limit
from edge_runtime.sandbox.process_memory import share_one_heap
from edge_runtime.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from edge_runtime.hosts.prepared_parent import PreparedParent

log = logging.getLogger("edge_runtime")

SWITCH_INTERVAL_S = 0.0002
"""Longest a thread keeps the interpreter while another waits: Python's 5 ms would be most of a tight deadline, and
0.2 ms narrowed the range of goodput and of the refusals' tail in a prototype."""

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

RELOAD_LOOK_S = 0.2
"""How often a thread that waits for a reload looks whether the daemon stops."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong, and will be as wrong the next time: the service does not start it again for that."""


def serve(
    settings: ReadSettings,
    read_settings: Callable[[], ReadSettings] | None = None,
    early: EarlySocket | None = None,
    parent: PreparedParent | None = None,
    lock: StateLock | None = None,
) -> int:
    """Run a daemon until SIGTERM or SIGINT and return the exit status: 0 stopped, 1 failed, 2 a setting is wrong.

    It is 1 for settings that a part keeps, since the next start leaves them out. read_settings: called on SIGHUP for
    the settings that may change while serving. early: the control endpoint, where it listens already. parent: of hosts,
    where one was begun. lock: of the state, where it is taken. Thread: main.
    """
    config = settings.config
    configure_logging(config.log.level, config.log.format, sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    share_one_heap()
    daemon: Daemon | None = None
    with Signals() as signals:
        try:
            raise_limit()
            with signals.raised():
                daemon = assemble_daemon(config, early=early, parent=parent, lock=lock)
            running = SignalledDaemon(daemon, settings)
            daemon.lend(running)
            if daemon.start(signals.is_stop_told):
                # These objects live as long as the daemon: the collector need not look at them again.
                gc.collect()
                gc.freeze()
            while signals.next() == signal.SIGHUP:
                running.carry_out(read_settings or (lambda: settings))
        except ConfigError as error:
            log.error(error.message)
            return EXIT_FAILED if error.retryable or settings.give_up(error.message) else EXIT_CONFIG
        except ToldToStop:
            signals.next()
        finally:
            if daemon is not None:
                daemon.stop()
    if daemon is not None and daemon.is_stuck:
        # The interpreter would take the library down under the run, and abort.
        logging.shutdown()
        os._exit(0)
    return 0


class SignalledDaemon:
    """The running daemon for parts of its core: it reloads at a signal to itself, as at an operator's.

    settings: of the start, or of the last reload that could read them. Thread: any but main, except `carry_out`.
    """

    def __init__(self, daemon: Daemon, settings: ReadSettings) -> None:
        self.settings = settings
        self._daemon = daemon
        self._asked: SimpleQueue[SimpleQueue[Reloaded]] = SimpleQueue()

    @property
    def is_ready(self) -> bool:
        """Whether the start is over."""
        return self._daemon.status.is_ready

    def conditions(self) -> list[ObservedCondition]:
        """How each model version does, and each camera or microphone."""
        return self._daemon.status.conditions()

    def reload(self, stop: threading.Event) -> Reloaded:
        """Have the configuration read again as at SIGHUP, and wait for the end, or until `stop` is set."""
        answer: SimpleQueue[Reloaded] = SimpleQueue()
        self._asked.put(answer)
        os.kill(os.getpid(), signal.SIGHUP)
        while not stop.is_set():
            with suppress(Empty):
                return answer.get(timeout=RELOAD_LOOK_S)
        return Reloaded(("the daemon stops",), is_read=False)

    def carry_out(self, read_settings: Callable[[], ReadSettings]) -> None:
        """Reload, and tell those who asked before it began. Thread: main."""
        asked: list[SimpleQueue[Reloaded]] = []
        with suppress(Empty):
            while True:
                asked.append(self._asked.get_nowait())
        told = self._reload(read_settings)
        for each in asked:
            each.put(told)

    def _reload(self, read_settings: Callable[[], ReadSettings]) -> Reloaded:
        reasons: list[str] = []
        told = Reloaded(is_read=False)
        with keeping("the configuration is", reasons):
            settings = read_settings()
            told = self._daemon.reload(settings.config)
            self.settings = settings
        return told._replace(reasons=(*told.reasons, *reasons))


class ToldToStop(BaseException):
    """SIGTERM or SIGINT came while nothing was there that has to be ended."""


class Signals:
    """SIGTERM, SIGINT and SIGHUP as they come, while this context is open. Thread: main.

    They are read from a socket that gets a byte for each. A queue filled by Python handlers would not do: they run
    between bytecodes of the main thread, and for a signal that comes while that thread is on its way into a wait they
    run when the wait is over, which is never.
    """

    def __init__(self) -> None:
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._unread: deque[int] = deque()
        self._stop: int | None = None
        self._is_raised = False

    def __enter__(self) -> Signals:  # noqa: PYI034 (typing.Self is 3.11)
        self._fd_before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._heard.close()
        self._told.close()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise ToldToStop for SIGTERM and SIGINT within this block, which needs no other end."""
        self._is_raised = True
        try:
            yield
        finally:
            self._is_raised = False

    def next(self) -> int:
        """Wait for the next signal. Once a signal to stop came, return it each time."""
        while self._stop is None:
            if self._unread:
                return self._unread.popleft()
            self._read()
        return self._stop

    def is_stop_told(self) -> bool:
        """Whether SIGTERM or SIGINT came. SIGHUPs before it wait for `next`."""
        while self._stop is None and select.select([self._heard], [], [], 0)[0]:
            self._read()
        return self._stop is not None

    def _read(self) -> None:
        number = self._heard.recv(1)[0]
        if number == signal.SIGHUP:
            self._unread.append(number)
            return
        self._stop = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends the process, and the kernel its children
        log.info("stopping", extra={"signal": signal.Signals(number).name, "at_once": "Ctrl-C"})

    def _handle(self, number: int, _: object) -> None:
        if self._is_raised and number != signal.SIGHUP:
            raise ToldToStop
