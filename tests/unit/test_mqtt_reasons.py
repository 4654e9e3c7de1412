"""Why a broker cannot be reached is said in words that help."""

from __future__ import annotations

import socket
import ssl

import pytest

from edge_runtime.config.broker import BrokerAccess, parse_broker_url
from edge_runtime.errors import ConfigError
from edge_runtime.transports.mqtt_reasons import connect_failure, refusal

PLAIN = BrokerAccess(parse_broker_url("mqtt://site:1883"))
TLS = BrokerAccess(parse_broker_url("mqtts://site:8883"))


@pytest.mark.parametrize(
    ("error", "access", "says"),
    [
        (ConnectionRefusedError(111, "refused"), PLAIN, "mqtt://site:1883: nobody listens there"),
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
