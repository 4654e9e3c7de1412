"""Notices to systemd: sd_notify(3) over its datagram socket, in plain Python. Silent outside systemd.

Owns: the socket's address and the notices. Sending never fails the daemon: it returns whether the notice was sent.
Thread: any; each notice is one datagram.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

MICROSECONDS = 1_000_000


class Notifier:
    """Notices to the service manager of `NOTIFY_SOCKET`; without one, every method does nothing.

    Each method returns whether the notice was sent. watchdog_interval_s: systemd kills the daemon after this much time
    without a sign of life (`WatchdogSec=`); None when it does not watch this process. Send one at least twice as often
    (sd_watchdog_enabled(3)).
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self.watchdog_interval_s = _watchdog_interval_s(environment) if self._address else None

    def ready(self) -> bool:
        """Start-up or a reload has finished."""
        return self._send("READY=1")

    def reloading(self) -> bool:
        """A reload begins; `ready` must follow. The instant lets systemd tell two reloads apart."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}")

    def stopping(self) -> bool:
        """The daemon is ending."""
        return self._send("STOPPING=1")

    def status(self, text: str) -> bool:
        """One line for `systemctl status`. Line ends, which would begin another notice, become spaces."""
        return self._send("STATUS=" + " ".join(text.split()))

    def watchdog(self) -> bool:
        """A sign of life."""
        return self._send("WATCHDOG=1")

    def _send(self, notice: str) -> bool:
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                # A full socket means a manager that does not read; the I/O thread must not wait for it.
                sender.setblocking(False)
                sender.sendto(notice.encode(), self._address)
        except OSError:
            return False
        return True


def _address(value: str) -> str | None:
    """The socket's address: a path, or "@name" for an abstract one, whose first byte is NUL. None for other kinds."""
    if value.startswith("@") and len(value) > 1:
        return "\0" + value[1:]
    return value if value.startswith("/") else None


def _watchdog_interval_s(environment: Mapping[str, str]) -> float | None:
    """`WATCHDOG_USEC` when `WATCHDOG_PID` is this process or absent; otherwise it is meant for a parent."""
    try:
        owner = int(environment.get("WATCHDOG_PID") or os.getpid())
        microseconds = int(environment.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return microseconds / MICROSECONDS if owner == os.getpid() and microseconds > 0 else None
