"""A stream of sound in chunks of any length, under a sequence: the model runs once a window, whatever the cuts were."""

from __future__ import annotations

import json
import os
import random
import signal

import numpy as np
import pytest

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed, SequenceLost
from edge_runtime.series.sound_files import wav_of
from tests.contract.open_doors import open_doors
from tests.contract.running_daemon import RawClient, put_model, running_daemon
from tests.contract.sequences.test_snapshots import asking
from tests.contract.sequences.test_stateful_models import TOML
from tests.contract.series.test_series_doors import LISTENS, SHAKES, sent
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models, series_models
from tests.models.series_models import HIGH_HZ, LOW_HZ, RATE, tone

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

SEQUENCE = "[sequence]\n"
WINDOW, HOP = "window = 1000", "window = 1000\nhop = 300"
HEARD = np.concatenate([np.zeros(RATE, np.float32), tone(LOW_HZ, 1.25), tone(HIGH_HZ, 1.8)])
SHAKEN = (tone(50, 7.3, 1000) * np.linspace(0, 1, 7300)).astype(np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "listener", series_models.listener, toml=LISTENS + SEQUENCE)
    put_model(models, "shaking", series_models.shaking, toml=SHAKES.replace(WINDOW, HOP) + SEQUENCE)
    handed = SEQUENCE + "snapshot = true\nmax_sequences = 16\n"
    put_model(models, "handed", series_models.shaking, toml=SHAKES.replace(WINDOW, HOP) + handed)
    steady = LISTENS.replace("hop = 8000", "hop = 8000\nsteady = [2, 3]") + SEQUENCE + "snapshot = true\n"
    put_model(models, "steady", series_models.listener, toml=steady)
    return models


@pytest.fixture(scope="module")
def doors(broker, models, tmp_path_factory):
    settings = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "chunks", **settings) as doors:
        yield doors


OURS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.fixture(params=OURS)
def client(doors, request):
    is_oip = request.param in ("http", "grpc")
    url = doors.daemon.doors[request.param].endpoints[0] if is_oip else getattr(doors, request.param)
    with OURS[request.param](url) as client:
        yield client


def cuts(samples, random_, longest):
    """Chunks of any length, empty ones too."""
    at = 0
    while at < len(samples):
        length = random_.choice([0, 1, 7, random_.randint(0, longest)])
        yield samples[at : at + length]
        at += length


def numbers(result):
    """Start, end and number of each window of the only answer."""
    (answer,) = result.answers
    return [(each.start_s, each.end_s, each.answer.number.value) for each in answer.more["windows"]]


@pytest.mark.smoke
def test_chunks_of_any_length_have_the_windows_of_the_whole(client):
    found = []
    with client.sequence("shaking") as stream:
        for chunk in cuts(SHAKEN, random.Random(1), 1500):
            found += numbers(stream.infer({"samples": chunk[None]}))
    assert np.array(found) == pytest.approx(np.array(whole()), abs=1e-5)


def whole():
    """What the windows are, by numpy: start, end and number."""
    cuts = {start: SHAKEN[start : start + 1000] for start in range(0, len(SHAKEN) - 999, 300)}
    return [(start / 1000, start / 1000 + 1, float(cut.std())) for start, cut in cuts.items()]


def test_files_and_bare_samples_are_chunks_too(client):
    said = []
    with client.sequence("listener") as stream:
        for index, at in enumerate(range(0, len(HEARD), 5000)):
            chunk = HEARD[at : at + 5000]
            data = wav_of(chunk, RATE) if index % 2 else (chunk * 32767).astype("<i2").tobytes()
            (answer,) = stream.infer({"logmel": sent(data)}).answers
            said += [(each.start_s, each.answer.classes[0].label) for each in answer.more["windows"]]
    assert [start for start, _ in said] == [0.5 * index for index in range(len(said))]
    assert dict(said) | {0.0: "silence", 1.0: "low", 2.5: "high", 3.0: "high"} == dict(said)


def test_a_chunk_that_is_refused_does_not_touch_the_rest(client):
    with client.sequence("shaking") as stream:
        assert numbers(stream.infer({"samples": SHAKEN[None, :900]})) == []
        broken = np.full((1, 50), np.nan, np.float32)
        for _ in range(2):
            with pytest.raises(DecodeFailed, match="not numbers"):
                stream.infer({"samples": broken})
        found = numbers(stream.infer({"samples": SHAKEN[None, 900:1300]}))
    assert np.array(found) == pytest.approx(np.array(whole()[:2]), abs=1e-5)


def test_streams_side_by_side_keep_each_their_own_rest(doors):
    with Client(doors.zmq) as client:
        streams = [client.sequence("shaking") for _ in range(8)]
        parts = [list(cuts(SHAKEN * (index + 1), random.Random(index), 900)) for index in range(8)]
        found: list[list] = [[] for _ in streams]
        for step in range(max(map(len, parts))):
            for index, stream in enumerate(streams):
                if step < len(parts[index]):
                    found[index] += numbers(stream.infer({"samples": parts[index][step][None]}))
    for index, each in enumerate(found):
        assert [value for *_, value in each] == pytest.approx([n * (index + 1) for *_, n in whole()], abs=1e-4)


