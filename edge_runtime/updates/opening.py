"""From `[update]` to the updater of a device: the parts of updates, wired to the core that serves.

Constructs; starts nothing. Imported only with `[update]`, since it imports tuf. Called by daemon/assemble.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

from edge_runtime import __version__, plugins
from edge_runtime.addresses import read_proxy
from edge_runtime.clock import Calendar
from edge_runtime.config.settings import Config, UpdateSettings
from edge_runtime.daemon.core import Core
from edge_runtime.durable import Disk
from edge_runtime.errors import ConfigError
from edge_runtime.updates.group_configuration import GroupConfiguration
from edge_runtime.updates.kept_configuration import ConfigurationStore
from edge_runtime.updates.release_checks import DeviceTraits, version_numbers
from edge_runtime.updates.release_paths import OWNER_RULE, is_owner_name
from edge_runtime.updates.trial import ReleaseTrials, TrialLimits
from edge_runtime.updates.updater import Updater
from edge_runtime.updates.worker import UpdateWorker

NO_BOUND_BYTES = 1 << 60
"""Stands for a memory limit where none is set."""


def open_updates(core: Core, disk: Disk, calendar: Calendar | None) -> UpdateWorker:
    """Return the updater of `[update]` and its thread. Raises ConfigError: a setting cannot be.

    disk: what updates are written through. calendar: judges expiry; None: the host's.
    """
    config, profile, settings = core.config, core.profile, core.config.update
    assert settings is not None
    if core.state is None:
        raise ConfigError("update: no folder for state can be written; name one with state = or --state")
    if not is_owner_name(settings.group):
        raise ConfigError(f"update.group: got {settings.group!r}, wanted {OWNER_RULE}")
    limit_bytes = profile.limits.memory_bytes
    memory_bytes = NO_BOUND_BYTES if limit_bytes is None else limit_bytes
    stop = threading.Event()
    device_id = _device_id(config, settings)
    folder = core.state / "update"
    configuration = GroupConfiguration(
        ConfigurationStore(folder, disk), config, device_id, daemon=lambda: core.daemon, clock=core.clock, stop=stop
    )
    updater = Updater(
        settings,
        DeviceTraits(
            device_id=device_id,
            profile=profile.name,
            runtime=version_numbers(__version__),
            suffixes=core.plans.suffixes(),
            memory_bytes=memory_bytes,
            precisions=core.plans.precisions().union(*_precisions_of_doors(config)),
        ),
        core.loader,
        ReleaseTrials(
            core.plans,
            TrialLimits(settings.trial_memory_bytes or memory_bytes, settings.trial_s),
            core.builds.builder.built_folder,
            config=served_apart(config, profile.name),
        ),
        folder,
        clock=core.clock,
        stop=stop,
        configuration=configuration,
        disk=disk,
        calendar=calendar,
    )
    own, key = (config.proxy, "proxy") if settings.proxy is None else (settings.proxy, "update.proxy")
    worker = UpdateWorker(updater, settings, core.clock, stop, proxy=read_proxy(own, config.no_proxy, key))
    _watch(core, worker)
    return worker


def served_apart(config: Config, profile: str) -> Config:
    """Return the part of a configuration that serves models, and nothing else: no door, no folder, no update, no code.

    profile: the one that was chosen; a confined child sees less of the device.
    """
    return Config(
        profile=profile,
        backends=config.backends,
        limits=config.limits,
        isolation="never",
        watch=False,
        calibrate=False,
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _watch(core: Core, worker: UpdateWorker) -> None:
    """Register the gauges.

    `update_failing`: 1 while the updater is out of order or the last look at the repository failed. `update_refused`:
    releases that this device took back or would not take; `release_refused` names the last of them.
    """

    def failing() -> float:
        summary = worker.summary()
        checked = summary.get("checked")
        return float(summary.get("state") == "broken" or (checked is not None and not checked["is_ok"]))

    core.metrics.watch("update_failing", failing)

    def refused() -> list[tuple[str, str]]:
        return list({(each["model"], str(each["release"])): None for each in worker.summary().get("refused") or ()})

    core.metrics.watch("update_refused", lambda: float(len(worker.summary().get("refused") or ())))
    core.metrics.watch_facts("release_refused", ("model", "release"), refused)


def _precisions_of_doors(config: Config) -> Iterator[frozenset[str]]:
    """Yield the precisions of variants that tables of doors say they use, such as the governor's of heat."""
    for name in plugins.names("doors"):
        yield getattr(config.table(name), "precisions", frozenset())


def _device_id(config: Config, settings: UpdateSettings) -> str:
    """The same id as on MQTT, where there is one."""
    if settings.device_id is not None:
        from edge_runtime.doors.mqtt.topics import ID_RULE, is_id

        if not is_id(settings.device_id):
            raise ConfigError(f"update.device_id: got {settings.device_id!r}, wanted {ID_RULE}")
        return settings.device_id
    from edge_runtime.doors.mqtt.identity import device_topics, id_from_hostname

    mqtt = config.table("mqtt")
    if mqtt is not None:
        from edge_runtime.doors.mqtt.broker import broker_access

        return device_topics(mqtt, broker_access(mqtt).address).device_id
    return id_from_hostname(socket.gethostname())
