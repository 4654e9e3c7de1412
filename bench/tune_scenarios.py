"""What `edge-runtime tune` chooses, beside what serves without it: images with random weights, and the demo's digits.

Each ratio is of daemons that run side by side and are asked by turns, since the machine is seldom idle. Needs the
converters (`convert-onnx`; with `convert-openvino` NNCF's int8 is tried too).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
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


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "tune_images": tune_images,
    "tune_small": tune_small,
    "tune_digits": tune_digits,
}


# ---- private --------------------------------------------------------------------------------------------------------


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
        [*command, "--time", f"{seconds}s", "--force", "--json", *words],
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
