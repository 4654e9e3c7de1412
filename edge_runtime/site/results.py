"""Publishes models' answers by the rules of `[[publish]]`, for subscribers that only listen.

Owns: the publications, and the thread that packs and posts due results, so that an answering thread only leaves an
answer here. Thread: answering threads call the listeners; the rest runs on the publisher's own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_runtime.answers import BESIDE, Answer, answer_fields, answers_of, kind_of
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import JSON_TYPE, DevicePublisher, DeviceTopics, check_result_topic
from edge_runtime.errors import ConfigError
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.request.infer import Infer
from edge_runtime.request.infer_frontend import Listener, Outputs
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.site.camera import Camera, CameraAddress
from edge_runtime.site.camera_source import CameraSource
from edge_runtime.site.drawn_pictures import PictureDrawer
from edge_runtime.site.folder_source import FolderSource, InputFolder, name_as_text
from edge_runtime.site.publication import PendingResult, Publication, SentPicture, ShownOutput, ShownResult
from edge_runtime.site.settings import PublishRule
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.wire.json_codec import dumps, outputs_to_json, pack_json_answer

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Longest wait of the thread: skipped results and missing outputs are counted even without a wake."""

RESULT_AGE_S = 30.0
"""A result older than this is of no interest; the limit of replies."""

COUNTED = ("boxes", "masks", "keypoints", "tags")
"""Kinds of answers that are lists of what was found."""


class ResultPublisher:
    """The publisher of one device's rules. Raises ConfigError for a topic or folder that is not allowed."""

    def __init__(
        self,
        rules: Sequence[PublishRule],
        publisher: DevicePublisher,
        *,
        table: ModelTable,
        infer: Infer,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._publisher = publisher
        self._table = table
        self._infer = infer
        self._metrics = metrics
        self._clock = clock
        self._wake = threading.Event()
        self._publications = [Publication(rule, _topic(rule, publisher.topics)) for rule in rules]
        has_pictures = any(rule.picture for rule in rules)
        self._drawer = PictureDrawer(publisher, clock, metrics) if has_pictures else None
        self._shown: dict[Publication, ShownResult] = {}
        self._cameras = [self._camera(each) for each in self._publications if each.rule.source == "camera"]
        folders = [self._folder(each) for each in self._publications if each.rule.source == "folder"]
        self._sources: list[FolderSource | CameraSource] = [*folders, *self._cameras]
        self._warned: set[tuple[str, str]] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="edge-results", daemon=True)
        _check_folders(rules)

    def listeners(self, source: str) -> Mapping[str, Listener]:
        """The listeners to the answers of one door's clients, by model."""
        publications = [each for each in self._publications if each.rule.source == source]
        return {
            model: ResultListener([each for each in publications if each.rule.model == model], self._wake)
            for model in {each.rule.model for each in publications}
        }

    def shown(self) -> tuple[ShownResult, ...]:
        """The results of each rule's newest version; of an unloaded model, those of the version before.

        Thread: the MQTT transport's, or main before it starts.
        """
        for publication in self._publications:
            newest = max(self._table.live_of(publication.rule.model), key=lambda each: each.number, default=None)
            if newest is not None:
                self._shown[publication] = _shown(publication, newest)
        return tuple(self._shown.values())

    def start(self) -> None:
        """Begin to publish and to look at folders. Warns of models that are missing."""
        if not self._publications:
            return
        known = {status.model for status in self._table.statuses()}
        for name in sorted({each.rule.model for each in self._publications} - known):
            log.warning(
                "a model whose results are to be published is missing; they are published once it is there",
                extra={"model": name},
            )
        for camera in self._cameras:
            camera.start()
        if self._drawer is not None:
            self._drawer.start()
        self._thread.start()

    def status(self) -> list[dict[str, Any]]:
        """The status of each folder and camera for `stats`, as JSON values."""
        return [source.status() for source in self._sources]

    def close(self) -> None:
        """Post due results; end the cameras and the thread. Idempotent."""
        self._is_stopping = True
        for camera in self._cameras:
            camera.close()
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
        due_s = min((source.step(self._clock.monotonic_s()) for source in self._sources), default=math.inf)
        for publication in self._publications:
            self._publish(publication)
            due_s = min(due_s, publication.due_s())
        for source in self._sources:
            source.tidy()
        return due_s

    def _publish(self, publication: Publication) -> None:
        for result in publication.take(self._clock.monotonic_s()):
            try:
                self._post(publication, result)
            except Exception:
                self._metrics.count("publish_failed")
                log.exception("a result could not be published", extra={"topic": publication.topic})
        skipped, publication.skipped = publication.skipped, 0
        if skipped:
            self._metrics.count("mqtt_results_skipped", skipped)
        without_output, publication.without_output = publication.without_output, 0
        if without_output:
            self._metrics.count("mqtt_results_without_output", without_output)
            self._warn_once(
                publication, "an answer lacks an output that is to be published", self._outputs_of(publication)
            )

    def _post(self, publication: Publication, result: PendingResult) -> None:
        rule = publication.rule
        reason = self._publisher.post(
            publication.topic,
            result_payload(result),
            JSON_TYPE,
            qos=rule.qos,
            retain=rule.retain,
            expires_s=self._clock.monotonic_s() + RESULT_AGE_S,
        )
        if reason:
            self._metrics.count("mqtt_results_too_large")
            self._warn_once(publication, "a result is too large for the broker", f"{reason}; name fewer outputs")
            return
        self._metrics.count("mqtt_results")
        picture = publication.picture_of(result)
        if picture is not None and self._drawer is not None:
            self._draw(self._drawer, publication, result, picture)

    def _draw(
        self, drawer: PictureDrawer, publication: Publication, result: PendingResult, picture: SentPicture
    ) -> None:
        steps, answers = result.plan.servable.steps, _answers(result)
        if steps is not None and answers:
            masks = (steps.labels.get(name, ()) for name, output in steps.outputs.items() if kind_of(output) == "mask")
            drawer.offer(picture_topic(publication), picture, answers[0], tuple(next(masks, ())))

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

    def _folder(self, publication: Publication) -> FolderSource:
        folder = InputFolder(Path(publication.rule.folder or ""))
        return FolderSource(publication, folder, self._publisher, **self._parts())

    def _camera(self, publication: Publication) -> CameraSource:
        camera = Camera(CameraAddress(publication.rule.camera or ""), self._wake)
        return CameraSource(publication, camera, self._publisher, **self._parts())

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
            if publication.offer(plan, answers, utc_s, request=request):
                self._wake.set()


