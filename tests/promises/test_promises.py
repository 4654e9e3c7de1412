"""Holds what users rely on while the inside is made again: words, names, and the replies to recorded messages.

What differs from `frozen/` stands in `changes.toml` with its reason, line for line; anything else fails. To see all
differences at once: `python -m pytest tests/promises -q`.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fakes.broker import needs_mosquitto
from tests.promises import replay, texts
from tests.promises.record import DOORS, FROZEN, TEXTS, daemon_and_broker

INFLATED = "POST /v2/models/fp32/infer HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx"
NOT_HTTP = "a line that is no request\r\n\r\n"
CHANGES: list[dict[str, Any]] = msgspec.toml.decode((Path(__file__).parent / "changes.toml").read_bytes()).get(
    "change", []
)


def allowed_lines(name: str) -> Counter[str]:
    return Counter(line for change in CHANGES for line in change.get(name, []))


def allowed_replies(name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for change in CHANGES:
        counts.update(change.get(name, {}))
    return counts


def changed_lines(name: str, now: str) -> Counter[str]:
    frozen = (FROZEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(frozen, now.splitlines(), lineterm="", n=0)
    return Counter(f"{line[0]} {line[1:]}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, Any]]:
    with daemon_and_broker() as served:
        list(replay.ask_http(*served, [INFLATED]))  # starts the thread for bodies, which no test then seems to leave
        yield served


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FROZEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def kind_of(reply: Any) -> str:
    """A reply in a word: its error's code, its status, or what came."""
    text = json.dumps(reply, sort_keys=True)
    _, _, code = text.partition('"code": "')
    return code.partition('"')[0] if code else text[:60]


def comparable(reply: Any) -> Any:
    """The same, with the means of a photo's pixels rounded: their last bit is the processor's."""
    if not isinstance(reply, list) or '"photo"' not in json.dumps(reply):
        return reply
    return [[*map(rounded, each)] if isinstance(each, list) else each for each in reply]


def rounded(frame: Any) -> Any:
    """A frame of FP32, as numbers; anything else as it is."""
    if not isinstance(frame, str) or len(frame) != 24:
        return frame
    return np.frombuffer(frame.encode("latin-1"), "<f4").round(5).tolist()


def differences(rows: list[dict[str, Any]], replies: Iterator[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row, reply in zip(rows, replies, strict=True):
        if comparable(reply) != comparable(row["reply"]):
            found[f"{kind_of(row['reply'])} -> {kind_of(reply)}"] += 1
            print(json.dumps(row), "\nnow", json.dumps(reply))
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_words_and_names_are_as_recorded(name):
    assert changed_lines(name, TEXTS[name]()) == allowed_lines(name)


@needs_mosquitto
@pytest.mark.parametrize("name", DOORS)
def test_each_message_has_the_reply_that_was_recorded(served, name):
    rows = recorded(name)
    replies = DOORS[name][1](*served, [row["message"] for row in rows], [row["reply"] for row in rows])
    assert differences(rows, replies) == allowed_replies(name)


@needs_mosquitto
def test_messages_sent_together_have_the_replies_that_each_has_alone(served):
    rows = [row for row in recorded("zmq") if has_an_id_of_its_own(row)]
    replies = replay.ask_zmq_together(*served, [row["message"] for row in rows])
    assert differences(rows_without_ids(rows), replies) == Counter()


def has_an_id_of_its_own(row: dict[str, Any]) -> bool:
    """Whether another id may stand in its place: JSON has none, and a wrong one is what some messages are about."""
    return bool(row["reply"]) and row["reply"][0][0] != "" and row["reply"][0][1:2] == row["message"][1:2] != []


def rows_without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with one reply, whose id is the test's own."""
    return [{**row, "reply": [[head, *tensors] for head, _, *tensors in row["reply"]]} for row in rows]


@needs_mosquitto
def test_metrics_have_the_names_that_were_recorded(served):
    daemon, _ = served
    list(replay.ask_http(*served, [NOT_HTTP]))  # a counter is told from its first count on
    assert changed_lines("metrics", texts.metric_names(daemon.metrics_url)) == allowed_lines("metrics")
