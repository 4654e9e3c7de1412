"""Power cut at durable calls of a whole update: the old release or the new one serves, and the update completes."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.updates.interrupted_device import Home
from tests.fakes.update_site import UpdateSite, adder
from tests.power_loss.loop_disk import FILE_SYSTEMS, FileSystem, LoopDisk, why_no_cut

CUTS = 24


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("kind", FILE_SYSTEMS, ids=lambda kind: kind.name)
def test_a_device_whose_power_is_cut_in_an_update_serves_the_old_release_or_the_new_and_completes(
    kind: FileSystem, tmp_path: Path
) -> None:
    reason = why_no_cut(kind, tmp_path / "probe")
    if reason is not None:
        pytest.skip(reason)
    site = UpdateSite()
    site.release(adder(tmp_path / "made" / "1", 1))
    (tmp_path / "first").mkdir()
    first = Home(tmp_path / "first", site.write(tmp_path / "mirror 1"), site.root)
    assert first.live().served[-1] == 1.0
    site.release(adder(tmp_path / "made" / "2", 2))
    second = replace(first, mirror=site.write(tmp_path / "mirror 2"), syncs=True)
    known = second.memory(tmp_path / "aside")
    calls = second.copy(tmp_path / "whole").live().calls
    with closing(LoopDisk(kind, tmp_path / "loop")) as disk:
        disk.mount()
        for number in sorted(random.Random(kind.name).sample(range(1, calls + 1), CUTS)):
            home = second.copy(disk.path / str(number))
            # What was there before is durable; the power goes when the process is gone, so that only what it synced is.
            disk.restore()
            home.live(number)
            disk.cut()
            disk.restore()
            now = home.memory(tmp_path / "aside")
            (active,) = now.active.values()
            assert active.counter in (1, 2), number
            assert not now.is_lost, number
            assert all(now.marks[name] >= version for name, version in known.marks.items()), number
            life = home.live()
            assert life.served in ([1.0, 2.0], [2.0]), number
            assert life.served[0] == active.counter, number
            assert life.checked is not None, number
            assert life.checked["is_ok"], number
