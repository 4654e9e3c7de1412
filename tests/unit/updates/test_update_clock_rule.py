"""The floor of a device's clock: only what was verified moves it, in bounded steps, and it never goes back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.updates.device_time import LONGEST_STEP, floor_after, parse_utc, utc_text

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
DAY = timedelta(days=1)
INSTANTS = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1)).map(lambda each: each.replace(tzinfo=timezone.utc))


def moved(clock: datetime, *, synchronised: bool = True, issued: datetime | None = None) -> datetime:
    return floor_after(NOW, clock_utc=clock, is_synchronised=synchronised, issued_utc=issued, expires_utc=NOW + 7 * DAY)


def test_a_clock_that_somebody_sets_moves_the_floor() -> None:
    assert moved(NOW + DAY) == NOW + DAY


def test_a_clock_that_nobody_sets_does_not() -> None:
    assert moved(NOW + DAY, synchronised=False) == NOW


def test_a_time_that_a_repository_signed_moves_the_floor_without_any_clock() -> None:
    assert moved(datetime(1970, 1, 1, tzinfo=timezone.utc), synchronised=False, issued=NOW + DAY) == NOW + DAY


def test_the_floor_never_passes_the_expiry_of_what_was_accepted() -> None:
    assert moved(NOW + 20 * 365 * DAY) == NOW + 7 * DAY


@given(INSTANTS, INSTANTS, INSTANTS, INSTANTS | st.none(), st.booleans())
def test_the_floor_never_goes_back_and_never_leaps(
    floor: datetime, clock: datetime, expires: datetime, issued: datetime | None, synchronised: bool
) -> None:
    after = floor_after(floor, clock_utc=clock, is_synchronised=synchronised, issued_utc=issued, expires_utc=expires)
    assert floor <= after <= max(floor, min(expires, floor + LONGEST_STEP))


def test_an_instant_as_text_is_the_same_instant() -> None:
    assert parse_utc(utc_text(NOW)) == NOW
    assert [parse_utc(wrong) for wrong in (None, 5, "", "now", "2026-13-01T00:00:00Z", "2026-11-21")] == [None] * 6
