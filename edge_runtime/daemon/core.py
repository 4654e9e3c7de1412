"""The serving core: everything that serves models, with no socket; and the status of a daemon over it.

Owns: the order in which the core's parts start and end, the gauges that alerts are made of (deploy/monitoring names
them), and the content of `stats`. Made by assemble.py. Each gauge is read on its reader's thread, and does not block.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from edge_runtime import __version__, plugins
from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.errors import ConfigError
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.regions import Regions
from edge_runtime.models.builds import Builds
from edge_runtime.models.load_marks import LoadMarks
from edge_runtime.models.load_plans import LoadPlans
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.pending_loads import PendingLoads
from edge_runtime.models.servable import Servable
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import EffectiveProfile
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.infer import Infer
from edge_runtime.request.operation_handlers import Updates
from edge_runtime.request.worker import WorkerPool
from edge_runtime.sandbox.landlock import guard
from edge_runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from edge_runtime.daemon.parts import ReadSettings
    from edge_runtime.doors.door import Door
    from edge_runtime.telemetry.busiest import BusiestModels
    from edge_runtime.telemetry.host import HostProbe


CLOSED_AT_ONCE = 32
"""Models. Ending a host takes some 30 ms, and a second where its model.py does not finish."""

LOOK_S = 0.05
"""How often a stop looks whether the loader has ended."""


class DeviceUpdates(Updates, Protocol):
    """The updater of a device: it starts and ends with the core.

    has_opened: what was active serves. groups: of devices, whose wakes are meant for this one.

    Thread: main, but for what `Updates` says, `look` and `summary`.
    """

    has_opened: threading.Event

    @property
    def groups(self) -> Sequence[str]:
        """Return the groups of now. Thread: any."""
        ...

    def reserve(self) -> None:
        """Keep the models folder from serving models of updates. Before the loader starts."""
        ...

    def start(self) -> None:
        """Serve what is active, and begin to look for releases."""
        ...

    def stop(self) -> None:
        """Stop a rollout where it can be resumed. Does not wait."""
        ...

    def close(self, limit_s: float | None = None) -> None:
        """Stop, and wait for the end, at most `limit_s` where no release is under way."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether its thread has begun and not ended."""
        ...

    def look(self) -> None:
        """Check soon. Never blocks. Thread: any."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """Return the status without what changes with time alone. Never blocks. Thread: any."""
        ...


class Telemetry(Protocol):
    """Sends a device's telemetry. Thread: main."""

    def start(self) -> None:
        """Begin to send."""
        ...

    def close(self) -> None:
        """Send what is left, or keep it, and stop. Idempotent."""
        ...


class Reloaded(NamedTuple):
    """How a reload ended. reasons: why some of it was not taken over. needs_restart: settings.

    is_read: whether the device's own configuration could be read.
    """

    reasons: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    is_read: bool = True


class ObservedCondition(NamedTuple):
    """How a model version or a source does. kind: "model", "camera" and the like. trouble: why badly; "" for well."""

    kind: str
    name: str
    trouble: str = ""

    @property
    def what(self) -> str:
        """Its name among all."""
        return f"{self.kind} {self.name}"


class RunningDaemon(Protocol):
    """The daemon around a core, as a part of the core sees it. Thread: any but main."""

    @property
    def settings(self) -> ReadSettings:
        """The settings of the start, or of the last reload that could read them."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the start is over."""
        ...

    def reload(self, stop: threading.Event) -> Reloaded:
        """Have the configuration read again as at SIGHUP, and wait for the end, or until `stop` is set."""
        ...

    def conditions(self) -> list[ObservedCondition]:
        """How each model version does, and each camera or microphone."""
        ...


@runtime_checkable
class HasSources(Protocol):
    """A door that reads from cameras and the like."""

    def states(self) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """By table, such as `cameras`, and by name: `state` and `reason` of each source. Thread: any."""
        ...


