"""The TCP connection to a broker, made so that little waits in it.

What floods in should wait where the broker bounds and counts it: the time of a request that waits in the kernel is on
nobody's clock. A receiver cannot say how much its sender's kernel holds; it can only keep that end from growing, which
it does with the packets under way, and small messages are a packet each. Twice what a tiny model can serve, through a
mosquitto on the same machine, median wait and most bytes in the broker's end: 1.3 s and 3.4 MB as the kernel would have
it, 0.43 s and 0.85 MB with the segments and buffers below, and more with any others that were tried (segments of 256,
536, 8 000, 16 000 bytes; 4, 16, 32 KiB to receive into, of which 4 halves the rate). A request of 600 KB takes 3.9 ms
instead of 2.1.

Who lists a fleet wants the contrary: what it asked for comes at once, and what the broker cannot hand to its kernel it
drops. With these bounds and a reader that stood still mosquitto 2.0.11 kept 2 638 status messages on their way beside
its own queue, with none (`takes_bursts`) more than 5 000 and 2 MB of states after them.
"""

from __future__ import annotations

import socket as sockets

import paho.mqtt.client as paho

from edge_runtime.transports.mqtt_packets import PacketSocket
from edge_runtime.transports.mqtt_reasons import CONNECT_LIMIT_S

LOCAL_RECEIVE_BYTES, LOCAL_SEND_BYTES = 8 << 10, 32 << 10
"""Of a broker on this machine."""

LOCAL_SEGMENT_BYTES = 1400
"""As on a real network; over loopback a segment is 64 KiB otherwise."""

REMOTE_BYTES = 256 << 10, 256 << 10
"""Of a broker elsewhere: 5 MB/s over a round trip of 50 ms."""


class BoundedClient(paho.Client):  # type: ignore[misc]
    """paho's client over a connection of ours: what bounds a connection must be said before it is made.

    The two methods below are paho's own, which it does not promise to keep: tests/unit/test_mqtt_socket.py holds that
    it has them. `packets` is what the last connection is read and written through.
    """

    user_timeout_s: int = 20
    is_local: bool = False
    takes_bursts: bool = False
    max_packet_bytes: int = 268_435_455
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
        """TLS is paho's, when it is wanted; what it reads and writes through is ours."""
        self.packets = PacketSocket(super()._create_socket(), self.max_packet_bytes)
        return self.packets


def connect(
    host: str, port: int, limit_s: float, *, user_timeout_s: int, is_local: bool, takes_bursts: bool = False
) -> sockets.socket:
    """Connect to the first address that answers. Raises OSError.

    user_timeout_s: a peer that acknowledges nothing for so long is gone. is_local: the broker is on this machine.
    takes_bursts: as much may wait in the connection as the kernels let it.
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
