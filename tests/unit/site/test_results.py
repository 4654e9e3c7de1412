"""Which answers a rule publishes and when, which files of a folder are taken, and that listening never harms."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.errors import (
    ConfigError,
    EdgeRuntimeError,
    ModelNotFound,
    NotReady,
    QueueFull,
    RunFailed,
    TensorMismatch,
)
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.request.replies import FRAMES, TransportReply
from edge_runtime.site.folder_source import FolderSource, InputFile, InputFolder
from edge_runtime.site.publication import QUEUE_RESULTS, Publication, PublishPace
from edge_runtime.site.results import ResultPublisher
from edge_runtime.site.settings import PublishRule
from edge_runtime.steps import Form, ModelSteps
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from edge_runtime.wire.codec import unpack_reply, unpack_request
from tests.contract.running_daemon import ANSWER_S, floats, header, put_model
from tests.fakes.clock import FakeClock
from tests.models import onnx_models

UTC_S = 1_700_000_000.0


SPEC = ModelSpec((), (TensorSpec("a", "FP32", (-1, 1)), TensorSpec("b", "INT64", (-1, 1))))


@dataclass
class FakeServable:
    """The fields of a servable that a publication reads."""

    model: str = "m"
    number: int = 1
    spec: ModelSpec = SPEC
    inline: Any = None


@dataclass
class FakePlan:
    """The fields of a request's plan that a publication reads."""

    servable: FakeServable = field(default_factory=FakeServable)
    outputs: tuple[int, ...] = (0, 1)
    rows: int = 1


def answer(a: float, b: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[a]], np.float32), np.array([[b]], np.int64)


def publication(**fields: Any) -> Publication:
    return Publication(PublishRule("m", **fields), "t")


def offer(each: Publication, *values: float, plan: Any = None, b: int = 0) -> bool:
    return each.offer(plan or FakePlan(), [answer(value, b) for value in values], UTC_S)


def taken(each: Publication, now_s: float) -> list[float]:
    """The first value of each result that is due."""
    return [float(heard.tensors()[0][1][0, 0]) for heard in each.take(now_s)]


# ---- which answers --------------------------------------------------------------------------------------------------


def test_a_change_is_published_and_the_same_again_is_not():
    rule, plan = publication(), FakePlan()
    for value in (1, 1, 2, 2, 1):
        offer(rule, value, plan=plan)
    assert taken(rule, 0.0) == [1, 2, 1]
    offer(rule, 1, plan=plan)
    assert taken(rule, 0.0) == []


PICTURE_SPEC = ModelSpec((TensorSpec("image", "BYTES", (-1,)),), SPEC.outputs)
PICTURE_FORM = Form("picture", answers=False)
STEPS = ModelSteps({"image": PictureSteps(range="0..1")})


@dataclass
class PictureServable(FakeServable):
    """One that takes pictures."""

    spec: ModelSpec = PICTURE_SPEC
    steps: ModelSteps = STEPS
    form: Form = PICTURE_FORM


def sent(*pictures: bytes, servable: Any = None) -> Any:
    """A request with pictures, as far as a publication reads it."""
    rows: Any = np.empty(len(pictures), object)
    rows[:] = pictures
    return SimpleNamespace(plan=FakePlan(servable or PictureServable()), inputs=[rows])


def test_of_the_results_that_wait_only_the_newest_keeps_its_picture():
    rule = publication(picture=True)
    for value, request in ((1, sent(b"one")), (2, sent(b"two", b"beside"))):
        rule.offer(request.plan, [answer(value)], UTC_S, request=request)
    first, second = rule.take(0.0)
    assert (rule.picture_of(first), rule.picture_of(second)) == (None, b"two")


