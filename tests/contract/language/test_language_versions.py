"""A language model that is unloaded, replaced, checked or tried: its answers under way have their ends first."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.errors import Cancelled, NotReady
from tests.contract.language.served_words import CACHE_MB, Parts, Words, words_served
from tests.contract.running_daemon import ANSWER_S

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    with words_served(tmp_path_factory.mktemp("words")) as words:
        yield words


def unload(words: Words) -> queue.Queue:
    """Unload the model; the queue gets how that ended."""
    ends: queue.Queue = queue.Queue()
    words.core.loader.unload("words", None, ends.put)
    return ends


def load(words: Words) -> None:
    ends: queue.Queue = queue.Queue()
    words.core.loader.load("words", None, ends.put)
    assert ends.get(timeout=ANSWER_S) is None


def at_part(number: int, act: object) -> Parts:
    return Parts(lambda reply: act() if len(reply.parts) == number else None)


def test_unload_lets_answers_under_way_end_and_refuses_new_ones(words: Words) -> None:
    ends: list[queue.Queue] = []

    reply = words.ask(at_part(3, lambda: ends.append(unload(words))), max_tokens=200).wait()

    assert reply.error is None
    assert len(reply.parts) >= 100
    assert ends[0].get(timeout=ANSWER_S) is None
    with pytest.raises(NotReady):
        words.servable  # noqa: B018
    load(words)
    assert words.ask(max_tokens=4).wait().error is None


def test_sender_that_goes_while_its_version_leaves_ends_its_answer(words: Words) -> None:
    ends: list[queue.Queue] = []
    reply = words.ask(at_part(3, lambda: ends.append(unload(words))), max_tokens=3900)
    while len(reply.parts) < 30:
        reply.wait_for_part()

    words.core.infer.drop(reply.sender)

    assert isinstance(reply.wait().error, Cancelled)
    assert ends[0].get(timeout=ANSWER_S) is None
    load(words)


def test_check_of_the_daemon_itself_writes_one_token_and_counts_for_no_client(words: Words) -> None:
    before = words.numbers["requests"]

    reply = words.check()

    assert reply.wait().error is None
    assert len(reply.parts) == 1
    assert words.numbers["requests"] == before


def test_version_that_is_replaced_ends_its_answers_and_the_next_takes_new_ones(words: Words, tmp_path: Path) -> None:
    version = words.folder / "models" / "words" / "1"
    shutil.copytree(version, tmp_path / "2")
    ends: queue.Queue = queue.Queue()

    def replace() -> None:
        (tmp_path / "2").rename(version.parent / "2")
        words.core.loader.load("words", None, ends.put)

    old = words.ask(at_part(3, replace), max_tokens=600)
    assert old.wait().error is None
    assert ends.get(timeout=ANSWER_S) is None

    assert words.servable.number == 2
    assert words.ask(max_tokens=4).wait().error is None
    assert old.ends == 1


def test_cache_of_prompts_and_answers_counts_in_the_memory_of_the_model(words: Words) -> None:
    assert words.servable.memory_bytes >= CACHE_MB << 20
    assert words.core.table.memory_bytes() >= CACHE_MB << 20
