"""Show a running daemon: live and ready, each model's rates and latencies, queues, refusals, memory.

Rates are averages since the daemon's start; with --watch, of the last interval. With --ready the exit status is the
answer, for health checks of containers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_runtime import plugins
from edge_runtime.cli.arguments import add_connection, seconds
from edge_runtime.cli.connection import connected_early
from edge_runtime.cli.screen import Screen, duration_text, ms_text, rate_text, size_text

if TYPE_CHECKING:
    from edge_runtime.cli.verbs import Verb
    from edge_runtime.doors.door import DoorDeclaration

DEFAULT_INTERVAL_S = 2.0
"""Between two pictures of --watch: often enough to follow, seldom enough to cost nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    text = f"show it again every S seconds (default {DEFAULT_INTERVAL_S:g}) until Ctrl-C"
    parser.add_argument("--watch", metavar="S", nargs="?", type=seconds, const=DEFAULT_INTERVAL_S, help=text)
    parser.add_argument("--ready", action="store_true", help="exit with 1 unless the daemon is ready to answer")
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the status once, or with --watch repeatedly."""
    with connected_early(arguments) as client:
        before: Mapping[str, Any] | None = None
        while True:
            stats = client.stats()
            if screen.wants_json:
                screen.json({"endpoint": client.endpoint, **stats})
            else:
                if arguments.watch:
                    screen.clear()
                print_status(client.endpoint, stats, before, screen)
            screen.flush()
            if not arguments.watch:
                return 1 if arguments.ready and not stats.get("ready") else 0
            before = stats
            time.sleep(arguments.watch)


def print_status(endpoint: str, stats: Mapping[str, Any], before: Mapping[str, Any] | None, screen: Screen) -> None:
    """Print one picture of a daemon's stats, without the numbers that it does not report."""
    is_ready = stats.get("ready")
    state = screen.painted("ready", "green") if is_ready else screen.painted("live, not ready", "yellow")
    screen.line(f"{state}  {endpoint}")
    host = _mapping(stats, "host")
    temperatures = _mapping(host, "temperatures_celsius")
    screen.fields(
        {
            "version": str(stats.get("version", "")),
            "profile": str(stats.get("profile", "")),
            "up for": duration_text(stats.get("uptime_s")),
            **_fields_of("doors", stats),
            **_fields_of("verbs", stats),
            "memory": _memory(host),
            "cores busy": f"{host['cpu_cores']:.2f}" if isinstance(host.get("cpu_cores"), float) else "",
            "hottest": f"{max(temperatures.values()):.0f} °C" if temperatures else "",
            "sandbox": _left_open(_mapping(stats, "sandbox")),
        }
    )
    rows = [_row(entry, stats, before) for entry in _models(stats)]
    if rows:
        screen.line()
        screen.table(
            ("model", "version", "state", "requests/s", "p50 ms", "p95 ms", "p99 ms", "rows/run", "queue", "refused"),
            rows,
            right=("version", "requests/s", "p50 ms", "p95 ms", "p99 ms", "rows/run", "queue", "refused"),
        )
    _print_reasons(stats, screen)
    _print_hosts(stats, screen)
    _print_refusals(stats, screen)


def _fields_of(kind: str, stats: Mapping[str, Any]) -> dict[str, str]:
    """Return the words of doors, or of the capabilities behind the other verbs, on the daemon."""
    found: dict[str, str] = {}
    for name in plugins.names(kind):
        declared: DoorDeclaration | Verb = plugins.declared(kind, name)
        if declared.status_fields:
            found.update(plugins.named(declared.status_fields)(stats))
    return found


