"""Publishes models' answers by the rules of `[[publish]]`, for subscribers that only listen.

Owns: the rules of now with their sources, and the thread that packs and posts due results, so that an answering thread
only leaves an answer here. Thread: answering threads call the listeners; the rest runs on the publisher's own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_runtime.answers import BESIDE, Answer, answer_fields, answers_of, kind_of
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import JSON_TYPE, DevicePublisher, DeviceTopics, check_result_topic
from edge_runtime.errors import ConfigError
from edge_runtime.hosts.regions import Regions
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.pictures.drawing import has_pillow
from edge_runtime.request.infer import Infer
from edge_runtime.request.infer_frontend import Listener, Outputs
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.site.camera import Camera
from edge_runtime.site.camera_source import CameraSource, FrameTaking, StreamView, Taking
from edge_runtime.site.cameras import by_name, place_of
from edge_runtime.site.drawn_pictures import Deliver, PictureDrawer
from edge_runtime.site.folder_source import FolderSource, InputFolder
from edge_runtime.site.microphone import Microphone
from edge_runtime.site.onlookers import Onlookers
from edge_runtime.site.publication import (
    PendingEvent,
    PendingResult,
    Publication,
    SentPicture,
    ShownOutput,
    ShownResult,
    as_utc,
)
from edge_runtime.site.reader import Readers, SourcePlace, SourceReader, SourceState
from edge_runtime.site.settings import CameraSettings, PublishRule
from edge_runtime.site.stage import Stage, open_stage
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.wire.json_codec import dumps, loads, outputs_to_json, pack_json_answer

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Longest wait of the thread: skipped results and missing outputs are counted even without a wake."""

RESULT_AGE_S = 30.0
"""A result older than this is of no interest; the limit of replies."""

PICTURE_END = "picture"
"""The last part of the topic of a rule's pictures."""

MOST_SHOWN_BYTES = 1 << 16
"""Of the JSON of an answer that is listed: a thousand boxes. A page asks for those of all rules each second."""

COUNTED = ("boxes", "masks", "keypoints", "tags")
"""Kinds of answers that are lists of what was found."""


