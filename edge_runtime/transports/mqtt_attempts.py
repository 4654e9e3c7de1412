"""What comes of the attempts to reach a broker: the wait before the next, the protocol it speaks, what is said of it.

Owns: how many bad connections came in a row, and the reason why there is none. Does no I/O but the log, and connects
nothing: mqtt_transport.py does. Thread: the transport's; `reason` and `protocol` may be read from any.
"""

from __future__ import annotations

import logging

from edge_runtime.transports.backoff import STEADY_S, Backoff

log = logging.getLogger(__name__)

SUSPECT_CONNECTIONS = 3
"""So many connections that ended within seconds, one after the other, are no accident."""


class Attempts:
    """One client's attempts at one broker. log_level: how loudly the log says that there is no broker."""

    def __init__(self, client_id: str, backoff: Backoff, log_level: int) -> None:
        self.reason = "not connected yet"
        """Why there is no connection; "" while there is one."""
        self.protocol = 5
        """MQTT's protocol level of the next attempt, or of the connection: 5, or 4 (3.1.1) where a broker refused 5."""
        self._client_id = client_id
        self._backoff = backoff
        self._log_level = log_level
        self._short_connections = 0

    def next_wait_s(self) -> float:
        """How long to wait before the next attempt, in seconds; longer with each call until a connection lasts."""
        return self._backoff.next_s()

    def succeeded(self) -> None:
        """There is a connection, and the broker has acknowledged its subscriptions."""
        self.reason = ""

    def failed(self, reason: str) -> None:
        """There was no connection. Logs why, when it is news."""
        if reason != self.reason:
            self.reason = reason
            log.log(self._log_level, "no MQTT broker; trying again and again", extra={"reason": reason})

    def refused_protocol(self) -> bool:
        """The broker does not speak what it was spoken to in; whether there is another version to try."""
        if self.protocol == 4:
            return False
        log.log(
            self._log_level,
            "the broker does not speak MQTT 5; going on with 3.1.1, where a request says reply_to inside",
        )
        self.protocol = 4
        return True

    def lost(self, reason: str, lasted_s: float) -> str:
        """A connection ended after so many seconds; the reason, and after some bad ones in a row what it may be.

        After a good one the waits are short again.
        """
        self._backoff.lasted(lasted_s)
        self.protocol = 5  # the next broker there may speak it, whatever this one said
        self._short_connections = 0 if lasted_s >= STEADY_S else self._short_connections + 1
        if self._short_connections >= SUSPECT_CONNECTIONS:
            # Not every broker says which: mosquitto 2.0.11 just closes.
            reason += (
                f"; so did the {self._short_connections} before it, within seconds: "
                f"do two devices have the id {self._client_id!r}, or does the broker shed load?"
            )
        self.failed(reason)
        return reason