def _row(entry: Mapping[str, Any], stats: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    name = str(entry.get("name", ""))
    numbers = _mapping(stats, "metrics", "models", name)
    total = _mapping(numbers, "total_ms")
    mean = _mapping(numbers, "batch_rows").get("mean")
    return [
        name,
        str(entry.get("version", "")),
        str(entry.get("state", "")),
        rate_text(_rate(name, stats, before)),
        *(ms_text(total.get(quantile)) for quantile in ("p50", "p95", "p99")),
        "-" if mean is None else f"{mean:.1f}",
        str(numbers.get("queue_rows", "-")),
        str(sum(_mapping(numbers, "refused").values())),
    ]


def _rate(name: str, stats: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """Return answers per second since the last picture, else since the start."""
    answered = _mapping(stats, "metrics", "models", name).get("answered")
    uptime_s = stats.get("uptime_s")
    if answered is None or not uptime_s:
        return None
    past = before or {}
    elapsed_s = uptime_s - past.get("uptime_s", 0.0)
    since = answered - _mapping(past, "metrics", "models", name).get("answered", 0)
    return float(since / elapsed_s) if elapsed_s > 0 and since >= 0 else None


def _print_reasons(stats: Mapping[str, Any], screen: Screen) -> None:
    """Print why a version failed or has its engine built, why a source gives nothing, or a plug-in is not used."""
    reasons = {
        f"{entry.get('name', '')} {entry.get('version', '')}": str(entry["reason"])
        for entry in stats.get("models") or ()
        if entry.get("reason")
    }
    for entry in (each for door in plugins.entries() for each in _mapping(stats, door).get("sources") or ()):
        if entry.get("reason"):
            reasons[f"{entry.get('model', '')} from {entry.get('from', '')}"] = str(entry["reason"])
    for entry in stats.get("plugins") or ():
        if entry.get("reason"):
            what = " ".join(filter(None, (str(entry.get("distribution", "")), str(entry.get("name", "")))))
            reasons[f"plug-in {what}"] = str(entry["reason"])
    if reasons:
        screen.line()
        screen.heading("reasons")
        screen.fields(reasons)


def _print_hosts(stats: Mapping[str, Any], screen: Screen) -> None:
    """Print the processes in which models run, how often each was started again, and why."""
    lines = {}
    for entry in stats.get("models") or ():
        host = _mapping(entry, "host")
        if host:
            restarts, why = host.get("restarts"), host.get("last_end")
            parts = [f"process {host['pid']}" if host.get("pid") else "is started again"]
            parts += [size_text(host["memory_bytes"])] if host.get("memory_bytes") else []
            parts += [f"{restarts} restarts, the last: {why}"] if restarts or why else []
            lines[f"{entry.get('name', '')} {entry.get('version', '')}"] = ", ".join(parts)
    if lines:
        screen.line()
        screen.heading("hosts")
        screen.fields(lines)


def _print_refusals(stats: Mapping[str, Any], screen: Screen) -> None:
    lines = {
        name: ", ".join(f"{code} {count:,}" for code, count in sorted(_mapping(numbers, "refused").items()))
        for name, numbers in _mapping(stats, "metrics", "models").items()
    }
    counters = {name: f"{count:,}" for name, count in _mapping(stats, "metrics", "counters").items() if count}
    for title, shown in (("refused", lines), ("counted", counters)):
        if any(shown.values()):
            screen.line()
            screen.heading(title)
            screen.fields(shown)


def _models(stats: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the daemon's models, and those that only its metrics still have."""
    listed = list(stats.get("models") or ())
    names = {entry.get("name") for entry in listed}
    return listed + [{"name": name} for name in _mapping(stats, "metrics", "models") if name not in names]


def _left_open(sandbox: Mapping[str, Any]) -> str:
    """Return what is open to hosts that should not be, and why; "" where nothing is."""
    acts = sandbox.get("unguarded")
    return f"open to hosts: {', '.join(map(str, acts))} ({sandbox.get('reason', '')})" if acts else ""


def _memory(host: Mapping[str, Any]) -> str:
    parts = {"pss": host.get("pss_bytes"), "rss": host.get("rss_bytes"), "free": host.get("memory_available_bytes")}
    return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts.items() if nbytes is not None)


def _mapping(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a nested mapping; empty where a key is missing, as an older or newer daemon may have it."""
    for key in keys:
        found = value.get(key)
        if not isinstance(found, dict):
            return {}
        value = found
    return value
