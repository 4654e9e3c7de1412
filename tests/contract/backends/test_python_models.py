"""Models in Python as their owner meets them: samples to warm up on, no warm-up at all, and a net beside model.py."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import NotReady
from edge_runtime.sandbox.landlock import landlock_version
from tests.models import onnx_models, python_models

Tensors = dict[str, np.ndarray[Any, Any]]

DECODING = """
import io
import numpy as np
from PIL import Image

def infer(inputs):
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in inputs["picture"]]
    return {"size": np.array([picture.size for picture in pictures], np.int64)}
"""


@contextmanager
def serving(tmp_path: Path, *, python_models: bool = True) -> Iterator[Runtime]:
    config = Config(watch=False, calibrate=True, state=str(tmp_path / "state"), python_models=python_models)
    with Runtime(tmp_path / "models", config=config) as runtime:
        yield runtime


def decoding(tmp_path: Path, settings: str = "", body: str = DECODING) -> Path:
    """Write a model that decodes pictures, BYTES [rows] -> size INT64 [rows, 2]; returns the version's folder."""
    folder = tmp_path / "models" / "m" / "1"
    python_models.write(folder, [("picture", "BYTES", [-1])], [("size", "INT64", [-1, 2])], body)
    (tmp_path / "models" / "m" / "model.toml").write_text(settings)
    return folder


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "orange").save(file, "PNG")
    return file.getvalue()


def entry(runtime: Runtime) -> dict[str, Any]:
    (found,) = runtime.models()
    return found


def batches(runtime: Runtime, model: str = "m") -> bool:
    return runtime.core.table.find(model, 1).batches


def sizes(runtime: Runtime, *pictures: bytes) -> list[list[int]]:
    result = runtime.infer("m", {"picture": np.array(pictures, object)})
    return result["size"].tolist()


READING = """
import numpy as np

def infer(inputs):
    found = []
    for path in inputs["path"]:
        try:
            with open(path, "rb") as file:
                found.append(file.read(64))
        except OSError as error:
            found.append(type(error).__name__.encode())
    return {"found": np.array(found, object)}
"""


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_a_link_in_a_version_opens_nothing_outside_the_models_folder_to_its_host(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m" / "1"
    python_models.write(folder, [("path", "BYTES", [-1])], [("found", "BYTES", [-1])], READING)
    (tmp_path / "models" / "m" / "model.toml").write_text("[warmup]\nruns = 0\n")
    (tmp_path / "models" / "shared").write_bytes(b"shared")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "..2026").mkdir()
    (folder / "..2026" / "mounted").write_bytes(b"mounted")  # as Kubernetes mounts a ConfigMap
    links = {"root": "/", "secret": tmp_path / "secret", "all": tmp_path, "shared": "../../shared"}
    for name, target in (links | {"..data": "..2026", "mounted": "..data/mounted"}).items():
        (folder / name).symlink_to(target)
    asked = ["root/etc/hostname", "secret", "all/secret", f"root{tmp_path}/secret", "shared", "mounted"]
    wanted = [b"PermissionError"] * 4 + [b"shared", b"mounted"]
    with serving(tmp_path) as runtime:
        paths = [str(folder / each).encode() for each in asked]
        assert runtime.infer("m", {"path": np.array(paths, object)})["found"].tolist() == wanted


def test_labels_and_samples_are_read_through_no_link_that_leads_outside_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    for name, settings in (("a", '[output.y]\nlabels = "of.txt"\n'), ("b", '[warmup]\ninputs = "of.json"\n')):
        onnx_models.mlp(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "model.toml").write_text(settings)
        for file in ("of.txt", "of.json"):
            (tmp_path / "models" / name / file).symlink_to(tmp_path / "secret.txt")
    with serving(tmp_path) as runtime:
        told = {each["name"]: each for each in runtime.models()}
        for name in ("a", "b"):
            assert told[name]["state"] == "failed"
            assert "leads outside the models folder" in told[name]["reason"], told[name]["reason"]


def test_a_model_that_fails_on_made_up_inputs_says_the_two_ways_out(tmp_path: Path) -> None:
    decoding(tmp_path)
    with serving(tmp_path) as runtime:
        assert entry(runtime)["state"] == "failed"
        reason = entry(runtime)["reason"]
        assert "the first run failed: the model failed: UnidentifiedImageError" in reason
        assert '[warmup] inputs = "sample.npz"' in reason
        assert "[warmup] runs = 0" in reason


def test_a_model_without_a_warm_up_is_ready_without_a_run_and_batch_says_what_axis_0_is(tmp_path: Path) -> None:
    decoding(tmp_path, "[warmup]\nruns = 0\n")
    with serving(tmp_path) as runtime:
        assert (entry(runtime)["state"], batches(runtime)) == ("ready", False)
        assert sizes(runtime, png(20, 10)) == [[20, 10]]
        (tmp_path / "models" / "m" / "model.toml").write_text("batch = true\n[warmup]\nruns = 0\n")
        runtime.load("m")
        assert (entry(runtime)["state"], batches(runtime)) == ("ready", True)
        assert sizes(runtime, png(20, 10), png(7, 5)) == [[20, 10], [7, 5]]


