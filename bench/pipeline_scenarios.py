"""Pipelines: what a chain of steps costs beside its steps alone, what a hop costs, and what overload and reloads do.

Python steps and models are timed by themselves: their clock (CLOCK_MONOTONIC) is that of every process of the machine.
"""

from __future__ import annotations

import io
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench import makers
from bench.load import Load
from bench.makers import BenchModel, Graph
from bench.scenarios import IMAGE_DEADLINE_MS, Bench
from bench.servers import ControlConnection, Daemon
from edge_runtime import Client
from tests.models import python_models

TINY_COLUMNS = 16
INLINE = 'mode = "inline"\nisolation = "never"\n'
"""As tiny models are served by themselves on a quiet machine."""

HOP_COLUMNS = 150_000
"""600 KB of FP32."""

WORK_SIDE, WORK_WIDTH, WORK_DEPTH = 14, 64, 8
"""Of each step under overload: some 2 to 3 ms of convolutions on one core, so batching gains little."""

CHAIN = """
[[step]]
name = "a"
model = "a"
inputs = {x = "input.x"}
[[step]]
name = "b"
model = "b"
inputs = {x = "a.y"}
[[step]]
name = "c"
model = "c"
inputs = {x = "b.y"}
[output]
y = "c.y"
"""

HOP = """
[[step]]
name = "a"
model = "a"
inputs = {x = "input.x"}
[[step]]
name = "b"
model = "b"
inputs = {x = "a.y"}
[output]
left = "a.at"
came = "b.at"
"""

PICTURE = """
[[step]]
name = "decode"
python = "steps.py:decode"
inputs = {data = "input.picture"}
outputs = {pixels = {datatype = "UINT8", shape = [1, -1, -1, 3]}}
[[step]]
name = "resize"
python = "steps.py:resize"
inputs = {pixels = "decode.pixels"}
outputs = {x = {datatype = "FP32", shape = [1, 3, 224, 224]}}
[[step]]
name = "classify"
model = "mobilenetv2"
inputs = {x = "resize.x"}
[[step]]
name = "top"
python = "steps.py:top"
inputs = {scores = "classify.y"}
outputs = {classes = {datatype = "INT64", shape = [1, 5]}, values = {datatype = "FP32", shape = [1, 5]}}
[input.picture]
datatype = "BYTES"
shape = [1]
[output]
classes = "top.classes"
values = "top.values"
"""

PICTURE_STEPS = """
import io
import numpy as np
from PIL import Image

def decode(data):
    return {"pixels": np.asarray(Image.open(io.BytesIO(data[0])).convert("RGB"))[None]}

def resize(pixels):
    small = Image.fromarray(pixels[0]).resize((224, 224), Image.Resampling.BILINEAR)
    return {"x": np.ascontiguousarray((np.asarray(small, np.float32) / 127.5 - 1).transpose(2, 0, 1)[None])}

def top(scores):
    best = np.argsort(scores[0])[::-1][:5]
    return {"classes": best[None].astype(np.int64), "values": scores[:, best]}
"""


def pipelines_tiny(bench: Bench) -> None:
    """Three tiny steps in a chain, beside the three asked one after another.

    A client that asks for them by itself sends three requests for each: with as many in flight and no work of its own,
    it gets a third of the rate of one. The generator, which does nothing with an answer, is the quickest such client.
    """
    steps = {name: _tiny(bench, name) for name in "abc"}
    whole = BenchModel("whole", steps["a"].path, (TINY_COLUMNS,), TINY_COLUMNS)
    with _serving(bench, steps, CHAIN, whole, settings=INLINE) as daemon:
        for number in bench.rounds("pipelines_tiny"):
            ways = {"whole": bench.request(whole), "one": bench.request(steps["b"])}
            rates = {
                name: bench.rate(daemon.endpoint, ways[name], 64).rate
                for name in sorted(ways, reverse=bool(number % 2))
            }
            bench.figures.add("pipelines.tiny.rate", rates["whole"])
            bench.figures.add("pipelines.tiny.ratio", rates["whole"] / (rates["one"] / len(steps)))


