"""The parts that update put together, from `[update]` and what serves.

Imported only when `[update]` is there, and with it tuf. Constructs; starts nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.config.broker import broker_access
from edge_runtime.config.settings import Config, UpdateSettings
from edge_runtime.errors import ConfigError
from edge_runtime.fleet.identity import device_topics, id_from_hostname
from edge_runtime.profiles.profile import EffectiveProfile
from edge_runtime.repository.durable import Disk
from edge_runtime.repository.release_paths import OWNER_RULE, is_owner_name
from edge_runtime.serving.engine_store import EngineStore
from edge_runtime.serving.loader import Loader
from edge_runtime.serving.loading import VersionLoader
from edge_runtime.update.offers import Device, version_numbers
from edge_runtime.update.releases import StagedRelease
from edge_runtime.update.trial import TrialLimits, TrialReport, try_release
from edge_runtime.update.updater import Updater
from edge_runtime.update.worker import UpdateWorker
from edge_runtime.wire.topics import ID_RULE, is_id

NO_BOUND_BYTES = 1 << 60
"""Where nobody bounds the memory for models."""


def new_update_worker(
    config: Config,
    state: Path | None,
    profile: EffectiveProfile,
    *,
    versions: VersionLoader,
    engines: EngineStore,
    loader: Loader,
    clock: Clock,
    disk: Disk,
    utc_clock: Callable[[], datetime] | None,
) -> UpdateWorker:
    """The updater of a device and its thread. Raises ConfigError: something in `[update]` cannot be."""
    settings = config.update
    assert settings is not None
    if state is None:
        raise ConfigError("update: no folder for state can be written; name one with state = or --state")
    if not is_owner_name(settings.group):
        raise ConfigError(f"update.group: got {settings.group!r}, wanted {OWNER_RULE}")
    limit_bytes = profile.limits.memory_bytes
    memory_bytes = NO_BOUND_BYTES if limit_bytes is None else limit_bytes
    trial_limits = TrialLimits(settings.trial_memory_bytes or memory_bytes, settings.trial_s)
    stop = threading.Event()

    def attempt(staged: StagedRelease) -> TrialReport:
        (version,) = staged.folder.versions.values()
        candidates = versions.candidates(staged.folder, version)
        return try_release(staged, candidates, trial_limits, stop=stop, engines=engines.folder)

    def prepare(staged: StagedRelease) -> None:
        (version,) = staged.folder.versions.values()
        versions.prepare(staged.folder, version, stop)

    updater = Updater(
        settings,
        Device(
            device_id=_device_id(config, settings),
            profile=profile.name,
            runtime=version_numbers(__version__),
            suffixes=versions.suffixes(),
            memory_bytes=memory_bytes,
            precisions=versions.precisions(),
        ),
        loader,
        state / "update",
        clock=clock,
        try_release=attempt,
        wait=stop.wait,
        stop=stop,
        disk=disk,
        utc_clock=utc_clock,
        prepare=prepare,
    )
    return UpdateWorker(updater, settings, clock, stop)


def _device_id(config: Config, settings: UpdateSettings) -> str:
    """The same id as on MQTT, where there is one."""
    if settings.device_id is not None:
        if not is_id(settings.device_id):
            raise ConfigError(f"update.device_id: got {settings.device_id!r}, wanted {ID_RULE}")
        return settings.device_id
    if config.mqtt is not None:
        return device_topics(config.mqtt, broker_access(config.mqtt).address).device_id
    return id_from_hostname(socket.gethostname())
