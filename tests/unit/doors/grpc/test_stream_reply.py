"""Several responses to one request on a gRPC stream: a model waits for a caller that does not read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_runtime.doors.grpc.frontend import PARTS_AHEAD, GrpcEndpoint, PendingCall, StreamReply
from edge_runtime.errors import RunFailed
from tests.fakes import http2_peer as peer
from tests.unit.doors.grpc.test_grpc_pending import open_stream, written


def test_a_model_that_sends_more_than_its_caller_reads_is_held_and_reported_when_the_caller_has_left() -> None:
    http2, call, stream = open_stream(window=0)
    pending = PendingCall(call, stream)
    stream.add(pending)
    transport: Any = SimpleNamespace(call=lambda action: action())
    frontend: Any = SimpleNamespace(listeners={})
    encoding: Any = SimpleNamespace(answer=lambda request, request_id: (b"response",))
    reply = StreamReply(frontend, GrpcEndpoint(transport, 1), (pending,), encoding, b"")
    request: Any = SimpleNamespace(is_given_up=False)
    for _ in range(PARTS_AHEAD + 1):  # the first is handed over, and waits for the caller's window
        reply.part(request)
    assert written(http2) == []
    request.is_given_up = True
    with pytest.raises(RunFailed, match="does not read"):
        reply.part(request)
    for found, _ in http2.receive(peer.window(1 << 20, 1), 0.0):
        found.receiver = stream
        found.receiver.may_write()
    assert len(written(http2)) == PARTS_AHEAD + 1
    reply.part(request)
    assert len(written(http2)) == 1
