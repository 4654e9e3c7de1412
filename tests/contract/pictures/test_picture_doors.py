"""The same picture through every door: the same answer, and the same refusal by its code."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from edge_runtime.answers import answer_fields
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, error_from_wire
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.pictures.test_pictures import COLOURS, framed, picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, RawClient, put_model
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

INFER = "/v2/models/colours/infer"
RED, LARGE = picture("red"), picture("blue", (700, 500), "BMP")
READ = {"width": 64, "height": 48, "fit": "stretch", "color": "rgb"}
ANSWER = {
    "picture": READ,
    "classes": [{"label": "red", "index": 0, "score": 1.0}, {"label": "green", "index": 1, "score": 0.0}],
}


STEP = '[[step]]\nname = "look"\nmodel = "colours"\ninputs = {image = "input.photo"}\n[output]\n'
PIPELINES = {
    "whole": 'seen = "look.scores"\npicture_size = "look.picture_size"\n',
    "beside": 'seen = "look.scores"\nbare = "look.picture_size"\n',
}


@pytest.fixture(scope="module")
def doors(broker, tmp_path_factory) -> Iterator[OpenDoors]:
    models = tmp_path_factory.mktemp("models")
    for name in ("colours", "sleepy"):
        put_model(models, name, onnx_models.colours, toml=("on_demand = true\n" if name == "sleepy" else "") + COLOURS)
        (models / name / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "silent", onnx_models.colours)
    for name, outputs in PIPELINES.items():
        (models / name).mkdir()
        (models / name / "pipeline.toml").write_text(STEP + outputs)
    put_model(models, "terms", onnx_models.mlp, toml='[output.y]\nlabels = ["a", "b", "c", "d"]\ntop_k = 2\n')
    pets = (
        '[input.image]\nrange = "0..1"\nfit = "letterbox"\n[output.boxes]\nlayout = "yolov8"\nlabels = "labels.txt"\n'
    )
    put_model(models, "pets", onnx_models.detector, toml=pets)
    (models / "pets" / "labels.txt").write_text("cat\ndog\n")
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0", max_body_bytes=8 << 20),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0"),
    }
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "pictures", **doors) as doors:
        # Start the threads that read large bodies, which no test then leaves.
        with RawHttp(http_url(doors)) as raw, Peer(broker.url) as peer:
            raw.ask("POST", INFER, gzip.compress(b"{}"), content_encoding="gzip")
            peer.ask("edge/pictures/infer/colours", json.dumps({"picture": in_base64(LARGE)}), 1)
        yield doors


def http_url(doors: OpenDoors) -> str:
    return doors.daemon.doors["http"].endpoints[0]


@pytest.fixture
def http(doors) -> Iterator[RawHttp]:
    with RawHttp(http_url(doors)) as http:
        yield http


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def form(*fields: tuple[str, str | None, bytes], boundary: str = "edge", end: bytes = b"--\r\n") -> bytes:
    """A form of name, file name and data of each field."""
    parts = []
    for name, file_name, data in fields:
        file = "" if file_name is None else f'; filename="{file_name}"\r\nContent-Type: application/octet-stream'
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts.append(head.encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}".encode() + end


FORM = "multipart/form-data; boundary=edge"

# ---- every door: pictures in, what the answer says in words, or the error raised ------------------------------------


Ask = Callable[..., dict]


def words(reply: dict) -> dict:
    """What a reply says, without names and ids. Raises the error that it is."""
    if "error" in reply:
        told = reply["error"] if isinstance(reply["error"], dict) else {**reply, "message": reply["error"]}
        raise error_from_wire(told["code"], told["message"])
    return {key: value for key, value in reply.items() if key in {"picture", "classes", "boxes", "answers", "outputs"}}


def json_fields(pictures, options) -> dict:
    shown = [in_base64(each) for each in pictures]
    sent = {"picture": shown[0]} if len(shown) == 1 else {"pictures": shown}
    return {**sent, **({"parameters": options} if options else {})}


@contextmanager
def by_frames(doors: OpenDoors) -> Iterator[Ask]:
    with RawClient(doors.zmq) as client:

        def ask(model, *pictures, timeout_ms=None, **parameters):
            inputs = [{"name": "", "datatype": "BYTES", "shape": [len(pictures)]}]
            header = {"v": 1, "op": "infer", "model": model, "inputs": inputs, "parameters": parameters}
            if timeout_ms is not None:
                header["timeout_ms"] = timeout_ms
            reply = msgpack.unpackb(client.ask(msgpack.packb(header), b"1", framed(*pictures))[0])
            return words({**reply, **reply.get("answer", {})} if "error" not in reply else reply)

        yield lambda *given, **options: {
            key: value for key, value in ask(*given, **options).items() if key != "outputs"
        }


@contextmanager
def by_zmq_json(doors: OpenDoors) -> Iterator[Ask]:
    with RawClient(doors.zmq) as client:
        yield lambda model, *pictures, **options: words(client.ask_json(model=model, **json_fields(pictures, options)))


@contextmanager
def by_mqtt_json(doors: OpenDoors) -> Iterator[Ask]:
    with Peer(doors.mqtt.rpartition("/")[0]) as peer:
        yield lambda model, *pictures, **options: words(
            json.loads(peer.ask(f"edge/pictures/infer/{model}", json.dumps(json_fields(pictures, options)), 1).payload)
        )


@contextmanager
def by_http_json(doors: OpenDoors) -> Iterator[Ask]:
    with RawHttp(http_url(doors)) as http:
        yield lambda model, *pictures, **options: words(
            http.ask("POST", f"/v2/models/{model}/infer", json.dumps(json_fields(pictures, options)).encode()).fields
        )


@contextmanager
def by_http_form(doors: OpenDoors) -> Iterator[Ask]:
    with RawHttp(http_url(doors)) as http:

        def ask(model, *pictures, **options):
            fields = [("picture", "photo.jpg", each) for each in pictures]
            fields += [(name, None, json.dumps(value).encode()) for name, value in options.items()]
            path = f"/v2/models/{model}/infer"
            return words(http.ask("POST", path, form(*fields), content_type=FORM).fields)

        yield ask


@contextmanager
def by_curl(doors: OpenDoors) -> Iterator[Ask]:
    def ask(model, *pictures, **options):
        given = []
        for index, data in enumerate(pictures):
            path = doors.folder / f"{index}.jpg"
            path.write_bytes(data)
            given += ["-F", f"picture=@{path}"]
        for name, value in options.items():
            given += ["-F", f"{name}={json.dumps(value)}"]
        url = f"{http_url(doors)}/v2/models/{model}/infer"
        done = subprocess.run(["curl", "-s", *given, url], capture_output=True, check=True, timeout=ANSWER_S)
        return words(json.loads(done.stdout))

    yield ask


DOORS = {
    "frames": by_frames,
    "zmq-json": by_zmq_json,
    "mqtt-json": by_mqtt_json,
    "http-json": by_http_json,
    "http-form": by_http_form,
    "curl": by_curl,
}


@pytest.fixture(params=DOORS)
def ask(doors, request) -> Iterator[Ask]:
    with DOORS[request.param](doors) as ask:
        yield ask


@pytest.mark.smoke
def test_a_picture_gets_the_same_words_through_every_door(ask):
    for _ in range(3):
        assert ask("colours", RED) == ANSWER


def test_a_pipeline_answers_in_the_words_of_the_model_that_it_ends_in(ask):
    assert ask("whole", RED) == ANSWER
    told = ask("beside", RED)
    assert told["classes"] == ANSWER["classes"]
    assert [each["name"] for each in told.get("outputs", ())] in ([], ["bare"])  # frames have it beside the words
    assert ask("whole", RED, top_k=1) == {**ANSWER, "classes": ANSWER["classes"][:1]}


def test_a_pipelines_bare_outputs_come_by_raw(doors):
    with by_http_json(doors) as ask:
        told = ask("whole", RED, raw=True)
    assert [each["name"] for each in told.pop("outputs")] == ["seen", "picture_size"]
    assert not told


OURS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.fixture(params=OURS)
def client(doors, request) -> Iterator[Client | MqttClient | OipClient]:
    is_oip = request.param in ("http", "grpc")
    url = doors.daemon.doors[request.param].endpoints[0] if is_oip else getattr(doors, request.param)
    with OURS[request.param](url) as client:
        yield client


def test_our_clients_read_a_pipelines_words(client):
    for _ in range(3):
        answer = client.infer("whole", picture=RED).answer
        assert answer_fields([answer], as_list=False) == ANSWER
        assert [each.label for each in client.infer("beside", pictures=[RED, RED]).answers[1].classes] == [
            "red",
            "green",
        ]


ZEROS = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
TERMS = {
    "classes": [{"label": "a", "index": 0, "score": 0.25}, {"label": "b", "index": 1, "score": 0.25}],
}


def test_a_model_of_tensors_answers_our_clients_in_words_where_asked_to(client):
    for _ in range(3):
        result = client.infer("terms", {"x": np.zeros((1, 16), np.float32)}, raw=False)
        assert answer_fields(result.answers, as_list=False) == TERMS
    assert not client.infer("terms", {"x": np.zeros((1, 16), np.float32)}).answers


def test_a_model_of_tensors_answers_json_in_the_same_words_by_every_door(doors):
    asked = {"inputs": [ZEROS], "parameters": {"raw": False}}
    with RawClient(doors.zmq) as zmq, Peer(doors.mqtt.rpartition("/")[0]) as peer, RawHttp(http_url(doors)) as http:
        replies = [
            zmq.ask_json(model="terms", **asked),
            json.loads(peer.ask("edge/pictures/infer/terms", json.dumps(asked), 1).payload),
            http.ask("POST", "/v2/models/terms/infer", json.dumps(asked).encode()).fields,
        ]
        bare = http.ask("POST", "/v2/models/terms/infer", json.dumps({"inputs": [ZEROS]}).encode()).fields
    for reply in replies:
        assert reply["answer"] == TERMS
        assert [each["data"] for each in reply["outputs"]] == [[0.0, 0.25, 1.0, 0.25]]
    assert "answer" not in bare


def test_several_pictures_get_an_answer_each_in_their_order(ask):
    answers = ask("colours", LARGE, RED, picture("lime", (9, 200), "JPEG"))["answers"]
    assert [each["classes"][0]["label"] for each in answers] == ["blue", "red", "green"]
    assert [(each["picture"]["width"], each["picture"]["height"]) for each in answers] == [
        (700, 500),
        (64, 48),
        (9, 200),
    ]


def test_fewer_classes_are_reported_where_fewer_are_wanted_and_no_more_than_declared(ask):
    assert ask("colours", RED, top_k=1) == {**ANSWER, "classes": ANSWER["classes"][:1]}
    for wrong in (0, 3):
        with pytest.raises(EdgeRuntimeError, match="wanted 1 to 2") as caught:
            ask("colours", RED, top_k=wrong)
        assert caught.value.code == "tensor_mismatch"


def test_boxes_are_in_the_pixels_of_the_picture_that_was_sent(ask):
    told = ask("pets", picture("red", (64, 32)))
    assert told["picture"] == {"width": 64, "height": 32, "fit": "letterbox", "color": "rgb"}
    assert told["boxes"] == [
        {"label": "cat", "index": 0, "score": 0.9, "box": [16.0, 0.0, 48.0, 32.0]},
        {"label": "dog", "index": 1, "score": 0.5, "box": [8.0, 0.0, 24.0, 8.0]},
    ]


def test_a_picture_waits_for_a_model_that_loads_on_demand(ask):
    assert ask("sleepy", RED) == ANSWER


REFUSED = [
    ("an unknown model", "nope", RED, {}, "model_not_found", "nope"),
    ("a model without steps", "silent", RED, {}, "tensor_mismatch", '[input.image]\nrange = "0..1"'),
    ("a deadline that is over", "colours", RED, {"timeout_ms": 0.000001}, "deadline_unmeetable", "timeout"),
    ("what is not a picture", "colours", b"no picture", {}, "decode_failed", "no picture can be read"),
    ("a cut picture", "colours", LARGE[:9000], {}, "decode_failed", "no picture can be read"),
    ("nothing", "colours", b"", {}, "decode_failed", "no picture can be read"),
    ("a raw that is not a boolean", "colours", RED, {"raw": 7}, "decode_failed", "raw"),
]


@pytest.mark.parametrize(
    ("model", "data", "options", "code", "told"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_refusal_is_the_same_through_every_door_which_stays_open(ask, model, data, options, code, told):
    with pytest.raises(EdgeRuntimeError) as caught:
        ask(model, data, **options)
    assert caught.value.code == code, caught.value
    assert told in caught.value.message
    assert ask("colours", RED) == ANSWER


def test_one_bad_picture_among_good_ones_fails_its_request_and_no_other(doors):
    with by_zmq_json(doors) as ask, by_http_form(doors) as other:
        for asking in (ask, other):
            with pytest.raises(EdgeRuntimeError) as caught:
                asking("colours", RED, b"bad", RED)
            assert caught.value.code == "decode_failed"
            assert asking("colours", RED) == ANSWER


# ---- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("size", [(64, 48), (700, 500)])
def test_a_body_that_is_a_picture_is_answered_in_words(http, kind, size):
    data = picture("blue", size, kind)
    answer = http.ask("POST", INFER, data, content_type=f"image/{kind.lower()}")
    assert answer.status == 200
    assert answer.fields["model_name"] == "colours"
    assert "id" not in answer.fields
    assert answer.fields["classes"][0]["label"] == "blue"
    assert (answer.fields["picture"]["width"], answer.fields["picture"]["height"]) == size


def test_a_compressed_and_a_chunked_picture_are_read(http):
    packed = http.ask("POST", INFER, gzip.compress(LARGE), content_type="image/bmp", content_encoding="gzip")
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE)
    chunked = http.ask("POST", INFER, chunks, content_type="IMAGE/BMP; q=1", transfer_encoding="chunked")
    assert packed.fields == chunked.fields
    assert packed.fields["classes"][0]["label"] == "blue"


def test_answers_to_pictures_are_compressed_where_the_client_takes_it(http):
    answer = http.ask("POST", INFER, RED, content_type="image/png", accept_encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert words(json.loads(gzip.decompress(answer.body))) == ANSWER


def test_a_forms_fields_are_parameters_and_its_id(http):
    fields = [("picture", "a.png", RED), ("id", None, b"seven"), ("timing", None, b"true"), ("raw", None, b"false")]
    told = http.ask("POST", INFER, form(*fields), content_type=FORM).fields
    assert told["id"] == "seven"
    assert told["parameters"]["batch_rows"] == 1
    assert words(told) == ANSWER


def test_raw_gives_bare_outputs_in_json(http):
    answer = http.ask("POST", INFER, form(("raw", None, b"true"), ("picture", "a.png", RED)), content_type=FORM)
    assert answer.fields["outputs"] == [
        {"name": "scores", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 0.0, 0.0]}
    ]


def test_a_pictures_deadline_counts_from_its_head(http):
    late = http.ask("POST", INFER, RED, content_type="image/png", x_request_timeout_ms="0.001")
    assert (late.status, late.code) == (503, "deadline_unmeetable")
    assert http.ask("POST", INFER, RED, content_type="image/png", x_request_timeout_ms="20000").status == 200


def test_a_version_of_a_model_is_asked_by_its_path(http):
    path = "/v2/models/colours/versions/{}/infer"
    assert http.ask("POST", path.format(1), RED, content_type="image/png").status == 200
    assert http.ask("POST", path.format(2), RED, content_type="image/png").status == 404


def test_a_picture_for_a_model_without_steps_is_refused_before_its_body_comes(http):
    answer = http.ask("POST", "/v2/models/silent/infer", content_type="image/png", content_length=90_000)
    assert (answer.status, answer.code) == (400, "tensor_mismatch")
    assert "[input.image]" in answer.fields["error"]


def test_a_picture_larger_than_the_bound_is_refused_by_its_head(http):
    answer = http.ask("POST", INFER, b"", content_type="image/jpeg", content_length=9 << 20)
    assert answer.status == 413


@pytest.mark.parametrize("kind", ["image/tiff", "image/heic", "image/svg+xml", "image/"])
def test_other_kinds_of_pictures_are_refused_by_name(http, kind):
    answer = http.ask("POST", INFER, RED, content_type=kind)
    assert (answer.status, answer.code) == (415, "decode_failed")
    assert "image/jpeg" in answer.fields["error"]
    assert http.ask("POST", INFER, RED, content_type="image/png").status == 200


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/octet-stream"])
def test_a_body_that_is_another_kind_of_picture_is_refused_by_its_name(http, kind):
    answer = http.ask("POST", INFER, b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", content_type=kind)
    assert (answer.status, answer.code) == (400, "decode_failed")
    assert "heic (HEIF) are not read; wanted JPEG, PNG" in answer.fields["error"]


@pytest.mark.parametrize("data", [RED, LARGE], ids=["small", "large"])
def test_a_body_that_begins_as_a_picture_is_one_whatever_its_type_says(http, data):
    answer = http.ask("POST", INFER, data, content_type="application/x-www-form-urlencoded")
    assert answer.fields == http.ask("POST", INFER, data, content_type="image/*").fields
    assert answer.status == 200


def test_json_with_another_content_type_is_json_as_before(http):
    body = json.dumps({"picture": in_base64(RED)}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        assert words(http.ask("POST", INFER, body, content_type=kind).fields) == ANSWER


# ---- the Open Inference Protocol, by Triton's unmodified clients ----------------------------------------------------


TRITON = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(params=TRITON)
def triton(doors, request):
    """Triton's module of one door, and its client."""
    address = doors.daemon.doors[request.param].endpoints[0].partition("://")[2]
    with TRITON[request.param].InferenceServerClient(address) as client:
        yield TRITON[request.param], client


