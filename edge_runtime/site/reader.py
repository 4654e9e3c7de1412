"""A source that a child reads, as a camera or a microphone: whether it gives anything, and when it is tried again.

Owns: the child's life, the state of the source, and the wait after a loss. A thread of its own starts the child and
talks to it, since the kernel ends a child with the thread that made it. It drives the rules that take from the source,
too, since each further thread that wakes for a frame costs more than its work.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from edge_runtime.hosts.regions import Regions
from edge_runtime.sandbox.child import Child

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0
"""The wait after a source is lost doubles from one to the other, and starts anew with what it gives. A camera that
restarts is back in half a minute; one that is gone costs a child process twice a minute."""

GRACE_S = 5.0
"""Time for a child to report the longest silence: it opens and decodes on cores that models use."""

MAX_REASON_BYTES = 1000

Bytes = npt.NDArray[np.uint8]


class Driven(Protocol):
    """A rule's part that takes from a source. Thread: the reader's."""

    def step(self, now_s: float) -> float:
        """Do what is due. Return the instant of the next call, at the latest; `SourceReader.wake` is one too."""
        ...


class SourceState(Enum):
    """Whether a source gives anything. What it gives makes it online, a loss lost; before either it is starting."""

    STARTING = "starting"
    ONLINE = "online"
    LOST = "lost"


class SourceReader(ABC):
    """One source, for all rules that take from it. A kind of source says what its child is, and how it is asked.

    name: empty where it has none. place: where it is, without a password. shown: its name, or its place. reason: why it
    gives nothing; empty while it does or nothing was asked for yet. losses: how often it was lost. changed: called when
    `state` has changed, on the reader's thread.
    """

    table: ClassVar[str]
    """Of the sources of this kind: in the device's state, and of its metric."""

    noun: ClassVar[str]
    """Of one, in logs and metrics."""

    gives: ClassVar[str]
    """What it gives, in logs."""

    def __init__(self, name: str, place: str, silence_s: float, changed: Callable[[], object]) -> None:
        self.name = name
        self.place = place
        self.shown = name or place
        self.reason = ""
        self.losses = 0
        self.state = SourceState.STARTING
        self._silence_s = silence_s
        self._changed = changed
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wait_s = RETRY_MIN_S
        self._driven: tuple[Driven, ...] = ()  # Invariant: replaced whole, under the lock.
        self._bell: socket.socket | None = None
        self._poller = select.poll()
        self._thread = threading.Thread(target=self._work, name=f"edge-source-{self.noun}", daemon=True)

    def start(self) -> None:
        """Begin to read. Idempotent."""
        if self._thread.ident is not None:
            return
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._poller.register(self._rung, select.POLLIN)
        self._thread.start()

    def drive(self, driven: Driven) -> None:
        """Have a rule's part called while there is a child that reads. Idempotent. Thread: any."""
        with self._lock:
            if driven not in self._driven:
                self._driven = (*self._driven, driven)
        self.wake()

    def leave(self, driven: Driven) -> None:
        """Call it no more. Thread: any."""
        with self._lock:
            self._driven = tuple(each for each in self._driven if each is not driven)

    def wake(self) -> None:
        """Have all that is driven called soon. Thread: any."""
        if self._bell is not None and threading.get_ident() != self._thread.ident:
            with contextlib.suppress(OSError):  # full, so it is heard; or closed
                self._bell.send(b".")

    def close(self) -> None:
        """End the child and the thread, at once. Idempotent."""
        if self._closed.is_set() or self._bell is None:
            return
        self._closed.set()
        self.wake()
        self._thread.join()
        self._bell.close()
        self._rung.close()

    # ---- of each kind; thread: the reader's -------------------------------------------------------------------------

    @abstractmethod
    def _start_child(self, theirs: socket.socket) -> Child:
        """Start a child that has this end of the channel. Raises OSError."""

    @abstractmethod
    def _serve(self, channel: socket.socket) -> str:
        """Talk to a new child until it ends, or this is closed. Return why the source gives no more."""

    # ---- for each kind ----------------------------------------------------------------------------------------------

    def _receive(self, channel: socket.socket, nbytes: int, end_s: float) -> Bytes:
        """Receive `nbytes`. Raises TimeoutError, EOFError: the child ended, or this is closed; OSError."""
        got = np.empty(nbytes, np.uint8)
        left: memoryview = got.data
        while left:
            if not self._wait(end_s):
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

    def _step(self) -> float:
        """Call all that is driven. Return the instant of the next call, at the latest."""
        now_s = time.monotonic()
        return min((each.step(now_s) for each in self._driven), default=math.inf)

    def _wait(self, end_s: float) -> bool:
        """Wait until the channel has something, `end_s`, or the bell, which gives False as well."""
        has_said = False
        ready = self._poller.poll(None if end_s == math.inf else max(end_s - time.monotonic(), 0.0) * 1e3)
        for descriptor, _ in ready:
            if descriptor == self._rung.fileno():
                self._rung.recv(1 << 10)
            else:
                has_said = True
        return has_said

    def _mark_online(self) -> None:
        if self.reason:
            said = f"a {self.noun} gives {self.gives} again"
            log.info(said, extra={self.noun: self.shown})
        self.reason, self._wait_s = "", RETRY_MIN_S
        self._become(SourceState.ONLINE)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                reason = self._read()
            except OSError as error:
                reason = f"no process can be made: {error.strerror}"
            except Exception:
                log.exception("a bug interrupted the reading of a source", extra={self.noun: self.shown})
                reason = "a bug interrupted it; see the log"
            if self._closed.is_set():
                return
            self._mark_lost(reason)
            self._pause(self._wait_s)
            self._wait_s = min(self._wait_s * 2, RETRY_MAX_S)

    def _read(self) -> str:
        """Read the source in a child. Return why that ended."""
        ours, theirs = socket.socketpair()
        with ours:
            child: Child | None = None
            try:
                with theirs:
                    child = self._start_child(theirs)
                self._poller.register(ours, select.POLLIN)
                return self._serve(ours)
            finally:
                with contextlib.suppress(KeyError):  # there was no child
                    self._poller.unregister(ours)
                if child is not None:
                    child.end()

    def _pause(self, wait_s: float) -> None:
        """Wait, unless it is closed."""
        end_s = time.monotonic() + wait_s
        while not self._closed.is_set() and time.monotonic() < end_s:
            self._wait(end_s)

    def _mark_lost(self, reason: str) -> None:
        self.losses += 1
        if reason != self.reason:
            said = f"a {self.noun} gives no {self.gives}"
            log.warning(said, extra={self.noun: self.shown, "reason": reason})
        self.reason = reason
        self._become(SourceState.LOST)

    def _become(self, state: SourceState) -> None:
        if state is not self.state:
            self.state = state
            self._changed()


