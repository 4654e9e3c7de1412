"""Measure a running daemon: requests per second and latencies, from a load generator in a process of its own.

Closed loop by default: --in-flight 1,16,64 keeps that many requests in flight, one measurement each. --rate R offers
Poisson arrivals instead, whether or not the daemon keeps up; latency then counts from the moment a request was due.
Three columns are the parts of the mean latency. "daemon ms": answered requests waited and ran in the daemon.
"client ms": this program sent a request later than due, or had not read its answer yet. "transport ms" (`way` in
--json): the rest, in sockets and the network. "client CPU" is this program's own use of a core.
Over ZeroMQ only: through a broker, the broker and this client would be measured (`infer --repeat N` shows latencies).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from edge_runtime.cli.arguments import add_connection, milliseconds, positive, positives, seconds
from edge_runtime.cli.connection import connected_over_zmq, curve_keys, wait_started
from edge_runtime.cli.inputs import (
    add_input_arguments,
    add_text_arguments,
    form_specs,
    input_options,
    specs_of,
    tensors,
    texts_of,
)
from edge_runtime.cli.screen import Screen, ms_text, rate_text
from edge_runtime.client.core import input_name, picture_input_name
from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.doors.zmq.client import Client
from edge_runtime.doors.zmq.load_generator import Measured, Plan, measure, quantile
from edge_runtime.tensors import Array

SENTENCE = "It rained all night, and by the morning the river had risen to the second step of the old stairs."
"""Sent to a model of texts where none is given."""

BUSY = 0.8
"""From this share of a core on, the load generator itself may limit a result."""

OWN_SHARE = 0.25
"""From this share of the 99th percentile on, a note beside the table names the generator's own backlog."""

TRANSPORT_MS = 5.0
"""From this mean on, a note names the transport: sockets of one machine take 0.1 ms, a local network 1."""

COLUMNS = (
    "load", "requests/s", "p50 ms", "p95 ms", "p99 ms", "max ms", "daemon ms", "transport ms", "client ms", "rows/run",
    "refused", "lost", "client CPU",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--in-flight", metavar="N,…", type=positives, default=[1, 16, 64], help="default 1,16,64")
    load.add_argument("--rate", metavar="R", type=seconds, help="open loop: Poisson arrivals, R requests a second")
    parser.add_argument("--seconds", metavar="S", type=seconds, default=5.0, help="for each measurement (default 5)")
    parser.add_argument("--warmup", metavar="S", type=float, default=0.5, help="not counted (default 0.5)")
    parser.add_argument("--timeout-ms", metavar="MS", type=milliseconds, help="deadline of each request")
    parser.add_argument("--priority", metavar="N", type=int, default=0, choices=range(1, 10), help="1 (first) to 9")
    add_text_arguments(parser)
    add_input_arguments(parser)
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure each load and print a row for it."""
    with connected_over_zmq(arguments, "bench") as client:
        wait_started(arguments)
        metadata = client.metadata(arguments.model, arguments.version)
        inputs = _inputs(arguments, metadata, screen)
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
    _print_backlogs(results, screen)
    if any(result["generator_busy"] >= BUSY for result in results):
        screen.note("The load generator used most of a core in a measurement; it may limit that result.")
    return 0


def _inputs(arguments: argparse.Namespace, metadata: Mapping[str, Any], screen: Screen) -> dict[str, Array]:
    """The inputs of every request: as given, a sentence for a model of texts, else made up. Raises UsageError."""
    options, name = input_options(arguments, fill="random"), input_name(metadata, "text")
    if name and not (arguments.text or arguments.pair or options.texts or arguments.random or arguments.zeros):
        arguments.text = [SENTENCE] * options.rows
    said = texts_of(arguments, metadata)
    if said is None:
        return tensors(options, specs_of(metadata), screen, picture_input_name(metadata))
    return said | tensors(
        options, [each for each in form_specs(metadata, next(iter(said))) if each.name not in said], screen
    )


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
    before = _counts(client.stats(), model)
    with screen.progress(f"bench {model}, {load}", plan.warmup_s + plan.seconds):
        measured = measure(plan, frames)
    runs, rows, answered, total_ms = (
        now - then for now, then in zip(_counts(client.stats(), model), before, strict=True)
    )
    return {
        "load": load,
        **_summary(plan, measured),
        "mean_ms": _parts_ms(measured, total_ms / answered if answered else None),
        "rows_per_run": round(rows / runs, 2) if runs else None,
    }


def _summary(plan: Plan, measured: Measured) -> dict[str, Any]:
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    found = {name: quantile(measured.latencies_s, q) for name, q in quantiles.items()}
    own = {name: quantile(measured.own_s, q) for name, q in quantiles.items()}
    return {
        "in_flight": plan.in_flight if plan.rate is None else None,
        "offered_per_s": plan.rate,
        "seconds": measured.seconds,
        "sent": measured.sent,
        "answered": measured.answered,
        "requests_per_s": round(measured.answered / measured.seconds, 1),
        "latency_ms": _in_ms(found),
        "client_ms": _in_ms(own),
        "refused": measured.refused,
        "lost": measured.lost,
        "generator_busy": measured.busy,
    }


def _in_ms(found: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value * 1e3, 4) for name, value in found.items()}


def _row(result: Mapping[str, Any]) -> list[str]:
    rows_per_run = result["rows_per_run"]
    return [
        str(result["load"]),
        rate_text(result["requests_per_s"]),
        *(ms_text(value) for value in result["latency_ms"].values()),
        *("-" if value is None else ms_text(value) for value in result["mean_ms"].values()),
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


def _parts_ms(measured: Measured, daemon_ms: float | None) -> dict[str, float | None]:
    """Return the parts of the mean latency, in the order of their columns; None where they are not known."""
    if not measured.latencies_s:
        return {"daemon": None, "way": None, "client": None}
    whole_ms, client_ms = (1e3 * sum(each) / len(each) for each in (measured.latencies_s, measured.own_s))
    transport_ms = None if daemon_ms is None else round(max(whole_ms - client_ms - daemon_ms, 0.0), 4)
    return {
        "daemon": None if daemon_ms is None else round(daemon_ms, 4), "way": transport_ms, "client": round(client_ms, 4)
    }  # fmt: skip


def _print_backlogs(results: list[dict[str, Any]], screen: Screen) -> None:
    for result in results:
        daemon, transport, client = result["mean_ms"].values()
        if transport is not None and transport > max(daemon, client, TRANSPORT_MS):
            screen.note(
                f"{result['load']}: {ms_text(transport)} ms of a latency (mean) lay between this client and the "
                "daemon's queue: it takes in less than is offered, or the machine or network between is slow"
            )
        own, whole = result["client_ms"]["p99"], result["latency_ms"]["p99"]
        if own is not None and own >= whole * OWN_SHARE:
            screen.note(
                f"{result['load']}: up to {ms_text(own)} ms (p99) of a latency is the client's own backlog, not the "
                "daemon's: it sent later than due, or had not read the answer yet. Offer less, or from several machines"
            )


def _counts(stats: Mapping[str, Any], model: str) -> tuple[float, float, float, float]:
    """Return a model's runs, rows, answers and their milliseconds together; zeros where the daemon reports none."""
    numbers = (stats.get("metrics") or {}).get("models", {}).get(model, {})
    answered = int(numbers.get("answered", 0))
    mean_ms = numbers.get("total_ms", {}).get("mean") or 0.0
    return int(numbers.get("runs", 0)), int(numbers.get("rows", 0)), answered, answered * mean_ms
