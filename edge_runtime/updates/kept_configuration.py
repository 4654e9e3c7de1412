"""A device's memory of its group's signed configuration: what is in force, what is tried, and what was refused.

Owns: one file, written whole and durable, and how often a configuration may be tried. The signature was checked when
the overlay came; a start reads it again by the rules of overlay.py, so that a changed file opens nothing either.
Imported by every start with `[update]`, so it imports no TUF.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.config.settings import Config
from edge_runtime.durable import SYSTEM_DISK, Disk, read_kept, write_atomically
from edge_runtime.errors import ConfigError, StorageFailed
from edge_runtime.updates.overlay import laid_over
from edge_runtime.updates.states import MAX_TRIES

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KEPT_BYTES = 1 << 20
MAX_REFUSED = 20
"""Configurations that are remembered as refused, and as doubtful: the newest ones."""


class KeptConfiguration(Struct, frozen=True):
    """The configuration of a group on one device.

    group: as the repository's targets role says it of this device; "" where it says none. text: the overlay that
    proved itself; trying: the one on trial, if there is one, with the number of starts that it did not outlive so far.
    before: the models and sources that there were before the trial, by name, each with its trouble, "" for none.
    refused: by the hash of an overlay, why. doubts: by the same, why each trial ended that the device itself may have
    spoiled.
    """

    group: str = ""
    text: str = ""
    trying: str | None = None
    tries: int = 0
    before: dict[str, str] = {}
    refused: dict[str, str] = {}
    doubts: dict[str, tuple[str, ...]] = {}

    @property
    def in_force(self) -> str:
        """Return the overlay that settings are read with."""
        return self.text if self.trying is None else self.trying

    def tried(self, text: str, before: Mapping[str, str]) -> KeptConfiguration:
        """Return this with an overlay on trial."""
        return replace(self, trying=text, tries=0, before=dict(before))

    def committed(self) -> KeptConfiguration:
        """Return this with the overlay on trial kept."""
        doubts = {name: why for name, why in self.doubts.items() if name != digest(self.in_force)}
        return replace(self.dropped(), text=self.in_force, doubts=doubts)

    def dropped(self) -> KeptConfiguration:
        """Return this with no overlay on trial, and the one before in force."""
        return replace(self, trying=None, tries=0, before={})

    def refusing(self, text: str, reason: str) -> KeptConfiguration:
        """Return this with an overlay refused, and the one before in force."""
        doubts = {name: why for name, why in self.doubts.items() if name != digest(text)}
        return replace(self.dropped(), refused=_newest(self.refused, text, reason), doubts=doubts)

    def doubting(self, text: str, reason: str) -> KeptConfiguration:
        """Return this with the overlay in force taken out, to be tried again; refused at the MAX_TRIES-th time."""
        out = self if self.trying is not None else replace(self, text="")
        doubts = (*self.doubts.get(digest(text), ()), reason)
        if len(doubts) >= MAX_TRIES:
            return out.refusing(text, f"{reason}; so {len(doubts)} times")
        return replace(out.dropped(), doubts=_newest(self.doubts, text, doubts))


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


def lay_over(own: Config, folder: Path | None, *, is_start: bool) -> tuple[Config, str]:
    """Return a daemon's settings with its group's kept configuration on top, and why it is left out; "" where not.

    folder: of the daemon's state. is_start: a configuration on trial is counted before it is used, so that one that
    ends the daemon is taken back at the MAX_TRIES-th start. One that no longer goes together with the device's own
    settings is left out.
    """
    if folder is None or own.update is None or not own.update.configuration:
        return own, ""
    store = ConfigurationStore(folder / "update")
    kept, reason = store.read(), ""
    if is_start and kept.trying is not None:
        kept, reason = _counted(store, kept, kept.trying)
    config = own
    if kept.in_force:
        try:
            config = laid_over(own, kept.in_force)
        except ConfigError as error:
            reason = error.message
    if reason:
        log.error("the group's configuration is left out", extra={"reason": reason})
    return config, reason


def take_back(own: Config, folder: Path | None, reason: str) -> None:
    """Take the configuration in force out, since the daemon's start failed with it; it is tried again, then refused.

    The device may be at fault too, which the next start tells.
    """
    if folder is None or own.update is None:
        return
    store = ConfigurationStore(folder / "update")
    kept = store.read()
    reason = f"the daemon's start failed with it: {reason}"
    log.error("the group's configuration is taken back", extra={"reason": reason})
    try:
        store.write(kept.doubting(kept.in_force, reason))
    except StorageFailed as error:  # one on trial is not counted either then, and so left out
        log.error("it could not be written down", extra={"reason": error.message})


# ---- private --------------------------------------------------------------------------------------------------------


def _counted(store: ConfigurationStore, kept: KeptConfiguration, text: str) -> tuple[KeptConfiguration, str]:
    """Count a start with a trial; return what is in force for it, and why the trial is not."""
    counted = replace(kept, tries=kept.tries + 1)
    if counted.tries > MAX_TRIES:
        counted = kept.refusing(text, f"the daemon ended {MAX_TRIES} times while it was tried")
    try:
        store.write(counted)
    except StorageFailed as error:  # uncounted it might end the daemon for ever
        return kept.dropped(), f"it cannot be tried: {error.message}"
    return counted, ""


def _newest(known: Mapping[str, T], text: str, value: T) -> dict[str, T]:
    """Return what is known of overlays with one more, the newest last."""
    others = {name: each for name, each in known.items() if name != digest(text)}
    return dict([*others.items(), (digest(text), value)][-MAX_REFUSED:])
