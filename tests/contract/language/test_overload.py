"""More callers than a language model can serve: what it admits it answers in time, and what it refuses costs little."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edge_runtime.errors import EdgeRuntimeError, QueueFull
from tests.contract.language.served_words import SLOTS, Parts, Words, words_served

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

CALLERS = 64


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    with words_served(tmp_path_factory.mktemp("words")) as words:
        yield words


class Caller:
    """Asks until it has an answer, and comes again when a refusal says so. refusals: of them all."""

    def __init__(self, words: Words, at_end: threading.Semaphore) -> None:
        self._words = words
        self._at_end = at_end
        self.refusals: list[EdgeRuntimeError] = []
        self.replies: list[Parts] = []

    def ask(self) -> None:
        self.replies.append(self._words.ask(Parts(sender=self, on_end=self._ended), max_tokens=16))

    def _ended(self, reply: Parts) -> None:
        if reply.error is None:
            self._at_end.release()
            return
        self.refusals.append(reply.error)
        threading.Timer(max(reply.error.retry_after_ms, 1.0) / 1e3, self.ask).start()


def test_callers_that_come_again_when_told_are_all_answered_without_a_storm(words: Words) -> None:
    for reply in [words.ask(max_tokens=16) for _ in range(SLOTS)]:  # what answers are like
        reply.wait()
    answered = threading.Semaphore(0)
    callers = [Caller(words, answered) for _ in range(CALLERS)]

    for caller in callers:
        caller.ask()
    for _ in callers:
        assert answered.acquire(timeout=60.0)

    refusals = [error for caller in callers for error in caller.refusals]
    assert all(isinstance(error, QueueFull) for error in refusals)
    assert len(refusals) <= 4 * CALLERS
    assert all(reply.ends == 1 for caller in callers for reply in caller.replies)
    words.wait_until_idle()
