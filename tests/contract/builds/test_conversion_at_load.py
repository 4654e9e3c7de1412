"""A file that no backend reads is converted off every request's path, kept, and served; a fault fails one version."""

from __future__ import annotations

import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from edge_runtime.builds import conversions, promotions
from edge_runtime.builds.build_store import BuildStore
from edge_runtime.builds.conversions import plan_conversion
from edge_runtime.cli.main import main
from edge_runtime.daemon import assemble
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.doors.open_inference.operations import STATES
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, NotReady
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.walk import scan
from edge_runtime.profiles.detect import detect
from edge_runtime.sandbox.landlock import guard
from tests.contract.models.release_kits import Hammer, answer_of, put_adder, runtime, states
from tests.contract.running_daemon import running_daemon
from tests.fakes.odd_converter_child import convert_oddly, write_source

MADE = "is (waiting to be|being) converted"


@pytest.fixture(autouse=True)
def _odd_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What converts XGBoost's files is the fake, which needs no library."""
    monkeypatch.setattr(promotions, "BuildStore", partial(BuildStore, convert=convert_oddly))
    monkeypatch.setitem(conversions.LIBRARIES, "convert-xgboost", ())


def put_source(tmp_path: Path, *words: object, name: str = "m", version: int = 1, toml: str = "") -> Path:
    source = write_source(tmp_path / "models" / name / str(version) / "model.json", *words)
    if toml:
        (tmp_path / "models" / name / "model.toml").write_text(toml)
    return source


def settle(rt: Runtime) -> None:
    """Wait until the loader has done what it was told before: steps are done in order."""
    with pytest.raises(EdgeRuntimeError):
        rt.unload("no-such-model")


def settle_loads(rt: Runtime) -> None:
    """Wait until the loader has taken all loads, and what they waited for."""
    rt.core.loader.has_settled.wait()
    settle(rt)
    settle(rt)


def key_of(tmp_path: Path, name: str = "m", version: int = 1) -> str:
    folder = scan(tmp_path / "models").models[name]
    plan = plan_conversion(folder.settings, folder.versions[version], {"model.onnx"})
    assert plan is not None
    return plan.key()


def finish(rt: Runtime, tmp_path: Path, name: str = "m", version: int = 1) -> None:
    """Wait for the end of a conversion, and until the loader has acted on it."""
    assert rt.core.builds.wait(key_of(tmp_path, name, version), threading.Event())
    settle(rt)


def entry(rt: Runtime, version: int = 1, name: str = "m") -> dict[str, object]:
    return next(each for each in rt.models() if (each["name"], each["version"]) == (name, version))


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "state" / "conversions").iterdir())


@pytest.mark.smoke
def test_a_file_is_converted_and_served_and_a_restart_does_not_convert_it_again(tmp_path):
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "converting"}
        with pytest.raises(NotReady, match=f"version 1 is not ready yet: model.json {MADE}"):
            answer_of(rt)
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))
    assert kept(tmp_path) == [".converted"]
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))


def test_where_a_versions_first_file_fails_its_next_is_served_and_its_state_names_both(tmp_path):
    source = put_source(tmp_path, "adding", 3)
    (source.parent / "model.onnx").write_bytes(b"no model")
    (source.parent / "model.pkl").write_bytes(b"\x80\x04.")
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))
        reason = str(entry(rt)["reason"])
    assert "model.onnx failed, and model.json is served instead" in reason
    assert "onnxruntime: model.onnx is not a sound ONNX file" in reason
    assert "model.pkl is a pickle" in reason


def test_where_no_file_of_a_version_can_be_served_its_state_has_the_reason_of_each(tmp_path):
    source = put_source(tmp_path, "differing")
    (source.parent / "model.onnx").write_bytes(b"no model")
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert rt.core.builds.wait(key_of(tmp_path), threading.Event())
        settle(rt)
        assert states(rt) == {1: "failed"}
        reason = str(entry(rt)["reason"])
    assert "model.onnx is not a sound ONNX file" in reason
    assert "model.json, which is tried next: " in reason
    assert "answers otherwise than its source" in reason


