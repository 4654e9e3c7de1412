"""A device's memory of its group's signed configuration: what is in force, what is tried, and what was refused.

Owns: one file, written whole and durable, and how often a configuration may be tried. The signature was checked when
the overlay came; a start reads it again by the rules of overlay.py, so that a changed file opens nothing either.
Imported by every start with `[update]`, so it imports no TUF.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.config.endpoints import state_folder
from edge_runtime.config.settings import Config
from edge_runtime.durable import SYSTEM_DISK, Disk, read_kept, write_atomically
from edge_runtime.errors import ConfigError, StorageFailed
from edge_runtime.updates.overlay import laid_over
from edge_runtime.updates.states import MAX_TRIES

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20
MAX_REFUSED = 20
"""Refused configurations that are remembered: the newest ones."""


class KeptConfiguration(Struct, frozen=True):
    """The configuration of a group on one device.

    group: as the repository's targets role says it of this device; "" where it says none. text: the overlay that
    proved itself; trying: the one on trial, if there is one, with the number of starts that it did not outlive so far,
    and the troubles that there were before it. refused: by the hash of an overlay, why.
    """

    group: str = ""
    text: str = ""
    trying: str | None = None
    tries: int = 0
    troubles: tuple[str, ...] = ()
    refused: dict[str, str] = {}

    @property
    def in_force(self) -> str:
        """Return the overlay that settings are read with."""
        return self.text if self.trying is None else self.trying

    def tried(self, text: str, troubles: tuple[str, ...]) -> KeptConfiguration:
        """Return this with an overlay on trial."""
        return replace(self, trying=text, tries=0, troubles=troubles)

    def committed(self) -> KeptConfiguration:
        """Return this with the overlay on trial kept."""
        return replace(self, text=self.in_force, trying=None, tries=0, troubles=())

    def refusing(self, text: str, reason: str) -> KeptConfiguration:
        """Return this with an overlay refused, and the one before in force."""
        refused = {**self.refused, digest(text): reason}
        kept = dict(list(refused.items())[-MAX_REFUSED:])
        return replace(self, trying=None, tries=0, troubles=(), refused=kept)


class ConfigurationStore:
    """The file of a device's KeptConfiguration. Thread: the updater's; the start before it."""

    def __init__(self, folder: Path, disk: Disk = SYSTEM_DISK) -> None:
        """folder: of the updater's state."""
        self._file = folder / "configuration.json"
        self._disk = disk

    def read(self) -> KeptConfiguration:
        """Return what is kept; nothing where there is no file, or none that makes sense, which the log says."""
        try:
            data = read_kept(self._file, MAX_KEPT_BYTES)
            return msgspec.json.decode(data, type=KeptConfiguration)
        except FileNotFoundError:
            return KeptConfiguration()
        except (OSError, msgspec.DecodeError) as error:
            log.error("the group's configuration is lost until the next check", extra={"reason": str(error)})
            return KeptConfiguration()

    def write(self, configuration: KeptConfiguration) -> None:
        """Keep this. Raises StorageFailed."""
        write_atomically(self._file, msgspec.json.encode(configuration), mode=0o600, disk=self._disk)


def digest(text: str) -> str:
    """Return the sha256 of an overlay, which is its name."""
    return hashlib.sha256(text.encode()).hexdigest()


def lay_over(config: Config, *, is_start: bool) -> Config:
    """Return a daemon's settings with its group's kept configuration on top.

    is_start: a configuration on trial is counted before it is used, so that one that ends the daemon is taken back at
    the MAX_TRIES-th start. One that no longer goes together with the device's own settings is left out, and the log
    says so.
    """
    folder = state_folder(config.state)
    if folder is None or config.update is None or not config.update.configuration:
        return config
    store = ConfigurationStore(folder / "update")
    kept = store.read()
    if is_start and kept.trying is not None:
        kept = _counted(store, kept, kept.trying)
    if not kept.in_force:
        return config
    try:
        return laid_over(config, kept.in_force)
    except ConfigError as error:
        log.error("the group's configuration is left out", extra={"reason": error.message})
        return config


def _counted(store: ConfigurationStore, kept: KeptConfiguration, text: str) -> KeptConfiguration:
    counted = replace(kept, tries=kept.tries + 1)
    if counted.tries > MAX_TRIES:
        counted = kept.refusing(text, f"the daemon ended {MAX_TRIES} times while it was tried")
    try:
        store.write(counted)
    except StorageFailed as error:
        # Uncounted it might end the daemon for ever.
        log.error("the group's configuration is not tried", extra={"reason": error.message})
        return replace(kept, trying=None)
    return counted
