"""Lives of devices on a disk whose power is cut, each in a process of its own.

For a process of one thread: lives are forked, so that each begins in a few milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from edge_runtime.errors import EdgeRuntimeError
from tests.fakes.dying_disk import DyingDisk
from tests.fakes.release_series import ReleaseSeries
from tests.power_loss.damage import damages, is_at_the_end
from tests.power_loss.device import Device, Fact
from tests.power_loss.loop_disk import FileSystem, LoopDisk

LIMIT_S = 600.0
HELD, OVER, CLEAN = "held", "over", "clean"


@dataclass(frozen=True, slots=True)
class Cut:
    """When the power goes. at: the device stops before (or `after`) its durable call of that number, and the power is
    cut `delay_s` later; 0: it is cut while the device goes on, when that has told `facts` facts.
    """

    at: int
    after: bool = False
    facts: int = 0
    delay_s: float = 0.0


def suffer(kind: FileSystem, folder: Path, series: ReleaseSeries, cuts: Sequence[Cut]) -> list[str]:
    """Lead one life after another on a disk whose power is cut; when a device is at the end, begin with a new one.

    What is damaged after each cut is the answer, a line each.
    """
    found: list[str] = []
    facts: list[Fact] = []
    device = 0
    with closing(LoopDisk(kind, folder)) as disk:
        disk.mount()
        for number, cut in enumerate(cuts, 1):
            state = disk.path / str(device)
            told, was_over = _live_until(cut, disk, state, series)
            facts += told
            found += [f"{kind.name}, device {device}, {cut}: {damage}" for damage in damages(state, series, facts)]
            if was_over or number == len(cuts):
                Device(state, series, facts.append).live()
                if not is_at_the_end(state, series):
                    found.append(f"{kind.name}, device {device}, {cut}: it cannot come to the end")
                facts, device = [], device + 1
    return found


# ---- private --------------------------------------------------------------------------------------------------------


def _live_until(cut: Cut, disk: LoopDisk, state: Path, series: ReleaseSeries) -> tuple[list[Fact], bool]:
    """Let a device live until the power is cut, and give the disk its power back: what it told, and if it was over."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_live, args=(theirs, state, series, cut))
    try:
        child.start()
        theirs.close()
        return _follow(ours, cut, disk)
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()
        disk.restore()


def _follow(pipe: Connection, cut: Cut, disk: LoopDisk) -> tuple[list[Fact], bool]:
    """Cut the power when it is time: what the device had told by then was durable. After it, every error is clean."""
    facts: list[Fact] = []
    message: Fact | str = ""
    for message in _messages(pipe):
        if not isinstance(message, tuple):
            break
        facts.append(message)
        if cut.at == 0 and len(facts) > cut.facts:
            break
    is_on = isinstance(message, tuple) and cut.at == 0
    assert is_on or message in (HELD, OVER), f"the device ended after {message}; see what it said"
    time.sleep(cut.delay_s)
    disk.cut()
    if is_on:
        # It goes on until a call fails. What it tells meanwhile counts for nothing: in the very moment of the cut,
        # ext4's fsync was seen to answer well for what its journal had just dropped. A real cut leaves nobody to tell.
        for message in _messages(pipe):
            if not isinstance(message, tuple):
                break
            if message[0] == "sweep":
                facts.append(message)
        assert message in (CLEAN, OVER), f"a cut is a clean error; after {message}, see what the device said"
    return facts, message == OVER


def _messages(pipe: Connection) -> Iterator[Fact | str]:
    while pipe.poll(LIMIT_S):
        try:
            yield pipe.recv()
        except EOFError:
            return
    raise TimeoutError(f"the device said nothing for {LIMIT_S:g} s")


def _live(pipe: Connection, state: Path, series: ReleaseSeries, cut: Cut) -> None:
    def hold() -> None:
        pipe.send(HELD)
        pipe.recv()  # nothing comes any more

    try:
        Device(state, series, pipe.send, disk=DyingDisk(cut.at, hold, after=cut.after, syncs=True)).live()
    except EdgeRuntimeError:
        pipe.send(CLEAN)
    else:
        pipe.send(OVER)
    pipe.recv()
