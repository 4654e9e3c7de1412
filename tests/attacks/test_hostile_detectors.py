"""Detectors that mean harm at Frigate's door: the daemon lives, and every other detector is answered by its model."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import zmq

from tests.contract.running_daemon import RawClient, floats, header, put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess
from tests.fakes.frigate_detector import Detector, picture
from tests.models import harmful_models, onnx_models

MODEL_BYTES = 4 << 20

CONFIG = """
calibrate = false
[frigate]
endpoint = "ipc://{folder}/detector"
accept_models = true
max_model_bytes = {bytes}
keep_models = 3
timeout_ms = 10000
models = {{ "mapped.onnx" = "served" }}
[log]
format = "json"
"""

GOOD = {"shape": [1, 3, 32, 32], "dtype": "uint8", "model_type": "yologeneric"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def daemon(folder):
    put_model(folder / "models", "served", onnx_models.finder, label=2)
    put_model(folder / "models", "mlp", onnx_models.mlp)
    with DaemonProcess(folder, config=CONFIG.format(folder=folder, bytes=MODEL_BYTES)) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def endpoint(folder, daemon):
    return f"ipc://{folder}/detector"


@pytest.fixture
def file(tmp_path):
    return onnx_models.finder(tmp_path / "file", label=1)


@pytest.fixture
def good(endpoint):
    with Detector(endpoint, None, name="mapped.onnx") as detector:
        yield detector


def answers(daemon, detector, label=2):
    """Detectors and all other clients are answered."""
    for _ in range(5):
        table = detector.detect_raw(picture())
        assert not detector.errors, detector.errors
        np.testing.assert_allclose(table[0, :2], [label, 1.0], atol=1e-5)
    with RawClient(daemon.endpoint) as client:
        assert client.ask(header(), b"1", floats(1, 16).tobytes())[1] == b"1"


def mutated(generator):
    """A message to a known connection, more or less like a picture's."""
    fields = dict(GOOD)
    values = [None, -1, 0, 2**31, 2**70, 1e300, "x" * 300, [], {}, [[]], True, "float32", "dfine", "ssd", "rfdetr"]
    shapes = [
        [1, 3, 32, 32, 1],
        [3, 32, 32],
        [1, 32, 32, 3],
        [2, 3, 32, 32],
        [1, 3, 2**31, 2**31],
        [1, 3, 0, 32],
        [2**62],
    ]
    for _ in range(generator.randint(0, 2)):
        fields[generator.choice([*fields, "model_request_", "width"])] = generator.choice(values)
    if generator.random() < 0.5:
        fields["shape"] = generator.choice(shapes)
    text = bytearray(json.dumps(fields).encode())
    for _ in range(generator.choice([0, 0, 1, 8])):
        text[generator.randrange(len(text))] = generator.randrange(256)
    return [bytes(text), bytes(generator.choice([0, 1, 3071, 3072, 3073, 12288, 100_000]))]


def test_2000_lying_messages_of_a_known_connection_get_one_answer_each(daemon, endpoint, good):
    generator = random.Random(1)
    with Detector(endpoint, None, name="mapped.onnx") as hostile:
        for _ in range(2000):
            reply = hostile.send(*mutated(generator))
            assert len(reply) == 2
            assert json.loads(reply[0])["shape"] == [20, 6]
            assert len(reply[1]) == 480
        answers(daemon, hostile)
    answers(daemon, good)


def test_answers_wait_for_a_known_connection_that_reads_them_late(daemon, endpoint, good):
    with RawClient(endpoint) as late:
        late.send(b"", json.dumps({"model_request": True, "model_name": "mapped.onnx"}).encode())
        assert json.loads(late.receive()[1])["model_loaded"] is True
        for _ in range(3000):
            late.send(b"", b"[]", b"x")
        answers(daemon, good)
        assert all(late.receive()[2] == bytes(480) for _ in range(3000))


def test_5000_messages_of_unknown_connections_get_no_answer_and_leave_no_memory(daemon, endpoint, good):
    generator = random.Random(2)

    def attack():
        with RawClient(endpoint) as client:
            for _ in range(2500):
                client.send(b"", *mutated(generator))
                client.send(*(generator.randbytes(40) for _ in range(generator.randint(1, 6))))
            answers(daemon, good)
            assert client.is_silent()

    attack()
    before = daemon.resident_bytes()
    attack()
    assert daemon.resident_bytes() - before < GROWTH_BYTES


def test_a_flood_of_handshakes_holds_up_no_picture_and_leaves_no_memory(daemon, endpoint, good):
    request = json.dumps({"model_request": True, "model_name": "m" * 1000}).encode()

    def attack():
        clients = [RawClient(endpoint, identity=b"flood%d" % number) for number in range(100)]
        try:
            for _ in range(50):
                for client in clients:
                    client.send(b"", request)
            answers(daemon, good)
        finally:
            for client in clients:
                client.close()

    attack()
    before = daemon.resident_bytes()
    attack()
    assert daemon.resident_bytes() - before < GROWTH_BYTES