def result_payload(result: PendingResult) -> bytes:
    """A result as published: the JSON reply with `time` (UTC, ISO 8601), and `file` if its input was one.

    Answers of declared steps are published in words, in place of tensors.
    """
    servable, tensors = result.plan.servable, result.tensors()
    more = {"time": datetime.fromtimestamp(result.utc_s, timezone.utc).isoformat(timespec="milliseconds")}
    if result.file is not None:
        more["file"] = name_as_text(result.file)
    answers, steps = _answers(result), servable.steps
    if not answers or steps is None:
        return pack_json_answer(None, servable.model, servable.number, tensors, more=more)
    fields: dict[str, Any] = {"id": None, "model_name": servable.model, "model_version": str(servable.number)}
    fields |= answer_fields(answers, as_list=steps.has_items)
    if bare := [each for each in tensors if each[0].name not in {*BESIDE, *steps.outputs}]:
        fields["outputs"] = outputs_to_json(bare)
    return dumps({**fields, **more})


def picture_topic(publication: Publication) -> str:
    """Where the last picture of a rule is."""
    return f"{publication.topic}/picture"


def _answers(result: PendingResult) -> list[Answer]:
    """The answers of a result, one a row; empty where its outputs are bare."""
    servable = result.plan.servable
    if servable.steps is None or not servable.form.answers or not servable.steps.outputs:
        return []
    return answers_of(servable.steps, {header.name: array for header, array in result.tensors()})


def _shown(publication: Publication, servable: Servable) -> ShownResult:
    """The results of a rule for one version, as far as Home Assistant can show them."""
    rule, steps = publication.rule, servable.steps
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
    )


def _topic(rule: PublishRule, topics: DeviceTopics) -> str:
    return topics.result(rule.model) if rule.topic is None else check_result_topic("publish.topic", rule.topic, topics)


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
