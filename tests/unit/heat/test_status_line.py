"""The line about heat in `edge-runtime status`."""

from __future__ import annotations

import pytest

from edge_runtime.heat.status_line import status_fields


@pytest.mark.parametrize(
    ("stats", "fields"),
    [
        ({}, {}),
        ({"thermal": None}, {}),
        (
            {"thermal": {"celsius": 76.6, "reason": "low work has a share of its time; the limit is 78 °C"}},
            {"heat": "77 °C: low work has a share of its time; the limit is 78 °C"},
        ),
        ({"thermal": {"celsius": None, "reason": "r"}}, {"heat": "no sensor answers: r"}),
    ],
)
def test_status_line_has_the_temperature_and_what_is_done(stats, fields):
    assert status_fields(stats) == fields
