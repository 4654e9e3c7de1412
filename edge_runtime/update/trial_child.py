"""The child process in which a release is tried before it is loaded: load it, run its golden input, say how that went.

Started by `trial` as `python -m edge_runtime.update.trial_child PARENT`, a request as JSON on standard input; answers
with one finding as JSON on standard output. A release that crashes, hangs or eats memory does so here, at a low
priority, and what serves goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from edge_runtime.backends.base import Backend, Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import BackendUnavailable, EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.model_spec import TensorSpec
from edge_runtime.repository.golden import GoldenTensors, differences, not_finite, read_golden
from edge_runtime.repository.manifest import Golden, TensorForm
from edge_runtime.serving.confinement import confine, data_bytes, limited_memory, peak_bytes, start_peak
from edge_runtime.serving.engine_cache import EngineCache
from edge_runtime.serving.warmup import warm_up

MAX_FAULT_CHARACTERS = 600

GOLDEN_RUNS = 10
GOLDEN_RUNS_S = 5.0
"""A slow model is run less often: one run tells whether it is right."""

NICENESS = 10
"""Beside 0, the daemon's: a tenth of a core where all are busy."""

STACK_BYTES = 8 << 20
"""Of each thread that a library makes; it counts as memory though hardly any of it is touched."""


LIBRARY_BYTES = 128 << 20
"""What a library takes for itself with its first model, most of it untouched: OpenVINO some 50 MB for a tiny one."""


class Attempt(Struct, frozen=True):
    """One backend with the artifact it is to load, and the fields of `LoadOptions`."""

    backend: str
    artifact: str
    threads: int
    precision: str
    device: str
    spin: bool
    extra: dict[str, str]
    concurrency: int
    max_rows: int | None = None

    def options(self) -> LoadOptions:
        """As the backend takes them."""
        return LoadOptions(
            self.threads, self.precision, self.device, self.spin, self.extra, self.concurrency, self.max_rows
        )


class Request(Struct, frozen=True):
    """What to try: the first attempt that loads. memory_bytes: what the model may take beyond its library.

    engines: the folder of engines that were built for it; none is built here.
    """

    attempts: tuple[Attempt, ...]
    settings: ModelSettings
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    golden: Golden
    golden_file: str
    memory_bytes: int
    engines: str = ""


class Finding(Struct, frozen=True):
    """What was found. fault: why the release is not to be served, "" where it is. note: what was tried in vain."""

    fault: str = ""
    backend: str = ""
    precision: str = ""
    peak_memory_bytes: int = 0
    run_s: float = 0.0
    note: str = ""


def main(arguments: Sequence[str], make_backend: Callable[[str], Backend] | None = None) -> int:
    """Try what standard input names, for the process of that id. Exit status 0 when there is a finding."""
    with confine(int(arguments[0]), NICENESS) as answer:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        try:
            finding = _try(request, make_backend or partial(backend, engines=EngineCache(Path(request.engines))))
        except EdgeRuntimeError as error:
            finding = Finding(fault=error.message)
        except MemoryError:
            finding = Finding(fault=f"it needs more memory than the {request.memory_bytes} bytes that it may have")
        except Exception as error:  # noqa: BLE001  what a library raises unexpectedly is a failed load too
            finding = Finding(fault=f"{type(error).__name__}: {error}"[:MAX_FAULT_CHARACTERS])
        answer.write(msgspec.json.encode(finding))
    return 0


def _try(request: Request, make_backend: Callable[[str], Backend]) -> Finding:
    golden = read_golden(request.golden, Path(request.golden_file).read_bytes())
    reasons: list[str] = []
    for attempt in request.attempts:
        try:
            runner = make_backend(attempt.backend)
            runner.probe()  # imports the library, which is not the model's memory
            stacks_bytes = attempt.threads * attempt.concurrency * STACK_BYTES
            with limited_memory(data_bytes() + LIBRARY_BYTES + stacks_bytes + request.memory_bytes):
                return _try_one(runner, attempt, request, golden, "; ".join(reasons))
        except (BackendUnavailable, LoadFailed) as error:
            reasons.append(f"{attempt.backend}: {error.message}")
    raise LoadFailed(f"no backend here can load it: {'; '.join(reasons)}")


def _try_one(runner: Backend, attempt: Attempt, request: Request, golden: GoldenTensors, note: str) -> Finding:
    """Raises LoadFailed and BackendUnavailable: the next one may do; RunFailed: none is asked after this."""
    before_bytes = start_peak()
    instance = runner.load(Path(attempt.artifact), attempt.options())
    try:
        try:
            warm_up(instance, request.settings)
        except RunFailed as error:
            raise LoadFailed(error.message) from error
        run_s = _run_golden(instance, request, golden)
        peak = max(peak_bytes() - before_bytes, 0)
        return Finding(
            backend=instance.backend,
            precision=instance.precision,
            peak_memory_bytes=peak,
            run_s=run_s,
            note=note,
        )
    finally:
        instance.close()


def _run_golden(instance: Instance, request: Request, golden: GoldenTensors) -> float:
    """Seconds of a usual run. Raises RunFailed: the model is another than is described, or answers wrongly."""
    _check_specs("input", instance.spec.inputs, request.inputs)
    _check_specs("output", instance.spec.outputs, request.outputs)
    tolerance = golden.tolerance_at(instance.precision)
    names = [spec.name for spec in instance.spec.outputs]
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < GOLDEN_RUNS and (not times or time.perf_counter() - began_s < GOLDEN_RUNS_S):
        started_s = time.perf_counter()
        outputs = instance.run(golden.inputs)
        times.append(time.perf_counter() - started_s)
        got = dict(zip(names, outputs, strict=True))
        bad = not_finite(golden.forms, got)
        if bad is not None:
            raise RunFailed(f"its output {bad!r} has NaN or infinite values for its golden input")
        found = differences(golden.forms, golden.outputs, got, tolerance)
        if found:
            raise RunFailed(f"its golden output is wrong at precision {instance.precision}: {'; '.join(found)}")
    return median(times)


def _check_specs(what: str, specs: Sequence[TensorSpec], forms: Sequence[TensorForm]) -> None:
    """Raise RunFailed unless a model's tensors are those that its manifest describes.

    Backends differ in what they call open, so that an open length stands for any; not in ranks, except that an output's
    may not be known.
    """
    described = {form.name: form for form in forms}
    found = {spec.name: spec for spec in specs}
    if set(found) != set(described):
        raise RunFailed(f"its {what}s are {', '.join(found)}; its manifest says {', '.join(described)}")
    for name, form in described.items():
        spec = found[name]
        if spec.datatype != form.datatype or not _is_shape(spec.shape, form.shape, may_be_unknown=what == "output"):
            raise RunFailed(
                f"its {what} {name!r} is {spec.datatype} {list(spec.shape)}; "
                f"its manifest says {form.datatype} {list(form.shape)}"
            )


def _is_shape(found: tuple[int, ...], described: tuple[int, ...], *, may_be_unknown: bool) -> bool:
    if may_be_unknown and not (found and described):
        return True
    return len(found) == len(described) and all(
        got == wanted or -1 in (got, wanted) for got, wanted in zip(found, described, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
