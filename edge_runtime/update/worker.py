"""The thread that updates: looks when it is time, when somebody wakes it, and does what an operator asks.

Owns: when a look is due, and the one thread on which everything of the updater happens. Public methods may be called
from any thread; what an operator asks for is answered there, through `done`, and refused at once while a release is
under way, which can take as long as it is observed.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import EdgeRuntimeError, StorageFailed, UpdateError
from edge_runtime.serving.orders import Orders
from edge_runtime.update.schedule import Schedule
from edge_runtime.update.source import configured_source, folder_source
from edge_runtime.update.stick import find_repository
from edge_runtime.update.updater import Updater

log = logging.getLogger(__name__)

REOPEN_S = 30.0
"""Between tries to open the journal, on a disk that was full, most likely. Whoever asks for something has it tried
at once: that is who has made room."""

ONLY_IMPORTS = (
    "[update] names no repository, so there is nowhere to look: updates come by `edge-runtime update import DIR` only; "
    "for others, add url or folder to [update]"
)

Done = Callable[[Any], None]
"""Gets the result as JSON can hold it, or an EdgeRuntimeError; once. Thread: the worker's, or the caller's."""


class UpdateWorker:
    """One device's update thread. `start` once, `close` at the end; both idempotent."""

    def __init__(
        self,
        updater: Updater,
        settings: UpdateSettings,
        clock: Clock,
        stop: threading.Event,
        share: Callable[[], float] = random.random,
    ) -> None:
        """share: 0 to 1, where in a jitter this device stands. Raises ConfigError: no such repository can be."""
        self.updater = updater
        self.has_opened = threading.Event()
        self._settings = settings
        self._clock = clock
        self._stop = stop
        self._share = share
        self._source = configured_source(settings, clock)
        self._orders = Orders()
        self._is_woken = threading.Event()
        self._trouble: EdgeRuntimeError | None = None
        self._reopen_due_s = math.inf
        self._thread: threading.Thread | None = None
        self._schedule = Schedule(
            settings.poll_s, settings.poll_jitter, settings.wake_jitter_s, settings.min_check_s, due_s=math.inf
        )

    def reserve(self) -> None:
        """Keep the models folder from serving what updates serve. Before the loader starts."""
        self.updater.reserve()

    def start(self) -> None:
        """Start the thread: it lets what was active serve, sets `has_opened`, and looks for the first time."""
        if self._source is None:
            log.info("no repository is named: updates come by `edge-runtime update import` only")
        else:
            self._schedule.woken(self._clock.monotonic_s(), self._share())
        self._thread = threading.Thread(target=self._run, name="edge-updater", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop what is under way where it can be gone on with, and wait for the thread."""
        self._stop.set()
        self._orders.give(lambda: None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- told, from any thread --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What runs, what is under way, what was refused and why, how the last check ended, when the next is due."""
        if self._trouble is not None:
            return {"state": "broken", "reason": self._trouble.message}
        if not self.has_opened.is_set():
            return {"state": "starting"}
        name = self._source.name if self._source is not None else ""
        return {"source": name, "next_check_s": self._next_check_s(), **self.updater.status()}

    def summary(self) -> dict[str, Any]:
        """The same, but for what changes with time alone: for the state on MQTT. Never blocks."""
        if self._trouble is not None or not self.has_opened.is_set():
            return self.status()
        return self.updater.summary()

    def history(self, count: int) -> list[dict[str, Any]]:
        """The last things that happened, newest first; at most `report.SHOWN_HISTORY`. Never blocks."""
        return self.updater.history(count)

    # ---- asked for, from any thread ---------------------------------------------------------------------------------

    def look(self) -> None:
        """There may be something new: look soon. Never blocks, and a thousand of these are one look.

        Nothing happens where no repository is named.
        """
        if self._source is not None and not self._is_woken.is_set():
            self._is_woken.set()
            self._orders.give(self._woken)

    def check(self, done: Done) -> None:
        """Look now and tell what is offered; nothing is installed by it."""
        self._ask(done, lambda: self._look(installs=False))

    def apply(self, done: Done) -> None:
        """Look now and install what is meant for this device; answers when it is over."""
        self._ask(done, lambda: self._look(installs=True))

    def import_folder(self, folder: str, done: Done) -> None:
        """The same from a folder, for example a USB stick. It is believed no more than any other place."""
        self._ask(done, lambda: self._import(folder))

    def roll_back(self, model: str, done: Done) -> None:
        """Let the release before serve again, and refuse the one that does; one that is under way is taken back."""
        if self.updater.withdraw(model):
            done({"model": model, "withdrawn": True})
            return
        self._ask(done, lambda: {"model": model, "release": self.updater.roll_back(model).counter})

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._open()
        try:
            while not self._stop.is_set():
                self._step()
        finally:
            self._orders.end()
            self.updater.close()

    def _open(self) -> bool:
        """Whether the updater has its memory; what it can let serve without it serves."""
        try:
            self.updater.open()
        except StorageFailed as error:
            log.error("no updates until their journal can be opened", extra={"reason": error.message})
            self._trouble = error
            return False
        except Exception as error:
            log.exception("no updates until their journal makes sense")
            self._trouble = UpdateError(f"what is kept of updates makes no sense: {type(error).__name__}: {error}")
            return False
        finally:
            self._reopen_due_s = self._clock.monotonic_s() + REOPEN_S
            self.has_opened.set()
        self._trouble = None
        return True

    def _next_check_s(self) -> float | None:
        """None: there is none."""
        if self._source is None:
            return None
        return round(max(self._schedule.due_s - self._clock.monotonic_s(), 0.0), 1)

    def _step(self) -> None:
        """Do what was asked for, or look (or open) when it is time, however often somebody wakes this."""
        is_open = self._trouble is None
        left_s = (self._schedule.due_s if is_open else self._reopen_due_s) - self._clock.monotonic_s()
        step = self._orders.next(min(left_s, threading.TIMEOUT_MAX)) if left_s > 0 else None
        try:
            if step is not None:
                step()
            elif is_open:
                self._look(installs=self._settings.auto)
            else:
                self._open()
        except Exception:
            log.exception("a step of the updater failed")

    def _woken(self) -> None:
        self._is_woken.clear()
        self._schedule.woken(self._clock.monotonic_s(), self._share())

    def _look(self, *, installs: bool) -> dict[str, Any]:
        if self._source is None:
            raise UpdateError(ONLY_IMPORTS)
        try:
            return self.updater.check(self._source, installs=installs).as_json()
        finally:
            self._schedule.looked(self._clock.monotonic_s(), self._share())

    def _import(self, folder: str) -> dict[str, Any]:
        source = folder_source(find_repository(folder), self._clock)
        return self.updater.check(source, installs=True).as_json()

    def _ask(self, done: Done, work: Callable[[], dict[str, Any]]) -> None:
        if self.updater.is_rolling_out:
            done(UpdateError("a release is under way; `edge-runtime update status` says which, and how far it is"))
            return

        def answer() -> None:
            try:
                result: Any = work() if self._trouble is None or self._open() else self._trouble
            except EdgeRuntimeError as error:
                result = error
            except Exception as error:
                log.exception("an update command failed")
                result = UpdateError(f"{type(error).__name__}: {error}")
            done(result)

        self._orders.give(answer, done)
