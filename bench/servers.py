"""The processes of a bench: the daemon, the yardstick servers, and one place that stops them all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import zmq

from bench.makers import BenchModel
from edge_runtime.messages import RequestHeader
from edge_runtime.wire.codec import pack_request, unpack_reply

OK_BYTE = 0x84
"""First byte of an answer's header: a map of four keys (codec.pack_answer); a plain request echoed too."""
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0
SETTLE_LIMIT_S = 20.0
IDLE_SHARE = 0.03
"""Of one core: below this for a second a daemon has ended its calibration."""
REPOSITORY = Path(__file__).parent.parent


class BenchError(Exception):
    """Something to be measured did not work; the message holds the end of its log."""


class Children:
    """Child processes in one folder for sockets, models and logs; leaving it stops all and removes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._count = 0

    def __enter__(self) -> Children:  # noqa: PYI034 (typing.Self needs 3.11)
        self.folder.mkdir(parents=True, mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in list(self._running.values()):
            self.stop(child)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str] | None = None,
        folder: Path = REPOSITORY,
    ) -> subprocess.Popen[bytes]:
        """Start a child in `folder` whose output goes to a log. environment: beside this process's own."""
        # As installed, modules are compiled once; else each start compiles them, which takes time and memory.
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
            **(environment or {})
        }
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
            )
        self._running[child.pid] = child
        return child

    def stop(self, child: subprocess.Popen[bytes]) -> int:
        """SIGTERM, then SIGKILL when it takes too long; its exit status."""
        self._running.pop(child.pid, None)
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        return child.returncode

    def log(self, name: str) -> Path:
        """Where a child's output goes."""
        return self.folder / f"{name}.log"

    def new_name(self, stem: str) -> str:
        """A short name not used before in this folder (a socket path is at most 107 bytes)."""
        self._count += 1
        return f"{stem}{self._count}"


class Daemon:
    """`edge-runtime serve` on a folder made for it."""

    def __init__(
        self,
        children: Children,
        models: Mapping[str, tuple[BenchModel, str]] | Sequence[BenchModel],
        *,
        state: Path | None = None,
        mqtt: str = "",
        doors: Sequence[str] = (),
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        checkout: Path = REPOSITORY,
    ) -> None:
        """models: what to serve, or name -> (model, its model.toml). mqtt: a broker's URL. doors: further options, as
        `--http HOST:PORT`. config: a file of settings.

        environment: of the process, beside this one's own. checkout: whose code runs, with this one's packages.
        """
        self._children = children
        self._checkout = checkout
        self._name = children.new_name("d")
        self._folder = children.folder / self._name
        if not isinstance(models, Mapping):
            models = {model.name: (model, "") for model in models}
        for name, (model, settings) in models.items():
            version = self._folder / "models" / name / "1"
            version.mkdir(parents=True)
            shutil.copyfile(model.path, version / f"model{model.path.suffix}")
            if settings:
                (version.parent / "model.toml").write_text(settings)
        self.models = self._folder / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        self.state = state or self._folder / "state"
        self.endpoint = f"ipc://{self._folder}/infer.sock"
        self.control_endpoint = f"{self.endpoint}.control"
        self._options = ("--mqtt", mqtt) if mqtt else ()
        self._options += tuple(doors)
        self._options += ("--config", str(config)) if config else ()
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        self._child = self._children.start(
            [
                *(sys.executable, "-m", "edge_runtime", "serve"),
                *("--models", str(self.models), "--zmq", self.endpoint, "--state", str(self.state), *self._options),
            ],
            self._name,
            self._environment,
            self._checkout,
        )

    def cpu_s(self) -> float:
        """Seconds of CPU that the process and its children have used."""
        process = psutil.Process(self.pid)
        used = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(times.user + times.system for times in used)

    def start_and_settle(self, request: Path) -> None:
        """Start, wait for the first answer, then until calibration has ended."""
        self.start()
        self.wait_for_answer(request)
        self.settle()

    def wait_for_answer(self, request: Path) -> None:
        """Until a request is answered. Raises BenchError with the daemon's log when it is not."""
        try:
            answer_time_s(self.endpoint, request, START_LIMIT_S, self._child)
        except BenchError as error:
            raise BenchError(f"{error}; the daemon's log ends:\n{self._log_end()}") from None

    def settle(self, quiet_s: float = 2.0) -> None:
        """Wait until the process has been idle for `quiet_s`, or SETTLE_LIMIT_S."""
        process, until, idle_since = psutil.Process(self.pid), time.monotonic() + SETTLE_LIMIT_S, time.monotonic()
        process.cpu_percent()
        while time.monotonic() < min(until, idle_since + quiet_s):
            time.sleep(0.25)
            if process.cpu_percent() > IDLE_SHARE * 100:
                idle_since = time.monotonic()

    def control(self, op: str, model: str = "", limit_s: float = 30.0) -> Any:
        """The result of an op on the control endpoint. Raises BenchError."""
        with ControlConnection(self.control_endpoint) as connection:
            return connection.ask(op, model, limit_s)

    def calibrated_rows(self, model: str) -> int:
        """Rows that the daemon joins for a model at most, by its log's word; 1 when it did not say."""
        found = 1
        for line in self._children.log(self._name).read_text(errors="replace").splitlines():
            try:
                words = json.loads(line)
            except ValueError:
                continue
            if isinstance(words, dict) and words.get("model") == model and "batch_rows" in words:
                found = max(1, int(words["batch_rows"]))
        return found

    def crash(self) -> None:
        """End the process as a native abort in a model's library does: at once, and nothing is written any more."""
        child, self._child = self._child, None
        assert child is not None
        child.send_signal(signal.SIGABRT)
        child.wait(STOP_LIMIT_S)
        self._children.stop(child)

    def stop(self) -> int:
        """Stop it; its exit status."""
        if self._child is None:
            return 0
        child, self._child = self._child, None
        status = self._children.stop(child)
        if status:
            print(f"  the daemon exited {status}; its log ends:\n{self._log_end()}", file=sys.stderr)
        return status

    def _log_end(self) -> str:
        return "\n".join(self._children.log(self._name).read_text(errors="replace").splitlines()[-15:])


