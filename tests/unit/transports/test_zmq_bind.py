"""Sockets on the disk: who may connect, and that making one takes nothing from what other threads make meanwhile."""

from __future__ import annotations

import stat
import threading
from itertools import count
from pathlib import Path

import pytest
import zmq

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.errors import ConfigError
from edge_runtime.transports.binding import listen_early
from edge_runtime.transports.zmq_bind import bind_router, new_context


def test_a_folder_that_another_thread_makes_while_a_socket_is_bound_can_be_entered(tmp_path: Path) -> None:
    stop = threading.Event()

    def make_folders() -> None:
        for number in count():
            if stop.is_set():
                return
            (tmp_path / f"folder{number}").mkdir()

    maker = threading.Thread(target=make_folders)
    context = new_context()
    maker.start()
    try:
        for number in range(100):
            bound = bind_router(context, f"ipc://{tmp_path}/s{number}", ZmqSettings())
            bound.close()
            bound.release()
    finally:
        stop.set()
        maker.join()
        context.term()
    modes = {stat.S_IMODE(folder.stat().st_mode) & 0o700 for folder in tmp_path.glob("folder*")}
    assert modes == {0o700}


def test_a_socket_is_for_its_owner_and_its_group(tmp_path: Path) -> None:
    context = new_context()
    bound = bind_router(context, f"ipc://{tmp_path}/s", ZmqSettings())
    try:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    finally:
        bound.close()
        context.term()
        bound.release()


def test_a_slip_in_the_path_of_a_socket_makes_no_folders(tmp_path: Path) -> None:
    context = new_context()
    try:
        with pytest.raises(ConfigError, match=f"{tmp_path}/nosuch is not there; make it, or name"):
            bind_router(context, f"ipc://{tmp_path}/nosuch/folder/s", ZmqSettings())
        assert not list(tmp_path.iterdir())
        bound = bind_router(context, f"ipc://{tmp_path}/folder/s", ZmqSettings())
        bound.close()
    finally:
        context.term()
    bound.release()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:x", "tcp://127.0.0.1:65536", "tcp://no.such.host.invalid:1", "ipc://"]
)
def test_an_endpoint_that_can_never_be_is_refused(address: str) -> None:
    context = new_context()
    try:
        with pytest.raises(ConfigError):
            bind_router(context, address, ZmqSettings(insecure=True))
    finally:
        context.term()


def test_who_connects_while_the_daemon_is_still_imported_is_met_when_its_socket_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    early = listen_early(path)
    assert early is not None
    assert listen_early(path) is None, "another daemon begins there"
    context = new_context()
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{path}")
    client.send(b"early")
    bound = bind_router(context, f"ipc://{path}", ZmqSettings(), early=early)
    try:
        early.release()  # what was taken stays
        assert bound.socket.poll(60_000)
        assert bound.socket.recv_multipart()[1:] == [b"early"]
        with context.socket(zmq.DEALER) as later:
            later.connect(f"ipc://{path}")
            later.send(b"later")
            bound.connections.read()  # lets the next one in
            assert bound.socket.poll(60_000)
    finally:
        client.close(linger=0)
        bound.close()
        context.term()
        bound.release()
    assert not path.exists()


def test_an_early_socket_that_nobody_took_is_removed(tmp_path: Path) -> None:
    early = listen_early(tmp_path / "c.sock")
    assert early is not None
    early.release()
    early.release()
    assert not (tmp_path / "c.sock").exists()
    again = listen_early(tmp_path / "c.sock")
    assert again is not None
    again.release()
