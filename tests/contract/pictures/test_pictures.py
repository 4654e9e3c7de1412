"""Pictures in place of tensors, and answers in place of outputs, by the steps that `model.toml` declares."""

from __future__ import annotations

import base64
import io

import msgpack
import numpy as np
import pytest
from PIL import Image

from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import RawClient, error_code, put_model, running_daemon
from tests.models import onnx_models

COLOURS = """
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
top_k = 2
"""


def picture(colour, size=(64, 48), kind="PNG"):
    """The bytes of a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def picture_header(model="colours", datatype="BYTES", shape=(1,), **fields):
    inputs = [{"name": "image", "datatype": datatype, "shape": list(shape)}]
    return msgpack.packb({"v": 1, "op": "infer", "model": model, "inputs": inputs, **fields})


def framed(*texts):
    """The BYTES tensor of these."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


GATHERING = """
max_batch_rows = 8
max_queue_delay_ms = 2_000
[input.image]
range = "0..1"
"""

QUANTISED = """
[input.image]
color = "rgb"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "silent", onnx_models.colours)
    vector = '[input.image]\nrange = "0..1"\n[output.scores]\nanswer = "embedding"\n'
    put_model(models, "vector", onnx_models.colours, toml=vector)
    put_model(models, "plain", onnx_models.colours, toml='[input.image]\nrange = "0..1"\n')
    put_model(models, "forecast", onnx_models.colours, toml=COLOURS.replace('labels = "labels.txt"', ""))
    put_model(models, "gathering", onnx_models.colours, toml=GATHERING)
    put_model(models, "quantised", onnx_models.picture_copy, toml=QUANTISED, datatype="UINT8")
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        yield client


def test_a_picture_is_answered_with_the_best_classes_and_its_size(client):
    got = client.ask(picture_header(), b"1", framed(picture("red")))
    assert len(got) == 4, got
    header, _, scores, size = got
    outputs = {each["name"]: each for each in msgpack.unpackb(header)["outputs"]}
    assert outputs["scores"]["shape"] == [1, 2, 2]
    best = np.frombuffer(scores, np.float32).reshape(2, 2)
    assert best[0].tolist() == [0.0, 1.0]
    assert np.frombuffer(size, np.int64).tolist() == [64, 48]


def test_the_reply_header_says_what_the_outputs_mean(client):
    header, *_ = client.ask(picture_header(), b"1", framed(picture("red")))
    assert msgpack.unpackb(header)["answer"] == {
        "picture": {"width": 64, "height": 48, "fit": "stretch", "color": "rgb"},
        "classes": [{"label": "red", "index": 0, "score": 1.0}, {"label": "green", "index": 1, "score": 0.0}],
    }


def test_the_reply_header_of_several_pictures_has_an_answer_for_each_of_its_own_request(client):
    for colours in (("blue", "red"), ("red", "lime")):
        header, *_ = client.ask(picture_header(shape=(2,)), b"1", framed(*map(picture, colours)))
        answers = msgpack.unpackb(header)["answer"]["answers"]
        assert [each["classes"][0]["label"] for each in answers] == [
            {"lime": "green"}.get(each, each) for each in colours
        ]


def test_bare_outputs_and_the_models_own_tensor_have_no_answer_beside_them(client):
    raw, *_ = client.ask(picture_header(parameters={"raw": True}), b"1", framed(picture("red")))
    image = np.full((1, 3, 8, 8), 0.5, np.float32)
    own, *_ = client.ask(picture_header(datatype="FP32", shape=image.shape), b"1", image.tobytes())
    assert "answer" not in msgpack.unpackb(raw)
    assert "answer" not in msgpack.unpackb(own)


def test_json_with_a_tensor_is_answered_with_classes_where_raw_is_false(client):
    image = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.25] * 64 + [0.75] * 64 + [0] * 64}
    reply = client.ask_json(model="colours", inputs=[image], parameters={"raw": False})
    assert reply["answer"]["classes"][0] == {"label": "green", "index": 1, "score": 0.75}
    assert reply["outputs"][0]["shape"] == [1, 2, 2]


def test_masks_and_embeddings_are_named_by_the_tensors_beside_them(client, daemon):
    header, _, vectors, _ = client.ask(
        picture_header("vector", shape=(2,)), b"1", framed(picture("red"), picture("blue"))
    )
    answers = msgpack.unpackb(header)["answer"]["answers"]
    assert [each["embedding"] for each in answers] == ["scores", "scores"]
    assert np.frombuffer(vectors, np.float32).tolist() == [1, 0, 0, 0, 0, 1]
    with Client(daemon.endpoints[1]) as ours:
        found = ours.infer("vector", pictures=[picture("red"), picture("blue")]).answers
    assert [each.embedding.tolist() for each in found] == [[1, 0, 0], [0, 0, 1]]


def test_an_embedding_in_json_is_its_numbers(client):
    reply = client.ask_json(model="vector", picture=in_base64(picture("lime")))
    assert reply["embedding"] == [0.0, 1.0, 0.0]


READ = {"width": 64, "height": 48, "fit": "stretch", "color": "rgb"}
RED = {"label": "red", "index": 0, "score": 1.0}


def in_base64(data):
    return base64.b64encode(data).decode()


def test_a_picture_in_json_is_answered_with_its_classes_and_how_it_was_read(client):
    reply = client.ask_json(model="colours", picture=in_base64(picture("red")), id="a")
    assert reply == {
        "id": "a",
        "model_name": "colours",
        "model_version": "1",
        "picture": READ,
        "classes": [RED, {"label": "green", "index": 1, "score": 0.0}],
    }


@pytest.mark.parametrize("colours", [["red"], ["blue", "red", "lime"]])
def test_pictures_in_json_are_answered_by_a_list_of_the_same_length(client, colours):
    reply = client.ask_json(model="colours", pictures=[in_base64(picture(each)) for each in colours])
    assert set(reply) == {"id", "model_name", "model_version", "answers"}
    labels = [each["classes"][0]["label"] for each in reply["answers"]]
    assert labels == [{"lime": "green"}.get(each, each) for each in colours]
    assert all(each["picture"] == READ for each in reply["answers"])


def test_a_picture_in_json_gives_bare_outputs_where_raw_is_asked_for(client):
    reply = client.ask_json(model="colours", picture=in_base64(picture("red")), parameters={"raw": True})
    assert reply["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 0.0, 0.0]}]
    assert "classes" not in reply


def test_a_picture_in_json_reports_its_times_and_holds_its_deadline(client):
    text = in_base64(picture("red"))
    assert client.ask_json(model="colours", picture=text, parameters={"timing": True})["timing"]["batch_rows"] == 1
    late = client.ask_json(model="colours", picture=text, timeout_ms=0.000001)
    assert late["error"]["code"] == "deadline_unmeetable"


def test_a_model_that_declares_no_output_answers_with_its_tensors_beside_the_picture(client):
    reply = client.ask_json(model="plain", picture=in_base64(picture("red")))
    assert reply["picture"] == READ
    assert reply["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 0.0, 0.0]}]


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({"picture": "no base64!"}, "decode_failed", "base64"),
        ({"picture": "YQ"}, "decode_failed", "base64"),
        ({"picture": "é"}, "decode_failed", "base64"),
        ({"picture": 7}, "decode_failed", "got int"),
        ({"pictures": []}, "decode_failed", "empty list"),
        ({"pictures": "YQ=="}, "decode_failed", "wanted list"),
        ({"pictures": ["YQ==", None]}, "decode_failed", "got NoneType"),
        ({"picture": "YQ==", "pictures": ["YQ=="]}, "decode_failed", "picture and pictures"),
        ({"picture": "YQ==", "inputs": []}, "decode_failed", "inputs and picture"),
        ({"picture": "YQ=="}, "decode_failed", "no picture can be read from these 1 bytes"),
        ({"picture": ""}, "decode_failed", "0 bytes"),
        ({"picture": "YQ==", "model": "silent"}, "tensor_mismatch", '[input.image]\nrange = "0..1"'),
        ({"pictures": ["YQ=="] * 4000}, "tensor_mismatch", "batch-size"),
        ({"pictures": [""] * 1_000_000}, "decode_failed", "at most"),
    ],
)
def test_a_fault_of_a_picture_in_json_is_said(client, fields, code, told):
    error = client.ask_json(**{"model": "colours", **fields})["error"]
    assert error["code"] == code, error
    assert told in error["message"], error
    assert client.ask_json(model="colours", picture=in_base64(picture("red")))["classes"][0] == RED


def test_pictures_of_several_sizes_and_kinds_are_one_request(client):
    sent = framed(picture("blue"), picture("red", (9, 200), "JPEG"), picture("lime", (224, 224), "WEBP"))
    _, _, scores, size = client.ask(picture_header(shape=(3,)), b"1", sent)
    assert np.frombuffer(scores, np.float32).reshape(3, 2, 2)[:, 0, 0].tolist() == [2, 0, 1]
    assert np.frombuffer(size, np.int64).reshape(3, 2).tolist() == [[64, 48], [9, 200], [224, 224]]


def test_raw_frames_of_any_size_are_pictures(client):
    frame = np.zeros((2, 20, 30, 3), np.uint8)
    frame[0, :, :, 1], frame[1, :, :, 2] = 255, 255
    _, _, scores, _ = client.ask(picture_header(datatype="UINT8", shape=frame.shape), b"1", frame.tobytes())
    assert np.frombuffer(scores, np.float32).reshape(2, 2, 2)[:, 0, 0].tolist() == [1, 2]


def test_the_models_own_tensor_is_served_as_before(client):
    image = np.full((1, 3, 8, 8), 0.5, np.float32)
    header, _, scores = client.ask(picture_header(datatype="FP32", shape=image.shape), b"1", image.tobytes())
    assert msgpack.unpackb(header)["outputs"][0]["shape"] == [1, 3]
    assert np.frombuffer(scores, np.float32).tolist() == [0.5, 0.5, 0.5]


def test_raw_gives_the_bare_outputs_of_a_picture(client):
    header, _, scores = client.ask(picture_header(parameters={"raw": True}), b"1", framed(picture("red")))
    assert msgpack.unpackb(header)["outputs"][0]["shape"] == [1, 3]
    assert np.frombuffer(scores, np.float32).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "data",
    [b"", b"no picture", picture("red")[:60], b"\xff\xd8\xff" + bytes(500)],
    ids=["nothing", "text", "cut", "zeros"],
)
def test_data_that_is_not_a_picture_is_refused_and_nothing_else(client, data):
    client.send(picture_header(), b"bad", framed(data))
    client.send(picture_header(), b"good", framed(picture("red")))
    replies = {reply[1]: reply for reply in (client.receive(), client.receive())}
    assert error_code(replies[b"bad"]) == "decode_failed"
    assert "outputs" in msgpack.unpackb(replies[b"good"][0])


def test_data_that_is_not_a_picture_counts_as_its_senders_fault_and_not_as_the_models(client):
    def refused():
        return client.result("stats")["metrics"]["models"]["colours"]["refused"]

    before = refused()
    frame = np.zeros((1, 0, 8, 3), np.uint8)
    for header, sent in (
        (picture_header(), framed(b"no picture")),
        (picture_header(datatype="UINT8", shape=frame.shape), frame.tobytes()),
    ):
        assert error_code(client.ask(header, b"1", sent)) == "decode_failed"
    after = refused()
    assert after["decode_failed"] == before.get("decode_failed", 0) + 2
    assert after.get("run_failed") == before.get("run_failed")  # which is what a release is judged by


@pytest.mark.parametrize("channels", [0, 2, 4, 8])
def test_frames_of_other_channels_are_a_mismatch(client, channels):
    shape = (1, 8, 8, channels)
    got = client.ask(picture_header(datatype="UINT8", shape=shape), b"1", bytes(64 * channels))
    assert error_code(got) == "tensor_mismatch"
    assert "wanted [rows,height,width,3], RGB" in msgpack.unpackb(got[0])["error"]["message"]


def test_where_bytes_are_the_models_own_tensor_or_a_frame_their_shape_decides(client):
    frame, own = np.full((1, 2, 4, 3), 9, np.uint8), np.full((1, 3, 8, 8), 7, np.uint8)
    for sent, length in ((frame, 2), (own, 1)):
        got = client.ask(picture_header("quantised", "UINT8", sent.shape), b"1", sent.tobytes())
        assert len(msgpack.unpackb(got[0])["outputs"]) == length, got


def test_pictures_of_a_batch_are_answered_beside_one_that_cannot_be_read(client):
    def ask(*sent):
        for index, data in enumerate(sent):
            client.send(picture_header("gathering", timing=True), b"%d" % index, framed(data))
        replies = {int(reply[1]): reply for reply in (client.receive() for _ in sent)}
        return [replies[index] for index in range(len(sent))]

    good = [picture(colour) for colour in ("red", "lime", "blue")] * 3
    assert {msgpack.unpackb(reply[0])["timing"]["batch_rows"] for reply in ask(*good[:8])} == {8}
    replies = ask(*good[:3], b"bad", *good[3:7])
    assert error_code(replies.pop(3)) == "decode_failed"
    found = [np.frombuffer(scores, np.float32)[:3].argmax() for _, _, scores, _ in replies]
    assert found == [0, 1, 2, 0, 1, 2, 0]


def test_decoding_counts_in_the_forecast_of_the_first_picture(client):
    """The model alone runs in less time than is left."""
    got = client.ask(picture_header("forecast", timeout_ms=0.5), b"1", framed(picture("red")))
    assert error_code(got) == "deadline_unmeetable"
    assert "outputs" in msgpack.unpackb(client.ask(picture_header("forecast"), b"2", framed(picture("red")))[0])


def test_a_peer_that_reads_large_replies_all_the_time_misses_none(tmp_path):
    put_model(tmp_path / "models", "copy", onnx_models.picture_copy, shape=("rows", 3, 512, 512), datatype="FP32")
    image = np.zeros((1, 3, 512, 512), np.float32)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        answered = set()
        for number in range(150):  # 470 MB in some seconds: far above what may wait for a peer that does not read
            client.send(picture_header("copy", "FP32", image.shape), b"%d" % number, image.tobytes())
            if number >= 8:
                answered.add(client.receive()[1])
        while len(answered) < 150:
            answered.add(client.receive()[1])
