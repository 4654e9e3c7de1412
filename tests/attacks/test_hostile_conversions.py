"""Models whose conversion at load harms all it can: each is one failed version, its neighbours answer, nothing stays.

The converter's child is the fake, which does what a library would that a hostile source took over.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime.builds import conversions, promotions
from edge_runtime.builds.build_store import BuildStore
from edge_runtime.daemon import assemble
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.profiles.detect import detect
from tests.contract.builds.test_conversion_at_load import begun, entry, finish, kept, put_source
from tests.contract.models.release_kits import X, put_adder, runtime
from tests.fakes.odd_converter_child import convert_oddly

MEMORY_BYTES = 400 << 20
"""Of the device: a conversion may have three quarters of it."""

LIMIT_BYTES = 40 << 20
"""Of conversions on the disk."""

LIMIT_S = 3.0
"""Of a conversion that does not end by itself."""

FOREVER = ("stopping", "chattering")
"""What only the limit ends."""


@pytest.fixture(autouse=True)
def _odd_converter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    word = request.node.callspec.params.get("word") if hasattr(request.node, "callspec") else None
    bounds = {"limit_s": LIMIT_S} if word in FOREVER else {}
    store = partial(BuildStore, convert=convert_oddly, limit_bytes=LIMIT_BYTES, **bounds)
    monkeypatch.setattr(promotions, "BuildStore", store)
    monkeypatch.setattr(assemble, "detect", lambda: msgspec.structs.replace(detect(), memory_bytes=MEMORY_BYTES))
    monkeypatch.setitem(conversions.LIBRARIES, "convert-xgboost", ())


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of this one and no temporary file is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert list(temporary.iterdir()) == []


def neighbour(rt: Runtime) -> None:
    assert rt.infer("other", {"x": X})["y"][0, 0] == 5


CROWDED = r"model.json was not converted: it had more than 64 processes"
WRITTEN = r"model.json was not converted: it wrote more than the \d+ bytes"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("aborting", "model.json was not converted: its process was ended by SIGABRT"),
        ("silent", "model.json was not converted: its process ended with exit status 0 and no result"),
        ("stopping", "model.json was not converted: it was not done within 3 s"),
        ("chattering", "model.json was not converted: it was not done within 3 s"),
        ("crowding", CROWDED),
        ("spreading", "model.json was not converted: it took more than the 314572800 bytes"),
        ("nesting-result", "model.json was not converted: its process ended with exit status 0 and no result"),
        ("counting", "model.json was not converted: its process ended with exit status 0 and no result"),
        ("scattering", WRITTEN),
        ("littering", WRITTEN),
        ("digging", "model.json was not converted: its process ended with exit status 1 and no result"),
        ("describing", "the converter left 'conversion.json'"),
        ("many", "the converter left more than 4096 files"),
        ("empty", "the converter left no model.onnx"),
        ("piping", "the converter left 'model.onnx', which is not a plain file"),
        ("socket", "the converter left 'model.onnx', which is not a plain file"),
        ("folding", "the converter left 'model.onnx', which is not a plain file"),
        ("leading-out", "the converter left no folder of files"),
        ("weights-outside", "the model's data file '../../../secret' is refused"),
    ],
)
def test_a_conversion_that_harms_all_it_can_is_one_failed_version(tmp_path: Path, word: str, reason: str) -> None:
    put_source(tmp_path, word)
    put_adder(tmp_path / "models", 5, name="other")
    with runtime(tmp_path / "models", tmp_path) as rt:
        neighbour(rt)
        finish(rt, tmp_path)
        neighbour(rt)
        told = entry(rt)
        assert told["state"] == "failed"
        with pytest.raises(EdgeRuntimeError, match=reason):
            rt.infer("m", {"x": X})
        assert not any(path.suffix == ".part" for path in (tmp_path / "state" / "conversions").iterdir())


@pytest.mark.parametrize("word", ["leaving", "nesting"])
def test_the_traces_of_a_conversion_beside_its_work_change_nothing_and_stay_nowhere(tmp_path: Path, word: str) -> None:
    put_source(tmp_path, word)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        assert entry(rt)["state"] == "ready", entry(rt)
        assert rt.infer("m", {"x": X})["y"][0, 0] == 0
    assert kept(tmp_path) == [".converted"]


@pytest.mark.parametrize("word", ["stopping", "chattering", "crowding", "spreading", "scattering", "littering"])
def test_a_daemon_that_stops_takes_a_hostile_conversion_along_and_keeps_no_fault_of_it(
    tmp_path: Path, word: str
) -> None:
    put_source(tmp_path, word)
    with runtime(tmp_path / "models", tmp_path, drain_s=1.0):
        begun(tmp_path)
    assert kept(tmp_path) == []


def test_a_source_that_grows_without_end_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    source = put_source(tmp_path, "rewriting")
    put_adder(tmp_path / "models", 5, name="other")
    stop = threading.Event()

    def grow() -> None:
        with source.open("ab") as file:
            while not stop.is_set() and file.tell() < 1 << 30:
                file.write(b" " * (1 << 16))

    growing = threading.Thread(target=grow)
    try:
        with runtime(tmp_path / "models", tmp_path) as rt:
            begun(tmp_path)
            growing.start()
            for _ in range(3):
                with pytest.raises(EdgeRuntimeError):
                    rt.load("m")
                neighbour(rt)
    finally:
        stop.set()
        growing.join()
    assert kept(tmp_path) == []


def test_a_pipe_in_the_place_of_a_source_that_is_converted_is_waited_for_by_nobody(tmp_path: Path) -> None:
    source = put_source(tmp_path, "rewriting")
    put_adder(tmp_path / "models", 5, name="other")
    with runtime(tmp_path / "models", tmp_path) as rt:
        begun(tmp_path)
        pipe = source.with_name("pipe")
        os.mkfifo(pipe)
        held = source.read_text()
        pipe.rename(source)
        neighbour(rt)
        until_ended(tmp_path)
        with pytest.raises(EdgeRuntimeError, match="plain file"):
            rt.load("m")
        neighbour(rt)
        source.unlink()
        source.write_text(held.replace("rewriting", "adding"))
        with pytest.raises(EdgeRuntimeError):
            rt.load("m")
        finish(rt, tmp_path)
        assert entry(rt)["state"] == "ready"


def until_ended(tmp_path: Path) -> None:
    """Wait until no work folder is left."""
    while list((tmp_path / "state" / "conversions").glob("*.part")):
        pass
