"""What a broker may tell a device to do: look for updates now, and nothing else (DESIGN 8).

Owns: which topics are listened to for that. A message is a hint: nothing in it is read, since whoever reaches the
broker may have written it; what there is to install is asked of the repository, and believed only when signed. Retained
ones never get here (mqtt_frontend.py counts them as ignored). Thread: the MQTT transport's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge_runtime.telemetry.counters import Counters
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.wire.topics import DeviceTopics, wake_topic


class Commands:
    """Look when told to, and when a connection comes about: a wake may have been lost while there was none.

    look: must not block, and be as good once as many times; it bounds how often it really looks (`min_check_s`).
    """

    def __init__(
        self, topics: DeviceTopics, groups: Iterable[str], look: Callable[[], None], counters: Counters
    ) -> None:
        self.topics = tuple(dict.fromkeys((topics.check_update, *map(wake_topic, groups))))
        """Each once: a broker may refuse a session that names a filter twice."""
        self._look = look
        self._counters = counters

    def heard(self, message: Inbound) -> None:  # noqa: ARG002 (a hint: nothing in it is read)
        """A message came to one of `topics`."""
        self._counters.count("mqtt_wakes")
        self._look()

    def online(self) -> None:
        """A connection is there."""
        self._look()
