"""`serve`: a daemon that runs until a signal ends it. Thread: main, which only waits for signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import assemble_daemon
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.daemon.doors import keeping
from edge_runtime.errors import ConfigError
from edge_runtime.telemetry.logs import configure_logging

log = logging.getLogger("edge_runtime")

SWITCH_INTERVAL_S = 0.0002
"""Longest a thread keeps the interpreter while another waits: Python's 5 ms would be most of a tight deadline, and
0.2 ms narrowed the range of goodput and of the refusals' tail in a prototype."""

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong, and will be as wrong the next time: the service does not start it again for that."""


def serve(config: Config, read_config: Callable[[], Config] | None = None) -> int:
    """Run a daemon until SIGTERM or SIGINT and return the exit status: 0 told to stop, 1 failed, 2 a setting is wrong.

    read_config: called on SIGHUP for the settings that may change while serving. Thread: main.
    """
    configure_logging(config.log.level, config.log.format, sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    daemon: Daemon | None = None
    with _heard_signals() as signals:
        try:
            daemon = assemble_daemon(config)
            daemon.start()
            # These objects live as long as the daemon: the collector need not look at them again.
            gc.collect()
            gc.freeze()
            while signals.recv(1)[0] == signal.SIGHUP:
                with keeping("the configuration is"):
                    daemon.reload(config if read_config is None else read_config())
        except ConfigError as error:
            log.error(error.message)
            return EXIT_FAILED if error.retryable else EXIT_CONFIG
        finally:
            if daemon is not None:
                daemon.stop()
    if daemon.is_stuck:
        # The interpreter would take the library down under the run, and abort.
        logging.shutdown()
        os._exit(0)
    return 0


@contextmanager
def _heard_signals() -> Iterator[socket.socket]:
    """A socket that gets a byte, the number, for each SIGTERM, SIGINT and SIGHUP. Thread: main.

    A queue filled by Python handlers would not do: they run between bytecodes of the main thread, and for a signal
    that comes while that thread is on its way into a wait they run when the wait is over, which is never.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    fd_before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in HEARD}
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        heard.close()
        told.close()
