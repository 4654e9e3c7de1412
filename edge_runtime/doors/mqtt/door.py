"""The daemon's door to a broker: puts transport, frontend and publishers together, starts and ends them.

Imported only with `[mqtt]`, since it imports paho. Thread: main, except as the parts say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.door import drain
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.connection import ConnectOptions, Subscription
from edge_runtime.doors.mqtt.device_status import SourceTables, StatusPublisher, last_will
from edge_runtime.doors.mqtt.frontend import MqttFrontend, TopicListener
from edge_runtime.doors.mqtt.identity import WakeCommands, check_groups, device_topics, reply_prefixes
from edge_runtime.doors.mqtt.publishing import BrokerPart, DevicePublisher
from edge_runtime.doors.mqtt.transport import MqttTransport

log = logging.getLogger(__name__)


def open_door(context: DoorContext) -> MqttDoor:
    """Return the door of `[mqtt]`. Raises ConfigError for settings that cannot be."""
    return MqttDoor(context)


class MqttDoor:
    """One broker. topics: this device's there. publisher: for other doors' parts."""

    def __init__(self, context: DoorContext) -> None:
        core = context.core
        settings = context.settings("mqtt")
        access = broker_access(settings)
        self.topics = device_topics(settings, access.address)
        updates, groups = core.updates, check_groups(settings)
        listeners: list[TopicListener] = []
        if updates is not None:
            listeners.append(WakeCommands(self.topics, groups, updates, core.metrics, self._listen_anew))
        self._frontend = context.new_frontend("mqtt")
        self._mqtt_frontend = MqttFrontend(
            self._frontend,
            self.topics,
            reply_prefixes(settings, self.topics),
            core.clock,
            core.metrics,
            max_packet_bytes=settings.max_packet_bytes,
        )
        options = ConnectOptions(
            client_id=f"edge-{self.topics.device_id}",
            subscriptions=(Subscription(self.topics.requests),),
            will=last_will(self.topics),
            keepalive_s=settings.keepalive_s,
            session_expiry_s=settings.session_expiry_s,
            receive_maximum=settings.receive_maximum,
            max_packet_bytes=settings.max_packet_bytes,
        )
        self.transport = MqttTransport(
            access,
            options,
            self._mqtt_frontend,
            core.metrics,
            reconnect_min_s=settings.reconnect_min_s,
            reconnect_max_s=settings.reconnect_max_s,
            clock=core.clock,
            loop=None if access.address.is_tls else context.loop,  # its writes and reads take milliseconds
        )
        self._status = StatusPublisher(
            self.topics,
            self.transport,
            table=core.table,
            metrics=core.metrics,
            host=context.host,
            clock=core.clock,
            profile=core.profile.name,
            interval_s=settings.state_interval_s,
            updates=updates,
            sources=self._sources,
            groups=groups,
        )
        self.publisher = DevicePublisher(self.topics, self.transport, self._status.topic_of)
        self._parts: list[BrokerPart] = []
        for each in (self._status, *listeners):
            self._listen(each)
        core.metrics.watch("mqtt_connected", lambda: float(self.transport.is_online))

    def attach(self, part: BrokerPart) -> None:
        """Subscribe to the topics of another door's part, and hand it their messages. Before `ready` if it has any."""
        self._parts.append(part)
        self._listen(part)

    def start(self) -> None:
        """Nothing: a device that is not ready is not on its broker."""

    def ready(self) -> None:
        """Begin to connect; `online` is published with the first connection."""
        address = self.transport.access.address
        if not address.is_tls and not address.is_this_machine:
            log.warning(
                "MQTT without TLS beyond this machine: everyone on the way can read and forge requests; use mqtts://",
                extra={"broker": address.url},
            )
        self._status.ready()
        self.transport.start()

    def reload(self) -> None:
        """Nothing: the password is read for each connection."""

    def stop_admitting(self, limit_s: float) -> None:
        """Publish `stopped`, refuse new requests, and wait until the transport's thread refuses them."""
        self._status.stopping()
        if self.transport.is_running:
            drain(self.transport.call, self._frontend, limit_s)

    def close(self) -> None:
        """Send waiting messages and disconnect. Idempotent."""
        self._mqtt_frontend.close()  # first: what it has read is answered
        self.transport.close()

    def status(self) -> Mapping[str, Any]:
        """The broker's part of `stats`."""
        return {
            "mqtt": {
                "broker": self.transport.access.address.url,
                "device_id": self.topics.device_id,
                "topics": f"{self.topics.base}/",
                "connected": self.transport.is_online,
                "protocol": "5" if self.transport.protocol == 5 else "3.1.1",
                "reason": self.transport.reason,
                "sources": [each for part in self._parts for each in part.sources()],
            }
        }

    def _sources(self) -> SourceTables:
        return {table: sources for part in self._parts for table, sources in part.states().items()}

    def _listen(self, listener: TopicListener) -> None:
        self._mqtt_frontend.listen([listener])
        self.transport.subscribe(listener.topics)

    def _listen_anew(self, listener: TopicListener, before: tuple[str, ...]) -> None:
        """Hand a listener the messages of its topics of now, and no more those of before. Thread: the transport's."""
        self._mqtt_frontend.listen_anew(listener, before)
        self.transport.subscribe_anew(listener.topics, before)
