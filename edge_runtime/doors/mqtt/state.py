"""The state of one client's connection to its broker: why there is none, the next protocol, the next wait.

Owns: the number of short connections in a row, the waits between attempts, and the words for a failure. Does no I/O but
the log. Thread: the transport's; `reason` and `protocol` may be read from any.

Waits have "equal jitter": half of a wait is fixed, half random, so that a fleet that lost its broker at one instant
does not return at one, and no device hammers (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
2015).
"""

from __future__ import annotations

import logging
import random
import socket as sockets
import ssl

from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.settings import MqttProtocol
from edge_runtime.doors.mqtt.socket import CONNECT_LIMIT_S
from edge_runtime.errors import ConfigError

log = logging.getLogger(__name__)

STEADY_S = 10.0
"""A connection that lasted this long was good: the next loss begins with the shortest wait again. After one that ends
at once (two clients with one id, a full broker) the waits go on doubling."""

SUSPECT_CONNECTIONS = 3
"""This many connections in a row that end within seconds are not an accident."""

MAX_DOUBLINGS = 32

UNANSWERED = 2
"""So many CONNECTs in a row that a broker closed on, or left without an answer, and it gets the other protocol's: some
do that with one that they do not speak (amqtt closes, and so does a proxy of 3.1.1)."""

PROTOCOL_NAMES = {5: "5", 4: "3.1.1"}


class Backoff:
    """Waits that double from `min_s` to `max_s` with each failure in a row."""

    def __init__(self, min_s: float, max_s: float, jitter: random.Random | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._jitter = jitter or random.Random()  # noqa: S311 (spreads waits; nothing secret)
        self._failures = 0

    def next_s(self) -> float:
        """The wait before the next attempt, in seconds; each call counts one more failure."""
        whole_s = min(self._min_s * (1 << min(self._failures, MAX_DOUBLINGS)), self._max_s)
        self._failures += 1
        return whole_s * (0.5 + 0.5 * self._jitter.random())

    def lasted(self, connected_s: float) -> None:
        """Begin again with the shortest wait when a connection lasted `STEADY_S`."""
        if connected_s >= STEADY_S:
            self._failures = 0


class ConnectionState:
    """The connection state of one client. log_level: the level at which the log says that there is no broker."""

    def __init__(self, client_id: str, backoff: Backoff, log_level: int, protocol: MqttProtocol = "auto") -> None:
        self._is_fixed = protocol != "auto"
        self._knows_5 = False
        self._unanswered = 0
        self.reason = "not connected yet"
        """Why there is no connection; "" while there is one."""
        self.protocol = 4 if protocol == "3.1.1" else 5
        """MQTT protocol level of the connection or the next attempt: 5, or 4 (3.1.1) where a broker does not take 5."""
        self._client_id = client_id
        self._backoff = backoff
        self._log_level = log_level
        self._short_connections = 0

    def next_wait_s(self) -> float:
        """The wait before the next attempt, in seconds; it grows with each call until a connection lasts."""
        return self._backoff.next_s()

    def connected(self) -> None:
        """The broker has acknowledged the subscriptions."""
        self.reason = ""
        self._unanswered = 0
        self._knows_5 = self._knows_5 or self.protocol == 5

    def failed(self, reason: str) -> None:
        """An attempt failed. Logs the reason when it differs from the last one."""
        if reason != self.reason:
            self.reason = reason
            log.log(self._log_level, "no MQTT broker; retrying until one answers", extra={"reason": reason})

    def refused_protocol(self) -> bool:
        """The broker refused the protocol. Return whether there is another one to try."""
        if self.protocol == 4 or self._is_fixed:
            return False
        log.log(
            self._log_level,
            "the broker does not speak MQTT 5; using 3.1.1, where a request carries reply_to in its body",
        )
        self.protocol = 4
        return True

    def unanswered(self) -> None:
        """The broker took a connection, and ended it, or said nothing, where its CONNACK should be.

        A network or a balancer in trouble does so too, so one that has spoken 5 is asked for nothing else.
        """
        self._unanswered += 1
        if self._unanswered < UNANSWERED or self._is_fixed or self._knows_5:
            return
        self._unanswered = 0
        before, self.protocol = self.protocol, 9 - self.protocol
        log.log(
            self._log_level,
            "the broker answers no CONNECT of MQTT %s; trying %s",
            PROTOCOL_NAMES[before],
            PROTOCOL_NAMES[self.protocol],
        )

    def lost(self, reason: str, lasted_s: float) -> str:
        """A connection ended after `lasted_s`. Return the reason, extended after several short ones in a row."""
        self._backoff.lasted(lasted_s)
        if self.protocol == 4 and not self._is_fixed:
            self.protocol = 5  # another broker may answer next time, and speak it
            self._unanswered = UNANSWERED - 1  # one attempt tells
        self._short_connections = 0 if lasted_s >= STEADY_S else self._short_connections + 1
        if self._short_connections >= SUSPECT_CONNECTIONS:
            # Not every broker says which: mosquitto 2.0.11 just closes.
            reason += (
                f"; so did the {self._short_connections} before it, within seconds: "
                f"do two devices have the id {self._client_id!r}, or does the broker shed load?"
            )
        self.failed(reason)
        return reason


def connect_failure(error: Exception, access: BrokerAccess) -> str:
    """Why a connection failed, and what to do about it."""
    match error:
        case ConfigError():
            return error.message
        case ssl.SSLCertVerificationError():
            why = f"the broker's certificate is not trusted: {error.verify_message}; check ca_file and the host name"
        case ssl.SSLError():
            detail = getattr(error, "reason", None) or error
            why = f"TLS failed: {detail}; does the broker want a client certificate, or no TLS?"
        case sockets.gaierror():
            why = f"the name is not known: {error.strerror}"
        case ConnectionResetError() if access.address.is_tls:
            why = "the connection was reset; does the broker speak TLS on this port, and want a client certificate?"
        case TimeoutError():
            why = f"no answer within {CONNECT_LIMIT_S:.0f} s"
        case ConnectionRefusedError():
            why = "nothing listens there; is the broker running?"
        case _:
            why = f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
    return f"{access.address.url}: {why}"


def refusal(reason: str, access: BrokerAccess) -> str:
    """The reason in a CONNACK, and what to do about it."""
    advice = {
        "Bad user name or password": "; check username and password_file",
        "Not authorized": "; check username, password_file and the client certificate",
        "Client identifier not valid": "; another device_id may help",
    }.get(reason, "")
    return f"{access.address.url}: the broker refuses the connection: {reason}{advice}"
