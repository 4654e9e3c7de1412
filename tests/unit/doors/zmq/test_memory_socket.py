"""The memory socket and its client where a process may open no further file: what is said, kept, and done later."""

from __future__ import annotations

import array
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.zmq.client_memory import ALLOCATE, ASK, FREE, OK, PROTOCOL, TOLD, ClientMemory
from edge_runtime.doors.zmq.memory_socket import MemorySocket
from edge_runtime.errors import QueueFull
from edge_runtime.hosts.regions import RegionBounds, Regions
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.descriptors import no_descriptor_left

if TYPE_CHECKING:
    from typing_extensions import Self

ANSWER_S = 20.0
MIB = 1 << 20
SECRET = bytes(16)


class PreparedDaemon(threading.Thread):
    """The daemon's side of one memory connection, whose regions are open before they are asked for."""

    def __init__(self, path: Path, regions: int = 4) -> None:
        super().__init__()
        self.freed: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._files = [os.memfd_create("region", os.MFD_CLOEXEC) for _ in range(regions)]
        for each in self._files:
            os.ftruncate(each, 4 * MIB)

    def run(self) -> None:
        """Answer one client until it goes."""
        accepted, _ = self._listener.accept()
        number = 0
        with accepted:
            while asked := accepted.recv(ASK.size):
                _, operation, argument = ASK.unpack(asked)
                if operation == FREE:
                    self.freed.append(argument)
                    continue
                assert operation == ALLOCATE
                number += 1
                rights = array.array("i", [self._files[number - 1]])
                told = TOLD.pack(PROTOCOL, OK, number, 4 * MIB, SECRET)
                accepted.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(ANSWER_S)
        assert not self.is_alive()
        self._listener.close()
        for each in self._files:
            os.close(each)


@pytest.mark.parametrize("spare", [0, 1], ids=["none-to-receive-it", "none-to-map-it"])
def test_a_client_without_descriptors_is_told_so_keeps_its_arrays_and_gives_the_region_back(
    spare: int, tmp_path: Path
) -> None:
    with PreparedDaemon(tmp_path / "i.sock.memory") as daemon:
        memory = ClientMemory(f"ipc://{tmp_path / 'i.sock'}")
        try:
            first = memory.allocate(3 * MIB, "u1")
            assert first is not None
            memory.attached = 7
            with no_descriptor_left(spare), pytest.raises(QueueFull, match=r"Too many open files .*ulimit -n"):
                memory.allocate(3 * MIB, "u1")
            places = memory.call_places({"x": first}, {})
            assert places is not None
            assert places.connection == 7
            again = memory.allocate(3 * MIB, "u1")
            assert again is not None
        finally:
            memory.close()
    assert daemon.freed == [2]


def test_a_client_that_cannot_open_a_socket_is_told_so_and_connects_later(tmp_path: Path) -> None:
    with PreparedDaemon(tmp_path / "i.sock.memory"):
        memory = ClientMemory(f"ipc://{tmp_path / 'i.sock'}")
        try:
            with no_descriptor_left(), pytest.raises(QueueFull, match="Too many open files"):
                memory.allocate(8, "u1")
            assert memory.allocate(8, "u1") is not None
        finally:
            memory.close()


# ---- the daemon -----------------------------------------------------------------------------------------------------


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def loop(metrics: Metrics) -> Iterator[IoLoop]:
    made = IoLoop(metrics)
    yield made
    made.close()


@pytest.fixture
def door(loop: IoLoop, tmp_path: Path) -> Iterator[MemorySocket]:
    regions = Regions(RegionBounds(64 * MIB, 64 * MIB, 64 * MIB))
    made = MemorySocket(loop, tmp_path / "memory", regions, 0o600, Descriptors(1 << 20))
    made.start()
    yield made
    made.close()
    regions.close()


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(ANSWER_S)
    client.connect(str(path))
    return client


def test_a_daemon_without_descriptors_waits_for_its_next_beat_and_then_takes_the_client(
    door: MemorySocket, loop: IoLoop, metrics: Metrics, tmp_path: Path
) -> None:
    with connected(tmp_path / "memory") as client:
        with no_descriptor_left():
            for _ in range(5):
                loop.turn(0)
        assert metrics.counters()["memory_refused"] == 1, "it looked again in each round"
        loop.sweep()
        loop.turn(0)
        client.send(ASK.pack(PROTOCOL, ALLOCATE, mmap.PAGESIZE))
        loop.turn(0)
        told, rights, _, _ = client.recvmsg(TOLD.size, socket.CMSG_SPACE(4))
        assert TOLD.unpack(told)[1:4] == (OK, 1, mmap.PAGESIZE)
        os.close(array.array("i", rights[0][2])[0])