def sent(module, *pictures, name="image", binary=True):
    made = module.InferInput(name, [len(pictures)], "BYTES")
    array = np.array(pictures, dtype=object)
    return made.set_data_from_numpy(array, **({} if module is tritonclient.grpc else {"binary_data": binary}))


@pytest.mark.parametrize("name", ["image", ""])
def test_tritons_clients_send_a_picture_as_one_element_and_get_the_answers_tensors(triton, name):
    module, client = triton
    for _ in range(3):
        result = client.infer("colours", [sent(module, RED, LARGE, name=name)])
        np.testing.assert_allclose(result.as_numpy("scores"), [[[0, 1], [1, 0]], [[2, 1], [0, 0]]], atol=1e-6)
        assert result.as_numpy("picture_size").tolist() == [[64, 48], [700, 500]]


def test_tritons_clients_get_bare_outputs_by_raw(triton):
    module, client = triton
    result = client.infer("colours", [sent(module, RED)], parameters={"raw": True})
    assert result.as_numpy("scores").tolist() == [[1, 0, 0]]


def test_json_has_a_picture_as_base64_in_one_element(doors):
    given = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [in_base64(RED)]}
    with RawHttp(http_url(doors)) as http, RawClient(doors.zmq) as zmq:
        by_http = http.ask("POST", INFER, json.dumps({"inputs": [given]}).encode()).fields
        by_zmq = zmq.ask_json(model="colours", inputs=[given])
    for reply in (by_http, by_zmq):
        assert [each["data"] for each in reply["outputs"]] == [[0.0, 1.0, 1.0, 0.0], [64, 48]]


