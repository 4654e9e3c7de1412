"""A microphone as the daemon has it: windows of its sound for each who listens, and why there are none.

Owns: what is asked of the child that reads it (microphone_child.py), and the windows that wait; reader.py has its life.
"""

from __future__ import annotations

import os
import re
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import ConfigError
from edge_runtime.hosts.regions import Regions
from edge_runtime.sandbox.child import Child, start_child
from edge_runtime.site.camera import CameraAddress
from edge_runtime.site.microphone_child import (
    ALSA_CONFIG,
    SILENCE_S,
    SOUND_CUT,
    SOUND_HEAD,
    MicrophoneTask,
    read_microphone,
)
from edge_runtime.site.reader import GRACE_S, MAX_REASON_BYTES, SourceReader

KEPT_S, MOST_KEPT = 5.0, 64
"""Windows that wait for their model: of so many seconds, and at most so many. A word is heard though its model was busy
when it was said; a model that is too slow for every window is told by what is dropped."""

ALSA_DEVICES = Path("/dev/snd")
ALSA_SETTINGS = (Path("/etc/asound.conf"), Path("/etc/alsa"))

_ALSA_NAME = re.compile(r"[A-Za-z][\w:,=-]*")


class Cut(NamedTuple):
    """The windows that a model takes, in samples."""

    rate: int
    window: int
    hop: int


class Sound(NamedTuple):
    """One window. samples: FP32 [window], -1 to 1. number: from 1 on, which a new child goes on with.

    captured_s: when its last sample came, as `time.time`.
    """

    samples: npt.NDArray[np.float32]
    number: int
    captured_s: float


class MicrophonePlace(NamedTuple):
    """Where a microphone is: an ALSA name, such as `hw:0`, or an address as a camera's."""

    address: str

    @property
    def name(self) -> str:
        """Return nothing: rules call it by its address."""
        return ""

    @property
    def kind(self) -> str:
        """Return "alsa", "rtsp", "http" or "file". Raises ConfigError: it is neither."""
        return "alsa" if _ALSA_NAME.fullmatch(self.address) else self._elsewhere.kind

    @property
    def shown(self) -> str:
        """The address without a password. Raises ConfigError."""
        return self.address if self.kind == "alsa" else self._elsewhere.shown

    @property
    def _elsewhere(self) -> CameraAddress:
        if "://" not in self.address and not self.address.startswith("/"):
            raise ConfigError(
                f"publish.audio: got {self.address!r}; wanted a name of ALSA's, as hw:0 or plughw:1,0 (arecord -L "
                "lists them), a file's path from the root, rtsp://, rtsps://, http:// or https://"
            )
        found = CameraAddress(self.address, "publish.audio")
        if found.kind == "v4l2":
            raise ConfigError(f"publish.audio: got {self.address!r}; a device is named as ALSA does, as hw:0")
        return found

    def open(self, changed: Callable[[], object], regions: Regions | None) -> Microphone:
        """Return the microphone."""
        del regions
        return Microphone(self, changed=changed)


class MicrophoneView:
    """One who listens to a microphone. arrived: called when a window is there, on the microphone's thread.

    is_newest_only: windows that come before the next is asked for are none of its business.
    """

    def __init__(self, microphone: Microphone, arrived: Callable[[], object], *, is_newest_only: bool) -> None:
        self.cut: Cut | None = None
        self._microphone = microphone
        self._arrived = arrived
        self._is_newest_only = is_newest_only
        self._waiting: deque[Sound] = deque(maxlen=1)

    def ask(self, wanted: Cut) -> None:
        """Have such windows sent from now on; `take` gives the next one. Thread: its rule's."""
        if self.cut == wanted:
            return
        kept = 1 if self._is_newest_only else min(max(round(KEPT_S * wanted.rate / wanted.hop), 1), MOST_KEPT)
        self.cut, self._waiting = wanted, deque(maxlen=kept)
        self._microphone.listen()

    def take(self) -> Sound | None:
        """The next window; None until it is there. Thread: its rule's."""
        return self._waiting.popleft() if self._waiting else None

    def put(self, sound: Sound) -> None:
        """Have one more wait; the oldest goes where there are too many. Thread: the microphone's."""
        self._waiting.append(sound)
        self._arrived()


