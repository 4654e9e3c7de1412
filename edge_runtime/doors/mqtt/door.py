"""The daemon's door to a broker: puts transport, frontend and publishers together, starts and ends them.

Imported only with `[mqtt]`, since it imports paho. Thread: main, except as the parts say.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.config.settings import MqttSettings, PublishRule
from edge_runtime.daemon.core import Core
from edge_runtime.doors.door import drain
from edge_runtime.doors.mqtt.broker import BrokerAccess, broker_access
from edge_runtime.doors.mqtt.connection import ConnectOptions, Subscription
from edge_runtime.doors.mqtt.device_status import StatusPublisher, last_will
from edge_runtime.doors.mqtt.frontend import MqttFrontend, TopicListener
from edge_runtime.doors.mqtt.identity import UpdateSource, WakeCommands, check_groups, device_topics, reply_prefixes
from edge_runtime.doors.mqtt.transport import MqttTransport
from edge_runtime.request.infer_frontend import InferFrontend, Listener
from edge_runtime.site.discovery import Discovery, birth_topic, page_for_others
from edge_runtime.site.results import ResultPublisher
from edge_runtime.telemetry.host import HostProbe

log = logging.getLogger(__name__)


class MqttDoor:
    """One broker. Raises ConfigError for settings that cannot be.

    updates: None without updates, and then no wake is subscribed to. wake_groups: groups whose wakes are obeyed beside
    those of `mqtt.groups`.
    """

    def __init__(
        self,
        settings: MqttSettings,
        rules: Sequence[PublishRule],
        core: Core,
        frontend: InferFrontend,
        host: HostProbe,
        *,
        updates: UpdateSource | None = None,
        wake_groups: Sequence[str] = (),
    ) -> None:
        access = broker_access(settings)
        self.topics = device_topics(settings, access.address)
        groups = (*check_groups(settings), *wake_groups)
        self._core = core
        commands = [] if updates is None else [WakeCommands(self.topics, groups, updates, core.metrics)]
        self._frontend = frontend
        self._mqtt_frontend = MqttFrontend(
            frontend,
            self.topics,
            reply_prefixes(settings, self.topics),
            core.clock,
            core.metrics,
            max_packet_bytes=settings.max_packet_bytes,
        )
        subscribed = [self.topics.requests, *(topic for each in commands for topic in each.topics)]
        if settings.home_assistant is not None:
            subscribed.append(birth_topic(settings.home_assistant))
        self.transport = self._new_transport(access, settings, subscribed)
        self._results = ResultPublisher(
            rules,
            self.topics,
            self.transport,
            table=core.table,
            infer=core.infer,
            metrics=core.metrics,
            clock=core.clock,
        )
        frontend.listeners = self._results.listeners("mqtt")
        discovery = self._new_discovery(settings, host, has_updates=updates is not None)
        self._status = StatusPublisher(
            self.topics,
            self.transport,
            table=core.table,
            metrics=core.metrics,
            host=host,
            clock=core.clock,
            profile=core.profile.name,
            interval_s=settings.state_interval_s,
            discovery=discovery,
            updates=updates,
        )
        listeners: list[TopicListener] = [self._status, *commands]
        self._mqtt_frontend.listen(listeners if discovery is None else [*listeners, discovery])
        core.metrics.watch("mqtt_connected", lambda: float(self.transport.is_online))

    def listeners(self) -> Mapping[str, Listener]:
        """What is to hear the answers of ZeroMQ clients, by model, to publish them."""
        return self._results.listeners("zmq")

    def start(self, pages: Sequence[str] = ()) -> None:
        """Begin to connect; `online` is published with the first connection. The daemon is ready.

        pages: what a browser can open of the daemon.
        """
        address = self.transport.access.address
        if not address.is_tls and not address.is_this_machine:
            log.warning(
                "MQTT without TLS beyond this machine: everyone on the way can read and forge requests; use mqtts://",
                extra={"broker": address.url},
            )
        self._status.ready(page_for_others(pages, socket.gethostname()))
        self.transport.start()
        self._results.start()

    def stop_admitting(self, limit_s: float) -> None:
        """Publish `stopped`, refuse new requests, and wait until the transport's thread refuses them."""
        self._status.stopping()
        if self.transport.is_running:
            drain(self.transport.call, self._frontend, limit_s)

    def close(self) -> None:
        """Send waiting messages and disconnect. Idempotent."""
        self._results.close()
        self.transport.close()

    def stats(self) -> dict[str, Any]:
        """The broker's part of `stats`."""
        return {
            "broker": self.transport.access.address.url,
            "device_id": self.topics.device_id,
            "topics": f"{self.topics.base}/",
            "connected": self.transport.is_online,
            "protocol": "5" if self.transport.protocol == 5 else "3.1.1",
            "reason": self.transport.reason,
            "sources": self._results.status(),
        }

    def _new_transport(self, access: BrokerAccess, settings: MqttSettings, subscribed: Sequence[str]) -> MqttTransport:
        return MqttTransport(
            access,
            ConnectOptions(
                client_id=f"edge-{self.topics.device_id}",
                subscriptions=tuple(map(Subscription, subscribed)),
                will=last_will(self.topics),
                keepalive_s=settings.keepalive_s,
                session_expiry_s=settings.session_expiry_s,
                receive_maximum=settings.receive_maximum,
                max_packet_bytes=settings.max_packet_bytes,
            ),
            self._mqtt_frontend,
            self._core.metrics,
            reconnect_min_s=settings.reconnect_min_s,
            reconnect_max_s=settings.reconnect_max_s,
            clock=self._core.clock,
        )

    def _new_discovery(self, settings: MqttSettings, host: HostProbe, *, has_updates: bool) -> Discovery | None:
        if settings.home_assistant is None:
            return None
        return Discovery(
            settings.home_assistant,
            self.topics,
            self.transport,
            profile=self._core.profile.name,
            has_temperature=bool(host.temperatures()),
            has_updates=has_updates,
            results=self._results,
            clock=self._core.clock,
        )
