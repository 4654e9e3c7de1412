"""The daemon of a demonstration: `edge-runtime serve` as a child process, ready at first and stopped at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.screen import Screen
from edge_runtime import Client

PROGRAM = Path(sys.executable).with_name("edge-runtime")
START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


class DemoFailed(Exception):
    """The demonstration failed; the message says what went wrong and where to look."""


class Daemon:
    """The daemon's process, its endpoint and its log. Its socket, state and log lie in `folder`."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.socket = folder / "infer.sock"
        self.endpoint = f"ipc://{self.socket}"
        self.log = folder / "daemon.log"
        self.command = [str(PROGRAM), "serve", *options, "--zmq", self.endpoint, "--state", str(folder)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        """Whether it answers, and every model is loaded and warm: after `start_limit_s` it serves before that.

        Raises DemoFailed where a model cannot be loaded.
        """
        if not self.socket.exists():
            return False
        try:
            with Client(self.endpoint) as client:
                return client.is_ready() and all(self._is_loaded(entry) for entry in client.models())
        except ConnectionError:
            return False

    def _is_loaded(self, entry: Mapping[str, Any]) -> bool:
        if entry["state"] in {"failed", "not_served"}:
            raise DemoFailed(self.with_log(f"{entry['name']} was not loaded: {entry['reason']}"))
        return bool(entry["state"] == "ready")

    def last_words(self, lines: int) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def with_log(self, reason: str) -> str:
        """The reason, and the end of the log below it."""
        return "\n".join([reason, *(f"  | {line}" for line in self.last_words(20))])

    def stop(self, screen: Screen) -> bool:
        """Stop it with SIGTERM. Returns whether it exited cleanly. Raises DemoFailed when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(self.with_log(f"the daemon still runs {STOP_LIMIT_S:.0f} s after SIGTERM")) from None
        screen.line(f"  exit status {screen.paint(str(status), 'green' if status == 0 else 'red')}")
        return status == 0


@contextmanager
def short_folder() -> Iterator[Path]:
    """A new folder with a short path, removed at the end."""
    # Not $TMPDIR first: a socket's path may have 107 bytes.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 (mkdtemp makes a folder of our own in it)
    with tempfile.TemporaryDirectory(prefix="edge-demo-", dir=short) as folder:
        yield Path(folder)


@contextmanager
def running_daemon(
    screen: Screen, title: str, folder: Path, options: Sequence[str], ready_means: str
) -> Iterator[Daemon]:
    """The ready daemon, stopped at the end in any case. ready_means: what ready means, in words."""
    daemon = Daemon(folder, options)
    try:
        with screen.step(title):
            _wait_until_ready(screen, daemon, ready_means)
        yield daemon
    finally:
        end_process(daemon.process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process: first SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def shown_command(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    return " ".join(Path(word).name if word == str(PROGRAM) else word for word in command)


def _wait_until_ready(screen: Screen, daemon: Daemon, ready_means: str) -> None:
    """Wait until every model is loaded and warm."""
    screen.line(screen.paint(f"  $ {shown_command(daemon.command)}", "bold"))
    start = time.perf_counter()
    while not daemon.is_ready():
        elapsed = time.perf_counter() - start
        if daemon.process.poll() is not None:
            raise DemoFailed(daemon.with_log(f"the daemon ended with exit status {daemon.process.returncode}"))
        if elapsed > START_LIMIT_S:
            raise DemoFailed(daemon.with_log(f"the daemon is not ready after {START_LIMIT_S:.0f} s"))
        screen.progress(f"{elapsed:.1f} s  {' '.join(daemon.last_words(1))[:100]}")
        time.sleep(0.02)
    screen.end_progress()
    screen.line(f"  ready after {time.perf_counter() - start:.2f} s: {ready_means}")
