"""One life of the child process that runs a `model.py`: begin, exchange messages, end.

Owns: the process, its socket and its log. Restarting is python_backend.py's. Thread: one caller at a time; a thread of
its own makes the child, because the kernel ends a child with the thread that made it, and passes its output to the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import edge_runtime
from edge_runtime.backends.process_memory import resident_bytes
from edge_runtime.backends.python_frames import BrokenMessage, Named, receive_message, send_message
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

_LOG_LINE_BYTES = 4096
"""A longer line is logged in pieces, so that a model that prints without end costs no memory."""

_GRACE_S = 1.0
"""A child whose socket was closed ends by itself at once; this is for models that clean up. Then it is killed."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ModelProcess:
    """A running child. `begin` makes one; `end` always leaves no process, thread or descriptor."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._socket, self._other = socket.socketpair()
        self._child: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._is_made = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"python-model-{folder.parent.name}", daemon=True)

    def begin(self, timeout_s: float) -> ModelSpec:
        """Start the child and wait until its model is loaded. Raises LoadFailed; the caller ends it then."""
        self._keeper.start()
        self._is_made.wait()
        self._other.close()
        if self._error is not None:
            raise LoadFailed(f"cannot start {sys.executable}: {self._error.strerror}")
        try:
            header, _ = receive_message(self._socket, timeout_s)
        except TimeoutError as error:
            raise LoadFailed(f"{self._folder / 'model.py'} was not loaded within {timeout_s:g} s") from error
        except BrokenMessage as error:
            raise LoadFailed(f"{self._folder / 'model.py'} ended its process while loading; see the log") from error
        if "error" in header:
            raise LoadFailed(f"{self._folder / 'model.py'}: {header['error']}")
        return ModelSpec(_specs(header["inputs"]), _specs(header["outputs"]))

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs. Does not reap it: its process group stays ours until `end`."""
        if self._child is None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._child.pid, flags) is None

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the child."""
        return resident_bytes(self._child.pid) if self._child is not None else 0

    def exchange(self, tensors: Sequence[Named], timeout_s: float) -> tuple[dict[str, Any], dict[str, Array]]:
        """One run. Raises BrokenMessage (the child is gone) or TimeoutError; either way it must be ended."""
        self._socket.settimeout(timeout_s)
        send_message(self._socket, {}, tensors)
        return receive_message(self._socket, timeout_s)

    @property
    def ending(self) -> str:
        """How the child ended, once `end` was called: "exit status 1", "signal 9 (Killed)", as of the OOM killer."""
        status = None if self._child is None else self._child.returncode
        if status is None or status >= 0:
            return f"exit status {status}"
        return f"signal {-status} ({signal.strsignal(-status)})"

    def end(self) -> None:
        """Close, wait a moment, kill the child with all it started, reap it. Idempotent."""
        self._socket.close()
        self._other.close()
        if self._child is None:
            return
        self._keeper.join(_GRACE_S)
        # Invariant: not reaped yet, so the group's number cannot belong to anybody else.
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._keeper.join()

    def _keep(self) -> None:
        """The keeper's thread: make the child, log what it prints, stay until it has ended."""
        package = str(Path(edge_runtime.__file__).resolve().parents[1])
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(self._threads))
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "edge_runtime.backends.python_child",
                 str(self._other.fileno()), str(os.getpid()), str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[self._other.fileno()],
                cwd="/",  # `-m` puts the working folder on the path; the daemon's could hold anything
                env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._error = error
            return
        finally:
            self._is_made.set()
        output = self._child.stdout
        assert output is not None
        with output:
            while line := output.readline(_LOG_LINE_BYTES):
                log.info("%s: %s", self._folder, line.decode(errors="replace").rstrip())
        with contextlib.suppress(ChildProcessError):  # `end` was quicker
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)


def _specs(described: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], entry["datatype"], tuple(entry["shape"])) for entry in described)
