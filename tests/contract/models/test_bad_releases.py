"""Releases that are bad in some way: the one before them goes on answering, and they are never tried again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.updates.journal import SHOWN_BYTES
from tests.contract.updates.updated_device import Fleet, UpdatedDevice
from tests.fakes.update_site import X, onnx_release
from tests.models import onnx_models


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1, which adds 1."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    return fleet


@contextmanager
def traffic(device: UpdatedDevice, ask: Callable[[], object], threads: int = 2) -> Iterator[list[EdgeRuntimeError]]:
    """Requests without a pause until the block ends; the errors that came."""
    stop = threading.Event()
    errors: list[EdgeRuntimeError] = []

    def go_on() -> None:
        while not stop.is_set():
            try:
                ask()
            except EdgeRuntimeError as error:
                errors.append(error)

    workers = [threading.Thread(target=go_on) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield errors
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def refused(device: UpdatedDevice) -> str:
    """That the assigned release is refused, now and for ever; why."""
    action, reason = device.outcome()
    assert action == "refused", reason
    assert device.adds() == 1.0
    again, why = device.outcome()
    assert again == "refused before"
    assert f"was refused here before: {reason[:SHOWN_BYTES]}" in why
    assert [each["reason"] for each in device.status()["refused"]] == [reason[:SHOWN_BYTES]]
    told = [entry["what"] for entry in device.updates.history(1000) if entry["reason"] == reason[:SHOWN_BYTES]]
    assert told == ["rejected"], "a refusal stands in the history once"
    return reason


def test_a_release_with_another_answer_than_its_golden_one_never_serves(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
        fleet.release(2, says=2.5)
        with traffic(device, device.adds) as errors:
            assert "too far from the golden ones" in refused(device)
        assert errors == []


def test_a_release_that_answers_nan_never_serves(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
        fleet.release(2, adds=float("nan"), says=2.0)
        refused(device)


def test_a_release_that_is_not_a_model_never_serves(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
        broken = fleet.folder / "broken.onnx"
        broken.write_bytes(b"no model")
        release(fleet, broken)
        refused(device)


def test_a_release_with_other_shapes_than_it_says_never_serves(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
        release(fleet, onnx_models.mlp(fleet.folder / "mlp"))
        refused(device)


@pytest.mark.long
def test_a_release_that_never_loads_is_ended_and_refused(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()  # a good one may need longer than that
    release(fleet, onnx_models.endless(fleet.folder / "endless"))
    with fleet.device(trial_s=2.0) as device:
        with traffic(device, device.adds) as errors:
            assert "within 2 s" in refused(device)
        assert errors == []


def test_a_release_that_wants_more_memory_than_it_may_have_is_refused(fleet: Fleet) -> None:
    with fleet.device(trial_memory_bytes=64 << 20) as device:
        device.outcome()
        release(fleet, onnx_models.hungry(fleet.folder / "hungry", 512 << 20))
        refused(device)


def test_a_release_that_takes_ten_times_as_long_is_rolled_back_without_any_traffic(fleet: Fleet) -> None:
    with fleet.device(latency_ratio=3.0) as device:
        device.outcome()
        release(fleet, onnx_models.slow(fleet.folder / "slow", 2.0))
        reason = refused(device)
    assert "a run takes" in reason
    assert "asked itself the golden input" in reason


@pytest.mark.long
def test_under_load_it_is_rolled_back_long_before_its_time_is_over_and_no_request_is_lost(fleet: Fleet) -> None:
    install(fleet)
    with fleet.device(latency_ratio=3.0, window_s=3600.0) as device, traffic(device, device.adds) as errors:
        release(fleet, onnx_models.slow(fleet.folder / "slow", 2.0))
        assert "a run takes" in refused(device)
    assert errors == []


def test_a_release_that_fails_for_some_requests_is_rolled_back(fleet: Fleet) -> None:
    install(fleet)
    with fleet.device(window_s=3600.0) as device:
        release(fleet, onnx_models.picky(fleet.folder / "picky", 2.0))
        large = np.full((1, 2), 100.0, np.float32)
        with traffic(device, lambda: device.run("adder", x=large)) as errors:
            assert "requests failed" in refused(device)
        assert {error.code for error in errors} == {"run_failed"}


@pytest.mark.long
@pytest.mark.parametrize("same", [False, True], ids=["other numbers", "the same number"])
def test_a_client_that_sends_what_always_fails_takes_no_good_release_from_a_device(fleet: Fleet, same: bool) -> None:
    release(fleet, onnx_models.picky(fleet.folder / "before", 1.0), says=1.0)
    install(fleet)
    large = np.full((1, 2), 100.0, np.float32)
    with fleet.device(window_s=3.0) as device:
        for _ in range(30):
            device.adds()
        number, counter = (2, 3) if same else (3, 3)
        release(fleet, onnx_models.picky(fleet.folder / "after", 1.0), says=1.0, number=number, counter=counter)
        with traffic(device, lambda: device.run("adder", x=large)):
            assert device.outcome()[0] == "installed"
        assert device.status()["models"]["adder"]["release"] == 3


def install(fleet: Fleet) -> None:
    """Let the device run what is assigned."""
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"


def release(fleet: Fleet, model: Path, *, says: float = 2.0, number: int = 2, counter: int | None = None) -> None:
    """Assign it as release 2 of the model, which says that it adds 2, unless other numbers are given."""
    golden = {"x": X}, {"y": X + np.float32(says)}
    numbers = {"version": number, "counter": counter or number}
    fleet.site.release(onnx_release(model.read_bytes(), *golden, model="adder", **numbers))
    fleet.sync()


def test_a_release_whose_trial_is_killed_again_and_again_is_put_off_twice_and_then_refused(fleet: Fleet) -> None:
    """As the kernel does when the device runs out of memory: the first time it may be chance."""
    with fleet.device() as device:
        device.outcome()
        fleet.release(2)
        for expected in ("put off", "put off", "refused"):
            with killer_of_children():
                action, reason = device.outcome()
            assert action == expected
            assert "its process was killed (SIGKILL)" in reason
            assert device.adds() == 1.0
        assert device.outcome()[0] == "refused before"


@contextmanager
def killer_of_children() -> Iterator[None]:
    """Kills every child process that this one starts until the block ends."""
    stop = threading.Event()

    def children() -> Iterator[str]:
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                yield from (task / "children").read_text().split()

    spared = set(children())

    def hunt() -> None:
        while not stop.is_set():
            for child in children():
                if child not in spared:
                    with suppress(OSError):
                        os.kill(int(child), signal.SIGKILL)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield
    finally:
        stop.set()
        hunter.join()
