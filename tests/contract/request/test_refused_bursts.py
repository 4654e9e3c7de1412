"""Bursts of known headers that are refused whole or in part, before a request is made of any: one reply each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_runtime.request.replies import FRAMES, TransportReply
from edge_runtime.request.request import CallbackReply
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.wire.codec import unpack_request
from tests.contract.hosts.test_bursts_to_hosts import COUNT, Kit, known, pair
from tests.contract.running_daemon import header
from tests.fakes.requests import request_of
from tests.fakes.runs import FunctionRunner
from tests.models import onnx_models

QUEUE_ROWS = 6
LONG_S = 3600.0


@contextmanager
def stopped(folder: Path, toml: str = "", **fields: Any) -> Iterator[Kit]:
    """A kit whose model begins no run until the end. fields: of its header."""
    with known(folder, onnx_models.added, pair(0), toml, **fields) as kit:
        dispatcher, layout = kit.dispatcher, kit.servable.scheduled.layout
        dispatcher.mark_down(layout)
        try:
            yield kit
        finally:
            dispatcher.mark_up(layout)


@contextmanager
def late(folder: Path, timeout_ms: float) -> Iterator[Kit]:
    """A kit of whose model a request without a deadline waits, and which would be late for any with one."""
    with stopped(folder, timeout_ms=timeout_ms) as kit:
        reply = TransportReply(kit.frontend, kit.endpoint, (b"patient",), FRAMES, b"patient")
        kit.frontend.ask(kit.endpoint, b"patient", reply, unpack_request(header("m", (1, 2))), (pair(0),), None)
        kit.servable.scheduled.layout.run_times = LatencyModel({1: LONG_S})
        yield kit
        kit.servable.scheduled.layout.run_times = LatencyModel({1: 1e-4})


def send(kit: Kit, senders: list[bytes], prefix: str = "", tensor: Any = None) -> None:
    """Send a burst with one request of each of these senders, in order."""
    route = kit.frontend.routes()[kit.key]
    burst = [
        (sender, f"{prefix}{at}".encode(), pair(at) if tensor is None else tensor) for at, sender in enumerate(senders)
    ]
    kit.frontend.answer_burst(kit.endpoint, route, burst)


def heads(kit: Kit) -> dict[bytes, list[bytes]]:
    """The headers of all replies so far, by sender."""
    found: dict[bytes, list[bytes]] = {}
    for (sender, _), frames in kit.endpoint.replies.items():
        found.setdefault(sender, []).append(bytes(frames[0]))
    return found


@pytest.mark.parametrize(
    "senders",
    [
        [b"a", b"b"] * (COUNT // 2),
        [b"a"] * (COUNT // 2) + [b"b"] * (COUNT // 2),
        [b"a"] * (COUNT - QUEUE_ROWS // 2) + [b"b"] * (QUEUE_ROWS // 2),
    ],
    ids=["by turns", "one after the other", "few of one"],
)
@pytest.mark.parametrize("run_s", [1e-4, 0.010], ids=["run together", "run alone"])
def test_of_a_burst_that_fills_the_queue_each_sender_gets_its_half_and_the_rest_is_refused_once(
    tmp_path, senders, run_s
):
    with stopped(tmp_path, f"max_queue_rows = {QUEUE_ROWS}\n") as kit:
        kit.servable.scheduled.layout.run_times = LatencyModel({1: run_s, 32: 32 * run_s})
        send(kit, senders)

        kit.endpoint.wait_for(COUNT - QUEUE_ROWS)
        assert set(kit.endpoint.ends().values()) == {"queue_full"}
        refused = Counter(sender for sender, _ in kit.endpoint.replies)
    kit.endpoint.wait_for(COUNT)
    sent = Counter(senders)
    assert refused == {sender: count - QUEUE_ROWS // 2 for sender, count in sent.items() if count > QUEUE_ROWS // 2}
    assert Counter(type(end) for end in kit.endpoint.ends().values()) == {str: COUNT - QUEUE_ROWS, list: QUEUE_ROWS}
    assert kit.counted() == (QUEUE_ROWS + 3, {"queue_full": COUNT - QUEUE_ROWS})


@pytest.mark.smoke
def test_a_burst_that_would_be_late_is_refused_whole_with_one_header_for_each_sender(tmp_path):
    with late(tmp_path, timeout_ms=60_000.0) as kit:
        send(kit, [b"a", b"b", b"c"] * (COUNT // 3))

        found = heads(kit)
        assert {sender: len(each) for sender, each in found.items()} == dict.fromkeys((b"a", b"b", b"c"), COUNT // 3)
        for each in found.values():
            assert len(set(each)) == 1
            error = msgpack.unpackb(each[0])["error"]
            assert error["code"] == "deadline_unmeetable"
            assert error["retryable"]
            assert error["retry_after_ms"] > LONG_S * 500
        assert kit.counted()[1] == {"deadline_unmeetable": COUNT}


def test_nothing_of_a_refused_requests_tensor_is_touched(tmp_path):
    with late(tmp_path, timeout_ms=60_000.0) as kit:
        send(kit, [b"a"] * COUNT, tensor=object())
        send(kit, [b"b"], "alone", tensor=object())

        assert set(kit.endpoint.ends().values()) == {"deadline_unmeetable"}
        assert len(kit.endpoint.replies) == COUNT + 1


def test_after_a_lone_refusal_nothing_is_made_of_the_next_one(tmp_path):
    with late(tmp_path, timeout_ms=60_000.0) as kit:
        send(kit, [b"a"], "first")
        send(kit, [b"a"], "second", tensor=object())

        assert set(kit.endpoint.ends().values()) == {"deadline_unmeetable"}
        assert len(kit.endpoint.replies) == 2


def test_refusals_that_took_much_of_the_thread_are_held_and_still_sent_by_their_deadline(tmp_path):
    with late(tmp_path, timeout_ms=2_000.0) as kit:
        seconds = cycle(range(10**6))
        kit.thread_s = lambda: float(next(seconds))
        bursts = 0
        while len(kit.endpoint.replies) == bursts * COUNT:  # until one is held
            assert bursts < 200
            send(kit, [b"a"] * COUNT, f"{bursts}-")
            bursts += 1
        send(kit, [b"b"], "other")
        assert (b"b", b"other0") in kit.endpoint.replies, "of another sender none is held"

        kit.endpoint.wait_for(bursts * COUNT + 1)
        assert set(kit.endpoint.ends().values()) == {"deadline_unmeetable"}
        assert kit.counted()[1] == {"deadline_unmeetable": bursts * COUNT + 1}


def test_runs_that_began_or_ended_between_refused_bursts_are_not_part_of_what_refusing_costs(tmp_path):
    others = ScheduledModel("other", Layout(FunctionRunner(lambda arrays: arrays), run_times=LatencyModel({1: 1e-4})))
    with late(tmp_path, timeout_ms=60_000.0) as kit:
        seconds = cycle(range(10**6))
        kit.thread_s = lambda: float(next(seconds))
        for number in range(10):
            answered = threading.Event()
            request = request_of([np.zeros((1, 1), np.float32)], CallbackReply(lambda _, event=answered: event.set()))
            kit.dispatcher.admit(others, request)
            assert answered.wait(60.0)
            send(kit, [b"a"] * COUNT, f"{number}-")
            assert len(kit.endpoint.replies) == (number + 1) * COUNT, "none is held"
