"""Pictures with their answers drawn: one retained JPEG for each rule with `picture = true`, and more for who looks.

Owns: the thread that has them drawn, one at a time, how often, and the child that draws them (drawing_child.py): a
picture comes from outside, and this process decodes none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge_runtime.answers import Answer, answer_fields
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.pictures.drawing import DrawTask, Overlay, check_pillow
from edge_runtime.sandbox.child import Child, start_child
from edge_runtime.site.drawing_child import DrawerTask, draw_pictures
from edge_runtime.site.publication import SentPicture
from edge_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

DRAW_SHARE = 0.5
"""Largest share of time that is spent on drawing. A picture of 2 million pixels takes 0.05 s of a core, so that eight
cameras have theirs within a second."""

DRAW_LIMIT_S = 30.0
MAX_SAID_BYTES = 1 << 16

SHOWN_PIXELS = 960
"""Of the longer side of pictures for people who look: some 100 KB, several of which a second a link of a device has."""

Deliver = Callable[[bytes], None]
MAX_DRAWN_BYTES = 64 << 20


class PictureDrawer:
    """Draws and publishes the newest picture of each topic. Raises ConfigError where Pillow is missing.

    last: the JPEG that was published last, by topic; the broker's connection retains the same bytes.
    """

    def __init__(self, publisher: DevicePublisher, clock: Clock, metrics: Metrics) -> None:
        check_pillow("publish.picture")
        self._publisher = publisher
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        # Invariant: changed under the lock; the topic that waits longest comes first.
        self._waiting: dict[str, tuple[Callable[[Path], DrawTask], Deliver | None]] = {}
        self._has_work = threading.Event()
        self._stop = threading.Event()
        self._warned: set[str] = set()
        self.last: dict[str, bytes] = {}
        self._pen: DrawingChild | None = None
        self._thread = threading.Thread(target=self._work, name="edge-pictures", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def close(self) -> None:
        """End what is being drawn, and the thread. Idempotent."""
        self._stop.set()
        self._has_work.set()
        if (pen := self._pen) is not None:
            pen.break_off()
        if self._thread.is_alive():
            self._thread.join()

    def offer(
        self,
        topic: str,
        picture: SentPicture,
        answer: Answer,
        labels: tuple[str, ...],
        overlay: Overlay | None = None,
        *,
        deliver: Deliver | None = None,
    ) -> None:
        """Have a picture drawn, in place of one that still waits for this topic. Thread: any.

        deliver: takes it, smaller, and nothing is published; None: it is.
        """

        def make(folder: Path) -> DrawTask:
            most = SHOWN_PIXELS if deliver is not None else 0
            return _task(folder, picture, answer, labels, overlay or Overlay(), most=most)

        with self._lock:
            self._waiting[topic] = make, deliver
        self._has_work.set()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._draw_all()
        finally:
            self._end_pen()

    def _draw_all(self) -> None:
        """Draw what comes until it is closed."""
        with contextlib.suppress(OSError):  # the first picture tells
            self._pen = DrawingChild()  # it imports while there is nothing to draw
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while not self._stop.is_set() and (taken := self._take()) is not None:
                topic, make, deliver = taken
                began_s = self._clock.monotonic_s()
                try:
                    self._publish(topic, make, deliver)
                except Exception as error:  # noqa: BLE001 (no picture may end the thread)
                    self._fail(topic, f"{type(error).__name__}: {error}")
                took_s = self._clock.monotonic_s() - began_s
                self._stop.wait(took_s / DRAW_SHARE - took_s)
            if self._stop.is_set():
                return

    def _end_pen(self) -> None:
        pen, self._pen = self._pen, None
        if pen is not None:
            pen.close()

    def _take(self) -> tuple[str, Callable[[Path], DrawTask], Deliver | None] | None:
        with self._lock:
            topic = next(iter(self._waiting), None)
            return None if topic is None else (topic, *self._waiting.pop(topic))

    def _publish(self, topic: str, make: Callable[[Path], DrawTask], deliver: Deliver | None) -> None:
        """Have a picture drawn, and publish or deliver it; b"" is delivered where it cannot be."""
        drawn = self._drawn(topic, make)
        if deliver is not None:
            deliver(drawn)
        elif drawn and (reason := self._publisher.retain(topic, drawn, "image/jpeg")):
            self._fail(topic, reason)
        elif drawn:
            self.last[topic] = drawn
            self._metrics.count("mqtt_pictures")

    def _drawn(self, topic: str, make: Callable[[Path], DrawTask]) -> bytes:
        """Have a picture drawn. Return it, or b"" where it cannot be."""
        if self._pen is None:
            self._pen = DrawingChild()
        if self._stop.is_set():
            return b""
        try:
            drawn = self._pen.draw(make)
        except (OSError, EOFError):
            self._end_pen()
            if not self._stop.is_set():
                self._fail(topic, f"its process ended, or took over {DRAW_LIMIT_S:g} s")
            return b""
        if isinstance(drawn, str):
            self._fail(topic, drawn)
            return b""
        return drawn

    def _fail(self, topic: str, reason: str) -> None:
        """Count it; log the first of a topic."""
        self._metrics.count("mqtt_pictures_failed")
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("a picture could not be drawn or published", extra={"topic": topic, "reason": reason})


class DrawingChild:
    """The child that draws, and the folder by which pictures go there and back. Thread: one, but for `break_off`."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self._folder = tempfile.TemporaryDirectory(prefix="edge-runtime-drawn-")
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(DRAW_LIMIT_S)
        self._child: Child | None = None
        try:
            with theirs:
                self._child = start_child(
                    draw_pictures,
                    DrawerTask(theirs.fileno()),
                    niceness=10,
                    reads=[],
                    writes=[Path(self._folder.name)],
                    starts_none=True,
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            self.close()
            raise

    def draw(self, make: Callable[[Path], DrawTask]) -> bytes | str:
        """Have a picture drawn. Return it as JPEG, or why it cannot be. Raises OSError, EOFError: the child ended."""
        task = make(Path(self._folder.name))
        self._channel.sendall(msgspec.json.encode(task) + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            piece = self._channel.recv(1 << 12)
            if not piece or len(said) > MAX_SAID_BYTES:
                raise EOFError
            said += piece
        return msgspec.json.decode(said, type=str) or self._drawn(task.drawn)

    def _drawn(self, path: str) -> bytes:
        """Read the drawn picture. Raises OSError: a link, by which the child could have any file read, stays unread."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(MAX_DRAWN_BYTES)

    def break_off(self) -> None:
        """Have `draw` end now. Thread: any."""
        with contextlib.suppress(OSError):  # it is closed
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the child, and remove the folder."""
        self._channel.close()
        if self._child is not None:
            self._child.end()
        self._folder.cleanup()


def _task(
    folder: Path, picture: SentPicture, answer: Answer, labels: tuple[str, ...], overlay: Overlay, *, most: int
) -> DrawTask:
    """Write a picture where its child finds it."""
    sent = folder / "sent"
    sent.write_bytes(picture if isinstance(picture, bytes) else picture.tobytes())
    shape = () if isinstance(picture, bytes) else picture.shape
    fields, drawn = answer_fields([answer], as_list=False), str(folder / "drawn.jpg")
    return DrawTask(str(sent), shape, fields, labels, drawn, overlay, most)
