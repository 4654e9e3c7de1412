"""Bursts of small requests to models in real hosts: run as one, answered and refused one by one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.request.replies import FRAMES, JSON, Encoding, JsonEncoding, TransportReply
from edge_runtime.request.scheduled_model import LatencyModel
from edge_runtime.wire.codec import unpack_request
from tests.contract.running_daemon import ANSWER_S, RawClient, header, put_model, running_daemon
from tests.fakes.loop_thread import LoopThread
from tests.models import onnx_models
from tests.models.harmful_models import SMALLEST, dividing

COUNT = 24


class KeptAnswers:
    """An endpoint that keeps every reply, by sender and id, and how many came at once."""

    is_control = False
    max_frame_bytes = 1 << 20

    def __init__(self, encoding: Encoding = FRAMES) -> None:
        self.encoding = encoding
        self.replies: dict[tuple[bytes, bytes], tuple[Any, ...]] = {}
        self.at_once: list[int] = []
        self._changed = threading.Condition()

    def sender(self, origin: bytes) -> bytes:
        return origin

    def post_answers(self, entries: Any, head: bytes, payloads: Any, reply_bytes: int) -> None:
        assert all(sum(map(len, frames)) == reply_bytes for frames in payloads)
        with self._changed:
            self.at_once.append(len(entries))
        for (origin, request_id, _), frames in zip(entries, payloads, strict=True):
            self.post((origin,), (head, request_id, *frames))

    def post(self, envelope: Any, frames: Any) -> None:
        with self._changed:
            key = (envelope[0], frames[1])
            assert key not in self.replies, "a second reply"
            self.replies[key] = frames
            self._changed.notify_all()

    send = post

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.replies) >= count, ANSWER_S), len(self.replies)

    def ends(self) -> dict[bytes, Any]:
        """By id: what was answered, or the code of an error."""
        found = {}
        for (_, request_id), (head, _, *frames) in self.replies.items():
            error = msgpack.unpackb(bytes(head)).get("error")
            found[request_id] = error["code"] if error else np.frombuffer(b"".join(frames), np.float32).tolist()
        return found


class KeptTexts(KeptAnswers):
    """The same for replies in JSON, each of which is sent by itself."""

    post_answers = None  # type: ignore[assignment]

    def __init__(self, encoding: Encoding = JSON) -> None:
        super().__init__(encoding)

    def post(self, envelope: Any, frames: Any) -> None:
        text = json.loads(frames[0])
        super().post(envelope, (text, text["id"].encode()))

    send = post

    def ends(self) -> dict[bytes, Any]:
        return {
            request_id: text["error"]["code"]
            if "error" in text
            else [value for output in text["outputs"] for value in output["data"]]
            for (_, request_id), (text, *_) in self.replies.items()
        }


class Kit:
    """A frontend of one hosted model whose header is known."""

    def __init__(self, core: Any, key: bytes, tensor: bytes, endpoint: KeptAnswers) -> None:
        operations = OperationHandlers(
            core.table, core.loader, core.pending_loads, SimpleNamespace(is_ready=True, stats=dict)
        )
        self.thread_s: Callable[[], float] = time.thread_time
        self.frontend = InferFrontend(
            core.table, core.infer, operations, core.clock, core.metrics, thread_s=self._now_s
        )
        self.dispatcher = core.infer.dispatcher
        self.endpoint = endpoint
        self.is_text = isinstance(endpoint, KeptTexts)
        for index in range(3):
            reply = TransportReply(self.frontend, self.endpoint, (b"first",), endpoint.encoding, self._id(index))
            self.frontend.ask(self.endpoint, b"first", reply, unpack_request(key), (tensor,), key, endpoint.encoding)
        self.endpoint.wait_for(3)
        self.endpoint.replies.clear()
        # A busy machine may have found them longer than those which are run together.
        self.servable = core.table.resolve("m", None)
        self.servable.scheduled.layout.run_times = LatencyModel({1: 1e-4, 32: 1e-4})
        self.key = key

    def _id(self, number: int) -> Any:
        return str(number) if self.is_text else b"%d" % number

    def _now_s(self) -> float:
        return self.thread_s()

    def send(self, *tensors: bytes, senders: tuple[bytes, ...] = (b"peer",)) -> dict[bytes, Any]:
        """Send one burst, numbered from 0; return how each of it ended."""
        route = self.frontend.routes()[self.key]
        burst = [(senders[at % len(senders)], self._id(at), tensor) for at, tensor in enumerate(tensors)]
        self.frontend.answer_burst(self.endpoint, route, burst)
        self.endpoint.wait_for(len(burst))
        return self.endpoint.ends()

    def counted(self) -> tuple[int, dict[str, int]]:
        metrics = self.servable.metrics
        return metrics.answered_requests, dict(metrics.refusals)


@pytest.fixture(params=["threads wait", "events"])
def loop(request: pytest.FixtureRequest) -> Iterator[IoLoop | None]:
    """The loop on which runs end; None: a thread waits for each."""
    if request.param != "events":
        yield None
        return
    with LoopThread() as thread:
        yield thread.loop


@contextmanager
def known(
    folder: Path,
    maker: Callable[[Path], Path],
    tensor: bytes,
    toml: str = "",
    *,
    loop: IoLoop | None = None,
    endpoint: KeptAnswers | None = None,
    **fields: Any,
) -> Iterator[Kit]:
    """A kit for a model that is made into a folder. fields: of its header."""
    put_model(folder / "models", "m", maker, toml=f'isolation = "always"\nmax_batch_rows = 32\n{toml}')
    core = assemble_core(Config(models=str(folder / "models"), state=str(folder / "state"), calibrate=False))
    core.hosts.events = loop
    core.start()
    try:
        assert core.loader.has_settled.wait(ANSWER_S)
        yield Kit(core, header("m", (1, len(tensor) // 4), **fields), tensor, endpoint or KeptAnswers())
    finally:
        core.close(ANSWER_S)


def pair(first: float, second: float = 0.0) -> bytes:
    return np.array([first, second], np.float32).tobytes()


@pytest.mark.smoke
def test_a_burst_is_run_as_one_and_each_gets_its_own_rows(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), loop=loop) as kit:
        found = kit.send(*[pair(at, -at) for at in range(COUNT)])
        assert found == {b"%d" % at: [at + 1, 1 - at] for at in range(COUNT)}
        assert kit.endpoint.at_once == [COUNT]
        assert kit.counted() == (COUNT + 3, {})


@pytest.mark.parametrize("endpoint", [KeptAnswers, KeptTexts])
def test_a_burst_is_one_request_in_whichever_way_it_is_answered(tmp_path, loop, endpoint):
    with known(tmp_path, onnx_models.added, pair(0), loop=loop, endpoint=endpoint()) as kit:
        before = kit.dispatcher.works
        found = kit.send(*[pair(at, -at) for at in range(COUNT)])
        assert found == {b"%d" % at: [at + 1, 1 - at] for at in range(COUNT)}
        assert kit.dispatcher.works - before <= 3, "queued, begun, ended"
        assert kit.counted() == (COUNT + 3, {})


def test_of_a_burst_answered_in_text_the_one_that_fails_fails_alone(tmp_path, loop):
    with known(
        tmp_path, lambda folder: onnx_models.picky(folder, 1.0), pair(0), loop=loop, endpoint=KeptTexts()
    ) as kit:
        found = kit.send(*[pair(9 if at == 7 else 0.5) for at in range(COUNT)])
        assert found.pop(b"7") == "run_failed"
        assert found == {b"%d" % at: [1.5, 1] for at in range(COUNT) if at != 7}


class LastFails(JsonEncoding):
    """Writes all answers but the last."""

    def answer(self, request: Any, request_id: Any) -> tuple[Any, ...]:
        if request_id == str(COUNT - 1):
            raise ValueError("no text")
        return super().answer(request, request_id)


def test_of_a_burst_of_which_one_answer_cannot_be_written_that_one_fails_alone(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), loop=loop, endpoint=KeptTexts(LastFails())) as kit:
        found = kit.send(*[pair(at) for at in range(COUNT)])
        assert found.pop(b"%d" % (COUNT - 1)) == "run_failed"
        assert found == {b"%d" % at: [at + 1, 1] for at in range(COUNT - 1)}
        assert kit.counted() == (COUNT + 2, {"run_failed": 1})


def test_each_sender_gets_its_own_answers(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), loop=loop) as kit:
        found = kit.send(*[pair(at) for at in range(COUNT)], senders=(b"a", b"b", b"c"))
        assert found == {b"%d" % at: [at + 1, 1] for at in range(COUNT)}
        # Where a run can begin at once, nobody is in another's way, and they are one.
        assert sorted(kit.endpoint.at_once) == ([COUNT // 3] * 3 if loop is None else [COUNT])


def test_a_sender_that_ends_a_host_in_a_burst_of_many_runs_alone_and_the_others_are_answered_together(tmp_path, loop):
    senders = (b"a", b"b", b"c")
    with known(tmp_path, dividing, pair(1), loop=loop) as kit:
        found = kit.send(*[pair(SMALLEST if at == 7 else at) for at in range(COUNT)], senders=senders)
        assert found.pop(b"7") == "run_failed"
        assert found == {b"%d" % at: [-at, 0] for at in range(COUNT) if at != 7}
        culprits, now_s = kit.servable.scheduled.culprits, time.monotonic()
        assert [culprits.has(each, now_s) for each in senders] == [False, True, False]


def test_a_request_that_ends_its_host_fails_alone_and_the_rest_of_its_burst_is_answered(tmp_path, loop):
    with known(tmp_path, dividing, pair(1), loop=loop) as kit:
        found = kit.send(*[pair(SMALLEST if at == 7 else at) for at in range(COUNT)])
        assert found.pop(b"7") == "run_failed"
        assert found == {b"%d" % at: [-at, 0] for at in range(COUNT) if at != 7}
        assert kit.counted() == (COUNT + 2, {"run_failed": 1})
        kit.endpoint.replies.clear()
        assert kit.send(*[pair(2)] * 4) == {b"%d" % at: [-2, 0] for at in range(4)}, "alone, for a minute"


def test_a_request_that_the_library_refuses_fails_alone(tmp_path, loop):
    with known(tmp_path, lambda folder: onnx_models.picky(folder, 1.0), pair(0), loop=loop) as kit:
        found = kit.send(*[pair(9 if at == 7 else 0.5) for at in range(COUNT)])
        assert found.pop(b"7") == "run_failed"
        assert found == {b"%d" % at: [1.5, 1] for at in range(COUNT) if at != 7}


def test_of_a_burst_that_no_queue_takes_whole_as_many_are_answered_as_there_is_room_for(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), "max_queue_rows = 5\n", loop=loop) as kit:
        found = kit.send(*[pair(at) for at in range(COUNT)])
        kinds = Counter(end if isinstance(end, str) else "answered" for end in found.values())
        assert kinds["answered"] >= 5
        assert kinds["answered"] + kinds["queue_full"] == COUNT
        assert kit.counted() == (kinds["answered"] + 3, {"queue_full": kinds["queue_full"]})


def test_a_burst_is_refused_one_by_one_where_its_deadline_cannot_be_met(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), timeout_ms=1e-3, loop=loop) as kit:
        found = kit.send(*[pair(at) for at in range(COUNT)])
        assert set(found.values()) <= {"deadline_unmeetable", "deadline_exceeded"}
        assert len(found) == COUNT


def test_each_of_a_burst_that_wants_no_outputs_is_answered(tmp_path, loop):
    with known(tmp_path, onnx_models.added, pair(0), outputs=[], loop=loop) as kit:
        assert kit.send(*[pair(at) for at in range(COUNT)]) == {b"%d" % at: [] for at in range(COUNT)}
        assert kit.counted() == (COUNT + 3, {})


@pytest.mark.parametrize("limit", [1, 8])
def test_a_burst_over_the_bound_of_its_connection_is_judged_one_by_one(tmp_path, limit):
    put_model(tmp_path / "models", "m", onnx_models.added, toml='isolation = "always"\nmax_batch_rows = 32\n')
    limits = LimitSettings(unanswered_bytes=limit << 10)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", calibrate=False, limits=limits) as daemon,
        RawClient(daemon.endpoints[1]) as client,
    ):
        for at in range(200):
            client.send(header("m", (1, 2)), b"%d" % at, pair(at))
        found = {}
        for _ in range(200):
            head, request_id, *frames = client.receive()
            error = msgpack.unpackb(head).get("error")
            found[request_id] = error["code"] if error else np.frombuffer(frames[0], np.float32).tolist()
    assert len(found) == 200
    for request_id, end in found.items():
        assert end in ("queue_full", [float(request_id) + 1, 1])
    assert [end for end in found.values() if end != "queue_full"]
