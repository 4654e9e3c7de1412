"""A camera or a microphone as requests to one model, one at a time; what their answers agree on is published.

Owns: when a frame is wanted, what is dropped (no frame waits for its model), and which labels the last frames agree on:
one that flickers for a frame neither appears nor disappears. A kind of stream says what it gives (`Taking`): a camera
frames, a microphone windows (microphone_source.py). Decides by instants that it is given: the reader's thread calls
`step`, which submits, and who answers a frame concludes it, mostly the I/O thread. results.py's thread wakes where
there is something to publish.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.errors import EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import UNNAMED, RequestHeader, TensorHeader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.pictures.declared_steps import why_no_picture
from edge_runtime.pictures.picture_steps import PictureSource, PictureSteps
from edge_runtime.request.infer import Infer
from edge_runtime.request.infer_frontend import Outputs
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import CallbackReply, Request
from edge_runtime.site.camera import Shot
from edge_runtime.site.publication import Publication, as_utc
from edge_runtime.site.reader import SourceReader
from edge_runtime.site.settings import PublishRule
from edge_runtime.site.stage import FrameAnswer, Stage, Staged
from edge_runtime.steady import SteadyAnswer
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Time between two looks for a connection."""

RETRY_S = 1.0
"""Time between two tries while the model cannot take frames."""

FRAME_TIMEOUT_MS = 30_000.0
"""No caller waits for a frame, so the model's default timeout does not count; the age of results that are published."""


class Taken(Protocol):
    """One thing that a stream gave. number: from 1 on; a gap is what was not run. captured_s: as `time.time`."""

    @property
    def number(self) -> int:
        """Return its number."""
        ...

    @property
    def captured_s(self) -> float:
        """Return when it was taken."""
        ...


class StreamView(Protocol):
    """The view of a stream that one rule has: it asks for the next thing, and takes it once it is there."""

    def ask(self, wanted: Any) -> None:
        """Have the next one fetched, as `Taking.wanted` says. Thread: any."""
        ...

    def take(self) -> Any:
        """Return what was asked for; None until it is there. Thread: any."""
        ...


