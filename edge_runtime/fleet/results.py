"""Results for those who only listen: what models answer, published by the rules of `[[publish]]`.

Owns: the rules at work, and the thread that packs and posts what is due, so that whoever answers requests only leaves
an answer here. Thread: `taps` are called by those who answer; all else happens on its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from edge_runtime.clock import Clock
from edge_runtime.config.settings import PublishRule
from edge_runtime.errors import ConfigError
from edge_runtime.fleet.drop_folder import DropFolder
from edge_runtime.fleet.folder_source import FolderSource
from edge_runtime.fleet.publication import Heard, Publication
from edge_runtime.frontend.mqtt_request import JSON_TYPE
from edge_runtime.frontend.tap import Outputs, Tap
from edge_runtime.serving.infer import Infer
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.counters import Counters
from edge_runtime.tensors import Array
from edge_runtime.transports.outbox import Outgoing
from edge_runtime.wire.codec import pack_json_answer
from edge_runtime.wire.mqtt_properties import CONTENT_TYPE, UTF8_PAYLOAD, packed_properties, text_property
from edge_runtime.wire.topics import DeviceTopics, check_result_topic

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""It comes round at least so often: what was skipped or lacking is counted, whoever called."""

RESULT_AGE_S = 30.0
"""A result that could not be sent for so long is no news; as old as a reply may get."""

_PROPERTIES = packed_properties(UTF8_PAYLOAD + text_property(CONTENT_TYPE, JSON_TYPE))


class Sender(Protocol):
    """The way to the broker, as far as results go. Thread: any."""

    packet_limit: int

    @property
    def is_online(self) -> bool:
        """Whether there is a broker now."""
        ...

    def post(self, message: Outgoing) -> None:
        """Publish a message."""
        ...


