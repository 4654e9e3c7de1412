"""Models of LiteRT through a daemon: each in its host, with what its integers stand for; hostile files harm nobody."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import EdgeRuntimeError
from tests.contract.running_daemon import RawClient, running_daemon
from tests.models import litert_models, onnx_models
from tests.models.onnx_models import mlp_weights

TENSORFLOW = Path(__file__).parents[2] / "models" / "tensorflow"


@contextmanager
def serving(tmp_path: Path, **settings: Any) -> Iterator[Runtime]:
    config = Config(watch=False, calibrate=False, state=str(tmp_path / "state"), **settings)
    with Runtime(tmp_path / "models", config=config) as runtime:
        yield runtime


@pytest.mark.smoke
def test_a_tflite_file_is_served_in_a_host_in_batches(tmp_path: Path) -> None:
    litert_models.mlp(tmp_path / "models" / "m" / "1")
    x = np.random.default_rng(0).normal(size=(7, 16)).astype(np.float32)
    first, second = mlp_weights()
    with serving(tmp_path) as runtime:
        (told,) = runtime.models()
        assert (told["state"], told["backend"], told["device"], told["precision"]) == ("ready", "litert", "CPU", "f32")
        assert told["host"]["pid"]
        for rows in (1, 7, 3):
            (y,) = runtime.infer("m", {"x": x[:rows]}).outputs.values()
            np.testing.assert_allclose(y, np.maximum(x[:rows] @ first, 0) @ second, rtol=1e-4, atol=1e-4)


def test_metadata_says_what_integers_stand_for(tmp_path: Path) -> None:
    litert_models.mlp_int8(tmp_path / "models" / "m" / "1")
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon:
        assert daemon
        with RawClient(f"ipc://{tmp_path}/run/infer.sock") as client:
            told = client.result("metadata", model="m")
    assert told["inputs"][0]["quantization"] == {"scale": pytest.approx(8 / 255), "zero_point": 0}
    assert told["outputs"][0]["quantization"] == {"scale": 1.0, "zero_point": 3}


def test_the_settings_of_a_model_choose_its_signature_and_never_a_library(tmp_path: Path) -> None:
    for name, options in (("good", 'signature = "times"'), ("bad", 'delegate = "/tmp/own.so"')):
        litert_models.two_signatures(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "model.toml").write_text(f"[options]\n{options}\n")
    with serving(tmp_path) as runtime:
        told = {each["name"]: each for each in runtime.models()}
        assert runtime.infer("good", {"x": np.ones((1, 2), np.float32)}).outputs["product"].tolist() == [[3.0, 3.0]]
        assert (told["bad"]["state"], "names a library, which is code" in told["bad"]["reason"]) == ("failed", True)


def test_litert_and_openvino_answer_alike_for_a_file_of_tensorflows_converter(tmp_path: Path) -> None:
    for name in ("litert", "openvino"):
        folder = tmp_path / "models" / name / "1"
        folder.mkdir(parents=True)
        shutil.copy(TENSORFLOW / "model.tflite", folder)
        (folder.parent / "model.toml").write_text(f'backend = "{name}"\n')
    with running_daemon(tmp_path / "models", tmp_path / "run"), RawClient(f"ipc://{tmp_path}/run/infer.sock") as client:
        told = [client.result("metadata", model=name) for name in ("litert", "openvino")]
    assert [each["platform"] for each in told] == ["litert", "openvino"]
    assert [(each["inputs"], each["outputs"]) for each in told[:1]] == [(told[1]["inputs"], told[1]["outputs"])]
    with serving(tmp_path) as runtime:
        (spec,) = told[0]["inputs"]
        x = np.random.default_rng(0).random((3, *spec["shape"][1:]), np.float32)
        ours, theirs = (
            next(iter(runtime.infer(name, {spec["name"]: x}).outputs.values())) for name in ("litert", "openvino")
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def damaged(content: bytes, generator: random.Random) -> bytes:
    """The file cut, or with some of its bytes changed; sizes, offsets and shapes more often than weights."""
    if generator.random() < 0.3:
        return content[: generator.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(generator.choice((1, 2, 8, 64))):
        place = generator.randrange(len(changed))
        value = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        changed[place : place + 4] = bytes([value]) * len(changed[place : place + 4])
    return bytes(changed)


def with_shape(folder: Path, shape: list[int]) -> bytes:
    """`added` for an input of a shape that no memory holds."""
    graph = litert_models.LiteRtGraph()
    x, y = graph.tensor("FP32", shape), graph.tensor("FP32", shape)
    graph.operator("ADD", [x, x], [y], graph.schema.AddOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y}).read_bytes()


def test_damaged_files_fail_with_a_reason_each_and_the_others_answer(tmp_path: Path) -> None:
    generator = random.Random(7)
    content = litert_models.mlp_int8(tmp_path / "file").read_bytes()
    files = [damaged(content, generator) for _ in range(40)]
    files += [with_shape(tmp_path / "file", shape) for shape in ([1 << 30, 1 << 30], [1, 1 << 30], [1, 46341, 46341])]
    onnx_models.added(tmp_path / "models" / "good" / "1", 2.0)
    for index, each in enumerate(files):
        folder = tmp_path / "models" / f"bad-{index}" / "1"
        folder.mkdir(parents=True)
        (folder / "model.tflite").write_bytes(each)
    x = {"x": np.zeros((1, 2), np.float32)}
    with serving(tmp_path, limits=LimitSettings(host_memory_bytes=256 << 20)) as runtime:
        states = {each["name"]: each for each in runtime.models()}
        failed = [each for each in states.values() if each["state"] == "failed"]
        assert all("model.tflite" in each["reason"] for each in failed)
        assert len(failed) >= 15
        for name, told in states.items():  # a changed weight is a model still
            if told["state"] == "ready" and name != "good":
                with contextlib.suppress(EdgeRuntimeError):
                    runtime.infer(name, {"x": np.zeros((1, 16), np.int8)})
        assert runtime.infer("good", x).outputs["y"].tolist() == [[2.0, 2.0]]
        assert runtime.models()[-1]["name"] == "good"
