"""`python -m bench`: measure, print the table, and write the JSON file."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import zmq

from bench import (
    camera_scenarios,
    drop_scenarios,
    fairness_scenarios,
    frigate_scenarios,
    host_scenarios,
    language_scenarios,
    litert_scenarios,
    mqtt_scenarios,
    oip_scenarios,
    picture_scenarios,
    pipeline_scenarios,
    quiet_scenarios,
    restart_scenarios,
    scenarios,
    seen_scenarios,
    sequence_scenarios,
    series_scenarios,
    swap_scenarios,
    text_scenarios,
    torch_scenarios,
    track_scenarios,
    tree_scenarios,
    triton_scenarios,
    tune_scenarios,
    update_scenarios,
)
from bench.bars import MAX_GENERATOR_SHARE, Figures, rows, table, write_json
from bench.load import Generator, find_generator
from bench.scenarios import HERE, Bench, say
from bench.servers import BenchError, Children, free_folder
from edge_runtime.tuning.other_work import OtherWork

UPDATES = {
    **update_scenarios.SCENARIOS,
    **swap_scenarios.SCENARIOS,
    **quiet_scenarios.SCENARIOS,
    **restart_scenarios.SCENARIOS,
}
SCENARIOS = {
    **scenarios.SCENARIOS,
    **camera_scenarios.SCENARIOS,
    **fairness_scenarios.SCENARIOS,
    **host_scenarios.SCENARIOS,
    **language_scenarios.SCENARIOS,
    **litert_scenarios.SCENARIOS,
    **mqtt_scenarios.SCENARIOS,
    **oip_scenarios.SCENARIOS,
    **picture_scenarios.SCENARIOS,
    **pipeline_scenarios.SCENARIOS,
    **drop_scenarios.SCENARIOS,
    **frigate_scenarios.SCENARIOS,
    **UPDATES,
    **torch_scenarios.SCENARIOS,
    **track_scenarios.SCENARIOS,
    **seen_scenarios.SCENARIOS,
    **series_scenarios.SCENARIOS,
    **text_scenarios.SCENARIOS,
    **sequence_scenarios.SCENARIOS,
    **tune_scenarios.SCENARIOS,
    **tree_scenarios.SCENARIOS,
    **triton_scenarios.SCENARIOS,
}
QUICK = (*scenarios.QUICK, *mqtt_scenarios.SCENARIOS, *UPDATES)

BUSY_SHARE = 0.05
"""Other work on the machine above this share of all cores makes a scenario's figures doubtful."""


def main(arguments: list[str]) -> int:
    """Measure what was asked for; 0 when every scenario could be measured (whether or not its bars are met)."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures = Figures()
    started, failed = time.monotonic(), []
    generator = find_generator(options.load_generator)
    say(f"load generator: {generator.kind}")
    for name in options.only:
        if name in mqtt_scenarios.SCENARIOS and (missing := mqtt_scenarios.missing()):
            figures.note(name, missing)
            say(f"{name} {missing}")
            continue
        watch = OtherWork()
        with Children(free_folder()) as children:
            try:
                SCENARIOS[name](_bench(options, children, generator, figures))
            except (BenchError, OSError, subprocess.SubprocessError) as error:
                failed.append(name)
                figures.note(name, f"could not be measured: {error}")
                say(f"{name} failed: {error}")
        share = watch.share()
        figures.add(f"others.{name}", share)
        if share > BUSY_SHARE:
            figures.note(name, f"other work took {share:.0%} of the machine meanwhile: doubtful")
    about = _about(options, generator.kind, time.monotonic() - started)
    print(_heading(about))
    print(table(figures))
    for figure in ("generator.share", "images.generator.share"):
        if any(share > MAX_GENERATOR_SHARE for share in figures.values.get(figure, ())):
            print(f"The generator ran above {MAX_GENERATOR_SHARE:.0%} of its maximum ({figure}): it may be the limit.")
    met = [row.is_met for row in rows(figures) if row.is_met is not None]
    print(f"{sum(met)} of {len(met)} bars met" + (f"; not measured: {', '.join(failed)}" if failed else ""))
    path = _result_path(options, about)
    write_json(path, figures, about)
    print(f"written to {path}")
    return 1 if failed else 0


# ---- private --------------------------------------------------------------------------------------------------------


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of two minutes; its figures mean little")
    parser.add_argument(
        "--only", metavar="NAME[,NAME]", help=f"of {', '.join(SCENARIOS)}; or the first word of several, as mqtt"
    )
    parser.add_argument("--before", type=Path, help="another checkout, whose daemon `before` is held against")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (3)")
    parser.add_argument("--seconds", type=float, help="of each closed-loop measurement (3)")
    parser.add_argument(
        "--bare-loop",
        type=Path,
        default=HERE / "bare.py",
        help="another yardstick: FILE ENDPOINT MODEL SHAPE [MAX_ROWS]",
    )
    parser.add_argument("--load-generator", type=Path, help="another generator with load.c's command line and output")
    parser.add_argument("--save", action="store_true", help="write to bench/results, to be kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the JSON file instead")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else (QUICK if options.quick else SCENARIOS)
    names = [each for name in names for each in _scenarios_of(name)]
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    for file in (options.bare_loop, options.load_generator):
        if file is not None and not file.is_file():
            parser.error(f"{file} is not a file")
    options.only = names
    return options


def _scenarios_of(name: str) -> list[str]:
    """A scenario, or those that a first word has in common: `mqtt`, `poisson`."""
    if name in SCENARIOS:
        return [name]
    return [each for each in SCENARIOS if each.startswith(f"{name}_")] or [name]


def _bench(options: argparse.Namespace, children: Children, generator: Generator, figures: Figures) -> Bench:
    return Bench(
        children,
        generator,
        figures,
        bare_loop=options.bare_loop.resolve(),
        round_count=options.rounds or (1 if options.quick else 3),
        seconds=options.seconds or (0.5 if options.quick else 3.0),
        overload_seconds=2.0 if options.quick else 10.0,
        reload_count=50 if options.quick else 500,
        is_quick=options.quick,
        before=options.before.resolve() if options.before else None,
    )


def _about(options: argparse.Namespace, generator: str, took_s: float) -> dict[str, Any]:
    versions = {}
    for name in (
        "edge-runtime",
        "numpy",
        "pyzmq",
        "msgpack",
        "onnxruntime",
        "openvino",
        "openvino-genai",
        "ai-edge-litert",
        "paho-mqtt",
        "httptools",
        "grpcio",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date_utc": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "libzmq": zmq.zmq_version(),
            "versions": versions,
        },
        "options": {
            "quick": options.quick,
            "only": options.only,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "bare_loop": options.bare_loop.name,
        },
        "generator": generator,
        "took_s": round(took_s, 1),
    }


def _heading(about: dict[str, Any]) -> str:
    machine = about["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = "\nA quick run: durations too short for figures to mean much." if about["options"]["quick"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, libzmq {machine['libzmq']}\n{packages}\n"
        f"load generator: {about['generator']}; {about['took_s']:.0f} s{quick}\n"
    )


def _result_path(options: argparse.Namespace, about: dict[str, Any]) -> Path:
    if options.json:
        return Path(options.json)
    cpu = re.sub(r"[^a-z0-9]+", "-", about["machine"]["cpu"].lower()).strip("-")
    name = f"{about['date_utc'][:10]}-{cpu}.json"
    return (
        HERE / "results" / name
        if options.save
        else Path(os.environ.get("TMPDIR", "/tmp")) / f"edge-runtime-bench-{name}"
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