class Results:
    """All rules of one device. Raises ConfigError for a topic or folder that cannot be."""

    def __init__(
        self,
        rules: Sequence[PublishRule],
        topics: DeviceTopics,
        sender: Sender,
        *,
        servables: Servables,
        infer: Infer,
        counters: Counters,
        clock: Clock,
        utc_s: Callable[[], float] = time.time,
    ) -> None:
        self._sender = sender
        self._servables = servables
        self._infer = infer
        self._counters = counters
        self._clock = clock
        self._utc_s = utc_s
        self._wake = threading.Event()
        self._publications = [Publication(rule, _topic(rule, topics)) for rule in rules]
        self._sources = [self._source(each) for each in self._publications if each.rule.source == "folder"]
        self._said: set[tuple[str, str]] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="edge-results", daemon=True)
        _check_folders(rules)

    def taps(self) -> Mapping[str, Tap]:
        """What is to hear the answers of ZeroMQ clients, by model."""
        heard = [each for each in self._publications if each.rule.source == "zmq"]
        return {
            model: ResultTap([each for each in heard if each.rule.model == model], self._utc_s, self._wake.set)
            for model in {each.rule.model for each in heard}
        }

    def start(self) -> None:
        """Begin to publish, and to look at folders. Warns of models that are not there."""
        if not self._publications:
            return
        known = {standing.model for standing in self._servables.standings()}
        for name in sorted({each.rule.model for each in self._publications} - known):
            log.warning("results are to be published of a model that is not there (yet)", extra={"model": name})
        self._thread.start()

    def close(self) -> None:
        """Post what is due and end the thread. Idempotent."""
        self._is_stopping = True
        self._wake.set()
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
                self._counters.count("publish_failed")
                log.exception("publishing results caught what it should not have")
                due_s = self._clock.monotonic_s() + PAUSE_S
            if not (is_last or self._is_stopping):
                self._wake.wait(min(max(due_s - self._clock.monotonic_s(), 0.0), PAUSE_S))

    def _round(self) -> float:
        """Everything that is due now; the instant when something will be next, as far as is known."""
        due_s = min((source.step(self._clock.monotonic_s()) for source in self._sources), default=math.inf)
        for publication in self._publications:
            self._publish(publication)
            due_s = min(due_s, publication.due_s())
        for source in self._sources:
            source.tidy()
        return due_s

    def _publish(self, publication: Publication) -> None:
        for heard in publication.take(self._clock.monotonic_s()):
            try:
                self._post(publication, heard)
            except Exception:
                self._counters.count("publish_failed")
                log.exception("a result could not be published", extra={"topic": publication.topic})
        skipped, publication.skipped = publication.skipped, 0
        if skipped:
            self._counters.count("mqtt_results_skipped", skipped)
        lacking, publication.lacking = publication.lacking, 0
        if lacking:
            self._counters.count("mqtt_results_without_output", lacking)
            self._warn_once(
                publication, "an answer lacks an output that is to be published", self._outputs_of(publication)
            )

    def _post(self, publication: Publication, heard: Heard) -> None:
        rule, limit = publication.rule, self._sender.packet_limit
        message = Outgoing(
            publication.topic,
            result_payload(heard),
            rule.qos,
            rule.retain,
            properties=_PROPERTIES,
            expires_s=self._clock.monotonic_s() + RESULT_AGE_S,
        )
        if message.packet_bytes > limit:
            self._counters.count("mqtt_results_too_large")
            advice = f"{message.packet_bytes} bytes, and the broker takes at most {limit} a message; name fewer outputs"
            self._warn_once(publication, "a result is too large for the broker", advice)
            return
        self._sender.post(message)
        self._counters.count("mqtt_results")

    def _warn_once(self, publication: Publication, what: str, reason: str) -> None:
        if (publication.topic, what) not in self._said:
            self._said.add((publication.topic, what))
            log.warning(
                what, extra={"model": publication.rule.model, "topic": publication.topic, "reason": reason}
            )  # fmt: skip

    # ---- private ----------------------------------------------------------------------------------------------------

    def _outputs_of(self, publication: Publication) -> str:
        live = [servable for servable in self._servables.live() if servable.model == publication.rule.model]
        known = ", ".join(sorted({spec.name for servable in live for spec in servable.spec.outputs})) or "none now"
        wanted = ", ".join(publication.rule.outputs)
        return f"wanted {wanted}; the model has {known}, of which a client may have asked for some only"

    def _source(self, publication: Publication) -> FolderSource:
        def answered(plan: RequestPlan, outputs: list[Array], file: str) -> None:
            publication.offer(plan, (outputs,), self._utc_s(), file)

        return FolderSource(
            publication.rule,
            DropFolder(Path(publication.rule.folder or "")),
            servables=self._servables,
            infer=self._infer,
            clock=self._clock,
            counters=self._counters,
            answered=answered,
            wake=self._wake.set,
            is_wanted=lambda: self._sender.is_online,
        )


class ResultTap:
    """Hears one model's answers for its rules (frontend's Tap)."""

    def __init__(
        self, publications: Sequence[Publication], utc_s: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self._publications = publications
        self._utc_s = utc_s
        self._wake = wake

    def answered(self, plan: RequestPlan, answers: Sequence[Outputs]) -> None:
        """See Tap."""
        utc_s = self._utc_s()
        for publication in self._publications:
            if publication.offer(plan, answers, utc_s):
                self._wake()


def result_payload(heard: Heard) -> bytes:
    """What is published of an answer: its JSON form with `time` (UTC, ISO 8601), and `file` where it is of one."""
    servable = heard.plan.servable
    more = {"time": datetime.fromtimestamp(heard.utc_s, timezone.utc).isoformat(timespec="milliseconds")}
    if heard.file is not None:
        more["file"] = heard.file.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return pack_json_answer(None, servable.model, servable.number, heard.tensors(), more=more)


def _topic(rule: PublishRule, topics: DeviceTopics) -> str:
    return topics.result(rule.model) if rule.topic is None else check_result_topic("publish.topic", rule.topic, topics)


def _check_folders(rules: Sequence[PublishRule]) -> None:
    folders = [Path(rule.folder) for rule in rules if rule.folder is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(
                f"publish.folder: two rules name {str(folder)!r}; each file is run once, so give each its own"
            )
        if not folder.is_dir():
            log.warning(
                "there is no such folder (yet); files are taken once it is there", extra={"folder": str(folder)}
            )
