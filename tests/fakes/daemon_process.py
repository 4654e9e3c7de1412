"""The daemon as a process of its own, so that its memory, its signals and its end can be looked at alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 60.0
"""Six times what a start takes on a machine that does ten other things."""

GROWTH_BYTES = 20 << 20
"""Memory that an attack may leave behind (a promise of the security notes), judged after a first round warmed up."""


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process, without what it shares with others and files that it maps."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class DaemonProcess:
    """`edge-runtime serve` on `folder`/models, with its log; killed by id when the block is over.

    config: its TOML. descriptors: how many files it may open, None for as many as this process.
    """

    def __init__(
        self, folder: Path, *arguments: str, config: str = "", descriptors: int | None = None, **environment: str
    ) -> None:
        self.endpoint = f"ipc://{folder}/i.sock"
        self._log = (folder / "log").open("w+")
        if config:
            (folder / "config.toml").write_text(config)
            arguments = ("--config", str(folder / "config.toml"), *arguments)
        self.process = subprocess.Popen(
            [
                *(() if descriptors is None else ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh")),
                sys.executable, "-m", "edge_runtime", "serve", "--models", str(folder / "models"),
                "--state", str(folder / "state"), "--zmq", self.endpoint, *arguments,
            ],
            stderr=self._log, env={**os.environ, **environment},
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def log(self) -> list[dict]:
        self._log.flush()
        whole = Path(self._log.name).read_text().rpartition("\n")[0]  # a last line may be on its way
        return [json.loads(line) for line in whole.splitlines()]

    def messages(self) -> list[str]:
        return [line["message"] for line in self.log()]

    def wait_ready(self) -> None:
        """Wait until it serves every model."""
        self._line("ready")

    def address(self, door: str) -> str:
        """Where "http" or "grpc" listens."""
        return self._line(door)["endpoints"]

    def wait_said(self, words: str) -> None:
        """Wait until its log has a message with these words, of a model's print too."""
        self._line(words, is_whole=False)

    def _line(self, message: str, *, is_whole: bool = True) -> dict:
        """The first line of its log with this message; waits for it. is_whole: else the message may be a part of it."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            for line in self.log():
                if line["message"] == message or (not is_whole and message in line["message"]):
                    return line
            assert self.process.poll() is None, self.messages()
            time.sleep(0.02)
        raise AssertionError(f"it never said {message!r}; it said {self.messages()}")

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)
