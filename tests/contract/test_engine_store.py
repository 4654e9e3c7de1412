"""Engines are built once, in a process that may misbehave, and what came of it is known afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from edge_runtime.backends.tensorrt_order import EngineOrder
from edge_runtime.errors import LoadFailed, NotBuiltYet
from edge_runtime.serving.engine_store import EngineStore
from tests.fakes import odd_engine_child

KEY, OTHER = "a" * 64, "b" * 64


class Told:
    """What a store tells, in order."""

    def __init__(self) -> None:
        self.ends: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.words: list[str] = []

    def end(self) -> tuple[str, str]:
        return self.ends.get(timeout=60)


@contextmanager
def store(folder: Path | None, **settings: object) -> Iterator[tuple[EngineStore, Told]]:
    told = Told()
    made = EngineStore(folder, child=odd_engine_child.__name__, **settings)  # type: ignore[arg-type]
    made.tell(lambda *said: told.ends.put(said), lambda _, words: told.words.append(words))
    try:
        yield made, told
    finally:
        made.close()


def order(artifact: str) -> EngineOrder:
    return EngineOrder(artifact, "tensorrt", "10.3.0", "", {})


def test_an_engine_is_built_off_the_callers_thread_and_kept(tmp_path):
    with store(tmp_path / "engines") as (engines, told):
        with pytest.raises(NotBuiltYet, match="its engine is"):
            engines.engine(order("m"), KEY)
        assert told.end() == ("m", "")
        assert engines.engine(order("m"), KEY) == b"m"
        assert any("being built (" in words and "odd phase" in words for words in told.words)
    with store(tmp_path / "engines") as (engines, _):
        assert engines.engine(order("m"), KEY) == b"m"


def test_the_same_engine_for_two_models_is_built_once(tmp_path):
    with store(tmp_path) as (engines, told):
        for artifact in ("one", "two"):
            with pytest.raises(NotBuiltYet):
                engines.engine(order(artifact), KEY)
        ends = {told.end()[0]}
        # The first may be built before the second asks: then that one asks again, and it is there.
        if engines.wait(KEY, threading.Event()) and "two" not in ends:
            engines.engine(order("two"), KEY)
        assert (tmp_path / "built").read_text().splitlines() == [KEY]


def test_builds_wait_for_one_another(tmp_path):
    with store(tmp_path) as (engines, told):
        for artifact, key in (("one", KEY), ("two", OTHER)):
            with pytest.raises(NotBuiltYet):
                engines.engine(order(artifact), key)
        assert [told.end(), told.end()] == [("one", ""), ("two", "")]


@pytest.mark.parametrize(
    ("artifact", "fault"),
    [
        ("crashing", r"ended the process that did it \(SIGSEGV\)"),
        ("killed", "was killed; is the device out of memory"),
        ("silent", "ended without a word"),
        ("refused", "no kernel for it"),
    ],
)
def test_a_build_that_fails_is_told_and_not_tried_again(tmp_path, artifact, fault):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order(artifact), KEY)
        assert told.end()[0] == artifact
        for _ in range(2):
            with pytest.raises(LoadFailed, match=fault):
                engines.engine(order(artifact), KEY)
        assert not engines.wait(KEY, threading.Event()) or told.ends.empty()


@pytest.mark.parametrize(
    ("artifact", "is_final"), [("refused", True), ("crashing", True), ("killed", False), ("full", False)]
)
def test_what_would_fail_again_is_remembered_over_a_restart_and_what_may_not_is_tried_once_more(
    tmp_path, artifact, is_final
):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order(artifact), KEY)
        told.end()
    with store(tmp_path) as (engines, _), pytest.raises(LoadFailed) as raised:
        engines.engine(order(artifact), KEY)
    assert isinstance(raised.value, NotBuiltYet) is not is_final


def test_what_a_library_prints_is_no_answer(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("printing"), KEY)
        assert told.end() == ("printing", "")


def test_a_build_that_hangs_is_ended(tmp_path):
    with store(tmp_path, limit_s=1.0) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("hanging"), KEY)
        assert told.end() == ("hanging", "its engine was not built within 1 s")


def test_a_build_that_eats_memory_is_ended(tmp_path):
    with store(tmp_path, usable_bytes=400 << 20) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("hungry"), KEY)
        assert "took more than the 314572800 bytes of memory" in told.end()[1]


def test_closing_ends_the_build_under_way_and_it_begins_anew_at_the_next_start(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("hanging"), KEY)
        waiting = threading.Thread(target=engines.wait, args=(KEY, threading.Event()))
        waiting.start()
        engines.close()
        waiting.join()
        assert told.ends.empty()
    with store(tmp_path) as (engines, _), pytest.raises(NotBuiltYet):
        engines.engine(order("hanging"), KEY)


def test_a_damaged_engine_is_built_again(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("m"), KEY)
        told.end()
        kept = tmp_path / f"{KEY}.engine"
        content = bytearray(kept.read_bytes())
        content[-1] ^= 1
        kept.write_bytes(content)
        with pytest.raises(NotBuiltYet):
            engines.engine(order("m"), KEY)
        assert told.end() == ("m", "")
        assert engines.engine(order("m"), KEY) == b"m"


def test_a_refused_engine_is_not_built_again(tmp_path):
    with store(tmp_path) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("m"), KEY)
        told.end()
        engines.engine(order("m"), KEY)
        engines.refuse("m", "it answers otherwise")
    with store(tmp_path) as (engines, _), pytest.raises(LoadFailed, match="it answers otherwise") as raised:
        engines.engine(order("m"), KEY)
    assert not isinstance(raised.value, NotBuiltYet)


def test_without_a_folder_engines_last_as_long_as_the_process():
    with store(None) as (engines, told):
        with pytest.raises(NotBuiltYet):
            engines.engine(order("m"), KEY)
        told.end()
        assert engines.engine(order("m"), KEY) == b"m"
        folder = engines.folder
        assert folder.is_dir()
    assert not folder.exists()
