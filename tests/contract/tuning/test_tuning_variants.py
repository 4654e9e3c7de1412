"""int8 models that a tune makes: by the real converters, kept, put beside the model, and served as what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.digits import load_held_out
from edge_runtime import Runtime
from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import effective_profile
from edge_runtime.errors import ConfigError, ConversionFailed, StorageFailed
from edge_runtime.extras import install_advice
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.walk import scan
from edge_runtime.profiles.detect import detect
from edge_runtime.tuning.applying import check_can_apply, place
from edge_runtime.tuning.artifacts import make_int8, offers_of, recipe_for
from edge_runtime.tuning.candidates import Candidate, ThreadLayout, Way, ways
from edge_runtime.tuning.options import Objective, TunedDevice, TuneOptions
from edge_runtime.tuning.results import FullMeasurement
from edge_runtime.tuning.trial import write_arrays
from edge_runtime.tuning.tune import open_tune
from tests.fakes.odd_converter_child import write_source
from tests.models import litert_models
from tests.models.ir_models import from_onnx
from tests.models.onnx_models import mlp, mlp_int8

DIGITS = Path(__file__).parents[3] / "demo" / "models" / "digits"
INT8 = Candidate(Way("onnxruntime", "CPU", "int8"), ThreadLayout(1, 1, 4))


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    images = load_held_out().images[:32].astype("float32")
    write_arrays(tmp_path / "calibration.npz", ({"image": image[None]} for image in images))
    return tmp_path / "calibration.npz"


def recipe(name: str = "onnxruntime"):
    found = recipe_for(name)
    if found is None:
        pytest.skip(f"no converter for {name} is installed; {install_advice('convert')}")
    return found


@pytest.mark.smoke
def test_an_int8_model_is_made_once(tmp_path: Path, calibration: Path) -> None:
    source = DIGITS / "1" / "model.onnx"
    (made,) = make_int8(recipe(), source, calibration, tmp_path / "made")
    assert made.name == "model.int8.onnx"
    written = made.stat().st_mtime_ns
    assert make_int8(recipe(), source, calibration, tmp_path / "made") == (made,)
    assert made.stat().st_mtime_ns == written


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08\x3a\xff\xff\xff\xff\x0f"])
def test_a_broken_model_is_a_reason_and_leaves_nothing(tmp_path: Path, calibration: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ConversionFailed, match="no int8 model was made: "):
        make_int8(recipe(), tmp_path / "model.onnx", calibration, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.long
def test_the_chosen_variant_is_put_beside_the_model_and_served_as_int8(tmp_path: Path) -> None:
    recipe()
    shutil.copytree(DIGITS, tmp_path / "models" / "digits")
    model = scan(tmp_path / "models").models["digits"]
    device = _device(tmp_path)
    options = TuneOptions(Objective(0.99, 5.0), drop=1.0, time_s=0.1)
    with open_tune(model, model.versions[1], device, options) as tune:
        tune.run(lambda *_: None)
        written = tune.apply(FullMeasurement(INT8, "", 1.0), ["for the test"])
    assert [path.name for path in written] == ["model.int8.onnx", "model.toml"]
    with Runtime(tmp_path / "models") as runtime:
        (served,) = runtime.models()
        assert (served["state"], served["backend"], served["precision"]) == ("ready", "onnxruntime", "int8")


def test_the_files_of_a_version_tell_the_variants_that_can_be_tried(tmp_path: Path) -> None:
    mlp(tmp_path / "net" / "1")
    from_onnx(mlp_int8(tmp_path / "net" / "1"), tmp_path / "net" / "1", "model.int8.xml")
    (tmp_path / "net" / "1" / "model.int8.onnx").unlink()
    model = scan(tmp_path).models["net"]
    offers, _ = offers_of(model.versions[1], _device(tmp_path).profile.backends)
    assert offers["openvino"].has_plain
    assert "int8" in offers["openvino"].variants


def test_litert_and_openvino_are_tried_on_the_same_file(tmp_path: Path) -> None:
    litert_models.mlp(tmp_path / "net" / "1")
    shutil.copy(litert_models.mlp_int8(tmp_path / "quantised"), tmp_path / "net" / "1" / "model.int8.tflite")
    shutil.rmtree(tmp_path / "quantised")
    version, device = scan(tmp_path).models["net"].versions[1], _device(tmp_path)
    offers, _ = offers_of(version, device.profile.backends)
    tried = {(way.backend, way.precision) for way in ways(device.profile.backends, offers, device.facts)}
    assert tried >= {("litert", ""), ("litert", "int8"), ("openvino", "")}


def test_a_variant_is_whole_or_not_there(tmp_path: Path) -> None:
    source = mlp_int8(tmp_path / "made")
    with pytest.raises(StorageFailed):
        place([source], source / "1")  # below a file
    (tmp_path / "1").mkdir()
    (placed,) = place([source], tmp_path / "1")
    assert placed.read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["model.int8.onnx"]


def test_an_old_graph_is_never_there_with_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "1"
    folder.mkdir()

    def variant(content: str) -> list[Path]:
        made = tmp_path / content
        made.mkdir()
        files = [made / "model.int8.xml", made / "model.int8.bin"]
        for file in files:
            file.write_text(content)
        return files

    def seen() -> dict[str, str]:
        return {path.suffix: path.read_text() for path in folder.iterdir() if path.suffix != ".part"}

    place(variant("old"), folder)
    found: list[dict[str, str]] = []
    rename = Path.replace  # not os.replace, which Python 3.10's Path takes before any test can

    def watched(source: Path, target: Path) -> Path:
        placed = rename(source, target)
        found.append(seen())
        return placed

    monkeypatch.setattr(Path, "replace", watched)
    place(variant("new"), folder)
    assert found[-1] == {".xml": "new", ".bin": "new"}
    assert all(each.get(".xml") in (None, each[".bin"]) for each in found)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk wants root")
def test_a_full_disk_leaves_the_old_variant_and_no_half(tmp_path: Path) -> None:
    folder, source = tmp_path / "disk", tmp_path / "model.int8.onnx"
    folder.mkdir()
    source.write_bytes(bytes(1 << 20))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this place lets nobody mount")
    try:
        (folder / source.name).write_bytes(b"old")
        with pytest.raises(StorageFailed, match="No space left"):
            place([source], folder)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(source.name, b"old")]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_model_that_is_a_file_has_no_place_for_settings(tmp_path: Path) -> None:
    mlp(tmp_path / "made").rename(tmp_path / "net.onnx")
    with pytest.raises(ConfigError, match=r"move it to net/1/, or look only, with --dry-run"):
        check_can_apply(_model(tmp_path, "net"))


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A models folder with one model that this process cannot write: read-only to root too."""
    models = tmp_path / "models"
    mlp(models / "net" / "1")
    if os.geteuid() != 0:
        (models / "net").chmod(0o555)
        yield models
        return
    command = ["mount", "--bind", "--options", "ro", str(models), str(models)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False, timeout=60).returncode
    ):
        pytest.skip("root may not mount here, and whatever else is done it may write")
    try:
        yield models
    finally:
        subprocess.run(["umount", str(models)], check=True, timeout=60)


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--models", str(read_only), "--state", str(read_only.parent / "state")]
    assert main(["tune", "net", *places, "--slo", "p99=5s", "--time", "1s"]) == 1
    assert f"{read_only}/net: cannot be written, and model.toml belongs there" in capsys.readouterr().err
    assert not (read_only.parent / "state" / "tuning").exists()


