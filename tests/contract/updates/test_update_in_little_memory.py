"""A device whose memory holds one version of a model only: the old one leaves first, and the gap is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import EdgeRuntimeError
from tests.contract.models.test_withdrawn_releases import applied, reached
from tests.contract.updates.updated_device import Fleet, UpdatedDevice
from tests.fakes.releases import Made
from tests.fakes.update_site import onnx_release
from tests.models import onnx_models

SIZE = 3072
"""Of a square matrix: 36 MiB."""

ONE, TWO = 66 << 20, 512 << 20
"""Memory for one of them and for two; what a load is measured to take has noise of some MiB."""

ROW = np.ones((1, SIZE), np.float32)


def wide(fleet: Fleet, number: int, says: float | None = None) -> Made:
    """A model of 36 MiB, x -> x * number."""
    path = onnx_models.scaled(fleet.folder / f"wide{number}", float(number), SIZE)
    golden = {"x": ROW}, {"y": ROW * np.float32(number if says is None else says)}
    return onnx_release(path.read_bytes(), *golden, model="wide", version=number, counter=number)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1 published."""
    fleet = Fleet(tmp_path)
    fleet.site.release(wide(fleet, 1))
    return fleet


def factor(device: UpdatedDevice) -> float:
    return float(device.run("wide", x=ROW)[1]["y"][0, 0])


def test_the_old_version_leaves_for_the_new_one_and_the_gap_is_reported(fleet: Fleet) -> None:
    with fleet.device(memory_bytes=ONE) as device:
        assert device.outcome("wide")[0] == "installed", device.status()
        fleet.site.release(wide(fleet, 2))
        fleet.sync()
        (offer,) = device.apply()["offers"]
        assert offer["action"] == "installed", offer["reason"]
        assert offer["gap_s"] > 0
        assert factor(device) == 2.0


def test_a_bad_version_is_tried_when_the_old_one_has_left_and_the_old_one_comes_back(fleet: Fleet) -> None:
    with fleet.device(memory_bytes=ONE) as device:
        assert device.outcome("wide")[0] == "installed", device.status()
        fleet.site.release(wide(fleet, 2, says=2.5))
        fleet.sync()
        (offer,) = device.apply()["offers"]
        assert offer["action"] == "refused"
        assert "too far from the golden ones" in offer["reason"]
        assert factor(device) == 1.0


@pytest.mark.long
def test_where_there_is_memory_for_both_there_is_no_gap(fleet: Fleet) -> None:
    with fleet.device(memory_bytes=TWO) as device:
        assert device.outcome("wide")[0] == "installed", device.status()
        fleet.site.release(wide(fleet, 2))
        fleet.sync()
        (offer,) = device.apply()["offers"]
        assert (offer["action"], offer["gap_s"]) == ("installed", None)


@pytest.mark.long
def test_an_old_version_that_does_not_come_back_is_not_a_pardon_and_a_later_check_brings_it_back(fleet: Fleet) -> None:
    with fleet.device(memory_bytes=ONE) as device:
        assert device.outcome("wide")[0] == "installed", device.status()
    (file,) = (fleet.folder / "state" / "update" / "releases").rglob("model.onnx")
    fleet.site.release(wide(fleet, 2))
    fleet.sync()
    with fleet.device(memory_bytes=ONE, window_s=3600.0) as device:
        outcome = applied(device)
        reached(device, "observing")
        kept = file.rename(file.with_name("kept"))
        device.roll_back("wide")
        assert outcome() == ("refused", "taken back by an operator")
        assert device.status()["models"]["wide"]["not_served"].startswith("release 1: ")
        with pytest.raises(EdgeRuntimeError):
            factor(device)
        kept.rename(file)
        assert device.outcome("wide")[0] == "refused before"
        assert device.status()["models"]["wide"]["not_served"] == ""
        assert factor(device) == 1.0
