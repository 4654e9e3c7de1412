"""Ultralytics' segment, pose and obb asked with a picture: told by their files, in words by every door, and drawn."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_runtime.answers import answer_fields
from edge_runtime.cli.main import main
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.pictures.test_pictures import picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import put_model
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

SIDE = 32
"""Of the models' pictures; those that are sent are 64 x 48, so 32 x 24 of it, from line 4 on."""

SENT = picture("white", (64, 48))
READ = {"width": 64, "height": 48, "fit": "letterbox", "color": "rgb"}


def head(channels: int, *things: dict[int, float]) -> np.ndarray:
    """[channels, 50], zero but for the numbers of each thing, by channel."""
    array = np.zeros((channels, 50), np.float32)
    for index, numbers in enumerate(things):
        for channel, number in numbers.items():
            array[channel, index] = number
    return array


LEFT_HALF = np.concatenate([np.ones((1, 8, 4)), -np.ones((1, 8, 4))], axis=2)
"""One prototype of 8 x 8: above 0 in its left half."""

MODELS = {
    # a cat of 16 x 8 in the middle, whose left half it is
    "segment": {"output0": head(7, {0: 16, 1: 16, 2: 16, 3: 8, 4: 0.9, 6: 1}), "output1": LEFT_HALF},
    "pose": {"output0": head(11, {0: 16, 1: 16, 2: 16, 3: 8, 4: 0.9, 5: 12, 6: 14, 7: 0.75, 8: 20, 9: 18, 10: 0.25})},
    "obb": {"output0": head(7, {0: 16, 1: 16, 2: 16, 3: 8, 5: 0.9, 6: np.pi / 2})},
}
TOLD = {
    "segment": {"names": "{0: 'cat', 1: 'dog'}"},
    "pose": {"names": "{0: 'person'}", "kpt_shape": "[2, 3]"},
    "obb": {"names": "{0: 'ship', 1: 'plane'}"},
}
MIDDLE = [16.0, 16.0, 48.0, 32.0]
SAID = {
    "segment": {
        "masks": [
            {
                "label": "cat", "index": 0, "score": 0.9, "box": MIDDLE,
                "mask": {"size": [8, 8], "counts": [19, 2, 6, 2, 35]},
            }
        ]
    },
    "pose": {
        "keypoints": [
            {
                "label": "person", "index": 0, "score": 0.9, "box": MIDDLE,
                "points": [[24.0, 20.0, 0.75], [40.0, 28.0, 0.25]],
            }
        ]
    },
    "obb": {
        "boxes": [
            {
                "label": "plane", "index": 1, "score": 0.9, "box": [24.0, 8.0, 40.0, 40.0],
                "corners": [[24.0, 40.0], [40.0, 40.0], [40.0, 8.0], [24.0, 8.0]],
            }
        ]
    },
}  # fmt: skip
SHOWN = {
    "segment": "  cat  0.9000  [16.0, 16.0, 48.0, 32.0]  4 pixels of 8 x 8\n",
    "pose": "  person  0.9000  [16.0, 16.0, 48.0, 32.0]\n    24,20 40,28\n",
    "obb": "  plane  0.9000  [24.0, 8.0, 40.0, 40.0]  turned 90°\n",
}


CUT = """
[[step]]
name = "find"
model = "obb"
inputs = {images = "input.photo"}
[[step]]
name = "each"
model = "colours"
inputs = {image = "find.output0"}
crop = {picture = "input.photo", box = "find.output0"}
[output]
colours = "each.scores"
"""


def put_things(folder: Path, task: str) -> Path:
    told = {"stride": "32", "task": task, "imgsz": f"[{SIDE}, {SIDE}]", **TOLD[task]}
    return onnx_models.fixed_outputs(folder, MODELS[task], told, SIDE)


@pytest.fixture(scope="module")
def doors(broker, tmp_path_factory) -> Iterator[OpenDoors]:
    models = tmp_path_factory.mktemp("models")
    for task in MODELS:
        put_model(models, task, lambda folder, task=task: put_things(folder, task), toml='preset = "ultralytics"\n')
    put_model(
        models, "colours", onnx_models.colours, toml='[input.image]\nrange = "0..1"\n[output.scores]\ntop_k = 1\n'
    )
    (models / "cut").mkdir()
    (models / "cut" / "pipeline.toml").write_text(CUT)
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0"),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0"),
    }
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "things", **doors) as doors:
        yield doors


OURS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.mark.parametrize("door", OURS)
@pytest.mark.parametrize("task", MODELS)
def test_every_client_reads_what_was_found(doors, door, task):
    is_oip = door in ("http", "grpc")
    url = doors.daemon.doors[door].endpoints[0] if is_oip else getattr(doors, door)
    with OURS[door](url) as client:
        result = client.infer(task, picture=SENT)
    assert answer_fields(result.answers, as_list=False) == {"picture": READ, **SAID[task]}


@pytest.mark.parametrize("task", MODELS)
def test_a_picture_that_is_posted_is_answered_with_what_was_found(doors, task):
    with RawHttp(doors.daemon.doors["http"].endpoints[0]) as http:
        said = http.ask("POST", f"/v2/models/{task}/infer", SENT, content_type="image/png").fields
    assert {kind: said[kind] for kind in SAID[task]} == SAID[task]
    assert "output1" not in json.dumps(said)


def test_a_mask_is_where_the_thing_is(doors):
    with Client(doors.zmq) as client:
        (found,) = client.infer("segment", picture=SENT).answer.masks
    assert np.argwhere(found.mask).tolist() == [[3, 2], [3, 3], [4, 2], [4, 3]]


@pytest.mark.parametrize("task", MODELS)
def test_the_command_line_says_and_draws_what_was_found(doors, task, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", doors.zmq)
    photo = tmp_path / "photo.png"
    photo.write_bytes(SENT)
    assert main(["infer", task, str(photo), "--draw", str(tmp_path / "drawn.png")]) == 0
    assert SHOWN[task] in capsys.readouterr().out
    drawn = np.asarray(Image.open(tmp_path / "drawn.png").convert("RGB")).astype(int)
    is_white = (drawn == 255).all(axis=2)
    if task == "segment":
        assert not is_white[18:30, 18:30].any()  # its left half
        assert is_white[22:30, 34:46].all()
    elif task == "pose":
        assert (drawn[20, 24] < 250).any()  # a sure point
        assert is_white[27:30, 38:43].all()  # one that is not
    else:
        assert (drawn[30, 24] < 250).any()  # a side of the turned box
        assert is_white[26:38, 28:38].all()
    assert main(["models", "show", task]) == 0
    assert f"answers {next(iter(SAID[task]))}" in capsys.readouterr().out


def test_a_pipeline_cuts_out_the_hull_of_a_turned_box(doors):
    photo = Image.new("RGB", (64, 48), "red")
    photo.paste("blue", (24, 8, 40, 40))  # the hull
    file = io.BytesIO()
    photo.save(file, "PNG")
    with Client(doors.zmq) as client:
        (item,) = client.infer("cut", picture=file.getvalue()).answers
    assert [(each.index, each.score) for each in item.classes] == [(2, 1.0)]
