"""Several responses to one request on a gRPC stream: a caller that does not read them ends them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_runtime.doors.grpc.frontend import UNREAD_BYTES, GrpcEndpoint, PendingCall, StreamReply
from edge_runtime.errors import RunFailed
from tests.fakes import http2_peer as peer
from tests.unit.doors.grpc.test_grpc_pending import open_stream, written


def test_a_model_that_sends_more_than_its_caller_reads_is_told_so_and_no_thread_waits() -> None:
    http2, call, stream = open_stream(window=0)
    pending = PendingCall(call, stream)
    stream.add(pending)
    transport: Any = SimpleNamespace(call=lambda action: action())
    frontend: Any = SimpleNamespace(listeners={})
    response = bytes(UNREAD_BYTES // 4)
    encoding: Any = SimpleNamespace(answer=lambda request, request_id: (response,))
    reply = StreamReply(frontend, GrpcEndpoint(transport, 1), (pending,), encoding, b"")
    request: Any = SimpleNamespace(is_given_up=False)
    for _ in range(5):  # the first is handed over, and waits for the caller's window
        reply.part(request)
    assert written(http2) == []
    with pytest.raises(RunFailed, match="does not read"):
        reply.part(request)
    for found, _ in http2.receive(peer.window(8 * UNREAD_BYTES, 1) + peer.window(8 * UNREAD_BYTES, 0), 0.0):
        found.receiver = stream
        found.receiver.may_write()
    reply.part(request)
