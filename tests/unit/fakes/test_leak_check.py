"""The leak check itself: each kind of leftover is seen, and what has ended is not."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

from tests.conftest import held_now, leaks


def test_a_thread_that_still_runs_is_a_leak_until_it_ends() -> None:
    before = held_now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-behind")
    thread.start()
    assert leaks(before, held_now()) == ["thread 'left-behind' still runs"]
    stop.set()
    thread.join()
    assert leaks(before, held_now()) == []


def test_an_open_socket_is_a_leak_until_it_is_closed() -> None:
    before = held_now()
    left = socket.socket()
    found = leaks(before, held_now())
    assert len(found) == 1
    assert found[0].startswith("socket socket:[")
    left.close()
    assert leaks(before, held_now()) == []


def test_a_child_process_is_a_leak_until_it_is_waited_for() -> None:
    before = held_now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = leaks(before, held_now())
        assert len(found) == 1
        assert f"child process {child.pid}" in found[0]
    assert leaks(before, held_now()) == []
