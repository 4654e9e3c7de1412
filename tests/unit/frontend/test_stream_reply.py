"""Several responses to one request on a gRPC stream: a model waits for a caller that does not read them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from edge_runtime.errors import RunFailed
from edge_runtime.frontend.grpc_frontend import PARTS_AHEAD, GrpcEndpoint, PendingCall, StreamReply


def test_a_model_that_sends_more_than_its_caller_reads_is_held_and_told_when_the_caller_has_left() -> None:
    async def run() -> None:
        pending = PendingCall()
        transport: Any = SimpleNamespace(post=lambda action: action())
        frontend: Any = SimpleNamespace(listeners={})
        encoding: Any = SimpleNamespace(answer=lambda request, request_id: (b"response",))
        reply = StreamReply(frontend, GrpcEndpoint(transport, 1), (pending,), encoding, b"")
        request: Any = SimpleNamespace(is_given_up=False)
        for _ in range(PARTS_AHEAD):
            reply.part(request)
        assert await pending.next() == (b"response", False)
        request.is_given_up = True
        with pytest.raises(RunFailed, match="does not read"):
            reply.part(request)
        assert pending.room is not None
        pending.room.release()  # as the stream does when it has written a response
        reply.part(request)

    asyncio.run(run())
