"""Pictures in place of tensors through every client: the same answer, whoever asks and however the picture is given."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from edge_runtime.answers import Answer, ClassScore, PictureRead
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.messages import InferResult
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pictures.declared_steps import why_no_picture
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import ModelSteps, OutputSteps, steps_from_fields
from tests.contract.running_daemon import ANSWER_S, RawClient, grpc_url, http_url, online_daemon, put_model
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

COLOURS = """
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
top_k = 2
"""


def encoded(colour, size=(64, 48), kind="PNG"):
    """The bytes of a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "silent", onnx_models.colours)
    put_model(models, "raw", onnx_models.colours, toml='[input.image]\nfrom = "nv12"\nrange = "0..1"\n')
    put_model(models, "numbers", onnx_models.mlp)
    return models


@pytest.fixture(scope="module")
def daemon(models, broker, tmp_path_factory):
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1", **doors) as daemon:
        yield daemon


Ask = Callable[..., InferResult]


def over_asyncio(endpoint: str) -> Ask:
    async def ask(*words: Any, **options: Any) -> InferResult:
        async with AsyncClient(endpoint) as client:
            return await client.infer(*words, **options)

    return lambda *words, **options: asyncio.run(ask(*words, **options))


@pytest.fixture(params=["zmq", "asyncio", "mqtt", "http", "grpc", "process"])
def ask(request, daemon: Daemon, broker, models) -> Iterator[Ask]:
    """`infer` of each client, of one daemon."""
    if request.param == "asyncio":
        yield over_asyncio(daemon.endpoints[1])
        return
    makers: dict[str, Callable[[], Any]] = {
        "zmq": lambda: Client(daemon.endpoints[1]),
        "mqtt": lambda: MqttClient(f"{broker.url}/dev1"),
        "http": lambda: OipClient(http_url(daemon)),
        "grpc": lambda: OipClient(grpc_url(daemon)),
        "process": lambda: Runtime(models),
    }
    with makers[request.param]() as client:
        yield client.infer


@pytest.fixture
def client(daemon) -> Iterator[Client]:
    with Client(daemon.endpoints[1]) as client:
        yield client


def frame(colour, size=(64, 48)) -> np.ndarray:
    return np.asarray(Image.new("RGB", size, colour))


RED = Answer(PictureRead(64, 48, "stretch", "rgb"), classes=(ClassScore("red", 0, 1.0), ClassScore("green", 1, 0.0)))


# ---- every client ---------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_picture_is_answered_alike_however_it_is_given(ask, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(encoded("red"))
    given = [
        str(path),
        path,
        encoded("red"),
        bytearray(encoded("red")),
        Image.new("RGB", (64, 48), "red"),
        frame("red"),
    ]
    for picture in given:
        result = ask("colours", picture=picture, timeout_ms=20_000)
        assert (result.model, result.version, result.answer) == ("colours", 1, RED)
    assert result["scores"].shape == (1, 2, 2)


def test_pictures_of_any_size_are_answered_each_in_order(ask):
    sent = [encoded("blue"), encoded("red", (9, 200), "JPEG"), encoded("lime", (224, 224), "WEBP")]
    answers = ask("colours", pictures=sent).answers
    assert [each.classes[0].label for each in answers] == ["blue", "red", "green"]
    assert [each.picture.width for each in answers] == [64, 9, 224]


def test_frames_go_together_as_a_list_or_as_one_array(ask):
    frames = [frame("blue"), frame("red")]
    for pictures in (frames, np.stack(frames), [Image.fromarray(each) for each in frames]):
        assert [each.classes[0].label for each in ask("colours", pictures=pictures).answers] == ["blue", "red"]


