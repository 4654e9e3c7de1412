"""One connection to a broker over paho, from its socket to its end; the next one is a new object.

Owns: how paho is set up (credentials, will, session, limits) and what its callbacks mean. paho never runs a thread here
and keeps nothing over a loss: its owner (mqtt_transport.py) reads, writes and decides. paho's own loop would read one
message at each wake-up, and its queue of unsent messages has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_runtime.config.broker import BrokerAccess
from edge_runtime.transports.mqtt_packets import Inbound, packed_publish
from edge_runtime.transports.mqtt_reasons import CONNECT_LIMIT_S, refusal
from edge_runtime.transports.mqtt_socket import BoundedClient
from edge_runtime.transports.mqtt_tls import tls_context
from edge_runtime.transports.outbox import Outgoing

PROTOCOLS = {5: paho.MQTTv5, 4: paho.MQTTv311}
UNSUPPORTED_PROTOCOL = 0x84
SESSION_TAKEN_OVER = 0x8E
QOS1_IN_FLIGHT = 64
"""QoS 1 messages sent and not acknowledged, at most; a broker that says less with its Receive Maximum gets less."""

MAX_UNSENT_BYTES = 64 << 10
"""Handed over and not sent: about 400 small replies, which nobody can drop any more."""

NO_LIMIT = 268_435_455
"""The largest MQTT packet there can be (MQTT 5, 2.1.4)."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A filter, its QoS, and whether the retain flag of live messages is kept (MQTT 5).

    is_needed: whether there is no connection where the broker refuses it.
    """

    filter: str
    qos: int = 1
    retain_as_published: bool = True
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class Session:
    """What a client is to its broker; see `MqttSettings` for the numbers. takes_bursts: see mqtt_socket.py."""

    client_id: str
    subscriptions: tuple[Subscription, ...] = ()
    will: Outgoing | None = None
    keepalive_s: int = 20
    session_expiry_s: int = 0
    receive_maximum: int = 1024
    max_packet_bytes: int = 64 << 20
    takes_bursts: bool = False


class PackedProperties(Properties):  # type: ignore[misc]
    """Properties of a PUBLISH that are packed already: paho's own packing takes longer than all else in a reply."""

    def __init__(self, packed: bytes) -> None:
        object.__setattr__(self, "packetType", PacketTypes.PUBLISH)
        object.__setattr__(self, "packed", packed)

    def pack(self) -> bytes:
        """See Properties."""
        return self.packed  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return ""


