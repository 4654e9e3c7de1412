"""The only file that knows every part, and it holds no logic: from a configuration to parts wired together.

Constructs; starts nothing. daemon.py starts and stops a daemon, runtime.py the same core in process, which imports
nothing of doors. What an extra brings (tuf, paho) is imported only where its table is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge_runtime import plugins
from edge_runtime.backends.registry import Backends, known_backends
from edge_runtime.clock import Calendar, Clock, SystemClock
from edge_runtime.config.endpoints import state_folder
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import Core, DaemonStatus, DeviceUpdates
from edge_runtime.daemon.parts import load
from edge_runtime.doors.binding import EarlySocket
from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.errors import ConfigError
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.regions import RegionBounds, Regions
from edge_runtime.models.builds import BuildParts, Builds
from edge_runtime.models.calibration import Calibrator, CurveCache
from edge_runtime.models.chains import ChainParts, Chains
from edge_runtime.models.context import ModelContext, ModelSources
from edge_runtime.models.executor import Executor
from edge_runtime.models.kept_interfaces import KeptInterfaces
from edge_runtime.models.load_marks import LoadMarks
from edge_runtime.models.load_plans import LoadPlans, ServingLimits
from edge_runtime.models.loader import Loader
from edge_runtime.models.loading import VersionLoader
from edge_runtime.models.model_calls import ModelCalls
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.names import NAME_RULE, is_model_name
from edge_runtime.models.overrides import OverrideFiles
from edge_runtime.models.pending_loads import PendingLoads
from edge_runtime.models.placement import Placement
from edge_runtime.models.served_folder import ServedFolder
from edge_runtime.models.watch import SETTLE_S, Watcher
from edge_runtime.profiles.detect import detect
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.match import match_profile
from edge_runtime.profiles.profile import (
    BackendChoice,
    EffectiveProfile,
    load_profiles,
    usual_host_bytes,
    usual_unanswered_bytes,
)
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.infer import Infer
from edge_runtime.request.request import CHECK, UnansweredBytes
from edge_runtime.request.worker import WorkerPool
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from edge_runtime.daemon.daemon import Daemon
    from edge_runtime.daemon.state_lock import StateLock
    from edge_runtime.hosts.prepared_parent import PreparedParent
    from edge_runtime.telemetry.host import HostProbe


class _Device(NamedTuple):
    """The device that the parts of a core are made for. state: None where no state is kept."""

    config: Config
    facts: Facts
    profile: EffectiveProfile
    limits: ServingLimits
    state: Path | None

    def folder(self, name: str) -> Path | None:
        """Return a folder of the state; None where no state is kept."""
        return self.state / name if self.state is not None else None


def assemble_core(
    config: Config,
    clock: Clock | None = None,
    *,
    disk: Disk = SYSTEM_DISK,
    calendar: Calendar | None = None,
    parent: PreparedParent | None = None,
) -> Core:
    """Wire the serving core. Raises ConfigError (an unknown profile, an unusable state folder).

    disk: what updates are written through. calendar: judges expiry; None: the host's. parent: of hosts, where one was
    begun.
    """
    clock = clock or SystemClock()
    device = _device(config)
    facts, profile, limits, state = device.facts, device.profile, device.limits, device.state
    metrics = Metrics()
    # Requests.
    dispatcher = Dispatcher(clock, limits.cores, profile.limits.max_run_ms / 1e3)
    workers = WorkerPool(dispatcher, clock)
    executor = Executor()
    table = ModelTable(executor)
    pending_loads = PendingLoads(dispatcher)
    infer = Infer(table, pending_loads, dispatcher, _new_unanswered(config, facts))
    # Backends.
    shared = config.shared_memory
    regions = Regions(RegionBounds(shared.per_connection_bytes, shared.per_user_bytes, shared.total_bytes))
    hosts = Hosts(regions=regions, on_failure=executor.wake, early=parent)
    watcher = _new_watcher(config, clock)
    sources = ModelSources(watcher)
    marks = LoadMarks(device.folder("loads"))
    context = ModelContext(table, pending_loads, sources, marks, dispatcher, executor, metrics, clock)
    builds = Builds(BuildParts(table, sources, state, facts.memory_bytes, hosts))
    calls = ModelCalls(infer, dispatcher, workers, clock, metrics)
    backends = Backends(hosts, allows_code=config.python_models, builds=builds, clock=clock, begin_call=calls.begin)
    plans = LoadPlans(_with_code(profile.backends, is_allowed=config.python_models), backends, builds, limits)
    core = Core(
        config=config,
        facts=facts,
        profile=profile,
        clock=clock,
        metrics=metrics,
        dispatcher=dispatcher,
        workers=workers,
        table=table,
        pending_loads=pending_loads,
        infer=infer,
        loader=_new_loader(device, context, plans, backends, builds, hosts, infer, watcher),
        builds=builds,
        hosts=hosts,
        marks=marks,
        regions=regions,
        state=state,
        plans=plans,
    )
    core.watch()
    core.updates = _open_updates(core, disk, calendar)
    if config.tracing is not None:
        core.telemetry = load(plugins.declared("parts", "tracing"))(core)
    return core


def assemble_daemon(
    config: Config,
    core: Core | None = None,
    early: EarlySocket | None = None,
    parent: PreparedParent | None = None,
    *,
    host: HostProbe | None = None,
    lock: StateLock | None = None,
) -> Daemon:
    """Wire a daemon over a serving core, its own unless one is given. Raises ConfigError as `assemble_core`.

    host: what this machine's sensors are read by; None: the kernel's files. lock: of the state, where it is taken.
    """
    from edge_runtime.daemon.daemon import Daemon
    from edge_runtime.daemon.doors import DoorContext, open_doors
    from edge_runtime.doors.io_loop import IoLoop
    from edge_runtime.request.infer_frontend import InferFrontend
    from edge_runtime.request.operation_handlers import OperationHandlers
    from edge_runtime.telemetry.host import HostProbe
    from edge_runtime.telemetry.notify import Notifier

    core = core or assemble_core(config, parent=parent)
    host = host or HostProbe()
    status = DaemonStatus(core, host)
    operations = OperationHandlers(
        core.table,
        core.loader,
        core.pending_loads,
        status,
        updates=core.updates,
        regions=core.regions,
    )
    loop = core.hosts.events = IoLoop(core.metrics, unfinished_bytes=config.limits.message_bytes)
    context = DoorContext(core, status, operations, host, Descriptors(), loop)
    frontend = context.new_frontend("zmq", regions=core.regions)
    checks = InferFrontend(core.table, core.infer, operations, core.clock, core.metrics, origin=CHECK)
    open_doors(context)
    status.doors, status.open_door = context.doors, context.open_door
    return Daemon(context, frontend=frontend, checks=checks, notifier=Notifier(), early=early, lock=lock)


def effective_profile(config: Config, facts: Facts) -> EffectiveProfile:
    """The profile that fits this host, with what the configuration lays over it. Raises ConfigError."""
    try:
        backends = msgspec.convert(msgspec.to_builtins(config.backends), tuple[BackendChoice, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"backends: {error}") from None
    unknown = [each.name for each in backends if each.name not in known_backends()]
    if unknown and all(each.is_usable for each in plugins.used()):  # else it may be a plug-in's, whose state says more
        raise ConfigError(f"backends.name: got {unknown[0]!r}, wanted one of {', '.join(known_backends())}")
    chosen = match_profile(facts, load_profiles(), config.profile).profile
    return chosen.effective(facts, config.limits, backends)


def _device(config: Config) -> _Device:
    """Look at this device. Raises ConfigError as `assemble_core`."""
    if config.plugins:
        plugins.start(config.plugins)
    facts = detect()
    profile = effective_profile(config, facts)
    return _Device(config, facts, profile, _serving_limits(config, profile), state_folder(config.state))


def _new_loader(  # noqa: PLR0917 (wiring)
    device: _Device,
    context: ModelContext,
    plans: LoadPlans,
    backends: Backends,
    builds: Builds,
    hosts: Hosts,
    infer: Infer,
    watcher: Watcher | None,
) -> Loader:
    """Wire all that versions come and go by."""
    versions = VersionLoader(
        plans=plans,
        backends=backends,
        isolation=device.config.isolation,
        limits=device.limits,
        dispatcher=context.dispatcher,
        clock=context.clock,
        metrics=context.metrics,
        state=device.state,
    )
    chains = Chains(ChainParts(context, backends, device.limits, infer))
    calibrator = Calibrator(
        context,
        CurveCache(device.folder("calibration")),
        is_on=device.config.calibrate,
        hardware=f"{device.facts.cpu_model} {device.limits.cores}",
        budget_bytes=device.profile.limits.memory_bytes,
    )
    placement = Placement(
        context,
        versions=versions,
        chains=chains,
        interfaces=KeptInterfaces(device.folder("interfaces")),
        calibrator=calibrator,
        hosts=hosts,
        budget_bytes=device.profile.limits.memory_bytes,
        drain_s=device.config.drain_s,
    )
    folder = ServedFolder(
        watcher,
        context,
        placement,
        override_files=OverrideFiles(device.folder("overrides")),
        config=device.config,
    )
    return Loader(
        context,
        placement=placement,
        folder=folder,
        builds=builds,
        chains=chains,
        calibrator=calibrator,
        config=device.config,
    )


def _new_watcher(config: Config, clock: Clock) -> Watcher | None:
    """Return the watcher of the served folders; None where only signed releases are. Raises ConfigError."""
    if config.requires_signed:
        return None
    named = {}
    for name, place in config.model.items():
        if not is_model_name(name):
            raise ConfigError(f"model: {name!r} is not a model name; wanted {NAME_RULE}")
        named[name] = Path(place).absolute()
        if not named[name].exists():
            raise ConfigError(f"model.{name}: there is no file or folder {str(named[name])!r}")
    # Where a load alone takes what has changed, the folder is only listed: a half-copied file costs nothing.
    rest_s = SETTLE_S if config.follows_folder else 0.0
    return Watcher(Path(config.models_folder) if config.models_folder else None, clock, rest_s, named=named)


def _new_unanswered(config: Config, facts: Facts) -> UnansweredBytes:
    """The bounds of requests that wait for their answers."""
    total_bytes = config.limits.total_unanswered_bytes
    if total_bytes is None:
        total_bytes = usual_unanswered_bytes(facts)
    return UnansweredBytes(config.limits.unanswered_bytes, total_bytes)


def _serving_limits(config: Config, profile: EffectiveProfile) -> ServingLimits:
    """The profile's limits, with what the configuration says of hosts."""
    return ServingLimits(
        cores=profile.limits.cores,
        max_batch_rows=profile.batching.max_batch_rows,
        queue_rows=profile.limits.queue_rows,
        queue_bytes=profile.limits.queue_bytes,
        host_memory_bytes=config.limits.host_memory_bytes or usual_host_bytes(profile.limits.memory_bytes),
        run_limit_ms=config.limits.run_limit_ms,
    )


def _with_code(backends: Sequence[BackendChoice], *, is_allowed: bool) -> tuple[BackendChoice, ...]:
    """The profile's backends and those of code: first where it is allowed, since a model.py is the front of a net.

    Last where it is not: a version of a model.py alone then says which setting allows it.
    """
    of_code = tuple(BackendChoice(name=name) for name in plugins.code_backends())
    return (*of_code, *backends) if is_allowed else (*backends, *of_code)


def _open_updates(core: Core, disk: Disk, calendar: Calendar | None) -> DeviceUpdates | None:
    """The updater of a device; None without `[update]`. Raises ConfigError: a setting cannot be."""
    if core.config.update is None:
        return None
    open_updates = load(plugins.declared("parts", "update"))
    updates: DeviceUpdates = open_updates(core, disk, calendar)
    return updates
