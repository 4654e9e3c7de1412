"""Wire v1 over ZeroMQ as outsiders rely on it: every message gets exactly one reply, and only to whom it belongs."""

from __future__ import annotations

import json
import math
import random
import threading

import msgpack
import numpy as np
import pytest
import zmq

from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config, Curve, ZmqSettings
from edge_runtime.daemon.assemble import assemble_daemon
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import ConfigError, StateTaken
from tests.contract.running_daemon import (
    RawClient,
    error_code,
    floats,
    header,
    op,
    put_model,
    running_daemon,
)
from tests.models import onnx_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp, toml='mode = "inline"\n')
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "sum", onnx_models.running_sum)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "sleepy", onnx_models.mlp, toml="on_demand = true\n")
    return models


@pytest.fixture(scope="module")
def daemon_here(models, tmp_path_factory):
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def endpoint(daemon_here):
    return daemon_here.endpoints[1]


@pytest.fixture
def control(daemon_here):
    return daemon_here.endpoints[0]


@pytest.fixture
def client(endpoint):
    with RawClient(endpoint) as client:
        yield client


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_an_answer_carries_the_id_and_one_frame_an_output(client, model):
    x = floats(2, 16)

    reply = client.ask(header(model, (2, 16)), b"my id", x.tobytes())

    fields = msgpack.unpackb(reply[0])
    assert reply[0][0] == 0x84
    assert fields == {
        "v": 1, "model": model, "version": 1, "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 4]}],
    }  # fmt: skip
    assert reply[1] == b"my id"
    np.testing.assert_allclose(np.frombuffer(reply[2], np.float32).reshape(2, 4), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_pipelined_requests_are_each_answered_with_their_own_rows(client, model):
    inputs = [floats(1, 16, seed=seed) for seed in range(200)]
    for index, x in enumerate(inputs):
        client.send(header(model), b"%d" % index, x.tobytes())

    replies = {int(reply[1]): reply for reply in (client.receive() for _ in inputs)}

    for index, x in enumerate(inputs):
        got = np.frombuffer(replies[index][2], np.float32).reshape(1, 4)
        np.testing.assert_allclose(got, expected(x), rtol=1e-4, atol=1e-4)
    assert client.is_silent()


def test_several_inputs_are_matched_by_name_and_outputs_come_in_the_order_asked_for(client):
    inputs = [
        {"name": "b", "datatype": "INT64", "shape": [1, 2]},
        {"name": "a", "datatype": "FP32", "shape": [1, 3]},
    ]
    a, b = floats(1, 3), np.array([[4, 5]])
    for _ in range(4):
        reply = client.ask(header("pair", inputs=inputs, outputs=["twice", "sum"]), b"", b.tobytes(), a.tobytes())

        assert [output["name"] for output in msgpack.unpackb(reply[0])["outputs"]] == ["twice", "sum"]
        assert np.frombuffer(reply[2], np.int64).tolist() == [8, 10]
        np.testing.assert_allclose(np.frombuffer(reply[3], np.float32), (a + a)[0])


def test_several_inputs_are_batched_too(client):
    inputs = [
        {"name": "a", "datatype": "FP32", "shape": [1, 3]},
        {"name": "b", "datatype": "INT64", "shape": [1, 2]},
    ]
    for index in range(100):
        client.send(
            header("pair", inputs=inputs), b"%d" % index, np.full((1, 3), index, np.float32).tobytes(),
            np.array([[index, -index]]).tobytes(),
        )  # fmt: skip
    for _ in range(100):
        reply = client.receive()
        index = int(reply[1])
        assert np.frombuffer(reply[2], np.float32).tolist() == [2.0 * index] * 3
        assert np.frombuffer(reply[3], np.int64).tolist() == [2 * index, -2 * index]


def test_a_req_socket_gets_its_empty_delimiter_back(endpoint):
    with RawClient(endpoint, zmq.REQ) as client:
        for _ in range(4):
            reply = client.ask(header(), b"7", floats(1, 16).tobytes())
            assert reply[1] == b"7"
            assert len(reply) == 3


@pytest.mark.parametrize("request_id", [b"", b"x" * 64, bytes(range(33))])
def test_an_id_of_up_to_64_bytes_is_echoed_unchanged(client, request_id):
    for _ in range(3):
        assert client.ask(header(), request_id, floats(1, 16).tobytes())[1] == request_id


def test_timing_is_reported_when_asked_for(client):
    reply = client.ask(header("queued", timing=True), b"", floats(1, 16).tobytes())

    timing = msgpack.unpackb(reply[0])["timing"]
    assert set(timing) == {"queue_ms", "run_ms", "batch_rows"}
    assert timing["batch_rows"] >= 1


def test_a_model_whose_axis_0_is_not_a_batch_is_run_alone(client):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)

    reply = client.ask(header("sum", (3, 4)), b"", x.tobytes())

    np.testing.assert_allclose(np.frombuffer(reply[2], np.float32).reshape(3, 4), np.cumsum(x, axis=0))


