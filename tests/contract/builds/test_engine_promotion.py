"""While an engine is built another backend serves; when it is there it takes over, and nobody who asks notices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends import registry
from edge_runtime.builds.build_store import BuildNews, BuildStore
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import EdgeRuntimeError, NotBuiltYet, NotReady
from edge_runtime.hosts import instance as host_instance
from tests.contract.models.release_kits import WORKERS, Hammer, answer_of, put_adder, release, runtime, states
from tests.contract.running_daemon import put_model
from tests.contract.updates import updated_device
from tests.fakes.slow_compiler import SlowCompiler
from tests.models import onnx_models

PROFILE = "nvidia-dgpu"
"""TensorRT first, then what serves meanwhile."""

ONLY = 'backend = "tensorrt"\n'


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    made = SlowCompiler()
    monkeypatch.setattr(registry, "backend", made.in_place_of)
    monkeypatch.setattr(registry, "installed", made.in_place_of_installed)
    monkeypatch.setattr(host_instance, "HostedBackend", made.in_place_of_hosts)
    return made


def artifact(tmp_path: Path, version: int = 1) -> str:
    return str(tmp_path / "models" / "m" / str(version) / "model.onnx")


def settle(rt: Runtime) -> None:
    """Wait until the loader has done what it was told before: steps are done in order."""
    with pytest.raises(EdgeRuntimeError):
        rt.unload("no-such-model")


def entry(rt: Runtime, version: int = 1) -> dict[str, object]:
    return next(each for each in rt.models() if each["version"] == version)


def finish(rt: Runtime, compiler: SlowCompiler, path: str) -> None:
    compiler.built.add(path)
    rt.core.builds.builder.news.put(BuildNews(path, "", has_ended=True, backend="tensorrt"))
    settle(rt)


def test_the_next_backend_serves_and_the_reason_says_how_far_the_engine_is(tmp_path, compiler):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert answer_of(rt) == (1, 1)
        assert "tensorrt: its engine is being built (0%)" in entry(rt)["reason"]
        rt.core.builds.builder.news.put(
            BuildNews(
                artifact(tmp_path),
                "its engine is being built (42%, timing tactics)",
                has_ended=False,
                backend="tensorrt",
            )
        )
        settle(rt)
        assert entry(rt)["reason"] == "tensorrt: its engine is being built (42%, timing tactics)"
        assert (entry(rt)["state"], entry(rt)["backend"]) == ("ready", "onnxruntime")


@pytest.mark.parametrize("toml", ["", WORKERS], ids=["inline", "workers"])
def test_the_engine_takes_over_and_no_request_is_lost(tmp_path, compiler, toml):
    put_adder(tmp_path / "models", 1, toml=toml)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        hammer = Hammer()
        with hammer.asking(lambda: answer_of(rt)):
            finish(rt, compiler, artifact(tmp_path))
        assert hammer.errors == []
        assert hammer.answers
        assert (entry(rt)["backend"], entry(rt)["device"]) == ("tensorrt", "GPU:0")
        assert entry(rt)["reason"] == ""
        assert answer_of(rt) == (1, 1)


def test_a_failed_build_is_reported_and_what_serves_goes_on(tmp_path, compiler):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        rt.core.builds.builder.news.put(
            BuildNews(artifact(tmp_path), "TensorRT cannot build it: no kernel", has_ended=True, backend="tensorrt")
        )
        settle(rt)
        assert entry(rt)["reason"] == "tensorrt: TensorRT cannot build it: no kernel"
        assert (entry(rt)["state"], answer_of(rt)) == ("ready", (1, 1))
        assert compiler.loads == 0


def test_an_engine_that_answers_otherwise_is_not_taken(tmp_path, compiler, monkeypatch):
    refused = []
    monkeypatch.setattr(BuildStore, "refuse", lambda _, *said: refused.append(said))
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        compiler.off = 5.0
        finish(rt, compiler, artifact(tmp_path))
        assert (entry(rt)["backend"], answer_of(rt)) == ("onnxruntime", (1, 1))
        assert "answers otherwise than what serves: output 'y' differs by" in entry(rt)["reason"]
    ((path, reason),) = refused
    assert path == artifact(tmp_path)
    assert "answers otherwise" in reason


def test_a_model_that_nothing_else_runs_is_building_and_says_so_at_once(tmp_path, compiler):
    put_adder(tmp_path / "models", 1, toml=ONLY)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert states(rt) == {1: "building"}
        with pytest.raises(NotReady, match=r"version 1 is not ready yet: tensorrt: its engine is being built \(0%\)"):
            answer_of(rt)
        finish(rt, compiler, artifact(tmp_path))
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 1))


def test_a_model_that_nothing_else_runs_has_failed_when_its_build_has(tmp_path, compiler):
    put_adder(tmp_path / "models", 1, toml=ONLY)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        compiler.failed[artifact(tmp_path)] = "no kernel"
        rt.core.builds.builder.news.put(BuildNews(artifact(tmp_path), "no kernel", has_ended=True, backend="tensorrt"))
        settle(rt)
        assert (states(rt), entry(rt)["reason"]) == ({1: "failed"}, "tensorrt: no kernel")


def test_an_older_version_serves_until_the_engine_of_the_new_one_is_there(tmp_path, compiler):
    put_adder(tmp_path / "models", 1, toml=ONLY)
    compiler.built.add(artifact(tmp_path))
    put_adder(tmp_path / "models", 2, version=2, toml=ONLY)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert (states(rt), answer_of(rt)) == ({1: "ready", 2: "building"}, (1, 1))
        finish(rt, compiler, artifact(tmp_path, 2))
        assert (states(rt)[2], answer_of(rt)) == ("ready", (2, 2))
        with pytest.raises(EdgeRuntimeError):
            answer_of(rt, version=1)


def test_of_many_older_versions_only_one_more_engine_is_built(tmp_path, compiler):
    for number in (1, 2, 3, 4):
        put_adder(tmp_path / "models", number, version=number, toml=ONLY)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert states(rt) == {3: "building", 4: "building"}


def test_the_old_engine_serves_until_that_of_changed_files_is_there(tmp_path, compiler):
    put_adder(tmp_path / "models", 1, toml=ONLY)
    compiler.built.add(artifact(tmp_path))
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        put_adder(tmp_path / "models", 5, toml=ONLY)
        compiler.built.clear()
        with pytest.raises(NotBuiltYet):
            rt.load("m")
        assert (states(rt), answer_of(rt)) == ({1: "ready"}, (1, 1))
        assert entry(rt)["reason"].startswith("a newer copy of its files waits: tensorrt: its engine is being built")
        finish(rt, compiler, artifact(tmp_path))
        assert (answer_of(rt), entry(rt)["reason"]) == ((1, 5), "")


def test_an_engine_waits_for_the_end_of_an_exchange(tmp_path, compiler):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        finish(rt, compiler, artifact(tmp_path))
        assert entry(rt)["backend"] == "onnxruntime"
        swap.roll_back()
        settle(rt)
        assert (entry(rt)["backend"], answer_of(rt)) == ("tensorrt", (1, 1))


def test_a_release_takes_its_engine_over_when_it_has_been_kept(tmp_path, compiler):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        swap = rt.core.loader.swap(release(tmp_path / "r1", 2, version=2))
        swap.switch()
        swap.commit()
        finish(rt, compiler, str(tmp_path / "r1" / "m" / "2" / "model.onnx"))
        assert (entry(rt, 2)["backend"], answer_of(rt)) == ("tensorrt", (2, 2))


def test_a_model_whose_axis_0_holds_no_rows_keeps_its_backend_until_its_length_is_said(tmp_path, compiler):
    put_model(tmp_path / "models", "m", onnx_models.running_sum)
    x = np.ones((100, 4), np.float32)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        finish(rt, compiler, artifact(tmp_path))
        assert entry(rt)["backend"] == "onnxruntime"
        assert "axis 0 of its inputs does not hold rows that can be run together" in entry(rt)["reason"]
        assert rt.infer("m", {"x": x})["y"][-1, 0] == 100
    (tmp_path / "models" / "m" / "model.toml").write_text('[options]\n"tensorrt.max_shapes" = "x:1000x4"\n')
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert entry(rt)["backend"] == "tensorrt"


@pytest.mark.parametrize("toml", ["", WORKERS], ids=["inline", "workers"])
def test_requests_of_more_rows_than_the_engine_takes_are_run_in_pieces(tmp_path, compiler, toml):
    put_adder(tmp_path / "models", 1, toml=toml)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        finish(rt, compiler, artifact(tmp_path))
        assert entry(rt)["backend"] == "tensorrt"
        for rows in (32, 33, 100):
            x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
            np.testing.assert_array_equal(rt.infer("m", {"x": x})["y"], x + 1)
        assert compiler.most_rows == 32


def test_a_version_that_was_unloaded_by_hand_is_not_brought_back(tmp_path, compiler):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        rt.unload("m")
        finish(rt, compiler, artifact(tmp_path))
        assert (states(rt), compiler.loads) == ({1: "unloaded"}, 0)


def test_options_of_one_backend_are_not_seen_by_the_others(tmp_path, compiler):
    put_adder(tmp_path / "models", 1, toml='[options]\n"tensorrt.tf32" = "1"\n')
    with runtime(tmp_path / "models", tmp_path, profile=PROFILE) as rt:
        assert (states(rt), entry(rt)["backend"]) == ({1: "ready"}, "onnxruntime")


def test_a_release_has_its_engine_before_it_is_tried_and_answers_with_it_at_once(tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(updated_device, "Config", partial(Config, profile=PROFILE))
    fleet = updated_device.Fleet(tmp_path)
    fleet.release(1)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
        (path,) = compiler.waits
        assert path.endswith("/model.onnx")
        (served,) = device.runtime.models()
        assert (served["backend"], served["reason"], device.adds()) == ("tensorrt", "", 1.0)