class Core(Struct):
    """Everything that serves models, with no socket: the daemon puts frontends before it, `Runtime` calls it.

    updates: None without `[update]`. daemon: the one around it; None in process, and until `serve` has made it.
    telemetry: None without `[tracing]`. chosen: as of `busiest`.
    """

    config: Config
    facts: Facts
    profile: EffectiveProfile
    clock: Clock
    metrics: Metrics
    dispatcher: Dispatcher
    workers: WorkerPool
    table: ModelTable
    pending_loads: PendingLoads
    infer: Infer
    loader: Loader
    builds: Builds
    hosts: Hosts
    marks: LoadMarks
    regions: Regions
    state: Path | None
    plans: LoadPlans
    updates: DeviceUpdates | None = None
    daemon: RunningDaemon | None = None
    telemetry: Telemetry | None = None
    chosen: BusiestModels | None = None

    @property
    def busiest(self) -> BusiestModels:
        """Choose the models whose metrics are told for themselves, for all who tell them alike. Thread: main."""
        if self.chosen is None:
            from edge_runtime.telemetry.busiest import BusiestModels

            self.chosen = BusiestModels(self.config.metrics.per_model_limit, self.clock)
        return self.chosen

    def start(self) -> None:
        """Start workers and the loader, which begins with the models that are there."""
        if self.telemetry is not None:
            self.telemetry.start()
        self.workers.start()
        if self.updates is not None:
            self.updates.reserve()
        self.loader.start()
        if self.updates is not None:
            self.updates.start()

    def wait_settled(self, limit_s: float | None = None) -> bool:
        """Wait until every model that was there is ready, failed or on demand; False: the time was over first.

        Suspects are not waited for: a version that was being loaded when the daemon ended before.
        """
        began_s = self.clock.monotonic_s()
        if not self.loader.has_settled.wait(limit_s):
            return False
        left_s = None if limit_s is None else max(began_s + limit_s - self.clock.monotonic_s(), 0.0)
        return self.updates is None or self.updates.has_opened.wait(left_s)

    def close(self, drain_s: float, *, load_limit_s: float | None = None) -> bool:
        """Stop loading, answer what was admitted within `drain_s`, give everything back; True when all was answered.

        The models share that time, so a run that never ends holds the stop up once. load_limit_s: how long to wait for
        a load inside the daemon, which nothing can end; None waits for its end.
        """
        # First all are told, then each is waited for: the updater may wait for a load, and that for a host.
        if self.updates is not None:
            self.updates.stop()
        self.loader.stop_loads()
        self.hosts.end_loads()
        self.builds.stop()
        if self.updates is not None:
            self.updates.close(load_limit_s)
        self.loader.close(load_limit_s)
        self.builds.close()
        until_s = self.clock.monotonic_s() + drain_s
        self.hosts.end_by(time.monotonic() + drain_s)
        is_drained = self._close_models(until_s)
        while self.loader.is_running and not self.dispatcher.is_idle() and self.clock.monotonic_s() < until_s:
            self.loader.close(LOOK_S)  # a version that it replaced answers what it admitted
        self.hosts.close()
        self.loader.close(load_limit_s)  # a calibration ends with its host
        self.loader.forget_overrides()
        have_ended = self.workers.close()
        if self.telemetry is not None:
            self.telemetry.close()
        return have_ended and is_drained

    @property
    def is_stuck(self) -> bool:
        """Whether work inside the daemon went on when `close` returned: only the end of the process ends it."""
        is_updating = self.updates is not None and self.updates.is_running
        return self.workers.is_stuck or self.loader.is_running or is_updating

    def conditions(self) -> list[ObservedCondition]:
        """Return how each model version does. Thread: any."""
        return [
            ObservedCondition(
                "model",
                f"{each.model} version {each.number}",
                each.reason or "failed" if each.state is VersionState.FAILED else "",
            )
            for each in self.table.statuses()
        ]

    def watch(self) -> None:
        """Register the gauges.

        `models_ready`, `models_failed`: versions. `state_free_bytes`: room for the daemon's state. `sandbox_…`: what
        Landlock guards here, which changes only with the kernel or the service. Facts: the build and the device, and of
        each model the version that answers, its release, and what runs it.
        """
        found = guard()
        self.metrics.watch("sandbox_landlock_version", lambda: float(found.version))
        self.metrics.watch_each(
            "sandbox_unguarded", "cause", lambda: {found.cause or "none": float(len(found.unguarded))}
        )
        self.metrics.watch("models_ready", lambda: self._models_in(VersionState.READY))
        self.metrics.watch("models_failed", lambda: self._models_in(VersionState.FAILED))
        if self.state is not None:
            self.metrics.watch("state_free_bytes", self._free_bytes)
        build = (__version__, platform.python_version(), platform.machine())
        self.metrics.watch_facts("build_info", ("version", "python", "machine"), lambda: [build])
        self.metrics.watch_facts("device_info", ("device", "group", "profile"), lambda: [self._device_facts()])
        self.metrics.watch_facts(
            "model_info", ("model", "version", "release", "backend", "precision"), self._model_facts
        )

    def _close_models(self, until_s: float) -> bool:
        """Close what is loaded; True when all that it admitted was answered by then."""

        def close(servable: Servable) -> bool:
            return servable.close(max(until_s - self.clock.monotonic_s(), 0.0))

        loaded = [*self.table.loaded(), *self.table.ending()]
        pipelines = [each for each in loaded if each.chain is not None and each.chain.asks]
        asked = {step.model for each in pipelines if each.chain is not None for step in each.chain.asks}
        # Pipelines first: those who ask others before those who are asked.
        drained = [close(each) for each in sorted(pipelines, key=lambda each: each.model in asked)]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(CLOSED_AT_ONCE) as closers:
            return all([*drained, *closers.map(close, [each for each in loaded if each not in pipelines])])

    def _device_facts(self) -> tuple[str, str, str]:
        """Return the id and the group of the device, as updates know them, "" without; and its profile."""
        if self.updates is None:
            return "", "", self.profile.name
        device = str(self.updates.summary().get("device_id", ""))
        return device, next(iter(self.updates.groups), ""), self.profile.name

    def _model_facts(self) -> list[Sequence[str]]:
        """Return a row for each model that answers; release: "" where the version did not come by one."""
        releases = self.updates.summary().get("models", {}) if self.updates is not None else {}
        answering: dict[str, Servable] = {}
        for servable in sorted(self.table.live(), key=lambda each: each.number):
            answering[servable.model] = servable
        rows: list[Sequence[str]] = []
        for model, newest in sorted(answering.items()):
            split = self.table.split_of(model)
            servable = newest if split is None else split.current
            release = releases.get(model, {})
            counter = release.get("release", "") if release.get("version") == servable.number else ""
            rows.append(
                (model, str(servable.number), str(counter), servable.layouts.narrow.backend, servable.precision)
            )
        return rows

    def _models_in(self, state: VersionState) -> float:
        return float(self.table.count(state))

    def _free_bytes(self) -> float:
        assert self.state is not None
        try:
            disk = os.statvfs(self.state)
        except OSError:
            return 0.0  # a disk that cannot be asked cannot be written
        return float(disk.f_bavail * disk.f_frsize)


