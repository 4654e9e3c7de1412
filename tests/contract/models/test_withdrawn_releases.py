"""An operator takes a release back while it is under way: wherever it is, the one before serves, and it never comes."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.durable import SYSTEM_DISK, SystemDisk
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.states import ReleaseState
from tests.contract.updates.updated_device import ANSWER_S, Fleet, UpdatedDevice
from tests.fakes.http_server import Answer, HttpServer, Request
from tests.fakes.update_site import X, onnx_release
from tests.models import onnx_models


class AskingDisk(SystemDisk):
    """The real disk, at whose commit number `at` somebody asks for something."""

    def __init__(self, at: int, *, is_after: bool) -> None:
        self.ask: Callable[[], object] | None = None
        self._left = at
        self._is_after = is_after

    def commit(self, database: sqlite3.Connection) -> None:  # type: ignore[override]
        """As Disk."""
        self._left -= self.ask is not None
        if self._left == 0 and self.ask is not None and not self._is_after:
            self.ask()
        SYSTEM_DISK.commit(database)
        if self._left == 0 and self.ask is not None and self._is_after:
            self.ask()


class FailingDisk(SystemDisk):
    """The real disk, until it `is_broken`: no commit succeeds then."""

    is_broken = False

    def commit(self, database: sqlite3.Connection) -> None:  # type: ignore[override]
        """As Disk."""
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        SYSTEM_DISK.commit(database)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1 on the device, and 2 to come."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
    fleet.release(2)
    return fleet


@pytest.fixture
def server(fleet: Fleet) -> Iterator[HttpServer]:
    with HttpServer(fleet.site.find) as server:
        yield server


def applied(device: UpdatedDevice) -> Callable[[], tuple[str, str]]:
    """Begins `update apply`; what is returned waits for what became of the release."""
    answered = threading.Event()
    answers: list[Any] = []
    device.updates.apply(lambda result: (answers.append(result), answered.set()))

    def wait() -> tuple[str, str]:
        assert answered.wait(ANSWER_S)
        (offer,) = answers[0]["offers"]
        return offer["action"], offer["reason"]

    return wait


def reached(device: UpdatedDevice, state: str) -> None:
    """Wait until a release is there."""
    looked = threading.Event()
    for _ in range(int(ANSWER_S / 0.01)):
        if device.status()["state"] == state:
            return
        looked.wait(0.01)
    raise AssertionError(device.status())


def never_comes(device: UpdatedDevice) -> None:
    action, reason = device.outcome()
    assert action == "refused before"
    assert "was refused here before: taken back by an operator" in reason
    assert device.adds() == 1.0
    assert [each["reason"] for each in device.status()["refused"]] == ["taken back by an operator"]


def test_one_that_is_being_fetched_is_fetched_no_further_and_never_answers(fleet: Fleet, server: HttpServer) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hold(path: str) -> bytes | None:
        if path.endswith("model.onnx"):
            asked.set()
            assert answer.wait(ANSWER_S)
        return fleet.site.find(path)

    server.find = hold
    with fleet.device(folder=None, url=server.url) as device:
        outcome = applied(device)
        assert asked.wait(ANSWER_S)
        assert device.roll_back("adder") == {"model": "adder", "withdrawn": True}
        answer.set()
        assert outcome() == ("refused", "taken back by an operator")
        assert [entry["what"] for entry in device.updates.history(3)] == ["rejected", "staging", "verifying"]
        never_comes(device)


def test_one_that_cannot_be_fetched_is_not_tried_again(fleet: Fleet, server: HttpServer) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hold(path: str) -> bytes | None:
        if path.endswith("model.onnx"):
            asked.set()
            assert answer.wait(ANSWER_S)
            return None
        return fleet.site.find(path)

    server.find = hold
    with fleet.device(folder=None, url=server.url) as device:
        outcome = applied(device)
        assert asked.wait(ANSWER_S)
        device.roll_back("adder")
        answer.set()
        assert outcome() == ("refused", "taken back by an operator")
        never_comes(device)


@pytest.mark.parametrize("observe", ["swap", "canary", "shadow"])
def test_one_that_is_observed_gives_the_one_before_its_place_back(fleet: Fleet, observe: str) -> None:
    with fleet.device(window_s=3600.0, observe=observe) as device:
        outcome = applied(device)
        reached(device, "observing")
        assert device.roll_back("adder") == {"model": "adder", "withdrawn": True}
        assert outcome() == ("refused", "taken back by an operator")
        never_comes(device)


def test_one_whose_withdrawal_cannot_be_written_down_gives_the_one_before_its_place_back(fleet: Fleet) -> None:
    disk = FailingDisk()
    with fleet.device(window_s=3600.0, disk=disk) as device:
        outcome = applied(device)
        reached(device, "observing")
        disk.is_broken = True
        assert device.roll_back("adder") == {"model": "adder", "withdrawn": True}
        action, reason = outcome()
        assert (action, "cannot be written" in reason) == ("put off", True)
        assert device.adds() == 1.0
        assert device.status()["under_way"] is None
    with fleet.device() as device:
        assert device.adds() == 1.0


def test_one_that_is_being_tried_never_answers(fleet: Fleet) -> None:
    late = onnx_models.endless(fleet.folder / "late").read_bytes()
    fleet.site.release(onnx_release(late, {"x": X}, {"y": X}, model="adder", version=3, counter=3))
    fleet.sync()
    with fleet.device(window_s=0.0, trial_s=4.0) as device:
        outcome = applied(device)
        reached(device, "warming")
        assert device.roll_back("adder") == {"model": "adder", "withdrawn": True}
        assert outcome()[0] == "refused"
        assert device.adds() == 1.0


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_operator_reads_the_true_outcome_at_each_step_at_which_he_asks(fleet: Fleet, is_after: bool) -> None:
    outcomes: set[str] = set()
    for number in range(1, 9):
        disk = AskingDisk(number, is_after=is_after)
        with fleet.device(disk=disk) as device:
            before = device.adds()
            fleet.release(number + 2)
            told: list[Any] = []
            disk.ask = lambda device=device, told=told: device.updates.roll_back("adder", told.append)
            action, reason = device.outcome()
            device.check()  # whatever was asked for before is answered by now
            if told and told[0] == {"model": "adder", "withdrawn": True}:
                assert (action, reason) == ("refused", "taken back by an operator"), number
                assert device.adds() == before
            else:
                assert action == "installed", (number, reason)
                is_back = bool(told) and not isinstance(told[0], EdgeRuntimeError)
                assert device.adds() == (before if is_back else number + 2)
            outcomes.add(action)
    assert outcomes == {"installed", "refused"}


def test_a_stop_in_order_while_a_release_is_fetched_forgives_it_no_crash(fleet: Fleet, server: HttpServer) -> None:
    """Two tries ended the process before; only a stop in the middle of a try is none."""
    made = fleet.release(3)
    with journal(fleet) as known:
        for _ in range(2):
            known.advance(made.release, ReleaseState.WARMING, "2026-11-21T12:00:00Z")
    asked, is_over = threading.Event(), threading.Event()

    def drip(request: Request) -> Answer | None:
        def pieces() -> Iterator[bytes]:
            asked.set()
            for byte in made.files["model.onnx"]:
                yield bytes([byte])
                is_over.wait(0.05)

        return Answer(200, pieces(), says_length=False) if request.path.endswith("model.onnx") else None

    server.answer = drip
    with fleet.device(folder=None, url=server.url) as device:
        outcome = applied(device)
        assert asked.wait(ANSWER_S)
    is_over.set()
    assert outcome()[0] == "put off"
    with journal(fleet) as known:
        assert known.rollouts()["adder"].tries == 2


@contextmanager
def journal(fleet: Fleet) -> Iterator[Journal]:
    journal = Journal(fleet.folder / "state" / "update" / "journal")
    journal.open()
    try:
        yield journal
    finally:
        journal.close()
