"""One connection to a broker over paho, from its socket to its end; the next connection is a new object.

Owns: paho's set-up (credentials, will, limits) and the meaning of its callbacks. paho runs no thread and keeps nothing
over a loss: transport.py reads, writes and decides. paho's own loop would read one message at each wake-up, and
its queue of unsent messages has no bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.packets import MAX_PACKET_BYTES, Inbound, Outgoing, packed_publish
from edge_runtime.doors.mqtt.socket import CONNECT_LIMIT_S, BoundedClient, tls_context
from edge_runtime.doors.mqtt.state import refusal

log = logging.getLogger(__name__)

PROTOCOLS = {5: paho.MQTTv5, 4: paho.MQTTv311}
UNSUPPORTED_PROTOCOL = 0x84
SESSION_TAKEN_OVER = 0x8E
QOS1_IN_FLIGHT = 64
"""Most QoS 1 messages sent and not acknowledged; a broker with a lower Receive Maximum gets fewer."""

MAX_UNSENT_BYTES = 64 << 10
"""Most bytes handed over and not sent: about 400 small replies, which can no longer be dropped."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A filter, its QoS, and whether live messages keep their retain flag (MQTT 5).

    is_needed: a broker that refuses this subscription ends the connection. sends_retained: whether a broker of MQTT 5
    sends what it retains, too; one of 3.1.1 does.
    """

    filter: str
    qos: int = 1
    retain_as_published: bool = True
    is_needed: bool = True
    sends_retained: bool = True


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """The contents of CONNECT and SUBSCRIBE; `MqttSettings` has the reasons of the numbers.

    takes_bursts: leave the socket's buffers to the kernel (socket.py).
    """

    client_id: str
    subscriptions: tuple[Subscription, ...] = ()
    will: Outgoing | None = None
    keepalive_s: int = 20
    session_expiry_s: int = 0
    receive_maximum: int = 1024
    max_packet_bytes: int = 64 << 20
    takes_bursts: bool = False


class PackedProperties(Properties):  # type: ignore[misc]
    """Properties of a PUBLISH that are packed already: paho's packing takes longer than the rest of a reply."""

    def __init__(self, packed: bytes) -> None:
        object.__setattr__(self, "packetType", PacketTypes.PUBLISH)
        object.__setattr__(self, "packed", packed)

    def pack(self) -> bytes:
        """The bytes, with their length."""
        return self.packed  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return ""


