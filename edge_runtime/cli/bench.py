"""Measure a running daemon: requests per second and latencies, from a load generator in a process of its own.

Closed loop by default: --in-flight 1,16,64 keeps that many requests in flight, one measurement each. --rate R offers
Poisson arrivals instead, whether or not the daemon keeps up; latency then counts from the moment a request was due.
Over ZeroMQ only: through a broker, the broker and this client would be measured (`infer --repeat N` shows latencies).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edge_runtime.cli.arguments import add_connection, positive, positives, seconds
from edge_runtime.cli.connection import connected_over_zmq, curve_keys
from edge_runtime.cli.inputs import add_input_arguments, given, specs_of, tensors
from edge_runtime.cli.pictures import declared_steps_of
from edge_runtime.cli.screen import Screen, ms_text, rate_text
from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.client.load_generator import Measured, Plan, measure, quantile
from edge_runtime.client.zmq_client import Client

BUSY = 0.8
"""From here the generator itself may limit a result."""

COLUMNS = ("load", "requests/s", "p50 ms", "p95 ms", "p99 ms", "max ms", "rows/run", "refused", "lost", "generator")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--in-flight", metavar="N,…", type=positives, default=[1, 16, 64], help="default 1,16,64")
    load.add_argument("--rate", metavar="R", type=seconds, help="open loop: Poisson arrivals, R requests a second")
    parser.add_argument("--seconds", metavar="S", type=seconds, default=5.0, help="for each measurement (default 5)")
    parser.add_argument("--warmup", metavar="S", type=float, default=0.5, help="not counted (default 0.5)")
    parser.add_argument("--timeout-ms", metavar="MS", type=float, help="deadline of each request")
    parser.add_argument("--priority", metavar="N", type=int, default=0, choices=range(1, 10), help="1 (first) to 9")
    add_input_arguments(parser)
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure each load and print a row for it."""
    with connected_over_zmq(arguments, "bench") as client:
        metadata = client.metadata(arguments.model, arguments.version)
        inputs = tensors(given(arguments, fill="random"), specs_of(metadata), screen, declared_steps_of(metadata))
        client.infer(arguments.model, inputs, version=arguments.version)  # raises the model's refusal before the load
        options = Options(arguments.version, None, arguments.timeout_ms, arguments.priority, False)
        header, data = RequestEncoder().encode(arguments.model, inputs, options)
        frames = [header, *(bytes(frame) for frame in data)]
        results = [_measured(plan, frames, client, arguments.model, screen) for plan in _plans(arguments, client)]
    if screen.wants_json:
        screen.json({"model": arguments.model, "endpoint": client.endpoint, "rows": arguments.rows, "runs": results})
        return 0
    screen.table(COLUMNS, [_row(result) for result in results], right=COLUMNS[1:])
    _print_refusals(results, screen)
    if any(result["generator_busy"] >= BUSY for result in results):
        screen.note("The load generator used most of a core in a measurement; it may limit that result.")
    return 0


def _plans(arguments: argparse.Namespace, client: Client) -> list[Plan]:
    keys = curve_keys(arguments)
    plan: dict[str, Any] = {
        "endpoint": client.endpoint,
        "seconds": arguments.seconds,
        "warmup_s": arguments.warmup,
        "timeout_s": (arguments.timeout_ms or 30_000.0) / 1e3,
        "seed": arguments.seed,
        "curve": None if keys is None else asdict(keys),
    }
    if arguments.rate is not None:
        return [Plan(rate=arguments.rate, **plan)]
    return [Plan(in_flight=count, **plan) for count in arguments.in_flight]


def _measured(plan: Plan, frames: list[bytes], client: Client, model: str, screen: Screen) -> dict[str, Any]:
    load = f"{plan.in_flight} in flight" if plan.rate is None else f"{plan.rate:g}/s offered"
    before = _runs_and_rows(client.stats(), model)
    with screen.progress(f"bench {model}, {load}", plan.warmup_s + plan.seconds):
        measured = measure(plan, frames)
    after = _runs_and_rows(client.stats(), model)
    runs, rows = after[0] - before[0], after[1] - before[1]
    return {"load": load, **_summary(plan, measured), "rows_per_run": round(rows / runs, 2) if runs else None}


def _summary(plan: Plan, measured: Measured) -> dict[str, Any]:
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    found = {name: quantile(measured.latencies_s, q) for name, q in quantiles.items()}
    return {
        "in_flight": plan.in_flight if plan.rate is None else None,
        "offered_per_s": plan.rate,
        "seconds": measured.seconds,
        "sent": measured.sent,
        "answered": measured.answered,
        "requests_per_s": round(measured.answered / measured.seconds, 1),
        "latency_ms": {name: None if value is None else round(value * 1e3, 4) for name, value in found.items()},
        "refused": measured.refused,
        "lost": measured.lost,
        "generator_busy": measured.busy,
    }


def _row(result: Mapping[str, Any]) -> list[str]:
    rows_per_run = result["rows_per_run"]
    return [
        str(result["load"]),
        rate_text(result["requests_per_s"]),
        *(ms_text(value) for value in result["latency_ms"].values()),
        "-" if rows_per_run is None else f"{rows_per_run:.1f}",
        f"{sum(result['refused'].values()):,}",
        f"{result['lost']:,}",
        f"{result['generator_busy']:.0%}",
    ]


def _print_refusals(results: list[dict[str, Any]], screen: Screen) -> None:
    for result in results:
        if result["refused"]:
            codes = ", ".join(f"{code} {count:,}" for code, count in sorted(result["refused"].items()))
            screen.line(f"refused at {result['load']}: {codes}")


def _runs_and_rows(stats: Mapping[str, Any], model: str) -> tuple[int, int]:
    """Return a model's runs and rows so far; zeros where the daemon does not report them."""
    numbers = (stats.get("metrics") or {}).get("models", {}).get(model, {})
    return int(numbers.get("runs", 0)), int(numbers.get("rows", 0))