class RuleSource(Protocol):
    """A source that gives a rule its answers, where no client asks.

    Thread: the publisher's, or that of the reader which it takes from; `status` any.
    """

    def status(self) -> dict[str, Any]:
        """Its status for `stats`, as JSON values: model, source, from, reason. Thread: any."""
        ...

    def step(self, now_s: float) -> float:
        """Do what is due. Return the instant of the next call, at the latest."""
        ...

    def tidy(self) -> None:
        """Called once what the last step offered is published."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class ActiveRule:
    """A rule that is published by now. source: None where clients ask. reader, settings: of what it looks at."""

    rule: PublishRule
    publication: Publication
    source: RuleSource | None = None
    stage: Stage | None = None
    reader: SourceReader | None = None
    settings: CameraSettings | SourcePlace | None = None


class ResultPublisher:
    """The publisher of one device's rules. Raises ConfigError for a topic or folder that is not allowed.

    regions: where frames of cameras lie; None: each is copied. state: the daemon's state folder, for stages.
    """

    def __init__(
        self,
        rules: Sequence[PublishRule],
        publisher: DevicePublisher,
        *,
        table: ModelTable,
        infer: Infer,
        metrics: Metrics,
        clock: Clock,
        cameras: Sequence[CameraSettings] = (),
        regions: Regions | None = None,
        state: Path | None = None,
    ) -> None:
        self._publisher = publisher
        self._state = state
        self._table = table
        self._infer = infer
        self._metrics = metrics
        self._clock = clock
        self._wake = threading.Event()
        # Invariant: replaced whole, under the lock; who reads keeps what it has read.
        self._lock = threading.Lock()
        self._rules: tuple[ActiveRule, ...] = ()
        self.cameras: tuple[CameraSettings, ...] = ()
        self._readers = Readers(self._wake.set, regions)
        self._leaving: list[SourceReader] = []
        self._drawer: PictureDrawer | None = None
        self._shown: dict[Publication, ShownResult] = {}
        self._says_again = False
        self._warned: set[tuple[str, str]] = set()
        self._has_started = self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="edge-results", daemon=True)
        for kind in (Camera, Microphone):
            metrics.watch_each(f"{kind.noun}_online", kind.noun, partial(self._online, kind))
        self.take(rules, cameras)

    def listeners(self, source: str) -> Mapping[str, Listener]:
        """The listeners to the answers of one door's clients, by model."""
        publications = [each.publication for each in self._rules if each.rule.source == source]
        return {
            model: ResultListener([each for each in publications if each.rule.model == model], self._wake)
            for model in {each.rule.model for each in publications}
        }

    def shown(self) -> tuple[ShownResult, ...]:
        """The results of each rule's newest version; of an unloaded model, those of the version before.

        Thread: the MQTT transport's, or main before it starts.
        """
        rules = self._rules
        shown: dict[Publication, ShownResult] = {}
        for each in rules:
            newest = max(self._table.live_of(each.rule.model), key=lambda servable: servable.number, default=None)
            if newest is not None:
                shown[each.publication] = _shown(each, newest)
            elif each.publication in self._shown:
                shown[each.publication] = self._shown[each.publication]
        self._shown = shown
        return tuple(shown.values())

    @property
    def rules(self) -> tuple[PublishRule, ...]:
        """The rules of now."""
        return tuple(each.rule for each in self._rules)

    def take(self, rules: Sequence[PublishRule], cameras: Sequence[CameraSettings]) -> None:
        """Publish by these rules from now on; a rule that is as before goes on, and so does its camera.

        Raises ConfigError for rules that cannot be: it is all as before. Thread: any.
        """
        with self._lock:
            before = list(self._rules)
            named = by_name(cameras)
            places = [place_of(rule, named) for rule in rules]
            labels = [rule.name or (place.name if place else "") for rule, place in zip(rules, places, strict=True)]
            topics = [_topic(rule, label, self._publisher.topics) for rule, label in zip(rules, labels, strict=True)]
            _check_topics(rules, topics)
            _check_folders(rules)
            shown = [named.get(rule.camera or "", place) for rule, place in zip(rules, places, strict=True)]
            known = [(each.rule, each.settings) for each in before]
            stages = [
                None if each in known else open_stage(each[0], self._state) for each in zip(rules, shown, strict=True)
            ]
            if self._drawer is None and any(rule.picture for rule in rules):
                self._drawer = PictureDrawer(self._publisher, self._clock, self._metrics)
                if self._has_started:
                    self._drawer.start()
            self._readers.open(filter(None, places))
            made: list[ActiveRule] = []
            for rule, place, topic, stage, settings in zip(rules, places, topics, stages, shown, strict=True):
                kept = next((each for each in before if (each.rule, each.settings) == (rule, settings)), None)
                if kept is not None:
                    before.remove(kept)
                made.append(kept or self._activate(rule, topic, stage, place, settings))
            self._rules, self.cameras = tuple(made), tuple(cameras)
            for each in before:
                if each.reader is not None and each.source is not None:
                    each.reader.leave(each.source)
            for each in made:
                if each.reader is not None and each.source is not None:
                    each.reader.drive(each.source)
            self._leaving += self._readers.leave(filter(None, places))
            self._forget(before, {each.publication.topic for each in made})
        if self._has_started:
            self._run()

    def start(self) -> None:
        """Begin to publish and to look at folders and cameras. Warns of models that are missing."""
        self._has_started = True
        if self._drawer is not None:
            self._drawer.start()
        self._run()

    def say_again(self) -> None:
        """Publish the last result of each rule once more, for subscribers that came since. Thread: any."""
        self._says_again = True
        self._wake.set()

    def status(self) -> list[dict[str, Any]]:
        """The status of each folder and camera for `stats`, as JSON values."""
        return [each.source.status() for each in self._rules if each.source is not None]

    def last_results(self) -> list[dict[str, Any]]:
        """The last result of each rule, as JSON values, and whether there are pictures of it. Thread: any.

        From the first call on, until there was none for some seconds, it is the newest, published or not.
        """
        return [_last(each, self._onlookers_of(each).look()) for each in self._rules]

    def last_picture(self, topic: str) -> bytes | None:
        """The last JPEG of the rule with this topic, with its answer drawn; None: there is none yet. Thread: any.

        It has the next one drawn, for the next call.
        """
        found = next((each for each in self._rules if each.publication.topic == topic), None)
        if found is None:
            return None
        jpeg = self._onlookers_of(found).picture()
        published = self._drawer.last if self._drawer is not None else {}
        return jpeg or published.get(picture_topic(found.publication))

    def states(self) -> dict[str, dict[str, dict[str, str]]]:
        """By the table of its kind, the state of each source by its name or its address, and why it is lost."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for each in self._readers.all():
            found.setdefault(each.table, {})[each.shown] = {"state": each.state.value, "reason": each.reason}
        return found

    def close(self) -> None:
        """Post due results; end the readers and the thread. Idempotent."""
        self._is_stopping = True
        for reader in (*self._readers.all(), *self._leaving):
            reader.close()
        self._wake.set()
        if self._drawer is not None:
            self._drawer.close()
        if self._thread.is_alive():
            self._thread.join()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_stopping
            self._wake.clear()
            try:
                due_s = self._round()
            except Exception:
                self._metrics.count("publish_failed")
                log.exception("a bug interrupted the publishing of results")
                due_s = self._clock.monotonic_s() + PAUSE_S
            if not (is_last or self._is_stopping):
                self._wake.wait(min(max(due_s - self._clock.monotonic_s(), 0.0), PAUSE_S))

    def _round(self) -> float:
        """Do everything that is due. Return the next known instant."""
        rules = self._rules
        sources = [each.source for each in rules if each.source is not None and each.reader is None]
        due_s = min((source.step(self._clock.monotonic_s()) for source in sources), default=math.inf)
        says_again, self._says_again = self._says_again, False
        for each in rules:
            if says_again and each.publication.last is not None:
                self._send(each.publication, each.publication.last)
            self._publish(each.publication)
            due_s = min(due_s, each.publication.due_s())
        for source in sources:
            source.tidy()
        self._end_looks(rules)
        while self._leaving:
            self._leaving.pop().close()
        return due_s

    def _publish(self, publication: Publication) -> None:
        if publication.is_idle:
            return
        for event in publication.take_events():
            self._guarded(publication, lambda event=event: self._post_event(publication, event))  # type: ignore[misc]
        for result in publication.take(self._clock.monotonic_s()):
            self._guarded(publication, lambda result=result: self._post(publication, result))  # type: ignore[misc]
        skipped, publication.skipped = publication.skipped, 0
        if skipped:
            self._metrics.count("mqtt_results_skipped", skipped)
        without_output, publication.without_output = publication.without_output, 0
        if without_output:
            self._metrics.count("mqtt_results_without_output", without_output)
            self._warn_once(
                publication, "an answer lacks an output that is to be published", self._outputs_of(publication)
            )

    def _guarded(self, publication: Publication, post: Callable[[], None]) -> None:
        """Post one result: a bug in it costs no other."""
        try:
            post()
        except Exception:
            self._metrics.count("publish_failed")
            log.exception("a result could not be published", extra={"topic": publication.topic})

    def _post(self, publication: Publication, result: PendingResult) -> None:
        payload = result_payload(result)
        if not self._send(publication, payload):
            return
        publication.last = payload
        self._metrics.count("mqtt_results")
        picture = publication.picture_of(result)
        if picture is not None and self._drawer is not None:
            self._draw(self._drawer, picture_topic(publication), result, picture)

    def _post_event(self, publication: Publication, event: PendingEvent) -> None:
        result = event.result
        fields = {"model_name": publication.rule.model, "time": as_utc(result.utc_s), **result.more, **event.fields}
        topic = event_topic(publication)
        self._publisher.post(topic, dumps(fields), JSON_TYPE, qos=publication.rule.qos)
        self._metrics.count("mqtt_events")
        if event.picture is not None and self._drawer is not None:
            self._draw(self._drawer, f"{topic}/picture", result, event.picture)

    def _send(self, publication: Publication, payload: bytes) -> bool:
        """Post a result of a rule; False where it is too large for the broker."""
        rule = publication.rule
        reason = self._publisher.post(
            publication.topic,
            payload,
            JSON_TYPE,
            qos=rule.qos,
            retain=rule.retain,
            expires_s=self._clock.monotonic_s() + RESULT_AGE_S,
        )
        if reason:
            self._metrics.count("mqtt_results_too_large")
            self._warn_once(publication, "a result is too large for the broker", f"{reason}; name fewer outputs")
        return not reason

    def _draw(
        self,
        drawer: PictureDrawer,
        topic: str,
        result: PendingResult,
        picture: SentPicture,
        deliver: Deliver | None = None,
    ) -> bool:
        """Have a picture drawn; False where its answer has nothing to draw."""
        steps, answers = result.plan.servable.steps, _answers(result)
        if steps is None or not answers:
            return False
        masks = (steps.labels.get(name, ()) for name, output in steps.outputs.items() if kind_of(output) == "mask")
        drawer.offer(topic, picture, answers[0], tuple(next(masks, ())), result.overlay, deliver=deliver)
        return True

    # ---- people who look; thread: any -------------------------------------------------------------------------------

    def _onlookers_of(self, each: ActiveRule) -> Onlookers:
        """The people who look at a rule, from now on."""
        publication = each.publication
        if publication.onlookers is None:
            publication.onlookers = Onlookers(self._clock, partial(self._draw_shown, publication))
        return publication.onlookers

    def _draw_shown(
        self, publication: Publication, result: PendingResult, picture: SentPicture, deliver: Deliver
    ) -> None:
        with self._lock:
            if self._drawer is None and not self._is_stopping and has_pillow():
                self._drawer = PictureDrawer(self._publisher, self._clock, self._metrics)
                self._drawer.start()
            drawer = self._drawer
        if drawer is None or not self._draw(drawer, f"{publication.topic} shown", result, picture, deliver):
            deliver(b"")

    def _end_looks(self, rules: Sequence[ActiveRule]) -> None:
        """Keep nothing of rules that are not looked at any more. Thread: the publisher's."""
        now_s = self._clock.monotonic_s()
        for each in rules:
            onlookers = each.publication.onlookers
            if onlookers is not None and onlookers.is_over(now_s):
                each.publication.onlookers = None
        if self._drawer is None:
            return
        with self._lock:
            is_needed = any(each.rule.picture or each.publication.onlookers is not None for each in self._rules)
            drawer, self._drawer = (None, self._drawer) if is_needed else (self._drawer, None)
        if drawer is not None:
            drawer.close()

    def _warn_once(self, publication: Publication, what: str, reason: str) -> None:
        if (publication.topic, what) not in self._warned:
            self._warned.add((publication.topic, what))
            log.warning(
                what, extra={"model": publication.rule.model, "topic": publication.topic, "reason": reason}
            )  # fmt: skip

    # ---- private ----------------------------------------------------------------------------------------------------

    def _outputs_of(self, publication: Publication) -> str:
        live = [servable for servable in self._table.live() if servable.model == publication.rule.model]
        known = ", ".join(sorted({spec.name for servable in live for spec in servable.spec.outputs})) or "none now"
        wanted = ", ".join(publication.rule.outputs)
        return f"wanted {wanted}; the model has {known}, of which a client may have asked for some only"

    def _activate(
        self,
        rule: PublishRule,
        topic: str,
        stage: Stage | None,
        place: SourcePlace | None,
        settings: CameraSettings | SourcePlace | None,
    ) -> ActiveRule:
        publication = Publication(rule, topic)
        source: RuleSource | None = None
        reader: SourceReader | None = None
        if rule.folder is not None:
            source = FolderSource(publication, InputFolder(Path(rule.folder)), self._publisher, **self._parts())
        if place is not None:
            reader = self._readers.at(place)
            view, taking = self._look(rule, reader, settings)
            source = CameraSource(
                publication, view, reader, self._publisher, stage=stage, taking=taking, **self._parts()
            )
        return ActiveRule(rule, publication, source, stage, reader, settings)

    def _look(
        self, rule: PublishRule, reader: SourceReader, settings: CameraSettings | SourcePlace | None
    ) -> tuple[StreamView, Taking]:
        """A view of a source, and what a rule takes from it."""
        if isinstance(reader, Microphone):
            from edge_runtime.site.microphone_source import WindowTaking  # it needs the ring of series

            return reader.look(is_newest_only=rule.every_s is not None), WindowTaking(rule)
        assert isinstance(reader, Camera)
        fps = settings.fps if isinstance(settings, CameraSettings) else None
        return reader.look(), FrameTaking(fps)

    def _forget(self, gone: Sequence[ActiveRule], topics: set[str]) -> None:
        """Take back what is retained of rules that are gone. topics: that others publish on."""
        for each in gone:
            if each.publication.topic in topics or not self._has_started:
                continue
            if each.rule.picture:
                self._publisher.retain(picture_topic(each.publication), b"", qos=1)
                if self._drawer is not None:
                    self._drawer.last.pop(picture_topic(each.publication), None)

    def _run(self) -> None:
        """Start what waits for a start."""
        with self._lock:
            if not self._rules or self._is_stopping:
                self._wake.set()
                return
            known = {status.model for status in self._table.statuses()}
            for name in sorted({each.rule.model for each in self._rules} - known):
                log.warning(
                    "a model whose results are to be published is missing; they are published once it is there",
                    extra={"model": name},
                )
            for reader in self._readers.all():
                reader.start()
            if self._thread.ident is None:
                self._thread.start()
        self._wake.set()

    def _online(self, kind: type[SourceReader]) -> dict[str, float]:
        """1 for each source of a kind that gives anything, 0 for one that is lost."""
        known = [each for each in self._readers.all() if isinstance(each, kind)]
        return {
            each.shown: float(each.state is SourceState.ONLINE)
            for each in known
            if each.state is not SourceState.STARTING
        }

    def _parts(self) -> dict[str, Any]:
        return {
            "table": self._table,
            "infer": self._infer,
            "clock": self._clock,
            "metrics": self._metrics,
            "wake": self._wake,
        }


