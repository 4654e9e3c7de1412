"""Pictures with their answers drawn, for `picture = true` of `[[publish]]`: one retained JPEG a rule.

Owns: the thread that has them drawn, one at a time, and how often. A child of the sandbox draws each: a picture comes
from outside, and this process decodes none.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from edge_runtime.answers import Answer, answer_fields
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.pictures.drawing import DrawTask, check_pillow, draw_in_child
from edge_runtime.sandbox.child import run_child
from edge_runtime.site.publication import SentPicture
from edge_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

DRAW_SHARE = 0.2
"""Largest share of time that is spent on drawing: a child imports its libraries anew, 0.2 s of a core."""

DRAW_LIMIT_S = 30.0
DRAW_MEMORY_BYTES = 1 << 30
"""Memory of one child: the largest picture that a host decodes takes 200 MB as pixels, its drawn copy as much again."""


class PictureDrawer:
    """Draws and publishes the newest picture of each topic. Raises ConfigError where Pillow is missing."""

    def __init__(self, publisher: DevicePublisher, clock: Clock, metrics: Metrics) -> None:
        check_pillow("publish.picture")
        self._publisher = publisher
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        # Invariant: changed under the lock; the topic that waits longest comes first.
        self._waiting: dict[str, Callable[[Path], DrawTask]] = {}
        self._has_work = threading.Event()
        self._stop = threading.Event()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="edge-pictures", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def close(self) -> None:
        """End what is being drawn, and the thread. Idempotent."""
        self._stop.set()
        self._has_work.set()
        if self._thread.is_alive():
            self._thread.join()

    def offer(self, topic: str, picture: SentPicture, answer: Answer, labels: tuple[str, ...]) -> None:
        """Have a picture drawn, in place of one that still waits for this topic. Thread: any."""
        with self._lock:
            self._waiting[topic] = lambda folder: _task(folder, picture, answer, labels)
        self._has_work.set()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while not self._stop.is_set() and (taken := self._take()) is not None:
                topic, make = taken
                began_s = self._clock.monotonic_s()
                try:
                    self._publish(topic, make)
                except Exception as error:  # noqa: BLE001 (no picture may end the thread)
                    self._fail(topic, f"{type(error).__name__}: {error}")
                took_s = self._clock.monotonic_s() - began_s
                self._stop.wait(took_s / DRAW_SHARE - took_s)
            if self._stop.is_set():
                return

    def _take(self) -> tuple[str, Callable[[Path], DrawTask]] | None:
        with self._lock:
            topic = next(iter(self._waiting), None)
            return None if topic is None else (topic, self._waiting.pop(topic))

    def _publish(self, topic: str, make: Callable[[Path], DrawTask]) -> None:
        with tempfile.TemporaryDirectory(prefix="edge-runtime-drawn-") as name:
            folder = Path(name)
            task = make(folder)
            ending = run_child(
                draw_in_child,
                task,
                limit_s=DRAW_LIMIT_S,
                memory_bytes=DRAW_MEMORY_BYTES,
                niceness=10,
                writes=[folder],
                starts_none=True,
                stop=self._stop,
            )
            if self._stop.is_set():
                return
            if ending.reason:
                self._fail(topic, ending.reason)
                return
            drawn = Path(task.drawn).read_bytes()
        if reason := self._publisher.retain(topic, drawn, "image/jpeg"):
            self._fail(topic, reason)
            return
        self._metrics.count("mqtt_pictures")

    def _fail(self, topic: str, reason: str) -> None:
        """Count it; log the first of a topic."""
        self._metrics.count("mqtt_pictures_failed")
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("a picture could not be drawn or published", extra={"topic": topic, "reason": reason})


def _task(folder: Path, picture: SentPicture, answer: Answer, labels: tuple[str, ...]) -> DrawTask:
    """Write a picture where its child finds it."""
    sent = folder / "sent"
    sent.write_bytes(picture if isinstance(picture, bytes) else picture.tobytes())
    shape = () if isinstance(picture, bytes) else picture.shape
    return DrawTask(str(sent), shape, answer_fields([answer], as_list=False), labels, str(folder / "drawn.jpg"))
