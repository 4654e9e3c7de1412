"""Notices to systemd, received by a real datagram socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.telemetry.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket and what it would put into NOTIFY_SOCKET."""
    name = f"edge-runtime-test-{os.getpid()}"
    said = f"@{name}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}" if request.param == "abstract" else said)
        receiver.settimeout(5)
        yield receiver, said


def test_each_notice_arrives_as_systemd_reads_it(manager: tuple[socket.socket, str]) -> None:
    receiver, said = manager
    notifier = Notifier({"NOTIFY_SOCKET": said})
    for send, wanted in (
        (notifier.ready, b"READY=1"),
        (notifier.stopping, b"STOPPING=1"),
        (notifier.watchdog, b"WATCHDOG=1"),
        (lambda: notifier.status("2 models\nready"), b"STATUS=2 models ready"),
    ):
        assert send()
        assert receiver.recv(4096) == wanted


def test_a_reload_carries_the_instant_it_began(manager: tuple[socket.socket, str]) -> None:
    receiver, said = manager
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
    assert Notifier({"NOTIFY_SOCKET": said}).reloading()
    first, second = receiver.recv(4096).decode().split("\n")
    assert first == "RELOADING=1"
    key, _, value = second.partition("=")
    assert key == "MONOTONIC_USEC"
    assert before <= int(value) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000


def test_outside_systemd_nothing_is_sent_and_nothing_fails() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    assert not notifier.ready()
    assert notifier.watchdog_interval_s is None


@pytest.mark.parametrize("said", ["relative/path", "@", "vsock:2:1234", ""])
def test_an_address_that_is_not_a_unix_socket_is_not_a_manager(said: str) -> None:
    assert not Notifier({"NOTIFY_SOCKET": said}).ready()


def test_a_manager_that_went_away_does_not_fail_the_daemon(tmp_path: Path) -> None:
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()


def test_a_manager_that_does_not_read_does_not_stop_the_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        sent = 0
        while notifier.watchdog():
            sent += 1
            assert sent < 1_000_000
        assert sent > 0


@pytest.mark.parametrize(
    ("said", "interval_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval_is_ours_only(said: dict[str, str], interval_s: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/run/notify", **said}).watchdog_interval_s == interval_s