def test_a_frame_is_kept_as_it_was_when_its_sender_writes_the_next_one_over_it():
    rule = publication(picture=True)
    frames = np.full((1, 2, 2, 3), 7, np.uint8)
    spec = ModelSpec((TensorSpec("image", "UINT8", (-1, -1, -1, -1)),), SPEC.outputs)
    plan = FakePlan(PictureServable(spec=spec, form=Form("frames", answers=False)))
    rule.offer(plan, [answer(1)], UTC_S, request=SimpleNamespace(plan=plan, inputs=[frames]))
    frames[:] = 0
    kept = rule.picture_of(rule.take(0.0)[0])
    assert isinstance(kept, np.ndarray)
    assert kept.tolist() == np.full((2, 2, 3), 7).tolist()


@pytest.mark.parametrize("case", ["not asked for", "tensors", "nv12"])
def test_no_picture_is_kept_where_none_is_wanted_or_none_was_sent(case: str):
    rule = publication(picture=case != "not asked for")
    request = sent(b"one")
    if case == "tensors":
        request = sent(b"one", servable=PictureServable(form=Form("tensor", answers=True)))
    if case == "nv12":
        plan = FakePlan(PictureServable(form=Form("frames", answers=False)))
        request = SimpleNamespace(plan=plan, inputs=[np.zeros((1, 3, 2), np.uint8)])
    rule.offer(request.plan, [answer(1)], UTC_S, request=request)
    assert rule.picture_of(rule.take(0.0)[0]) is None


def test_the_same_outputs_of_another_request_or_version_are_not_a_change():
    rule = publication()
    offer(rule, 1.0)
    offer(rule, 1.0)
    offer(rule, 1.0, plan=FakePlan(FakeServable(number=2)))
    assert taken(rule, 0.0) == [1]


def test_a_nan_is_like_itself_and_another_shape_is_a_change():
    rule, plan = publication(), FakePlan()
    for _ in range(2):
        offer(rule, math.nan, plan=plan)
    assert len(rule.take(0.0)) == 1
    twice = [np.full((2, 1), math.nan, np.float32), np.zeros((2, 1), np.int64)]
    rule.offer(plan, [twice], UTC_S)
    assert [header.shape for header, _ in rule.take(0.0)[0].tensors()] == [(2, 1), (2, 1)]


def test_only_the_outputs_named_count_in_the_order_named():
    rule, plan = publication(outputs=("b",)), FakePlan()
    for value, b in ((1, 5), (2, 5), (3, 6)):
        offer(rule, value, plan=plan, b=b)
    assert [[header.name for header, _ in heard.tensors()] for heard in rule.take(0.0)] == [["b"], ["b"]]

    both = publication(outputs=("b", "a"))
    offer(both, 1.0)
    assert [header.name for header, _ in both.take(0.0)[0].tensors()] == ["b", "a"]


def test_an_answer_without_the_output_is_counted_and_not_heard():
    rule = publication(outputs=("b",))
    assert not rule.offer(FakePlan(outputs=(0,)), [answer(1)[:1], answer(2)[:1]], UTC_S)
    assert (rule.without_output, rule.due_s()) == (2, math.inf)


def test_of_more_changes_than_are_taken_the_newest_stay_and_the_others_are_counted():
    rule = publication()
    offer(rule, *range(QUEUE_RESULTS + 10), plan=FakePlan())
    assert rule.skipped == 10
    assert taken(rule, 0.0) + taken(rule, 1.0) == list(range(10, QUEUE_RESULTS + 10))


def test_a_flood_of_changes_is_held_to_a_pace():
    rule, plan = publication(), FakePlan()
    published = 0
    for step in range(10_000):  # one second, ten changes a millisecond
        offer(rule, step, plan=plan)
        published += len(rule.take(step * 1e-4))
    assert 1_000 <= published <= 1_000 + QUEUE_RESULTS


# ---- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["change", "interval"])
def test_with_an_interval_the_first_goes_at_once_and_then_the_latest(on: Any):
    rule = publication(on=on, interval_s=10.0)
    offer(rule, 1)
    assert taken(rule, 100.0) == [1]
    for value in (2, 3, 4):
        offer(rule, value)
    assert taken(rule, 109.9) == []
    assert rule.due_s() == 110.0
    assert taken(rule, 110.0) == [4]
    assert rule.due_s() == math.inf
    assert rule.skipped == 0


