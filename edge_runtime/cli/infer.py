"""Run a model once on a running daemon and show the answer.

  edge-runtime infer digits --input image=scan.npy
  edge-runtime infer digits --random --timing
  echo '{"image": [[0, 0.5, …]]}' | edge-runtime infer digits --input -

Inputs: .npy; .json and @JSON (nested lists; they take the model's datatype); .bin (raw little-endian bytes); pictures
where Pillow is installed (scaled to the model's size, floats are pixels / 255).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from edge_runtime.cli.answers import answer_json, print_answer, save
from edge_runtime.cli.arguments import add_connection, positive
from edge_runtime.cli.connection import connected
from edge_runtime.cli.inputs import add_input_arguments, given, specs_of, tensors
from edge_runtime.cli.screen import Screen, ms_text
from edge_runtime.client.quantiles import quantile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `infer`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    parser.add_argument("--outputs", metavar="NAME,…", help="these outputs, in this order (default: all)")
    parser.add_argument("--output", metavar="DIR|FILE.npy", type=Path, help="save the outputs as .npy")
    parser.add_argument("--timeout-ms", metavar="MS", type=float, help="deadline of the request")
    parser.add_argument("--priority", metavar="N", type=int, default=0, choices=range(1, 10), help="1 (first) to 9")
    parser.add_argument("--timing", action="store_true", help="show where the time went")
    parser.add_argument("--repeat", metavar="N", type=positive, default=1, help="ask N times and show latencies")
    add_input_arguments(parser)
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Ask, show, save."""
    asked = given(arguments)
    options: dict[str, Any] = {
        "version": arguments.version,
        "outputs": arguments.outputs.split(",") if arguments.outputs else None,
        "timeout_ms": arguments.timeout_ms,
        "priority": arguments.priority,
        "timing": arguments.timing,
    }
    latencies_ms: list[float] = []
    with connected(arguments) as client:
        specs = specs_of(client.metadata(arguments.model, arguments.version))
        inputs = tensors(asked, specs, screen)
        for _ in range(arguments.repeat):
            began_s = time.perf_counter()
            result = client.infer(arguments.model, inputs, **options)
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)
    saved = save(result.outputs, arguments.output) if arguments.output is not None else []
    summary = {name: quantile(latencies_ms, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}
    if screen.wants_json:
        screen.json({**answer_json(result), "latency_ms": summary, "saved": [str(path) for path in saved]})
        return 0
    print_answer(result, screen)
    times = ", ".join(f"{name} {ms_text(value)} ms" for name, value in summary.items())
    screen.line(
        f"{arguments.repeat:,} times: {times}" if arguments.repeat > 1 else f"took {ms_text(summary['max'])} ms"
    )
    for path in saved:
        screen.line(f"saved {path}")
    return 0
