"""Devices with wrong clocks and without a network: they serve, always; they install only under the rule; they heal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import cycle
from pathlib import Path

import pytest

from edge_runtime.updates.device_time import SystemCalendar
from edge_runtime.updates.release_paths import ISSUED_FIELD
from tests.contract.updates.updated_device import Fleet
from tests.fakes.dates import FakeCalendar
from tests.fakes.tuf_repository import NOW

DAY = timedelta(days=1)
YEAR = 365 * DAY


class JumpingCalendar(SystemCalendar):
    """Shows another instant each time that it is read: now, and 20 years ahead or behind."""

    def __init__(self) -> None:
        self._instants = cycle([NOW, NOW, NOW + 20 * YEAR, NOW - 20 * YEAR])

    def now_utc(self) -> datetime:
        return next(self._instants)


@pytest.fixture
def clock() -> FakeCalendar:
    return FakeCalendar(NOW)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """With release 1 published, and the time of signing said."""
    fleet = Fleet(tmp_path)
    fleet.site.repository.timestamp.unrecognized_fields[ISSUED_FIELD] = f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
    fleet.release(1)
    return fleet


@pytest.mark.parametrize(
    "wrong_utc",
    [datetime(1970, 1, 1, tzinfo=timezone.utc), NOW - YEAR],
    ids=["1970", "a year behind"],
)
def test_a_clock_that_is_behind_what_was_signed_serves_and_installs_by_what_was_signed(
    fleet: Fleet, clock: FakeCalendar, wrong_utc: datetime
) -> None:
    with fleet.device(calendar=clock) as device:
        device.outcome()
        clock.instant_utc = wrong_utc
        fleet.release(2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
        assert device.status()["clock"]["is_behind"]


def test_metadata_that_expired_is_found_expired_by_a_clock_that_fell_back(fleet: Fleet, clock: FakeCalendar) -> None:
    repository = fleet.site.repository
    with fleet.device(calendar=clock) as device:
        device.outcome()
        # A year later by what a server signed; then somebody stops the clock and the server.
        repository.expires = NOW + 11 * 30 * DAY
        for role in ("timestamp", "snapshot", "targets", "root", "team-vision", "fleet-line"):
            repository.signed[role].expires = repository.expires
        repository.timestamp.unrecognized_fields[ISSUED_FIELD] = f"{NOW + 10 * 30 * DAY:%Y-%m-%dT%H:%M:%SZ}"
        repository.publish("root")
        repository.publish_all()
        fleet.sync()
        assert device.apply()["is_ok"]
        clock.instant_utc = datetime(1970, 1, 1, tzinfo=timezone.utc)
        repository.timestamp.expires = NOW + 30 * DAY
        fleet.release(2)
        checked = device.apply()
        assert not checked["is_ok"]
        assert "timestamp: version" in checked["reason"]
        assert "expired" in checked["reason"]
        assert device.adds() == 1.0


@pytest.mark.parametrize("ahead", [YEAR, 20 * YEAR], ids=["a year", "20 years"])
def test_a_clock_that_is_ahead_serves_and_installs_nothing_until_it_is_right_again(
    fleet: Fleet, clock: FakeCalendar, ahead: timedelta
) -> None:
    with fleet.device(calendar=clock) as device:
        device.outcome()
        clock.instant_utc = NOW + ahead
        fleet.release(2)
        checked = device.apply()
        assert not checked["is_ok"]
        assert "expired" in checked["reason"]
        assert device.adds() == 1.0
    with fleet.device(calendar=clock) as device:
        assert device.adds() == 1.0
        clock.instant_utc = NOW
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


def test_a_clock_that_jumps_during_an_update_changes_nothing_about_it(fleet: Fleet, clock: FakeCalendar) -> None:
    with fleet.device(calendar=JumpingCalendar()) as device:
        for _ in range(4):  # some begin when the clock is ahead
            device.apply()
        assert device.adds() == 1.0
    with fleet.device(calendar=clock) as device:
        assert device.adds() == 1.0
        fleet.release(2)
        assert device.outcome()[0] == "installed"


def test_a_device_without_a_network_serves_for_a_month_of_restarts_and_catches_up_in_one_check(
    fleet: Fleet, clock: FakeCalendar
) -> None:
    with fleet.device(calendar=clock) as device:
        device.outcome()
    nowhere = str(fleet.folder / "nowhere")
    for day in range(30):
        clock.instant_utc = NOW + day * DAY * 0.9
        if day % 3 == 0:
            with fleet.device(calendar=clock, folder=nowhere) as device:
                for _ in range(3):
                    assert not device.apply()["is_ok"]
                    assert device.adds() == 1.0
    for number in (2, 3, 4):
        fleet.release(number)
    with fleet.device(calendar=clock) as device:
        assert device.outcome()[0] == "installed"
        assert device.adds() == 4.0


def test_the_year_that_a_thief_of_the_timestamps_key_said_is_forgotten_with_the_key(
    fleet: Fleet, clock: FakeCalendar
) -> None:
    repository = fleet.site.repository
    repository.root.expires = NOW + 10 * YEAR
    with fleet.device(calendar=clock) as device:
        device.outcome()
        for year in range(1, 22):
            repository.timestamp.unrecognized_fields[ISSUED_FIELD] = f"{NOW + year * YEAR:%Y-%m-%dT%H:%M:%SZ}"
            repository.timestamp.expires = NOW + 30 * YEAR
            repository.publish("timestamp")
            fleet.sync()
            device.apply()
        assert device.status()["clock"]["is_behind"]
        assert not device.apply()["is_ok"]
        del repository.timestamp.unrecognized_fields[ISSUED_FIELD]
        repository.timestamp.expires = NOW + 7 * DAY
        repository.rotate("timestamp")
        repository.publish("root", "timestamp")
        fleet.release(2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
        assert not device.status()["clock"]["is_behind"]
    with fleet.device(calendar=clock) as device:
        fleet.release(3)
        assert device.outcome()[0] == "installed"
