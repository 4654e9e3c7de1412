"""A device whose daemon, a process of its own, is killed again and again; and a client that asks it all the time."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import psutil

from edge_runtime.config.settings import Config, LimitSettings, LogSettings, ZmqSettings
from edge_runtime.daemon.parts import ReadSettings
from edge_runtime.daemon.run import serve
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.updates.journal import Journal
from tests.contract.updates.updated_device import update_settings
from tests.fakes.fork_server import exit_status, forking_from, start
from tests.fakes.releases import Made
from tests.fakes.update_site import UpdateSite, adder

if TYPE_CHECKING:
    from typing_extensions import Self

LIMIT_S = 90.0
PATIENCE_S = 15.0
"""For a release that may never come: one that was killed three times while it was tried is refused."""
ANSWER_MS = 15_000.0
PAUSE_S = 0.01
"""Between two requests: dozens of answers come in each life, and the cores are left to the daemons."""

WARM = ("pytest", "onnxruntime", "edge_runtime.updates.worker", __name__)


class KilledDevice:
    """One device and the repository that it follows. active: the release that its journal named after the last kill.

    Commands raise AssertionError where something was forgotten or is left behind. Thread: one owner.
    """

    def __init__(self, folder: Path) -> None:
        self.active = 0
        self.updates = 0
        """How many releases were committed."""
        self.endpoint = f"ipc://{folder}/i.sock"
        self._folder = folder
        self._site = UpdateSite()
        self._offered: Made | None = None
        self._marks: dict[str, int] = {}
        self._refused: set[str] = set()
        self._process: ForkServerProcess | None = None
        self._children: list[psutil.Process] = []

    def offer_next(self) -> int:
        """Publish another release, unless one is still to be brought: which one that is. While no daemon runs."""
        made = self._offered
        if made is None or made.release.counter == self.active or made.release.manifest_sha256 in self._refused:
            number = 1 if made is None else made.release.counter + 1
            made = self._offered = self._site.release(adder(self._folder / "made", number))
            self._site.write(self._folder / "mirror")
        return made.release.counter

    def start(self) -> None:
        """Start the daemon; it looks for updates at once, and each second."""
        config = self._config()
        self._process = forking_from(*WARM).Process(target=serve, args=(ReadSettings(config, config),))
        start(self._process)

    def kill(self) -> None:
        """SIGKILL. What the daemon had committed is not forgotten."""
        process, self._process = self._process, None
        assert process is not None
        assert process.pid is not None
        assert process.is_alive(), "the daemon ended by itself; see what it said"
        self._children += psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        exit_status(process, LIMIT_S)
        self._remember()

    def close(self) -> None:
        """End a daemon that a failed test left; whatever daemons had started has ended with them. Idempotent."""
        if self._process is not None:
            exit_status(self._process, 0)
            self._process = None
        _, alive = psutil.wait_procs(self._children, LIMIT_S)
        assert alive == []

    def _remember(self) -> None:
        """Look at a copy of the memory, as a restart will find it."""
        source, aside = self._folder / "state" / "update" / "journal", self._folder / "aside"
        if not source.exists():
            assert self.active == 0
            return
        shutil.copytree(source, aside)
        with closing(Journal(aside)) as journal:
            journal.open()
            release = journal.active().get("adder")
            marks, refused, is_lost = journal.marks(), set(journal.refused()), journal.is_state_lost
        shutil.rmtree(aside)
        active = 0 if release is None else release.counter
        assert not is_lost
        assert active >= self.active, "the active release went back"
        assert all(marks.get(name, 0) >= version for name, version in self._marks.items()), "a mark went back"
        assert refused >= self._refused, "a refused release is forgotten"
        self.updates += active > self.active
        self.active, self._marks, self._refused = active, marks, refused

    def _config(self) -> Config:
        (self._folder / "models").mkdir(parents=True, exist_ok=True)
        return Config(
            models=str(self._folder / "models"),
            state=str(self._folder / "state"),
            watch=False,
            calibrate=False,
            zmq=ZmqSettings(endpoints=(self.endpoint,)),
            limits=LimitSettings(cores=1),
            log=LogSettings(level="error"),
            update=update_settings(
                self._folder,
                self._site.root,
                folder=str(self._folder / "mirror"),
                auto=True,
                poll_s=1.0,
                min_check_s=0.0,
                wake_jitter_s=0.0,
            ),
        )


class Load:
    """A client that asks for `adder` all the time, and again when the connection is lost. Used as a context manager.

    troubles: answers that no release gives, or not at that time, and errors that a client should not see.
    """

    def __init__(self, endpoint: str) -> None:
        self.troubles: list[str] = []
        self._endpoint = endpoint
        self._active = 0
        self._offered = 0
        self._lives = 0
        self._last = ""
        self._answered = threading.Event()
        self._has_come = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def expect(self, active: int, offered: int) -> None:
        """A daemon is about to start in which one release is active, and another may take its place."""
        self._active, self._offered = active, offered
        self._lives += 1
        self._answered.clear()
        self._has_come.clear()

    def wait_answered(self) -> None:
        """Until this daemon has answered."""
        assert self._answered.wait(LIMIT_S), f"no answer came; with {self._active} active, the last was {self._last}"

    def wait_for(self, offered: int) -> None:
        """Until the release that was offered has answered, or is not to be expected any more."""
        if self._active < offered:
            self._has_come.wait(PATIENCE_S)

    def _ask_on(self) -> None:
        with Client(self._endpoint) as client:
            while not self._stop.wait(PAUSE_S):
                lives = self._lives
                try:
                    result = client.infer("adder", {"x": np.zeros((1, 2), np.float32)}, timeout_ms=ANSWER_MS)
                except ConnectionError as error:
                    self._last = repr(error)
                    continue  # it is dead, or not there yet
                except TimeoutError as error:
                    # A daemon that is back before its client looked: the client cannot know that its request is gone.
                    if lives == self._lives:
                        self.troubles.append(repr(error))
                    continue
                except EdgeRuntimeError as error:
                    self._last = repr(error)
                    # Before its first release it has no model; after it, it never answers before it can.
                    if self._active:
                        self.troubles.append(f"with {self._active} active: {error!r}")
                    continue
                self._check(result.version, result["y"].tolist())

    def _check(self, version: int, added: list[list[float]]) -> None:
        if added != [[float(version)] * 2]:
            self.troubles.append(f"version {version} answered {added}")
        if not self._active <= version <= self._offered:
            self.troubles.append(f"version {version} answered; {self._active} was active and {self._offered} offered")
        self._answered.set()
        if version == self._offered:
            self._has_come.set()
