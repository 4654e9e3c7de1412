"""A connection to a broker holds little, whichever library drives it."""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Iterator

import paho.mqtt.client as paho
import pytest

from edge_runtime.doors.mqtt.packets import PacketSocket
from edge_runtime.doors.mqtt.socket import (
    LOCAL_RECEIVE_BYTES,
    LOCAL_SEGMENT_BYTES,
    LOCAL_SEND_BYTES,
    BoundedClient,
    connect,
)


@pytest.fixture
def listener() -> Iterator[sockets.socket]:
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(listener: sockets.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_connection_on_this_machine_holds_little_and_waits_for_nothing(listener: sockets.socket) -> None:
    with connect("127.0.0.1", port_of(listener), 5.0, user_timeout_s=7, is_local=True) as socket:
        assert socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY)
        assert socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT) == 7000
        assert socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_MAXSEG) <= LOCAL_SEGMENT_BYTES
        # The kernel doubles what is asked for, for its own accounts (socket(7)).
        assert socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF) <= 2 * LOCAL_RECEIVE_BYTES
        assert socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF) <= 2 * LOCAL_SEND_BYTES


def test_a_connection_that_takes_bursts_is_bounded_by_the_kernel_alone(listener: sockets.socket) -> None:
    with (
        sockets.create_connection(("127.0.0.1", port_of(listener))) as plain,
        connect("127.0.0.1", port_of(listener), 5.0, user_timeout_s=7, is_local=True, takes_bursts=True) as socket,
    ):
        for level, option in (
            (sockets.SOL_SOCKET, sockets.SO_RCVBUF),
            (sockets.SOL_SOCKET, sockets.SO_SNDBUF),
            (sockets.IPPROTO_TCP, sockets.TCP_MAXSEG),
        ):
            assert socket.getsockopt(level, option) == plain.getsockopt(level, option)


def test_every_address_of_a_name_is_tried(listener: sockets.socket) -> None:
    with connect("localhost", port_of(listener), 5.0, user_timeout_s=7, is_local=True) as socket:
        assert socket.getpeername()[1] == port_of(listener)


def test_nobody_there_is_an_oserror() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as gone:
        port = port_of(gone)
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, 5.0, user_timeout_s=7, is_local=True)


def test_paho_makes_its_connections_through_ours_and_reads_through_our_packets(listener: sockets.socket) -> None:
    """The two methods that are overridden are paho's own: a version without them would pass them by."""
    client = BoundedClient(paho.CallbackAPIVersion.VERSION2)
    client.is_local = True
    client.connect("127.0.0.1", port_of(listener))
    socket = client.socket()
    assert isinstance(socket, PacketSocket)
    assert socket is client.packets
    try:
        with sockets.socket(fileno=os.dup(socket.fileno())) as twin:
            assert twin.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_MAXSEG) <= LOCAL_SEGMENT_BYTES
    finally:
        socket.close()
