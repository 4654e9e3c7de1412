"""Features of sound: the CPU that they take beside a pipeline of numpy and scipy that makes each window by itself.

Both run in a process of their own with one thread of BLAS: waiting threads of it would count as CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.scenarios import Bench
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.series.features import mel_bands
from edge_runtime.series.series_input import SeriesInput
from edge_runtime.series.series_steps import SeriesSteps

SECONDS, TIMES = 10, 20
HOPS = {"quarter": 4000, "whole": 16_000}
"""Windows of a second at 16 kHz: each a quarter of one after the one before, or one after another."""

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def windows(bench: Bench) -> None:
    """40 bands of log-mel of ten seconds: CPU of ours ÷ of numpy and scipy, in turns."""
    for _ in bench.rounds("windows"):
        done = subprocess.run(
            [sys.executable, "-m", "bench.series_scenarios"],
            env={**os.environ, **ONE_THREAD},
            stdout=subprocess.PIPE,
            check=True,
        )
        measured = json.loads(done.stdout)
        if not measured:
            bench.figures.note("windows", "not run: scipy is missing (the group bench of pyproject.toml)")
            return
        for name, (mine_s, theirs_s) in measured.items():
            bench.figures.add(f"windows.{name}.cpu_ms", mine_s * 1e3)
            bench.figures.add(f"windows.{name}.ratio", mine_s / theirs_s)


SCENARIOS = {"windows": windows}


# ---- the process ----------------------------------------------------------------------------------------------------


def measure() -> dict[str, tuple[float, float]]:
    """CPU of ours and of theirs by windows, in seconds; empty without scipy. Raises RuntimeError: they differ."""
    try:
        from scipy.fft import rfft
        from scipy.signal import get_window
    except ImportError:
        return {}
    samples = np.random.default_rng(1).uniform(-1, 1, SECONDS * 16_000).astype(np.float32)
    measured = {}
    for name, hop in HOPS.items():
        steps = SeriesSteps(hop=hop, features="log-mel")
        spec = TensorSpec("x", "FP32", (DYNAMIC, 98, 40))
        reader = SeriesInput(spec, steps, ModelSpec((spec,), ()))
        taper, bands = get_window("hann", 400).astype(np.float32), mel_bands(steps)

        def theirs(hop: int = hop, taper: np.ndarray = taper, bands: np.ndarray = bands) -> np.ndarray:
            found = []
            for at in range(0, len(samples) - 15_999, hop):
                cut = np.lib.stride_tricks.sliding_window_view(samples[at : at + 16_000], 400)[::160]
                power = np.abs(rfft(cut * taper, 512)) ** 2
                found.append(np.log(np.maximum(power @ bands, 1e-10)))
            return np.stack(found)

        def ours(reader: SeriesInput = reader) -> np.ndarray:
            return np.asarray(reader.tensors("samples", samples[None])[0]["x"])

        if not np.allclose(ours(), theirs(), atol=1e-2):
            raise RuntimeError("the two pipelines make different features")
        measured[name] = _cpu_s(ours), _cpu_s(theirs)
    return measured


def _cpu_s(make: Callable[[], np.ndarray]) -> float:
    """CPU of one call, of this process."""
    began_ns = time.process_time_ns()
    for _ in range(TIMES):
        make()
    return (time.process_time_ns() - began_ns) / 1e9 / TIMES


if __name__ == "__main__":
    print(json.dumps(measure()))
