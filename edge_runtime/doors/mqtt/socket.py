"""The TCP or TLS connection to a broker, made so that few bytes wait in it.

Excess requests should wait in the broker, which bounds and counts them: no deadline covers the time that a request
waits in the kernel. A receiver cannot see how much the sender's kernel holds; it can only keep that buffer from
growing. The buffer grows with the packets in flight, and small messages are a packet each. At twice the load that a
tiny model can serve, through a mosquitto on the same machine, median wait and most bytes in the broker's buffer: 1.3 s
and 3.4 MB with the kernel's defaults, 0.43 s and 0.85 MB with the segments and buffers below, and more with any others
tried (segments of 256, 536, 8 000, 16 000 bytes; receive buffers of 4, 16, 32 KiB, of which 4 halves the rate). A
request of 600 KB takes 3.9 ms instead of 2.1.

A client that lists a fleet wants the contrary: everything that it asked for arrives at once, and mosquitto drops what
its kernel does not take. With these bounds and a reader that stood still, mosquitto 2.0.11 kept 2 638 status messages
in flight beside its own queue; without them (`takes_bursts`) more than 5 000, and 2 MB of states after them.
"""

from __future__ import annotations

import socket as sockets
import ssl

import paho.mqtt.client as paho

from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.packets import MAX_PACKET_BYTES, PacketSocket
from edge_runtime.errors import ConfigError

CONNECT_LIMIT_S = 5.0
"""For each step of a connection: TCP, TLS, CONNACK, SUBACK. A broker on the site answers in milliseconds."""

LOCAL_RECEIVE_BYTES, LOCAL_SEND_BYTES = 8 << 10, 32 << 10
"""Buffers towards a broker on this machine."""

LOCAL_SEGMENT_BYTES = 1400
"""As on a real network; over loopback a segment is 64 KiB otherwise."""

REMOTE_BYTES = 256 << 10, 256 << 10
"""Buffers towards a broker elsewhere: 5 MB/s over a round trip of 50 ms."""


class BoundedClient(paho.Client):  # type: ignore[misc]
    """paho's client over a socket of ours, since its buffers must be bounded before it connects.

    The two methods below override private ones of paho, which it may drop: tests/unit/doors/mqtt/test_mqtt_socket.py
    holds that they are there. `packets` is the socket of the last connection.
    """

    user_timeout_s: int = 20
    is_local: bool = False
    takes_bursts: bool = False
    max_packet_bytes: int = MAX_PACKET_BYTES
    packets: PacketSocket | None = None

    def _create_socket_connection(self) -> sockets.socket:
        return connect(
            self.host,
            self.port,
            CONNECT_LIMIT_S,
            user_timeout_s=self.user_timeout_s,
            is_local=self.is_local,
            takes_bursts=self.takes_bursts,
        )

    def _create_socket(self) -> PacketSocket:
        """Paho's socket, with TLS where it is set up, inside a `PacketSocket`."""
        self.packets = PacketSocket(super()._create_socket(), self.max_packet_bytes)
        return self.packets


def connect(
    host: str, port: int, limit_s: float, *, user_timeout_s: int, is_local: bool, takes_bursts: bool = False
) -> sockets.socket:
    """Connect to the first address that answers. Raises OSError.

    user_timeout_s: a peer that acknowledges nothing for this long is gone. is_local: the broker is on this machine.
    takes_bursts: leave the buffers to the kernel.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, address in sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM):
        socket = sockets.socket(family, kind, protocol)
        try:
            socket.settimeout(limit_s)
            _set_options(socket, user_timeout_s)
            if not takes_bursts:
                _bound(socket, is_local=is_local)
            socket.connect(address)
        except OSError as error:
            socket.close()
            failure = error
        else:
            return socket
    raise failure or OSError(f"{host} has no address")


def _set_options(socket: sockets.socket, user_timeout_s: int) -> None:
    # Without it each lone reply waits for the acknowledgement of the one before: 12 QoS 1 round trips a second.
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    # Without it the kernel tries for a quarter of an hour.
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, user_timeout_s * 1000)


def _bound(socket: sockets.socket, *, is_local: bool) -> None:
    receive_bytes, send_bytes = REMOTE_BYTES if not is_local else (LOCAL_RECEIVE_BYTES, LOCAL_SEND_BYTES)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_bytes)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, send_bytes)
    if is_local:
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_MAXSEG, LOCAL_SEGMENT_BYTES)


class ClosingSocket(ssl.SSLSocket):
    """Closes itself when its handshake fails; paho leaves that to the garbage collector."""

    def _handshake_or_close(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise

    do_handshake = _handshake_or_close


def tls_context(access: BrokerAccess) -> ssl.SSLContext:
    """A client's TLS context, 1.2 or newer. Raises ConfigError for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = ClosingSocket
        if access.cert_file is not None:
            context.load_cert_chain(access.cert_file, access.key_file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        names = ", ".join(str(each) for each in (access.ca_file, access.cert_file, access.key_file) if each)
        raise ConfigError(f"mqtt: the certificates cannot be used ({names}): {reason}") from None
    return context