class MqttConnection:
    """A connection attempt, and the connection it became. Thread: its owner's, every method.

    received: called inside `read` for each message. Raises ConfigError for files that cannot be used.
    """

    def __init__(
        self,
        access: BrokerAccess,
        session: Session,
        received: Callable[[Inbound], None],
        *,
        protocol: int,
        is_first: bool,
    ) -> None:
        self.protocol = protocol
        self.packet_limit = NO_LIMIT
        self.is_accepted = False
        self.is_subscribed = False
        self.reason = ""
        self.is_protocol_refused = False
        self.in_flight: dict[int, Outgoing] = {}
        self.refused_publishes = 0
        self._access = access
        self._session = session
        self._received = received
        self._is_first = is_first
        self._in_flight_limit = QOS1_IN_FLIGHT
        self._socket_error = ""
        self._subscribing: int | None = None
        self._fetches: dict[int, tuple[Sequence[str], Callable[[str], None]]] = {}
        self._nudges: set[int | None] = set()
        self._client = self._new_client()

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and send CONNECT; blocks up to CONNECT_LIMIT_S for TCP and again for TLS. Raises OSError."""
        session, options = self._session, dict[str, Any]()
        if self.protocol == 5:
            properties = Properties(PacketTypes.CONNECT)
            properties.ReceiveMaximum = session.receive_maximum
            properties.MaximumPacketSize = session.max_packet_bytes
            if session.session_expiry_s:
                properties.SessionExpiryInterval = session.session_expiry_s
            options = {"clean_start": self._is_first or not session.session_expiry_s, "properties": properties}
        address = self._access.address
        self._client.connect(address.host, address.port, session.keepalive_s, **options)
        self.flush()

    def close(self) -> None:
        """Say goodbye where there is somebody to hear it, and give the socket back. Idempotent."""
        if self._client.is_connected():
            self._client.disconnect()
            self._client.loop_write()
        socket = self._client.socket()
        if socket is not None:
            # paho closes only what it has said goodbye on; a connection that is only half there is closed here.
            socket.close()

    def break_off(self) -> None:
        """Give the socket back without a goodbye: the broker then publishes the will."""
        socket = self._client.socket()
        if socket is not None:
            socket.close()

    @property
    def fd(self) -> int:
        """The socket's descriptor; -1 when there is none any more."""
        socket = self._client.socket()
        return -1 if socket is None else int(socket.fileno())

    @property
    def is_open(self) -> bool:
        """Whether there is a socket."""
        return self.fd >= 0

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def read(self, max_messages: int) -> bool:
        """Take what is there, up to so many packets. False when the connection is lost; `reason` then says why."""
        client, packets = self._client, self._client.packets
        if packets is None:
            return False
        try:
            if not packets.has_packet() and not packets.fill():
                client.loop_read()  # which says how it ended
                return False
            for _ in range(max_messages):
                if not packets.has_packet():
                    break
                found = packets.next_message(with_properties=self.protocol == 5)
                if found is None:
                    if client.loop_read() != paho.MQTT_ERR_SUCCESS or client.socket() is None:
                        return False
                    continue
                message, mid = found
                if self.is_accepted:  # before, nobody has said who is at the other end
                    self._received(message)
                if mid:
                    client.ack(mid, 1)
        except ValueError as error:
            self.lost(f"the broker sends what is not MQTT: {error}")
            return False
        return True

    def has_pending(self) -> bool:
        """Whether there is more to read that the descriptor no longer tells of."""
        packets = self._client.packets
        return packets is not None and packets.has_pending()

    def wants_write(self) -> bool:
        """Whether bytes wait for the socket."""
        packets = self._client.packets
        return packets is not None and packets.unsent_bytes > 0

    def has_room(self) -> bool:
        """Whether another message may be handed over."""
        packets = self._client.packets
        return packets is not None and packets.unsent_bytes < MAX_UNSENT_BYTES

    def flush(self) -> bool:
        """Send what was handed over, as far as the socket takes it. False when the connection is lost."""
        client, packets = self._client, self._client.packets
        if client.want_write():
            client.loop_write()  # what was said inside a callback goes to `packets`
        if packets is not None and not packets.flush():
            client.loop_read()  # which says why
            return False
        return True

    def keep_alive(self) -> bool:
        """Ask a silent broker whether it is there; to be called each second. False when it did not answer in time."""
        return bool(self._client.loop_misc() == paho.MQTT_ERR_SUCCESS)

    def may_publish_qos1(self) -> bool:
        """Whether one more message may be under way without its acknowledgement."""
        return len(self.in_flight) < self._in_flight_limit

    def publish(self, message: Outgoing) -> None:
        """Hand a message over, for `flush`. Raises ValueError for one that cannot be sent."""
        client, is_v5 = self._client, self.protocol == 5
        if not message.qos:
            if client.packets is not None:
                properties = message.properties if is_v5 else None
                client.packets.send(packed_publish(message.topic, properties, message.payload, retain=message.retain))
            return
        packed = PackedProperties(message.properties) if is_v5 else None
        info = client.publish(message.topic, message.payload, message.qos, message.retain, packed)
        self.in_flight[info.mid] = message

    def fetch_retained(self, filters: Sequence[str], done: Callable[[str], None]) -> None:
        """Receive what the broker retains there; `done` is told "" after the last one, else why it went wrong.

        The sign of the end is the UNSUBACK that follows: a broker serves a client's packets in their order. It needs no
        time to be guessed, and no right to publish, which a client does not have on what it reads. The filters are none
        of the session's own, which would end with them. To be called again only when the one before is done.
        """
        if self.protocol == 5:
            code, mid = self._client.subscribe([(each, SubscribeOptions(qos=0)) for each in filters])
        else:
            code, mid = self._client.subscribe([(each, 0) for each in filters])
        if mid is None:
            done(f"the connection ended: {paho.error_string(code)}")
            return
        self._fetches[mid] = filters, done

    def end_fetches(self) -> None:
        """Tell those who wait for something retained that it will not come."""
        fetches, self._fetches = self._fetches, {}
        for _, done in fetches.values():
            done(self.reason or "the connection ended")

    def lost(self, reason: str) -> None:
        """Say why it ended, unless it is known already."""
        if self._socket_error:
            advice = "; does the broker want another client certificate?" if "SSL" in self._socket_error else ""
            reason = f"{reason}: {self._socket_error}{advice}"
        self.reason = self.reason or reason

    # ---- paho -------------------------------------------------------------------------------------------------------

    def _new_client(self) -> paho.Client:
        access, session = self._access, self._session
        is_v5 = self.protocol == 5
        client = BoundedClient(
            paho.CallbackAPIVersion.VERSION2,
            client_id=session.client_id,
            protocol=PROTOCOLS[self.protocol],
            clean_session=None if is_v5 else True,
            reconnect_on_failure=False,
            manual_ack=True,  # what is read past paho is acknowledged here
        )
        client.max_packet_bytes = session.max_packet_bytes
        client.user_timeout_s = session.keepalive_s
        client.is_local = access.address.is_this_machine
        client.takes_bursts = session.takes_bursts
        client.connect_timeout = CONNECT_LIMIT_S
        client.max_inflight_messages_set(0)  # bounded here, by `may_publish_qos1`
        username = access.address.username or access.username
        if username is not None:
            client.username_pw_set(username, access.password())
        if access.address.is_tls:
            client.tls_set_context(tls_context(access))
        if session.will is not None:
            will = session.will
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe
        client.on_publish = self._on_publish
        client.on_log = self._on_log
        return client

    def _on_log(self, client: Any, userdata: Any, level: int, text: str) -> None:  # noqa: ARG002 (paho's signature)
        """What the socket said, which paho tells only in its log; TLS 1.3 refuses a certificate after `connect`."""
        if level == paho.MQTT_LOG_ERR:
            self._socket_error = text.removeprefix("failed to receive on socket: ")

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:  # noqa: ARG002
        if reason.is_failure:
            self.reason = refusal(str(reason), self._access)
            self.is_protocol_refused = reason.value == UNSUPPORTED_PROTOCOL
            return
        self.is_accepted = True
        if self.protocol == 5:
            self.packet_limit = getattr(properties, "MaximumPacketSize", NO_LIMIT)
            self._in_flight_limit = min(QOS1_IN_FLIGHT, getattr(properties, "ReceiveMaximum", QOS1_IN_FLIGHT))
        wanted = self._session.subscriptions
        if not wanted:
            self._introduced()
        elif self.protocol == 5:
            _, self._subscribing = client.subscribe([
                (each.filter, SubscribeOptions(qos=each.qos, retainAsPublished=each.retain_as_published))
                for each in wanted
            ])  # fmt: skip
        else:
            _, self._subscribing = client.subscribe([(each.filter, each.qos) for each in wanted])

    def _on_subscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:  # noqa: ARG002
        if mid in self._fetches:
            self._fetched(mid, reasons)
            return
        if mid in self._nudges:
            self._nudges.remove(mid)
            return
        if mid != self._subscribing or len(reasons) != len(self._session.subscriptions):
            self.reason = "the broker acknowledges a subscription that nobody asked for"
            return
        refused = [
            f"{each.filter} ({reason})"
            for each, reason in zip(self._session.subscriptions, reasons, strict=False)
            if reason.is_failure and each.is_needed
        ]
        if refused:
            self.reason = f"the broker refuses to let this client listen to {', '.join(refused)}; see the broker's ACL"
            return
        self._introduced()

    def _introduced(self) -> None:
        """Nothing more is needed to be of use."""
        self.is_subscribed = True
        self._client.on_log = None  # it makes text of every message

    def _fetched(self, mid: int, reasons: Sequence[Any]) -> None:
        """What is retained is on its way: the next thing to come after it is the acknowledgement asked for here.

        Where the socket was full when it was asked for, mosquitto 2.0.11 keeps it back until the client's next message
        or SUBSCRIBE, even past an UNSUBACK; so it is given a SUBSCRIBE that changes nothing first.
        """
        filters, done = self._fetches.pop(mid)
        refused = [f"{each} ({reason})" for each, reason in zip(filters, reasons, strict=False) if reason.is_failure]
        if refused:
            done(f"the broker refuses to let this client listen to {', '.join(refused)}; see the broker's ACL")
            return
        self._nudge()
        code, end = self._client.unsubscribe(list(filters))
        if end is None:
            done(f"the connection ended: {paho.error_string(code)}")
            return
        self._fetches[end] = filters, done

    def _nudge(self) -> None:
        """Subscribe again to what is subscribed to, and nothing retained comes for it: MQTT 5 can say so."""
        for own in self._session.subscriptions[:1]:
            if self.protocol == 5:
                options = SubscribeOptions(
                    qos=own.qos,
                    retainAsPublished=own.retain_as_published,
                    retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND,
                )
                _, mid = self._client.subscribe([(own.filter, options)])
            else:
                _, mid = self._client.subscribe([(own.filter, own.qos)])
            self._nudges.add(mid)

    def _on_unsubscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:  # noqa: ARG002
        fetch = self._fetches.pop(mid, None)
        if fetch is not None:
            fetch[1]("")

    def _on_publish(self, client: Any, userdata: Any, mid: int, reason: Any, properties: Any) -> None:  # noqa: ARG002
        if self.in_flight.pop(mid, None) is not None and reason.is_failure:
            self.refused_publishes += 1

    def _on_disconnect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:  # noqa: ARG002
        if reason.value == SESSION_TAKEN_OVER:
            self.reason = (
                f"another client took over the session {self._session.client_id!r}: two devices with one device_id?"
            )
        elif flags.is_disconnect_packet_from_server and reason.is_failure:
            self.lost(f"the broker ended the connection: {reason}")
