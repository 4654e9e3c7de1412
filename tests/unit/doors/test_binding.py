"""Sockets of doors: what is replaced at a path, who may connect, and who owns it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edge_runtime.doors.binding import IPC_MODE, SocketFiles, bind_tcp, bind_unix, lock_path
from edge_runtime.errors import AddressTaken


def test_a_stale_socket_is_replaced_and_its_group_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_unix(path, IPC_MODE).close()
    with bind_unix(path, IPC_MODE, socket.SOCK_SEQPACKET) as bound:
        assert bound.type == socket.SOCK_SEQPACKET
        assert path.stat().st_mode & 0o777 == IPC_MODE


def test_a_file_that_is_not_a_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("an owner's notes")
    with pytest.raises(FileExistsError, match="not a socket"):
        bind_unix(path, IPC_MODE)
    assert path.read_text() == "an owner's notes"


def test_a_path_has_one_owner_until_its_sockets_are_released(tmp_path: Path) -> None:
    path, ours, others = tmp_path / "s", SocketFiles(), SocketFiles()
    ours.lock(path, f"unix:{path}")
    bind_unix(path, IPC_MODE).close()
    ours.add(path)
    with pytest.raises(AddressTaken, match="another daemon serves unix:"):
        others.lock(path, f"unix:{path}")
    ours.release()
    assert not path.exists()
    others.lock(path, f"unix:{path}")
    others.release()


def test_a_lock_that_a_killed_daemons_child_still_holds_is_waited_for_and_a_daemons_is_not_for_ever(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    daemons = lock_path(path, "ipc://s")
    childs = [os.dup(daemons)]  # what a child has, between its fork and the program that it executes
    with pytest.raises(AddressTaken, match="another daemon serves ipc://s"):
        lock_path(path, "ipc://s", looks=3, pause=lambda _s: None)
    os.close(daemons)
    with pytest.raises(AddressTaken):
        lock_path(path, "ipc://s")
    next_one = lock_path(path, "ipc://s", looks=3, pause=lambda _s: os.close(childs.pop()))
    os.close(next_one)
    assert childs == []


def test_a_port_that_another_listens_on_is_refused() -> None:
    with bind_tcp("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bind_tcp("127.0.0.1", first.getsockname()[1])
