"""A device's time through restarts: what moves its floor, and what it says of a clock that nobody sets."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from edge_runtime.errors import DownloadError, MetadataExpired
from edge_runtime.updates.device_time import BUILT_UTC, DeviceTime
from edge_runtime.updates.journal import Journal
from tests.fakes.dates import FakeCalendar
from tests.fakes.tuf_repository import NOW, TufRepository

DAY = timedelta(days=1)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    journal.open()
    yield journal
    journal.close()


def device_time(journal: Journal, clock_utc: datetime, *, synchronised: bool) -> DeviceTime:
    """As after a start of the device."""
    time = DeviceTime(journal, FakeCalendar(clock_utc, synchronised=synchronised))
    time.recall()
    return time


def test_a_clock_that_nobody_sets_is_named_where_metadata_expired(journal: Journal) -> None:
    expired = MetadataExpired("timestamp: version 3 expired")
    assert "clock_unknown" in device_time(journal, NOW, synchronised=False).explained(expired)
    assert device_time(journal, NOW, synchronised=True).explained(expired) == expired.message
    unreached = DownloadError("nobody listens there")
    assert device_time(journal, NOW, synchronised=False).explained(unreached) == unreached.message


def test_a_clock_that_nobody_sets_moves_no_floor_and_one_that_somebody_sets_does(journal: Journal) -> None:
    repository = TufRepository()
    device_time(journal, NOW, synchronised=False).learn(repository.root, repository.timestamp)
    assert device_time(journal, BUILT_UTC - DAY, synchronised=False).now_utc() == BUILT_UTC
    device_time(journal, NOW, synchronised=True).learn(repository.root, repository.timestamp)
    after_restart = device_time(journal, BUILT_UTC - DAY, synchronised=False)
    assert after_restart.now_utc() == NOW
    assert after_restart.as_json()["is_behind"]
    assert not after_restart.as_json()["is_synchronised"]


def test_a_floor_that_was_learned_from_keys_that_were_replaced_counts_no_more(journal: Journal) -> None:
    repository = TufRepository()
    device_time(journal, NOW, synchronised=True).learn(repository.root, repository.timestamp)
    repository.rotate("timestamp")
    assert device_time(journal, BUILT_UTC - DAY, synchronised=False).below(repository.root) == BUILT_UTC
