"""A mosquitto of the demonstration's own, where one is installed: on this machine only, on a port that was free.

Owns: the child process and its folder. Nothing of a broker that runs already is touched.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 60.0

PORTS = range(20_000, 32_000)
"""Below Linux's ephemeral ports: a client that tries to reconnect to a stopped broker on an ephemeral port can be given
that very port as its own, connect to itself, and keep the broker from coming back."""


def find_mosquitto() -> str | None:
    """The program, in a folder outside of users' PATH on Debian; None when not installed."""
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def own_broker(folder: Path) -> Iterator[int | None]:
    """A running broker's port; None without mosquitto, or when it does not start."""
    program = find_mosquitto()
    if program is None:
        yield None
        return
    (port,) = free_ports(1)
    configuration = folder / "mosquitto.conf"
    configuration.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    with (folder / "mosquitto.log").open("wb") as log:
        child = subprocess.Popen(
            [program, "-c", str(configuration)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )  # fmt: skip
    try:
        yield port if _listens(port, child) else None
    finally:
        child.terminate()
        try:
            child.wait(START_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_ports(count: int) -> tuple[int, ...]:
    """So many ports of this machine that nothing listens on now, each another."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(PORTS)  # not a seeded one, which would choose the same in every process
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return tuple(found)


def _listens(port: int, child: subprocess.Popen[bytes]) -> bool:
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s and child.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                return True
        except OSError:
            time.sleep(0.01)
    return False
