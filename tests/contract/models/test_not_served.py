"""What lies in the models folder and is not a version: every door names it, with what it is and what it lacks."""

from __future__ import annotations

import io
import json
import logging
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import MAX_ERROR_CHARACTERS, EdgeRuntimeError, ModelNotFound
from edge_runtime.telemetry.logs import RepeatFilter
from tests.contract.running_daemon import put_model, running_daemon
from tests.models.onnx_models import mlp


def _archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", "{}")
    return content.getvalue()


LEFT = {
    "scikit.pkl": (b"\x80\x04\x95", "is a pickle (of scikit-learn?), which holds code: "),
    "text.zip": (b"PK\x05\x06" + bytes(18), "is a zip archive that is not a model known here: unpack it"),
    "my model.onnx": (b"\x08\x08", "'my model' is not a model name; wanted "),
    "net.xml": (b"<net>", "an OpenVINO IR needs its weights, net.bin, beside it"),
    "bundle.tar.gz": (b"\x1f\x8b\x08", "is an archive or a compressed file: unpack it"),
    "trees.json": (b'[{"nodeid": 0, "depth": 0', "is a dump of trees for people to read"),
    "serve.mar": (
        _archive(),
        "is a TorchServe archive (.mar): it is a zip of a model and its Python handler: ",
    ),
    "train/weights/best.onnx": (b"\x08\x08", "is where Ultralytics left it, which is not a version: copy it to "),
    "mlp/old.pkl": (b"\x80\x04\x95", "is a pickle"),
}

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"

SILENT = {
    "README.md": b"text",
    "notes.txt": b"tree\nhouse\n",
    "mlp/index_to_name.json": b'{"0": ["n01440764", "tench"]}',
    "mlp/labels.txt": b"tree\nversion\n",
    "config.json": b'{"learner": "adam"}',
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a model, what is not served, and what is nobody's business."""
    folder = tmp_path / "models"
    put_model(folder, "mlp", mlp)
    for name, content in {**{name: content for name, (content, _) in LEFT.items()}, **SILENT}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_each_file_that_is_not_a_version_is_listed_with_what_it_is(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        running_daemon(models, tmp_path / "d", http=HttpSettings(endpoint="127.0.0.1:0")) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        entries = client.models()
        (http,) = daemon.doors["http"].endpoints
        index = json.load(urllib.request.urlopen(urllib.request.Request(f"{http}/v2/repository/index", method="POST")))
        with pytest.raises(ModelNotFound, match=r"not served: .*scikit\.pkl: is a pickle"):
            client.infer("scikit", {})
    served, left = ([each for each in entries if (each["version"] is None) is none] for none in (False, True))
    assert [(each["name"], each["state"]) for each in served] == [("mlp", "ready")]
    told = {str(Path(each["path"]).relative_to(models)): each for each in left}
    assert told.keys() == LEFT.keys()
    for path, (_, reason) in LEFT.items():
        entry = told[path]
        assert entry["state"] == "not_served"
        assert entry["reason"].startswith(reason), entry
        assert entry["name"] == path.partition("/")[0].rpartition(".")[0] or path.partition("/")[0]
        assert f"not served: {entry['path']}: {entry['reason']}" in caplog.messages
    assert len([line for line in caplog.messages if line.startswith("not served")]) == len(LEFT)
    assert {(each["name"], each["version"], each["state"], each["reason"]) for each in index} == {
        ("mlp", "1", "READY", ""),
        *((each["name"], "", "UNAVAILABLE", each["reason"]) for each in left),
    }


def test_a_file_that_goes_is_listed_no_more(models: Path, tmp_path: Path) -> None:
    with running_daemon(models, tmp_path / "d") as daemon, Client(daemon.endpoints[0]) as client:
        (models / "scikit.pkl").unlink()
        left: list[str] = ["scikit"]
        while "scikit" in left:  # the folder is looked at each half second
            left = [each["name"] for each in client.models()]
        assert "text" in left


def test_no_error_and_no_reason_is_longer_than_2000_characters(tmp_path: Path) -> None:
    models = tmp_path / "models"
    put_model(models, "mlp", mlp)
    put_model(models, "wrong", mlp, toml="\n".join(f"unknown_key_{number} = 1" for number in range(500)))
    long = "x" * 9000
    row = {"name": long, "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    with (
        running_daemon(models, tmp_path / "d", http=HttpSettings(endpoint="127.0.0.1:0")) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        (reason,) = (each["reason"] for each in client.models() if each["name"] == "wrong")
        assert "unknown_key_0: unknown key" in reason
        assert len(reason) <= MAX_ERROR_CHARACTERS
        for name, inputs in (("mlp", {long: np.zeros(1)}), (long, {}), ("wrong", {})):
            with pytest.raises(EdgeRuntimeError) as raised:
                client.infer(name, inputs)
            assert 100 < len(str(raised.value)) <= MAX_ERROR_CHARACTERS
        (http,) = daemon.doors["http"].endpoints
        body = json.dumps({"inputs": [row]}).encode()
        with pytest.raises(urllib.error.HTTPError) as answered:
            urllib.request.urlopen(urllib.request.Request(f"{http}/v2/models/mlp/infer", data=body))
        with answered.value as response:
            assert 100 < len(json.load(response)["error"]) <= MAX_ERROR_CHARACTERS


FAULTS = {
    "page.onnx": (b"<!-- --><html lang='en'>", "page.onnx is a web page, not a model: "),
    "denied.onnx": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "denied.onnx is text, not a model: "),
    "hub.tflite": (b"Entry not found", "hub.tflite is text, not a model: "),
    "pointer/1/model.onnx": (POINTER, "model.onnx is a Git LFS pointer, not the file itself: "),
    "packed.onnx": (b"\x1f\x8b\x08", "packed.onnx is an archive or a compressed file: unpack it"),
    "deep/1/export/model.onnx": (b"\x08\x08", "/deep/1 holds export/model.onnx, a folder too deep; move "),
    "both/1/old.pkl": (b"\x80\x04\x95", "old.pkl is a pickle"),
    "two/a.onnx": (b"\x08\x08", "/two holds a.onnx and b.onnx; which one is the artifact? Name it model.onnx"),
    "two/b.onnx": (b"\x08\x08", "which one is the artifact?"),
    "wrong/model.toml": (b"thread = 1", "/wrong/model.toml: thread: unknown key 'thread'; did you mean 'threads'?"),
    "wrong/1/model.onnx": (b"\x08\x08", "unknown key"),
}


def test_each_wrong_file_has_its_own_sentence_and_the_log_has_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = tmp_path / "models"
    many = {f"many{number}.onnx": (b"not found", "is text, not a model") for number in range(40)}
    many |= {f"many {number}.onnx": (b"not found", "is not a model name") for number in range(40)}
    for name, (content, _) in {**FAULTS, **many}.items():
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_bytes(content)
    with (
        caplog.at_level(logging.WARNING),
        running_daemon(models, tmp_path / "d") as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        entries = {each["name"]: each for each in client.models()}
    for path, (_, said) in {**FAULTS, **many}.items():
        name = path.partition("/")[0].removesuffix(".onnx").removesuffix(".tflite")
        assert said in entries[name]["reason"], entries[name]
    repeats = RepeatFilter(SystemClock())
    written = [record.getMessage() for record in caplog.records if repeats.filter(record)]
    for name, entry in entries.items():
        told = [line for line in written if entry["reason"] in line and name in line]
        assert len(told) == 1, f"{name}: {told}"
