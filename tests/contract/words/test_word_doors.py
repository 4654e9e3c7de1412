"""A model that sees no picture answers in words: the same by every door, on the command line, and in Home Assistant."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from edge_runtime.answers import answer_fields
from edge_runtime.cli.main import main
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.site.settings import PublishRule
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import RawClient, put_model
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

TOMLS = {
    "gauge": '[output.y]\nanswer = "number"\nunit = "°C"\n',
    "classes": '[output.y]\nlabels = ["a", "b", "c", "d"]\ntop_k = 1\nsoftmax = false\n',
    "echo": '[output.y]\nanswer = "text"\n',
    "tagger": '[output.tags]\nanswer = "tags"\nlabels = ["O", "B-X", "I-X"]\nsoftmax = false\n'
    '[output.vectors]\nanswer = "embedding"\npool = "mean"\n',
}
MAKERS = {
    "gauge": onnx_models.gauge,
    "classes": onnx_models.mlp,
    "echo": onnx_models.text_copy,
    "tagger": onnx_models.tagger,
}
ASKED = {
    "gauge": {"x": np.array([[20, 21, 22, 23.2]], np.float32)},
    "classes": {"x": np.zeros((1, 16), np.float32)},
    "echo": {"x": np.array([b"good morning"], object)},
    "tagger": {"input_ids": np.array([[0, 1, 2, 0, 1]]), "attention_mask": np.array([[1, 1, 1, 1, 0]])},
}
SAID = {
    "gauge": {"number": {"value": 21.55, "unit": "°C"}},
    "classes": {"classes": [{"label": "a", "index": 0, "score": 0.0}]},
    "echo": {"text": "good morning"},
    "tagger": {
        "embedding": [pytest.approx(0.8320503), pytest.approx(0.5547002)],
        "tags": [{"label": "X", "index": 1, "score": 1.0, "start": 1, "end": 3}],
    },
}


@pytest.fixture(scope="module")
def doors(broker, tmp_path_factory) -> Iterator[OpenDoors]:
    models = tmp_path_factory.mktemp("models")
    for name, toml in TOMLS.items():
        put_model(models, name, MAKERS[name], toml=toml)
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0"),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0"),
        "publish": (PublishRule("gauge"), PublishRule("echo"), PublishRule("tagger")),
    }
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "words", **doors) as doors:
        yield doors


OURS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.fixture(params=OURS)
def client(doors, request) -> Iterator[Client | MqttClient | OipClient]:
    is_oip = request.param in ("http", "grpc")
    url = doors.daemon.doors[request.param].endpoints[0] if is_oip else getattr(doors, request.param)
    with OURS[request.param](url) as client:
        yield client


@pytest.mark.smoke
@pytest.mark.parametrize("model", TOMLS)
def test_every_client_reads_the_words_of_a_model_that_sees_no_picture(client, model):
    for _ in range(3):
        result = client.infer(model, ASKED[model], raw=False)
        assert answer_fields(result.answers, as_list=False) == SAID[model]
    assert not client.infer(model, ASKED[model]).answers


def json_inputs(model: str) -> list[dict]:
    return [
        {
            "name": name,
            "datatype": {"f": "FP32", "i": "INT64", "O": "BYTES"}[array.dtype.kind],
            "shape": [*array.shape],
            "data": [each.decode() if isinstance(each, bytes) else each for each in array.reshape(-1).tolist()],
        }
        for name, array in ASKED[model].items()
    ]


@pytest.mark.parametrize("model", TOMLS)
def test_json_says_the_same_words_by_every_door(doors, model):
    asked = {"inputs": json_inputs(model), "parameters": {"raw": False}}
    url = doors.daemon.doors["http"].endpoints[0]
    with RawClient(doors.zmq) as zmq, Peer(doors.mqtt.rpartition("/")[0]) as peer, RawHttp(url) as http:
        replies = [
            zmq.ask_json(model=model, **asked),
            json.loads(peer.ask(f"edge/words/infer/{model}", json.dumps(asked), 1).payload),
            http.ask("POST", f"/v2/models/{model}/infer", json.dumps(asked).encode()).fields,
        ]
    for reply in replies:
        named = {kind: SAID[model][kind] for kind in SAID[model] if kind != "embedding"}
        if "embedding" in SAID[model]:
            named["embedding"] = "vectors"  # the tensor beside
        assert reply["answer"] == named


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("gauge", "  21.55 °C\n"),
        ("classes", "  a  0.0000\n"),
        ("echo", "  good morning\n"),
        ("tagger", "  2 numbers: [0.8321 0.5547]\n  X  1.0000  1..3\n"),
    ],
)
def test_the_command_line_says_words(doors, model, shown, monkeypatch, capsys):
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", doors.zmq)
    given = [
        word
        for name, array in ASKED[model].items()
        for word in ("--input", f"{name}=@{json.dumps(json_inputs_of(array))}")
    ]
    assert main(["infer", model, *given]) == 0
    assert shown in capsys.readouterr().out
    assert main(["infer", model, *given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {kind: told[kind] for kind in SAID[model]} == SAID[model]
    assert "outputs" not in told
    assert main(["infer", model, *given, "--raw"]) == 0
    assert shown not in capsys.readouterr().out


def json_inputs_of(array):
    return [each.decode() if isinstance(each, bytes) else each for each in array.tolist()]
