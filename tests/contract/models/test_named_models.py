"""`--model NAME=PATH`: a daemon that serves one folder or file as one model."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config, UpdateSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import ConfigError, ModelNotFound
from edge_runtime.typed_toml import build
from tests.contract.running_daemon import floats, put_model
from tests.models import onnx_models


@contextmanager
def serving(tmp_path: Path, model: dict[str, str], models: str | None = None, isolation: str = "never"):
    config = Config(
        models=models, model=model, state=str(tmp_path / "state"), watch=False, calibrate=False, isolation=isolation
    )
    with Runtime(core=assemble_core(config)) as runtime:
        yield runtime


def place_of(tmp_path: Path, kind: str) -> Path:
    """A place as KServe's storage initializer, or a person, may fill it."""
    place = tmp_path / "mnt" / "models"
    if kind == "versions":
        put_model(place.parent, "models", onnx_models.mlp, version=3)
        put_model(place.parent, "models", onnx_models.mlp, version=2)
        return place
    place.mkdir(parents=True)
    onnx_models.mlp(place)
    (artifact,) = place.iterdir()
    artifact.rename(place / "net.onnx")
    return place if kind == "folder" else place / "net.onnx"


@pytest.mark.parametrize(("kind", "version"), [("versions", 3), ("folder", 1), ("file", 1)])
def test_a_folder_of_versions_a_folder_and_a_file_are_one_model(tmp_path: Path, kind: str, version: int) -> None:
    with serving(tmp_path, {"di.gits": str(place_of(tmp_path, kind))}) as runtime:
        result = runtime.infer("di.gits", {"x": floats(2, 16)})

    assert (result.model, result.version) == ("di.gits", version)
    assert np.isfinite(result["y"]).all()


def test_a_place_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place_of(tmp_path, "folder"))
    with serving(tmp_path, {"digits": str(tmp_path / "link")}) as runtime:
        assert runtime.infer("digits", {"x": floats(1, 16)}).version == 1


def test_a_file_that_is_a_link_is_followed_wherever_it_leads(tmp_path: Path) -> None:
    place = place_of(tmp_path, "file")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "net.onnx").symlink_to(place)
    for isolation in ("always", "never"):
        with serving(tmp_path, {"digits": str(tmp_path / "links" / "net.onnx")}, isolation=isolation) as runtime:
            assert runtime.infer("digits", {"x": floats(1, 16)}).version == 1


def test_a_named_model_stands_before_the_folders_own(tmp_path: Path) -> None:
    models = tmp_path / "models"
    put_model(models, "digits", onnx_models.mlp, version=7)
    put_model(models, "other", onnx_models.mlp)
    place = place_of(tmp_path, "file")
    with serving(tmp_path, {"digits": str(place)}, str(models)) as runtime:
        assert runtime.infer("digits", {"x": floats(1, 16)}).version == 1
        assert runtime.infer("other", {"x": floats(1, 16)}).version == 1


def test_without_models_only_the_named_model_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_model(tmp_path / "models", "other", onnx_models.mlp)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, {"digits": str(place_of(tmp_path, "versions"))}) as runtime, pytest.raises(ModelNotFound):
        runtime.infer("other", {"x": floats(1, 16)})


@pytest.mark.parametrize("named", [{"a b": "."}, {"digits": "/nowhere/models"}, {"digits": "nowhere"}])
def test_a_wrong_name_or_place_is_reported(tmp_path: Path, named: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"not a model name|there is no file or folder '/"):
        assemble_core(Config(model=named, state=str(tmp_path)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "digits"], "wanted NAME=PATH"),
        (["--model", "=x"], "wanted NAME=PATH"),
        (["--model", "digits="], "wanted NAME=PATH"),
        (["--model", "a=/x", "--model", "a=/y"], "got 'a' twice"),
    ],
)
def test_a_wrong_flag_is_a_wrong_command_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", os.devnull, *words]) == 2
    assert told in capsys.readouterr().err


def test_while_only_signed_releases_are_served_the_flag_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[update]\nroot_file = "{tmp_path}/root.json"\n')
    assert main(["serve", "--config", str(config), "--model", f"digits={tmp_path}"]) == 2
    assert "update.require_signed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"update\.require_signed"):
        build(Config, {"model": {"a": "/x"}, "update": {"root_file": "/r"}}, "config.toml")
    assert Config(model={"a": "/x"}, update=UpdateSettings(root_file="/r", require_signed=False)).model == {"a": "/x"}