class ControlConnection:
    """A DEALER on a control endpoint, one question at a time."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, 5)
        self._socket.connect(endpoint)

    def __enter__(self) -> ControlConnection:  # noqa: PYI034
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, op: str, model: str = "", limit_s: float = 30.0) -> Any:
        """The result. Raises BenchError when there is none in time, or an error."""
        self._socket.send_multipart([pack_request(RequestHeader(op=op, model=model)), b"bench"])
        if not self._socket.poll(int(limit_s * 1e3)):
            raise BenchError(f"{op} {model}: no answer within {limit_s} s")
        reply = unpack_reply(self._socket.recv_multipart()[0])
        if reply.error is not None:
            raise BenchError(f"{op} {model}: {reply.error.get('code')}: {reply.error.get('message')}")
        return reply.result


class Yardstick:
    """A bare loop or an echo: any command that serves one endpoint."""

    def __init__(self, children: Children, command: Sequence[str], endpoint: str, request: Path) -> None:
        self._children, self._command, self.endpoint, self._request = children, command, endpoint, request
        self._name = children.new_name("y")
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Yardstick:  # noqa: PYI034
        self._child = self._children.start(self._command, self._name)
        try:
            answer_time_s(self.endpoint, self._request, START_LIMIT_S, self._child)
        except BenchError as error:
            log = self._children.log(self._name).read_text(errors="replace")[-1000:]
            raise BenchError(f"{error}; {' '.join(self._command[:3])}: {log}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child is not None
        self._children.stop(self._child)


def request_frames(request: Path) -> list[bytes]:
    """The frames of a request in load.c's file format."""
    content, frames, offset = request.read_bytes(), [], 0
    while offset < len(content):
        length = int.from_bytes(content[offset : offset + 4], sys.byteorder)
        frames.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return frames


def answer_time_s(endpoint: str, request: Path, limit_s: float, child: subprocess.Popen[bytes] | None = None) -> float:
    """Seconds until a request is answered, reconnecting every millisecond while nothing is bound there.

    One that is refused because the daemon starts is sent again each millisecond: its endpoints are bound at once.
    """
    frames = request_frames(request)
    start = time.perf_counter()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, 1)
        socket.connect(endpoint)
        socket.send_multipart(frames)
        while True:
            while not socket.poll(50):
                if time.perf_counter() - start > limit_s:
                    raise BenchError(f"{endpoint}: no answer within {limit_s:.0f} s")
                if child is not None and child.poll() is not None:
                    raise BenchError(f"{endpoint}: the process ended with {child.returncode}")
            elapsed = time.perf_counter() - start
            header = socket.recv_multipart()[0]
            if header[0] in (OK_BYTE, OK_BYTE + 1):  # with words, one key more
                return elapsed
            error = unpack_reply(header).error or {}
            if error.get("code") != "not_ready" or elapsed > limit_s:
                raise BenchError(f"{endpoint}: {error.get('code')}: {error.get('message')}")
            time.sleep(0.001)
            socket.send_multipart(frames)


def free_folder() -> Path:
    """A short path for a run's files: ipc paths are at most 107 bytes."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"er-bench-{os.getpid()}"
