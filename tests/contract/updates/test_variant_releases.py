"""Kinds and variants of a model in signed releases: published, fetched where wanted, served as what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.config.settings import BackendSettings, Config
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.errors import ConfigError, PublishError
from edge_runtime.updates.staging import choose_artifacts
from tests.contract.updates.published_models import device, founded, publish
from tests.fakes.publishing import Publisher
from tests.models import litert_models
from tests.models.ir_models import from_onnx
from tests.models.onnx_models import mlp, mlp_int8, scaled

INT8_FIRST = (BackendSettings(name="openvino", precision="int8"), BackendSettings(name="onnxruntime"))
"""What a device's `config.toml` says with `[[backends]]`."""


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return founded(tmp_path)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A model whose version 1 holds ONNX in f32, and int8 as ONNX and IR."""
    mlp(tmp_path / "net" / "1")
    from_onnx(mlp_int8(tmp_path / "net" / "1"), tmp_path / "net" / "1", "model.int8.xml")
    return tmp_path / "net"


def installed(publisher: Publisher, home: Path, backends: tuple[BackendSettings, ...]) -> tuple[str, str, set[str]]:
    """A device with these backends takes the release: the backend and precision that serve, and its files' names."""
    with device(publisher, home, backends=backends) as fresh:
        assert fresh.outcome("net")[0] == "installed"
        (status,) = fresh.runtime.models()
        fresh.runtime.infer("net", {"x": np.zeros((1, 16), np.float32)})
        files = {path.name for path in (home / "state").rglob("model.*")}
        return status["backend"], status["precision"], files


def test_a_device_that_asks_for_int8_fetches_and_serves_it(publisher: Publisher, net: Path, tmp_path: Path) -> None:
    prepared = publish(publisher, net)
    assert {each.precision for each in prepared.manifest.artifacts} == {"", "int8"}
    assert installed(publisher, tmp_path / "device", INT8_FIRST) == (
        "openvino",
        "int8",
        {"model.onnx", "model.int8.onnx", "model.int8.xml", "model.int8.bin"},
    )


def test_a_device_that_does_not_ask_fetches_the_model_alone(publisher: Publisher, net: Path, tmp_path: Path) -> None:
    publish(publisher, net)
    assert installed(publisher, tmp_path / "device", ()) == ("onnxruntime", "f32", {"model.onnx"})


def test_settings_of_the_release_may_ask_for_the_variant(publisher: Publisher, net: Path, tmp_path: Path) -> None:
    (net / "model.toml").write_text("precision = 'int8'\nbackend = 'onnxruntime'\n")
    publish(publisher, net)
    backend, precision, _ = installed(publisher, tmp_path / "device", ())
    assert (backend, precision) == ("onnxruntime", "int8")


def test_a_variant_that_answers_otherwise_is_not_published(publisher: Publisher, tmp_path: Path) -> None:
    folder = tmp_path / "net" / "1"
    mlp_int8(folder)
    scaled(folder, 2.0, size=16)
    with pytest.raises(PublishError, match=r"model\.onnx \(f32\) and model\.int8\.onnx \(int8\): the artifacts"):
        publish(publisher, tmp_path / "net")


def test_of_a_releases_variants_only_those_asked_for_are_chosen(publisher: Publisher, net: Path) -> None:
    manifest = publish(publisher, net).manifest
    chosen = {
        precision: sorted(each.path.rpartition("/")[2] for each in choose_artifacts(manifest, (".onnx",), (precision,)))
        for precision in ("", "f16", "int8")
    }
    assert chosen == {"": ["model.onnx"], "f16": ["model.onnx"], "int8": ["model.int8.onnx", "model.onnx"]}


def test_a_backend_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    config = Config(models=str(tmp_path), state=str(tmp_path), backends=(BackendSettings(name="tensorflow"),))
    with pytest.raises(ConfigError, match=r"backends\.name: got 'tensorflow', wanted one of onnxruntime, openvino"):
        assemble_core(config)


@pytest.mark.parametrize("name", ["litert", "openvino"])
def test_a_tensorflow_lite_file_travels_in_a_release_to_whatever_reads_it(
    name: str, publisher: Publisher, tmp_path: Path
) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs LiteRT: edge-runtime[litert]")
    litert_models.mlp(tmp_path / "net" / "1")
    assert [each.backend for each in publish(publisher, tmp_path / "net").manifest.artifacts] == ["litert"]
    backends = (BackendSettings(name=name),)
    assert installed(publisher, tmp_path / "device", backends) == (name, "f32", {"model.tflite"})
