"""Whose a message is, by the connection that brought it and what libzmq's monitor tells."""

from __future__ import annotations

import socket

import zmq

from edge_runtime.transports.zmq_connections import SOURCE_FD, Connections

WAIT_MS = 20_000


def test_a_connection_with_the_descriptor_of_one_that_has_just_ended_is_not_taken_for_it(tmp_path):
    path = tmp_path / "router.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        connections = Connections(context, router)
        ended: list[bytes] = []
        connections.ended = ended.append
        router.bind(f"ipc://{path}")
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            assert connections.socket.poll(WAIT_MS)
            connections.read()
        assert connections.socket.poll(WAIT_MS), "its end is told, and not read yet"
        dealer.connect(f"ipc://{path}")
        dealer.send(b"request")
        assert router.poll(WAIT_MS)
        identity, frame = router.recv(), router.recv(copy=False)
        known_before = len(connections)

        assert connections.meet(identity, frame)
        connections.read()
        assert (len(connections), known_before, ended) == (1, 1, [])
        assert connections.known[identity] is not None
        assert connections.known[identity].fd == frame.get(SOURCE_FD)
        connections.close()
