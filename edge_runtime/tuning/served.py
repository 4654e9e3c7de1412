"""A daemon in a child process, serving one model in one way, with a client connected to it.

Owns: the child, its socket and its log. What goes wrong with it is a ServingFailed in words. Thread: one owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.client.zmq_client import Client
from edge_runtime.config.settings import Config, LogSettings, ZmqSettings
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tuning import served_child
from edge_runtime.tuning.temporary_folder import temporary_folder

READY_S = 600.0
"""As an engine's first load: TensorRT builds for minutes."""

CALIBRATED_S = 10.0
"""A curve is measured in about 1 s once nothing is under way, and the layout for all cores with a second load."""

LOOK_S = 0.02
STOP_S = 5.0

SHOWN_CHARACTERS = 300


class ServingFailed(Exception):
    """A candidate could not be served, or stopped; the message says why."""


class Served:
    """A daemon that is ready. `check` raises ServingFailed where it is gone."""

    def __init__(self, child: subprocess.Popen[bytes], endpoint: str, client: Client, log: Path, model: str) -> None:
        self.endpoint = endpoint
        self.client = client
        self._child = child
        self._log = log
        self._model = model
        self._socket = Path(endpoint.removeprefix("ipc://"))

    def check(self) -> None:
        """Raise ServingFailed with the reason where the daemon ended."""
        status = self._child.poll()
        if status is None:
            return
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; most likely there was not enough memory" if name == "SIGKILL" else ""
            raise ServingFailed(f"the daemon that served it was ended by {name}{hint}")
        raise ServingFailed(f"the daemon that served it ended with status {status}: {self._last_words()}")

    def wait_loaded(self, limit_s: float = READY_S) -> dict[str, Any]:
        """What the daemon says of the model once it is ready. Raises ServingFailed: it is not, and why."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self.check()
            with contextlib.suppress(ConnectionError, TimeoutError, EdgeRuntimeError):
                for status in self.client.models():
                    if status["name"] == self._model and status["state"] == "ready" and self._socket.exists():
                        return status
                    if status["name"] == self._model and status["state"] == "failed":
                        raise ServingFailed(str(status["reason"])[:SHOWN_CHARACTERS])
            time.sleep(LOOK_S)
        raise ServingFailed(f"was not loaded within {limit_s:g} s")

    def wait_calibrated(self, limit_s: float = CALIBRATED_S) -> None:
        """Wait until the model's curve was measured, or the time is over: then what is known by now serves."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and '"calibrated"' not in self._log.read_text(errors="replace"):
            self.check()
            time.sleep(LOOK_S)

    def memory_bytes(self) -> int:
        """Of the daemon's process, with all that it loaded."""
        host = self.client.stats()["host"]
        return int(host.get("pss_bytes") or host.get("rss_bytes") or 0)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        if not lines:
            return "it said nothing"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(lines[-1])["message"])[:SHOWN_CHARACTERS]
        return lines[-1][:SHOWN_CHARACTERS]


@contextmanager
def served(config: Config, model: str, log: Path) -> Iterator[Served]:
    """Start a daemon with this configuration on a socket of its own; it is gone afterwards, whatever happened."""
    # A socket's path may have some hundred bytes; a state folder's may be longer.
    with temporary_folder() as sockets:
        endpoint = f"ipc://{sockets}/s"
        config = msgspec.structs.replace(
            config, zmq=ZmqSettings(endpoints=(endpoint,)), log=LogSettings(format="json"), watch=False
        )
        child = _start(config, log)
        client = Client(f"{endpoint}.control", control=f"{endpoint}.control")
        try:
            served_ = Served(child, endpoint, client, log, model)
            _wait_bound(Path(f"{sockets}/s.control"), served_)
            yield served_
        finally:
            client.close()
            _stop(child)


# ---- private --------------------------------------------------------------------------------------------------------


def _start(config: Config, log: Path) -> subprocess.Popen[bytes]:
    with os.fdopen(os.memfd_create("config"), "w+b", buffering=0) as source, log.open("wb") as words:
        source.write(msgspec.json.encode(config))
        source.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", served_child.__name__, str(os.getpid())],
            stdin=source,
            stdout=words,
            stderr=words,
            start_new_session=True,  # a terminal's Ctrl-C is for us, and we end it
        )


def _wait_bound(socket: Path, served_: Served) -> None:
    deadline_s = time.monotonic() + READY_S
    while not socket.exists():
        served_.check()
        if time.monotonic() > deadline_s:
            raise ServingFailed(f"the daemon did not start within {READY_S:g} s")
        time.sleep(LOOK_S)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End it, politely first: SIGTERM answers what was admitted."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
