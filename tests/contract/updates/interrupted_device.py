"""Lives of a whole device, each in a forked process of its own that a durable call may end."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from edge_runtime.errors import ModelNotFound, NotReady
from edge_runtime.updates.journal import Entry, Journal
from edge_runtime.updates.states import Release
from tests.contract.updates.updated_device import UpdatedDevice, update_settings, updated_device
from tests.fakes.dying_disk import DyingDisk, kill_process
from tests.fakes.fork_server import exit_status, forking_from, start

LIMIT_S = 600.0

WARM = ("pytest", "onnxruntime", "tests.contract.updates.interrupted_device")


@dataclass
class Life:
    """What was seen of one. served: what was added to zeros, from the start on, each change; None: nothing served.

    checked: the answer to `update apply`; None: the process had ended. calls: how many durable calls it made.
    changes: the numbers of those before which the state had changed, where that was asked for.
    """

    served: list[float | None] = field(default_factory=list)
    checked: dict[str, Any] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    changes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device remembers of updates."""

    active: dict[str, Release]
    counters: dict[str, int]
    marks: dict[str, int]
    refused: dict[str, str]
    history: list[Entry]
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Home:
    """Where one device lives: its folder, the mirror that it follows, and the root that it was shipped with.

    syncs: it really syncs, which matters only to one whose power is cut.
    """

    folder: Path
    mirror: Path
    root: bytes
    syncs: bool = False

    def copy(self, folder: Path, mirror: Path | None = None) -> Home:
        """A device in the same state that lives elsewhere, and maybe follows another mirror."""
        if (self.folder / "state").exists():
            shutil.copytree(self.folder / "state", folder / "state")
        return replace(self, folder=folder, mirror=mirror or self.mirror)

    def live(self, at: int = 0, *, watches: bool = False) -> Life:
        """Start, serve, and bring what is assigned, answering all the time. at: SIGKILL at that durable call."""
        context = forking_from(*WARM)
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_live, args=(theirs, self, at, watches))
        with closing(ours):
            start(child)
            theirs.close()
            seen = Life()
            try:
                for name, value in _told(ours):
                    if name == "served":
                        seen.served.append(value)
                    else:
                        setattr(seen, name, value)
            finally:
                status = exit_status(child, LIMIT_S)
        assert status == (0 if seen.calls else -9), f"it ended with {status}; see what it said"
        return seen

    def memory(self, aside: Path) -> Memory:
        """What a restart will find: of a copy, since to look is to write."""
        journal = self.folder / "state" / "update" / "journal"
        if journal.exists():
            shutil.copytree(journal, aside)
        with closing(Journal(aside)) as memory:
            memory.open()
            found = Memory(
                memory.active(),
                memory.counters(),
                memory.marks(),
                memory.refused(),
                memory.history(),
                memory.is_state_lost,
            )
        shutil.rmtree(aside)
        return found


# ---- private --------------------------------------------------------------------------------------------------------


def _told(pipe: Connection) -> Iterator[tuple[str, Any]]:
    while pipe.poll(LIMIT_S):
        try:
            yield pipe.recv()
        except EOFError:
            return
    raise TimeoutError(f"the device said nothing for {LIMIT_S:g} s")


def _live(pipe: Connection, home: Home, at: int, watches: bool) -> None:
    settings = update_settings(home.folder, home.root, folder=str(home.mirror))
    disk = DyingDisk(at, kill_process, syncs=home.syncs, watched=home.folder / "state" if watches else None)
    with updated_device(home.folder, settings, disk=disk) as device:
        last = _adds(device)
        pipe.send(("served", last))
        answered = threading.Event()
        answers: list[Any] = []
        device.updates.apply(lambda answer: (answers.append(answer), answered.set()))
        while not answered.wait(0.005) or last != _adds(device):
            now = _adds(device)
            if now != last:
                pipe.send(("served", now))
                last = now
        pipe.send(("checked", answers[0]))
        pipe.send(("status", device.status()))
    pipe.send(("changes", disk.changes))
    pipe.send(("calls", len(disk.calls)))


def _adds(device: UpdatedDevice) -> float | None:
    try:
        return device.adds()
    except (ModelNotFound, NotReady):
        return None
