"""A pipeline and the models of its steps are one release: published, tried, swapped, observed, rolled back as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.errors import LoadFailed, PublishError, TensorMismatch, UpdateError
from edge_runtime.pipelines.definition import read_pipeline
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.intake import take_in
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.roles import add_group, add_team
from edge_runtime.tensors import Array
from tests.contract.models.release_kits import Hammer, adder
from tests.contract.models.test_bad_releases import traffic
from tests.contract.running_daemon import put_model
from tests.contract.updates.updated_device import Fleet, UpdatedDevice, update_settings, updated_device
from tests.fakes.publishing import PASSPHRASE, Publisher
from tests.fakes.releases import make_release
from tests.fakes.update_site import CHAIN, chain
from tests.models import onnx_models

X = np.zeros((1, 2), np.float32)

SIZE = 3072
"""Of a square matrix: 36 MiB."""

ROW = np.ones((1, SIZE), np.float32)

PYTHON_STEP = """
[[step]]
name = "third"
python = "steps.py:join"
inputs = {y = "second.y"}
outputs = {y = {datatype = "FP32", shape = [-1, 2]}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def give(fleet: Fleet, number: int, **others: Any) -> None:
    """Publish a `chain`, and let the group run it."""
    fleet.site.release(chain(fleet.folder / "made" / f"chain {number}", number, **others))
    fleet.sync()


def there(device: UpdatedDevice) -> dict[str, str]:
    """State by model and version."""
    return {f"{each['name']}:{each['version']}": each["state"] for each in device.runtime.models()}


# ---- published ------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with the pipeline `reader` and its models `most` (two versions) and `rest`."""
    folder = tmp_path / "source"
    put_model(folder, "most", adder, version=1, value=7.0)
    put_model(folder, "most", adder, version=2, value=1.5)
    put_model(folder, "rest", adder, version=1, value=0.5, toml="max_batch_rows = 4\n")
    (folder / "reader").mkdir()
    (folder / "reader" / "pipeline.toml").write_text(CHAIN)
    return folder


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    publisher = Publisher(tmp_path_factory.mktemp("founded") / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    return publisher


@pytest.fixture
def taken_in(tmp_path: Path) -> RepositoryFolder:
    (tmp_path / "aside").mkdir()
    return RepositoryFolder(tmp_path / "aside")


def repo(capsys: pytest.CaptureFixture[str], publisher: Publisher, *words: str) -> dict[str, Any]:
    status = main(["repo", *words, "--repo", str(publisher.path), "--yes", "--json"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    result: dict[str, Any] = json.loads(shown.out)
    return result


def test_a_pipeline_is_published_with_its_models_by_one_command_and_served(
    founded: Publisher,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    np.savez(tmp_path / "golden.npz", x=np.ones((2, 2), np.float32))
    words = ("publish", str(models / "reader"), "--team", "vision", "--golden", str(tmp_path / "golden.npz"))
    manifest = repo(capsys, founded, *words)["manifest"]
    assert [each["path"].rpartition("/")[2] for each in manifest["artifacts"]] == [
        "most--model.onnx.step",
        "rest--model.onnx.step",
    ]
    assert manifest["models"] == [
        {"name": "most", "settings": {}},
        {"name": "rest", "settings": {"max_batch_rows": 4}},
    ]
    assert (manifest["pipeline"], manifest["golden"]["precision"]) == (CHAIN, "f32")
    assert [form["name"] for form in (*manifest["inputs"], *manifest["outputs"])] == ["x", "y"]
    repo(capsys, founded, "assign", "line", "reader=1")
    settings = update_settings(tmp_path / "home", founded.root_1, folder=str(founded.path))
    with updated_device(tmp_path / "home", settings) as device:
        assert device.outcome("reader")[0] == "installed"
        version, outputs = device.run("reader", x=X)
        assert (version, outputs["y"].tolist()) == (1, [[2.0, 2.0]])


def test_a_pipeline_without_a_golden_input_is_tried_on_made_up_ones(
    founded: Publisher, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    words = ("publish", str(models / "reader"), "--team", "vision", "--model", "other", "--models", str(models))
    done = repo(capsys, founded, *words)
    assert "the golden input is noise" in done["notes"][0]
    assert done["manifest"]["model"] == "other"


def test_a_model_is_taken_in_the_version_that_its_step_names_or_the_newest(
    taken_in: RepositoryFolder, models: Path
) -> None:
    newest = take_in(taken_in, models / "reader")
    assert [(part.model, part.version) for part in newest.parts] == [("most", 2), ("rest", 1)]
    (models / "reader" / "pipeline.toml").write_text(CHAIN.replace('model = "most"', 'model = "most"\nversion = 1'))
    assert [part.version for part in take_in(taken_in, models / "reader").parts] == [1, 1]


def test_a_pipelines_folder_may_have_versions(taken_in: RepositoryFolder, models: Path) -> None:
    for version in ("3", "4"):
        (models / "reader" / version).mkdir()
        (models / "reader" / version / "pipeline.toml").write_text(CHAIN)
    (models / "reader" / "model.toml").write_text("default_timeout_ms = 50.0\n")
    taken = take_in(taken_in, models / "reader")
    assert (taken.version, taken.settings, len(taken.parts)) == (4, {"default_timeout_ms": 50.0}, 2)
    assert take_in(taken_in, models / "reader" / "3").version == 3


@pytest.mark.long
def test_a_model_that_runs_in_a_host_is_tried_and_served_in_one(
    founded: Publisher,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    (models / "rest" / "model.toml").write_text('isolation = "always"\n')
    repo(capsys, founded, "publish", str(models / "reader"), "--team", "vision", "--model", "hosted")
    repo(capsys, founded, "assign", "line", "hosted=1")
    settings = update_settings(tmp_path / "home", founded.root_1, folder=str(founded.path))
    with updated_device(tmp_path / "home", settings) as device:
        assert device.outcome("hosted")[0] == "installed"
        hosted = {each["name"]: each["host"] is not None for each in device.runtime.models()}
        assert (hosted["hosted/most"], hosted["hosted/rest"]) == (False, True)
        assert device.run("hosted", x=X)[1]["y"].tolist() == [[2.0, 2.0]]


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [2] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [2] }]
ensemble_scheduling {
  step [
    { model_name: "rest" model_version: -1 input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } },
    { model_name: "most" model_version: 1 input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  ]
}
"""


def test_an_ensemble_of_tritons_is_published_as_the_pipeline_that_it_is(
    founded: Publisher,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    (models / "both" / "1").mkdir(parents=True)
    (models / "both" / "config.pbtxt").write_text(ENSEMBLE)
    (models / "most" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 4\n')
    (models / "rest" / "model.toml").unlink()
    (models / "rest" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n')
    manifest = repo(capsys, founded, "publish", str(models / "both"), "--team", "vision")["manifest"]
    assert read_pipeline(manifest["pipeline"], "").outputs == {"y": ("rest", "y")}
    assert {each["name"]: each["settings"]["max_batch_rows"] for each in manifest["models"]} == {"most": 4, "rest": 8}
    assert (manifest["settings"]["max_batch_rows"], manifest["inputs"][0]["shape"]) == (4, [-1, 2])
    repo(capsys, founded, "assign", "line", "both=1")
    settings = update_settings(tmp_path / "home", founded.root_1, folder=str(founded.path))
    with updated_device(tmp_path / "home", settings) as device:
        device.apply()
        assert device.run("both", x=X)[1]["y"].tolist() == [[7.5, 7.5]]
        with pytest.raises(TensorMismatch):
            device.run("both", x=np.zeros((5, 2), np.float32))


def test_a_changed_model_makes_another_version_of_the_pipeline(
    founded: Publisher, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    words = ("publish", str(models / "reader"), "--team", "vision", "--model", "third")
    repo(capsys, founded, *words)
    put_model(models, "rest", adder, version=1, value=0.75)
    assert main(["repo", *words, "--repo", str(founded.path), "--yes"]) == 1
    assert "was published with other bytes, as release 1; a version is never used again: publish with --version 2" in (
        capsys.readouterr().err
    )
    assert repo(capsys, founded, *words, "--version", "2")["manifest"]["release_counter"] == 2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("reader/steps.py", "", "steps.py: is code, and an update never carries code"),
        ("reader/pipeline.toml", CHAIN + PYTHON_STEP, "step third is Python, and an update never carries code"),
        ("rest/1/model.py", "", "model.py: is code"),
        ("reader/pipeline.toml", CHAIN.replace("rest", "other"), "asks other, and there is no folder"),
        ("rest/1/pipeline.toml", CHAIN, "asks rest, which is a pipeline itself"),
        ("reader/pipeline.toml", CHAIN.replace("first.y", "second.y"), "the steps form a circle"),
        ("reader/pipeline.toml", CHAIN.replace('"rest"', '"most"\nversion = 1'), "asks most in more than one version"),
        ("rest/model.toml", 'device = "CUDA"', "device is not published"),
        ("reader/model.toml", "max_batch_row = 8", "did you mean 'max_batch_rows'"),
    ],
)
def test_a_part_that_no_release_of_a_pipeline_may_have_is_refused_before_any_library_sees_it(
    taken_in: RepositoryFolder, models: Path, file: str, text: str, reason: str
) -> None:
    write(models / file, text)
    with pytest.raises(PublishError, match=reason):
        take_in(taken_in, models / "reader")


def test_a_pipeline_whose_models_do_not_fit_is_not_published(
    founded: Publisher, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    put_model(models, "rest", onnx_models.mlp, version=2)
    words = ("publish", str(models / "reader"), "--team", "vision", "--model", "odd", "--repo", str(founded.path))
    assert main(["repo", *words, "--yes"]) == 1
    said = capsys.readouterr().err
    assert "odd with most/model.onnx, rest/model.onnx: " in said
    assert "step 'second'" in said
    assert "nothing was published" in said


# ---- on the device --------------------------------------------------------------------------------------------------


def test_no_request_sees_models_of_two_releases_and_none_is_lost(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
        seen: set[float] = set()
        with Hammer().asking(lambda: seen.add(device.adds())) as hammer:
            for number in (2, 3):
                give(fleet, number)
                assert device.outcome()[0] == "installed"
            device.roll_back("adder")
        assert hammer.errors == []
        assert seen <= {1.0, 2.0, 3.0}
        assert device.adds() == 2.0
        assert there(device) == {"adder:2": "ready", "adder/most:2": "ready", "adder/rest:2": "ready"}


def test_a_release_goes_on_after_a_restart_and_is_taken_away_whole(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        device.outcome()
    with fleet.device() as device:
        assert device.adds() == 1.0
        fleet.take_away()
        device.apply()
        assert there(device) == {}


def test_a_model_follows_a_pipeline_and_a_pipeline_a_model(fleet: Fleet) -> None:
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
        give(fleet, 2)
        assert device.outcome()[0] == "installed"
        assert there(device) == {"adder:2": "ready", "adder/most:2": "ready", "adder/rest:2": "ready"}
        fleet.release(3)
        assert device.outcome()[0] == "installed"
        assert (device.adds(), there(device)) == (3.0, {"adder:3": "ready"})


def test_a_pipeline_that_answers_wrongly_is_refused_whole_before_it_is_loaded(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        device.outcome()
        give(fleet, 2, says=7.0)
        action, reason = device.outcome()
        assert action == "refused"
        assert reason.startswith("its golden output is wrong at precision f32")
        assert (device.adds(), there(device)["adder/most:1"], len(there(device))) == (1.0, "ready", 3)
        give(fleet, 3)
        assert device.outcome()[0] == "installed"


def test_a_pipeline_whose_models_do_not_fit_is_refused_with_the_step(fleet: Fleet) -> None:
    with fleet.device() as device:
        give(fleet, 1, pipeline=CHAIN.replace('x = "first.y"', 'other = "first.y"'))
        action, reason = device.outcome()
        assert (action, "step 'second'" in reason, there(device)) == ("refused", True, {})


def test_a_pipeline_that_brings_code_is_passed_over_although_its_team_signed_it(fleet: Fleet) -> None:
    with fleet.device() as device:
        give(fleet, 1, pipeline=CHAIN + PYTHON_STEP)
        action, reason = device.outcome()
        assert action == "passed over"
        assert reason.startswith("release 1 of adder carries the Python step third; an update never brings code")


def test_models_of_the_folder_with_the_same_names_stay_as_they_are(fleet: Fleet, tmp_path: Path) -> None:
    put_model(tmp_path / "models", "most", adder, value=100.0)
    give(fleet, 1)
    with fleet.device(require_signed=False) as device:
        device.outcome()
        assert device.adds() == 1.0
        assert device.run("most", x=X)[1]["y"].tolist() == [[100.0, 100.0]]
        device.runtime.unload("most")
        assert device.adds() == 1.0


def test_a_model_that_a_release_brought_is_unloaded_with_its_pipeline_only(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        device.outcome()
        with pytest.raises(LoadFailed, match="step of the pipeline 'adder'"):
            device.runtime.unload("adder/most")
        device.runtime.unload("adder")
        assert there(device) == {"adder:1": "unloaded"}
        device.runtime.load("adder")
        assert device.adds() == 1.0


def give_models(fleet: Fleet, number: int, models: dict[str, Path], x: Array, y: Array) -> None:
    """Publish the chain of these two models, whose answer to x is said to be y, and let the group run it."""
    files = {f"{name}/model.onnx": ("onnxruntime", path.read_bytes()) for name, path in models.items()}
    numbers: dict[str, Any] = {"version": number, "counter": number}
    fleet.site.release(make_release(files, ({"x": x}, {"y": y}), model="adder", pipeline=CHAIN, **numbers))
    fleet.sync()


def wide(fleet: Fleet, number: int, says: float | None = None) -> None:
    """Give two models of 36 MiB as a pipeline: x -> x * number."""
    factors = {"most": float(number), "rest": 1.0}
    models = {name: onnx_models.scaled(fleet.folder / f"{name}{number}", each, SIZE) for name, each in factors.items()}
    give_models(fleet, number, models, ROW, ROW * np.float32(number if says is None else says))


@pytest.mark.long
def test_where_memory_holds_one_release_only_the_other_is_unloaded_whole_and_comes_back(fleet: Fleet) -> None:
    wide(fleet, 1)
    with fleet.device(memory_bytes=120 << 20) as device:
        assert device.outcome()[0] == "installed"
        wide(fleet, 2)
        (offer,) = device.apply()["offers"]
        assert (offer["action"], offer["gap_s"] > 0) == ("installed", True)
        assert there(device) == {"adder:2": "ready", "adder/most:2": "ready", "adder/rest:2": "ready"}
        wide(fleet, 3, says=2.5)
        assert device.outcome()[0] == "refused"
        assert device.run("adder", x=ROW)[1]["y"][0, 0] == 2.0
        assert there(device) == {"adder:2": "ready", "adder/most:2": "ready", "adder/rest:2": "ready"}


def test_a_release_whose_model_fails_for_some_requests_is_rolled_back_whole(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        device.outcome()
    models = {
        "most": adder(fleet.folder / "most", 1.5),
        "rest": onnx_models.picky(fleet.folder / "rest", 0.5),
    }
    give_models(fleet, 2, models, X, X + np.float32(2.0))
    large = np.full((1, 2), 100.0, np.float32)
    with fleet.device(window_s=3600.0) as device:
        with traffic(device, lambda: device.run("adder", x=large)) as errors:
            action, reason = device.outcome()
        assert (action, "requests failed" in reason) == ("refused", True)
        assert {(error.code, error.message.partition(":")[0]) for error in errors} == {("run_failed", "step second")}
        assert device.adds() == 1.0
        assert there(device) == {"adder:1": "ready", "adder/most:1": "ready", "adder/rest:1": "ready"}


@pytest.mark.long
def test_a_copy_of_requests_is_run_of_models_only_and_a_pipeline_answers_at_once(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device(observe="shadow") as device:
        device.outcome()
        give(fleet, 2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


@pytest.mark.long
def test_some_requests_are_answered_by_the_new_release_first_with_its_own_models(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device(observe="canary", canary_percent=50.0, window_s=0.0) as device:
        device.outcome()
        give(fleet, 2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


def test_a_pipeline_without_a_release_before_it_cannot_go_back(fleet: Fleet) -> None:
    give(fleet, 1)
    with fleet.device() as device:
        device.outcome()
        with pytest.raises(UpdateError, match="is the first one here"):
            device.roll_back("adder")
