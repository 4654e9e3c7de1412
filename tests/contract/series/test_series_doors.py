"""A sound becomes windows, and each window an answer with its times: the same by every door and client."""

from __future__ import annotations

import base64
import json
import struct
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
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.series.sound_files import wav_of
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import RawClient, put_model
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import series_models
from tests.models.series_models import HIGH_HZ, LOW_HZ, RATE, tone

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

LISTENS = f"""[input.logmel]
rate = {RATE}
window = {RATE}
hop = 8000
features = "log-mel"
[output.scores]
labels = ["silence", "low", "high"]
top_k = 1
softmax = false
"""
SHAKES = """[input.samples]
from = "series"
rate = 1000
window = 1000
normalise = "mean"
[output.rms]
answer = "number"
unit = "g"
"""

CLIP = np.concatenate([np.zeros(RATE, np.float32), tone(LOW_HZ, 1), tone(HIGH_HZ, 1)])
TOLD = [(0.0, 1.0, "silence"), (1.0, 2.0, "low"), (2.0, 3.0, "high")]
"""Of windows that hold one thing; those between hold half of two."""

SHAKEN = np.concatenate([np.full(1000, 7, np.float32), tone(50, 2.5, 1000) + np.float32(3)])


@pytest.fixture(scope="module")
def doors(broker, tmp_path_factory) -> Iterator[OpenDoors]:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "listener", series_models.listener, toml=LISTENS)
    put_model(models, "one", series_models.listener, toml=LISTENS, rows=1)
    put_model(models, "shaking", series_models.shaking, toml=SHAKES)
    settings = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "series", **settings) as doors:
        with RawHttp(doors.daemon.doors["http"].endpoints[0]) as http:  # its thread for large bodies starts here
            http.ask("POST", "/v2/models/listener/infer", wav_of(CLIP, RATE))
        yield doors


OURS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.fixture(params=OURS)
def client(doors, request) -> Iterator[Client | MqttClient | OipClient]:
    is_oip = request.param in ("http", "grpc")
    url = doors.daemon.doors[request.param].endpoints[0] if is_oip else getattr(doors, request.param)
    with OURS[request.param](url) as client:
        yield client


def sent(*files: bytes) -> np.ndarray:
    array = np.empty(len(files), object)
    array[:] = files
    return array


def told(windows: list[dict]) -> list[tuple]:
    """Of whole seconds: the times and the label."""
    assert [each["start_s"] for each in windows] == [0.5 * index for index in range(len(windows))]
    return [(each["start_s"], each["end_s"], each["classes"][0]["label"]) for each in windows[::2]]


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["listener", "one"])
def test_every_client_gets_an_answer_for_each_window_of_a_sound(client, model):
    for _ in range(3):
        result = client.infer(model, {"logmel": sent(wav_of(CLIP, RATE))})
        (answer,) = result.answers
        assert told(answer_fields([answer], as_list=False)["windows"]) == TOLD
        window = answer.more["windows"][2]
        assert (window.start_s, window.end_s, window.answer.classes[0].label) == (1.0, 2.0, "low")


def test_samples_as_floats_are_windows_of_the_same_answers(client):
    result = client.infer("shaking", {"samples": SHAKEN[None]})
    (answer,) = result.answers
    assert [(each.start_s, each.answer.number.value) for each in answer.more["windows"]] == [
        (0.0, pytest.approx(0, abs=1e-4)),
        (1.0, pytest.approx(0.5 / 2**0.5, rel=1e-3)),
        (2.0, pytest.approx(0.5 / 2**0.5, rel=1e-3)),
    ]


def test_rows_of_several_lengths_have_each_their_own_windows(client):
    result = client.infer("listener", {"logmel": sent(wav_of(CLIP, RATE), wav_of(CLIP[:RATE], RATE))})
    assert [len(each.more["windows"]) for each in result.answers] == [5, 1]
    assert result.outputs["scores"].shape[:2] == (2, 5)
    assert np.isnan(result.outputs["window_times"][1, 1:]).all()


def test_bare_outputs_are_one_for_each_window(client):
    result = client.infer("listener", {"logmel": sent(wav_of(CLIP, RATE), wav_of(CLIP[:RATE], RATE))}, raw=True)
    assert not result.answers
    assert result.outputs["scores"].shape == (2, 5, 3)
    assert result.outputs["scores"][0, ::2].argmax(axis=1).tolist() == [0, 1, 2]
    assert np.isnan(result.outputs["scores"][1, 1:]).all()


