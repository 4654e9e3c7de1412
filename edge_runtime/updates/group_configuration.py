"""A device's group and its signed configuration: looked up at each check, tried, and kept or taken back.

Owns: the way of one overlay. It is checked by overlay.py, written down, taken over by the running daemon as at SIGHUP,
observed for `window_s`, and kept where the daemon does as well as before; else it is refused for good, by its hash. A
setting that needs a restart is tried from the next start on. Where the device itself may be at fault, the overlay is
put off, and a trial that ended so counts. Thread: the updater's; `as_json`, `is_observed` any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import ObservedCondition, Reloaded, RunningDaemon
from edge_runtime.errors import ConfigError, EdgeRuntimeError
from edge_runtime.updates.kept_configuration import ConfigurationStore, KeptConfiguration, digest
from edge_runtime.updates.overlay import LISTS, OVERLAY, laid_over, read_overlay
from edge_runtime.updates.repository_view import RepositoryView

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often an observation looks whether the daemon stops."""

SHOWN_TROUBLES = 5

NO_DAEMON = "it is for a daemon, and none runs around this core"


class GroupConfiguration:
    """One device's group and configuration. `restart` before the first check, `take` at each."""

    def __init__(
        self,
        store: ConfigurationStore,
        config: Config,
        device_id: str,
        *,
        daemon: Callable[[], RunningDaemon | None],
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """config: the daemon's, which has `[update]`. daemon: the running one, once there is one."""
        assert config.update is not None
        self._store = store
        self._settings = config.update
        self._device_id = device_id
        self._daemon = daemon
        self._clock = clock
        self._stop = stop
        self._kept = store.read()
        self._needs_restart: tuple[str, ...] = ()
        self._reason = ""
        self._is_observed = False

    @property
    def group(self) -> str:
        """Return the device's group: the one that the repository's targets role says, else its own settings'."""
        return self._kept.group or self._settings.group

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the windows in which releases are installed: the group's, else the device's own."""
        return tuple(self._said.get("update", {}).get("windows", self._settings.windows))

    @property
    def is_observed(self) -> bool:
        """Return whether a configuration is observed now. Thread: any."""
        return self._is_observed

    def follow(self, repository: RepositoryView) -> str:
        """Look up the device's group, remember it, and return it. Raises as `RepositoryView`, and StorageFailed."""
        if not self._settings.configuration:
            return self._settings.group
        listed = repository.groups().get(self._device_id, "")
        if listed != self._kept.group:
            log.info("another group", extra={"group": listed or self._settings.group, "before": self.group})
            self._write(replace(self._kept, group=listed))
        return self.group

    def take(self, repository: RepositoryView, *, installs: bool) -> None:
        """Bring the configuration of the device's group into force. Blocks while it is observed.

        Never raises for a fault of the repository, the overlay or the disk: `as_json` has the reason. installs: else
        nothing is changed.
        """
        if not self._settings.configuration:
            return
        with self._guarded():
            wanted = repository.overlay(self.group)
            if installs:
                self._bring(wanted)

    def restart(self) -> None:
        """Go on with a trial that the end of the daemon interrupted, where the start has laid it over."""
        self._kept = self._store.read()
        if not self._settings.configuration:
            return
        if self._kept.doubts:  # the last may be the start's
            self._reason = f"put off: {next(reversed(self._kept.doubts.values()))[-1]}"
        if self._kept.trying is not None:
            with self._guarded():
                self._judge(self._kept.trying)

    def as_json(self) -> dict[str, Any]:
        """Return what is in force, for `update status`. Thread: any."""
        kept, left_out = self._kept, self._left_out
        if not self._settings.configuration:
            state = "off"
        elif kept.in_force and left_out:
            state = "left out"
        elif kept.trying is not None:
            state = "trying"
        else:
            state = "kept" if kept.text else "none"
        return {
            "state": state,
            "sha256": digest(kept.in_force) if kept.in_force else "",
            "reason": self._reason or (left_out if state == "left out" else ""),
            "needs_restart": list(self._needs_restart),
        }

    # ---- private ----------------------------------------------------------------------------------------------------

    @property
    def _left_out(self) -> str:
        """Return why nothing is laid over the daemon's settings, as they were read last; "" where something may be."""
        daemon = self._daemon()
        return NO_DAEMON if daemon is None else daemon.settings.left_out

    @property
    def _said(self) -> dict[str, Any]:
        """Return the tables of the overlay in force."""
        if not self._settings.configuration or self._left_out:
            return {}
        try:
            return read_overlay(self._kept.in_force, OVERLAY)
        except ConfigError:  # a changed file; the start has logged it
            return {}

    def _bring(self, wanted: str) -> None:
        kept, daemon = self._kept, self._daemon()
        refused = kept.refused.get(digest(wanted))
        is_waiting = kept.trying is not None and bool(self._needs_restart)
        if wanted == kept.in_force and (kept.trying is None or is_waiting):
            self._reason = self._reason if is_waiting else ""
        elif refused is not None:
            self._reason = f"refused before: {refused}"
        elif daemon is None:
            self._reason = NO_DAEMON
        elif not wanted:
            self._empty(daemon)
        else:
            self._try(wanted, daemon)

    def _try(self, wanted: str, daemon: RunningDaemon) -> None:
        """Write an overlay down, have the daemon take it over, and judge it."""
        hindrance = _misfit(daemon, wanted)  # asked before too: else a reload at each check
        own = daemon.reload(self._stop) if not hindrance else Reloaded()
        hindrance = hindrance or _own_fault(own, wanted) or _misfit(daemon, wanted)
        if self._stop.is_set():
            return
        if hindrance:
            self._reason = f"put off: {hindrance}"
            log.warning("the group's configuration is put off", extra={"reason": hindrance})
            return
        before = self._kept.text
        if self._kept.trying != wanted:
            self._write(self._kept.tried(wanted, {each.what: each.trouble for each in daemon.conditions()}))
        told = daemon.reload(self._stop)
        if self._stop.is_set():
            return
        hindrance = "" if told.is_read else "; ".join(told.reasons)
        new = [each for each in told.reasons if each not in own.reasons]
        if hindrance or daemon.settings.left_out:
            self._drop(hindrance or daemon.settings.left_out)
            return
        if new:
            self._take_back(wanted, "; ".join(new))
            return
        self._needs_restart = _of_overlay(told, wanted, before)
        if self._needs_restart:
            self._reason = f"{', '.join(self._needs_restart)}: tried from the daemon's next start on"
            log.warning("the group's configuration waits for a restart", extra={"settings": self._needs_restart})
            return
        self._judge(wanted)

    def _empty(self, daemon: RunningDaemon) -> None:
        """Take the configuration out: the device's own settings need no trial."""
        before = self._kept
        self._write(before.tried("", {}).committed())
        self._reason = ""
        self._needs_restart = _of_overlay(daemon.reload(self._stop), before.text, before.in_force)
        log.info("the group's configuration is taken out")

    def _judge(self, text: str) -> None:
        """Observe the configuration on trial, and keep it or take it back."""
        daemon = self._daemon()
        if daemon is None:
            self._reason = NO_DAEMON
            return
        self._reason = ""
        if not (daemon.settings.left_out or self._watch(daemon)):
            self._uncount()
            return
        if daemon.settings.left_out:
            self._drop(daemon.settings.left_out)
            return
        certain, doubtful = judge_conditions(self._kept.before, daemon.conditions(), read_overlay(text, OVERLAY))
        if certain:
            self._take_back(text, f"since it is in force: {_listed([*certain, *doubtful])}")
        elif doubtful:
            self._doubt(text, f"since it is in force: {_listed(doubtful)}")
        else:
            self._write(self._kept.committed())
            log.info("the group's configuration is kept", extra={"sha256": digest(text)})

    def _watch(self, daemon: RunningDaemon) -> bool:
        """Wait until the daemon was ready for `window_s`; False: it stops first."""
        self._is_observed = True
        try:
            while not daemon.is_ready:
                if self._stop.wait(LOOK_S):
                    return False
            end_s = self._clock.monotonic_s() + self._settings.window_s
            while (left_s := end_s - self._clock.monotonic_s()) > 0:
                if self._stop.wait(min(left_s, LOOK_S)):
                    return False
            return not self._stop.is_set()
        finally:
            self._is_observed = False

    def _uncount(self) -> None:
        """Take a try back: the daemon stops on purpose, and not by the overlay on trial."""
        self._write(replace(self._kept, tries=max(self._kept.tries - 1, 0)))

    def _drop(self, reason: str) -> None:
        """Put the overlay on trial off: it is not in force, by the device's own doing."""
        self._end_trial(self._kept.dropped(), f"put off: {reason}")

    def _doubt(self, text: str, reason: str) -> None:
        """Put the overlay on trial off, which may be at fault; the last of its trials refuses it."""
        doubted = self._kept.doubting(text, reason)
        refused = doubted.refused.get(digest(text))
        self._end_trial(doubted, f"put off: {reason}" if refused is None else f"refused: {refused}")

    def _take_back(self, text: str, reason: str) -> None:
        """Refuse the overlay on trial."""
        self._end_trial(self._kept.refusing(text, reason), f"refused: {reason}")

    def _end_trial(self, kept: KeptConfiguration, reason: str) -> None:
        """Remember how a trial ended, and have the daemon take the overlay before over again."""
        text = self._kept.in_force
        self._write(kept)
        self._reason = reason
        log.error("the group's configuration is not kept", extra={"sha256": digest(text), "reason": reason})
        daemon = self._daemon()
        told = Reloaded() if daemon is None else daemon.reload(self._stop)
        self._needs_restart = _of_overlay(told, text, kept.text)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make an error inside the reason that `as_json` has."""
        try:
            yield
        except EdgeRuntimeError as error:
            self._reason = error.message
            log.warning("no configuration", extra={"reason": error.message})

    def _write(self, kept: KeptConfiguration) -> None:
        self._store.write(kept)
        self._kept = kept


def judge_conditions(
    before: Mapping[str, str], now: Iterable[ObservedCondition], tables: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the troubles that a configuration on trial made, and those that the device itself may have made. Pure.

    before: each name with its trouble, as of KeptConfiguration. tables: of the overlay. What did badly before does not
    count, whatever is wrong with it now, nor does a model that came since: no overlay brings one. A source that came
    since is the overlay's.
    """
    certain: list[str] = []
    doubtful: list[str] = []
    for each in now:
        is_model, is_known = each.kind == "model", each.what in before
        if not each.trouble or before.get(each.what) or (is_model and not is_known):
            continue
        is_certain = "limits" in tables if is_model else not is_known
        (certain if is_certain else doubtful).append(f"{each.what}: {each.trouble}")
    return certain, doubtful


def _misfit(daemon: RunningDaemon, text: str) -> str:
    """Return why an overlay does not fit a device's own settings, as they were read last; "" where it does."""
    try:
        laid_over(daemon.settings.own, text)
    except ConfigError as error:
        return error.message
    return ""


def _own_fault(told: Reloaded, text: str) -> str:
    """Return the fault of the device's own that keeps an overlay from being taken over; "" for none.

    told: how a reload ended before the trial.
    """
    if not told.is_read:
        return "; ".join(told.reasons)
    adds_sources = any(name in read_overlay(text, OVERLAY) for name in LISTS)
    return "; ".join(told.reasons) if adds_sources else ""


def _listed(troubles: list[str]) -> str:
    more = f" and {len(troubles) - SHOWN_TROUBLES} more" if len(troubles) > SHOWN_TROUBLES else ""
    return "; ".join(troubles[:SHOWN_TROUBLES]) + more


def _of_overlay(told: Reloaded, *texts: str) -> tuple[str, ...]:
    """Return the tables of overlays among the settings that need a restart."""
    tables: set[str] = set()
    for text in texts:
        tables |= read_overlay(text, OVERLAY).keys()
    return tuple(name for name in told.needs_restart if name in tables)