def test_classification_has_labels_of_pictures_and_of_the_models_own_tensor(triton):
    module, client = triton
    wanted = [module.InferRequestedOutput("scores", class_count=2)]
    image = np.zeros((1, 3, 8, 8), np.float32)
    image[0, 2] = 0.5
    own = module.InferInput("image", [1, 3, 8, 8], "FP32").set_data_from_numpy(image)
    of_picture = client.infer("colours", [sent(module, RED)], outputs=wanted).as_numpy("scores")
    of_tensor = client.infer("colours", [own], outputs=wanted).as_numpy("scores")
    assert of_picture.tolist() == [[b"1.000000:0:red", b"0.000000:1:green"]]
    assert of_tensor.tolist() == [[b"0.500000:2:blue", b"0.000000:0:red"]]


def test_classification_of_boxes_is_refused_and_of_bare_outputs_is_as_of_a_tensors(triton):
    module, client = triton
    given = sent(module, RED)
    with pytest.raises(InferenceServerException, match="output 'boxes' answers with boxes; wanted classes"):
        client.infer("pets", [given], outputs=[module.InferRequestedOutput("boxes", class_count=1)])
    wanted = [module.InferRequestedOutput("scores", class_count=3)]
    bare = client.infer("colours", [given], outputs=wanted, parameters={"raw": True}).as_numpy("scores")
    assert bare.tolist() == [[b"1.000000:0:red", b"0.000000:1:green", b"0.000000:2:blue"]]