def test_the_models_own_tensor_is_answered_as_ever(client):
    features = np.zeros((2, 98, 40), np.float32)
    assert client.infer("listener", {"logmel": features}).outputs["scores"].shape == (2, 3)
    result = client.infer("listener", {"logmel": features}, raw=False)
    assert [each.classes[0].label for each in result.answers] == ["silence", "silence"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (wav_of(CLIP[:100], RATE), r"100 samples, 0.00625 s; wanted at least one window, 16,000"),
        (b"", "0 samples"),
        (wav_of(CLIP, RATE)[:-100], "claims 96,000 bytes"),
        (wav_of(CLIP, 8000), "ffmpeg -i FILE -ar 16000"),
        (wav_of(CLIP, RATE)[:40] + struct.pack("<I", 1 << 30) + bytes(100), "claims 1,073,741,824 bytes"),
        (b"\xff\xd8\xff" + bytes(100), "it is JPEG"),
        (bytes(36 << 20), "windows; at most 1,048 are read, send it in parts"),
    ],
)
def test_a_clip_that_cannot_be_read_is_the_callers_fault_and_its_neighbours_are_answered(doors, data, fault):
    with Client(doors.zmq) as client:
        with pytest.raises(DecodeFailed, match=fault):
            client.infer("listener", {"logmel": sent(data)}, timeout_ms=30_000)
        waiting = [client.submit("listener", {"logmel": sent(wav_of(CLIP, RATE))}) for _ in range(8)]
        assert all(told(answer_fields(each.result().answers, as_list=False)["windows"]) == TOLD for each in waiting)


def test_samples_that_are_not_numbers_are_refused(doors):
    samples = np.zeros((1, 2000), np.float32)
    samples[0, 500] = np.nan
    with Client(doors.zmq) as client, pytest.raises(DecodeFailed, match="not numbers"):
        client.infer("shaking", {"samples": samples})


def test_answers_without_their_times_are_refused_with_what_to_ask_for(doors):
    with Client(doors.zmq) as client:
        with pytest.raises(TensorMismatch, match="'window_times' too"):
            client.infer("listener", {"logmel": sent(wav_of(CLIP, RATE))}, outputs=["scores"])
        only = client.infer("listener", {"logmel": sent(wav_of(CLIP, RATE))}, outputs=["window_times", "scores"])
        assert len(only.answers[0].more["windows"]) == 5


def test_a_file_among_the_inputs_of_json_is_base64_as_a_picture_is(doors):
    tensor = {
        "name": "logmel",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(wav_of(CLIP, RATE)).decode()],
    }
    with RawClient(doors.zmq) as zmq:
        reply = zmq.ask_json(model="listener", inputs=[tensor], parameters={"raw": False})
    assert next(each["shape"] for each in reply["outputs"] if each["name"] == "window_times") == [1, 5, 2]


def test_a_file_is_a_whole_request_over_http_and_mqtt_and_in_json(doors):
    wav = wav_of(CLIP, RATE)
    coded = base64.b64encode(wav).decode()
    url = doors.daemon.doors["http"].endpoints[0]
    path = "/v2/models/listener/infer"
    with RawClient(doors.zmq) as zmq, Peer(doors.mqtt.rpartition("/")[0]) as peer, RawHttp(url) as http:
        replies = [
            zmq.ask_json(model="listener", sound=coded),
            zmq.ask_json(model="listener", sounds=[coded])["answers"][0],
            json.loads(peer.ask("edge/series/infer/listener", wav, 1).payload),
            http.ask("POST", path, wav, content_type="audio/wav").fields,
            http.ask("POST", path, wav).fields,
        ]
    for reply in replies:
        assert told(reply["windows"]) == TOLD


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"sound": 3}, "sound: got int, wanted base64 text of a WAV, FLAC"),
        ({"sound": "not base64"}, "sound: got 'not base64'"),
        ({"sounds": []}, "sounds: got an empty list, wanted base64 text of each sound"),
        ({"sound": "UklG", "picture": "UklG"}, "got picture and sound; wanted one of"),
    ],
)
def test_a_sound_in_json_that_is_none_is_refused(doors, fields, fault):
    with RawClient(doors.zmq) as zmq:
        assert fault in zmq.ask_json(model="listener", **fields)["error"]["message"]


def test_the_command_line_asks_with_a_file(doors, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", doors.zmq)
    file = tmp_path / "clip.wav"
    file.write_bytes(wav_of(CLIP, RATE))
    assert main(["infer", "listener", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "0.00..1.00 s  silence 0." in shown
    assert "2.00..3.00 s  high 0." in shown or "2.00..3.00 s  high 1." in shown
    assert main(["infer", "listener", str(file), "--json"]) == 0
    assert told(json.loads(capsys.readouterr().out)["windows"]) == TOLD
    assert main(["models", "show", "listener"]) == 0
    assert "16000 Hz" in capsys.readouterr().out
