"""A release takes the place of what serves, and gives it back, and nobody who asks meanwhile notices."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref

import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings, ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import Draining, LoadFailed, ModelNotFound, NotReady
from tests.contract.models.release_kits import (
    INLINE,
    WORKERS,
    Hammer,
    X,
    answer_of,
    put_adder,
    release,
    release_of,
    runtime,
    states,
)
from tests.contract.running_daemon import put_model
from tests.models import onnx_models, python_models

MODES = pytest.mark.parametrize("toml", [INLINE, WORKERS], ids=["inline", "workers"])


@MODES
@pytest.mark.parametrize("version", [1, 3, 5], ids=["lower", "same", "higher"])
def test_a_release_answers_from_swap_on_and_stays_after_commit(tmp_path, toml, version):
    put_adder(tmp_path / "models", 1, version=3, toml=toml)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=version, toml=toml))
        assert answer_of(rt) == (3, 1)
        swap.switch()
        assert answer_of(rt) == (version, 2)
        assert swap.gap_s is None
        assert answer_of(rt, version=version) == (version, 2)
        swap.commit()
        assert answer_of(rt) == (version, 2)
        assert states(rt) == {version: "ready"}


@MODES
@pytest.mark.parametrize("version", [1, 3, 5], ids=["lower", "same", "higher"])
@pytest.mark.parametrize("is_swapped", [False, True], ids=["before", "after"])
def test_the_version_that_answered_before_answers_again_after_a_roll_back(tmp_path, toml, version, is_swapped):
    put_adder(tmp_path / "models", 1, version=3, toml=toml)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=version, toml=toml))
        if is_swapped:
            swap.switch()
            assert answer_of(rt) == (version, 2)
        swap.roll_back()
        assert answer_of(rt) == (3, 1)
        assert states(rt) == {3: "ready"}


@pytest.mark.smoke
def test_while_one_answers_the_other_stands_by(tmp_path):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        assert states(rt) == {1: "ready", 2: "standby"}
        swap.switch()
        assert states(rt) == {1: "standby", 2: "ready"}
        assert all(entry["memory_bytes"] for entry in rt.models())
        with pytest.raises(NotReady, match="version 1 is on standby"):
            answer_of(rt, version=1)


def test_a_release_of_a_model_that_nothing_served_answers_after_swap_and_goes_after_a_roll_back(tmp_path):
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 1))
        assert swap.current is None
        swap.switch()
        assert answer_of(rt) == (1, 1)
        swap.roll_back()
        with pytest.raises(ModelNotFound):
            answer_of(rt)


def test_all_versions_of_the_folder_come_back_after_a_roll_back_and_go_after_a_commit(tmp_path):
    put_adder(tmp_path / "models", 1, version=1, toml="[versions]\nall = true\n")
    put_adder(tmp_path / "models", 3, version=3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        swap.switch()
        swap.roll_back()
        assert (answer_of(rt), answer_of(rt, version=1)) == ((3, 3), (1, 1))
        rt.core.loader.swap(release(tmp_path / "r2", 2, version=2)).commit()
        assert states(rt) == {2: "ready"}


def test_a_release_that_does_not_load_changes_nothing(tmp_path):
    put_adder(tmp_path / "models", 1)
    broken = release(tmp_path / "r1", 2, version=2)
    (tmp_path / "r1" / "m" / "2" / "model.onnx").write_bytes(b"rubbish")
    with runtime(tmp_path / "models", tmp_path) as rt:
        with pytest.raises(LoadFailed):
            rt.core.loader.swap(broken)
        assert answer_of(rt) == (1, 1)
        assert states(rt) == {1: "ready"}
        rt.load("m")
        rt.core.loader.swap(release(tmp_path / "r2", 3, version=3)).commit()
        assert answer_of(rt) == (3, 3)


def test_an_exchange_that_is_over_says_so_and_there_is_one_at_a_time(tmp_path):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        for attempt in (
            lambda: rt.core.loader.swap(release(tmp_path / "r2", 3, version=3)),
            lambda: rt.load("m"),
            lambda: rt.unload("m"),
        ):
            with pytest.raises(LoadFailed, match="under way"):
                attempt()
        swap.commit()
        with pytest.raises(LoadFailed, match="over"):
            swap.roll_back()
        assert answer_of(rt) == (2, 2)


def test_a_daemon_that_stops_meanwhile_closes_both_and_notifies_the_updater(tmp_path):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        swap.switch()
    for attempt in (swap.commit, swap.roll_back, lambda: rt.core.loader.release_away("m")):
        with pytest.raises(Draining):
            attempt()
    assert (swap.candidate.is_open, swap.current.is_open) == (False, False)


# ---- releases and the models folder ---------------------------------------------------------------------------------


def test_the_folders_model_of_the_same_name_is_ignored_and_reported_once_and_comes_back(tmp_path, caplog):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        rt.core.loader.swap(release(tmp_path / "r1", 7, version=7)).commit()
        put_adder(tmp_path / "models", 9, version=9)
        put_adder(tmp_path / "models", 1, name="other")
        for _ in range(2):
            rt.load("other")
            rt.core.loader.rescan()
        rt.load("other")
        assert answer_of(rt) == (7, 7)
        assert caplog.text.count("ignored: release 7 of the update repository serves this name") == 1
        rt.core.loader.release_away("m")
        assert answer_of(rt) == (1, 1)
        rt.load("m")
        assert answer_of(rt) == (9, 9)


def test_releases_that_served_before_a_restart_serve_before_the_folder_is_looked_at(tmp_path):
    put_adder(tmp_path / "models", 1)
    config = Config(models=str(tmp_path / "models"), state=str(tmp_path / "state"), watch=False, calibrate=False)
    core = assemble_core(config)
    core.loader.serve_release(release(tmp_path / "r1", 2, version=2))
    core.start()
    core.loader.has_settled.wait()
    try:
        assert [(entry["version"], entry["state"]) for entry in core.table.listing()] == [(2, "ready")]
    finally:
        core.close(1.0)


def test_a_release_that_waits_for_its_first_request_loads_then_and_again_after_it_left_for_others(tmp_path):
    models = tmp_path / "models"
    wide = onnx_models.wide(tmp_path / "wide", size=2048)
    copy = lambda folder: shutil.copy(wide, folder)  # noqa: E731
    for name in "abcdef":
        put_model(models, name, copy, toml="on_demand = true\n")
    staged = release_of(tmp_path / "r1", copy, version=4, toml="on_demand = true\n")
    x = np.ones((1, 2048), np.float32)
    # Room for one, not for seven: each is seen to take one to three times its file, by what the process freed before.
    with runtime(models, tmp_path, limits=LimitSettings(memory_bytes=int(wide.stat().st_size * 5.5))) as rt:
        rt.core.loader.serve_release(staged)
        assert states(rt) == {4: "on_demand"}
        for name in "mabcdef":
            assert rt.infer(name, {"x": x}).model == name
        assert states(rt) == {4: "on_demand"}
        assert rt.infer("m", {"x": x}).model == "m"
        assert states(rt) == {4: "ready"}


def test_a_release_that_was_unloaded_by_hand_comes_back_by_hand_and_no_other_is_loaded(tmp_path):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        rt.core.loader.swap(release(tmp_path / "r1", 2, version=2)).commit()
        with pytest.raises(LoadFailed, match="edge-runtime update"):
            rt.load("m")
        rt.unload("m")
        with pytest.raises(NotReady, match="unloaded"):
            answer_of(rt)
        with pytest.raises(LoadFailed, match="edge-runtime update"):
            rt.load("m", 1)
        rt.load("m")
        assert answer_of(rt) == (2, 2)


# ---- memory for one only --------------------------------------------------------------------------------------------


def python_adder(folder, value, weights_bytes=0, preamble=""):
    """As `adder`, in a process of its own, whose memory can be told to a few percent; with a file of so many bytes."""
    body = f"{preamble}\ndef infer(inputs):\n    return {{'y': inputs['x'] + {value}}}\n"
    path = python_models.write(folder, [("x", "FP32", [-1, 2])], [("y", "FP32", [-1, 2])], body)
    with (folder / "weights.bin").open("wb") as weights:
        weights.truncate(weights_bytes)
    return path


@pytest.fixture
def narrow(tmp_path):
    """A runtime whose memory holds one model, but not two; it serves one that adds 1."""
    models = tmp_path / "models"
    put_model(models, "m", python_adder, value=1)
    with runtime(models, tmp_path, python_models=True) as rt:
        (entry,) = rt.models()
    limits = LimitSettings(memory_bytes=int(entry["memory_bytes"] * 1.5))
    with runtime(models, tmp_path, python_models=True, limits=limits) as rt:
        yield rt


@pytest.mark.parametrize("is_known", [True, False], ids=["by its files", "by its load"])
@pytest.mark.parametrize("ends_well", [True, False])
def test_where_memory_holds_only_one_the_old_one_leaves_first_and_who_asks_waits(tmp_path, narrow, ends_well, is_known):
    files_bytes = narrow.models()[0]["memory_bytes"] if is_known else 0
    staged = release_of(tmp_path / "r1", lambda folder: python_adder(folder, 2, files_bytes), version=2)
    with Hammer().asking(lambda: answer_of(narrow, timeout_ms=20_000)) as hammer:
        swap = narrow.core.loader.swap(staged)
        assert swap.gap_s > 0
        assert answer_of(narrow) == (2, 2)
        swap.switch()
        if ends_well:
            swap.commit()
        else:
            swap.roll_back()
        assert answer_of(narrow) == ((2, 2) if ends_well else (1, 1))
    assert hammer.errors == []
    assert states(narrow) == ({2: "ready"} if ends_well else {1: "ready"})
    assert narrow.core.metrics.snapshot()["models"]["m"]["answered"] == hammer.answers + 2


def test_where_memory_holds_only_one_and_the_new_one_fails_the_old_one_comes_back(tmp_path, narrow):
    files_bytes = narrow.models()[0]["memory_bytes"]
    staged = release_of(
        tmp_path / "r1", lambda folder: python_adder(folder, 2, files_bytes, "raise ValueError('no')"), version=2
    )
    with Hammer().asking(lambda: answer_of(narrow, timeout_ms=20_000)) as hammer:
        with pytest.raises(LoadFailed, match="no"):
            narrow.core.loader.swap(staged)
        assert answer_of(narrow) == (1, 1)
    assert hammer.errors == []
    assert states(narrow) == {1: "ready"}


def test_a_release_too_large_for_the_device_makes_nobody_leave(tmp_path, narrow):
    staged = release_of(tmp_path / "r1", lambda folder: python_adder(folder, 2, 1 << 40), version=2)
    before = narrow.core.table.live()
    with pytest.raises(LoadFailed, match="memory budget"):
        narrow.core.loader.swap(staged)
    assert narrow.core.table.live() == before
    assert answer_of(narrow) == (1, 1)


def test_a_model_that_finds_no_memory_during_an_update_comes_when_that_is_over(tmp_path):
    models = tmp_path / "models"
    put_model(models, "m", python_adder, value=1)
    put_model(models, "late", python_adder, value=5, toml="on_demand = true\n")
    with runtime(models, tmp_path, python_models=True) as rt:
        size = max(entry["memory_bytes"] for entry in rt.models())
    with runtime(models, tmp_path, python_models=True, limits=LimitSettings(memory_bytes=int(size * 2.5))) as rt:
        staged = release_of(tmp_path / "r1", lambda folder: python_adder(folder, 2), version=2)
        swap = rt.core.loader.swap(staged)
        for _ in range(2):
            with pytest.raises(NotReady, match="memory budget"):
                rt.infer("late", {"x": X})
            assert rt.models()[0]["state"] == "on_demand"
        swap.roll_back()
        assert rt.infer("late", {"x": X})["y"][0, 0] == 5


# ---- numbers --------------------------------------------------------------------------------------------------------


@MODES
def test_both_count_apart_and_the_models_figures_are_their_sum(tmp_path, toml):
    put_adder(tmp_path / "models", 1, toml=toml)
    with runtime(tmp_path / "models", tmp_path) as rt:
        told = lambda: rt.core.metrics.snapshot()["models"]["m"]["answered"]  # noqa: E731
        ask = lambda count: [answer_of(rt) for _ in range(count)]  # noqa: E731
        ask(3)
        first = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2, toml=toml))
        first.switch()
        ask(5)
        assert (first.current.metrics.requests, first.candidate.metrics.requests) == (3, 5)
        assert told() == 8
        first.roll_back()
        ask(1)
        assert told() == 9
        for version in (2, 3):
            rt.core.loader.swap(release(tmp_path / f"c{version}", 2, version=version, toml=toml)).commit()
            ask(1)
        assert told() == 11
        assert rt.core.metrics.snapshot()["models"]["m"]["queue_rows"] == 0


def test_a_release_that_was_exchanged_is_let_go_of(tmp_path):
    put_adder(tmp_path / "models", 1)
    put_adder(tmp_path / "models", 1, name="other")
    with runtime(tmp_path / "models", tmp_path) as rt:
        gone = []
        for version in range(2, 8):
            swap = rt.core.loader.swap(release(tmp_path / f"r{version}", version, version=version))
            swap.switch()
            answer_of(rt)
            gone.append(weakref.ref(swap.current if version % 2 else swap.candidate))
            swap.commit() if version % 2 else swap.roll_back()
            del swap
        answer_of(rt)
        rt.load("other")  # what the loader's thread had in hand before is put away
        rt.core.metrics.snapshot()
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)


# ---- under load -----------------------------------------------------------------------------------------------------

ROUNDS = 50


@MODES
def test_nobody_in_process_loses_a_request_over_many_swaps_and_roll_backs(tmp_path, toml):
    put_adder(tmp_path / "models", 1, toml=toml)
    with runtime(tmp_path / "models", tmp_path) as rt, Hammer().asking(lambda: answer_of(rt)) as hammer:
        exchange_many(rt.core.loader, tmp_path, toml)
        assert answer_of(rt) == (1, ROUNDS - 1)
    assert hammer.errors == []
    assert rt.core.metrics.snapshot()["models"]["m"]["answered"] == hammer.answers + 1


@MODES
def test_nobody_over_zeromq_loses_a_request_over_many_swaps_and_roll_backs(tmp_path, toml):
    put_adder(tmp_path / "models", 1, toml=toml)
    endpoint = f"ipc://{tmp_path}/infer.sock"
    config = Config(
        models=str(tmp_path / "models"), state=str(tmp_path / "state"), watch=False, calibrate=False,
        zmq=ZmqSettings(endpoints=(endpoint,)),
    )  # fmt: skip
    core = assemble_core(config)
    daemon = assemble_daemon(config, core)
    daemon.start()
    own = threading.local()
    clients = []

    def ask():
        if not hasattr(own, "client"):
            own.client = Client(endpoint)
            clients.append(own.client)
        futures = [own.client.submit("m", {"x": X}) for _ in range(8)]
        for future in futures:
            assert 0 <= future.result()["y"][0, 0] < ROUNDS

    try:
        with Hammer().asking(ask) as hammer:
            exchange_many(core.loader, tmp_path, toml)
        for client in clients:
            client.close()
    finally:
        daemon.stop()
    assert hammer.errors == []
    assert hammer.answers > ROUNDS


def exchange_many(loader, tmp_path, toml):
    """Each second one is committed, each other one rolled back, all of the same version number."""
    for index in range(ROUNDS):
        swap = loader.swap(release(tmp_path / f"r{index}", index, toml=toml))
        swap.switch()
        if index % 2:
            swap.commit()
        else:
            swap.roll_back()
