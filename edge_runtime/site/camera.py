"""A camera as the daemon has it: its newest frame on demand for each who looks at it, and why there is none.

Owns: what is asked of the child that reads it (camera_child.py), and where its frames lie; reader.py has its life.
"""

from __future__ import annotations

import math
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
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
from edge_runtime.site.reader import GRACE_S, MAX_REASON_BYTES, SourceReader
from edge_runtime.site.settings import WHOLE

MAX_SLOTS = 8
"""Of one camera: a frame for each rule that looks at it, and one that comes. More go by the channel. Most take two: the
regions of all clients together are 192 (hosts/regions.py)."""

Frame = npt.NDArray[np.uint8]


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
        self._lent: dict[int, weakref.ref[Frame]] = {}

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
        frame, free = np.frombuffer(self._slots[slot].data.data, np.uint8, nbytes), self._free
        self._lent[slot] = weakref.ref(frame, lambda _: free.append(slot))
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


class Camera(SourceReader):
    """One camera, for all who look at it. regions: where its frames lie; None: each is copied.

    silence_s: a camera that gives no picture for so long is lost.
    """

    table = "cameras"
    noun = "camera"
    gives = "pictures"

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
        super().__init__(name, address.shown, silence_s, changed)
        self.address = address
        self._rotate = rotate
        self._crop = crop
        self._wanted: dict[CameraView, bytes] = {}  # Invariant: changed under the lock; who waits longest is first.
        self._base = self._number = 0
        self._regions = regions
        self._slots = FrameSlots(regions)

    def look(self, arrived: Callable[[], object] = lambda: None) -> CameraView:
        """Return the view of one more who looks. arrived: as of CameraView, on the camera's thread."""
        return CameraView(self, arrived)

    def fetch_for(self, view: CameraView, form: bytes) -> None:
        """Have the next frame fetched in a form (FRAME_FORMS). Thread: any."""
        with self._lock:
            self._wanted[view] = form
        self.wake()

    # ---- the thread -------------------------------------------------------------------------------------------------

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
        self._base, self._slots = self._number, FrameSlots(self._regions)
        try:
            while not self._closed.is_set():
                due_s = self._step()
                if not self._wanted:
                    if self._wait(due_s):
                        return "its process ended"  # it speaks only when asked
                    continue
                with self._lock:
                    form = next(iter(self._wanted.values()))
                shot = self._fetch(channel, form)
                if isinstance(shot, str):
                    return shot
                self._mark_online()
                self._hand_over(shot, form)
                del shot  # its slot is free when all who took it have done with it
        finally:
            self._slots = FrameSlots(None)
        return ""

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
            if descriptors:
                socket.send_fds(channel, [FRAME_ASK.pack(wanted, slot)], descriptors)
            else:
                channel.sendall(FRAME_ASK.pack(wanted, slot))
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