class ResultListener:
    """Listens to one model's answers for its publications."""

    def __init__(self, publications: Sequence[Publication], wake: threading.Event) -> None:
        self._publications = publications
        self._wake = wake

    def answered(self, plan: RequestPlan, answers: Sequence[Outputs], request: Request | None = None) -> None:
        """Keep answers to be published."""
        utc_s = time.time()
        for publication in self._publications:
            if publication.offer(plan, answers, utc_s, request, more=publication.names()):
                self._wake.set()


def result_payload(result: PendingResult) -> bytes:
    """A result as published: the JSON reply with `time` (UTC, ISO 8601), and what its source and stage say.

    Answers of declared steps are published in words, in place of tensors.
    """
    servable, tensors = result.plan.servable, result.tensors()
    more = {"time": as_utc(result.utc_s), **result.more}
    answers, steps = _answers(result), servable.steps
    if not answers or steps is None:
        return pack_json_answer(None, servable.model, servable.number, tensors, more=more)
    fields: dict[str, Any] = {"id": None, "model_name": servable.model, "model_version": str(servable.number)}
    fields |= answer_fields(answers, as_list=steps.has_items)
    if bare := [each for each in tensors if each[0].name not in {*BESIDE, *steps.outputs}]:
        fields["outputs"] = outputs_to_json(bare)
    return dumps({**fields, **more})


