"""What `edge-runtime tune` chooses, beside what serves without it: images with random weights, and the demo's digits.

Each ratio is of daemons that run side by side and are asked by turns, since the machine is seldom idle. Needs the
converters (`convert-onnx`; with `convert-openvino` NNCF's int8 is tried too).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import makers
from bench.makers import BenchModel
from bench.raw import Layout
from bench.scenarios import Bench, say
from bench.servers import REPOSITORY, BenchError, Daemon
from demo.digits import load_held_out
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import effective_profile
from edge_runtime.profiles.detect import detect
from edge_runtime.tuning.candidates import Offer, thread_layouts, ways
from edge_runtime.tuning.race import TIE

SLO_MS = 500
"""As the deadline of the other scenarios with images: wide, so that a rate is near capacity on a busy machine too."""

TUNE_S = 300
"""What a tune of one model may take: all engines and most layouts are seen by then on two cores."""

F32_LAYOUTS = {
    "measured": "",
    "callers": "threads = 1\n",
    "all": "threads = {cores}\ninstances = 1\n",
}
"""ONNX Runtime in f32, as it is served without tuning and by hand."""

CHOICE_SETTINGS = "batch = false\n"
"""Without batch limits the ways are as many as can be served side by side: four or five, in three layouts."""

OTHER_SHARE, OTHER_BURST_S = 0.3, 1.0
"""Of each core, in bursts that spoil some slices of a race wholly and others not at all."""

TRUTH_S, TRUTH_ROUNDS = 5.0, 6
"""Of each half of the truth. All ways of a round meet the same bursts, and are compared within rounds: bursts of 1 s
make one slice differ from the next by a third."""

CONTENDER = 0.8
"""Ways below this share of the best sit out after the first round of the truth."""

CALIBRATED_S = 15.0
"""All daemons measure their layouts after their start, one beside the other."""

Way = tuple[str, str, int | None, int | None]
"""Backend, precision, threads and instances, as a tune tells its choice."""

RAW_LAYOUTS: tuple[Layout, ...] = ("all", "all-quiet", "callers")
SMALL_DROP = "0.5%"
DIGITS = REPOSITORY / "demo" / "models" / "digits" / "1" / "model.onnx"


def tune_images(bench: Bench) -> None:
    """ResNet-18 and MobileNetV2: the chosen way ÷ ONNX Runtime f32 in its best layout, and ÷ the raw library."""
    for model in (makers.resnet18(), makers.mobilenetv2()):
        # Random weights score nearly alike, so that agreement says little: any may be given up, and it is reported.
        found = _tuned(bench, model, "--accuracy-drop", "100%")
        _agreement(bench, model, found)
        _beside_f32(bench, model, found)
        _beside_raw(bench, model, found)


def tune_small(bench: Bench) -> None:
    """A small input and 5 ms a run: the chosen int8 model served ÷ the raw library."""
    model = makers.small5ms()
    found = _tuned(bench, model, "--accuracy-drop", "100%")
    _agreement(bench, model, found)
    _beside_raw(bench, model, found)


def tune_digits(bench: Bench) -> None:
    """A trained network on held-out images: what is given up, and with nothing to give up, what is chosen."""
    model = replace(makers.mlp(), name="digits", path=DIGITS, row_shape=(64,), output_elements=10)
    folder, held_out = bench.children.folder, load_held_out()
    np.save(folder / "images.npy", held_out.images)
    np.save(folder / "labels.npy", held_out.labels)
    data = ("--data", str(folder / "images.npy"), "--labels", str(folder / "labels.npy"))
    found = _tuned(bench, model, "--accuracy-drop", SMALL_DROP, *data)
    for row in found["rows"]:
        if row["accuracy"] is not None and row["precision"] == "int8":
            bench.figures.add("tune.digits.int8_drop", row["accuracy"]["drop"])
    bench.figures.add("tune.digits.drop", found["rows"][0]["accuracy"]["drop"])
    exact = _tuned(bench, model, "--accuracy-drop", "0", *data)
    bench.figures.add("tune.digits.exact_is_f32", exact["rows"][0]["runs_in"] == "f32")
    bench.figures.add("tune.digits.exact_gain", exact["gain"] or 0.0)


def tune_choice(bench: Bench) -> None:
    """Whether a tune finds the truly best way beside 30 % of other work; a try a round, in its default time.

    The truth: all ways served side by side beside the same work and asked by turns, half before the tries, half after.
    """
    model = makers.mobilenetv2()
    served = bench.children.folder / bench.children.new_name("choice") / model.name
    (served / "1").mkdir(parents=True)
    shutil.copyfile(model.path, served / "1" / "model.onnx")
    shutil.copyfile(makers.int8_mobilenetv2().path, served / "1" / "model.int8.onnx")
    (served / "model.toml").write_text(CHOICE_SETTINGS)
    every = _ways()
    before = _rates_by_turns(bench, model, served, every, seed=1)
    contenders = [way for way in every if len(before[way]) > 1]
    with _other_work(bench):
        tries = [_choice(bench, served) for _ in bench.rounds("tune_choice")]
    after = _rates_by_turns(bench, model, served, contenders, seed=101)
    ratios, errors = _shares({way: before[way] + after.get(way, []) for way in every})
    bench.figures.add("tune.choice.ways", len(every))
    for way, took_s in tries:
        share = 0.0 if way is None else ratios[way]
        bench.figures.add("tune.choice.share", share)
        bench.figures.add("tune.choice.took_s", took_s)
        told = "nothing was written" if way is None else f"{_way_text(way)}, {share:.3f} of the best"
        bench.figures.note("tune_choice", f"{told}, after {took_s:.0f} s")
    shares = bench.figures.values["tune.choice.share"]
    bench.figures.add("tune.choice.found", sum(each >= 1 - TIE for each in shares) / len(shares))
    bench.figures.add("tune.choice.least", min((each for each in shares if each), default=1.0))
    ranks = sorted(ratios, key=lambda way: -ratios[way])
    told = "; ".join(f"{_way_text(way)} {ratios[way]:.3f} ± {errors[way]:.3f}" for way in ranks)
    bench.figures.note("tune_choice", f"of the best, with the standard error: {told}")


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "tune_choice": tune_choice,
    "tune_images": tune_images,
    "tune_small": tune_small,
    "tune_digits": tune_digits,
}


# ---- private --------------------------------------------------------------------------------------------------------


def _ways() -> list[Way]:
    """Every way that a tune of an ONNX model with an int8 file may choose on this machine."""
    config, facts = Config(), detect()
    profile = effective_profile(config, facts)
    offers = {name: Offer(True, frozenset(("int8",))) for name in ("onnxruntime", "openvino")}
    found = ways(profile.backends, offers, facts)
    cores = profile.limits.cores
    return [
        (way.backend, way.precision or "f32", layout.threads, layout.instances)
        for way in found
        for layout in thread_layouts(cores)
    ]


def _way_text(way: Way) -> str:
    backend, precision, threads, instances = way
    return f"{backend} {precision} " + (f"{threads} x {instances}" if threads else "measured layout")


@contextmanager
def _other_work(bench: Bench, seed: int = 0) -> Iterator[None]:
    script = str(REPOSITORY / "bench" / "other_load.py")
    child = bench.children.start([sys.executable, script, str(OTHER_SHARE), str(OTHER_BURST_S), str(seed)], "load")
    try:
        yield
    finally:
        bench.children.stop(child)


def _rates_by_turns(
    bench: Bench, model: BenchModel, served: Path, ways: Sequence[Way], seed: int
) -> dict[Way, list[float]]:
    """Serve ways side by side and ask them by turns: the rate of each in each round, one rate where it sat out.

    seed: of the first round's other work; each round has its own.
    """
    request, daemons = bench.request(model), {}
    for way in ways:
        backend, precision, threads, instances = way
        daemon = bench.daemon(model)
        shutil.rmtree(daemon.models)
        shutil.copytree(served, daemon.models / model.name)
        layout = f"threads = {threads}\ninstances = {instances}\n" if threads else ""
        said = f'backend = "{backend}"\nprecision = "{precision}"\n{layout}{CHOICE_SETTINGS}'
        (daemon.models / model.name / "model.toml").write_text(said)
        daemon.start()
        daemon.wait_for_answer(request)
        daemons[way] = daemon
    say(f"{len(daemons)} ways are served side by side")
    time.sleep(0 if bench.is_quick else CALIBRATED_S)
    seconds, rounds = (0.5, 2) if bench.is_quick else (TRUTH_S, TRUTH_ROUNDS)
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        best = max((found[0] for found in rates.values() if found), default=0.0)
        running = [way for way, found in rates.items() if not found or found[0] >= CONTENDER * best]
        for way in running[:: -1 if number % 2 else 1]:
            with _other_work(bench, seed + number):
                load = bench.generator.closed(daemons[way].endpoint, request, 16, seconds, warm_s=0.3)
            rates[way].append(load.rate)
    for daemon in daemons.values():
        daemon.stop()
    return rates


def _shares(rates: Mapping[Way, Sequence[float]]) -> tuple[dict[Way, float], dict[Way, float]]:
    """Each way's rate ÷ the best way's: the geometric mean over the rounds that both ran, and its standard error."""
    longest = max(map(len, rates.values()))
    best = max((way for way in rates if len(rates[way]) == longest), key=lambda way: math.prod(rates[way]))
    ratios, errors = {}, {}
    for way, found in rates.items():
        logs = [math.log(ours / theirs) for ours, theirs in zip(found, rates[best], strict=False)]
        ratios[way] = math.exp(statistics.fmean(logs))
        errors[way] = statistics.pstdev(logs) / math.sqrt(len(logs))
    return ratios, errors


def _choice(bench: Bench, served: Path) -> tuple[Way | None, float]:
    """Tune once, anew; the way that it wrote, None where it wrote none, and the seconds that it took."""
    home = bench.children.folder / bench.children.new_name("try")
    shutil.copytree(served, home / "models" / served.name)
    places = ("--models", str(home / "models"), "--state", str(home / "state"))
    command = [sys.executable, "-m", "edge_runtime", "tune", served.name, "--slo", f"p99={SLO_MS}ms", *places]
    # In full it takes the default time.
    words = ("--accuracy-drop", "100%", "--force", "--json", *(("--time", "20s") if bench.is_quick else ()))
    began_s = time.monotonic()
    found = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=1200, check=False, cwd=REPOSITORY
    )
    took_s = time.monotonic() - began_s
    try:
        said = json.loads(found.stdout)
    except ValueError:
        raise BenchError(f"tune {served.name} failed: {found.stderr.strip()[-500:]}") from None
    if "error" in said:
        raise BenchError(f"tune {served.name} failed: {said['error']['message']}")
    choice = said["choice"]
    if not said["written"] or choice is None:
        return None, took_s
    return (choice["backend"], choice["precision"] or "f32", choice["threads"], choice["instances"]), took_s


def _tuned(bench: Bench, model: BenchModel, *words: str) -> dict[str, Any]:
    """Tune a model; what it found, with the folder of models that it wrote into as `models`."""
    home = bench.children.folder / bench.children.new_name("tune")
    version = home / "models" / model.name / "1"
    version.mkdir(parents=True)
    shutil.copyfile(model.path, version / "model.onnx")
    seconds = 30 if bench.is_quick else TUNE_S
    places = ("--models", str(home / "models"), "--state", str(bench.children.folder / "tune-state"))
    command = [sys.executable, "-m", "edge_runtime", "tune", model.name, "--slo", f"p99={SLO_MS}ms", *places]
    say(f"tune {model.name} {' '.join(words[:2])}, at most {seconds} s")
    found = subprocess.run(
        [*command, "--time", f"{seconds}s", "--force", "--write-anyway", "--json", *words],
        capture_output=True, text=True, timeout=seconds * 2 + 300, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    if found.returncode:
        raise BenchError(f"tune {model.name} failed: {found.stderr.strip()[-500:]}")
    said: dict[str, Any] = json.loads(found.stdout)
    said["models"] = home / "models"
    choice = said["choice"]
    for note in said["notes"]:
        bench.figures.note(f"tune.{model.name}", note)
    layout = ", ".join(f"{key} {choice[key]}" for key in ("threads", "instances", "max_batch_rows") if choice[key])
    bench.figures.note(
        f"tune.{model.name}",
        f"{' '.join(words[:2])}: {choice['backend']} {choice['precision'] or 'f32'}, {layout or 'measured layout'}",
    )
    return said


def _agreement(bench: Bench, model: BenchModel, found: Mapping[str, Any]) -> None:
    accuracy = found["rows"][0]["accuracy"]
    bench.figures.add(f"tune.{model.name}.agreement", accuracy["agreement"])
    bench.figures.add(f"tune.{model.name}.distinct", accuracy["distinct"])
    bench.figures.add(f"tune.{model.name}.spread_error", accuracy["spread_error"] or 0.0)
    bench.figures.add(f"tune.{model.name}.max_error", accuracy["max_error"])


def _chosen_daemon(bench: Bench, model: BenchModel, found: Mapping[str, Any]) -> Daemon:
    daemon = bench.daemon(model)
    shutil.rmtree(daemon.models)
    shutil.copytree(found["models"], daemon.models)
    return daemon


def _beside_f32(bench: Bench, model: BenchModel, found: Mapping[str, Any]) -> None:
    request, cores = bench.request(model), len(os.sched_getaffinity(0))
    daemons = {"chosen": _chosen_daemon(bench, model, found)}
    for name, settings in F32_LAYOUTS.items():
        text = 'backend = "onnxruntime"\nprecision = "f32"\n' + settings.format(cores=cores)
        daemons[name] = bench.daemon(model, settings=text)
    for daemon in daemons.values():
        daemon.start_and_settle(request)
    for number in bench.rounds(f"tune {model.name}"):
        order = list(daemons)[:: -1 if number % 2 else 1]
        rates = {name: bench.rate(daemons[name].endpoint, request, 16).rate for name in order}
        for name, rate in rates.items():
            bench.figures.add(f"tune.{model.name}.{name}.rate", rate)
        best = max(rate for name, rate in rates.items() if name != "chosen")
        bench.figures.add(f"tune.{model.name}.ratio", rates["chosen"] / best)
    for daemon in daemons.values():
        daemon.stop()


def _beside_raw(bench: Bench, model: BenchModel, found: Mapping[str, Any]) -> None:
    """The chosen artifact in the library that was chosen, in process; its best layout."""
    choice, request = found["choice"], bench.request(model)
    artifact = _artifact(found["models"] / model.name / "1", choice)
    raw = replace(model, path=artifact)
    # OpenVINO takes int8 from the model; what is left of it runs in what is asked for here.
    precision = choice["precision"] if choice["precision"] == "bf16" else "f32"
    words = {"backend": choice["backend"], "precision": precision}
    daemon = _chosen_daemon(bench, model, found)
    daemon.start_and_settle(request)
    for number in bench.rounds(f"tune {model.name}, raw"):
        served = [] if number % 2 else [bench.rate(daemon.endpoint, request, 16).rate]
        best = max(bench.raw(raw, layout, **words).rows_per_s for layout in RAW_LAYOUTS)
        rate = served[0] if served else bench.rate(daemon.endpoint, request, 16).rate
        bench.figures.add(f"tune.{model.name}.raw.rate", best)
        bench.figures.add(f"tune.{model.name}.served_ratio", rate / best)
    daemon.stop()


def _artifact(version: Path, choice: Mapping[str, Any]) -> Path:
    if choice["precision"] != "int8":
        return version / "model.onnx"
    names = ("model.int8.xml", "model.int8.onnx") if choice["backend"] == "openvino" else ("model.int8.onnx",)
    return next(version / name for name in names if (version / name).is_file())