class MqttConnection:
    """A connection attempt, and the connection that it becomes. Thread: the transport's, every method.

    received: messages that `read` appends, in order of arrival; the transport takes them out. options: of CONNECT, with
    the subscriptions of now. Raises ConfigError for
    files that cannot be used.
    """

    def __init__(
        self,
        access: BrokerAccess,
        options: ConnectOptions,
        *,
        protocol: int,
        is_first: bool,
    ) -> None:
        self.protocol = protocol
        self.received: list[Inbound] = []
        self.packet_limit = MAX_PACKET_BYTES
        self.is_answered = False
        self.is_accepted = False
        self.is_subscribed = False
        self.reason = ""
        self.is_protocol_refused = False
        self.in_flight: dict[int, Outgoing] = {}
        self.refused_publishes = 0
        self._access = access
        self.options = options
        self._is_first = is_first
        self._in_flight_limit = QOS1_IN_FLIGHT
        self._socket_error = ""
        self._subscribing: int | None = None
        self._fetches: dict[int, tuple[Sequence[str], Callable[[str], None]]] = {}
        self._nudges: set[int | None] = set()
        self._added: dict[int | None, Sequence[Subscription]] = {}
        self._client = self._new_client()

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and send CONNECT; blocks up to CONNECT_LIMIT_S for TCP and again for TLS. Raises OSError."""
        options, arguments = self.options, dict[str, Any]()
        if self.protocol == 5:
            properties = Properties(PacketTypes.CONNECT)
            properties.ReceiveMaximum = options.receive_maximum
            properties.MaximumPacketSize = options.max_packet_bytes
            if options.session_expiry_s:
                properties.SessionExpiryInterval = options.session_expiry_s
            arguments = {"clean_start": self._is_first or not options.session_expiry_s, "properties": properties}
        address = self._access.address
        self._client.connect(address.host, address.port, options.keepalive_s, **arguments)
        self.flush()

    def close(self) -> None:
        """Send DISCONNECT if connected, and close the socket. Idempotent."""
        if self._client.is_connected():
            self._client.disconnect()
            self._client.loop_write()
        socket = self._client.socket()
        if socket is not None:
            # paho closes only a socket on which it sent DISCONNECT; one still connecting is closed here.
            socket.close()

    def break_off(self) -> None:
        """Close the socket without DISCONNECT: the broker then publishes the will."""
        socket = self._client.socket()
        if socket is not None:
            socket.close()

    @property
    def fd(self) -> int:
        """The socket's descriptor; -1 without one."""
        socket = self._client.socket()
        return -1 if socket is None else int(socket.fileno())

    @property
    def is_open(self) -> bool:
        """Whether there is a socket."""
        return self.fd >= 0

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def read(self, max_messages: int) -> bool:
        """Read up to `max_messages` packets. Return False when the connection is lost; `reason` then says why."""
        client, packets = self._client, self._client.packets
        if packets is None:
            return False
        try:
            if not packets.has_packet() and not packets.fill():
                client.loop_read()  # reports the end to `_on_disconnect`
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
                if self.is_accepted:  # before CONNACK the peer may be anything
                    self.received.append(message)
                if mid:
                    client.ack(mid, 1)
        except ValueError as error:
            self.lost(f"the broker sends bytes that are not MQTT: {error}")
            return False
        return True

    def has_pending(self) -> bool:
        """Whether more can be read without the descriptor becoming readable."""
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
        """Send handed-over bytes as far as the socket takes them. Return False when the connection is lost."""
        client, packets = self._client, self._client.packets
        if client.want_write():
            client.loop_write()  # packets queued inside a callback go to `packets`
        if packets is not None and not packets.flush():
            client.loop_read()  # reports the reason to `_on_disconnect`
            return False
        return True

    def keep_alive(self) -> bool:
        """Ping a silent broker; call each second. Return False when it did not answer in time."""
        return bool(self._client.loop_misc() == paho.MQTT_ERR_SUCCESS)

    def may_publish_qos1(self) -> bool:
        """Whether one more message may be sent before an acknowledgement."""
        return len(self.in_flight) < self._in_flight_limit

    def publish(self, message: Outgoing) -> None:
        """Hand a message over to `flush`. Raises ValueError for one that cannot be sent."""
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
        """Receive the messages retained under `filters`; `done("")` follows the last one, `done(reason)` a failure.

        UNSUBACK marks the end, since a broker serves a client's packets in order: no time has to be guessed, and the
        client needs no right to publish. The filters must not be among `ConnectOptions.subscriptions`, which would end
        with them. Call again only after `done`.
        """
        code, mid = self._subscribe([Subscription(each, 0, retain_as_published=False) for each in filters])
        if mid is None:
            done(f"the connection ended: {paho.error_string(code)}")
            return
        self._fetches[mid] = filters, done

    def subscribe_anew(self, options: ConnectOptions) -> None:
        """Subscribe to what these options have and those before had not, and end the others. After the handshake."""
        before, self.options = self.options, options
        filters = [{each.filter for each in which.subscriptions} for which in (before, options)]
        added = [each for each in options.subscriptions if each.filter not in filters[0]]
        gone = sorted(filters[0] - filters[1])
        if added:
            _, mid = self._subscribe(added)
            self._added[mid] = added
        if gone:
            self._client.unsubscribe(gone)

    def end_fetches(self) -> None:
        """Fail the fetches that are not done."""
        fetches, self._fetches = self._fetches, {}
        for _, done in fetches.values():
            done(self.reason or "the connection ended")

    def lost(self, reason: str) -> None:
        """Set the reason of the end, unless it is known."""
        if self._socket_error:
            advice = "; does the broker want another client certificate?" if "SSL" in self._socket_error else ""
            reason = f"{reason}: {self._socket_error}{advice}"
        self.reason = self.reason or reason

    # ---- paho -------------------------------------------------------------------------------------------------------

    def _new_client(self) -> paho.Client:
        access, options = self._access, self.options
        is_v5 = self.protocol == 5
        client = BoundedClient(
            paho.CallbackAPIVersion.VERSION2,
            client_id=options.client_id,
            protocol=PROTOCOLS[self.protocol],
            clean_session=None if is_v5 else True,
            reconnect_on_failure=False,
            manual_ack=True,  # messages bypass paho, so `read` acknowledges them
        )
        client.max_packet_bytes = options.max_packet_bytes
        client.user_timeout_s = options.keepalive_s
        client.is_local = access.address.is_this_machine
        client.takes_bursts = options.takes_bursts
        client.connect_timeout = CONNECT_LIMIT_S
        client.max_inflight_messages_set(0)  # bounded here, by `may_publish_qos1`
        username = access.address.username or access.username
        if username is not None:
            client.username_pw_set(username, access.password())
        if access.address.is_tls:
            client.tls_set_context(tls_context(access))
        will = options.will
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe
        client.on_publish = self._on_publish
        client.on_log = self._on_log
        return client

    def _on_log(self, client: Any, userdata: Any, level: int, text: str) -> None:  # noqa: ARG002 (paho's signature)
        """Keep the socket's error, which paho only logs; with TLS 1.3 a certificate is refused after `connect`."""
        if level == paho.MQTT_LOG_ERR:
            self._socket_error = text.removeprefix("failed to receive on socket: ")

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:  # noqa: ARG002
        self.is_answered = True
        if reason.is_failure:
            self.reason = refusal(str(reason), self._access)
            self.is_protocol_refused = reason.value == UNSUPPORTED_PROTOCOL
            return
        self.is_accepted = True
        if self.protocol == 5:
            self.packet_limit = getattr(properties, "MaximumPacketSize", MAX_PACKET_BYTES)
            self._in_flight_limit = min(QOS1_IN_FLIGHT, getattr(properties, "ReceiveMaximum", QOS1_IN_FLIGHT))
        wanted = self.options.subscriptions
        if not wanted:
            self._finish_handshake()
        else:
            _, self._subscribing = self._subscribe(wanted)

    def _on_subscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:  # noqa: ARG002
        if mid in self._fetches:
            self._fetched(mid, reasons)
            return
        if mid in self._nudges:
            self._nudges.remove(mid)
            return
        if mid in self._added:
            for each, reason in zip(self._added.pop(mid), reasons, strict=False):
                if reason.is_failure:
                    log.warning("the broker refuses to let it listen to %s (%s); see its ACL", each.filter, reason)
            return
        if mid != self._subscribing or len(reasons) != len(self.options.subscriptions):
            self.reason = "the broker acknowledges a subscription that was not requested"
            return
        refused = [
            f"{each.filter} ({reason})"
            for each, reason in zip(self.options.subscriptions, reasons, strict=False)
            if reason.is_failure and each.is_needed
        ]
        if refused:
            self.reason = f"the broker refuses to let this client listen to {', '.join(refused)}; see the broker's ACL"
            return
        self._finish_handshake()

    def _finish_handshake(self) -> None:
        self.is_subscribed = True
        self._client.on_log = None  # paho would format a text for every message

    def _fetched(self, mid: int, reasons: Sequence[Any]) -> None:
        """SUBACK: the retained messages follow, and after them the UNSUBACK that is requested here.

        Where the socket was full meanwhile, mosquitto 2.0.11 keeps retained messages back until the client's next
        message or SUBSCRIBE, even past an UNSUBACK; a SUBSCRIBE that changes nothing releases them.
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
        """Repeat a subscription, in MQTT 5 without its retained messages."""
        own = self.options.subscriptions[:1]
        if own:
            _, mid = self._subscribe(own, sends_retained=False)
            self._nudges.add(mid)

    def _subscribe(
        self, subscriptions: Sequence[Subscription], *, sends_retained: bool = True
    ) -> tuple[int, int | None]:
        """SUBSCRIBE; paho's error code, and the packet identifier."""
        wanted: list[tuple[str, Any]] = []
        for each in subscriptions:
            options = SubscribeOptions(qos=each.qos, retainAsPublished=each.retain_as_published)
            if not (sends_retained and each.sends_retained):
                options.retainHandling = SubscribeOptions.RETAIN_DO_NOT_SEND
            wanted.append((each.filter, options if self.protocol == 5 else each.qos))
        return self._client.subscribe(wanted)  # type: ignore[no-any-return]

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
                f"another client took over the session {self.options.client_id!r}: two devices with one device_id?"
            )
        elif flags.is_disconnect_packet_from_server and reason.is_failure:
            self.lost(f"the broker ended the connection: {reason}")