def test_a_change_that_was_taken_back_within_the_interval_is_none():
    rule = publication(interval_s=10.0)
    offer(rule, 1)
    assert taken(rule, 100.0) == [1]
    offer(rule, 2)
    offer(rule, 1)
    assert taken(rule, 110.0) == []
    offer(rule, 3)
    assert taken(rule, 110.0) == [3]


def test_an_interval_publishes_the_same_again_but_nothing_without_an_answer():
    rule = publication(on="interval", interval_s=10.0)
    offer(rule, 1)
    assert taken(rule, 100.0) == [1]
    assert taken(rule, 200.0) == []
    offer(rule, 1)
    assert taken(rule, 200.0) == [1]


def test_the_taker_is_woken_once_until_it_looks_again():
    rule = publication(interval_s=10.0)
    assert offer(rule, 1)
    assert not offer(rule, 2)
    rule.take(100.0)
    assert offer(rule, 3), "nothing waited, so nobody would come"
    rule.take(100.0)
    assert not offer(rule, 4), "it comes at due_s by itself"


def test_a_pace_allows_a_burst_and_then_one_each_interval():
    pace = PublishPace(1.0, 3)
    spent = []
    for tenth in range(60):
        now_s = tenth / 10
        while now_s >= pace.free_s - 1e-9:
            pace.spend(now_s)
            spent.append(now_s)
    assert spent == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


# ---- what is refused at start ---------------------------------------------------------------------------------------


class FakeSender:
    """A way to a broker that nobody takes."""

    packet_limit = 1 << 20
    is_online = True

    def post(self, message: Any) -> None:
        raise AssertionError("nothing is to be sent")

    retain = post


def results(tmp_path: Path, *rules: PublishRule) -> ResultPublisher:
    core = assemble_core(Config(models=str(tmp_path), state=str(tmp_path / "state")))
    return ResultPublisher(
        rules,
        DevicePublisher(DeviceTopics("dev1"), FakeSender()),
        table=core.table,
        infer=core.infer,
        metrics=core.metrics,
        clock=core.clock,
    )


@pytest.mark.parametrize(
    "topic",
    ["edge/+/result", "a/#", "$SYS/x", "edge/dev2/status", "edge/dev1/command/x", "edge/dev1/infer/mlp",
     "edge/dev1/state", "fleet/a/wake", "edge/dev2/result/mlp", "", "/a", "a\x00b", "x" * 600],
)  # fmt: skip
def test_a_topic_that_others_rely_on_or_nobody_can_publish_to_is_refused(tmp_path: Path, topic: str):
    with pytest.raises(ConfigError, match=r"publish\.topic"):
        results(tmp_path, PublishRule("mlp", topic=topic))


@pytest.mark.parametrize("topic", ["edge/dev1/result/all", "site/line1/mlp", "edge", "edge/dev1/mlp"])
def test_other_topics_are_allowed(tmp_path: Path, topic: str):
    assert set(results(tmp_path, PublishRule("mlp", topic=topic)).listeners("zmq")) == {"mlp"}


def test_two_rules_for_one_folder_are_refused(tmp_path: Path):
    rules = [PublishRule(model, source="folder", folder=str(tmp_path)) for model in "ab"]
    with pytest.raises(ConfigError, match="each file is run once"):
        results(tmp_path, *rules)


def test_closing_what_never_started_is_fine(tmp_path: Path):
    never = results(tmp_path, PublishRule("mlp"))
    never.close()
    never.close()


# ---- a listener on the frontend -------------------------------------------------------------------------------------