def test_raw_decides_between_bare_outputs_and_answers(ask):
    bare = ask("colours", picture=encoded("red"), raw=True)
    assert (bare["scores"].tolist(), bare.answers) == ([[1.0, 0.0, 0.0]], ())
    tensor = np.zeros((1, 3, 8, 8), np.float32)
    tensor[:, 1] = 0.5
    own = ask("colours", {"image": tensor})
    assert (own["scores"].tolist(), own.answers) == ([[0.0, 0.5, 0.0]], ())
    read = ask("colours", {"image": tensor}, raw=False)
    assert read.answer == Answer(classes=(ClassScore("green", 1, 0.5), ClassScore("red", 0, 0.0)))


def test_one_output_of_a_picture_is_an_answer_too(ask):
    result = ask("colours", picture=encoded("red"), outputs=["scores"])
    assert list(result.outputs) == ["scores"]
    assert result.answer.classes == RED.classes


def test_bytes_that_are_not_a_picture_fail_as_a_run(ask):
    with pytest.raises(DecodeFailed, match="no picture can be read from these 5 bytes; wanted JPEG, PNG"):
        ask("colours", picture=b"hello")


def test_a_model_without_steps_refuses_with_the_lines_to_write(ask):
    with pytest.raises(TensorMismatch, match=r'declares no steps for a picture[^$]*range = "0..1"'):
        ask("silent", picture=encoded("red"))


# ---- one client -----------------------------------------------------------------------------------------------------


def test_a_submitted_picture_is_answered_too(daemon, broker):
    url = f"{broker.url}/dev1"
    with Client(daemon.endpoints[1]) as zmq, MqttClient(url) as mqtt, OipClient(http_url(daemon)) as oip:
        waiting = [each.submit("colours", picture=encoded("red")) for each in (zmq, mqtt, oip)]
        assert [each.result(ANSWER_S).answer for each in waiting] == [RED] * 3


def test_a_frame_in_shared_memory_is_not_sent(client):
    shared = client.allocate((48, 64, 3), np.uint8)
    shared[...] = frame("red")
    result = client.infer("colours", picture=shared)
    assert result.shared == ("",)
    assert result.answer == RED


def test_gray_pictures_become_what_the_model_takes(client):
    best = client.infer("colours", picture=Image.new("L", (64, 48), 128)).answer.classes
    assert [round(each.score, 2) for each in best] == [0.5, 0.5]


def test_the_frames_that_a_model_of_raw_frames_takes_are_reported(client):
    with pytest.raises(TensorMismatch, match=r'from = "nv12" it takes raw frames only, UINT8 \[rows,height \* 3 / 2'):
        client.infer("raw", picture=encoded("red"))
    with pytest.raises(TensorMismatch, match=r'from = "nv12" it takes raw frames only'):
        client.infer("raw", picture=frame("red"))
    read = client.infer("raw", picture=np.full((48, 64), 128, np.uint8)).answer.picture
    assert (read.width, read.height) == (64, 32)
    with pytest.raises(TensorMismatch, match=r"frames are UINT8 \[rows,height,width,3\], RGB, or"):
        client.infer("colours", picture=np.zeros((48, 64), np.uint8))


def test_one_answer_is_asked_of_what_has_one(client):
    with pytest.raises(ValueError, match="there are 2 answers"):
        _ = client.infer("colours", pictures=[frame("red")] * 2).answer
    with pytest.raises(ValueError, match="gave tensors and no answer"):
        _ = client.infer("numbers", {"x": np.zeros((1, 16), np.float32)}).answer


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is nothing to ask; wanted inputs="),
        ({"picture": b"x", "pictures": [b"x"]}, "got picture= and pictures="),
        ({"picture": 7}, "a picture is int; wanted a path"),
        ({"picture": np.zeros((4, 4, 3))}, r"float64 \[4, 4, 3\]; wanted a path"),
        ({"picture": np.zeros((4, 4, 4), np.uint8)}, r"uint8 \[4, 4, 4\]"),
        ({"picture": np.zeros((2, 4, 4, 3), np.uint8)}, "several frames go by pictures="),
        ({"pictures": np.zeros((4, 4, 3), np.uint8)}, "one frame goes by picture="),
        ({"pictures": []}, "pictures= is empty"),
        ({"pictures": "photo.jpg"}, "pictures= wants a list"),
        ({"pictures": [b"x", np.zeros((4, 4, 3), np.uint8)]}, "one kind in one call"),
        ({"pictures": [np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)]}, "one size, unless"),
    ],
)
def test_a_value_that_is_not_a_picture_is_reported_before_it_is_sent(client, options, said):
    with pytest.raises(TensorMismatch, match=said):
        client.infer("colours", **options)