def _no_door(name: str) -> None:
    raise ConfigError(f"{name} cannot be opened while the daemon starts")


class DaemonStatus:
    """The status of a daemon.

    is_ready, is_draining and endpoints: kept true by the daemon. doors: those that are open, by name; pages: what a
    browser can open of them. open_door: opens one more by its name, and raises ConfigError where it cannot be.
    """

    def __init__(self, core: Core, host: HostProbe) -> None:
        self.is_ready = False
        self.is_draining = False
        self.endpoints: list[str] = []
        self.doors: Mapping[str, Door] = {}
        self.pages: list[str] = []
        self.open_door: Callable[[str], None] = _no_door
        self.started_s = time.monotonic()
        self._core = core
        self._host = host

    def conditions(self) -> list[ObservedCondition]:
        """As of `RunningDaemon`. Thread: any."""
        sources = [
            ObservedCondition(
                table.removesuffix("s"), name, (source["reason"] or "lost") if source["state"] == "lost" else ""
            )
            for door in tuple(self.doors.values())
            if isinstance(door, HasSources)
            for table, found in door.states().items()
            for name, source in found.items()
        ]
        return [*self._core.conditions(), *sources]

    def stats(self) -> dict[str, Any]:
        """Return the result of the `stats` op (wire v1). Thread: any."""
        core = self._core
        told: dict[str, Any] = dict.fromkeys(plugins.entries())
        for door in tuple(self.doors.values()):
            told.update(door.status())
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self.started_s, 3),
            "ready": self.is_ready,
            "profile": core.profile.name,
            "endpoints": list(self.endpoints),
            **told,
            "update": core.updates.status() if core.updates is not None else None,
            "models": core.table.listing(),
            "shared_memory": core.regions.snapshot(),
            "sandbox": guard().as_json(),
            "host": self._host.snapshot(),
            "metrics": core.metrics.snapshot(),
            **({"plugins": [each.as_json() for each in used]} if (used := plugins.used()) else {}),
        }
