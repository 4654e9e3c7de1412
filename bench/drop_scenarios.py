"""How long it takes until every kind of file that is dropped in at once is served or named, beside a model in use."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping

import numpy as np

from bench.scenarios import Bench
from bench.servers import START_LIMIT_S, BenchError
from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.models import onnx_models
from tests.models.dropped_files import NEEDS_TORCH, STEADY, check, drop_in, write_dropped
from tests.models.mutated_files import REAL

ASK_AGAIN_S = 0.02


def drop_in_all(bench: Bench) -> None:
    """Every kind but PyTorch's, whose import alone takes seconds; run it where the converters' libraries are, too."""
    figures, kinds = bench.figures, tuple(kind for kind in REAL if kind not in NEEDS_TORCH)
    for number in bench.rounds("drop_in"):
        files = bench.children.folder / f"files-{number}"
        wanted = write_dropped(files, kinds)
        daemon = bench.daemon()
        (daemon.models / STEADY / "1").mkdir(parents=True)
        onnx_models.mlp(daemon.models / STEADY / "1")
        daemon.start()
        _wait_ready(daemon.endpoint)
        dropped = drop_in(daemon.endpoint, daemon.models, files, wanted)
        daemon.stop()
        shutil.rmtree(files)
        try:
            check(dropped, wanted)
        except AssertionError as error:
            raise BenchError(f"drop_in: {error}") from None
        served = [name for name, said in wanted.items() if not said]
        figures.add("drop.took_s", dropped.took_s)
        figures.add("drop.served", len(served))
        figures.add("drop.named", len(wanted) - len(served))
        figures.add("drop.failed", len(dropped.failed))
        figures.add("drop.longest_ms", dropped.longest_s * 1e3)


def _wait_ready(endpoint: str) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    with Client(endpoint) as client:
        while time.monotonic() < until_s:
            with contextlib.suppress(ConnectionError, TimeoutError, EdgeRuntimeError):
                client.infer(STEADY, {"x": np.zeros((1, 16), np.float32)})
                return
            time.sleep(ASK_AGAIN_S)
    raise BenchError(f"{endpoint}: {STEADY} was not ready within {START_LIMIT_S:.0f} s")


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"drop_in": drop_in_all}