def test_files_that_cannot_be_served_are_all_named_with_their_reasons(tmp_path):
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "iris.pkl").write_bytes(b"\x80\x04.")
    (folder / "iris.ckpt").write_bytes(b"\x80\x04.")
    with runtime(tmp_path / "models", tmp_path) as rt:
        reason = str(entry(rt)["reason"])
    assert "iris.pkl is a pickle" in reason
    assert "iris.ckpt " in reason


def test_the_state_folder_may_be_named_from_where_the_daemon_was_started(tmp_path, monkeypatch):
    put_source(tmp_path, "adding", 3)
    monkeypatch.chdir(tmp_path)
    with runtime(Path("models"), Path()) as rt:
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))


def test_models_show_and_metadata_have_the_converters_report(tmp_path, capsys):
    source = put_source(tmp_path, "adding")
    endpoint = f"ipc://{tmp_path}/infer.sock"
    with running_daemon(tmp_path / "models", tmp_path, calibrate=False) as daemon:
        assert daemon._core.builds.wait(key_of(tmp_path), threading.Event())
        with Client(endpoint) as client:
            while client.models()[0]["state"] == "converting":
                pass
            assert client.metadata("m")["conversion"]["compared_on"] == "64 made-up rows"
        assert main(["models", "show", "m", "--connect", endpoint]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"converted from {source}, an odd one compared with Odd 1.0, on 64 made-up rows" in shown
    assert "y 0.00025 1,200 1" in shown
    assert "z: cannot be judged" in shown


def test_a_file_that_changed_is_converted_again_while_the_old_one_answers(tmp_path):
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        hammer = Hammer()
        with hammer.asking(lambda: answer_of(rt)):
            put_source(tmp_path, "adding", 4)
            with pytest.raises(EdgeRuntimeError, match=MADE):
                rt.load("m")
            assert entry(rt)["reason"].startswith("a newer copy of its files waits: model.json is ")
            finish(rt, tmp_path)
        assert hammer.errors == []
        assert (answer_of(rt), entry(rt)["reason"]) == ((1, 4), "")


def test_a_changed_file_that_fails_leaves_the_old_one_answering(tmp_path):
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        put_source(tmp_path, "crashing")
        with pytest.raises(EdgeRuntimeError):
            rt.load("m")
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))
        assert "a newer copy of its files failed to load: model.json was not converted" in entry(rt)["reason"]


def test_an_older_version_answers_until_the_new_one_is_converted(tmp_path):
    put_adder(tmp_path / "models", 1)
    put_source(tmp_path, "adding", 2, version=2)
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert (states(rt), answer_of(rt)) == ({1: "ready", 2: "converting"}, (1, 1))
        finish(rt, tmp_path, version=2)
        assert (states(rt)[2], answer_of(rt)) == ("ready", (2, 2))


def test_a_model_on_demand_is_converted_when_it_is_asked_for(tmp_path):
    put_source(tmp_path, "adding", 3, toml="on_demand = true\n")
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "on_demand"}
        with pytest.raises(NotReady, match=MADE):
            answer_of(rt)
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("crashing", "model.json was not converted: its process was ended by SIGSEGV"),
        ("killed", r"model.json was not converted: its process was killed \(SIGKILL\)"),
        ("hanging", "model.json was not converted: it was not done within 2 s"),
        ("hungry", "model.json was not converted: it took more than the 314572800 bytes"),
        ("differing", "answers otherwise than its source: y: largest error 0.5"),
        ("linking", "the converter left 'model.onnx', which is not a plain file"),
    ],
)
def test_a_file_that_misbehaves_is_one_failed_version_until_it_changes(tmp_path, monkeypatch, word, reason):
    bounds = {"limit_s": 2.0} if word == "hanging" else {}
    monkeypatch.setattr(assemble, "detect", lambda: msgspec.structs.replace(detect(), memory_bytes=400 << 20))
    monkeypatch.setattr(promotions, "BuildStore", partial(BuildStore, convert=convert_oddly, **bounds))
    put_source(tmp_path, word)
    put_adder(tmp_path / "models", 5, name="other")
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        assert states(rt) == {1: "failed"}
        assert entry(rt, name="other")["state"] == "ready"
        with pytest.raises(EdgeRuntimeError, match=reason):
            answer_of(rt)
    assert kept(tmp_path) == [".failure"]
    monkeypatch.setattr(promotions, "BuildStore", partial(BuildStore, convert=convert_oddly))
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "failed"}
        put_source(tmp_path, "adding", 3)
        with pytest.raises(EdgeRuntimeError):
            rt.load("m")
        finish(rt, tmp_path)
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 3))


