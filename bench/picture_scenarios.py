"""Pictures through the steps that a model declares, beside the same made by the client or by plain numpy and Pillow.

The client is this process: what it does to a picture is part of what is measured.
"""

from __future__ import annotations

import io
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench import makers
from bench.makers import BenchModel
from bench.scenarios import Bench
from edge_runtime import Client

MEAN, SCALE = (123.675, 116.28, 103.53), (0.0171247, 0.0175070, 0.0174292)
CLASSES = f"[input.x]\nmean = {list(MEAN)}\nscale = {list(SCALE)}\n[output.y]\nsoftmax = true\n"
BOXES = '[input.x]\nfit = "letterbox"\nrange = "0..1"\n[output.y]\nlayout = "yolov8"\n'
CALLERS = 4
COLD_RUNS = 3

Frame = NDArray[np.uint8]


def picture_frames(bench: Bench) -> None:
    """640x480 frames of uint8 through declared steps, and FP32 tensors of 224x224 that the client makes, by turns."""
    model, frame = makers.mobilenetv2(), _frame()
    with _served(bench, model, CLASSES) as endpoint, Client(endpoint, max_in_flight=64) as client:
        ways: dict[str, Callable[[], object]] = {
            "frames": lambda: client.infer(model.name, picture=frame),
            "tensors": lambda: client.infer(model.name, {"x": _tensor(frame)}),
        }
        for number in bench.rounds("picture_frames"):
            order = sorted(ways, reverse=bool(number % 2))
            rates = {way: _rate(ways[way], bench.seconds) for way in order}
            bench.figures.add("picture.frames.ratio", rates["frames"] / rates["tensors"])
            bench.figures.add("picture.frames.rate", rates["frames"])
    bench.figures.add("picture.frames.bytes_ratio", frame.nbytes / model.row_bytes)


def picture_steps(bench: Bench) -> None:
    """The steps alone for one frame, in one process, beside plain numpy and Pillow."""
    from edge_runtime.backends.base import LoadOptions
    from edge_runtime.backends.registry import backend
    from edge_runtime.hosts.steps_instance import make_forms
    from edge_runtime.pictures.picture_steps import PictureSteps
    from edge_runtime.steps import Form, ModelSteps

    model, frame = makers.mobilenetv2(), _frame()
    instance = backend("onnxruntime").load(model.path, LoadOptions())
    steps = ModelSteps({"x": PictureSteps(mean=MEAN, scale=SCALE)})
    forms = {each.form: each for each in make_forms(instance, steps, 1)}
    asked = forms[Form("frames", answers=False)]
    tensor = {"x": _tensor(frame)}
    for _ in bench.rounds("picture_steps"):
        whole = _p50_s(lambda: asked.run({"x": frame[None]}), bench.seconds)
        run = _p50_s(lambda: instance.run(tensor), bench.seconds)
        plain = _p50_s(lambda: _tensor(frame), bench.seconds)
        bench.figures.add("picture.steps.ratio", (whole - run) / plain)
        bench.figures.add("picture.steps.ms", (whole - run) * 1e3)
    instance.close()


def picture_jpeg(bench: Bench) -> None:
    """A JPEG of 640x480 to classes, one at a time, beside the same library's decoding and the raw run."""
    import onnxruntime

    model, data = makers.mobilenetv2(), _jpeg()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    tensor = _tensor(_frame())
    settings = f"threads = 1\n{CLASSES}"
    with _served(bench, model, settings) as endpoint, Client(endpoint) as client:
        for _ in bench.rounds("picture_jpeg"):
            served = _p50_s(lambda: client.infer(model.name, picture=data), bench.seconds)
            decode = _p50_s(lambda: Image.open(io.BytesIO(data)).load(), bench.seconds)
            run = _p50_s(lambda: session.run(None, {"x": tensor}), bench.seconds)
            bench.figures.add("picture.jpeg.ratio", served / (decode + run))
            bench.figures.add("picture.jpeg.ms", served * 1e3)


def picture_boxes(bench: Bench) -> None:
    """A detector of YOLOv8's form asked for boxes, and for its bare output, one at a time."""
    model, frame = makers.yolo_like(), _frame()
    with _served(bench, model, BOXES) as endpoint, Client(endpoint) as client:
        for _ in bench.rounds("picture_boxes"):
            boxes = _p50_s(lambda: client.infer(model.name, picture=frame), bench.seconds)
            bare = _p50_s(lambda: client.infer(model.name, picture=frame, raw=True), bench.seconds)
            bench.figures.add("picture.boxes.share", max(boxes - bare, 0.0) / boxes)
            bench.figures.add("picture.boxes.ms", boxes * 1e3)
        found = client.infer(model.name, picture=frame).answer
        bench.figures.note("picture_boxes", f"{len(found.boxes or ())} boxes in an answer")


SCENARIOS = {
    "picture_frames": picture_frames,
    "picture_steps": picture_steps,
    "picture_jpeg": picture_jpeg,
    "picture_boxes": picture_boxes,
}


# ---- private --------------------------------------------------------------------------------------------------------


@contextmanager
def _served(bench: Bench, model: BenchModel, settings: str) -> Iterator[str]:
    """A daemon with one model, while the block lasts: its endpoint."""
    daemon = bench.daemon(model, settings=settings)
    daemon.start_and_settle(bench.request(model))
    try:
        yield daemon.endpoint
    finally:
        daemon.stop()


def _frame() -> Frame:
    """A picture of 640x480 with edges, gradients and noise, as a camera gives."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:480, 0:640]
    waves = np.stack([np.sin(x / 17) * np.cos(y / 23), np.sin((x + y) / 41), ((x // 80 + y // 60) % 2) * 1.5 - 0.75], 2)
    return np.clip(128 + 80 * waves + random.normal(0, 6, waves.shape), 0, 255).astype(np.uint8)


def _jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(_frame()).save(file, "JPEG", quality=90)
    return file.getvalue()


def _tensor(frame: Frame) -> NDArray[np.float32]:
    """What a client or a `model.py` makes of a frame with numpy and Pillow: [1, 3, 224, 224]."""
    scaled = np.asarray(Image.fromarray(frame).resize((224, 224), Image.Resampling.BILINEAR), np.float32)
    values = (scaled - np.array(MEAN, np.float32)) * np.array(SCALE, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None])


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls a second of CALLERS threads."""
    counts = [0] * CALLERS
    until_s = time.monotonic() + seconds

    def work(index: int) -> None:
        while time.monotonic() < until_s:
            call()
            counts[index] += 1

    call()
    began_s = time.monotonic()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(CALLERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(counts) / (time.monotonic() - began_s)


def _p50_s(call: Callable[[], object], seconds: float) -> float:
    for _ in range(COLD_RUNS):
        call()
    times: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)
