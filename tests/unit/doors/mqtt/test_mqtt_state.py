"""The connection state: the next protocol, the next wait, and the reason why there is no connection."""

from __future__ import annotations

import logging
import random
import socket
import ssl

import pytest

from edge_runtime.doors.mqtt.broker import BrokerAccess, parse_broker_url
from edge_runtime.doors.mqtt.settings import MqttProtocol
from edge_runtime.doors.mqtt.state import (
    STEADY_S,
    SUSPECT_CONNECTIONS,
    UNANSWERED,
    Backoff,
    ConnectionState,
    connect_failure,
    refusal,
)
from edge_runtime.errors import ConfigError

PLAIN = BrokerAccess(parse_broker_url("mqtt://site:1883"))
TLS = BrokerAccess(parse_broker_url("mqtts://site:8883"))


class Always(random.Random):
    """Draws the same share each time."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def random(self) -> float:
        return self.share


def state(log_level: int = logging.WARNING) -> ConnectionState:
    return ConnectionState("dev1", Backoff(1.0, 60.0, Always(1.0)), log_level)


# ---- waits ----------------------------------------------------------------------------------------------------------


def test_waits_double_to_the_longest_one() -> None:
    backoff = Backoff(0.5, 6.0, Always(1.0))
    assert [backoff.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_half_of_a_wait_is_left_to_chance() -> None:
    waits = [Backoff(8.0, 60.0, random.Random(seed)).next_s() for seed in range(200)]
    assert all(4.0 <= wait_s <= 8.0 for wait_s in waits)
    assert max(waits) - min(waits) > 3.5


def test_a_good_connection_begins_anew_and_a_short_one_does_not() -> None:
    backoff = Backoff(1.0, 60.0, Always(1.0))
    backoff.next_s()
    backoff.lasted(STEADY_S / 2)
    assert backoff.next_s() == 2.0
    backoff.lasted(STEADY_S)
    assert backoff.next_s() == 1.0


def test_failures_without_end_overflow_nothing() -> None:
    backoff = Backoff(0.5, 60.0, Always(0.0))
    assert {backoff.next_s() for _ in range(5000)} <= {0.25 * (1 << n) for n in range(7)} | {30.0}


# ---- the state ------------------------------------------------------------------------------------------------------


def test_a_broker_that_refuses_mqtt_5_is_spoken_to_in_3_1_1_and_the_next_one_in_5() -> None:
    found = state()
    assert found.protocol == 5
    assert found.refused_protocol()
    assert found.protocol == 4
    assert not found.refused_protocol(), "there is no other"
    found.lost("it was restarted", STEADY_S)
    assert found.protocol == 5


def test_a_broker_that_answers_no_connect_is_tried_in_both_protocols_by_turns() -> None:
    found = state()
    tried = []
    for _ in range(3 * UNANSWERED):
        tried.append(found.protocol)
        found.unanswered()
    assert tried == [5, 5, 4, 4, 5, 5]


def test_a_silent_broker_is_asked_for_5_once_after_a_loss() -> None:
    found = state()
    for _ in range(UNANSWERED):
        found.unanswered()
    found.connected()
    found.lost("it closed", STEADY_S)
    assert found.protocol == 5
    found.unanswered()
    assert found.protocol == 4


def test_a_broker_that_has_spoken_5_is_asked_for_nothing_else_when_the_network_is_silent() -> None:
    found = state()
    found.connected()
    found.lost("it was cut", STEADY_S)
    for _ in range(3 * UNANSWERED):
        found.unanswered()
        assert found.protocol == 5


@pytest.mark.parametrize(("named", "level"), [("5", 5), ("3.1.1", 4)])
def test_a_protocol_that_is_named_is_the_only_one(named: MqttProtocol, level: int) -> None:
    found = ConnectionState("dev1", Backoff(1.0, 60.0, Always(1.0)), logging.WARNING, named)
    for _ in range(3):
        found.unanswered()
    assert not found.refused_protocol()
    found.lost("it closed", STEADY_S)
    assert found.protocol == level


def test_a_reason_is_logged_when_it_is_news(caplog: pytest.LogCaptureFixture) -> None:
    found = state()
    for reason in ("refused", "refused", "no route", "refused"):
        found.failed(reason)
        assert found.reason == reason
    assert [record.reason for record in caplog.records] == ["refused", "no route", "refused"]  # type: ignore[attr-defined]
    found.connected()
    assert found.reason == ""


def test_short_connections_in_a_row_are_said_to_be_no_accident() -> None:
    found = state()
    said = [found.lost("it closed", 0.1) for _ in range(SUSPECT_CONNECTIONS)]
    assert said[:-1] == ["it closed"] * (SUSPECT_CONNECTIONS - 1)
    assert "do two devices have the id 'dev1'" in said[-1]
    assert found.reason == said[-1]
    assert found.lost("it closed", STEADY_S) == "it closed"


def test_waits_grow_until_a_connection_lasts() -> None:
    found = state()
    assert [found.next_wait_s() for _ in range(3)] == [1.0, 2.0, 4.0]
    found.lost("it closed", 0.1)
    assert found.next_wait_s() == 8.0
    found.lost("it closed", STEADY_S)
    assert found.next_wait_s() == 1.0


# ---- reasons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "access", "says"),
    [
        (ConnectionRefusedError(111, "refused"), PLAIN, "mqtt://site:1883: nothing listens there"),
        (ConnectionResetError(104, "reset"), TLS, "was reset; does the broker speak TLS"),
        (ConnectionResetError(104, "reset"), PLAIN, "mqtt://site:1883: reset"),
        (TimeoutError(), PLAIN, "no answer within 5 s"),
        (socket.gaierror(-2, "Name or service not known"), PLAIN, "the name is not known"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), TLS, "does the broker want a client certificate, or no TLS?"),
        (ConfigError("mqtt.password_file: x"), PLAIN, "mqtt.password_file: x"),
        (OSError(), PLAIN, "mqtt://site:1883: OSError"),
    ],
)  # fmt: skip
def test_a_failure_says_what_and_what_to_do(error: Exception, access: BrokerAccess, says: str) -> None:
    assert says in connect_failure(error, access)


def test_a_refusal_names_the_settings_that_may_be_wrong() -> None:
    assert "check username and password_file" in refusal("Bad user name or password", PLAIN)
    assert refusal("Server busy", PLAIN).endswith("the broker refuses the connection: Server busy")
