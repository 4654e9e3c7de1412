"""The daemons that a tune measures: each the real one, in a child process, serving one candidate.

Owns: a daemon's process with its socket and log, and how many run at once. What is not asked sleeps, and costs memory
only; the one that was not asked for longest ends where the next would take more than half of the memory that was free.
Thread: one owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.config.settings import Config, LogSettings, ZmqSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.sandbox.child import Child, start_child
from edge_runtime.sandbox.ending import ShowProgress, judge_ending
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.tuning.candidates import Candidate
from edge_runtime.tuning.folders import temporary_folder

READY_S = 600.0
"""As for a way's first load: TensorRT builds for minutes."""

CALIBRATED_S = 10.0
"""A curve is measured in about 1 s once the daemon is idle, and the layout for all cores with a second load."""

LOOK_S = 0.02
STOP_S = 5.0

SHOWN_CHARACTERS = 300

MAX_RUNNING = 32
"""Each idle daemon takes up to half a percent of a core (bench, idle.cpu_percent)."""

MEMORY_SHARE = 0.5
"""Of the memory that was free at first: a run takes more than a loaded model has, and the rest is the owner's."""


class ServingFailed(Exception):
    """The daemon did not serve a candidate, or stopped; the message says why."""


class TrialDaemon:
    """A running daemon. child: its process. endpoint: for requests. log: its output. model: the one served."""

    def __init__(self, child: Child, endpoint: str, client: Client, log: Path, model: str) -> None:
        self.endpoint = endpoint
        self.client = client
        self._child = child
        self._log = log
        self._model = model
        self._socket = Path(endpoint.removeprefix("ipc://"))
        self._status: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ServingFailed with the reason where the daemon ended."""
        if self._child.is_alive():
            return
        ending = judge_ending(self._child.end(), output_text=self._last_words())
        raise ServingFailed(f"the daemon that served it ended: {ending.reason}")

    def wait_ready(self, limit_s: float = READY_S) -> dict[str, Any]:
        """Wait until the model is ready and its curve is measured; returns its status then. Raises ServingFailed."""
        if self._status is not None:
            self.check()
            return self._status
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self.check()
            with contextlib.suppress(ConnectionError, TimeoutError, EdgeRuntimeError):
                for status in self.client.models():
                    if status["name"] == self._model and status["state"] == "ready" and self._socket.exists():
                        if status["mode"] == "workers":
                            self._wait_calibrated()
                        self._status = status
                        return status
                    if status["name"] == self._model and status["state"] == "failed":
                        raise ServingFailed(str(status["reason"])[:SHOWN_CHARACTERS])
            time.sleep(LOOK_S)
        raise ServingFailed(f"was not loaded within {limit_s:g} s")

    def memory_bytes(self) -> int:
        """The memory of the daemon's process, with all that it loaded."""
        host = self.client.stats()["host"]
        return int(host.get("pss_bytes") or host.get("rss_bytes") or 0)

    def wait_bound(self, socket: Path) -> None:
        """Wait until the daemon has made its control socket. Raises ServingFailed: it ended, or is late."""
        deadline_s = time.monotonic() + READY_S
        while not socket.exists():
            self.check()
            if time.monotonic() > deadline_s:
                raise ServingFailed(f"the daemon did not start within {READY_S:g} s")
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """End the daemon and all that it started; SIGTERM first, which answers admitted requests."""
        deadline_s = time.monotonic() + STOP_S
        if self._child.is_alive():
            self._child.terminate()
        while self._child.is_alive() and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self._child.end()

    def _wait_calibrated(self) -> None:
        """Wait for the curve; past the limit the daemon serves with what it has."""
        deadline_s = time.monotonic() + CALIBRATED_S
        while time.monotonic() < deadline_s and '"calibrated"' not in self._log.read_text(errors="replace"):
            self.check()
            time.sleep(LOOK_S)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        if not lines:
            return "it said nothing"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(lines[-1])["message"])[:SHOWN_CHARACTERS]
        return lines[-1][:SHOWN_CHARACTERS]


class DaemonPool:
    """Runs daemons; `close` ends all. serve: runs one candidate's, which is ready inside the block.

    budget_bytes: of all together; None for a share of the memory that is free now.
    """

    def __init__(
        self, serve: Callable[[Candidate], AbstractContextManager[TrialDaemon]], budget_bytes: int | None = None
    ) -> None:
        self._serve = serve
        self._running: dict[Candidate, tuple[TrialDaemon, ExitStack]] = {}
        self._memory_bytes: dict[Candidate, int] = {}
        if budget_bytes is None:
            budget_bytes = int((HostProbe().memory_available_bytes() or 0) * MEMORY_SHARE)
        self._budget_bytes = budget_bytes

    def daemon(self, candidate: Candidate, *, alone: bool = False) -> TrialDaemon:
        """The candidate's daemon, started where it does not run. Raises ServingFailed, EdgeRuntimeError.

        alone: end all others, for a measurement that none may disturb.
        """
        found = self._running.pop(candidate, None)
        if alone:
            self.close()
        if found is None:
            found = self._started(candidate)
        self._running[candidate] = found  # the last one asked for
        return found[0]

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's daemon, if it runs."""
        found = self._running.pop(candidate, None)
        if found is not None:
            found[1].close()

    def close(self) -> None:
        """End all daemons. Idempotent."""
        for candidate in list(self._running):
            self.stop(candidate)

    def _started(self, candidate: Candidate) -> tuple[TrialDaemon, ExitStack]:
        likely = self._memory_bytes.get(candidate, max(self._memory_bytes.values(), default=0))
        while self._running and (len(self._running) >= MAX_RUNNING or likely + self._used_bytes() > self._budget_bytes):
            self.stop(next(iter(self._running)))
        try:
            return self._start(candidate)
        except ServingFailed:
            if not self._running:
                raise
            # A device's memory may be full of the others, which the host's free memory does not tell.
            self.close()
            return self._start(candidate)

    def _start(self, candidate: Candidate) -> tuple[TrialDaemon, ExitStack]:
        with ExitStack() as stack:
            daemon = stack.enter_context(self._serve(candidate))
            self._memory_bytes[candidate] = daemon.memory_bytes()
            return daemon, stack.pop_all()

    def _used_bytes(self) -> int:
        return sum(self._memory_bytes[each] for each in self._running)


@contextmanager
def running_daemon(config: Config, model: str, log: Path) -> Iterator[TrialDaemon]:
    """Run a daemon with this configuration on a socket of its own; it ends with the block. Paths are absolute."""
    # A socket's path may have some hundred bytes; a state folder's may be longer.
    with temporary_folder() as sockets:
        endpoint = f"ipc://{sockets}/s"
        config = msgspec.structs.replace(
            config, zmq=ZmqSettings(endpoints=(endpoint,)), log=LogSettings(format="json"), watch=False
        )
        with log.open("wb") as output:
            child = start_child(
                serve_candidate, config, stdout=output.fileno(), has_children=True, environment=os.environ
            )
        client = Client(f"{endpoint}.control", control=f"{endpoint}.control")
        daemon = TrialDaemon(child, endpoint, client, log, model)
        try:
            daemon.wait_bound(Path(f"{sockets}/s.control"))
            yield daemon
        finally:
            client.close()
            daemon.stop()


def serve_candidate(config: Config, _progress: ShowProgress) -> None:
    """Serve until a signal to stop, in the child; ends its process with the daemon's exit status."""
    from edge_runtime.daemon.parts import ReadSettings
    from edge_runtime.daemon.run import serve

    sys.exit(serve(ReadSettings(config, config)))