def _last(each: ActiveRule, seen: PendingResult | None) -> dict[str, Any]:
    """The last result of a rule as JSON values. seen: its newest answer; None: the one that was published last."""
    published = result_payload(seen) if seen is not None else each.publication.last
    answer = loads(published) if published and len(published) <= MOST_SHOWN_BYTES else None
    form = seen.plan.servable.form.kind if seen is not None else ""
    found = {
        "topic": each.publication.topic,
        "model": each.rule.model,
        "source": each.rule.source,
        "camera": each.reader.shown if isinstance(each.reader, Camera) else None,
        "answer": answer,
        "time": answer["time"] if answer else None,
        "has_picture": has_pillow() and (isinstance(each.reader, Camera) or form in ("picture", "frames")),
    }
    if published and answer is None:
        found["reason"] = f"the answer has {len(published)} bytes; at most {MOST_SHOWN_BYTES} are shown"
    return found


def picture_topic(publication: Publication) -> str:
    """Where the last picture of a rule is."""
    return f"{publication.topic}/{PICTURE_END}"


def event_topic(publication: Publication) -> str:
    """Where events of a rule's stage are; the picture of the last one is below."""
    return f"{publication.topic}/event"


def _answers(result: PendingResult) -> list[Answer]:
    """The answers of a result, one a row; empty where its outputs are bare."""
    servable = result.plan.servable
    if servable.steps is None or not servable.form.answers or not servable.steps.outputs:
        return []
    return answers_of(servable.steps, {header.name: array for header, array in result.tensors()})


