"""Sockets on the disk: who may connect, and that making one takes nothing from what other threads make meanwhile."""

from __future__ import annotations

import re
import socket
import stat
import threading
from itertools import count
from pathlib import Path

import pytest

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.doors.binding import listen_early
from edge_runtime.doors.zmq.bind import bind_router
from edge_runtime.errors import AddressTaken, ConfigError


def test_a_folder_that_another_thread_makes_while_a_socket_is_bound_can_be_entered(tmp_path: Path) -> None:
    stop = threading.Event()

    def make_folders() -> None:
        for number in count():
            if stop.is_set():
                return
            (tmp_path / f"folder{number}").mkdir()

    maker = threading.Thread(target=make_folders)
    maker.start()
    try:
        for number in range(100):
            bound = bind_router(f"ipc://{tmp_path}/s{number}", ZmqSettings())
            bound.close()
            bound.release()
    finally:
        stop.set()
        maker.join()
    modes = {stat.S_IMODE(folder.stat().st_mode) & 0o700 for folder in tmp_path.glob("folder*")}
    assert modes == {0o700}


def test_a_socket_is_for_its_owner_and_its_group(tmp_path: Path) -> None:
    bound = bind_router(f"ipc://{tmp_path}/s", ZmqSettings())
    try:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    finally:
        bound.release()


def test_a_slip_in_the_path_of_a_socket_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/nosuch is not there; make it, or name"):
        bind_router(f"ipc://{tmp_path}/nosuch/folder/s", ZmqSettings())
    assert not list(tmp_path.iterdir())
    bind_router(f"ipc://{tmp_path}/folder/s", ZmqSettings()).release()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ipc:///tmp/" + "x" * 120, "the path has 125 bytes and a socket's path may have 107; choose a shorter folder"),
        ("ipc://@" + "x" * 108, "the name has 108 bytes and a socket's may have 107; choose a shorter one"),
        ("ipc:///tmp/a\0b", "wanted ipc:///path or tcp://address:port"),
        ("tcp://[fe80::1]:0", r"Invalid argument; .* name the interface too: tcp://\[fe80::1%eth0\]:port"),
    ],
    ids=["long-path", "long-name", "nul", "link-local"],
)
def test_an_endpoint_that_the_system_calls_invalid_is_explained(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bind_router(address, ZmqSettings(insecure=True))


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:x", "tcp://127.0.0.1:65536", "tcp://no.such.host.invalid:1", "ipc://"]
)
def test_an_endpoint_that_can_never_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        bind_router(address, ZmqSettings(insecure=True))


def test_a_client_that_connects_while_the_daemon_is_still_imported_is_met_when_its_socket_is_bound(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.sock"
    early = listen_early(path)
    assert early is not None
    assert listen_early(path) is None, "another daemon begins there"
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as later:
        client.connect(str(path))
        bound = bind_router(f"ipc://{path}", ZmqSettings(), early=early)
        try:
            early.release()  # what was taken stays
            later.connect(str(path))
            bound.socket.setblocking(True)
            for _ in range(2):
                bound.socket.accept()[0].close()
        finally:
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


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("tcp://127.0.0.1:*", r"tcp://127\.0\.0\.1:\d+"),
        ("tcp://lo:*", r"tcp://127\.0\.0\.1:\d+"),
        ("tcp://[::1]:*", r"tcp://\[::1\]:\d+"),
        ("ipc://@edge-runtime-test-name", "ipc://@edge-runtime-test-name"),
    ],
)
def test_an_endpoint_is_reported_as_a_client_names_it(address: str, found: str) -> None:
    bound = bind_router(address, ZmqSettings())
    try:
        assert re.fullmatch(found, bound.address)
    finally:
        bound.release()


def test_a_port_that_another_process_has_is_reported_as_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressTaken, match="free it, or name another"):
        bind_router(f"tcp://127.0.0.1:{taken.getsockname()[1]}", ZmqSettings())