def pipelines_picture(bench: Bench) -> None:
    """A JPEG of 640x480 decoded, resized, classified and its top five, one at a time, beside the steps' own runs."""
    data = _jpeg()
    served = {"mobilenetv2": makers.mobilenetv2()}
    with (
        _serving(bench, served, PICTURE, None, steps=PICTURE_STEPS) as daemon,
        Client(daemon.endpoint) as client,
    ):
        ask = partial(client.infer, "whole", {"picture": np.array([data], object)})
        _wait_for(ask)
        daemon.settle()
        for _ in bench.rounds("pipelines_picture"):
            before = _steps(daemon)
            p50_s = statistics.median(_times(ask, bench.seconds))
            after = _steps(daemon)
            runs = {
                name: (after[name]["run_s"] - before[name]["run_s"])
                / (after[name]["requests"] - before[name]["requests"])
                for name in after
            }
            bench.figures.add("pipelines.picture.ratio", p50_s / sum(runs.values()))
            bench.figures.add("pipelines.picture.p50_ms", p50_s * 1e3)
        told = ", ".join(f"{name} {run_s * 1e3:.2f} ms" for name, run_s in runs.items())
        bench.figures.note("pipelines_picture", f"runs of the steps: {told}")


def pipelines_hop(bench: Bench) -> None:
    """600 KB from one host to another: from the end of one model's code to the beginning of the next one's."""
    tensor, instant = ("FP32", [1, HOP_COLUMNS]), ("INT64", [1, 1])
    models: dict[str, str] = {
        "a": "y = inputs['x']\nreturn {'y': y, 'at': np.array([[time.monotonic_ns()]])}",
        "b": "at = time.monotonic_ns()\nreturn {'y': inputs['x'], 'at': np.array([[at]])}",
    }

    def write(folder: Path) -> None:
        for name, body in models.items():
            lines = "\n".join(f"    {line}" for line in body.splitlines())
            source = f"import time\nimport numpy as np\ndef infer(inputs):\n{lines}\n"
            python_models.write(folder / name / "1", [("x", *tensor)], [("y", *tensor), ("at", *instant)], source)

    with _serving(bench, {}, HOP, None, beside=write) as daemon:
        given = {"x": np.ones((1, HOP_COLUMNS), np.float32)}
        with Client(daemon.endpoint) as client:
            ask = partial(client.infer, "whole", given)
            _wait_for(ask)
            daemon.settle()
            for _ in bench.rounds("pipelines_hop"):
                hops: list[float] = []

                def timed() -> None:
                    found = ask()
                    hops.append((int(found["came"][0, 0]) - int(found["left"][0, 0])) / 1e6)  # noqa: B023

                _times(timed, bench.seconds)
                bench.figures.add("pipelines.hop_ms", statistics.median(hops))


def pipelines_overload(bench: Bench) -> None:
    """A pipeline of three at twice what it serves, each request with a deadline."""
    steps = {name: _working(bench, name) for name in "abc"}
    whole = BenchModel("whole", steps["a"].path, (WORK_WIDTH,), WORK_WIDTH)
    with _serving(bench, steps, CHAIN, whole, settings='mode = "workers"\n') as daemon:
        request = bench.request(whole, IMAGE_DEADLINE_MS)
        for number in bench.rounds("pipelines_overload"):
            capacity = bench.capacity(daemon.endpoint, bench.request(whole))
            before = _whole(daemon)
            load = bench.generator.open(
                daemon.endpoint,
                request,
                2 * capacity,
                bench.overload_seconds,
                deadline_ms=IMAGE_DEADLINE_MS,
                seed=number,
            )
            after = _whole(daemon)
            ran = after["steps"]["a"]["requests"] - before["steps"]["a"]["requests"]
            answered = after["answered"] - before["answered"]
            bench.figures.add("pipelines.overload.goodput_ratio", load.goodput / capacity)
            bench.figures.add("pipelines.overload.ran_and_expired", max(ran - answered, 0) / max(load.sent, 1))
            bench.figures.add("pipelines.overload.neither", load.lost + load.stray)