def test_conversions_wait_for_one_another(tmp_path):
    put_source(tmp_path, "rewriting", name="a")
    put_source(tmp_path, "adding", 3, toml="on_demand = true\n")
    with runtime(tmp_path / "models", tmp_path) as rt:
        begun(tmp_path)
        with pytest.raises(NotReady):
            answer_of(rt)
        settle(rt)
        assert entry(rt)["reason"] == "model.json is waiting to be converted"
        put_source(tmp_path, "adding", name="a")
        finish(rt, tmp_path)
        assert states(rt) == {1: "ready"}


def begun(tmp_path: Path) -> Path:
    """Wait until the child has begun; its work folder."""
    while True:
        for mark in (tmp_path / "state" / "conversions").glob("*.part/*"):
            if mark.name in ("begun", "hangs"):
                return mark.parent


def test_a_conversion_of_a_file_that_changed_meanwhile_is_not_kept(tmp_path):
    put_source(tmp_path, "rewriting", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        key = key_of(tmp_path)
        begun(tmp_path)
        put_source(tmp_path, "adding", 4)
        assert rt.core.builds.wait(key, threading.Event())
        assert kept(tmp_path) == []
        settle(rt)
        finish(rt, tmp_path)
        assert answer_of(rt) == (1, 4)


def test_the_end_of_the_daemon_ends_a_conversion_at_once_and_it_begins_anew(tmp_path):
    put_source(tmp_path, "hanging")
    with runtime(tmp_path / "models", tmp_path) as rt:
        begun(tmp_path)
    assert kept(tmp_path) == []
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "converting"}


def test_half_a_conversion_of_a_killed_daemon_is_removed_and_never_served(tmp_path):
    half = tmp_path / "state" / "conversions" / f"{'a' * 64}.0123.part"
    (half / "out").mkdir(parents=True)
    (half / "out" / "model.onnx").write_bytes(b"half")
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
    assert kept(tmp_path) == [".converted"]


@pytest.mark.parametrize("name", ["model.onnx", "conversion.json"])
def test_a_damaged_conversion_is_made_again(tmp_path, name):
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
    (found,) = (tmp_path / "state" / "conversions").glob(f"*/{name}")
    content = bytearray(found.read_bytes())
    content[-1] ^= 1
    found.write_bytes(content)
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "converting"}
        finish(rt, tmp_path)
        assert answer_of(rt) == (1, 3)


def test_a_conversion_of_another_file_in_its_place_is_not_served(tmp_path):
    put_source(tmp_path, "adding", 3)
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
    (found,) = (tmp_path / "state" / "conversions").iterdir()
    put_source(tmp_path, "adding", 4)
    found.rename(found.with_name(f"{key_of(tmp_path)}.converted"))
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        assert answer_of(rt) == (1, 4)


def test_the_least_recently_used_conversion_goes_and_never_one_that_is_served(tmp_path, monkeypatch):
    small = partial(BuildStore, convert=convert_oddly, limit_bytes=500)
    monkeypatch.setattr(promotions, "BuildStore", small)
    keys = {}
    with runtime(tmp_path / "models", tmp_path) as rt:
        for name in ("old", "served", "new"):
            put_source(tmp_path, "adding", len(keys), name=name)
            with pytest.raises(EdgeRuntimeError):
                rt.load(name)
            keys[name] = key_of(tmp_path, name)
            finish(rt, tmp_path, name)
            if name == "old":
                rt.unload("old")
    folder = tmp_path / "state" / "conversions"
    assert sorted(path.stem for path in folder.iterdir()) == sorted([keys["served"], keys["new"]])