class FakeEndpoint:
    """Keeps what is answered."""

    is_control = False
    max_frame_bytes = 1 << 20
    post_answers = None

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def send_answers(self, entries: Any, header: bytes, payloads: Any, reply_bytes: int) -> None:
        self.answers += [(header, entry[1], *frames) for entry, frames in zip(entries, payloads, strict=True)]

    def sender(self, origin: Any) -> Any:
        return origin

    def post(self, envelope: Any, frames: Any) -> None:
        self.answers.append(frames)

    send = post


class BrokenListener:
    """Hears, and fails."""

    def __init__(self) -> None:
        self.heard = 0

    def answered(self, plan: Any, answers: Any, request: Any = None) -> None:
        self.heard += len(answers)
        raise RuntimeError("nobody listens")


@pytest.mark.parametrize("with_listener", [True, False])
def test_a_listener_that_fails_is_counted_and_everybody_is_answered(tmp_path: Path, with_listener: bool):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    core = assemble_core(Config(models=str(tmp_path / "models"), state=str(tmp_path / "state"), calibrate=False))
    core.start()
    try:
        assert core.loader.has_settled.wait(ANSWER_S)
        control = OperationHandlers(
            core.table, core.loader, core.pending_loads, SimpleNamespace(is_ready=True, stats=dict)
        )
        listener = BrokenListener()
        listeners = {"mlp": listener} if with_listener else {"other": listener}
        frontend = InferFrontend(core.table, core.infer, control, core.clock, core.metrics, listeners=listeners)
        endpoint, key, tensor = FakeEndpoint(), header(), floats(1, 16).tobytes()
        for index in range(3):
            reply = TransportReply(frontend, endpoint, (b"peer",), FRAMES, bytes([index]))
            frontend.ask(endpoint, b"peer", reply, unpack_request(key), (tensor,), key)
        route = frontend.routes()[key]
        frontend.answer_burst(endpoint, route, [(b"peer", b"a", tensor), (b"peer", b"b", tensor)])

        assert [unpack_reply(bytes(frames[0])).error for frames in endpoint.answers] == [None] * 5
        assert listener.heard == (5 if with_listener else 0)
        assert core.metrics.counters().get("publish_failed", 0) == (4 if with_listener else 0)
    finally:
        core.close(ANSWER_S)


def test_a_listener_hears_of_an_answer_before_who_asked_or_the_next_answers_might_be_heard_sooner(tmp_path: Path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp, toml='mode = "workers"\n')
    core = assemble_core(Config(models=str(tmp_path / "models"), state=str(tmp_path / "state"), calibrate=False))
    core.start()
    told: list[str] = []
    has_answered = threading.Event()

    class FirstListener:
        def answered(self, plan: Any, answers: Any, request: Any = None) -> None:
            told.append("heard")

    class Endpoint(FakeEndpoint):
        def post(self, envelope: Any, frames: Any) -> None:
            told.append("answered")
            has_answered.set()

    try:
        assert core.loader.has_settled.wait(ANSWER_S)
        control = OperationHandlers(
            core.table, core.loader, core.pending_loads, SimpleNamespace(is_ready=True, stats=dict)
        )
        listeners = {"mlp": FirstListener()}
        frontend = InferFrontend(core.table, core.infer, control, core.clock, core.metrics, listeners=listeners)
        endpoint = Endpoint()
        reply = TransportReply(frontend, endpoint, (b"peer",), FRAMES, b"1")
        frontend.ask(endpoint, b"peer", reply, unpack_request(header()), (floats(1, 16).tobytes(),), None)
        assert has_answered.wait(ANSWER_S)
        assert told == ["heard", "answered"]
    finally:
        core.close(ANSWER_S)


# ---- folders --------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, content: bytes = b"x", mtime_s: int = 1_000) -> Path:
    path = folder / name
    path.write_bytes(content)
    os.utime(path, (mtime_s, mtime_s))
    return path


def names(drops: list[InputFile]) -> list[str]:
    return [drop.name for drop in drops]