def pipelines_reloads(bench: Bench) -> None:
    """A step is loaded anew again and again while the pipeline is asked, 64 in flight."""
    steps = {name: _tiny(bench, name) for name in "abc"}
    whole = BenchModel("whole", steps["a"].path, (TINY_COLUMNS,), TINY_COLUMNS)
    figures = bench.figures
    with _serving(bench, steps, CHAIN, whole, settings=INLINE) as daemon:
        done = 0
        problem: list[Exception] = []

        def reload_all() -> None:
            nonlocal done
            try:
                with ControlConnection(daemon.control_endpoint) as connection:
                    for number in range(bench.reload_count):
                        connection.ask("load", "abc"[number % 3])
                        done += 1
            except Exception as error:  # noqa: BLE001 (told by the main thread)
                problem.append(error)

        thread = threading.Thread(target=reload_all)
        thread.start()
        failed = answered = 0
        while thread.is_alive():
            load: Load = bench.generator.closed(
                daemon.endpoint, bench.request(whole), 64, min(bench.seconds, 3.0), warm_s=0.0
            )
            failed += load.refused + load.lost + load.stray
            answered += load.answered
        thread.join()
    if problem:
        figures.note("pipelines_reloads", f"stopped after {done}: {problem[0]}")
    figures.add("pipelines.reloads.done", done)
    figures.add("pipelines.reloads.failed", failed)
    figures.note("pipelines_reloads", f"{answered:,} requests answered over {done} reloads of steps")


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "pipelines_tiny": pipelines_tiny,
    "pipelines_picture": pipelines_picture,
    "pipelines_hop": pipelines_hop,
    "pipelines_overload": pipelines_overload,
    "pipelines_reloads": pipelines_reloads,
}


# ---- private --------------------------------------------------------------------------------------------------------


@contextmanager
def _serving(
    bench: Bench,
    models: Mapping[str, BenchModel],
    pipeline: str,
    whole: BenchModel | None,
    *,
    settings: str = "",
    steps: str = "",
    beside: Callable[[Path], object] = lambda _: None,
) -> Iterator[Daemon]:
    """A daemon with models and the pipeline `whole` over them, settled where `whole` says how it is asked.

    beside: writes further models into the folder.
    """
    config = bench.children.folder / "pipelines.toml"
    config.write_text("python_models = true\n")
    daemon = Daemon(bench.children, {name: (each, settings) for name, each in models.items()}, config=config)
    folder = daemon.models / "whole"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(pipeline)
    if steps:
        (folder / "steps.py").write_text(steps)
    beside(daemon.models)
    try:
        if whole is not None:
            daemon.start_and_settle(bench.request(whole))
        else:
            daemon.start()
        yield daemon
    finally:
        daemon.stop()


def _tiny(bench: Bench, name: str) -> BenchModel:
    """16 floats in and out, by one product: a run costs less than a message."""
    path = bench.children.folder / "tiny.onnx"
    if not path.exists():
        graph = Graph(seed=4)
        graph.save(path, (TINY_COLUMNS,), graph.dense("x", TINY_COLUMNS, TINY_COLUMNS), TINY_COLUMNS)
    return BenchModel(name, path, (TINY_COLUMNS,), TINY_COLUMNS)


def _working(bench: Bench, name: str) -> BenchModel:
    """A model of convolutions, as many columns out as in."""
    path = bench.children.folder / "working.onnx"
    if not path.exists():
        graph = Graph(seed=5)
        cells = WORK_WIDTH * WORK_SIDE * WORK_SIDE
        trunk = graph.reshape(graph.dense("x", WORK_WIDTH, cells), -1, WORK_WIDTH, WORK_SIDE, WORK_SIDE)
        for _ in range(WORK_DEPTH):
            trunk = graph.relu(graph.conv(trunk, WORK_WIDTH, WORK_WIDTH, 3))
        graph.save(path, (WORK_WIDTH,), graph.dense(graph.mean_over_area(trunk), WORK_WIDTH, WORK_WIDTH), WORK_WIDTH)
    return BenchModel(name, path, (WORK_WIDTH,), WORK_WIDTH)


def _whole(daemon: Daemon) -> dict[str, Any]:
    metrics: dict[str, Any] = daemon.control("stats")["metrics"]["models"]["whole"]
    return metrics


def _steps(daemon: Daemon) -> dict[str, dict[str, float]]:
    steps: dict[str, dict[str, float]] = _whole(daemon)["steps"]
    return steps


def _wait_for(ask: Callable[[], object], limit_s: float = 30.0) -> None:
    """Until it is answered."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            ask()
        except Exception:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)
        else:
            return


def _times(call: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return times


def _jpeg() -> bytes:
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:480, 0:640]
    waves = np.stack([np.sin(x / 17) * np.cos(y / 23), np.sin((x + y) / 41), np.cos(y / 31)], 2)
    picture = np.clip(128 + 80 * waves + random.normal(0, 6, waves.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return file.getvalue()