def test_text_travels_as_bytes_elements(client):
    inputs = [{"name": "x", "datatype": "BYTES", "shape": [1, 2]}]
    data = b"\x02\x00\x00\x00hi\x00\x00\x00\x00"

    reply = client.ask(header("text", inputs=inputs), b"", data)

    assert reply[2] == data


def test_json_in_one_frame_is_answered_in_one_frame(client):
    x = floats(1, 16)
    answer = client.ask_json(
        model="mlp", id="a1", inputs=[{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": x.ravel().tolist()}],
        parameters={"timing": True},
    )  # fmt: skip

    assert answer["id"] == "a1"
    assert answer["model_name"] == "mlp"
    assert answer["outputs"][0]["shape"] == [1, 4]
    np.testing.assert_allclose(answer["outputs"][0]["data"], expected(x)[0], rtol=1e-4, atol=1e-4)


def json_request(model, x, request_id, **fields):
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.reshape(-1).tolist()}
    return json.dumps({"id": request_id, "model": model, "inputs": [tensor], **fields}).encode()


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_pipelined_json_is_answered_each_with_its_own_id_and_rows(client, model):
    """The header is known from the third request on: requests then share runs."""
    inputs = [floats(1, 16, seed=seed) for seed in range(100)]
    for index, x in enumerate(inputs):
        client.send(json_request(model, x, index))
        client.send(header(model), b"%d" % index, x.tobytes())

    replies, frames = {}, 0
    for _ in range(2 * len(inputs)):
        reply = client.receive()
        if len(reply) == 1:
            fields = json.loads(reply[0])
            replies[fields["id"]] = fields
        else:
            frames += 1

    assert frames == len(inputs)
    for index, x in enumerate(inputs):
        (output,) = replies[index]["outputs"]
        assert (output["name"], output["shape"], replies[index]["model_name"]) == ("y", [1, 4], model)
        np.testing.assert_allclose([output["data"]], expected(x), rtol=1e-4, atol=1e-4)
    assert client.is_silent()


def test_json_with_a_known_header_and_odd_data_or_id_is_looked_at_closely(client):
    x = floats(1, 16)
    for _ in range(4):
        assert json.loads(client.ask(json_request("mlp", x, None))[0])["id"] is None
    for odd, code in (
        (json_request("mlp", x, 1).replace(b'"data": [', b'"data": [true, '), "tensor_mismatch"),
        (json_request("mlp", x, 1).replace(b'"data": [', b'"data": [0.0, '), "tensor_mismatch"),
        (json_request("mlp", x, 1).replace(b'"data": [', b'"data": [1e400, '), "tensor_mismatch"),
        (json_request("mlp", x, "x" * 65), "decode_failed"),
        (json_request("mlp", x, 1, timeout_ms=0), "deadline_unmeetable"),
    ):
        assert json.loads(client.ask(odd)[0])["error"]["code"] == code
    nested = json_request("mlp", x, "n").replace(b'"data": [', b'"data": [[').replace(b"]}]", b"]]}]")
    named = json.loads(json_request("mlp", x, 10**40))
    named["inputs"][0]["data"][0] = "NaN"
    assert json.loads(client.ask(nested)[0])["id"] == "n"
    answer = json.loads(client.ask(json.dumps(named).encode())[0])
    assert answer["id"] == 10**40
    assert "NaN" in answer["outputs"][0]["data"]


def test_json_from_a_req_socket_gets_its_empty_delimiter_back(endpoint):
    with RawClient(endpoint, zmq.REQ) as client:
        for index in range(4):
            assert json.loads(client.ask(json_request("mlp", floats(1, 16), index))[0])["id"] == index


def test_json_errors_carry_the_id_and_the_same_codes(client):
    missing = client.ask_json(model="nope", id=7, inputs=[])
    assert missing["id"] == 7
    assert missing["error"]["code"] == "model_not_found"
    assert client.ask_json(op="no such op", id="x")["error"]["code"] == "unsupported"
    assert json.loads(client.ask(b"{not json")[0])["error"]["code"] == "decode_failed"


def test_ops_say_what_the_daemon_here_is_and_has(client):
    assert client.result("live") is True
    assert client.result("ready") is True
    listed = {entry["name"]: entry for entry in client.result("models")}
    assert set(listed["mlp"]) == {
        "name", "version", "state", "reason", "backend", "device", "precision", "mode", "memory_bytes", "host",
    }  # fmt: skip
    assert (listed["mlp"]["mode"], listed["queued"]["mode"]) == ("inline", "workers")
    metadata = client.result("metadata", model="mlp")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert metadata["max_frame_bytes"] > 0
    assert metadata["max_batch_rows"] > 0
    assert client.result("stats")["metrics"]["models"]["mlp"]
    assert client.ask_json(op="live", id=1) == {"id": 1, "result": True}


def test_control_ops_are_refused_on_an_infer_endpoint_and_done_on_the_control_endpoint(client, control):
    assert error_code(client.ask(op("unload", model="sum"), b"")) == "forbidden"

    with RawClient(control) as controller:
        assert controller.result("unload", model="sum")[0]["state"] == "unloaded"
        assert error_code(client.ask(header("sum", (3, 4)), b"", bytes(48))) == "not_ready"
        assert controller.result("load", model="sum")[0]["state"] == "ready"
        assert error_code(controller.ask(op("load", model="nope"), b"")) == "model_not_found"
    assert msgpack.unpackb(client.ask(header("sum", (3, 4)), b"", bytes(48))[0])["model"] == "sum"


X = floats(1, 16).tobytes()
MALFORMED = [
    ("no tensor frame", [header(), b"id"], "tensor_mismatch"),
    ("too many tensor frames", [header(), b"id", X, X], "tensor_mismatch"),
    ("a short tensor frame", [header(), b"id", X[:-1]], "tensor_mismatch"),
    ("a long tensor frame", [header(), b"id", X + b"."], "tensor_mismatch"),
    ("a single frame", [header()], "decode_failed"),
    ("an empty message", [b""], "decode_failed"),
    ("an id over 64 bytes", [header(), b"i" * 65, X], "decode_failed"),
    ("a header over 64 KiB", [b"\x84" + bytes(65536), b"id", X], "decode_failed"),
    ("a header that is not msgpack", [b"\xc1\xc1", b"id", X], "decode_failed"),
    ("a header that is not a map", [msgpack.packb([1, 2]), b"id", X], "decode_failed"),
    ("another protocol version", [msgpack.packb({"v": 2, "op": "infer"}), b"id"], "unsupported"),
    ("an unknown op", [op("fly"), b"id"], "unsupported"),
    ("an unknown model", [header("nope"), b"id", X], "model_not_found"),
    ("an unknown version", [header(version=9), b"id", X], "model_not_found"),
    ("an unknown input", [header(inputs=[{"name": "z", "datatype": "FP32", "shape": [1, 16]}]), b"id", X],
     "tensor_mismatch"),
    ("a wrong datatype", [header(inputs=[{"name": "x", "datatype": "INT32", "shape": [1, 16]}]), b"id", X],
     "tensor_mismatch"),
    ("an unknown datatype", [header(inputs=[{"name": "x", "datatype": "FP8", "shape": [1, 16]}]), b"id", X],
     "unsupported"),
    ("a wrong inner shape", [header(shape=(1, 15)), b"id", X[:60]], "tensor_mismatch"),
    ("no rows", [header(shape=(0, 16)), b"id", b""], "tensor_mismatch"),
    ("too many rows", [header(shape=(100_000, 16)), b"id", bytes(6_400_000)], "tensor_mismatch"),
    ("an unknown output", [header(outputs=["z"]), b"id", X], "tensor_mismatch"),
    ("a deadline that is over", [header(timeout_ms=0), b"id", X], "deadline_unmeetable"),
]  # fmt: skip


@pytest.mark.parametrize(("frames", "code"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_a_bad_message_gets_one_clear_error_and_the_next_is_answered(client, frames, code):
    for _ in range(3):
        reply = client.ask(*frames)
        assert error_code(reply) == code
        assert len(reply) == 2
        if len(frames) > 1 and len(frames[1]) <= 64:
            assert reply[1] == frames[1]
    assert client.ask(header(), b"ok", X)[1] == b"ok"
    assert client.is_silent()


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_short_and_long_messages_of_one_client_never_touch_anothers(endpoint, model):
    good_header = header(model)
    with RawClient(endpoint, identity=b"victim") as good, RawClient(endpoint) as bad:
        for round_ in range(30):
            bad.send(good_header)
            bad.send(good_header, b"id")
            bad.send(good_header, b"id", X, b"victim", good_header, b"forged", X)
            good.send(good_header, b"%d" % round_, X)
        assert {good.receive()[1] for _ in range(30)} == {b"%d" % round_ for round_ in range(30)}
        for _ in range(90):
            assert error_code(bad.receive()) in {"decode_failed", "tensor_mismatch"}
        assert good.is_silent()
        assert bad.is_silent()


def test_random_frames_get_one_reply_each_and_change_nothing(endpoint):
    generator = random.Random(7)
    pieces = [header(), X, b"", b"{", b"{}", op("live"), header("queued"), b"\x80", msgpack.packb({"v": 1})]
    with RawClient(endpoint) as client:
        sent = 0
        for _ in range(2_000):
            frames = [
                generator.choice(pieces) if generator.random() < 0.7 else generator.randbytes(generator.randrange(90))
                for _ in range(generator.randrange(1, 6))
            ]
            if frames[0] == b"" and len(frames) == 1:
                frames = [b"-"]
            client.send(*frames)
            sent += 1
        for _ in range(sent):
            client.receive()
        assert client.ask(header(), b"still here", X)[1] == b"still here"
        assert client.is_silent()


def test_a_request_for_a_model_on_demand_waits_for_its_load(client):
    for model in ("sleepy", "sleepy"):
        reply = client.ask(header(model), b"1", X)
        assert msgpack.unpackb(reply[0])["model"] == model


def test_metadata_of_a_model_on_demand_waits_for_its_load_too(models, tmp_path):
    with running_daemon(models, tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        assert client.result("metadata", model="sleepy")["inputs"][0]["name"] == "x"


def test_requests_pipelined_to_a_model_on_demand_are_all_answered(client, control):
    with RawClient(control) as controller:
        controller.result("unload", model="sleepy")
        controller.result("load", model="sleepy")
    for index in range(20):
        client.send(header("sleepy"), b"%d" % index, X)
    assert {int(client.receive()[1]) for _ in range(20)} == set(range(20))


def test_no_request_is_lost_or_failed_over_reloads_under_load(endpoint, control):
    for model in ("mlp", "queued"):
        with RawClient(endpoint) as client, RawClient(control) as controller:
            sent = answered = 0
            for _ in range(15):
                controller.send(op("load", model=model), b"")
                while controller.is_silent():
                    for _ in range(8):
                        client.send(header(model), b"%d" % sent, X)
                        sent += 1
                    for _ in range(8):
                        assert msgpack.unpackb(client.receive()[0]).get("model") == model
                        answered += 1
                controller.receive()
            assert sent == answered > 0
            assert client.is_silent()


def test_a_client_that_never_reads_loses_its_own_replies_only(models, tmp_path):
    settings = ZmqSettings(endpoints=(f"ipc://{tmp_path}/i.sock",), send_bound_bytes=1)
    with running_daemon(models, tmp_path / "run", zmq=settings) as daemon:
        deaf = zmq.Context()
        try:
            socket = deaf.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, 1)
            socket.connect(daemon.endpoints[1])
            big = header(shape=(64, 16)), b"", floats(64, 16).tobytes()
            with RawClient(daemon.endpoints[1]) as good:
                dropped = 0
                for _ in range(400):
                    for _ in range(50):
                        socket.send_multipart(big, zmq.DONTWAIT if dropped else 0)
                    good.ask(header(), b"good", X)
                    dropped = good.result("stats")["metrics"]["counters"].get("replies_dropped", 0)
                    if dropped:
                        break
                assert dropped > 0
                assert good.ask(header(), b"good", X)[1] == b"good"
        finally:
            deaf.destroy(linger=0)


def test_large_replies_to_a_client_that_never_reads_are_bounded_in_bytes(models, tmp_path):
    put_model(models, "wide", onnx_models.wide, size=1024)
    settings = ZmqSettings(endpoints=(f"ipc://{tmp_path}/i.sock",), send_bound_bytes=4 << 20)
    with running_daemon(models, tmp_path / "run", zmq=settings) as daemon, RawClient(daemon.endpoints[1]) as deaf:
        deaf.socket.set(zmq.RCVHWM, 1)
        big = header("wide", (64, 1024)), b"", floats(64, 1024).tobytes()
        with RawClient(daemon.endpoints[1]) as good:
            dropped = 0
            for _ in range(200):
                deaf.send(*big)
                good.ask(*big)
                dropped = good.result("stats")["metrics"]["counters"].get("replies_dropped", 0)
                if dropped:
                    break
            assert dropped > 0
            assert len(good.ask(*big)) == 3


def test_a_client_that_read_many_small_replies_gets_the_large_ones_too(models, tmp_path):
    """Lowering libzmq's send mark on a live connection once wedged it for good."""
    put_model(models, "wide", onnx_models.wide, size=1024)
    with running_daemon(models, tmp_path / "run") as daemon, RawClient(daemon.endpoints[1]) as client:
        for _ in range(150):
            for _ in range(100):
                client.send(header(), b"", X)
            for _ in range(100):
                client.receive()
        big = header("wide", (64, 1024)), b"", floats(64, 1024).tobytes()
        for _ in range(100):
            assert len(client.ask(*big)) == 3
            assert len(client.ask(header(), b"", X)) == 3


def test_a_stoppingdaemon_here_answers_what_it_admitted(models, tmp_path):
    with RawClient(f"ipc://{tmp_path}/run/infer.sock") as client:
        with running_daemon(models, tmp_path / "run"):
            for index in range(100):
                client.send(header("queued"), b"%d" % index, X)
            client.receive()
        replies = 1
        while not client.is_silent(100):
            fields = msgpack.unpackb(client.receive()[0])
            assert fields.get("model") == "queued" or fields["error"]["code"] == "draining"
            replies += 1
    assert replies >= 1


def test_a_seconddaemon_here_on_the_same_endpoint_is_refused(daemon_here, models, tmp_path):
    path = daemon_here.endpoints[1]
    config = Config(models=str(models), state=str(tmp_path), zmq=ZmqSettings(endpoints=(path,)))
    second = assemble_daemon(config)
    try:
        with pytest.raises(ConfigError, match="another daemon serves"):
            second.start()
    finally:
        second.stop()
    with RawClient(path) as client:
        assert client.result("live") is True


def test_a_client_on_the_control_endpoint_counts_as_no_refusal(models, tmp_path):
    with running_daemon(models, tmp_path) as daemon, Client(daemon.endpoints[0]) as client:
        assert client.models()
        assert not any(name.startswith("refused") for name in client.stats()["metrics"]["counters"])


def test_stop_notice_is_the_last_answer_on_its_connection_and_nothing_after_it_was_run(models, tmp_path):
    inputs = floats(1, 16)
    with (
        running_daemon(models, tmp_path) as here,
        RawClient(here.endpoints[1]) as client,
        RawClient(here.endpoints[1]) as other,
    ):
        client.send(op("stop_notice"), b"first")
        client.send(op("stop_notice"), b"notice")
        assert client.receive()[1] == b"first"  # in place of which the second waits
        for index in range(64):
            client.send(header("queued"), b"%d" % index, inputs.tobytes())
        other.ask(op("live"), b"")
        here.stop()
        got = [client.receive()]
        while got[-1][1] != b"notice":
            got.append(client.receive())
        assert msgpack.unpackb(got[-1][0]) == {"v": 1, "result": True}
        assert len({frames[1] for frames in got}) == len(got)
        assert client.is_silent(50)
        assert other.is_silent()  # it asked for no notice


def test_a_daemon_that_stops_takes_its_socket_away_before_its_notice_and_lets_go_of_it_at_the_end(models, tmp_path):
    with running_daemon(models, tmp_path) as here, RawClient(here.endpoints[1]) as client:
        client.send(op("stop_notice"), b"notice")
        client.ask(op("live"), b"1")
        stopping = threading.Thread(target=here.stop)
        stopping.start()
        assert client.receive()[1] == b"notice"
        assert not (tmp_path / "infer.sock").exists()
        stopping.join()
    with running_daemon(models, tmp_path) as here, RawClient(here.endpoints[1]) as client:
        assert client.result("live") is True


def test_a_second_daemon_on_the_same_state_folder_is_refused_until_the_first_has_stopped(models, tmp_path):
    state = str(tmp_path / "first" / "state")
    config = Config(models=str(models), state=state, zmq=ZmqSettings(endpoints=(f"ipc://{tmp_path}/second.sock",)))
    with running_daemon(models, tmp_path / "first") as first:
        second = assemble_daemon(config)
        try:
            with pytest.raises(StateTaken, match=rf"state: '{state}' is another daemon's.*--state"):
                second.start()
        finally:
            second.stop()
        with RawClient(first.endpoints[1]) as client:
            assert client.result("ready") is True
    third = assemble_daemon(config)
    try:
        third.start()
        with RawClient(third.endpoints[1]) as client:
            assert client.result("ready") is True
    finally:
        third.stop()


def test_daemons_whose_state_folder_nobody_named_share_it_and_say_so(models, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = (
        Config(models=str(models), zmq=ZmqSettings(endpoints=(f"ipc://{tmp_path}/{name}/i.sock",)))
        for name in ("first", "second")
    )
    daemons = [assemble_daemon(first), assemble_daemon(second)]
    try:
        for daemon in daemons:
            daemon.start()
        assert "another daemon keeps its measurements here too" in caplog.messages
        with RawClient(daemons[1].endpoints[1]) as client:
            assert client.result("ready") is True
    finally:
        for daemon in daemons:
            daemon.stop()


def test_a_stale_socket_is_replaced_and_permissions_are_for_owner_and_group(models, tmp_path):
    path = tmp_path / "run" / "infer.sock"
    path.parent.mkdir()
    stale = zmq.Context()
    left = stale.socket(zmq.ROUTER)
    left.bind(f"ipc://{path}")
    path.rename(path.with_suffix(".kept"))
    left.close(0)
    stale.term()
    path.with_suffix(".kept").rename(path)
    with running_daemon(models, tmp_path / "run") as daemon:
        assert path.stat().st_mode & 0o777 == 0o660
        with RawClient(daemon.endpoints[1]) as client:
            assert client.result("ready") is True
    assert not path.exists()


def test_a_plain_file_in_the_sockets_place_is_never_removed(models, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    config = Config(models=str(models), state=str(tmp_path), zmq=ZmqSettings(endpoints=(f"ipc://{path}",)))
    daemon = assemble_daemon(config)
    try:
        with pytest.raises(ConfigError, match="not a socket"):
            daemon.start()
    finally:
        daemon.stop()
    assert path.read_text() == "data"


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://192.0.2.1:1", "udp://127.0.0.1:1", "x"])
def test_an_endpoint_open_to_the_network_without_keys_is_refused(models, tmp_path, address):
    config = Config(models=str(models), state=str(tmp_path), zmq=ZmqSettings(endpoints=(address,)))
    daemon = assemble_daemon(config)
    try:
        with pytest.raises(ConfigError):
            daemon.start()
    finally:
        daemon.stop()


def curve_client(endpoint, server_public, secret_pair):
    client = RawClient.__new__(RawClient)
    client.context = zmq.Context()
    client.socket = client.context.socket(zmq.DEALER)
    client.socket.set(zmq.LINGER, 0)
    public, secret = secret_pair
    client.socket.set(zmq.CURVE_SERVERKEY, server_public)
    client.socket.set(zmq.CURVE_PUBLICKEY, public)
    client.socket.set(zmq.CURVE_SECRETKEY, secret)
    client.socket.connect(endpoint)
    return client


def test_curve_lets_listed_keys_in_and_nobody_else(models, tmp_path):
    server_public, server_secret = zmq.curve_keypair()
    listed, stranger = zmq.curve_keypair(), zmq.curve_keypair()
    (tmp_path / "secret").write_bytes(server_secret)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "clients").write_text(f"# laptops\n{listed[0].decode()}  # anna\n")
    curve = Curve(secret_key_file=str(tmp_path / "secret"), client_keys_file=str(tmp_path / "clients"))
    settings = ZmqSettings(endpoints=("tcp://127.0.0.1:*",), control=f"ipc://{tmp_path}/c", curve=curve)
    with running_daemon(models, tmp_path / "run", zmq=settings) as daemon:
        endpoint = daemon.endpoints[1]
        with curve_client(endpoint, server_public, listed) as good:
            assert good.ask(header(), b"in", X)[1] == b"in"
            with curve_client(endpoint, server_public, stranger) as bad, RawClient(endpoint) as plain:
                bad.send(header(), b"", X)
                plain.send(header(), b"", X)
                for _ in range(20):
                    good.ask(header(), b"in", X)
                assert bad.is_silent(300)
                assert plain.is_silent(100)
        with RawClient(daemon.endpoints[0]) as controller:
            assert controller.result("stats")["metrics"]["counters"]["curve_denied"] >= 1


def test_a_daemon_that_serves_over_tcp_alone_has_its_control_socket_where_the_command_line_looks(
    models, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "sockets"))
    monkeypatch.delenv("EDGE_RUNTIME_ENDPOINT", raising=False)
    with running_daemon(models, tmp_path / "run", zmq=ZmqSettings(endpoints=("tcp://127.0.0.1:*",))) as daemon:
        assert daemon.endpoints[0] == f"ipc://{tmp_path}/sockets/control.sock"
        assert main(["models", "load", "mlp"]) == 0
        assert main(["models", "list"]) == 0
        assert "mlp" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="give control="), Client(daemon.endpoints[1]) as client:
            client.load("mlp")


def test_a_frame_over_the_limit_closes_that_connection_only(models, tmp_path):
    settings = ZmqSettings(endpoints=(f"ipc://{tmp_path}/i.sock",), max_frame_bytes=100_000)
    with (
        running_daemon(models, tmp_path / "run", zmq=settings) as daemon,
        RawClient(daemon.endpoints[1]) as greedy,
        RawClient(daemon.endpoints[1]) as good,
    ):
        assert good.result("metadata", model="mlp")["max_frame_bytes"] == 100_000
        greedy.send(header(), b"", bytes(200_000))
        assert greedy.is_silent(200)
        assert good.ask(header(), b"good", X)[1] == b"good"


@pytest.mark.parametrize("timeout_ms", [1e300, 1e18, 1.7e308])
def test_a_deadline_beyond_all_time_never_comes_and_ends_no_thread(client, timeout_ms):
    for index in range(20):
        client.send(header("queued", timeout_ms=timeout_ms), b"%d" % index, X)
    for _ in range(20):
        assert len(client.receive()) == 3
    assert "edge-timer" in {thread.name for thread in threading.enumerate()}


def test_infinite_floats_survive_both_forms(client):
    x = np.full((1, 16), math.inf, np.float32)
    binary = np.frombuffer(client.ask(header(), b"", x.tobytes())[2], np.float32)
    answer = client.ask_json(
        model="mlp",
        inputs=[{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": ["Infinity"] * 16}],
    )
    spelled = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    values = [spelled.get(value, value) for value in answer["outputs"][0]["data"]]
    np.testing.assert_array_equal(np.array(values, np.float32), binary)