class Microphone(SourceReader):
    """One microphone, for all who listen to it. silence_s: one that gives no samples for so long is lost."""

    table = "microphones"
    noun = "microphone"
    gives = "windows"

    def __init__(
        self,
        place: MicrophonePlace,
        *,
        silence_s: float = SILENCE_S,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__("", place.shown, silence_s, changed)
        self._address, self._kind = place.address, place.kind
        self._views: weakref.WeakSet[MicrophoneView] = weakref.WeakSet()
        self._last: dict[Cut, int] = {}

    def look(self, arrived: Callable[[], object] = lambda: None, *, is_newest_only: bool = False) -> MicrophoneView:
        """Return the view of one more who listens, as of MicrophoneView. It ends with the last reference to it."""
        view = MicrophoneView(self, arrived, is_newest_only=is_newest_only)
        with self._lock:
            self._views.add(view)
        return view

    def listen(self) -> None:
        """Have the child asked for what a view wants by now. Thread: any."""
        self.wake()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _start_child(self, theirs: socket.socket) -> Child:
        config = os.environ.get("ALSA_CONFIG_PATH", ALSA_CONFIG)
        read: list[Path] = []
        if self._kind == "alsa":
            read = [each for each in (Path(config).parent, *ALSA_SETTINGS) if each.exists()]
        elif self._kind == "file":
            read = [Path(self._address)]
        return start_child(
            read_microphone,
            MicrophoneTask(self._address, self._kind, theirs.fileno(), self._silence_s, config),
            has_network=self._kind in ("rtsp", "http"),
            reads=read,
            writes=[ALSA_DEVICES] if self._kind == "alsa" and ALSA_DEVICES.exists() else [],
            starts_none=True,
            pass_fds=[theirs.fileno()],
        )

    def _serve(self, channel: socket.socket) -> str:
        """Ask for the windows that views want, and hand them over. Return why there are no more."""
        asked: dict[Cut, int] = {}
        before, end_s = dict(self._last), time.monotonic()
        try:
            while not self._closed.is_set():
                due_s = self._step()
                for cut in {view.cut for view in self._listening()} - {None, *asked}:
                    assert cut is not None
                    asked[cut] = len(asked) + 1
                    channel.sendall(SOUND_CUT.pack(asked[cut], *cut))
                    end_s = self._limit_s(asked)
                if not self._wait(min(end_s, due_s) if asked else due_s):
                    if asked and time.monotonic() >= end_s:
                        return "its process says nothing"
                    continue
                end_s = self._limit_s(asked)
                number, count, serial, captured_s = SOUND_HEAD.unpack(
                    self._receive(channel, SOUND_HEAD.size, end_s).tobytes()
                )
                if number == 0:
                    said = self._receive(channel, min(count, MAX_REASON_BYTES), end_s)
                    return said.tobytes().decode("utf-8", "replace")
                found = next((cut for cut, each in asked.items() if each == number and cut.window == count), None)
                if found is None:
                    return "its process gave what is not a window"
                samples = self._receive(channel, 4 * count, end_s).view(np.float32)
                self._last[found] = before.get(found, 0) + serial
                self._mark_online()
                for view in self._listening():
                    if view.cut == found:
                        view.put(Sound(samples, self._last[found], captured_s))
        except (OSError, EOFError) as error:
            return str(error) if isinstance(error, TimeoutError) else "its process ended"
        return ""

    def _listening(self) -> list[MicrophoneView]:
        with self._lock:
            return list(self._views)

    def _limit_s(self, asked: dict[Cut, int]) -> float:
        """By when the child has to say something: windows are as long as they are."""
        longest_s = max(max(cut.window, cut.hop) / cut.rate for cut in asked)
        return time.monotonic() + self._silence_s + GRACE_S + longest_s
