"""Power cut at any moment of an update: whatever the device had told of is there afterwards, whole, and it goes on.

Over 300 cuts of real file systems. Needs root and loop devices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.dying_disk import DyingDisk
from tests.fakes.fork_server import forking_from
from tests.fakes.release_series import ReleaseSeries, publish_series
from tests.models.onnx_models import wide
from tests.power_loss.cut_life import Cut, suffer
from tests.power_loss.device import Device
from tests.power_loss.loop_disk import FILE_SYSTEMS, FileSystem, why_no_cut

pytestmark = [pytest.mark.long, pytest.mark.root]

SIZES = (100, 110, 500)
"""Of the releases' matrices: the last one has a megabyte, which is written in many pieces."""


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> ReleaseSeries:
    """Three releases; the device finds the second to be bad."""
    folder = tmp_path_factory.mktemp("published")
    return publish_series(folder, "wide", lambda path, version: wide(path, SIZES[version - 1]), len(SIZES))


@pytest.fixture(scope="module")
def calls(series: ReleaseSeries, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many durable calls a whole life makes."""
    disk = DyingDisk()
    Device(tmp_path_factory.mktemp("counted"), series, lambda fact: None, disk=disk).live()
    assert len(disk.calls) > 200
    return len(disk.calls)


@pytest.fixture(params=FILE_SYSTEMS, ids=lambda kind: kind.name)
def file_system(request: pytest.FixtureRequest, tmp_path: Path) -> FileSystem:
    kind: FileSystem = request.param
    reason = why_no_cut(kind, tmp_path / "probe")
    if reason is not None:
        pytest.skip(reason)
    return kind


# Writing back takes its time: ext4 commits its journal each 5 s, and what was never synced may be named by then.
@pytest.mark.parametrize(("delay_s", "disks", "cuts"), [(0.0, 2, 33), (1.0, 6, 4), (7.0, 16, 1)])
def test_each_fact_reported_before_a_power_cut_is_there_after_it_and_the_update_completes(
    file_system: FileSystem, series: ReleaseSeries, calls: int, tmp_path: Path, delay_s: float, disks: int, cuts: int
) -> None:
    plans = [list(plan(f"{file_system.name} {delay_s} {number}", calls, cuts, delay_s)) for number in range(disks)]
    with ProcessPoolExecutor(disks, forking_from("pytest", "tests.power_loss.cut_life")) as pool:
        lives = [
            pool.submit(suffer, file_system, tmp_path / str(number), series, each) for number, each in enumerate(plans)
        ]
        assert [damage for life in lives for damage in life.result()] == []


def plan(seed: str, calls: int, count: int, delay_s: float) -> Iterator[Cut]:
    """The cuts of one disk, the same each time: most at a chosen call, every fourth in full flight."""
    chance = random.Random(seed)
    for _ in range(count):
        if delay_s == 0 and chance.random() < 0.25:
            yield Cut(0, facts=chance.randrange(20))
        else:
            yield Cut(chance.randint(1, calls), after=chance.random() < 0.5, delay_s=delay_s)