def test_a_model_larger_than_allowed_is_cut_off_and_said_in_the_log(daemon, endpoint, good, tmp_path):
    large = tmp_path / "large.onnx"
    large.write_bytes(bytes(MODEL_BYTES + 1))
    with Detector(endpoint, large, handshake_timeout_ms=4000) as hostile:
        assert not hostile.is_ready
        assert len(hostile.handshakes) == 1, "no answer came"
        answers(daemon, good)
    daemon.wait_said("larger than max_model_bytes")


def test_garbage_as_a_model_is_refused_and_nothing_of_it_stays(daemon, endpoint, good, folder, tmp_path):
    generator = random.Random(3)
    before = sorted((folder / "state").rglob("model.onnx"))
    for data in (b"\x00", b"no model", generator.randbytes(100_000), b"\x08\x08" + generator.randbytes(1000)):
        file = tmp_path / "garbage.onnx"
        file.write_bytes(data)
        with Detector(endpoint, file) as hostile:
            assert hostile.handshakes[1]["model_loaded"] is False
            assert hostile.handshakes[1]["error"]
        answers(daemon, good)
    with RawClient(f"{daemon.endpoint}.control") as client:
        client.ask_json(op="load", model="absent")  # after all that the loader was asked for before
        states = {each["name"]: each["state"] for each in client.result("models")}
    assert "failed" not in states.values(), states
    assert sorted((folder / "state").rglob("model.onnx")) == before


def test_a_model_that_ends_its_library_at_load_ends_a_host_and_nothing_else(daemon, endpoint, good, tmp_path):
    file = harmful_models.crashing_at_load(tmp_path)
    with Detector(endpoint, file) as hostile:
        assert hostile.handshakes[1]["model_loaded"] is False
    answers(daemon, good)


def test_a_picture_that_ends_its_model_ends_a_host_and_the_next_one_answers(daemon, endpoint, good, tmp_path):
    file = harmful_models.dividing_finder(tmp_path)
    with Detector(endpoint, file) as hostile:
        assert hostile.detect_raw(picture(dtype="float32")).any()
        assert not hostile.detect_raw(np.full((1, 3, 32, 32), -(2.0**31), np.float32)).any()
        assert hostile.errors
        answers(daemon, good)
        assert hostile.detect_raw(picture(dtype="float32")).any(), hostile.errors
        assert len(hostile.handshakes) == 2, "the connection stays known"


def test_of_many_models_of_one_client_as_many_stay_as_are_kept(daemon, endpoint, good, folder, tmp_path):
    data = bytearray(onnx_models.finder(tmp_path, label=1).read_bytes())
    with Detector(endpoint, tmp_path / "model.onnx") as first:
        answers(daemon, first, label=1)
        for number in range(12):
            # A field that no reader of protobuf knows: other bytes, the same model.
            (tmp_path / "model.onnx").write_bytes(bytes(data) + b"\xc2\x3e\x04%04d" % number)
            with Detector(endpoint, tmp_path / "model.onnx") as hostile:
                answers(daemon, hostile, label=1)
        answers(daemon, first, label=1)
    with RawClient(f"{daemon.endpoint}.control") as client:
        client.ask_json(op="load", model="absent")
        names = [each["name"] for each in client.result("models") if each["name"].startswith("frigate-")]
    assert len(names) <= 3
    assert sorted(names) == sorted(each.name for each in (folder / "state" / "frigate").iterdir())
    answers(daemon, good)


def test_a_connection_that_sends_one_model_after_another_without_waiting_loads_no_queue_of_them(
    daemon, endpoint, good, file
):
    header, data = json.dumps({"model_data": True, "model_name": "m"}).encode(), file.read_bytes()
    before = daemon.messages().count("loaded")
    with RawClient(endpoint) as hostile:
        for number in range(200):
            hostile.send(b"", header, data + b"\xc2\x3e\x04%04d" % number)
        answers(daemon, good)
        errors = [json.loads(hostile.receive()[1]).get("error", "") for _ in range(100)]
        assert any("wait for their models" in error for error in errors)
    with Detector(endpoint, file) as detector:
        answers(daemon, detector, label=1)
    assert daemon.messages().count("loaded") - before < 50, "half of them would be 100"


def test_a_client_that_sends_pictures_and_reads_nothing_costs_others_nothing(daemon, endpoint, good):
    with RawClient(endpoint) as hostile:
        hostile.send(b"", json.dumps({"model_request": True, "model_name": "mapped.onnx"}).encode())
        assert json.loads(hostile.receive()[1])["model_loaded"] is True
        for _ in range(2000):
            try:
                hostile.socket.send_multipart([b"", json.dumps(GOOD).encode(), bytes(3072)], zmq.DONTWAIT)
            except zmq.Again:
                break
        answers(daemon, good)


def test_nobody_is_answered_by_a_model_that_another_connection_sent(daemon, endpoint, good, file):
    with Detector(endpoint, file) as detector, RawClient(endpoint, zmq.REQ) as hostile:
        answers(daemon, detector, label=1)
        hostile.send(json.dumps({"model_request": True, "model_name": file.name}).encode())
        assert json.loads(hostile.receive()[0]) == {"model_available": False, "model_loaded": False}
        hostile.send(json.dumps(GOOD).encode(), picture().tobytes())
        answers(daemon, detector, label=1)
        assert hostile.is_silent()