class Taking(Protocol):
    """The way a model takes a kind of stream. source: as of PublishRule. counted: its counter."""

    source: str
    counted: str

    def period_s(self, rule: PublishRule) -> float:
        """Return the time between two that are run; 0: each is."""
        ...

    def wanted(self, servable: Servable) -> Any:
        """Return what to ask the view for. Raises TensorMismatch where the model takes none, with what to write."""
        ...

    def tensor(self, servable: Servable, taken: Any) -> tuple[TensorHeader, Array]:
        """Return the input of a request with it."""
        ...

    def row(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of an answer as those of one row."""
        ...

    def fields(self, taken: Any) -> Mapping[str, Any]:
        """Return the entries of the result's JSON beside `captured`."""
        ...

    def missed(self, before: Any, taken: Any) -> int:
        """Return how many were not taken that should have been. before: the one taken before; None at first."""
        ...


class CameraSource:
    """A stream as the source of one rule. wake: set to have its results published. Offline it takes nothing.

    taking: what the stream gives; of a camera its frames. stage: of the rule; without one, labels are steady
    (SteadyAnswer). fps: for a rule that says none.
    """

    def __init__(
        self,
        publication: Publication,
        view: StreamView,
        reader: SourceReader,
        publisher: DevicePublisher,
        *,
        table: ModelTable,
        infer: Infer,
        clock: Clock,
        metrics: Metrics,
        wake: threading.Event,
        stage: Stage | None = None,
        taking: Taking,
    ) -> None:
        rule = self._rule = publication.rule
        self._publication = publication
        self._view = view
        self._reader = reader
        self._taking = taking
        self._publisher = publisher
        self._table = table
        self._infer = infer
        self._clock = clock
        self._metrics = metrics
        self._wake = wake
        self._stage = stage
        self._period_s = taking.period_s(rule)
        self._due_s = clock.monotonic_s()
        self._is_asked = False
        # Invariant: set by the reader's thread, cleared by who answers, when all that the frame changes is done.
        self._is_running = False
        self._taken: Taken | None = None
        self._plan: tuple[Servable, tuple[int, ...], tuple[RequestHeader, RequestPlan]] | None = None
        self._steady: tuple[Servable, SteadyAnswer] | None = None
        self._error: EdgeRuntimeError | None = None
        self._dropped = 0

    def status(self) -> dict[str, Any]:
        """Its status for `stats`, as JSON values. reason: why nothing is run; empty while frames come."""
        return {
            "model": self._rule.model,
            **self._publication.names(self._reader.name),
            "source": self._taking.source,
            "from": self._reader.place,
            "state": self._reader.state.value,
            "reason": self._reader.reason or (self._error.message if self._error is not None else ""),
            "losses": self._reader.losses,
            "dropped": self._dropped,
        }

    def step(self, now_s: float) -> float:
        """Run a frame that came, ask for the next. Return the instant of the next call; `_hear` has it called too."""
        if self._is_running:
            return self._due_s if now_s < self._due_s else math.inf
        if self._is_asked:
            taken = self._view.take()
            if taken is None:
                return math.inf
            self._is_asked = False
            self._run(taken, now_s)
            return now_s
        if not self._publisher.is_online:
            return now_s + LOOK_S
        if now_s < self._due_s:
            return self._due_s
        self._ask(now_s)
        return max(now_s, self._due_s)

    def tidy(self) -> None:
        """Nothing: a frame leaves nothing behind."""

    # ---- private ----------------------------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        """Have the newest frame fetched, as the model takes it; not while the model cannot take one."""
        try:
            wanted = self._taking.wanted(self._table.resolve(self._rule.model, None))
        except EdgeRuntimeError as error:
            self._due_s = now_s + RETRY_S
            self._blame(error)
            return
        # Invariant: never more than one frame behind; a slow model gets the newest at once, and no others.
        self._due_s = max(self._due_s, now_s - self._period_s) + self._period_s
        self._is_asked = True
        self._view.ask(wanted)

    def _run(self, taken: Taken, now_s: float) -> None:
        self._count_dropped(self._taking.missed(self._taken, taken))
        self._taken = taken
        try:
            servable = self._table.resolve(self._rule.model, None)
            tensor, array = self._taking.tensor(servable, taken)
            header, plan = self._plan_of(servable, tensor)
        except EdgeRuntimeError as error:
            self._drop(error)
            return
        self._is_running = True
        request = Request(
            header, [array], array.nbytes, CallbackReply(self._hear), self._reader.place, now_s, self._metrics
        )
        self._infer.submit(request, plan)

    def _plan_of(self, servable: Servable, tensor: TensorHeader) -> tuple[RequestHeader, RequestPlan]:
        """Return the header and the plan of a request with one input of this shape. Raises TensorMismatch."""
        known = self._plan
        if known is None or known[0] is not servable or known[1] != tensor.shape:
            header = RequestHeader(
                model=self._rule.model,
                inputs=(tensor,),
                timeout_ms=FRAME_TIMEOUT_MS,
            )
            known = self._plan = servable, tensor.shape, (header, RequestPlan(servable, header))
        return known[2]

    def _conclude(self, ended: Request | EdgeRuntimeError) -> None:
        if isinstance(ended, EdgeRuntimeError):
            self._drop(ended)
            return
        self._metrics.count(self._taking.counted)
        self._error = None
        plan: RequestPlan = ended.plan
        outputs = self._taking.row(plan.select(ended.outputs))
        servable, utc_s, taken = plan.servable, time.time(), self._taken
        assert taken is not None
        if not servable.form.answers or servable.steps is None:
            self._offer(plan, outputs, utc_s, ended, more=self._fields_of(taken))
            return
        names = [servable.spec.outputs[index].name for index in plan.outputs]
        is_shown = self._publication.onlookers is not None
        frame = FrameAnswer(
            servable.steps, dict(zip(names, outputs, strict=True)), taken.number, taken.captured_s, is_shown
        )
        staged = self._staged(frame, servable)
        is_due = self._rule.on == "every" or (staged.outputs and (staged.has_changed or self._rule.on == "interval"))
        if not (is_due or staged.events or is_shown):
            return
        chosen = [staged.outputs.get(name, output) for name, output in frame.outputs.items()]
        more, overlay = self._fields_of(taken), staged.overlay
        if is_shown and not is_due:
            self._publication.show(plan, chosen, utc_s, ended, more={**more, **staged.fields}, overlay=overlay)
        if staged.events:
            self._publication.report(plan, chosen, utc_s, staged.events, more=more, request=ended, overlay=overlay)
            self._wake.set()
        if is_due:
            more, is_news = {**more, **staged.fields}, self._stage is not None
            self._offer(plan, chosen, utc_s, ended, more=more, is_news=is_news, overlay=overlay)

    def _offer(self, plan: RequestPlan, outputs: Outputs, utc_s: float, request: Request, **more: Any) -> None:
        """Have an answer published as the rule says. more: as of Publication.offer."""
        if self._publication.offer(plan, (outputs,), utc_s, request, **more):
            self._wake.set()

    def _fields_of(self, taken: Taken) -> dict[str, Any]:
        """Return the entries of a result that tell of its frame."""
        return {
            **self._publication.names(self._reader.name),
            **self._taking.fields(taken),
            "captured": as_utc(taken.captured_s),
        }

    def _staged(self, frame: FrameAnswer, servable: Servable) -> Staged:
        """Return the part of a frame's answer that is published, by the rule's stage."""
        if self._stage is not None:
            return self._stage.take(frame)
        if self._rule.on == "every":
            return Staged(frame.outputs, has_changed=True)
        if self._steady is None or self._steady[0] is not servable:
            self._steady = servable, SteadyAnswer(frame.steps, self._rule.outputs, *self._rule.steady)
        return Staged(*self._steady[1].agree(frame.outputs, is_wanted=self._rule.on == "interval"))

    def _drop(self, error: EdgeRuntimeError) -> None:
        """Count one that was not run: a newer one comes."""
        self._count_dropped(1)
        self._blame(error)

    def _count_dropped(self, count: int) -> None:
        if count:
            self._dropped += count
            self._metrics.count(f"{self._taking.counted}_dropped", count)

    def _blame(self, error: EdgeRuntimeError) -> None:
        """Keep why frames are not run, and log it when the kind of reason changes."""
        if self._error is None or self._error.code != error.code:
            extra = {
                self._reader.noun: self._reader.shown,
                "model": self._rule.model,
                "reason": error.message,
            }
            said = f"{self._reader.gives} of a {self._reader.noun} are not run"
            log.warning(said, extra=extra)
        self._error = error

    def _hear(self, ended: Request | EdgeRuntimeError) -> None:
        """Conclude the frame that ran; by now the next may be due. Thread: any."""
        try:
            self._conclude(ended)
        except Exception:
            self._metrics.count("publish_failed")
            log.exception("a bug interrupted what is done with an answer", extra={"model": self._rule.model})
        self._is_running = False
        if self._clock.monotonic_s() >= self._due_s:  # else the reader calls by itself
            self._reader.wake()


class FrameTaking:
    """Frames of a camera, of which the newest are run. fps: for a rule that says none."""

    source = "camera"
    counted = "camera_frames"

    def __init__(self, fps: float | None = None) -> None:
        self._fps = fps

    def period_s(self, rule: PublishRule) -> float:
        """Return the time between two frames: one a second where nothing says how many."""
        if rule.fps is not None:
            return 1 / rule.fps
        return rule.every_s or (1.0 if self._fps is None else 1 / self._fps)

    def wanted(self, servable: Servable) -> PictureSource:
        """Return the form of frames that a model declares."""
        return frame_source(servable)

    def tensor(self, servable: Servable, taken: Shot) -> tuple[TensorHeader, Array]:
        """Return the frame as a picture, UINT8 [1, height, width, channels] or as its form has it."""
        del servable
        return TensorHeader(UNNAMED, "UINT8", (1, *taken.pixels.shape)), taken.pixels[None]

    def row(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return them as they are."""
        return outputs

    def fields(self, taken: Shot) -> Mapping[str, Any]:
        """Return the frame's number."""
        return {"frame": taken.number}

    def missed(self, before: Shot | None, taken: Shot) -> int:
        """Return 0: no frame waits for its model."""
        del before, taken
        return 0


def frame_source(servable: Servable) -> PictureSource:
    """The form of frames that a model declares. Raises TensorMismatch where it takes none, with what to write."""
    if servable.chain is not None:
        raise TensorMismatch(
            f"model {servable.model!r} is a pipeline, which takes encoded pictures; a camera's frames go to a model"
        )
    declared = next(iter(servable.steps.inputs.values()), None) if servable.steps is not None else None
    if not isinstance(declared, PictureSteps):
        raise TensorMismatch(why_no_picture(servable.model, servable.spec, servable.about.offered))
    return declared.source
