"""The thread of updates: it checks when a check is due, when it is woken, and when an operator asks.

Owns: when a check is due, and the one thread on which the updater runs. Any thread may call the public methods. The
worker's thread calls `done` with an operation's result. While a release is under way, its observation included, or a
configuration is observed, every operation is refused at once, except the withdrawal of that release. One that was asked
before waits, and a rollback finds out then whether it still means the release that it meant.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge_runtime.addresses import Proxy
from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.config.windows import UpdateWindow, opens_in_s, parse_window
from edge_runtime.errors import EdgeRuntimeError, StorageFailed, UpdateError
from edge_runtime.models.executor import Executor
from edge_runtime.updates.link import link_in_use
from edge_runtime.updates.source import configured_source, find_repository, folder_source
from edge_runtime.updates.updater import Updater

log = logging.getLogger(__name__)

REOPEN_S = 30.0
"""Between tries to open the journal; most likely its disk is full. An operation tries at once: its operator may have
made room."""

ONLY_IMPORTS = (
    "[update] names no repository, so there is nowhere to look: updates come by `edge-runtime update import DIR` only; "
    "for others, add url or folder to [update]"
)

Done = Callable[[Any], None]
"""Called once with the result for JSON, or an EdgeRuntimeError. Thread: the worker's, or the caller's."""


class UpdateWorker:
    """One device's update thread. `start` once, `close` at the end; both idempotent."""

    def __init__(
        self,
        updater: Updater,
        settings: UpdateSettings,
        clock: Clock,
        stop: threading.Event,
        chance: random.Random | None = None,
        *,
        link: Callable[[], tuple[str, str]] = link_in_use,
        proxy: Proxy | None = None,
    ) -> None:
        """chance: draws this device's place in a jitter. link: as `link_in_use`. proxy: to the repository.

        Raises ConfigError: the repository is invalid.
        """
        self.updater = updater
        self.has_opened = threading.Event()
        self._settings = settings
        self._clock = clock
        self._stop = stop
        self._chance = chance or random.SystemRandom()
        self._link = link
        self._waits_for = ""
        self._source = configured_source(settings, clock, stop, proxy)
        self._executor = Executor()
        self._is_woken = threading.Event()
        self._trouble: EdgeRuntimeError | None = None
        self._reopen_due_s = math.inf
        self._thread: threading.Thread | None = None
        self._schedule = Schedule(
            settings.poll_s, settings.poll_jitter, settings.wake_jitter_s, settings.min_check_s, due_s=math.inf
        )

    def reserve(self) -> None:
        """Keep the models folder from serving the models of updates. Before the loader starts."""
        self.updater.reserve()

    def start(self) -> None:
        """Start the thread: it serves the active releases, sets `has_opened`, and checks for the first time."""
        if self._source is None:
            log.info("no repository is named: updates come by `edge-runtime update import` only")
        else:
            self._schedule.woken(self._clock.monotonic_s(), self._chance.random())
        self._thread = threading.Thread(target=self._run, name="edge-updater", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop a rollout where it can be resumed. Does not wait."""
        self._stop.set()
        self._executor.submit(lambda: None)

    def close(self, limit_s: float | None = None) -> None:
        """Stop, and wait for the thread.

        limit_s: how long, where no release is under way; None for its end. `is_running` is true while one goes on.
        """
        self.stop()
        if self._thread is not None:
            self._thread.join(None if self.updater.is_rolling_out else limit_s)
            if not self._thread.is_alive():
                self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether its thread has begun and not ended."""
        return self._thread is not None

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the device's group, as its repository or its own settings say it. Thread: any."""
        return (self.updater.configuration.group,)

    # ---- status, from any thread ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return `Updater.status`, with the repository and the time of the next check."""
        if self._trouble is not None:
            return {"state": "broken", "reason": self._trouble.message}
        if not self.has_opened.is_set():
            return {"state": "starting"}
        name = self._source.name if self._source is not None else ""
        told = {"source": name, "next_check_s": self._next_check_s(), "waits_for": self._waits_for}
        return {**told, **self.updater.status()}

    def summary(self) -> dict[str, Any]:
        """Return the status without what changes with time alone: for the state on MQTT. Never blocks."""
        if self._trouble is not None or not self.has_opened.is_set():
            return self.status()
        return self.updater.board.summary()

    def history(self, count: int) -> list[dict[str, Any]]:
        """Return the last entries of the history, newest first; at most KEPT_HISTORY. Never blocks."""
        return self.updater.board.history(count)

    # ---- operations, from any thread --------------------------------------------------------------------------------

    def look(self) -> None:
        """Wake the worker: check soon. Never blocks; many calls make one check.

        Does nothing where no repository is named.
        """
        if self._source is not None and not self._is_woken.is_set():
            self._is_woken.set()
            self._executor.submit(self._woken)

    def check(self, done: Done) -> None:
        """Check now what is offered, and install nothing."""
        self._ask(done, partial(self._look, installs=False, configures=False))

    def apply(self, done: Done) -> None:
        """Check now and install what is meant for this device; `done` is called at the end."""
        self._ask(done, partial(self._look, installs=True))

    def import_folder(self, folder: str, done: Done) -> None:
        """Install from a folder, for example a USB stick, which is verified like any other place."""
        self._ask(done, partial(self._import, folder))

    def roll_back(self, model: str, done: Done) -> None:
        """Serve the previous release again, and refuse the active one; or withdraw the release under way."""
        if self.updater.withdraw(model):
            done({"model": model, "withdrawn": True})
            return
        self._ask(done, partial(self._roll_back, model, self.updater.board.active(model)))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._open()
        try:
            self._resume_configuration()
            while not self._stop.is_set():
                self._step()
        finally:
            self._executor.end()
            self.updater.close()

    def _open(self) -> bool:
        """Open the updater's journal; returns whether it is open. Active releases serve in any case."""
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
        try:
            self.updater.serve_suspects()  # nothing waits for these any more
        except Exception:
            log.exception("a release that ended the daemon before is not served")
        return True

    def _resume_configuration(self) -> None:
        try:
            self.updater.configuration.restart()
        except Exception:
            log.exception("the trial of the group's configuration waits for the next check")

    def _next_check_s(self) -> float | None:
        """Return the seconds until the next check; None: there is none."""
        if self._source is None:
            return None
        return round(max(self._schedule.due_s - self._clock.monotonic_s(), 0.0), 1)

    def _step(self) -> None:
        """Run the next operation, or the check (or the opening) that is due. Wakes cannot delay either."""
        is_open = self._trouble is None
        left_s = (self._schedule.due_s if is_open else self._reopen_due_s) - self._clock.monotonic_s()
        step = self._executor.next(min(left_s, threading.TIMEOUT_MAX)) if left_s > 0 else None
        try:
            if step is not None:
                step()
            elif is_open:
                self._look_by_itself()
            else:
                self._open()
        except Exception:
            log.exception("a step of the updater failed")

    def _woken(self) -> None:
        self._is_woken.clear()
        self._schedule.woken(self._clock.monotonic_s(), self._chance.random())

    def _look_by_itself(self) -> None:
        """Look without being asked: outside of windows, or over another link, only the configuration is taken."""
        settings, local = self._settings, self.updater.now_utc().astimezone()
        closed_s = opens_in_s(self._windows(), local, self._chance.random())
        self._waits_for = self._hindrance(closed_s)
        self._look(installs=settings.auto and not self._waits_for, configures=settings.auto)
        if closed_s:
            self._schedule.due_s = min(self._schedule.due_s, self._clock.monotonic_s() + closed_s)

    def _windows(self) -> list[UpdateWindow]:
        return [parse_window(each) for each in self.updater.configuration.windows]

    def _hindrance(self, closed_s: float) -> str:
        """Return why releases are not installed now; "" where they are."""
        if closed_s:
            return f"a window of {', '.join(self.updater.configuration.windows)}"
        if self._settings.only_on and self._settings.url is not None:
            interface, kind = self._link()
            if kind not in self._settings.only_on:
                through = f", and {interface} is {kind}" if interface else ""
                return f"a link that is {' or '.join(self._settings.only_on)}{through}"
        return ""

    def _look(self, *, installs: bool, configures: bool = True) -> dict[str, Any]:
        if self._source is None:
            raise UpdateError(ONLY_IMPORTS)
        try:
            return self.updater.check(self._source, installs=installs, configures=configures).as_json()
        finally:
            self._schedule.looked(self._clock.monotonic_s(), self._chance.random())

    def _import(self, folder: str) -> dict[str, Any]:
        source = folder_source(find_repository(folder), self._clock)
        return self.updater.check(source, installs=True).as_json()

    def _roll_back(self, model: str, number: int | None) -> dict[str, Any]:
        return {"model": model, "release": self.updater.roll_back(model, number).counter}

    def _ask(self, done: Done, work: Callable[[], dict[str, Any]]) -> None:
        """Have the worker's thread do the work of an operation. Thread: any."""
        if observed := self.updater.observed:
            done(
                UpdateError(
                    f"{observed}, and nothing else is changed meanwhile; ask again at its end: `edge-runtime update "
                    "status` says how far it is"
                )
            )
        else:
            self._executor.submit(partial(self._answer, done, work), done)

    def _answer(self, done: Done, work: Callable[[], dict[str, Any]]) -> None:
        try:
            result: Any = work() if self._trouble is None or self._open() else self._trouble
        except EdgeRuntimeError as error:
            result = error
        except Exception as error:
            log.exception("an update command failed")
            result = UpdateError(f"{type(error).__name__}: {error}")
        done(result)


@dataclass(slots=True)
class Schedule:
    """When the next check is due: at intervals, soon after a wake, and at most once each `min_check_s`.

    Instants are the clock's seconds; share is a number from 0 to 1, this device's place in a jitter, so that a fleet
    that was woken at once spreads. Thread: one owner.
    """

    poll_s: float
    poll_jitter: float
    wake_jitter_s: float
    min_check_s: float
    due_s: float
    looked_s: float | None = None

    def woken(self, now_s: float, share: float) -> None:
        """Make a check due soon, at a share of the jitter: there may be something new."""
        earliest_s = now_s + share * self.wake_jitter_s
        if self.looked_s is not None:
            earliest_s = max(earliest_s, self.looked_s + self.min_check_s)
        self.due_s = min(self.due_s, earliest_s)

    def looked(self, now_s: float, share: float) -> None:
        """Note the end of a check; the next is due after poll_s, more or less."""
        self.looked_s = now_s
        self.due_s = now_s + self.poll_s * (1 + (2 * share - 1) * self.poll_jitter)