def test_a_file_is_taken_when_two_looks_find_it_the_same(tmp_path: Path):
    folder = InputFolder(tmp_path)
    put(tmp_path, "a.npy")
    assert folder.look() == []
    put(tmp_path, "a.npy", b"longer")
    assert folder.look() == []
    put(tmp_path, "a.npy", b"LONGER", mtime_s=1_001)
    assert folder.look() == []
    (drop,) = folder.look()
    assert folder.read(drop) == b"LONGER"


def test_the_oldest_comes_first_and_names_decide_between_equals(tmp_path: Path):
    folder = InputFolder(tmp_path)
    for name, mtime_s in (("b", 2_000), ("c", 1_000), ("a", 2_000)):
        put(tmp_path, name, mtime_s=mtime_s)
    folder.look()
    assert names(folder.look()) == ["c", "a", "b"]


def test_a_file_that_was_remembered_is_not_taken_again_unless_it_changes(tmp_path: Path):
    folder = InputFolder(tmp_path)
    put(tmp_path, "a")
    folder.look()
    (drop,) = folder.look()
    folder.remember(drop)
    assert folder.look() == folder.look() == []
    put(tmp_path, "a", mtime_s=1_001)
    folder.look()
    assert names(folder.look()) == ["a"]


def test_a_bounded_memory_never_takes_a_file_twice_and_goes_on_with_new_ones(tmp_path: Path):
    folder = InputFolder(tmp_path, remembered=3)
    taken: list[str] = []
    for index in range(10):
        put(tmp_path, f"{index}", mtime_s=1_000 + index)
        for _ in range(3):
            for drop in folder.look():
                taken.append(drop.name)
                folder.remember(drop)
    assert taken == [str(index) for index in range(10)]


def test_a_file_written_anew_while_it_ran_is_neither_read_nor_removed_nor_set_aside(tmp_path: Path):
    folder = InputFolder(tmp_path)
    put(tmp_path, "a")
    folder.look()
    (drop,) = folder.look()
    put(tmp_path, "a", b"new one", mtime_s=1_001)
    assert folder.read(drop) is None
    folder.remove(drop)
    folder.set_aside(drop)
    assert (tmp_path / "a").read_bytes() == b"new one"
    folder.look()
    assert names(folder.look()) == ["a"]


def test_a_link_is_never_followed_and_neither_is_one_in_the_place_of_the_failed_folder(tmp_path: Path):
    secret = put(tmp_path, "secret")
    drops, elsewhere = tmp_path / "drops", tmp_path / "elsewhere"
    drops.mkdir()
    elsewhere.mkdir()
    (drops / "a.npy").symlink_to(secret)
    (drops / ".failed").symlink_to(elsewhere)
    folder = InputFolder(drops)
    folder.look()
    (drop,) = folder.look()
    with pytest.raises(TensorMismatch, match="links are not followed"):
        folder.read(drop)
    with pytest.raises(OSError, match="link"):
        folder.set_aside(drop)
    assert list(elsewhere.iterdir()) == []
    folder.remove(drop)
    assert secret.exists()


def test_a_folder_that_is_gone_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        InputFolder(tmp_path / "none").look()


# ---- files as requests ----------------------------------------------------------------------------------------------


