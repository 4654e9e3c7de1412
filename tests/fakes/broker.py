"""A real mosquitto as a child process on 127.0.0.1, for tests that need a broker and its restarts.

`needs_mosquitto` marks a test that cannot run without one. `Broker` writes its own small configuration; a test that
brings a whole one of its own gives `layout`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pytest

from demo.broker import free_ports

if TYPE_CHECKING:
    from typing_extensions import Self

# Debian puts mosquitto where only root's PATH looks.
MOSQUITTO = shutil.which("mosquitto", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin")

needs_mosquitto = pytest.mark.skipif(
    MOSQUITTO is None, reason="mosquitto is not installed. Do: sudo apt-get install mosquitto"
)

START_S = 60.0
"""How long mosquitto may take to listen, or to end, before the test fails: it takes some 10 ms."""

ATTEMPTS = 5


@dataclass(frozen=True)
class Tls:
    """Files of one side: whom it trusts, and what it shows. A side that shows nothing has no certificate."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None


class Broker:
    """Runs from `start` (or entering the context) until `stop`. `folder` takes the configuration, log and store.

    config: lines added to the configuration. tls: the broker's files; clients must then show a certificate of the same
    CA, whose CN is their user name. layout: writes the whole configuration from the ports instead; it has to log to
    stderr. listeners: how many ports that needs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: str = "",
        persistence: bool = False,
        tls: Tls | None = None,
        layout: Callable[[tuple[int, ...]], str] | None = None,
        listeners: int = 1,
    ) -> None:
        self.ports: tuple[int, ...] = ()
        self._folder = folder
        self._config = config
        self._persistence = persistence
        self._tls = tls
        self._layout = layout or self._own_layout
        self._listeners = listeners
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The (first) listener's port; the same for the broker's life, restarts included."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"{'mqtts' if self._tls else 'mqtt'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running child's process id."""
        assert self._child is not None, "the broker does not run"
        return self._child.pid

    def start(self) -> None:
        """Choose ports and start; returns when every listener takes connections."""
        assert MOSQUITTO is not None, "mosquitto is not installed"
        self._folder.mkdir(exist_ok=True)
        for _ in range(ATTEMPTS):
            self.ports = free_ports(self._listeners)
            (self._folder / "mosquitto.conf").write_text(self._layout(self.ports))
            if self._run():
                return
        raise AssertionError(f"no port was free {ATTEMPTS} times:\n{self.log()}")

    def stop(self) -> None:
        """End it as systemd would, with SIGTERM: it tells clients and writes its store. Harmless when it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would: nothing is told, nothing written. The kernel closes the connections."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it if it runs, and start it again on the same ports with the same configuration."""
        self.stop()
        if not self._run():
            raise AssertionError(f"port {self.ports} was taken while the broker was away:\n{self.log()}")

    def log(self) -> str:
        """Everything it has logged, over all its starts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self._folder / "mosquitto.log"

    def _own_layout(self, ports: tuple[int, ...]) -> str:
        lines = [
            "log_dest stderr",
            *(f"log_type {kind}" for kind in ("error", "warning", "notice", "information")),
            # Root would become user "mosquitto", who cannot read the folder.
            *(["user root"] if os.geteuid() == 0 else []),
            f"listener {ports[0]} 127.0.0.1",
            "set_tcp_nodelay true",
        ]
        if self._tls is None:
            lines += ["allow_anonymous true"]
        else:
            lines += [
                f"cafile {self._tls.ca}",
                f"certfile {self._tls.certificate}",
                f"keyfile {self._tls.key}",
                "require_certificate true",
                "use_identity_as_username true",
            ]
        if self._persistence:
            lines += ["persistence true", f"persistence_location {self._folder}/"]
        return "\n".join([*lines, self._config, ""])

    def _run(self) -> bool:
        """Start the child and wait until it listens. False when a port was taken in between."""
        assert MOSQUITTO is not None
        self._log_start = len(self.log())
        with self._log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [MOSQUITTO, "-c", str(self._folder / "mosquitto.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + START_S
        while not self._listens():
            if _ended(self._child):
                self._child = None
                if "Address already in use" in self.log()[self._log_start :]:
                    return False
                raise AssertionError(f"mosquitto ended at once:\n{self.log()}")
            if time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"mosquitto does not listen after {START_S} s:\n{self.log()}")
        return True

    def _listens(self) -> bool:
        # Its own word first: another process may hold the port, and would take the connection too.
        if " running" not in self.log()[self._log_start :]:
            return False
        return all(_connects(port) for port in self.ports)

    def _end(self, by: signal.Signals) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(by)
        try:
            child.wait(START_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise AssertionError(f"mosquitto did not end in {START_S} s after {by.name}:\n{self.log()}") from None


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, after giving it 5 ms to do something."""
    try:
        child.wait(0.005)
    except subprocess.TimeoutExpired:
        return False
    return True
