"""Frigate's detectors beside the raw run of their model: one at a time, and two at once that share a batch.

Each detector does what Frigate's plugin does (tests/fakes/frigate_detector.py), in a thread of this process: making the
bytes of a picture and reading the reply are part of what is measured.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench import makers
from bench.scenarios import Bench
from bench.servers import Daemon
from tests.fakes.frigate_detector import Detector

SETTINGS = "threads = 1\ninstances = 1\n"
PAIRED = f"{SETTINGS}max_queue_delay_ms = 10\npreferred_batch_rows = [2]\nmax_batch_rows = 2\n"
"""The second picture of a pair comes within a few milliseconds of the first: both detectors wait for one run."""

NAME = "detector.onnx"
COLD_RUNS = 3

Call = Callable[[], object]


def frigate(bench: Bench) -> None:
    """A YOLO of 640x640, float pictures as Frigate's settings for it say: detect_raw beside ONNX Runtime's own run."""
    import onnxruntime

    model = makers.yolo_like()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    picture = _picture()
    both = np.concatenate([picture, picture])
    for number in bench.rounds("frigate"):
        alone = _detect(bench, SETTINGS, picture, detectors=1, number=number)
        run = _p50_s([lambda: session.run(None, {"x": picture})], bench.seconds)
        bench.figures.add("frigate.ratio", alone / run)
        bench.figures.add("frigate.ms", alone * 1e3)
        paired = _detect(bench, PAIRED, picture, detectors=2, number=number)
        run = _p50_s([lambda: session.run(None, {"x": both})], bench.seconds)
        bench.figures.add("frigate.pair.ratio", paired / run)
        bench.figures.add("frigate.pair.ms", paired * 1e3)


SCENARIOS = {"frigate": frigate}


# ---- private --------------------------------------------------------------------------------------------------------


def _detect(bench: Bench, settings: str, picture: NDArray[np.float32], *, detectors: int, number: int) -> float:
    """Median of `detect_raw` of so many detectors at once, in seconds."""
    model = makers.yolo_like()
    folder = bench.children.folder
    place = folder / f"frigate{number}-{detectors}"
    config = folder / f"{place.name}.toml"
    config.write_text(
        f'[frigate]\nendpoint = "ipc://{place}"\ntimeout_ms = 10000\nmodels = {{ "{NAME}" = "{model.name}" }}\n'
    )
    daemon = Daemon(bench.children, {model.name: (model, settings)}, config=config)
    daemon.start_and_settle(bench.request(model))
    clients = [Detector(f"ipc://{place}", None, name=NAME) for _ in range(detectors)]
    try:
        for each in clients:
            each.__enter__()
        found = _p50_s([lambda each=each: each.detect_raw(picture) for each in clients], bench.seconds)  # type: ignore[misc]
        errors = [error for each in clients for error in each.errors]
        if errors:
            bench.figures.note("frigate", f"{len(errors)} pictures were refused: {errors[0]}")
        return found
    finally:
        for each in clients:
            each.__exit__()
        daemon.stop()


def _picture() -> NDArray[np.float32]:
    return np.random.default_rng(0).random((1, 3, 640, 640), np.float32)


def _p50_s(calls: list[Call], seconds: float) -> float:
    """Median time of calls that are made again and again, each in a thread of its own."""
    times: list[float] = []
    until_s = time.monotonic() + seconds

    def work(call: Call) -> None:
        for _ in range(COLD_RUNS):
            call()
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - began_s)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return statistics.median(times)
