"""Build one engine: parse the ONNX model, set the profile and the precision, compile.

Owns: every call of TensorRT's builder. Takes minutes and gigabytes and may crash, so that a process of its own runs it
(serving/engine_child.py). Nothing here runs an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.backends.onnx_files import check_onnx_files
from edge_runtime.backends.tensorrt_library import FULL, Library, import_tensorrt
from edge_runtime.backends.tensorrt_order import EngineOrder
from edge_runtime.backends.tensorrt_precision import Typing, choose_typing
from edge_runtime.backends.tensorrt_progress import BuildProgress
from edge_runtime.errors import BackendUnavailable, LoadFailed

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """engine: its bytes. timings: what was measured of kernels on this device, for the next build; may be empty."""

    engine: memoryview
    timings: bytes


def build_engine(
    order: EngineOrder, tell: Callable[[float, str], None] = lambda *_: None, timings: bytes = b""
) -> BuiltEngine:
    """Build what is ordered. tell: gets the share done and the phase, where the version reports any.

    timings: of an earlier build. Raises LoadFailed with TensorRT's reason, BackendUnavailable (library, version,
    precision, DLA).
    """
    library = import_tensorrt()
    if (library.name, library.version) != (order.library, order.version):
        raise BackendUnavailable(
            f"{order.library} {order.version} was to build, and {library.name} {library.version} is installed by now"
        )
    artifact = Path(order.artifact)
    files = check_onnx_files(artifact)
    typing = choose_typing(order.precision, files, library.traits, library.title)
    check_dla(library, order, typing)
    logger = new_logger(library)
    builder = library.module.Builder(logger)
    network = builder.create_network(_network_flags(library, typing, order))
    # Invariant: the parser lives until the engine is built; the network's weights are its.
    parser = library.module.OnnxParser(network, logger)
    _parse(parser, artifact, library, logger)
    config = builder.create_builder_config()
    _configure(config, library, typing, order)
    config.add_optimization_profile(_profile(builder, network, order))
    monitor = _attach_monitor(config, library, tell)
    kept = _attach_timings(config, library, timings)
    engine = builder.build_serialized_network(network, config)
    del monitor
    if engine is None:
        raise LoadFailed(f"{library.title} cannot build an engine of {artifact.name}: {logger.reason()}")
    return BuiltEngine(memoryview(engine), bytes(memoryview(kept.serialize())) if kept is not None else b"")


def check_dla(library: Library, order: EngineOrder, typing: Typing) -> None:
    """Raise BackendUnavailable for what a DLA cannot do; before anything is built."""
    if order.dla_core is None:
        return
    if not library.traits.weak_typing:
        raise BackendUnavailable(f"{library.title} has no DLA; use TensorRT 8.6 or 10 (JetPack 6), or device GPU")
    if typing.precision not in ("f16", "int8", "mixed"):
        raise BackendUnavailable(
            f'a DLA runs f16 and int8, and this model would run in {typing.precision}; say precision = "f16"'
        )


def new_logger(library: Library) -> Any:
    """A logger that keeps the last errors. It must outlive what it is given to.

    With it come the standard plugins, where the version has them.
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
            """What went wrong, in the library's words."""
            return "; ".join(self._errors)[:SHOWN_CHARACTERS] or "it gives no reason"

    logger = Logger()
    if library.name == FULL:
        # NVIDIA's own (EfficientNMS_TRT …), part of the library; nothing else is ever loaded.
        module.init_libnvinfer_plugins(logger, "")
    return logger


def _network_flags(library: Library, typing: Typing, order: EngineOrder) -> int:
    flag = library.module.NetworkDefinitionCreationFlag
    flags = 0
    if library.traits.explicit_batch:
        flags |= 1 << int(flag.EXPLICIT_BATCH)
    if library.traits.strong_flag and typing.is_strong and order.dla_core is None:
        flags |= 1 << int(flag.STRONGLY_TYPED)
    return flags


def _parse(parser: Any, artifact: Path, library: Library, logger: Any) -> None:
    # From the file, so that external data beside it is found; which files those are was checked.
    if parser.parse_from_file(str(artifact)):
        return
    reasons = [_reason(parser.get_error(index)) for index in range(parser.num_errors)]
    reason = "; ".join(reasons)[:SHOWN_CHARACTERS] or logger.reason()
    raise LoadFailed(f"{library.title} cannot read {artifact.name}: {reason}")


def _reason(problem: Any) -> str:
    """One error of the parser; TensorRT 10 and later say the operator too."""
    operator = getattr(problem, "node_operator", str)()
    words = " ".join(str(problem.desc()).split())
    return f"operator {operator}: {words}" if operator else words


def _configure(config: Any, library: Library, typing: Typing, order: EngineOrder) -> None:
    module = library.module
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    # So that the precision that really runs can be read back from the engine.
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    if order.tf32:
        config.set_flag(module.BuilderFlag.TF32)
    else:
        config.clear_flag(module.BuilderFlag.TF32)
    for name in _flags_for(typing, order):
        config.set_flag(getattr(module.BuilderFlag, name))
    if order.optimization_level is not None:
        config.builder_optimization_level = order.optimization_level
    if order.dla_core is not None:
        config.default_device_type = module.DeviceType.DLA
        config.DLA_core = order.dla_core
        if order.gpu_fallback:
            config.set_flag(module.BuilderFlag.GPU_FALLBACK)
    if order.target:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(module.ComputeCapability, order.target), 0)


def _flags_for(typing: Typing, order: EngineOrder) -> tuple[str, ...]:
    """Builder flags of a weakly typed network; a DLA's always is one, so that it is allowed what the model holds."""
    if order.dla_core is None or not typing.is_strong:
        return typing.flags
    return ("FP16", "INT8") if typing.precision == "int8" else ("FP16",)


def _profile(builder: Any, network: Any, order: EngineOrder) -> Any:
    profile = builder.create_optimization_profile()
    there = {network.get_input(index).name for index in range(network.num_inputs)}
    for name, (least, tuned, most) in order.shapes.items():
        if name in there:  # the parser drops inputs that nothing uses
            profile.set_shape(name, least, tuned, most)
    return profile


def _attach_monitor(config: Any, library: Library, tell: Callable[[float, str], None]) -> Any:
    """Have progress told; returns what must live while the engine is built."""
    if not library.traits.progress:
        return None
    module, progress = library.module, BuildProgress(tell)

    class Monitor(module.IProgressMonitor):  # type: ignore[misc,name-defined]  # as above
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step)
            return True  # go on; who wants it to stop ends this process

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    config.progress_monitor = Monitor()
    return config.progress_monitor


def _attach_timings(config: Any, library: Library, timings: bytes) -> Any:
    """Measure kernels once a device: earlier timings are used, new ones are added. None where there are none."""
    if not library.traits.timing_cache:
        return None
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, False):
        # Damaged, or of another device: TensorRT says so itself, and an empty one always fits.
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache
