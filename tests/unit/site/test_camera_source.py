"""When a camera's frame is wanted, run and dropped: the source stepped by hand, on a clock of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import EdgeRuntimeError, NotReady, QueueFull, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.servable import About
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.request.request import Request
from edge_runtime.site.camera import Shot
from edge_runtime.site.camera_source import CameraSource, FrameTaking
from edge_runtime.site.reader import SourceState
from edge_runtime.site.settings import PublishRule
from edge_runtime.site.stage import FrameAnswer, Stage, Staged
from edge_runtime.steps import Form, ModelSteps, OutputSteps
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from tests.fakes.clock import FakeClock


class FakeCamera:
    """A camera, and a view of it, that has a frame the moment it is asked, or once the test says so."""

    def __init__(self) -> None:
        self.noun, self.gives = "camera", "pictures"
        self.name, self.shown, self.place = "", "/dev/video0", "/dev/video0"
        self.reason, self.losses, self.state = "", 0, SourceState.ONLINE
        self.asked: list[str] = []
        self.is_late = False
        self.number = 0
        self._waits = False

    def ask(self, wanted: str) -> None:
        self.asked.append(wanted)
        self._waits = True

    def wake(self) -> None:
        """Nothing: the test steps."""

    def take(self) -> Shot | None:
        if self.is_late or not self._waits:
            return None
        self._waits = False
        return Shot(np.full((4, 4, 3), self.number, np.uint8), self.number, 1_700_000_000.25)


class FakeModel:
    """Table, Infer and servable in one: image UINT8 [rows, h, w, 3] -> scores as answers, when the test says."""

    def __init__(self, source: str = "picture") -> None:
        self.spec = ModelSpec(
            (TensorSpec("image", "UINT8", (-1, -1, -1, 3)),), (TensorSpec("scores", "FP32", (-1, 1, 2)),)
        )
        self.steps: ModelSteps | None = ModelSteps({"image": PictureSteps(source)}, {"scores": OutputSteps()})
        self.form = Form("frames", answers=True)
        self.missing: EdgeRuntimeError | None = None
        self.asked: list[Any] = []
        self.model, self.number, self.batches, self.max_rows = "m", 1, True, 8
        self.settings, self.metrics = ModelSettings(), ModelMetrics()
        self.inline = self.mirror = self.chain = self.sequences = None
        self.mode, self.about = "workers", About()
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


class Kit:
    """A source over a fake camera and a fake model. offered: the best label of each answer that is news."""

    def __init__(self, source: str | Stage = "picture", **fields: Any) -> None:
        """source: of the model's steps; or a stage of the rule."""
        stage, source = (None, source) if isinstance(source, str) else (source, "picture")
        self.reported: list[Any] = []
        self.offered: list[int] = []
        self.more: list[dict[str, Any]] = []
        self.camera = FakeCamera()
        self.model = FakeModel(source)
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.sender = SimpleNamespace(is_online=True)
        rule = PublishRule("m", source="camera", camera="/dev/video0", **fields)
        self.source = CameraSource(
            SimpleNamespace(
                rule=rule,
                onlookers=None,
                offer=self._offer,
                report=self._report,
                names=lambda camera: {"camera": camera},
            ),  # type: ignore[arg-type]
            self.camera,
            self.camera,  # type: ignore[arg-type]
            self.sender,  # type: ignore[arg-type]
            table=self.model,  # type: ignore[arg-type]
            infer=self.model,  # type: ignore[arg-type]
            clock=self.clock,
            metrics=self.metrics,
            wake=threading.Event(),
            stage=stage,
            taking=FrameTaking(),
        )

    def steps(self, seconds: float, step_s: float = 0.05) -> None:
        """Time goes by, as results.py's thread does it."""
        for _ in range(round(seconds / step_s)):
            for _ in range(4):
                self.source.step(self.clock.monotonic_s())
            self.clock.advance(step_s)

    def answer(self, label: int = 0) -> None:
        """End the latest request."""
        request: Request = self.model.asked[-1]
        request.outputs = [np.array([[[label, 0.9]]], np.float32)]
        request.reply.answer(request)

    def _report(self, plan: Any, outputs: Any, utc_s: float, events: Any, **_: Any) -> None:
        self.reported += events

    def _offer(self, plan: Any, answers: Any, utc_s: float, request: Any, **fields: Any) -> bool:
        self.more.append(fields["more"])
        self.offered += [int(each[0][0, 0, 0]) for each in answers]
        return True


def test_one_frame_a_second_is_run_where_nothing_else_is_said():
    kit = Kit()
    for _ in range(100):
        kit.steps(0.1)
        if len(kit.model.asked) > len(kit.offered):
            kit.answer()
    assert 9 <= len(kit.camera.asked) <= 11


