"""A device may say anything: a fleet reads what it knows, cuts the rest, and never raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.fleet.states import MAX_MODELS, MAX_STATE_BYTES, MAX_TEXT, read_part, read_state


def state(**fields: Any) -> bytes:
    return json.dumps({"health": "ok", "profile": "generic", "runtime_version": "1.0", **fields}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'"online"',
        b"null",
        b"{",
        b'{"models": 3}',
        b'{"models": {"m": {"version": "1"}}}',
        b'{"health": null}',
        b'{"totals": {"models": 1e400}}',
        b'{"groups": [1]}',
        b'{"models": {"m": {"p95_ms": NaN}}}',
        b"[" * 5_000,
        b'{"a":' * 5_000,
        b'{"health": "' + b"x" * MAX_STATE_BYTES + b'"}',
    ],
)
def test_bytes_that_are_not_a_state_are_none(payload: bytes) -> None:
    assert read_state(payload) is None


KEYS = st.sampled_from(["models", "update", "totals", "parts", "refused", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_state_or_none(payload: bytes) -> None:
    read_state(payload)
    read_part(payload)


def test_an_empty_object_is_a_state_of_an_unknown_device() -> None:
    found = read_state(b"{}")
    assert found is not None
    assert (found.version, found.health, found.model_count, found.models) == ("", "", 0, {})


def test_markup_and_long_texts_are_kept_as_text_and_cut() -> None:
    script = "<script>alert(1)</script>"
    found = read_state(state(reasons=[script, "x" * 10_000], groups=["g" * 1_000], models={script: {}, "ok": {}}))
    assert found is not None
    assert found.reasons[0] == script
    assert len(found.reasons[1]) == MAX_TEXT
    assert len(found.groups[0]) == 64
    assert set(found.models) == {"ok"}


def test_more_models_than_a_device_may_have_are_counted_alone() -> None:
    models = {f"m{index}": {"version": 1} for index in range(MAX_MODELS + 50)}
    found = read_state(state(models=models))
    assert found is not None
    assert (len(found.models), found.model_count) == (MAX_MODELS, MAX_MODELS + 50)


@pytest.mark.parametrize(
    "time", ["", "now", "2026-01-01", "2026-01-01T00:00:00", "+99999-01-01T00:00:00+00:00", "9" * 99]
)
def test_a_date_that_is_none_is_unknown(time: str) -> None:
    found = read_state(state(time=time))
    assert found is not None
    assert found.said_s is None


def test_a_state_of_a_daemon_before_parts_and_totals_is_read() -> None:
    failed = {"version": 1, "state": "failed", "reason": "no backend"}
    models = {
        "a": {"version": 2, "rate_per_s": 3.0, "p95_ms": 4.0, "versions": []},
        "b": {"version": None, "versions": [failed]},
    }
    found = read_state(state(models=models, update={"state": "off"}))
    assert found is not None
    assert (found.model_count, found.ready_count, found.rate_per_s) == (2, 1, 3.0)
    assert (found.models["b"].state, found.models["b"].reason) == ("failed", "no backend")
    assert not found.update.is_on


def test_updates_of_a_state_tell_of_refusals_and_of_what_is_not_installed() -> None:
    update = {
        "state": "observing",
        "group": "line-1",
        "device_id": "dev1",
        "models": {"a": {"version": 2, "release": 5, "manifest_sha256": "0" * 64}},
        "refused": [{"model": "a", "release": 4, "reason": "slower"}],
        "under_way": {"model": "b", "release": 7, "version": 3, "state": "observing", "detail": ""},
        "checked": {
            "at_utc": "2026-11-27T04:00:00Z",
            "is_ok": True,
            "offers": [
                {"model": "a", "release": 5, "percent": 100.0, "action": "runs", "reason": ""},
                {"model": "c", "release": 1, "percent": 10.0, "action": "passed over", "reason": "for others"},
            ],
        },
    }
    found = read_state(state(models={"a": {"version": 2}}, update=update))
    assert found is not None
    assert found.models["a"].release == 5
    assert [(each.model, each.release, each.action) for each in found.update.refused] == [("a", 4, "refused")]
    assert [(each.model, each.action, each.reason) for each in found.update.open] == [
        ("b", "under way", "observing"),
        ("c", "passed over", "for others"),
    ]


def test_figures_that_cannot_be_are_none_and_make_no_sum_infinite() -> None:
    said = {
        "totals": {"models": -3, "states": {"ready": 1 << 70}, "rate_per_s": 1e308, "p95_ms": -1.0},
        "temperature_celsius": 1e9,
        "memory_bytes": -1.0,
        "models": {"m": {"version": -1, "rate_per_s": 1e308, "p95_ms": 1e300}},
    }
    found = read_state(state(**said))
    assert found is not None
    assert (found.model_count, found.ready_count, found.rate_per_s, found.p95_ms) == (0, 0, 0.0, None)
    assert (found.temperature_celsius, found.memory_bytes) == (None, None)
    line = found.models["m"]
    assert (line.version, line.rate_per_s, line.p95_ms) == (None, 0.0, None)


@pytest.mark.parametrize("odd", [{"version": "3"}, {"version": True}, {"manifest_sha256": 5}, {"version": [1]}])
def test_odd_words_about_a_release_hide_neither_it_nor_its_device(odd: dict[str, Any]) -> None:
    line = read_state(
        state(models={"digits": {"version": 3}}, update={"state": "idle", "models": {"digits": {"release": 7, **odd}}})
    )
    assert line is not None
    model = line.models["digits"]
    assert (model.release, model.release_version, model.manifest_sha256) == (7, None, "")
