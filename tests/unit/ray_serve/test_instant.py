"""An instant that several machines know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_runtime.ray_serve import Instant


def test_instant_of_this_kernel_ages_by_its_monotonic_clock() -> None:
    now = Instant.now()
    began = replace(now, monotonic_s=now.monotonic_s - 5.0, utc_s=now.utc_s + 1_000.0)
    assert 5.0 <= began.age_s() < 60.0


def test_instant_of_another_machine_ages_by_the_calendars_clock() -> None:
    now = Instant.now()
    began = replace(now, boot="another", monotonic_s=now.monotonic_s + 1_000.0, utc_s=now.utc_s - 5.0)
    assert 5.0 <= began.age_s() < 60.0


def test_instant_in_the_future_of_another_machine_has_no_age() -> None:
    now = Instant.now()
    assert replace(now, boot="another", utc_s=now.utc_s + 1_000.0).age_s() == 0.0


def test_instant_goes_through_a_header_unchanged() -> None:
    now = Instant.now()
    assert Instant.of_text(now.text()) == now


@pytest.mark.parametrize("text", ["", "a", "a;b;c", "a;1", ";;", "a;1;2;3"])
def test_text_that_is_no_instant_is_none(text: str) -> None:
    assert Instant.of_text(text) is None
