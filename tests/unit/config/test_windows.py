"""Windows of time: what they say, when they are open, and when the next one opens."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config.settings import UpdateSettings
from edge_runtime.config.windows import is_open, opens_in_s, parse_window
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build

MONDAY = datetime(2026, 11, 23)


def at(day: int, clock: str) -> datetime:
    """A time of the week that begins on MONDAY."""
    hours, minutes = map(int, clock.split(":"))
    return MONDAY + timedelta(days=day, hours=hours, minutes=minutes)


@pytest.mark.parametrize(
    ("window", "day", "clock", "is_there"),
    [
        ("01:00-05:00", 3, "00:59", False),
        ("01:00-05:00", 3, "01:00", True),
        ("01:00-05:00", 3, "04:59", True),
        ("01:00-05:00", 3, "05:00", False),
        ("mon-fri 22:00-05:00", 4, "23:00", True),
        ("mon-fri 22:00-05:00", 5, "04:59", True),  # Friday's, over midnight
        ("mon-fri 22:00-05:00", 5, "22:00", False),
        ("mon-fri 22:00-05:00", 0, "04:00", False),  # Sunday has none
        ("sat,sun 00:00-24:00", 5, "00:00", True),
        ("sat,sun 00:00-24:00", 6, "23:59", True),
        ("sat,sun 00:00-24:00", 0, "00:00", False),
        ("fri-mon 10:00-11:00", 6, "10:30", True),
        ("FRI-MON 10:00-11:00", 2, "10:30", False),
    ],
)
def test_window_is_open_from_its_first_minute_to_its_last(window: str, day: int, clock: str, is_there: bool) -> None:
    assert is_open([parse_window(window)], at(day, clock)) is is_there


def test_no_window_is_always_open() -> None:
    assert is_open([], at(2, "12:00"))
    assert opens_in_s([], at(2, "12:00")) == 0.0


@pytest.mark.parametrize(
    "text", ["", "1:00-5:00", "01:00", "25:00-26:00", "01:00-01:00", "24:00-01:00", "mo 01:00-02:00", "mon-tue-wed 1"]
)
def test_window_that_makes_no_sense_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"windows: .*wanted"):
        build(UpdateSettings, {"root_file": "r", "windows": [text]}, "config.toml")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["01:00-05:00", "mon 00:00-24:00", "sat,sun 22:30-01:15", "wed-thu 23:59-00:00"]), min_size=1
    ),
    st.integers(0, 7 * 24 * 60 - 1),
)
def test_windows_wait_ends_when_one_is_open_and_not_a_minute_before(texts: list[str], minute: int) -> None:
    windows, now = [parse_window(text) for text in texts], MONDAY + timedelta(minutes=minute)
    wait_s = opens_in_s(windows, now)
    assert is_open(windows, now + timedelta(seconds=wait_s))
    assert wait_s == 0.0 or not is_open(windows, now + timedelta(seconds=wait_s - 60))
    assert opens_in_s(windows, now, 1.0) <= wait_s + 900


def test_windows_place_in_a_fleet_spreads_over_the_first_quarter_of_a_window() -> None:
    windows = [parse_window("01:00-02:00")]
    waits = [opens_in_s(windows, at(0, "00:00"), share) for share in (0.0, 0.5, 1.0)]
    assert waits == [3600.0, 3600.0 + 450.0, 3600.0 + 900.0]
