"""A device's group and its signed configuration: looked up at each check, tried, and kept or taken back.

Owns: the way of one overlay. It is checked by overlay.py, written down, taken over by the running daemon as at SIGHUP,
observed for `window_s`, and kept where the daemon does as well as before; else it is refused for good, by its hash. A
setting that needs a restart is tried from the next start on. Thread: the updater's; `as_json` any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import Reloaded, RunningDaemon
from edge_runtime.errors import ConfigError, EdgeRuntimeError, StorageFailed
from edge_runtime.updates.kept_configuration import ConfigurationStore, KeptConfiguration, digest
from edge_runtime.updates.overlay import OVERLAY, laid_over, read_overlay
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
        self._config = config
        self._settings = config.update
        self._device_id = device_id
        self._daemon = daemon
        self._clock = clock
        self._stop = stop
        self._kept = store.read()
        self._needs_restart: tuple[str, ...] = ()
        self._reason = ""

    @property
    def group(self) -> str:
        """Return the device's group: the one that the repository's targets role says, else its own settings'."""
        return self._kept.group or self._settings.group

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the windows in which releases are installed: the group's, else the device's own."""
        try:
            said = read_overlay(self._kept.in_force, OVERLAY) if self._settings.configuration else {}
        except ConfigError:  # a changed file; the start has logged it
            said = {}
        return tuple(said.get("update", {}).get("windows", self._settings.windows))

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
        try:
            wanted = repository.overlay(self.group)
            if installs:
                self._bring(wanted)
        except EdgeRuntimeError as error:
            self._reason = error.message
            log.warning("no configuration", extra={"reason": error.message})

    def restart(self) -> None:
        """Go on with a trial that the end of the daemon interrupted: the start has laid it over."""
        self._kept = self._store.read()
        if self._kept.trying is not None and self._settings.configuration:
            try:
                self._judge(self._kept.trying)
            except StorageFailed as error:
                self._reason = error.message

    def as_json(self) -> dict[str, Any]:
        """Return what is in force, for `update status`. Thread: any."""
        kept = self._kept
        if not self._settings.configuration:
            state = "off"
        elif kept.trying is not None:
            state = "trying"
        else:
            state = "kept" if kept.text else "none"
        return {
            "state": state,
            "sha256": digest(kept.in_force) if kept.in_force else "",
            "reason": self._reason,
            "needs_restart": list(self._needs_restart),
        }

    # ---- private ----------------------------------------------------------------------------------------------------

    def _bring(self, wanted: str) -> None:
        kept, daemon = self._kept, self._daemon()
        refused = kept.refused.get(digest(wanted))
        if wanted == kept.in_force:
            self._reason = ""
            if kept.trying is not None and not self._needs_restart:
                self._judge(wanted)
        elif refused is not None:
            self._reason = f"refused before: {refused}"
        elif daemon is None:
            self._reason = NO_DAEMON
        else:
            try:
                laid_over(self._config, wanted)
            except ConfigError as error:
                self._refuse(wanted, error.message)
            else:
                self._try(kept, wanted, daemon)

    def _try(self, kept: KeptConfiguration, wanted: str, daemon: RunningDaemon) -> None:
        """Write an overlay down, have the daemon take it over, and judge it. kept: what is in force."""
        self._write(kept.tried(wanted, tuple(daemon.troubles())))
        told = daemon.reload(self._stop)
        if self._stop.is_set():
            return
        if not told.is_read:
            self._write(kept)
            self._reason = f"put off: {told.reason}"
            return
        if told.reason:
            self._take_back(wanted, told.reason)
            return
        self._needs_restart = _of_overlay(told, wanted, kept.text)
        if self._needs_restart:
            self._reason = f"{', '.join(self._needs_restart)}: tried from the daemon's next start on"
            log.warning("the group's configuration waits for a restart", extra={"settings": self._needs_restart})
            return
        self._judge(wanted)

    def _judge(self, text: str) -> None:
        """Observe the configuration on trial, and keep it or take it back."""
        daemon = self._daemon()
        if daemon is None:
            self._reason = NO_DAEMON
            return
        self._reason = ""
        if not self._watch(daemon):
            return
        new = [each for each in daemon.troubles() if each not in self._kept.troubles]
        if new:
            more = f" and {len(new) - SHOWN_TROUBLES} more" if len(new) > SHOWN_TROUBLES else ""
            self._take_back(text, f"since it is in force: {'; '.join(new[:SHOWN_TROUBLES])}{more}")
            return
        self._write(self._kept.committed())
        log.info("the group's configuration is kept", extra={"sha256": digest(text)})

    def _watch(self, daemon: RunningDaemon) -> bool:
        """Wait until the daemon was ready for `window_s`; False: it stops first."""
        while not daemon.is_ready:
            if self._stop.wait(LOOK_S):
                return False
        end_s = self._clock.monotonic_s() + self._settings.window_s
        while (left_s := end_s - self._clock.monotonic_s()) > 0:
            if self._stop.wait(min(left_s, LOOK_S)):
                return False
        return not self._stop.is_set()

    def _take_back(self, text: str, reason: str) -> None:
        """Refuse the overlay on trial, and have the daemon take the one before over again."""
        self._refuse(text, reason)
        daemon = self._daemon()
        told = Reloaded() if daemon is None else daemon.reload(self._stop)
        self._needs_restart = _of_overlay(told, text, self._kept.text)

    def _refuse(self, text: str, reason: str) -> None:
        self._write(self._kept.refusing(text, reason))
        self._reason = f"refused: {reason}"
        log.error("the group's configuration is refused", extra={"sha256": digest(text), "reason": reason})

    def _write(self, kept: KeptConfiguration) -> None:
        self._store.write(kept)
        self._kept = kept


def _of_overlay(told: Reloaded, *texts: str) -> tuple[str, ...]:
    """Return the tables of overlays among the settings that need a restart."""
    tables: set[str] = set()
    for text in texts:
        tables |= read_overlay(text, OVERLAY).keys()
    return tuple(name for name in told.needs_restart if name in tables)
