"""A disk that is full or failing at any write: a clear error, what was active stays so, and the next try completes."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest

from edge_runtime.errors import StorageFailed
from tests.fakes.dying_disk import DyingDisk, failing
from tests.fakes.release_series import ReleaseSeries, publish_series
from tests.models.onnx_models import wide
from tests.power_loss.damage import damages, is_at_the_end
from tests.power_loss.device import Device, Fact
from tests.power_loss.loop_disk import EXT4, LoopDisk, why_no_cut


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> ReleaseSeries:
    """Three releases; the device finds the second to be bad. The last has a megabyte."""
    sizes = (100, 110, 500)
    return publish_series(
        tmp_path_factory.mktemp("published"), "wide", lambda path, version: wide(path, sizes[version - 1]), len(sizes)
    )


@pytest.mark.long
@pytest.mark.parametrize(("error", "lasts"), [(errno.ENOSPC, True), (errno.EIO, False)], ids=["full", "failing once"])
def test_a_disk_that_fails_at_any_write_is_a_clear_error_and_the_next_try_completes(
    series: ReleaseSeries, tmp_path: Path, error: int, *, lasts: bool
) -> None:
    counted = DyingDisk()
    Device(tmp_path / "whole", series, lambda fact: None, disk=counted).live()
    for number in range(1, len(counted.calls) + 1):
        state = tmp_path / str(number)
        facts: list[Fact] = []
        disk = DyingDisk(number, failing(error), lasts=lasts)
        try:
            Device(state, series, facts.append, disk=disk).live()
        except StorageFailed as failure:
            told = failure.message
        else:
            # What is in the database is there: its second record follows when the disk takes it.
            assert is_at_the_end(state, series), number
            told = os.strerror(error)
        assert os.strerror(error) in told
        if state.exists():
            assert damages(state, series, facts) == []
        Device(state, series, facts.append, disk=DyingDisk()).live()
        assert is_at_the_end(state, series)
        shutil.rmtree(state)


@pytest.mark.root
def test_a_file_system_that_is_really_full_is_a_clear_error_and_the_next_try_completes_when_there_is_space(
    series: ReleaseSeries, tmp_path: Path
) -> None:
    reason = why_no_cut(EXT4, tmp_path / "probe")
    if reason is not None:
        pytest.skip(reason)
    with closing(LoopDisk(EXT4, tmp_path / "full")) as disk:
        disk.mount()
        ballast = disk.path / "ballast"
        failures = 0
        # Less and less space, to the last block.
        for free_bytes in (0, 4 << 10, 16 << 10, 40 << 10, 100 << 10, 200 << 10, 400 << 10, 800 << 10, 1200 << 10):
            state = disk.path / str(free_bytes)
            facts: list[Fact] = []
            _fill(ballast, free_bytes)
            with suppress(StorageFailed):
                Device(state, series, facts.append).live()
                failures -= 1
            failures += 1
            ballast.unlink()
            if state.exists():
                assert damages(state, series, facts) == []
            Device(state, series, facts.append).live()
            assert is_at_the_end(state, series)
        assert failures > 5


def _fill(ballast: Path, free_bytes: int) -> None:
    """Leave about so much space on a file system."""
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with suppress(OSError):
            while True:
                file.write(bytes(512))
        os.fsync(file.fileno())
        file.truncate(max(0, file.tell() - free_bytes))
        os.fsync(file.fileno())