def test_a_version_of_variants_alone_says_that_the_model_itself_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/nobody.sock")
    mlp_int8(tmp_path / "net" / "1")
    (tmp_path / "net" / "1" / "model.onnx").unlink(missing_ok=True)
    places = ["--models", str(tmp_path), "--state", str(tmp_path / "state")]
    assert main(["tune", "net", *places, "--slo", "p99=5s", "--time", "1s"]) == 1
    assert "holds model.int8.onnx; wanted the model itself" in capsys.readouterr().err


def test_a_file_that_is_served_converted_is_not_tuned_and_the_command_that_helps_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/nobody.sock")
    source = write_source(tmp_path / "models" / "churn" / "1" / "model.json")
    places = ["--models", str(tmp_path / "models"), "--state", str(tmp_path / "state")]
    assert main(["tune", "churn", *places, "--slo", "p99=5s", "--time", "1s"]) == 1
    assert f"edge-runtime convert {source} --to onnx" in capsys.readouterr().err


def _model(models: Path, name: str) -> ModelFolder:
    return scan(models).models[name]


def _device(folder: Path) -> TunedDevice:
    config, facts = Config(models=str(folder / "models"), profile="x86-generic"), detect()
    return TunedDevice(facts, effective_profile(config, facts), config, folder / "state")