class FakeModel:
    """Servables and Infer in one: a model x FP32 [rows, 2] that answers when the test says."""

    def __init__(self) -> None:
        self.spec = ModelSpec((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
        self.missing: EdgeRuntimeError | None = None
        self.asked: list[Any] = []
        self.model, self.number, self.batches, self.max_rows = "m", 1, True, 8
        self.settings, self.metrics = ModelSettings(), ModelMetrics()
        self.inline = self.mirror = self.steps = self.chain = self.sequences = None
        self.mode = "workers"
        self.is_hosted = False

    def form_for(self, header: Any) -> FakeModel:
        return self

    def why_unreadable(self, tensor: Any) -> str:
        return ""

    def resolve(self, model: str, version: int | None) -> FakeModel:
        if self.missing is not None:
            raise self.missing
        return self

    def submit(self, request: Any, plan: Any) -> None:
        self.asked.append(request)
        request.plan = plan


class KeptOffers:
    """A publication that keeps the name of each file it is offered."""

    def __init__(self, rule: PublishRule) -> None:
        self.rule = rule
        self.files: list[str] = []

    def names(self) -> dict[str, str]:
        return {}

    def offer(self, plan: Any, answers: Any, utc_s: float, request: Any, *, more: Any) -> bool:
        self.files.append(more["file"])
        return False


class FolderKit:
    """A source over a folder, stepped by hand on a clock of its own."""

    def __init__(self, folder: Path, *, remove: bool) -> None:
        self.folder = folder
        self.model = FakeModel()
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.publication = KeptOffers(PublishRule("m", source="folder", folder=str(folder), remove=remove))
        self.published = self.publication.files
        self.sender = FakeSender()
        self.source = FolderSource(
            self.publication,  # type: ignore[arg-type]
            InputFolder(folder),
            DevicePublisher(DeviceTopics("dev1"), self.sender),
            table=self.model,  # type: ignore[arg-type]
            infer=self.model,  # type: ignore[arg-type]
            clock=self.clock,
            metrics=self.metrics,
            wake=threading.Event(),
        )

    def steps(self, count: int = 20, step_s: float = 0.3) -> None:
        """Time goes by, as results.py's thread does it."""
        for _ in range(count):
            self.source.step(self.clock.monotonic_s())
            self.source.tidy()
            self.clock.advance(step_s)

    def answer(self, error: EdgeRuntimeError | None = None) -> None:
        """End the latest request."""
        request = self.model.asked[-1]
        request.outputs = [np.zeros((1, 2), np.float32)]
        if error is None:
            request.reply.answer(request)
        else:
            request.reply.refuse(error)


@pytest.fixture(params=[True, False], ids=["removed", "left"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> FolderKit:
    np.save(tmp_path / "a.npy", floats(1, 2))
    return FolderKit(tmp_path, remove=request.param)


def test_a_file_is_run_once_however_long_its_model_takes(kit: FolderKit):
    kit.steps()
    assert len(kit.model.asked) == 1
    kit.answer()
    kit.steps()
    assert len(kit.model.asked) == 1
    assert kit.published == ["a.npy"]


def test_one_file_runs_at_a_time(kit: FolderKit):
    np.save(kit.folder / "b.npy", floats(1, 2))
    kit.steps()
    assert len(kit.model.asked) == 1
    kit.answer()
    kit.steps()
    assert len(kit.model.asked) == 2


def test_a_refusal_that_may_pass_is_tried_again_and_a_failure_is_not(kit: FolderKit):
    kit.steps()
    kit.answer(QueueFull("full"))
    kit.steps()
    assert len(kit.model.asked) == 2
    kit.answer(RunFailed("no"))
    kit.steps()
    assert len(kit.model.asked) == 2
    assert kit.metrics.counters() == {"publish_files_failed": 1}


@pytest.mark.parametrize("reason", [NotReady("loading"), ModelNotFound("no such model")])
def test_files_wait_for_their_model(kit: FolderKit, reason: EdgeRuntimeError):
    kit.model.missing = reason
    kit.steps()
    kit.model.missing = None
    kit.steps()
    assert len(kit.model.asked) == 1
    assert kit.metrics.counters() == {}


def test_files_wait_while_results_could_go_nowhere(kit: FolderKit):
    kit.sender.is_online = False
    kit.steps()
    assert kit.model.asked == []
    kit.sender.is_online = True
    kit.steps()
    assert len(kit.model.asked) == 1


def test_a_file_that_cannot_be_set_aside_is_not_tried_for_ever(kit: FolderKit):
    (kit.folder / ".failed").write_text("no folder")
    (kit.folder / "a.npy").write_bytes(b"no array")
    kit.steps()
    assert kit.metrics.counters() == {"publish_files_failed": 1}
