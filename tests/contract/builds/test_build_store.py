"""Engines are built once, in a process that may misbehave, and what came of it is known afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_runtime.backends.base import BuildOrder
from edge_runtime.backends.tensorrt.plan import EnginePlan, order_of
from edge_runtime.builds.build_store import BuildStore
from edge_runtime.errors import LoadFailed, NotBuiltYet
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable
from tests.fakes.odd_engine_child import build_oddly

KEY, OTHER = "a" * 64, "b" * 64


class Told:
    """What a store tells, in order."""

    def __init__(self, engines: BuildStore) -> None:
        self._engines = engines
        self.words: list[str] = []

    def end(self) -> tuple[str, str]:
        while True:
            news = self._engines.news.get(timeout=60)
            if news.has_ended:
                return news.artifact, news.words
            self.words.append(news.words)

    def has_ended(self) -> bool:
        """Whether a build ended that nobody looked at."""
        while not self._engines.news.empty():
            if self._engines.news.get().has_ended:
                return True
        return False


@contextmanager
def store(folder: Path | None, **settings: object) -> Iterator[tuple[BuildStore, Told]]:
    made = BuildStore(folder, ModelTable(Executor()), build=build_oddly, **settings)  # type: ignore[arg-type]
    try:
        yield made, Told(made)
    finally:
        made.close()


def order(artifact: str, key: str = KEY) -> BuildOrder:
    return order_of(EnginePlan(artifact, "tensorrt", "10.3.0", "", {}), key)


@pytest.mark.smoke
def test_an_engine_is_built_off_the_callers_thread_and_kept(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet, match="its engine is"):
            engines.built(order("m"))
        assert told.end() == ("m", "")
        assert engines.built(order("m")) == b"m"
        assert any("being built (" in words and "odd phase" in words for words in told.words)
    with store(tmp_path) as (engines, _):
        assert engines.built(order("m")) == b"m"


def test_the_same_engine_for_two_models_is_built_once(tmp_path):
    with store(tmp_path) as (engines, told):
        for artifact in ("one", "two"):
            with pytest.raises(NotBuiltYet):
                engines.built(order(artifact))
        ends = {told.end()[0]}
        # The first may be built before the second asks: then that one asks again, and it is there.
        if engines.wait(KEY, threading.Event()) and "two" not in ends:
            engines.built(order("two"))
        assert (tmp_path / "engines" / "built").read_text().splitlines() == [KEY]


def test_builds_wait_for_one_another(tmp_path):
    with store(tmp_path) as (engines, told):
        for artifact, key in (("one", KEY), ("two", OTHER)):
            with pytest.raises(NotBuiltYet):
                engines.built(order(artifact, key))
        assert [told.end(), told.end()] == [("one", ""), ("two", "")]


@pytest.mark.parametrize(
    ("artifact", "fault"),
    [
        ("crashing", r"its process was ended by SIGSEGV.*; the file may be damaged, or cut short: copy it again$"),
        ("killed", r"was killed \(SIGKILL\); is the device out of memory"),
        ("silent", "ended with exit status 0 and no result"),
        ("refused", "no kernel for it"),
    ],
)
def test_a_build_that_fails_is_reported_and_not_tried_again(tmp_path, artifact, fault):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order(artifact))
        assert told.end()[0] == artifact
        for _ in range(2):
            with pytest.raises(LoadFailed, match=fault):
                engines.built(order(artifact))
        assert not engines.wait(KEY, threading.Event()) or not told.has_ended()


@pytest.mark.parametrize(
    ("artifact", "is_final"), [("refused", True), ("crashing", True), ("killed", False), ("full", False)]
)
def test_a_build_that_would_fail_again_is_remembered_over_a_restart_and_one_that_may_not_is_tried_once_more(
    tmp_path, artifact, is_final
):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order(artifact))
        told.end()
    with store(tmp_path) as (engines, _), pytest.raises(LoadFailed) as raised:
        engines.built(order(artifact))
    assert isinstance(raised.value, NotBuiltYet) is not is_final


def test_the_output_of_a_library_is_not_an_answer(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("printing"))
        assert told.end() == ("printing", "")


def test_a_build_that_hangs_is_ended(tmp_path):
    with store(tmp_path, limit_s=1.0) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("hanging"))
        assert told.end() == ("hanging", "its engine was not built: it was not done within 1 s")


def test_a_build_that_eats_memory_is_ended(tmp_path):
    with store(tmp_path, usable_bytes=400 << 20) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("hungry"))
        assert "took more than the 314572800 bytes of memory" in told.end()[1]


def test_closing_ends_the_build_under_way_and_it_begins_anew_at_the_next_start(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("hanging"))
        waiting = threading.Thread(target=engines.wait, args=(KEY, threading.Event()))
        waiting.start()
        engines.close()
        waiting.join()
        assert not told.has_ended()
    with store(tmp_path) as (engines, _), pytest.raises(NotBuiltYet):
        engines.built(order("hanging"))


def test_a_damaged_engine_is_built_again(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("m"))
        told.end()
        kept = tmp_path / "engines" / f"{KEY}.engine"
        content = bytearray(kept.read_bytes())
        content[-1] ^= 1
        kept.write_bytes(content)
        with pytest.raises(NotBuiltYet):
            engines.built(order("m"))
        assert told.end() == ("m", "")
        assert engines.built(order("m")) == b"m"


def test_a_refused_engine_is_not_built_again(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("m"))
        told.end()
        engines.built(order("m"))
        engines.refuse("m", "it answers otherwise")
    with store(tmp_path) as (engines, _), pytest.raises(LoadFailed, match="it answers otherwise") as raised:
        engines.built(order("m"))
    assert not isinstance(raised.value, NotBuiltYet)


def test_without_a_folder_engines_last_as_long_as_the_process():
    with store(None) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.built(order("m"))
        told.end()
        assert engines.built(order("m")) == b"m"
        folder = engines.built_folder
        assert folder.is_dir()
    assert not folder.exists()
