"""One publishing rule: which of a model's answers are published, and when.

Owns: the rule's queue, its last published outputs, and its pace. Sends nothing and waits for nothing: any thread offers
answers, and one thread takes those that are due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from edge_runtime.answers import BESIDE, WINDOW_TIMES
from edge_runtime.messages import TensorHeader
from edge_runtime.pictures.drawing import Overlay
from edge_runtime.pictures.picture_steps import FRAME_CHANNELS
from edge_runtime.request.infer_frontend import Outputs
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.site.settings import PublishRule
from edge_runtime.tensors import Array, array_from_wire, array_to_wire

if TYPE_CHECKING:
    from edge_runtime.site.onlookers import Onlookers

QUEUE_RESULTS = 64
"""Changes that wait in a rule with no interval; of more, the oldest are skipped and counted."""

LEAST_INTERVAL_S = 0.001
"""Such a rule publishes QUEUE_RESULTS at once and then a thousand a second: more than a person reads, and few enough
not to displace replies, which share the connection."""


SentPicture = bytes | Array
"""A picture as it was sent: encoded, or a frame UINT8 [height, width, channels]."""


@dataclass(frozen=True, slots=True)
class ShownOutput:
    """One output of a model without answers: a value a row."""

    name: str
    is_number: bool


@dataclass(frozen=True, slots=True)
class ShownResult:
    """The published results of one rule: an answer's best label and score, its number or text, or single values.

    has_labels: its answers have classes, tags, or things found; counts: they have one of the latter two. unit: of its
    number; None: it has none. picture_topic: where the last picture with its answer is, None: nowhere. name: of the
    rule, or its model's. camera: its name, where it has one. source: the table and the name of its camera or microphone
    in the device's state; None without one. entities: of its stage (stage.py).
    """

    model: str
    topic: str
    has_labels: bool = False
    counts: bool = False
    unit: str | None = None
    has_text: bool = False
    values: tuple[ShownOutput, ...] = ()
    picture_topic: str | None = None
    name: str = ""
    camera: str = ""
    source: tuple[str, str] | None = None
    entities: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class PendingResult:
    """One answer that may be published. positions: which of its plan's outputs these are.

    more: entries of its JSON, of its source and its stage. is_news: published whatever the last one was. overlay: of
    its picture, by its stage.
    """

    plan: RequestPlan
    positions: tuple[int, ...]
    outputs: Outputs
    utc_s: float
    more: Mapping[str, Any] = field(default_factory=dict)
    is_news: bool = False
    overlay: Overlay | None = None

    def tensors(self) -> list[tuple[TensorHeader, Array]]:
        """The outputs as arrays, with the model's names and datatypes."""
        specs = self.plan.servable.spec.outputs
        found: list[tuple[TensorHeader, Array]] = []
        for position, output in zip(self.positions, self.outputs, strict=True):
            index = self.plan.outputs[position]
            spec = specs[index]
            array = self._array(index, output) if isinstance(output, bytes) else output
            found.append((TensorHeader(spec.name, spec.datatype, array.shape), array))
        return found

    def _array(self, index: int, output: bytes) -> Array:
        """An array of bytes, which come from inline runs only, whose shapes are known."""
        servable = self.plan.servable
        assert servable.inline is not None
        shape = (self.plan.rows, *servable.inline.output_inner_shapes[index])
        return array_from_wire(servable.spec.outputs[index].datatype, shape, output)


@dataclass(slots=True)
class PendingEvent:
    """An event of a rule's stage. result: the answer of the frame that it was seen in. picture: of it, if wanted."""

    result: PendingResult
    fields: Mapping[str, Any]
    picture: SentPicture | None = None


class PublishPace:
    """A rate limit: at most `burst` at once, and one each `interval_s` over time."""

    def __init__(self, interval_s: float, burst: int) -> None:
        self._interval_s = interval_s
        self._slack_s = (burst - 1) * interval_s
        self._spent_until_s = -math.inf

    @property
    def free_s(self) -> float:
        """The instant from which one more is allowed."""
        return self._spent_until_s - self._slack_s

    def spend(self, now_s: float) -> None:
        """Count one at `now_s`."""
        self._spent_until_s = max(self._spent_until_s, now_s) + self._interval_s