def test_files_that_are_not_pictures_are_named(client, tmp_path):
    (tmp_path / "notes.jpg").write_text("no picture")
    with pytest.raises(TensorMismatch, match=r"notes\.jpg is not a picture; wanted a JPEG, PNG, WebP, BMP or GIF"):
        client.infer("colours", picture=tmp_path / "notes.jpg")
    with pytest.raises(TensorMismatch, match="is a folder"):
        client.infer("colours", picture=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"away\.jpg"):
        client.infer("colours", picture=tmp_path / "away.jpg")


# ---- the wire -------------------------------------------------------------------------------------------------------


def ask_without_a_name(daemon, model):
    """Send a red picture as the input that has no name; the reply's header."""
    inputs = [{"name": "", "datatype": "BYTES", "shape": [1]}]
    data = encoded("red")
    with RawClient(daemon.endpoints[1]) as client:
        header = msgpack.packb({"v": 1, "op": "infer", "model": model, "inputs": inputs})
        return msgpack.unpackb(client.ask(header, b"1", len(data).to_bytes(4, "little") + data)[0])


def test_an_input_without_a_name_is_the_one_that_takes_pictures(daemon):
    assert [each["name"] for each in ask_without_a_name(daemon, "colours")["outputs"]] == ["scores", "picture_size"]


def test_a_picture_for_a_model_without_steps_is_refused_with_the_lines_to_write(daemon):
    error = ask_without_a_name(daemon, "silent")["error"]
    assert error["code"] == "tensor_mismatch"
    assert '[input.image]\nrange = "0..1"' in error["message"]
    assert '[output.scores]\nanswer = "classes"' in error["message"]


def test_a_picture_for_a_model_that_can_take_none_says_what_it_takes(daemon):
    error = ask_without_a_name(daemon, "numbers")["error"]
    assert error["code"] == "tensor_mismatch"
    assert "x FP32 [-1, 16]" in error["message"]


@pytest.mark.parametrize(
    ("shape", "lines"),
    [
        ((-1, 3, -1, -1), "[input.image]\nsize = [224, 224]  # height, width\nrange"),
        ((-1, 28, 28, 1), '[input.image]\ncolor = "gray"\nrange'),
        ((-1, 64), '[input.image]\ncolor = "gray"\nsize = [8, 8]\nrange'),
    ],
)
def test_the_lines_to_write_fit_the_model(shape, lines):
    assert lines in why_no_picture("digits", ModelSpec((TensorSpec("image", "FP32", shape),), ()))


def test_metadata_has_the_steps_as_model_toml_declares_them(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        found = client.result("metadata", model="colours")["steps"]
        assert "steps" not in client.result("metadata", model="silent")
    assert found["inputs"]["image"]["from"] == "picture"
    assert steps_from_fields(found) == ModelSteps(
        {"image": PictureSteps(fit="stretch", filter="bilinear", range="0..1")},
        {"scores": OutputSteps(labels="labels.txt", top_k=2, overlap=0.45)},
        {"scores": ("red", "green", "blue")},
    )


def test_steps_of_a_newer_daemon_are_read_without_what_is_new(daemon):
    fields = {"inputs": {"image": {"from": "frames", "sharpen": 3}}, "outputs": {}, "labels": {}, "sounds": {}}
    assert steps_from_fields(fields) == ModelSteps({"image": PictureSteps(source="frames")})
