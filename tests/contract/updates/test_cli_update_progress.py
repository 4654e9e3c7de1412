"""`edge-runtime update` while the daemon is at work: what is seen of it, and what Ctrl-C leaves."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_runtime import Client
from edge_runtime.daemon.daemon import Daemon
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.fakes.updates import STATUS, STEP, FakeUpdates, checked, offered


@pytest.fixture(scope="module")
def updates() -> FakeUpdates:
    return FakeUpdates()


@pytest.fixture(scope="module")
def daemon(updates: FakeUpdates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder: Path = tmp_path_factory.mktemp("updates")
    (folder / "models").mkdir()
    with running_daemon(folder / "models", folder / "run", updates=updates) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _idle(updates: FakeUpdates) -> None:
    updates.told = STATUS


def at_work(**changed: Any) -> dict[str, Any]:
    """What the updater tells while a release is under way."""
    return {**STATUS, "under_way": {**STEP, **changed}}


@contextmanager
def command(daemon: Daemon, *words: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A command line that runs meanwhile."""
    environment = {**os.environ, "EDGE_RUNTIME_ENDPOINT": daemon.endpoints[1], "COLUMNS": "100", "TERM": "xterm"}
    asked = [sys.executable, "-m", "edge_runtime", "update", *words]
    with subprocess.Popen(asked, env=environment, text=True, **streams) as child:
        try:
            yield child
        finally:
            child.kill()


def test_without_a_terminal_each_step_is_one_line(daemon: Daemon, updates: FakeUpdates) -> None:
    with command(daemon, "apply", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "looking what is offered …\n"
        order = updates.orders.get(timeout=ANSWER_S)
        updates.told = at_work()
        assert child.stderr.readline() == "digits release 4 (version 3): fetching …\n"
        updates.told = at_work(done_bytes=40 << 20)
        updates.told = at_work(state="observing", total_bytes=0)
        assert child.stderr.readline() == "digits release 4 (version 3): observing …\n"
        order.done(checked(offered("installed", "as fast as before")))
        out, err = child.communicate(timeout=ANSWER_S)
        assert (child.returncode, err) == (0, "")
        assert "installed  as fast as before" in out


def test_on_a_terminal_a_bar_shows_the_bytes_that_are_here(daemon: Daemon, updates: FakeUpdates) -> None:
    ours, theirs = pty.openpty()
    with closing(os.fdopen(ours, "rb", 0)) as terminal:
        with command(daemon, "apply", stdout=subprocess.PIPE, stderr=theirs) as child:
            os.close(theirs)
            order = updates.orders.get(timeout=ANSWER_S)
            updates.told = at_work()
            wait_for("fetching  ██████░░░░░░░░░░░░░░░░░░  12.0 MiB of 48.0 MiB", terminal)
            order.done(checked(offered("refused", "too slow")))
            out, _ = child.communicate(timeout=ANSWER_S)
            assert child.returncode == 1
        assert "refused  too slow" in out


def wait_for(text: str, terminal: Any) -> None:
    """Read until a text was shown. Raises OSError when the terminal's other side has left."""
    seen = b""
    while text.encode() not in seen:
        seen += terminal.read(1 << 16)


def test_ctrl_c_leaves_the_daemon_at_work_and_says_so(daemon: Daemon, updates: FakeUpdates) -> None:
    updates.told = at_work()
    with command(daemon, "apply", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        order = updates.orders.get(timeout=ANSWER_S)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=ANSWER_S)
        assert child.returncode == 130
    assert "The daemon continues; `edge-runtime update status` shows its progress." in err
    assert out == ""
    assert "Traceback" not in err
    order.done(checked())
    with Client(daemon.endpoints[1]) as client:
        assert client.update_status()["under_way"] == STEP


def test_a_daemon_that_goes_away_ends_the_wait(updates: FakeUpdates, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", updates=updates) as daemon,
        command(daemon, "apply", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child,
    ):
        updates.orders.get(timeout=ANSWER_S)
        daemon.stop()
        _, err = child.communicate(timeout=ANSWER_S)
        assert child.returncode == 1
    assert "connection" in err
    assert "Traceback" not in err