class SourcePlace(Protocol):
    """The source that a rule names, as a value: rules that name the same share one reader."""

    @property
    def name(self) -> str:
        """Return its name; empty where it has none."""
        ...

    def open(self, changed: Callable[[], object], regions: Regions | None) -> SourceReader:
        """Return a reader, which who calls starts. changed, regions: as of the readers."""
        ...


class Readers:
    """The sources that are read, by their places. changed: called when the state of one changed, on its own thread.

    regions: where frames of cameras lie; None: each is copied.
    """

    def __init__(self, changed: Callable[[], object], regions: Regions | None = None) -> None:
        self._changed = changed
        self._regions = regions
        self._open: dict[SourcePlace, SourceReader] = {}

    def all(self) -> list[SourceReader]:
        """Those that are read."""
        return list(self._open.values())

    def open(self, places: Iterable[SourcePlace]) -> None:
        """Make the readers of these places that are not there yet; who calls starts them."""
        for place in places:
            if place not in self._open:
                self._open[place] = place.open(self._changed, self._regions)

    def at(self, place: SourcePlace) -> SourceReader:
        """The reader of a place that is open."""
        return self._open[place]

    def leave(self, places: Iterable[SourcePlace]) -> list[SourceReader]:
        """Forget all but these places. Return the readers that are to be closed."""
        kept = set(places)
        gone = [place for place in self._open if place not in kept]
        return [self._open.pop(place) for place in gone]
