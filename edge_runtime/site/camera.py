"""A camera as the daemon has it: its newest frame on demand for each who looks at it, and why there is none.

Owns: the child that reads it (camera_child.py), and how soon a lost camera is tried again. A thread of its own starts
the child and talks to it, since the kernel ends a child with the thread that made it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import ConfigError, QueueFull
from edge_runtime.hosts.regions import LENDER, Region, RegionOwner, Regions
from edge_runtime.pictures.picture_steps import PictureSource
from edge_runtime.sandbox.child import Child, start_child
from edge_runtime.site.camera_child import (
    FRAME_ASK,
    FRAME_FORMS,
    FRAME_HEAD,
    SILENCE_S,
    CameraTask,
    frame_shape,
    read_camera,
)
from edge_runtime.site.settings import WHOLE

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0
"""The wait after a camera is lost doubles from one to the other, and starts anew with a frame. A camera that restarts
is back in half a minute; one that is gone costs a child process twice a minute."""

GRACE_S = 5.0
"""Time for a child to report the longest silence: it opens and decodes on cores that models use."""

MAX_REASON_BYTES = 1000

MAX_SLOTS = 8
"""Of one camera: a frame for each rule that looks at it, and one that comes. More go by the channel. Most take two: the
regions of all clients together are 192 (hosts/regions.py)."""

Frame = npt.NDArray[np.uint8]


class CameraState(Enum):
    """Whether a camera gives pictures. A frame makes it online, a loss lost; before either it is starting."""

    STARTING = "starting"
    ONLINE = "online"
    LOST = "lost"


class Shot(NamedTuple):
    """One frame. pixels: in the shape of the form that was asked for (steps.py), without rows.

    number: of the picture in its stream, from 1 on, which a new child goes on with. captured_s: when it came, as
    `time.time`.
    """

    pixels: Frame
    number: int
    captured_s: float


class CameraAddress:
    """Where a camera is. kind: "rtsp", "http", "v4l2" or "file". shown: without a password."""

    def __init__(self, address: str, key: str = "publish.camera") -> None:
        """key: where it is written. Raises ConfigError for an address of another kind."""
        self.address = address
        self.shown = address
        scheme, there, _ = address.partition("://")
        if not there:
            path = Path(address)
            if not path.is_absolute():
                raise ConfigError(
                    f"{key}: got {address!r}; wanted a path from the root, as /dev/video0, rtsp://, rtsps://, "
                    "http:// or https://"
                )
            self.kind = "v4l2" if address.startswith("/dev/") else "file"
            return
        self.kind = scheme.lower().removesuffix("s")
        if self.kind not in ("rtsp", "http"):
            raise ConfigError(f"{key}: got {scheme}://…; wanted rtsp, rtsps, http, https or a path")
        parts = urlsplit(address)
        if parts.username is not None or parts.password is not None:
            self.shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class FrameSlots:
    """Regions that a child writes frames to, where hosts read them: none is copied on its way. Thread: the camera's.

    wanted_bytes: of the last frame; 0: none came yet. A slot is free again when no array of its frame is left.
    """

    def __init__(self, regions: Regions | None) -> None:
        self.wanted_bytes = 0
        self._regions = regions
        self._owner = RegionOwner(LENDER)
        self._slots: dict[int, Region] = {}
        self._free: deque[int] = deque()

    def take(self) -> tuple[int, list[int]]:
        """Return a slot for the next frame, and its descriptor where the child has to be given it; 0: there is none."""
        if not self.wanted_bytes or self._regions is None:
            return 0, []
        slot = self._free.popleft() if self._free else len(self._slots) + 1
        if slot > MAX_SLOTS:
            return 0, []
        if self.holds(slot, self.wanted_bytes):
            self._free.appendleft(slot)  # until it is lent
            return slot, []
        try:
            number, made = self._regions.allocate(self._owner, self.wanted_bytes)
        except QueueFull:
            return 0, []
        del self._owner.regions[number]  # it ends with the last view of it
        self._slots[slot] = made
        self._free.appendleft(slot)
        return slot, [made.file.fd]

    def holds(self, slot: int, nbytes: int) -> bool:
        """Whether a frame of this size may lie in a slot."""
        return slot in self._slots and nbytes <= self._slots[slot].file.nbytes

    def lend(self, slot: int, nbytes: int) -> Frame:
        """Return the frame in a slot, which is taken as long as an array of it is left."""
        self._free.remove(slot)
        frame = np.frombuffer(self._slots[slot].data.data, np.uint8, nbytes)
        weakref.finalize(frame, self._free.append, slot).atexit = False
        return frame


class CameraView:
    """One who looks at a camera, at its own pace. arrived: called when a frame that was asked for is there."""

    def __init__(self, camera: Camera, arrived: Callable[[], object]) -> None:
        self.camera = camera
        self.arrived = arrived
        self.shot: Shot | None = None

    def ask(self, source: PictureSource = "frames") -> None:
        """Have the next frame fetched, as a model takes it that declares this source; `take` gives it. Thread: any."""
        self.camera.fetch_for(self, FRAME_FORMS[source])

    def take(self) -> Shot | None:
        """The frame that was asked for; None until it is there. Thread: any."""
        shot, self.shot = self.shot, None
        return shot


class Camera:
    """One camera, for all who look at it.

    name: empty where it has none. silence_s: a camera that gives no picture for so long is lost. reason: why it gives
    no frames; empty while it does or none was asked for yet. losses: how often it was lost. regions: where its frames
    lie; None: each is copied. changed: called when `state` has changed, on the camera's thread.
    """

    def __init__(
        self,
        address: CameraAddress,
        *,
        name: str = "",
        rotate: int = 0,
        crop: tuple[float, float, float, float] = WHOLE,
        silence_s: float = SILENCE_S,
        regions: Regions | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.address = address
        self.name = name
        self.reason = ""
        self.losses = 0
        self.state = CameraState.STARTING
        self._rotate = rotate
        self._crop = crop
        self._changed = changed
        self._silence_s = silence_s
        self._wanted: dict[CameraView, bytes] = {}  # Invariant: changed under the lock; who waits longest is first.
        self._base = self._number = 0
        self._regions = regions
        self._slots = FrameSlots(regions)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wait_s = RETRY_MIN_S
        self._thread = threading.Thread(target=self._work, name="edge-camera", daemon=True)

    @property
    def shown(self) -> str:
        """Its name; of one without, its address without a password."""
        return self.name or self.address.shown

    def start(self) -> None:
        """Begin to read. Idempotent."""
        if self._thread.ident is not None:
            return
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._thread.start()

    def look(self, arrived: Callable[[], object]) -> CameraView:
        """Return the view of one more who looks. arrived: as of CameraView, on the camera's thread."""
        return CameraView(self, arrived)

    def fetch_for(self, view: CameraView, form: bytes) -> None:
        """Have the next frame fetched in a form (FRAME_FORMS). Thread: any."""
        with self._lock:
            self._wanted[view] = form
        self._ring()

    def close(self) -> None:
        """End the child and the thread, at once. Idempotent."""
        if self._closed.is_set() or self._thread.ident is None:
            return
        self._closed.set()
        self._ring()
        self._thread.join()
        self._bell.close()
        self._rung.close()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                reason = self._read()
            except OSError as error:
                reason = f"no process can be made: {error.strerror}"
            except Exception:
                log.exception("a bug interrupted the reading of a camera")
                reason = "a bug interrupted it; see the log"
            if self._closed.is_set():
                return
            self._mark_lost(reason)
            self._pause(self._wait_s)
            self._wait_s = min(self._wait_s * 2, RETRY_MAX_S)

    def _read(self) -> str:
        """Read the camera in a child. Return why that ended."""
        ours, theirs = socket.socketpair()
        with ours:
            child: Child | None = None
            try:
                with theirs:
                    child = self._start_child(theirs)
                self._base, self._slots = self._number, FrameSlots(self._regions)
                return self._serve(ours)
            finally:
                if child is not None:
                    child.end()

    def _start_child(self, theirs: socket.socket) -> Child:
        kind, address = self.address.kind, self.address.address
        return start_child(
            read_camera,
            CameraTask(address, kind, theirs.fileno(), self._silence_s, self._rotate, self._crop),
            has_network=kind in ("rtsp", "http"),
            reads=[Path(address)] if kind == "file" else [],
            writes=[Path(address)] if kind == "v4l2" else [],
            starts_none=True,
            pass_fds=[theirs.fileno()],
        )

    def _serve(self, channel: socket.socket) -> str:
        """Fetch frames as they are asked for. Return why there are no more."""
        while True:
            while not (self._wanted or self._closed.is_set()):
                if self._wait(channel, None):
                    return "its process ended"  # it speaks only when asked
            if self._closed.is_set():
                return ""
            with self._lock:
                form = next(iter(self._wanted.values()))
            shot = self._fetch(channel, form)
            if isinstance(shot, str):
                return shot
            self._mark_online()
            self._hand_over(shot, form)

    def _hand_over(self, shot: Shot, form: bytes) -> None:
        """Give a frame to each who waits for one in its form."""
        with self._lock:
            waiting = [view for view, wanted in self._wanted.items() if wanted == form]
            for view in waiting:
                del self._wanted[view]
        for view in waiting:
            view.shot = shot
            view.arrived()

    def _fetch(self, channel: socket.socket, wanted: bytes) -> Shot | str:
        """Ask the child for a frame. Return it, or why there is none."""
        end_s = time.monotonic() + self._silence_s + GRACE_S
        try:
            slot, descriptors = self._slots.take()
            socket.send_fds(channel, [FRAME_ASK.pack(wanted, slot)], descriptors)
            head = self._receive(channel, FRAME_HEAD.size, end_s).tobytes()
            height, length, _, number, captured_s, is_shared = FRAME_HEAD.unpack(head)
            if height == 0:
                said = self._receive(channel, min(length, MAX_REASON_BYTES), end_s)
                return said.tobytes().decode("utf-8", "replace")
            shape = frame_shape(wanted, head)
            if shape is None:
                return "its process gave what is not a frame"
            nbytes = math.prod(shape)
            if is_shared and not self._slots.holds(slot, nbytes):
                return "its process gave what is not a frame"
            pixels = self._slots.lend(slot, nbytes) if is_shared else self._receive(channel, nbytes, end_s)
            self._slots.wanted_bytes = nbytes
        except (OSError, EOFError) as error:
            return str(error) if isinstance(error, TimeoutError) else "its process ended"
        self._number = self._base + number
        return Shot(pixels.reshape(shape), self._number, captured_s)

    def _receive(self, channel: socket.socket, nbytes: int, end_s: float) -> Frame:
        """Receive `nbytes`. Raises TimeoutError, EOFError: the child ended, or this is closed; OSError."""
        got = np.empty(nbytes, np.uint8)
        left: memoryview = got.data
        while left:
            if not self._wait(channel, end_s):
                if self._closed.is_set():
                    raise EOFError
                if time.monotonic() >= end_s:
                    raise TimeoutError("its process says nothing")
                continue
            count = channel.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return got

    def _wait(self, channel: socket.socket | None, end_s: float | None) -> bool:
        """Wait until the channel has something, `end_s`, or the bell, which gives False as well."""
        poller = select.poll()
        poller.register(self._rung, select.POLLIN)
        if channel is not None:
            poller.register(channel, select.POLLIN)
        ready = poller.poll(None if end_s is None else max(end_s - time.monotonic(), 0.0) * 1e3)
        descriptors = {descriptor for descriptor, _ in ready}
        if self._rung.fileno() in descriptors:
            self._rung.recv(1 << 10)
        return channel is not None and channel.fileno() in descriptors

    def _pause(self, wait_s: float) -> None:
        """Wait, unless it is closed."""
        end_s = time.monotonic() + wait_s
        while not self._closed.is_set() and time.monotonic() < end_s:
            self._wait(None, end_s)

    def _mark_online(self) -> None:
        if self.reason:
            log.info("a camera gives pictures again", extra={"camera": self.shown})
        self.reason, self._wait_s = "", RETRY_MIN_S
        self._become(CameraState.ONLINE)

    def _mark_lost(self, reason: str) -> None:
        self.losses += 1
        if reason != self.reason:
            where = {"camera": self.shown, "reason": reason}
            log.warning("a camera gives no pictures", extra=where)
        self.reason = reason
        self._become(CameraState.LOST)

    def _become(self, state: CameraState) -> None:
        if state is not self.state:
            self.state = state
            self._changed()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full, so it is heard; or closed
            self._bell.send(b".")
