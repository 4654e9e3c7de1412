"""Several responses to one request on a gRPC stream: a caller that does not read them ends them."""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.parametrize("ends", ["with a part", "with none", "with an error"])
def test_parts_and_the_end_go_in_their_order_where_the_doors_own_thread_gives_them(ends: str) -> None:
    http2, call, stream = open_stream(window=1 << 16)
    pending = PendingCall(call, stream)
    stream.add(pending)
    later: list[Callable[[], None]] = []
    transport: Any = SimpleNamespace(call=later.append, is_own_thread=True)
    frontend: Any = SimpleNamespace(listeners={})
    texts = iter((b"first", b"second", b"last"))
    encoding: Any = SimpleNamespace(
        answer=lambda request, request_id: (next(texts),), refusal=lambda error, _: (error,)
    )
    reply = StreamReply(frontend, GrpcEndpoint(transport, 1), (pending,), encoding, b"")
    plan = SimpleNamespace(servable=SimpleNamespace(model="words", number=1))
    request: Any = SimpleNamespace(is_given_up=False, outputs=[b""] if ends == "with a part" else None, plan=plan)
    reply.part(request)
    reply.part(request)
    if ends == "with an error":
        reply.refuse(RunFailed("its host ended"))
    else:
        reply.answer(request)
    for action in later:
        action()
    sent = b"".join(written(http2))
    wanted = {"with a part": [b"last"], "with none": [], "with an error": [b"its host ended"]}[ends]
    places = [sent.index(text) for text in (b"first", b"second", *wanted)]
    assert places == sorted(places)
    assert not stream.waiting
