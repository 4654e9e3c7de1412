"""The only file that knows every part, and it holds no logic: from a configuration to parts wired together.

Constructs; starts nothing. run.py starts and stops a daemon, runtime.py the same core in process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_runtime.backends.registry import backend, known_backends
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.config.endpoints import state_folder
from edge_runtime.config.settings import Config
from edge_runtime.daemon.gauges import watch_daemon
from edge_runtime.errors import ConfigError
from edge_runtime.profiles.detect import detect
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.match import match_profile
from edge_runtime.profiles.profile import BackendChoice, EffectiveProfile, load_profiles
from edge_runtime.repository.durable import SYSTEM_DISK, Disk
from edge_runtime.repository.watch import Watcher
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.scheduling.worker import WorkerPool
from edge_runtime.serving.calibration import CurveCache
from edge_runtime.serving.calibrator import Calibrator, CalibratorSettings
from edge_runtime.serving.engine_store import EngineStore
from edge_runtime.serving.infer import Infer
from edge_runtime.serving.loader import Loader, LoaderSettings
from edge_runtime.serving.loading import ServingLimits, VersionLoader
from edge_runtime.serving.lobby import Lobby
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from edge_runtime.update.worker import UpdateWorker


@dataclass(slots=True)
class Core:
    """Everything that serves models, with no socket: the daemon puts frontends before it, `Runtime` calls it."""

    config: Config
    facts: Facts
    profile: EffectiveProfile
    clock: Clock
    metrics: Metrics
    dispatcher: Dispatcher
    workers: WorkerPool
    servables: Servables
    lobby: Lobby
    infer: Infer
    loader: Loader
    engines: EngineStore
    state: Path | None
    updates: UpdateWorker | None

    def start(self) -> None:
        """Start workers and the loader, which begins with the models that are there."""
        self.workers.start()
        if self.updates is not None:
            self.updates.reserve()
        self.loader.start()
        if self.updates is not None:
            self.updates.start()

    def wait_settled(self, limit_s: float | None = None) -> bool:
        """Wait until every model that was there is ready, failed or waits on demand; False: the time was over first."""
        began_s = self.clock.monotonic_s()
        if not self.loader.has_settled.wait(limit_s):
            return False
        left_s = None if limit_s is None else max(began_s + limit_s - self.clock.monotonic_s(), 0.0)
        return self.updates is None or self.updates.has_opened.wait(left_s)

    def close(self, drain_s: float) -> bool:
        """Stop loading, answer what was admitted within `drain_s`, give everything back; True when all was answered."""
        if self.updates is not None:
            self.updates.close()
        self.loader.close()
        self.engines.close()
        drained = [servable.close(drain_s) for servable in self.servables.loaded()]
        self.workers.close()
        return all(drained)


def assemble_core(
    config: Config,
    clock: Clock | None = None,
    *,
    disk: Disk = SYSTEM_DISK,
    utc_clock: Callable[[], datetime] | None = None,
) -> Core:
    """Wire the serving core. Raises ConfigError (an unknown profile, an unusable state folder).

    disk: what updates are written through. utc_clock: what expiry is judged by; None: the system's clock.
    """
    clock = clock or SystemClock()
    facts = detect()
    profile = effective_profile(config, facts)
    metrics = Metrics()
    dispatcher = Dispatcher(clock, profile.limits.cores, profile.limits.max_run_ms / 1e3)
    servables = Servables()
    lobby = Lobby(dispatcher)
    state = state_folder(config.state)
    engines = EngineStore(state / "engines" if state is not None else None, usable_bytes=facts.memory_bytes)
    versions = _new_versions(config, profile, dispatcher, clock, metrics, engines=engines)
    calibrator = Calibrator(
        dispatcher,
        CurveCache(state / "calibration" if state is not None else None),
        CalibratorSettings(f"{facts.cpu_model} {profile.limits.cores}", profile.limits.memory_bytes),
        used_bytes=servables.memory_bytes,
    )
    loader = Loader(
        versions=versions,
        watcher=Watcher(Path(config.models), clock),
        servables=servables,
        dispatcher=dispatcher,
        calibrator=calibrator,
        lobby=lobby,
        clock=clock,
        settings=LoaderSettings(
            watch=config.watch,
            calibrate=config.calibrate,
            budget_bytes=profile.limits.memory_bytes,
            serves_folder=config.serves_folder,
        ),
        metrics=metrics,
        refuse_engine=engines.refuse,
    )
    engines.tell(loader.engine_done, loader.engine_progress)
    updates = None
    if config.update is not None:
        try:
            from edge_runtime.daemon.update_parts import new_update_worker
        except ImportError as error:
            raise ConfigError(f"update: {error}; install it with: pip install 'edge-runtime[update]'") from None
        updates = new_update_worker(
            config,
            state,
            profile,
            versions=versions,
            engines=engines,
            loader=loader,
            clock=clock,
            disk=disk,
            utc_clock=utc_clock,
        )
    watch_daemon(metrics, servables, state, updates.summary if updates is not None else None)
    return Core(
        config=config,
        facts=facts,
        profile=profile,
        clock=clock,
        metrics=metrics,
        dispatcher=dispatcher,
        workers=WorkerPool(dispatcher, clock),
        servables=servables,
        lobby=lobby,
        infer=Infer(servables, lobby),
        loader=loader,
        engines=engines,
        state=state,
        updates=updates,
    )


def effective_profile(config: Config, facts: Facts) -> EffectiveProfile:
    """The profile that fits this host, with what the configuration lays over it. Raises ConfigError."""
    backends = msgspec.convert(msgspec.to_builtins(config.backends), tuple[BackendChoice, ...])
    unknown = [each.name for each in backends if each.name not in known_backends()]
    if unknown:
        raise ConfigError(f"backends.name: got {unknown[0]!r}, wanted one of {', '.join(known_backends())}")
    chosen = match_profile(facts, load_profiles(), config.profile).profile
    return chosen.effective(facts, config.limits, backends)


def _new_versions(
    config: Config,
    profile: EffectiveProfile,
    dispatcher: Dispatcher,
    clock: Clock,
    metrics: Metrics,
    *,
    engines: EngineStore,
) -> VersionLoader:
    return VersionLoader(
        # Last and always: a model.py that is not allowed then says which setting allows it.
        choices=(*profile.backends, BackendChoice(name="python")),
        backend=cache(partial(backend, allow_python=config.python_models, engines=engines)),
        limits=ServingLimits(
            cores=profile.limits.cores,
            max_batch_rows=profile.batching.max_batch_rows,
            queue_rows=profile.limits.queue_rows,
            queue_bytes=profile.limits.queue_bytes,
        ),
        dispatcher=dispatcher,
        clock=clock,
        metrics=metrics,
    )