def test_a_rest_is_told_as_lost_when_its_host_ends_and_a_start_begins_anew(models, tmp_path):
    with running_daemon(models, tmp_path / "run") as daemon, Client(daemon.endpoints[0]) as client:
        with client.sequence("shaking", 7) as stream:
            stream.infer({"samples": SHAKEN[None, :900]})
            (entry,) = (each for each in client.models() if each["name"] == "shaking")
            os.kill(entry["host"]["pid"], signal.SIGKILL)
            with pytest.raises(SequenceLost, match="must specify the START flag"):
                stream.infer({"samples": SHAKEN[None, 900:901]})
        with client.sequence("shaking", 7) as stream:
            assert numbers(stream.infer({"samples": SHAKEN[None, :900]})) == [], "it begins anew"


def test_a_snapshot_carries_the_rest_to_another_sequence_and_the_stream_goes_on(client):
    found = []
    with client.sequence("handed") as one, client.sequence("handed") as other:
        for index, at in enumerate(range(0, len(SHAKEN), 450)):
            stream, next_one = (one, other) if index % 2 == 0 else (other, one)
            found += numbers(stream.infer({"samples": SHAKEN[None, at : at + 450]}))
            next_one.restore(stream.snapshot())
    assert np.array(found) == pytest.approx(np.array(whole()), abs=1e-5)


def test_a_snapshot_does_not_touch_the_rest(doors):
    with Client(doors.zmq) as client, client.sequence("handed") as stream:
        assert numbers(stream.infer({"samples": SHAKEN[None, :900]})) == []
        assert stream.snapshot() == stream.snapshot()
        assert len(numbers(stream.infer({"samples": SHAKEN[None, 900:1000]}))) == 1


def test_a_snapshot_of_sound_survives_a_restart_and_is_refused_where_windows_are_cut_otherwise_since(models, tmp_path):
    with asking(models, tmp_path / "run") as client, client.sequence("handed", 7) as stream:
        stream.infer({"samples": SHAKEN[None, :900]})
        state = stream.snapshot()
    with asking(models, tmp_path / "run") as client, client.sequence("handed", 7) as stream:
        stream.restore(state)
        (one,) = numbers(stream.infer({"samples": SHAKEN[None, 900:1000]}))
    assert one == pytest.approx(whole()[0], abs=1e-5)
    others = tmp_path / "others"
    toml = SHAKES.replace(WINDOW, "window = 1000\nhop = 500") + SEQUENCE + "snapshot = true\n"
    put_model(others, "handed", series_models.shaking, toml=toml)
    with (
        asking(others, tmp_path / "run") as client,
        client.sequence("handed", 7) as stream,
        pytest.raises(DecodeFailed, match=r"one window each 300.*one window each 500"),
    ):
        stream.restore(state)


def labels(result):
    """The label of each window of the only answer; "" for none."""
    (answer,) = result.answers
    return [each.answer.classes[0].label if each.answer.classes else "" for each in answer.more["windows"]]


def agreed(each):
    """What two of the last three say, else what they said before."""
    told = [""]
    for end in range(1, len(each) + 1):
        last = each[max(end - 3, 0) : end]
        told.append(next((label for label in last if last.count(label) >= 2), told[-1]))
    return told[1:]


def test_windows_agree_over_chunks_and_snapshots_and_a_whole_sound_alike(client):
    with client.sequence("steady") as whole, client.sequence("listener") as own:
        wanted = labels(whole.infer({"logmel": HEARD[None]}))
        each = labels(own.infer({"logmel": HEARD[None]}))
    assert wanted == agreed(each) != each
    found = []
    with client.sequence("steady") as one, client.sequence("steady") as other:
        for index, at in enumerate(range(0, len(HEARD), 9000)):
            stream, next_one = (one, other) if index % 2 == 0 else (other, one)
            found += labels(stream.infer({"logmel": HEARD[None, at : at + 9000]}))
            next_one.restore(stream.snapshot())
    assert found == wanted


def test_rests_count_as_memory_of_their_model(doors):
    with Client(doors.zmq) as client:
        found = {each["name"]: each["memory_bytes"] for each in client.models()}
    at_most, few = 1024 * 2 * 4000, 16 * 2 * 4000  # sequences, two steps of each, less than a window of FP32
    assert found["shaking"] - found["handed"] == pytest.approx(at_most - few, abs=2_000_000)


def test_a_stream_by_mqtt_is_bare_samples_under_a_sequence_id(doors, broker):
    with Peer(broker.url) as peer:
        found = []
        for index, at in enumerate(range(0, len(SHAKEN), 700)):
            body = {
                "inputs": [
                    {
                        "name": "samples", "datatype": "FP32", "shape": [1, len(SHAKEN[at : at + 700])],
                        "data": SHAKEN[at : at + 700].tolist(),
                    }
                ],
                "parameters": {"sequence_id": "s1", "sequence_start": index == 0},
            }  # fmt: skip
            answer = peer.ask("edge/chunks/infer/shaking", json.dumps(body).encode(), 1)
            (rms, times) = json.loads(answer.payload)["outputs"]
            assert (rms["name"], times["name"]) == ("rms", "window_times")
            found += times["data"][::2]
    assert found == pytest.approx([start for start, *_ in whole()])


def test_without_a_sequence_such_a_model_is_refused_as_any_model_with_sequences(doors):
    with Client(doors.zmq) as client, pytest.raises(Exception, match="correlation ID"):
        client.infer("shaking", {"samples": SHAKEN[None]})


def test_a_model_with_states_of_its_own_and_windows_is_refused_at_load(tmp_path):
    toml = "[input.x]\nrate = 1000\nwindow = 1\n" + TOML
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon:
        with RawClient(daemon.endpoints[0]) as client:
            (entry,) = client.result("models")
        assert entry["state"] == "failed"
        assert "each of its runs is a request then" in entry["reason"]
