"""An MQTT client for tests, on paho: it says what the broker answered, and leaves nothing behind when it is closed.

Every wait is for an event and has an end. Methods may be called from any thread but paho's own.
"""

from __future__ import annotations

import ssl
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edge_runtime.doors.mqtt.socket import ClosingSocket
from tests.fakes.broker import Tls

if TYPE_CHECKING:
    from typing_extensions import Self

ANSWER_S = 60.0
"""How long anything may take before the test fails: far above anything but a hang."""

CLOSE_S = 2.0
"""How long a clean goodbye may take before the connection is cut: it may lead nowhere."""

RETRY_S = 0.05, 0.2
"""First and longest pause between attempts to connect again."""

PROTOCOLS = {4: paho.MQTTv311, 5: paho.MQTTv5}


class NotConnected(Exception):
    """The broker refused or ended the connection; the text is its reason, or what the network said."""


@dataclass(frozen=True)
class Connack:
    """The broker's answer to CONNECT. A 3.1.1 broker sends no properties."""

    reason: ReasonCode
    properties: Properties
    session_present: bool


@dataclass(frozen=True)
class Will:
    """What the broker is to publish when this client vanishes."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False


class Peer:
    """Connects to `url` on entering (raises NotConnected when refused), and says goodbye on leaving.

    protocol: 5, or 4 for MQTT 3.1.1. reconnects: comes back, and subscribes again, after the connection broke;
    otherwise it stays gone. session_expiry_s: keeps the session that long (MQTT 5). `connack` is the last one.
    """

    def __init__(
        self,
        url: str,
        protocol: int = 5,
        client_id: str | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: Tls | None = None,
        keepalive: int = 60,
        *,
        clean_start: bool = True,
        session_expiry_s: int | None = None,
        will: Will | None = None,
        reconnects: bool = False,
    ) -> None:
        self.client_id = client_id or f"peer-{uuid.uuid4().hex[:12]}"
        self.reply_topic = f"reply/{self.client_id}"
        self.connack: Connack | None = None
        self._where = urlsplit(url)
        self._is_v5 = protocol == 5
        self._reconnects = reconnects
        self._keepalive = keepalive
        self._clean_start = clean_start
        self._session_expiry_s = session_expiry_s
        # Invariant: what paho's thread tells is written and read under this condition.
        self._changed = threading.Condition()
        self._gone: str | None = None
        self._connections = 0
        self._acknowledged: dict[int, ReasonCode] = {}
        self._inbox: deque[paho.MQTTMessage] = deque()
        self._replies: dict[bytes, paho.MQTTMessage | None] = {}
        self._filters: dict[str, int] = {}
        self._resubscribing: int | None = None
        self._asking = threading.Lock()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            self.client_id,
            clean_session=None if self._is_v5 else clean_start,
            protocol=PROTOCOLS[protocol],
            reconnect_on_failure=reconnects,
        )
        self._client.reconnect_delay_set(*RETRY_S)
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda _client, _data, mid, reasons, _properties: self._on_ack(mid, reasons[0])
        self._client.on_publish = lambda _client, _data, mid, reason, _properties: self._on_ack(mid, reason)
        if username is not None:
            self._client.username_pw_set(username, password)
        if tls is not None:
            self._client.tls_set_context(_context(tls))
        if will is not None:
            self._client.will_set(will.topic, will.payload, will.qos, will.retain)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect and wait for CONNACK."""
        options: dict[str, Any] = {}
        if self._is_v5:
            options = {"clean_start": self._clean_start, "properties": Properties(PacketTypes.CONNECT)}
            if self._session_expiry_s is not None:
                options["properties"].SessionExpiryInterval = self._session_expiry_s
        assert self._where.hostname is not None
        try:
            self._client.connect(self._where.hostname, self._where.port or 1883, self._keepalive, **options)
        except OSError as error:  # ssl's errors are too
            self.close()
            raise NotConnected(str(error)) from None
        self._client.loop_start()
        with self._changed:
            is_answered = self._changed.wait_for(lambda: self.connack is not None or self._gone is not None, ANSWER_S)
            connack, gone = self.connack, self._gone
        if connack is None or connack.reason.is_failure:
            self.close()
            if connack is not None:
                raise NotConnected(connack.reason.getName())
            raise NotConnected(gone if is_answered else f"no CONNACK in {ANSWER_S} s")

    def close(self) -> None:
        """Say goodbye, and leave no thread or socket, whatever became of the broker."""
        if self._client.is_connected() and self._client.disconnect() == paho.MQTT_ERR_SUCCESS:
            with self._changed:
                self._changed.wait_for(lambda: self._gone is not None, CLOSE_S)
        self._client.disconnect()  # stops attempts to connect again
        # loop_stop waits for what is unsent or unacknowledged, on a connection that may lead nowhere.
        self._client.drop_out_messages()
        self.cut()
        self._client.loop_stop()
        self._client._reset_sockets()

    def cut(self) -> None:
        """End the connection with no goodbye, so that the broker publishes the will."""
        connection = self._client.socket()
        if connection is not None:
            try:
                connection.shutdown(2)
            except OSError:
                return  # it was closed meanwhile

    def subscribe(self, pattern: str, qos: int = 0) -> ReasonCode:
        """Subscribe and return SUBACK's reason, which compares to its name ("Granted QoS 0") and to its number."""
        reason = self._acknowledgement(lambda: self._client.subscribe(pattern, qos))
        if not reason.is_failure:
            with self._changed:
                self._filters[pattern] = qos
        return reason

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        *,
        response_topic: str | None = None,
        correlation: bytes | None = None,
        content_type: str | None = None,
        expiry_s: int | None = None,
        user_properties: Iterable[tuple[str, str]] = (),
    ) -> str | None:
        """Publish. With QoS 1 or 2 wait for the acknowledgement and return its reason's name; with QoS 0 None.

        Raises NotConnected when the connection ends first.
        """
        properties = Properties(PacketTypes.PUBLISH) if self._is_v5 else None
        given = {
            "ResponseTopic": response_topic,
            "CorrelationData": correlation,
            "ContentType": content_type,
            "MessageExpiryInterval": expiry_s,
            "UserProperty": list(user_properties) or None,
        }
        for name, value in given.items():
            if value is not None:
                assert properties is not None, f"MQTT 3.1.1 has no {name}"
                setattr(properties, name, value)

        def send() -> tuple[int, int | None]:
            sent = self._client.publish(topic, payload, qos, retain, properties)
            return sent.rc, sent.mid

        if qos == 0:
            code, _ = send()
            if code:
                raise NotConnected(paho.error_string(code))
            return None
        return self._acknowledgement(send).getName()

    def next(self, timeout_s: float = ANSWER_S) -> paho.MQTTMessage:
        """The oldest message that was not taken yet, replies to `ask` excepted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._inbox, timeout_s):
                raise AssertionError(f"no message came in {timeout_s} s; connection: {self._gone or 'up'}")
            return self._inbox.popleft()

    def is_silent(self, seconds: float) -> bool:
        """Whether no message waits or comes for so long."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._inbox, seconds)

    def ask(
        self, topic: str, payload: bytes | str = b"", qos: int = 0, *, timeout_s: float = ANSWER_S, **options: Any
    ) -> paho.MQTTMessage:
        """Send a request (MQTT 5) with a fresh correlation, and return the message that answers it.

        options: what `publish` takes. A `correlation` given is used; the reply is taken from `reply_topic`.
        """
        with self._asking:
            if self.reply_topic not in self._filters:
                reason = self.subscribe(self.reply_topic, 1)
                assert not reason.is_failure, reason
        correlation = options.setdefault("correlation", uuid.uuid4().bytes)
        with self._changed:
            self._replies[correlation] = None
        try:
            reason_name = self.publish(topic, payload, qos, response_topic=self.reply_topic, **options)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._replies[correlation] is not None or (self._gone is not None and not self._reconnects),
                    timeout_s,
                )
                reply = self._replies[correlation]
            assert reply is not None, (
                f"no reply in {timeout_s} s to {topic}; PUBACK: {reason_name}; connection: {self._gone or 'up'}"
            )
            return reply
        finally:
            with self._changed:
                del self._replies[correlation]

    def wait_gone(self, timeout_s: float = ANSWER_S) -> str:
        """Wait until the connection has ended; return the broker's reason, or paho's when it gave none."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._gone is not None, timeout_s), "the connection is still there"
            assert self._gone is not None
            return self._gone

    def wait_connections(self, count: int, timeout_s: float = ANSWER_S) -> None:
        """Wait until it has connected, and subscribed again, that many times in all (the first counts)."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._connections >= count, timeout_s), (
                f"connected {self._connections} times, wanted {count}; connection: {self._gone or 'up'}"
            )

    def _acknowledgement(self, send: Callable[[], tuple[int, int | None]]) -> ReasonCode:
        code, mid = send()
        if code or mid is None:
            raise NotConnected(paho.error_string(code))
        with self._changed:
            self._changed.wait_for(lambda: mid in self._acknowledged or self._gone is not None, ANSWER_S)
            if mid in self._acknowledged:
                return self._acknowledged.pop(mid)
            raise NotConnected(self._gone or f"no acknowledgement in {ANSWER_S} s")

    # ---- in paho's thread ----

    def _on_connect(self, _client: Any, _data: Any, flags: Any, reason: ReasonCode, properties: Properties) -> None:
        with self._changed:
            self.connack = Connack(reason, properties, flags.session_present)
            if not reason.is_failure:
                self._gone = None
            self._changed.notify_all()
            patterns = list(self._filters.items())
        if patterns and not reason.is_failure:
            # Its SUBACK is the sign that the connection is whole again.
            self._resubscribing = self._client.subscribe(patterns)[1]
        elif not reason.is_failure:
            self._count_connection()

    def _on_ack(self, mid: int, reason: ReasonCode) -> None:
        if mid == self._resubscribing:
            self._count_connection()
            return
        with self._changed:
            self._acknowledged[mid] = reason
            self._changed.notify_all()

    def _count_connection(self) -> None:
        self._resubscribing = None
        with self._changed:
            self._connections += 1
            self._changed.notify_all()

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        with self._changed:
            self._gone = reason.getName()
            self._changed.notify_all()

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        correlation = getattr(message.properties, "CorrelationData", None)
        with self._changed:
            if message.topic == self.reply_topic and self._replies.get(correlation, message) is None:
                self._replies[correlation] = message
            else:
                self._inbox.append(message)
            self._changed.notify_all()


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca))
    if tls.certificate is not None:
        context.load_cert_chain(str(tls.certificate), str(tls.key))
    context.sslsocket_class = ClosingSocket
    return context
