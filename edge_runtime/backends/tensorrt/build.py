"""Build one engine: parse the ONNX model, set the profile and the precision, compile; report how far it is.

Owns: every call of TensorRT's builder. A build takes minutes and gigabytes and may crash, so it runs in a child process
(builds/build_store.py). Runs no engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.backends.tensorrt.library import FULL, Library, import_tensorrt
from edge_runtime.backends.tensorrt.plan import EnginePlan, Typing, choose_typing
from edge_runtime.errors import BackendUnavailable, LoadFailed

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A built engine's bytes. timings: of kernels on this device, for the next build; may be empty."""

    engine: memoryview
    timings: bytes


def build_engine(
    plan: EnginePlan, tell: Callable[[float, str], None] = lambda *_: None, timings: bytes = b""
) -> BuiltEngine:
    """Build an engine by its plan. tell: gets the share done and the phase, where the version reports any.

    timings: of an earlier build. Raises LoadFailed with TensorRT's reason, BackendUnavailable (library, version,
    precision, DLA).
    """
    library = import_tensorrt()
    if (library.name, library.version) != (plan.library, plan.version):
        raise BackendUnavailable(
            f"{plan.library} {plan.version} is planned, and {library.name} {library.version} is installed now"
        )
    artifact = Path(plan.artifact)
    files = check_onnx_files(artifact)
    typing = choose_typing(plan.precision, files, library.traits, library.title)
    check_dla(library, plan, typing)
    logger = new_logger(library)
    builder = library.module.Builder(logger)
    network = builder.create_network(_network_flags(library, typing, plan))
    # Invariant: the parser lives until the engine is built, because it owns the network's weights.
    parser = library.module.OnnxParser(network, logger)
    _parse(parser, artifact, library, logger)
    config = builder.create_builder_config()
    _configure(config, library, typing, plan)
    config.add_optimization_profile(_profile(builder, network, plan))
    monitor = _attach_monitor(config, library, tell)
    kept = _attach_timings(config, library, timings)
    engine = builder.build_serialized_network(network, config)
    del monitor
    if engine is None:
        raise LoadFailed(f"{library.title} cannot build an engine of {artifact.name}: {logger.reason()}")
    return BuiltEngine(memoryview(engine), bytes(memoryview(kept.serialize())) if kept is not None else b"")


def check_dla(library: Library, plan: EnginePlan, typing: Typing) -> None:
    """Raise BackendUnavailable for a plan that a DLA cannot run, before anything is built."""
    if plan.dla_core is None:
        return
    if not library.traits.weak_typing:
        raise BackendUnavailable(f"{library.title} has no DLA; use TensorRT 8.6 or 10 (JetPack 6), or device GPU")
    if typing.precision not in ("f16", "int8", "mixed"):
        raise BackendUnavailable(
            f'a DLA runs f16 and int8, and this model would run in {typing.precision}; say precision = "f16"'
        )


def new_logger(library: Library) -> Any:
    """Make a logger that keeps the last errors, and register the standard plugins where the version has them.

    It must outlive every object that takes it.
    """
    module = library.module

    class Logger(module.ILogger):  # type: ignore[misc,name-defined]  # made from the library that is there
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.INTERNAL_ERROR, module.ILogger.ERROR):
                self._errors = [*self._errors[-3:], " ".join(message.split())]
                log.info("%s: %s", library.name, message[:SHOWN_CHARACTERS])
            elif severity == module.ILogger.WARNING:
                log.debug("%s: %s", library.name, message[:SHOWN_CHARACTERS])

        def reason(self) -> str:
            """The last errors, in the library's words."""
            return "; ".join(self._errors)[:SHOWN_CHARACTERS] or "it gives no reason"

    logger = Logger()
    if library.name == FULL:
        # NVIDIA's own plugins (EfficientNMS_TRT …), part of the library; no other is ever loaded.
        module.init_libnvinfer_plugins(logger, "")
    return logger


def _network_flags(library: Library, typing: Typing, plan: EnginePlan) -> int:
    flag = library.module.NetworkDefinitionCreationFlag
    flags = 0
    if library.traits.explicit_batch:
        flags |= 1 << int(flag.EXPLICIT_BATCH)
    if library.traits.strong_flag and typing.is_strong and plan.dla_core is None:
        flags |= 1 << int(flag.STRONGLY_TYPED)
    return flags