def _shown(active: ActiveRule, servable: Servable) -> ShownResult:
    """The results of a rule for one version, as far as Home Assistant can show them."""
    publication, rule, steps = active.publication, active.rule, servable.steps
    outputs = [spec for spec in servable.spec.outputs if not rule.outputs or spec.name in rule.outputs]
    declared = [steps.outputs[spec.name] for spec in outputs if spec.name in steps.outputs] if steps is not None else []
    kinds = {kind_of(each) for each in declared}
    values = [
        ShownOutput(spec.name, is_number=spec.datatype.startswith(("FP", "BF")))
        for spec in outputs
        if not kinds and all(side == 1 for side in spec.shape[1:])
    ]
    return ShownResult(
        rule.model,
        publication.topic,
        has_labels=not kinds.isdisjoint({"classes", *COUNTED}),
        counts=not kinds.isdisjoint(COUNTED),
        unit=next((each.unit or "" for each in declared if kind_of(each) == "number"), None),
        has_text="text" in kinds,
        values=tuple(values),
        picture_topic=picture_topic(publication) if rule.picture else None,
        name=rule.name or rule.model,
        camera=active.reader.name if active.reader is not None else "",
        source=(active.reader.table, active.reader.shown) if active.reader is not None else None,
        entities=active.stage.entities(steps) if active.stage is not None and steps is not None else {},
    )


