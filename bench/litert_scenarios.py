"""LiteRT: MobileNetV2 in float and in int8, served beside the same library in process."""

from __future__ import annotations

from bench import litert_makers
from bench.load import write_shared_request
from bench.raw import Layout
from bench.scenarios import Bench

LAYOUTS: tuple[Layout, ...] = ("all", "callers")
"""Without threads of its own the library has no third: `one` is a caller of `callers`, and it never spins."""

SETTINGS = 'backend = "litert"\n'


def litert(bench: Bench) -> None:
    """16 requests in flight, in frames and in shared memory, against raw LiteRT in its better layout."""
    figures = bench.figures
    for int8 in (False, True):
        model = litert_makers.mobilenetv2(int8=int8)
        key = f"litert.{'int8' if int8 else 'f32'}"
        request, daemon = bench.request(model), bench.daemon(model, settings=SETTINGS)
        placed = write_shared_request(bench.children.folder / f"{model.name}-shared.req", model)
        daemon.start_and_settle(request)
        for _ in bench.rounds(key):
            best = max(bench.raw(model, layout, backend="litert").rows_per_s for layout in LAYOUTS)
            rate = bench.rate(daemon.endpoint, request, 16).rate
            figures.add(f"{key}.raw", best)
            figures.add(f"{key}.rate", rate)
            figures.add(f"{key}.ratio", rate / best)
            if bench.generator.shares_memory:
                figures.add(f"{key}.shared_ratio", bench.rate(daemon.endpoint, placed, 16).rate / best)
        daemon.stop()


SCENARIOS = {"litert": litert}