@pytest.mark.parametrize(("fields", "count"), [({"fps": 5.0}, 50), ({"every_s": 2.0}, 5)])
def test_the_pace_is_kept_by_a_model_that_can(fields, count):
    kit = Kit(**fields)
    answered = 0
    for _ in range(200):
        kit.steps(0.05)
        if len(kit.model.asked) > answered:
            answered = len(kit.model.asked)
            kit.answer()
    assert abs(len(kit.camera.asked) - count) <= 1


def test_a_slow_model_gets_the_newest_frame_and_no_other_waits():
    kit = Kit(fps=20.0)
    kit.camera.number = 1
    kit.steps(1)
    for number in range(2, 100):
        kit.camera.number = number
        kit.steps(0.1)
    assert len(kit.model.asked) == len(kit.camera.asked) == 1
    kit.answer()
    kit.steps(0.1)
    assert [int(request.tensors[0].max()) for request in kit.model.asked] == [1, 99]


def test_frames_that_are_refused_are_dropped_counted_and_reported():
    kit = Kit(fps=10.0)
    for error in (QueueFull("full"), RunFailed("no")):
        kit.steps(0.2)
        kit.model.asked[-1].reply.refuse(error)
    kit.steps(0.05)
    assert kit.source.status()["dropped"] == 2
    assert kit.source.status()["reason"] == "no"
    assert kit.metrics.counters() == {"camera_frames_dropped": 2}
    kit.steps(0.2)
    kit.answer()
    kit.steps(0.2)
    assert kit.source.status()["reason"] == ""


def test_no_frame_is_taken_while_there_is_no_model_or_no_connection():
    kit = Kit()
    kit.model.missing = NotReady("loading")
    kit.steps(5)
    assert kit.camera.asked == []
    assert kit.source.status()["reason"] == "loading"
    kit.model.missing = None
    kit.sender.is_online = False
    kit.steps(5)
    assert kit.camera.asked == []
    kit.sender.is_online = True
    kit.steps(2)
    assert len(kit.model.asked) == 1


def test_a_model_without_steps_is_refused_with_what_to_write():
    kit = Kit()
    kit.model.steps = None
    kit.steps(5)
    assert kit.camera.asked == []
    assert "[input.image]" in kit.source.status()["reason"]


@pytest.mark.parametrize("source", ["picture", "frames", "gray", "nv12", "yuyv"])
def test_frames_come_as_the_model_declares_them(source):
    kit = Kit(source)
    kit.steps(0.1)
    assert kit.camera.asked == [source]


def test_a_label_is_offered_when_frames_agree_on_it_and_with_an_interval_always():
    for fields, offered in (({}, [1, 2]), ({"on": "interval", "interval_s": 1.0}, [1, 1, 1, 2])):
        kit = Kit(fps=10.0, **fields)
        for label in (1, 1, 2, 1, 2, 2)[: 6 if not fields else 5]:
            kit.steps(0.2)
            kit.answer(label)
        kit.steps(0.2)
        assert kit.offered == offered


class CountingStage:
    """A stage that says how many frames it saw, and reports an event at the third."""

    def __init__(self) -> None:
        self.frames: list[FrameAnswer] = []

    def take(self, frame: FrameAnswer) -> Staged:
        self.frames.append(frame)
        count = len(self.frames)
        events = [{"event": "third"}] if count == 3 else []
        return Staged(frame.outputs, has_changed=count % 2 == 0, fields={"seen": count}, events=events)

    def entities(self, steps: ModelSteps) -> dict[str, dict[str, Any]]:
        return {}


def test_a_stage_of_a_rule_gets_each_frame_and_says_what_is_published_of_it():
    stage = CountingStage()
    kit = Kit(stage, fps=10.0)
    for label in (1, 2, 1, 2):
        kit.camera.number += 1
        kit.steps(0.2)
        kit.answer(label)
    kit.steps(0.2)
    assert [frame.number for frame in stage.frames] == [1, 2, 3, 4]
    assert {frame.captured_s for frame in stage.frames} == {1_700_000_000.25}
    assert list(stage.frames[0].outputs) == ["scores"]
    assert kit.offered == [2, 2]
    assert [each["seen"] for each in kit.more] == [2, 4]
    assert [each["captured"] for each in kit.more] == ["2023-11-14T22:13:20.250+00:00"] * 2
    assert kit.reported == [{"event": "third"}]


def test_every_frame_is_offered_as_it_is_where_the_rule_says_so():
    kit = Kit(fps=10.0, on="every")
    for label in (1, 2, 1):
        kit.steps(0.2)
        kit.answer(label)
    kit.steps(0.2)
    assert kit.offered == [1, 2, 1]