@pytest.mark.parametrize("place", ["version", "model"])
def test_a_model_warms_up_on_the_picture_of_its_sample(tmp_path: Path, place: str) -> None:
    folder = decoding(
        tmp_path, 'batch = true\n[warmup]\ninputs = "sample.npz"\nruns = 3\n', f"{DECODING}\n    print(1)"
    )
    folder = folder if place == "version" else folder.parent
    np.savez(folder / "sample.npz", picture=np.frombuffer(png(8, 6), np.uint8))
    with serving(tmp_path) as runtime:
        assert (entry(runtime)["state"], entry(runtime)["reason"], batches(runtime)) == ("ready", "", True)
        assert sizes(runtime, png(20, 10), png(7, 5)) == [[20, 10], [7, 5]]


def test_two_rows_of_a_sample_show_whether_axis_0_is_rows(tmp_path: Path) -> None:
    sample = {"x": [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]}
    for name, make in (("rows", python_models.identity), ("sums", python_models.running_sum)):
        folder = tmp_path / "models" / name
        if make is python_models.identity:
            python_models.write(
                folder / "1",
                [("x", "FP32", [-1, 4])],
                [("y", "FP32", [-1, 4])],
                "def infer(inputs):\n    assert (inputs['x'] >= 1).all()\n    return {'y': inputs['x']}\n",
            )
        else:
            python_models.running_sum(folder / "1")
        (folder / "sample.json").write_text(json.dumps(sample))
        (folder / "model.toml").write_text('[warmup]\ninputs = "sample.json"\n')
    with serving(tmp_path) as runtime:
        assert {each["name"]: (each["state"], batches(runtime, each["name"])) for each in runtime.models()} == {
            "rows": ("ready", True),
            "sums": ("ready", False),
        }


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("sample.npz", None, "no such file in"),
        ("../sample.npz", None, "wanted the name of an .npz or .json"),
        ("sample.txt", b"", "wanted the name of an .npz or .json"),
        ("sample.npz", b"no archive", "numpy.savez writes one"),
        ("sample.json", b"[1]", "wanted an object of lists by input name"),
        ("sample.json", b"{", "no sample: "),
        ("sample.json", b'{"image": ["x"]}', "a sample of image; wanted picture"),
        ("sample.json", b'{"picture": [[1, 2], [3]]}', "sample.json: "),
        ("sample.json", b'{"picture": [1]}', "wanted text, or the bytes of one element as uint8"),
        ("sample.json", b'{"picture": [["x"]]}', "has the shape [1, 1]; wanted [-1]"),
        ("sample.json", b'{"picture": ["no picture"]}', "the first run, on sample.json, failed"),
    ],
)
def test_a_sample_that_cannot_be_used_fails_the_version_and_says_why(
    tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    folder = decoding(tmp_path, f'[warmup]\ninputs = "{name}"\n')
    if content is not None:
        (folder / Path(name).name).write_bytes(content)
    with serving(tmp_path) as runtime:
        assert entry(runtime)["state"] == "failed"
        assert told in entry(runtime)["reason"]


def test_a_sample_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = decoding(tmp_path, '[warmup]\ninputs = "sample.npz"\n')
    with (folder / "sample.npz").open("wb") as file:
        np.savez_compressed(file, picture=np.zeros(65 << 20, np.uint8))  # 65 KB on disk
    with serving(tmp_path) as runtime:
        assert "a sample has over 67108864 bytes" in entry(runtime)["reason"]


FRONT = "def infer(inputs):\n    return {'y': inputs['x'] + 100}\n"


def beside_a_net(tmp_path: Path, settings: str = "", body: str = FRONT) -> None:
    folder = tmp_path / "models" / "m" / "1"
    onnx_models.added(folder, 1.0)
    python_models.write(folder, [("x", "FP32", [-1, 2])], [("y", "FP32", [-1, 2])], body)
    (tmp_path / "models" / "m" / "model.toml").write_text(settings)


def asked(runtime: Runtime) -> float:
    return float(runtime.infer("m", {"x": np.zeros((1, 2), np.float32)})["y"][0, 0])


def test_where_python_is_allowed_model_py_is_the_front_of_a_net_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    beside_a_net(tmp_path)
    with serving(tmp_path) as runtime:
        assert asked(runtime) == 100.0
        told = "model.py is the front of model.onnx, which only it reads"
        assert (entry(runtime)["backend"], entry(runtime)["reason"]) == ("python", told)
        assert told in {getattr(record, "note", "") for record in caplog.records}


def test_where_python_is_not_allowed_the_net_is_served_and_model_py_is_said_to_be_left_out(tmp_path: Path) -> None:
    beside_a_net(tmp_path)
    with serving(tmp_path, python_models=False) as runtime:
        assert asked(runtime) == 1.0
        told = "model.py was left out, and model.onnx is served: python_models = true is not configured"
        assert entry(runtime)["reason"] == told


def test_a_model_that_names_its_backend_is_served_by_it(tmp_path: Path) -> None:
    beside_a_net(tmp_path, 'backend = "onnxruntime"\n')
    with serving(tmp_path) as runtime:
        assert asked(runtime) == 1.0
        told = "model.py was left out, and model.onnx is served: backend is 'onnxruntime'"
        assert entry(runtime)["reason"] == told


def test_the_net_never_stands_in_for_a_front_that_fails(tmp_path: Path) -> None:
    beside_a_net(tmp_path, body="raise ImportError('no such library')\n")
    with serving(tmp_path) as runtime:
        assert entry(runtime)["state"] == "failed"
        assert "no such library" in entry(runtime)["reason"]
        with pytest.raises(NotReady):
            asked(runtime)