class Publication:
    """One rule's state. Thread: `offer` any; the others the publisher's.

    last: what was published last, for who comes later. onlookers: people who look now; None: there are none.
    skipped: changes that were dropped because the queue was full. without_output: answers that lack an output which
    the rule names.
    """

    def __init__(self, rule: PublishRule, topic: str) -> None:
        self.rule = rule
        self.topic = topic
        self.last: bytes | None = None
        self.onlookers: Onlookers | None = None
        self.skipped = 0
        self.without_output = 0
        # Invariant: with an interval only the latest counts, and the queue's length is 1.
        self._is_latest_only = rule.interval_s > 0
        self._queue: deque[PendingResult] = deque(maxlen=1 if self._is_latest_only else QUEUE_RESULTS)
        self._pace = (
            PublishPace(rule.interval_s, 1) if self._is_latest_only else PublishPace(LEAST_INTERVAL_S, QUEUE_RESULTS)
        )
        self._is_armed = False
        self._before: tuple[RequestPlan, Outputs] | None = None
        # Only the newest is kept: of a queue full of results, each picture may have megabytes.
        self._pictured: tuple[PendingResult, SentPicture] | None = None
        self._events: deque[PendingEvent] = deque(maxlen=QUEUE_RESULTS)
        self._published: object = None
        self._known: tuple[RequestPlan | None, tuple[int, ...] | None] = (None, None)

    def names(self, camera: str = "") -> dict[str, str]:
        """The names that its results carry in their JSON, as far as there are any. camera: of their source."""
        found = {"name": self.rule.name or "", "camera": camera}
        return {key: name for key, name in found.items() if name}

    def offer(
        self,
        plan: RequestPlan,
        answers: Sequence[Outputs],
        utc_s: float,
        request: Request | None = None,
        *,
        more: Mapping[str, Any] | None = None,
        is_news: bool = False,
        overlay: Overlay | None = None,
    ) -> bool:
        """Queue answers, in order. Return True when the publisher must be woken, as it awaits none of this rule.

        request: what the last of these answers, for its picture. more, is_news, overlay: as of PendingResult.
        """
        positions = self._positions(plan)
        if positions is None:
            self.without_output += len(answers)
            return False
        if self.onlookers is not None and answers:
            self.show(plan, answers[-1], utc_s, request, more=more, overlay=overlay)
        news: PendingResult | None = None
        for outputs in answers[-1:] if self._is_latest_only else answers:
            chosen = [outputs[index] for index in positions]
            if is_news or not self._is_as_before(plan, chosen):
                news = PendingResult(plan, positions, chosen, utc_s, more or {}, is_news, overlay)
                self._queue_up(news)
        if news is not None and self.rule.picture and request is not None:
            picture = _sent_picture(request)
            self._pictured = None if picture is None else (news, picture)
        if news is None or self._is_armed:
            return False
        self._is_armed = True
        return True

    def show(
        self,
        plan: RequestPlan,
        outputs: Outputs,
        utc_s: float,
        request: Request | None,
        *,
        more: Mapping[str, Any] | None = None,
        overlay: Overlay | None = None,
    ) -> None:
        """Have those who look see an answer, published or not; `offer` does it too."""
        onlookers, positions = self.onlookers, self._positions(plan)
        if onlookers is None or positions is None:
            return
        picture = _sent_picture(request) if request is not None and onlookers.wants_picture else None
        chosen = [outputs[index] for index in positions]
        onlookers.put(PendingResult(plan, positions, chosen, utc_s, more or {}, overlay=overlay), picture)

    def report(
        self,
        plan: RequestPlan,
        outputs: Outputs,
        utc_s: float,
        events: Sequence[Mapping[str, Any]],
        *,
        more: Mapping[str, Any],
        request: Request,
        overlay: Overlay | None = None,
    ) -> None:
        """Queue events of a stage, which are published whatever the rule says of results; the oldest may be dropped.

        The publisher takes them in its next round: the caller wakes it.
        """
        positions = self._positions(plan)
        if not events or positions is None:
            return
        chosen = [outputs[index] for index in positions]
        result = PendingResult(plan, positions, chosen, utc_s, more, overlay=overlay)
        picture = _sent_picture(request) if self.rule.picture else None
        self._events.extend(PendingEvent(result, event, picture) for event in events)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to publish or to count."""
        return not (self._queue or self._events or self._is_armed or self.skipped or self.without_output)

    def take_events(self) -> list[PendingEvent]:
        """The events to publish now, in order."""
        found = list(self._events)
        self._events.clear()
        return found

    def picture_of(self, result: PendingResult) -> SentPicture | None:
        """The picture that a result answers, as long as it is the newest one."""
        pictured = self._pictured
        return pictured[1] if pictured is not None and pictured[0] is result else None

    def take(self, now_s: float) -> list[PendingResult]:
        """The results to publish now, in order."""
        # Invariant: an answer offered from here on is taken below or wakes the publisher again.
        self._is_armed = False
        found: list[PendingResult] = []
        while self._queue and now_s >= self._pace.free_s:
            result = self._queue.popleft()
            if self._differs(result):
                self._pace.spend(now_s)
                found.append(result)
        self._is_armed = bool(self._queue)
        return found

    def due_s(self) -> float:
        """The instant when `take` may find a result; infinite with an empty queue."""
        return self._pace.free_s if self._queue else math.inf

    # ---- private ----------------------------------------------------------------------------------------------------

    def _is_as_before(self, plan: RequestPlan, outputs: Outputs) -> bool:
        """Whether it is plainly no change. Outputs of another plan are compared in `take`."""
        if self.rule.on != "change":
            return False
        before = self._before
        if before is not None and before[0] is plan and _are_equal(before[1], outputs):
            return True
        self._before = (plan, outputs)
        return False

    def _queue_up(self, result: PendingResult) -> None:
        if not self._is_latest_only and len(self._queue) == QUEUE_RESULTS:
            self.skipped += 1
        self._queue.append(result)

    def _differs(self, result: PendingResult) -> bool:
        if self.rule.on != "change" or result.is_news:
            return True
        content = [(header, bytes(array_to_wire(array))) for header, array in result.tensors()]
        if content == self._published:
            return False
        self._published = content
        return True

    def _positions(self, plan: RequestPlan) -> tuple[int, ...] | None:
        """The positions of the rule's outputs in answers of this plan; None when one is missing."""
        known_plan, positions = self._known
        if known_plan is not plan:
            positions = _find_outputs(plan, self.rule)
            self._known = (plan, positions)
        return positions


