"""A device and a signed repository: what is offered is taken, what is not is passed over with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import ModelNotFound, UpdateError
from edge_runtime.request.policy import Allowance
from edge_runtime.updates import observation
from edge_runtime.updates.active import MAX_STARTS
from edge_runtime.updates.journal import Journal
from tests.contract.updates.updated_device import Fleet
from tests.models import onnx_models


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.mark.smoke
def test_a_release_is_installed_and_serves_and_the_next_one_replaces_it(fleet: Fleet) -> None:
    with fleet.device() as device:
        with pytest.raises(ModelNotFound):
            device.adds()
        fleet.release(1)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 1.0
        fleet.release(2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
        assert device.outcome() == ("runs", "")
        (offer,) = device.apply()["offers"]
        assert (offer["action"], offer["version"], offer["release"]) == ("runs", 2, 2)


def test_an_installed_release_serves_after_a_restart_without_a_repository(fleet: Fleet) -> None:
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
    with fleet.device(folder=str(fleet.folder / "nowhere")) as device:
        assert device.adds() == 1.0
        assert not device.apply()["is_ok"]
        assert device.adds() == 1.0


def test_a_check_reports_what_is_there_and_installs_nothing(fleet: Fleet) -> None:
    fleet.release(1)
    with fleet.device() as device:
        (offer,) = device.check()["offers"]
        assert (offer["action"], offer["version"]) == ("available", 1)
        with pytest.raises(ModelNotFound):
            device.adds()


def test_an_operator_goes_back_and_the_release_that_was_left_is_not_taken_again(fleet: Fleet) -> None:
    with fleet.device() as device:
        for number in (1, 2):
            fleet.release(number)
            device.outcome()
        assert device.roll_back("adder") == {"model": "adder", "release": 1}
        assert device.adds() == 1.0
        action, reason = device.outcome()
        assert action == "refused before"
        assert "refused here before" in reason
        with pytest.raises(UpdateError, match="none to go back to"):
            device.roll_back("adder")
    with fleet.device() as device:
        assert device.adds() == 1.0


def test_a_model_that_its_group_no_longer_names_is_taken_away(fleet: Fleet) -> None:
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
        fleet.take_away()
        assert device.apply()["offers"] == ()
        with pytest.raises(ModelNotFound):
            device.adds()
        fleet.release(2)
        assert device.outcome()[0] == "installed"


def test_an_older_release_is_not_taken_even_where_its_model_was_taken_away(fleet: Fleet) -> None:
    fleet.release(2)
    with fleet.device() as device:
        device.outcome()
        fleet.take_away()
        fleet.release(1)
        action, reason = device.outcome()
        assert action == "passed over"
        assert "is older than 2, which was here" in reason


def test_a_release_of_another_profile_is_passed_over_and_says_for_whom_it_is(fleet: Fleet) -> None:
    fleet.release(1, profiles=("jetson-orin",))
    with fleet.device() as device:
        action, reason = device.outcome()
    assert action == "passed over"
    assert "is for jetson-orin; this device's profile is" in reason


def test_with_updates_the_models_folder_is_not_served_unless_that_is_allowed(fleet: Fleet, tmp_path: Path) -> None:
    models = tmp_path / "own"
    onnx_models.mlp(models / "mlp" / "1")
    x = np.zeros((1, 16), np.float32)
    with fleet.device(models=models) as device, pytest.raises(ModelNotFound):
        device.run("mlp", x=x)
    with fleet.device(models=models, require_signed=False) as device:
        assert device.run("mlp", x=x)[0] == 1


def test_after_a_restart_the_release_serves_and_never_the_folders_model_of_its_name(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = tmp_path / "own"
    weights = onnx_models.numpy_helper.from_array(np.full(2, 9.0, np.float32), "w")
    onnx_models.add_weights(models / "adder" / "3", weights)
    fleet.release(1)
    with fleet.device(models=models, require_signed=False) as device:
        device.outcome()
    caplog.clear()
    with caplog.at_level("INFO"), fleet.device(models=models, require_signed=False) as device:
        assert device.adds() == 1.0
    assert [record.version for record in caplog.records if record.message == "loaded"] == [1]


def test_a_release_takes_the_place_of_the_folders_model_of_its_name(fleet: Fleet, tmp_path: Path) -> None:
    models = tmp_path / "own"
    weights = onnx_models.numpy_helper.from_array(np.full(2, 9.0, np.float32), "w")
    onnx_models.add_weights(models / "adder" / "3", weights)
    fleet.release(1)
    with fleet.device(models=models, require_signed=False) as device:
        assert device.adds() == 9.0
        assert device.outcome()[0] == "installed"
        assert device.adds() == 1.0


def test_an_active_release_that_ends_the_process_at_every_start_leaves_its_place_to_the_one_before(
    fleet: Fleet,
) -> None:
    """As after a library was replaced. It is tried anew by the next check, in a child process first."""
    with fleet.device() as device:
        for number in (1, 2):
            fleet.release(number)
            device.outcome()
    _end_starts(fleet, MAX_STARTS)
    with fleet.device() as device:
        assert device.adds() == 1.0
        assert "the process ended 5 times" in device.status()["models"]["adder"]["not_served"]
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
    with fleet.device() as device:
        assert device.adds() == 2.0


def test_a_release_that_was_being_loaded_when_the_process_ended_is_served_after_all_others(fleet: Fleet) -> None:
    """The power may have failed: it is served all the same, after the daemon is ready."""
    with fleet.device() as device:
        fleet.release(1)
        device.outcome()
    _end_starts(fleet, 1)
    with fleet.device() as device:
        assert device.adds() == 1.0
    with fleet.device() as device:
        assert device.adds() == 1.0


def test_a_release_that_ends_the_process_at_every_start_and_has_none_before_it_is_left_out(fleet: Fleet) -> None:
    with fleet.device() as device:
        fleet.release(1)
        device.outcome()
    _end_starts(fleet, MAX_STARTS)
    with fleet.device() as device:
        assert "the process ended 5 times" in device.status()["models"]["adder"]["not_served"]
        (listed,) = device.runtime.models()
        assert listed["state"] == "failed"
        assert "the process ended 5 times" in listed["reason"]


def _end_starts(fleet: Fleet, count: int) -> None:
    """So often the process ended while it loaded the active release."""
    journal = Journal(fleet.folder / "state" / "update" / "journal")
    journal.open()
    for _ in range(count):
        journal.begin_start(journal.active()["adder"])
    journal.close()


def test_an_import_from_where_the_daemon_cannot_look_says_so(fleet: Fleet) -> None:
    with fleet.device() as device:
        with pytest.raises(UpdateError, match="the daemon sees no such folder"):
            device.import_folder(fleet.folder / "no stick")
        with pytest.raises(UpdateError, match="the daemon cannot look there: File name too long"):
            device.import_folder(fleet.folder / ("x" * 5000))


def test_a_release_brings_its_steps_and_labels(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.release(1, settings={"output": {"y": {"labels": ["cat", "dog"], "softmax": True, "top_k": 1}}})
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
        answer = device.runtime.infer("adder", {"x": np.array([[0.0, 9.0]], np.float32)}, raw=False).answer
        assert answer.classes is not None
        assert answer.classes[0].label == "dog"
        assert device.adds() == 1.0  # its own tensors as before


def test_a_device_that_stays_hot_puts_a_release_off_and_serves_the_one_before_until_it_is_cool(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "SLOWED_LIMIT_S", 0.1)
    fleet.release(1)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
        device.runtime.core.dispatcher.allow(Allowance(1, 6, 0.5))
        fleet.release(2)
        action, reason = device.outcome()
        assert (action, "slowed for its heat" in reason) == ("put off", True), reason
        assert device.adds() == 1.0
        assert device.status()["refused"] == []
    with fleet.device() as device:  # which holds nothing against it
        assert device.adds() == 1.0
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
