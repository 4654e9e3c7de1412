"""What lies in the models folder and is no version: every door names it, with what it is and what it lacks."""

from __future__ import annotations

import json
import logging
import urllib.request
from pathlib import Path

import pytest

from edge_runtime.client.zmq_client import Client
from edge_runtime.config.settings import HttpSettings
from edge_runtime.errors import ModelNotFound
from tests.contract.running_daemon import put_model, running_daemon
from tests.models.onnx_models import mlp

LEFT = {
    "scikit.pkl": (b"\x80\x04\x95", "is a pickle (of scikit-learn?), which holds code: "),
    "text.zip": (b"PK\x05\x06" + bytes(18), "is a zip archive that is no model known here: unpack it"),
    "my model.onnx": (b"\x08\x08", "'my model' is no model name; wanted "),
    "net.xml": (b"<net>", "an OpenVINO IR needs its weights, net.bin, beside it"),
    "train/weights/best.onnx": (b"\x08\x08", "is where Ultralytics left it, which is no version: copy it to "),
    "mlp/old.pkl": (b"\x80\x04\x95", "is a pickle"),
}

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


def test_each_file_that_is_no_version_is_listed_with_what_it_is(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        running_daemon(models, tmp_path / "d", http=HttpSettings(endpoint="127.0.0.1:0")) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        entries = client.models()
        assert daemon.http is not None
        (http,) = daemon.http.endpoints
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