def as_utc(utc_s: float) -> str:
    """An instant as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(utc_s, timezone.utc).isoformat(timespec="milliseconds")


def _find_outputs(plan: RequestPlan, rule: PublishRule) -> tuple[int, ...] | None:
    given = {plan.servable.spec.outputs[index].name: position for position, index in enumerate(plan.outputs)}
    names = rule.outputs
    if rule.audio is not None:  # each result is of one window, whose time it says itself
        given.pop(WINDOW_TIMES, None)
    if not names:
        return tuple(given.values())
    if not given.keys() >= set(names):
        return None
    beside = [name for name in given if name in BESIDE and plan.servable.form.answers]
    return tuple(given[name] for name in dict.fromkeys((*names, *beside)))


def _sent_picture(request: Request) -> SentPicture | None:
    """The first picture of an answered request; None where it sent tensors, or frames that are none (nv12, yuyv)."""
    servable = request.plan.servable
    if servable.steps is None or servable.form.kind == "tensor":
        return None
    names = [spec.name for spec in servable.spec.inputs]
    rows = request.inputs[names.index(next(iter(servable.steps.inputs)))]
    if servable.form.kind == "picture":
        return bytes(rows[0])
    # A copy: it may lie in memory that its sender writes again.
    return rows[0].copy() if rows.ndim == 4 and rows.shape[3] in FRAME_CHANNELS else None


def _are_equal(first: Outputs, second: Outputs) -> bool:
    """Whether outputs are equal byte by byte: a NaN equals itself."""
    return all(map(_is_equal, first, second))


def _is_equal(first: bytes | Array, second: bytes | Array) -> bool:
    if isinstance(first, bytes) or isinstance(second, bytes):
        return isinstance(first, bytes) and isinstance(second, bytes) and first == second
    return first.shape == second.shape and bytes(array_to_wire(first)) == bytes(array_to_wire(second))
