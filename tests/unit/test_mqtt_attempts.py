"""What comes of attempts to reach a broker: the next protocol, the next wait, and what is said once."""

from __future__ import annotations

import logging

import pytest

from edge_runtime.transports.backoff import STEADY_S, Backoff
from edge_runtime.transports.mqtt_attempts import SUSPECT_CONNECTIONS, Attempts


def attempts(log_level: int = logging.WARNING) -> Attempts:
    return Attempts("dev1", Backoff(1.0, 60.0, lambda: 1.0), log_level)


def test_a_broker_that_refuses_mqtt_5_is_spoken_to_in_3_1_1_and_the_next_one_in_5() -> None:
    found = attempts()
    assert found.protocol == 5
    assert found.refused_protocol()
    assert found.protocol == 4
    assert not found.refused_protocol(), "there is no other"
    found.lost("it was restarted", STEADY_S)
    assert found.protocol == 5


def test_a_reason_is_logged_when_it_is_news(caplog: pytest.LogCaptureFixture) -> None:
    found = attempts()
    for reason in ("refused", "refused", "no route", "refused"):
        found.failed(reason)
        assert found.reason == reason
    assert [record.reason for record in caplog.records] == ["refused", "no route", "refused"]  # type: ignore[attr-defined]
    found.succeeded()
    assert found.reason == ""


def test_short_connections_in_a_row_are_said_to_be_no_accident() -> None:
    found = attempts()
    said = [found.lost("it closed", 0.1) for _ in range(SUSPECT_CONNECTIONS)]
    assert said[:-1] == ["it closed"] * (SUSPECT_CONNECTIONS - 1)
    assert "do two devices have the id 'dev1'" in said[-1]
    assert found.reason == said[-1]
    assert found.lost("it closed", STEADY_S) == "it closed"


def test_waits_grow_until_a_connection_lasts() -> None:
    found = attempts()
    assert [found.next_wait_s() for _ in range(3)] == [1.0, 2.0, 4.0]
    found.lost("it closed", 0.1)
    assert found.next_wait_s() == 8.0
    found.lost("it closed", STEADY_S)
    assert found.next_wait_s() == 1.0