def test_classification_without_labels_is_as_before(triton):
    module, client = triton
    own = module.InferInput("image", [1, 3, 8, 8], "FP32").set_data_from_numpy(np.ones((1, 3, 8, 8), np.float32))
    wanted = [module.InferRequestedOutput("scores", class_count=1)]
    assert client.infer("silent", [own], outputs=wanted).as_numpy("scores").tolist() == [[b"1.000000:0"]]


def test_metadata_and_config_of_a_model_with_steps_are_read_by_unmodified_clients(triton):
    module, client = triton
    options = {"as_json": True} if module is tritonclient.grpc else {}
    metadata = client.get_model_metadata("colours", **options)
    assert metadata["inputs"][0]["datatype"] == "FP32"
    config = client.get_model_config("colours", **options)
    config = config.get("config", config)
    assert config["output"][0]["label_filename"] == "labels.txt"
    steps = json.loads(config["parameters"]["steps"]["string_value"])
    assert steps["inputs"]["image"]["from"] == "picture"
    assert steps["labels"]["scores"] == ["red", "green", "blue"]


def test_metadata_lists_what_a_picture_may_be_sent_as_and_what_then_comes_back(doors, http):
    told = http.ask("GET", "/v2/models/colours").fields
    size = {"name": "picture_size", "datatype": "INT64", "shape": [-1, 2]}
    outputs = [{"name": "scores", "datatype": "FP32", "shape": [-1, 2, 2]}, size]
    assert told["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    assert told["forms"] == [
        {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}], "outputs": outputs},
        {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, -1, -1]}], "outputs": outputs},
    ]
    with RawClient(doors.zmq) as client:
        assert client.result("metadata", model="colours")["forms"] == told["forms"]
        assert "forms" not in client.result("metadata", model="silent")


def test_a_picture_for_the_input_of_a_model_without_steps_is_refused_with_the_lines_to_write(triton):
    module, client = triton
    with pytest.raises(InferenceServerException, match=r"\[input\.image\]"):
        client.infer("silent", [sent(module, RED)])
