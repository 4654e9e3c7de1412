"""The daemon's door to a broker: transport, frontend and what is told put together, and when each begins and ends.

Imported only when `[mqtt]` is there, and with it paho. Thread: main, except what the parts say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_runtime.config.broker import BrokerAccess, broker_access
from edge_runtime.config.settings import MqttSettings, PublishRule
from edge_runtime.daemon.assemble import Core
from edge_runtime.fleet.commands import Commands
from edge_runtime.fleet.discovery import Discovery
from edge_runtime.fleet.identity import check_groups, device_topics, reply_prefixes
from edge_runtime.fleet.results import Results
from edge_runtime.fleet.status import Presence, last_will
from edge_runtime.frontend.infer_frontend import InferFrontend
from edge_runtime.frontend.mqtt_frontend import MqttFrontend
from edge_runtime.frontend.tap import Tap
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.transports.mqtt_connection import Session, Subscription
from edge_runtime.transports.mqtt_transport import MqttTransport

log = logging.getLogger(__name__)


class MqttDoor:
    """One broker. Raises ConfigError for settings that cannot be.

    look: what a wake calls, on the transport's thread, see `Commands`; None: there are no updates, and nobody listens.
    wake_groups: whose wakes are listened to beside those of `mqtt.groups`. update: see `Presence`.
    """

    def __init__(
        self,
        settings: MqttSettings,
        rules: Sequence[PublishRule],
        core: Core,
        frontend: InferFrontend,
        host: HostProbe,
        *,
        look: Callable[[], None] | None = None,
        wake_groups: Sequence[str] = (),
        update: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        access = broker_access(settings)
        self.topics = device_topics(settings, access.address)
        groups = (*check_groups(settings), *wake_groups)
        self._core = core
        self._commands = None if look is None else Commands(self.topics, groups, look, core.metrics)
        self._frontend = frontend
        self._discovery = self._new_discovery(settings, host)
        self._mqtt_frontend = MqttFrontend(
            frontend,
            self.topics,
            reply_prefixes(settings, self.topics),
            core.clock,
            core.metrics,
            max_packet_bytes=settings.max_packet_bytes,
        )
        self.transport = self._new_transport(access, settings)
        self._presence = Presence(
            self.topics,
            self.transport.retain,
            servables=core.servables,
            metrics=core.metrics,
            host=host,
            clock=core.clock,
            profile=core.profile.name,
            interval_s=settings.state_interval_s,
            update=update,
        )
        self._results = Results(
            rules,
            self.topics,
            self.transport,
            servables=core.servables,
            infer=core.infer,
            counters=core.metrics,
            clock=core.clock,
        )
        self._mqtt_frontend.every_beat(self._presence.beat)
        if self._discovery is not None:
            self._presence.on_models = self._discovery.models_changed
            self._mqtt_frontend.listen(self._discovery.birth_topic, self._discovery.birth, takes_retained=True)
            self._mqtt_frontend.every_beat(self._discovery.beat)
        if self._commands is not None:
            self._mqtt_frontend.every_connection(self._commands.online)
            for topic in self._commands.topics:
                self._mqtt_frontend.listen(topic, self._commands.heard)
        core.metrics.watch("mqtt_connected", lambda: float(self.transport.is_online))

    def taps(self) -> Mapping[str, Tap]:
        """What is to hear the answers of ZeroMQ clients, by model, to publish them."""
        return self._results.taps()

    def start(self) -> None:
        """Begin to connect, and say `online` once the broker listens: the daemon is ready."""
        address = self.transport.access.address
        if not address.is_tls and not address.is_this_machine:
            log.warning(
                "MQTT without TLS beyond this machine: whoever is on the way can read and forge requests; use mqtts://",
                extra={"broker": address.url},
            )
        self._presence.ready()
        if self._discovery is not None:
            self._discovery.start(
                self.transport.retain, {standing.model for standing in self._core.servables.standings()}
            )
        self.transport.start()
        self._results.start()

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse newcomers, and wait until the transport's thread does; say `stopped`."""
        self._presence.stopping()
        if not self.transport.is_running:
            return
        has_stopped = threading.Event()
        self.transport.call(self._frontend.drain)
        self.transport.call(has_stopped.set)
        has_stopped.wait(limit_s)

    def close(self) -> None:
        """Send what is left and say goodbye. Idempotent."""
        self._results.close()
        self.transport.close()

    def stats(self) -> dict[str, Any]:
        """What `stats` says of the broker."""
        return {
            "broker": self.transport.access.address.url,
            "device_id": self.topics.device_id,
            "topics": f"{self.topics.base}/",
            "connected": self.transport.is_online,
            "protocol": "5" if self.transport.protocol == 5 else "3.1.1",
            "reason": self.transport.reason,
        }

    def _new_transport(self, access: BrokerAccess, settings: MqttSettings) -> MqttTransport:
        return MqttTransport(
            access,
            Session(
                client_id=f"edge-{self.topics.device_id}",
                subscriptions=self._subscriptions(),
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

    def _new_discovery(self, settings: MqttSettings, host: HostProbe) -> Discovery | None:
        if settings.home_assistant is None:
            return None
        return Discovery(
            settings.home_assistant,
            self.topics,
            profile=self._core.profile.name,
            has_temperature=bool(host.temperatures()),
            clock=self._core.clock,
        )

    def _subscriptions(self) -> tuple[Subscription, ...]:
        topics = [self.topics.requests]
        if self._discovery is not None:
            topics.append(self._discovery.birth_topic)
        if self._commands is not None:
            topics.extend(self._commands.topics)
        return tuple(map(Subscription, topics))