@pytest.mark.skipif("other files" in guard().unguarded, reason="this kernel has no Landlock")
def test_the_child_reads_its_source_and_nothing_else_of_the_disk_and_writes_its_work_folder_alone(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    other = put_source(tmp_path, "adding", name="other")
    flat = write_source(tmp_path / "models" / "m" / "1" / "beside.txt", "beside")
    put_source(tmp_path, "looking", 0, str(secret), str(other), str(flat))
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        report = rt.core.table.resolve("m", None).about.conversion.report
        assert (report["seen"], report["written"]) == ([], [])


def test_convert_never_leaves_a_file_alone_and_says_the_ways(tmp_path):
    put_source(tmp_path, "adding", toml='convert = "never"\n')
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "failed"}
        assert "edge-runtime convert " in entry(rt)["reason"]
    assert not (tmp_path / "state" / "conversions").exists()


def test_a_file_whose_converter_is_not_installed_says_both_ways(tmp_path, monkeypatch):
    monkeypatch.setitem(conversions.LIBRARIES, "convert-xgboost", ("no_such_library",))
    put_source(tmp_path, "adding")
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert states(rt) == {1: "failed"}
        reason = str(entry(rt)["reason"])
    assert "model.json is an XGBoost model" in reason
    assert "edge-runtime[convert-xgboost]" in reason
    assert "edge-runtime convert " in reason
    assert "not installed: no_such_library" in reason


def test_of_several_files_that_could_be_meant_none_is_guessed(tmp_path):
    source = put_source(tmp_path, "adding")
    source.rename(source.with_name("a.json"))
    write_source(source.with_name("b.json"), "adding")
    with runtime(tmp_path / "models", tmp_path) as rt:
        assert entry(rt)["reason"].endswith("holds a.json and b.json; which one is the model? Name it model")
        write_source(source, "adding", 3)
        with pytest.raises(EdgeRuntimeError):
            rt.load("m")
        finish(rt, tmp_path)
        assert answer_of(rt) == (1, 3)


def test_a_disk_that_cannot_be_written_is_the_reason_and_leaves_nothing(tmp_path):
    put_source(tmp_path, "adding")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "conversions").write_bytes(b"a file")
    with runtime(tmp_path / "models", tmp_path) as rt:
        finish(rt, tmp_path)
        settle_loads(rt)
        assert states(rt) == {1: "failed"}
        assert "conversions" in entry(rt)["reason"]


def test_conversions_that_end_before_the_loads_that_wanted_them_are_failed_versions(tmp_path):
    names = [f"m{number}" for number in range(12)]
    for number, name in enumerate(names):
        put_source(tmp_path, "adding", number, name=name)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "conversions").write_bytes(b"a file")  # each ends at once
    with runtime(tmp_path / "models", tmp_path) as rt:
        for name in names:
            finish(rt, tmp_path, name)
        settle_loads(rt)
        assert {each["state"] for each in rt.models()} == {"failed"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk wants root")
def test_a_full_disk_is_the_reason_leaves_no_half_and_is_forgotten_by_a_restart(tmp_path):
    put_source(tmp_path, "filling")
    folder = tmp_path / "state" / "conversions"
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this place lets nobody mount")
    try:
        with runtime(tmp_path / "models", tmp_path) as rt:
            finish(rt, tmp_path)
            assert states(rt) == {1: "failed"}
            assert entry(rt)["reason"] == f"the disk of {folder} is full; free some space, and start the daemon again"
        assert kept(tmp_path) == []
        with runtime(tmp_path / "models", tmp_path) as rt:
            assert states(rt) == {1: "converting"}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_every_state_of_a_version_that_is_being_made_is_loading_to_triton():
    made = {state for state in VersionState if state.is_being_made}
    assert made == {VersionState.BUILDING, VersionState.CONVERTING}
    assert {STATES[state.value] for state in made} == {"LOADING"}