def _parse(parser: Any, artifact: Path, library: Library, logger: Any) -> None:
    # From the file, so that external data beside it is found; its names were checked.
    if parser.parse_from_file(str(artifact)):
        return
    reasons = [_reason(parser.get_error(index)) for index in range(parser.num_errors)]
    reason = "; ".join(reasons)[:SHOWN_CHARACTERS] or logger.reason()
    raise LoadFailed(f"{library.title} cannot read {artifact.name}: {reason}")


def _reason(problem: Any) -> str:
    """One error of the parser; TensorRT 10 and later name the operator too."""
    operator = getattr(problem, "node_operator", str)()
    words = " ".join(str(problem.desc()).split())
    return f"operator {operator}: {words}" if operator else words


def _configure(config: Any, library: Library, typing: Typing, plan: EnginePlan) -> None:
    module = library.module
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, plan.workspace_bytes)
    # The precision that really runs is read back from the engine.
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    if plan.tf32:
        config.set_flag(module.BuilderFlag.TF32)
    else:
        config.clear_flag(module.BuilderFlag.TF32)
    for name in _flags_for(typing, plan):
        config.set_flag(getattr(module.BuilderFlag, name))
    if plan.optimization_level is not None:
        config.builder_optimization_level = plan.optimization_level
    if plan.dla_core is not None:
        config.default_device_type = module.DeviceType.DLA
        config.DLA_core = plan.dla_core
        if plan.gpu_fallback:
            config.set_flag(module.BuilderFlag.GPU_FALLBACK)
    if plan.target:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(module.ComputeCapability, plan.target), 0)


def _flags_for(typing: Typing, plan: EnginePlan) -> tuple[str, ...]:
    """Builder flags of a weakly typed network. A DLA's always is one, so flags allow the types that the model holds."""
    if plan.dla_core is None or not typing.is_strong:
        return typing.flags
    return ("FP16", "INT8") if typing.precision == "int8" else ("FP16",)


def _profile(builder: Any, network: Any, plan: EnginePlan) -> Any:
    profile = builder.create_optimization_profile()
    there = {network.get_input(index).name for index in range(network.num_inputs)}
    for name, (least, tuned, most) in plan.shapes.items():
        if name in there:  # the parser drops unused inputs
            profile.set_shape(name, least, tuned, most)
    return profile


def _attach_monitor(config: Any, library: Library, tell: Callable[[float, str], None]) -> Any:
    """Attach a progress monitor; the returned object must live while the engine is built."""
    if not library.traits.progress:
        return None
    module, progress = library.module, BuildProgress()

    class Monitor(module.IProgressMonitor):  # type: ignore[misc,name-defined]  # as above
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            share = progress.step(phase_name, step)
            if share is not None:
                tell(share, phase_name)
            return True  # go on; to stop, this process is ended

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    config.progress_monitor = Monitor()
    return config.progress_monitor


def _attach_timings(config: Any, library: Library, timings: bytes) -> Any:
    """Attach earlier timings of kernels, to which the build adds; None where the version has none."""
    if not library.traits.timing_cache:
        return None
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, False):
        # Damaged, or of another device: TensorRT reports it, and an empty cache always fits.
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Turns the phases that TensorRT reports into a share from 0 to 1 that never falls. Thread: any, many at once."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._lock = threading.Lock()
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase with a number of steps, inside another or by itself."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str, index: int) -> float | None:
        """Mark a step of a phase as done; steps count from 0. Returns the share where it has grown."""
        with self._lock:
            phase = self._phases.get(name)
            if phase is None:
                return None
            phase.done = min(max(phase.done, index + 1), phase.steps)
            share = self._share_from(name)
            has_grown = share > self._share
            self._share = max(self._share, share)
        return share if has_grown else None

    def finish(self, name: str) -> None:
        """End a phase."""
        with self._lock:
            self._phases.pop(name, None)

    def _share_from(self, name: str) -> float:
        """The share of the whole, seen from one phase: a phase is one step of its parent."""
        share, seen = 0.0, set[str]()
        current: str | None = name
        while current is not None and current not in seen:
            seen.add(current)
            phase = self._phases.get(current)
            if phase is None:
                break
            share = min((phase.done + share) / phase.steps, 1.0)
            current = phase.parent
        return share
