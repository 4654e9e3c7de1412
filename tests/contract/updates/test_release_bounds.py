"""Signed bounds of a release: a device with nothing to compare it with holds it to them, and refuses it for good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.updates.manifest import ReleaseBounds
from tests.contract.updates.updated_device import Fleet
from tests.fakes.update_site import onnx_release
from tests.models import onnx_models


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


IMPOSSIBLE_MS, EASY_MS = 1e-6, 1e6


def test_a_fresh_device_refuses_a_release_that_breaks_its_bound_of_run_times_for_good(fleet: Fleet) -> None:
    fleet.release(1, bounds=ReleaseBounds({"*": IMPOSSIBLE_MS}))
    with fleet.device() as device:
        action, reason = device.outcome()
        assert (action, "its signed bound here is 1e-06 ms" in reason) == ("refused", True), reason
        assert device.status()["models"] == {}
        assert device.outcome()[0] == "refused before"
    with fleet.device() as device:  # flashed anew it would refuse it again; started again it remembers
        assert device.outcome()[0] == "refused before"


def test_a_release_within_its_bounds_is_kept_and_bounds_of_other_profiles_say_nothing(fleet: Fleet) -> None:
    fleet.release(1, bounds=ReleaseBounds({"jetson-orin": IMPOSSIBLE_MS, "*": EASY_MS}, 0.0, None))
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
        fleet.release(2, bounds=ReleaseBounds({"jetson-orin": IMPOSSIBLE_MS}))
        assert device.outcome()[0] == "installed"


def test_a_release_whose_golden_rows_disagree_beyond_its_bound_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    """Its outputs are within the tolerance: the bound alone tells which score must be the highest."""
    weights = onnx_models.numpy_helper.from_array(np.ones(2, np.float32), "w")
    data = onnx_models.add_weights(tmp_path / "ones", weights).read_bytes()
    x = np.array([[1, 1.0001], [3, 1], [4, 1], [5, 1]], np.float32)
    claimed = x + 1
    claimed[0] = claimed[0, ::-1].copy()
    with fleet.device() as device:
        for number, bound, wanted in ((1, 0.7, "installed"), (2, 0.8, "refused")):
            bounds = ReleaseBounds(min_agreement=bound)
            made = onnx_release(
                data, {"x": x}, {"y": claimed}, model="adder", version=number, counter=number, bounds=bounds
            )
            fleet.site.release(made)
            fleet.sync()
            action, reason = device.outcome()
            assert action == wanted, reason
    assert "the highest score is the golden one's in 3 of 4 rows; its signed bound is 80.0%" in reason
