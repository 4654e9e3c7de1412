"""Eight cameras that are files, one detector: how many of the frames that are asked for are run, and what it costs.

Decoding is in a child for each camera and the run in the model's host: what is counted is the daemon's own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import av
import numpy as np
import psutil

from bench.makers import BenchModel
from bench.scenarios import Bench
from bench.servers import BenchError, Daemon
from edge_runtime.doors.zmq.client import Client
from tests.fakes.broker import Broker
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

CAMERAS, FPS = 8, 5.0
SIZE = (640, 480)
VIDEO_FPS, VIDEO_FRAMES = 10, 40
"""A camera for analytics gives 10 to 15 pictures a second."""

SETTINGS = """
threads = 1
[input.image]
range = "0..255"
[output.boxes]
layout = "yolov8"
"""

START_LIMIT_S = 60.0
PICTURES = 5


def cameras(bench: Bench) -> None:
    """Eight files at five frames a second, published on change; one of them with its picture, each second."""
    folder = bench.children.folder
    videos = [_video(folder / f"camera{number}.mp4", number) for number in range(CAMERAS)]
    model = BenchModel("finder", onnx_models.finder(folder / "finder"), (3, 32, 32), 112)
    with Broker(folder / "broker") as broker:
        config = folder / "cameras.toml"
        config.write_text(_config(f"{broker.url}/bench", videos))
        daemon = Daemon(bench.children, {"finder": (model, SETTINGS)}, config=config)
        daemon.start()
        with Client(daemon.endpoint) as client, Peer(broker.url) as listener:
            _wait_run(client)
            listener.subscribe("edge/bench/result/finder/camera0/#")
            process = psutil.Process(daemon.pid)
            for _ in bench.rounds("cameras"):
                before, began_s, used_s = _frames(client), time.monotonic(), sum(process.cpu_times()[:2])
                delays_s = _picture_delays(listener)
                time.sleep(max(bench.seconds * 4 - (time.monotonic() - began_s), 0.0))
                took_s = time.monotonic() - began_s
                bench.figures.add("cameras.run_share", (_frames(client) - before) / (took_s * CAMERAS * FPS))
                bench.figures.add("cameras.cpu_percent", (sum(process.cpu_times()[:2]) - used_s) / took_s * 100)
                bench.figures.add("cameras.picture_s", max(delays_s))
        daemon.stop()


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"cameras": cameras}


# ---- private --------------------------------------------------------------------------------------------------------


def _video(path: Path, seed: int) -> Path:
    """A still scene with noise, as cameras have it."""
    chance = np.random.default_rng(seed)
    scene = chance.integers(0, 255, (SIZE[1] // 16, SIZE[0] // 16, 3)).repeat(16, axis=0).repeat(16, axis=1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=VIDEO_FPS, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for _ in range(VIDEO_FRAMES):
            pixels = np.clip(scene + chance.integers(-8, 8, scene.shape), 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return path


def _config(url: str, videos: list[Path]) -> str:
    parts = [f'[mqtt]\nurl = "{url}"\n']
    for number, video in enumerate(videos):
        parts.append(f'[[camera]]\nname = "camera{number}"\nurl = "{video}"\nfps = {FPS}\n')
        more = 'on = "interval"\ninterval_s = 1.0\npicture = true\n' if number == 0 else ""
        parts.append(f'[[publish]]\nmodel = "finder"\nsource = "camera"\ncamera = "camera{number}"\n{more}')
    return "\n".join(parts)


def _frames(client: Client) -> int:
    return int(client.stats()["metrics"]["counters"].get("camera_frames", 0))


def _wait_run(client: Client) -> None:
    """Wait until each camera gives frames, and the model's calibration is over. Raises BenchError."""
    client.wait_ready(START_LIMIT_S)
    until_s = time.monotonic() + START_LIMIT_S
    while (states := {each["state"] for each in client.cameras()}) != {"online"}:
        if time.monotonic() > until_s:
            raise BenchError(f"cameras are {states}")
        time.sleep(0.1)
    time.sleep(5.0)


def _picture_delays(listener: Peer) -> list[float]:
    """Seconds from a result to its picture as both arrive, of PICTURES in a row."""
    delays_s: list[float] = []
    told_s: float | None = None
    while len(delays_s) < PICTURES:
        message = listener.next()
        is_picture = message.topic.endswith("/picture")
        if is_picture and told_s is not None:
            delays_s.append(message.timestamp - told_s)
        told_s = None if is_picture else message.timestamp
    return delays_s