def _topic(rule: PublishRule, label: str, topics: DeviceTopics) -> str:
    """The topic of a rule. label: its name, or its camera's; empty where neither has one."""
    if rule.topic is not None:
        return check_result_topic("publish.topic", rule.topic, topics)
    return f"{topics.result(rule.model)}/{label}" if label else topics.result(rule.model)


def _check_topics(rules: Sequence[PublishRule], topics: Sequence[str]) -> None:
    """Raise ConfigError where results of two cameras could not be told apart, or two rules share a name."""
    of_cameras = Counter(topic for rule, topic in zip(rules, topics, strict=True) if rule.camera is not None)
    shared = next((topic for topic in of_cameras if topics.count(topic) > 1), None)
    if shared is not None:
        raise ConfigError(
            f"publish: two rules would publish on {shared!r}, and one of them is a camera's; give each a name, or a "
            "topic of its own"
        )
    names = [rule.name for rule in rules if rule.name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"publish.name: two rules are named {twice!r}; give each a name of its own")


def _check_folders(rules: Sequence[PublishRule]) -> None:
    folders = [Path(rule.folder) for rule in rules if rule.folder is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(
                f"publish.folder: two rules name {str(folder)!r}; each file is run once, so give each rule its own"
            )
        if not folder.is_dir():
            log.warning(
                "the folder of a rule is missing; files are taken once it is there", extra={"folder": str(folder)}
            )
