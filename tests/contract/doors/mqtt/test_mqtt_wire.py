"""Wire v1 over MQTT as outsiders rely on it, on a real broker: one reply each, where the request said, in its form."""

from __future__ import annotations

import json
import shutil
import threading

import msgpack
import numpy as np
import pytest

from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import ANSWER_S, floats, header, online_daemon, put_model, running_daemon
from tests.fakes.broker import needs_mosquitto
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

JSON = "application/json"
MSGPACK = "application/msgpack"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "sleepy", onnx_models.mlp, toml="on_demand = true\n")
    return models


@pytest.fixture(scope="module")
def daemon(models, broker, tmp_path_factory):
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1") as daemon:
        yield daemon


@pytest.fixture
def peer(broker, daemon):
    with Peer(broker.url) as peer:
        yield peer


def wait_status(peer, device, word):
    """Read the retained status until it says the word."""
    peer.subscribe(f"edge/{device}/status", 1)
    while peer.next().payload != word:
        pass


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def request(x, model="mlp", **fields):
    """A request in array form."""
    return msgpack.packb([msgpack.unpackb(header(model, x.shape, **fields)), x.tobytes()])


def json_request(x, **fields):
    item = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return json.dumps({"inputs": [item], **fields})


def error_of(reply):
    fields = json.loads(reply.payload) if reply.payload[:1] == b"{" else msgpack.unpackb(reply.payload)[0]
    assert "error" in fields, fields
    assert fields["error"]["message"]
    return fields["error"]["code"]


def counted(daemon, name):
    return daemon.status.stats()["metrics"]["counters"].get(name, 0)


# ---- the two forms --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_a_msgpack_request_is_answered_in_msgpack(peer, model, qos):
    x = floats(2, 16)

    for _ in range(4):  # the third time the header is known
        reply = peer.ask(f"edge/dev1/infer/{model}", request(x, model), qos, content_type=MSGPACK)

        fields, data = msgpack.unpackb(reply.payload)
        assert fields == {
            "v": 1, "model": model, "version": 1, "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 4]}],
        }  # fmt: skip
        np.testing.assert_allclose(np.frombuffer(data, np.float32).reshape(2, 4), expected(x), rtol=1e-4, atol=1e-5)
        assert reply.properties.ContentType == MSGPACK
        assert not hasattr(reply.properties, "PayloadFormatIndicator")
        assert not reply.retain


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_a_json_request_is_answered_in_json(peer, model):
    x = floats(1, 16)

    reply = peer.ask(f"edge/dev1/infer/{model}", json_request(x, id="mine"), content_type=JSON)

    fields = json.loads(reply.payload)
    assert (fields["id"], fields["model_name"], fields["model_version"]) == ("mine", model, "1")
    np.testing.assert_allclose(np.array(fields["outputs"][0]["data"]), expected(x)[0], rtol=1e-4, atol=1e-5)
    assert reply.properties.ContentType == JSON
    assert reply.properties.PayloadFormatIndicator == 1


def test_without_a_content_type_the_first_byte_says_the_form(peer):
    x = floats(1, 16)

    assert peer.ask("edge/dev1/infer/mlp", json_request(x)).payload[:1] == b"{"
    assert peer.ask("edge/dev1/infer/mlp", " \n\t" + json_request(x)).payload[:1] == b"{"
    assert peer.ask("edge/dev1/infer/mlp", request(x)).payload[0] == 0x92


def test_several_inputs_and_chosen_outputs(peer):
    a, b = floats(2, 3), np.arange(4, dtype=np.int64).reshape(2, 2)
    inputs = [
        {"name": "b", "datatype": "INT64", "shape": [2, 2]},
        {"name": "a", "datatype": "FP32", "shape": [2, 3]},
    ]
    for _ in range(4):
        fields = {"v": 1, "op": "infer", "model": "pair", "inputs": inputs, "outputs": ["twice"]}

        reply = peer.ask("edge/dev1/infer/pair", msgpack.packb([fields, b.tobytes(), a.tobytes()]))

        fields, *data = msgpack.unpackb(reply.payload)
        assert [output["name"] for output in fields["outputs"]] == ["twice"]
        assert data == [(b * 2).tobytes()]


def test_the_correlation_data_comes_back_unchanged(peer):
    for correlation in (b"", b"\x00\xff" * 30, b"x" * 1024):
        assert peer.ask("edge/dev1/infer/mlp", request(floats(1, 16)), correlation=correlation)


def test_a_request_without_correlation_data_is_answered_without_it(peer):
    peer.subscribe("reply/plain", 1)

    peer.publish("edge/dev1/infer/mlp", request(floats(1, 16)), response_topic="reply/plain")

    reply = peer.next()
    assert not hasattr(reply.properties, "CorrelationData")
    assert msgpack.unpackb(reply.payload)[0]["model"] == "mlp"


def test_other_ops_are_answered_too(peer):
    assert json.loads(peer.ask("edge/dev1/infer", '{"op": "ready"}').payload)["result"] is True
    assert json.loads(peer.ask("edge/dev1/infer", '{"op": "live"}').payload)["result"] is True
    models = json.loads(peer.ask("edge/dev1/infer", '{"op": "models"}').payload)["result"]
    assert {model["name"] for model in models} == {"mlp", "queued", "pair", "text", "sleepy"}
    fields = msgpack.unpackb(peer.ask("edge/dev1/infer/mlp", msgpack.packb([{"v": 1, "op": "metadata"}])).payload)[0]
    assert fields["result"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    stats = json.loads(peer.ask("edge/dev1/infer", '{"op": "stats"}').payload)["result"]
    assert stats["mqtt"]["device_id"] == "dev1"
    assert stats["mqtt"]["connected"] is True


def test_a_model_on_demand_is_loaded_by_a_request(peer):
    x = floats(1, 16)

    reply = peer.ask("edge/dev1/infer/sleepy", request(x, "sleepy"))

    assert msgpack.unpackb(reply.payload)[0]["model"] == "sleepy"


def test_many_requests_at_once_get_one_reply_each(peer):
    x = floats(64, 16)
    peer.subscribe("reply/many", 1)

    for index in range(500):
        peer.publish(
            f"edge/dev1/infer/{('mlp', 'queued')[index % 2]}",
            request(x[index % 64 : index % 64 + 1], ("mlp", "queued")[index % 2]),
            qos=0,
            response_topic="reply/many",
            correlation=str(index).encode(),
        )
    replies = {}
    for _ in range(500):
        reply = peer.next()
        replies[int(reply.properties.CorrelationData)] = reply.payload

    assert len(replies) == 500
    for index, payload in replies.items():
        values = np.frombuffer(msgpack.unpackb(payload)[1], np.float32)
        row = index % 64
        np.testing.assert_allclose(values, expected(x[row : row + 1])[0], rtol=1e-3, atol=1e-4)


# ---- what is said beside the body -----------------------------------------------------------------------------------


def test_topic_and_user_properties_name_the_version(peer):
    x = floats(1, 16)

    assert msgpack.unpackb(peer.ask("edge/dev1/infer/mlp/1", request(x)).payload)[0]["version"] == 1
    assert error_of(peer.ask("edge/dev1/infer/mlp/7", request(x))) == "model_not_found"
    reply = peer.ask("edge/dev1/infer/mlp", request(x), user_properties=[("version", "7"), ("mine", "?")])
    assert error_of(reply) == "model_not_found"


@pytest.mark.parametrize(
    ("topic", "fields", "user_properties"),
    [
        ("mlp", {"model": "pair"}, ()),
        ("mlp/1", {"model": "mlp", "version": 2}, ()),
        ("mlp/1", {"model": "mlp"}, [("version", "2")]),
        ("mlp", {"model": "mlp"}, [("priority", "10")]),
        ("mlp", {"model": "mlp"}, [("timeout_ms", "soon")]),
        ("mlp", {"model": "mlp"}, [("timeout_ms", "nan")]),
        ("mlp", {"model": "mlp"}, [("version", "9" * 5000)]),
        ("mlp/zero", {"model": "mlp"}, ()),
        ("mlp/1/more", {"model": "mlp"}, ()),
        ("", {"model": "mlp"}, ()),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(peer, topic, fields, user_properties):
    payload = request(floats(1, 16), **fields)

    reply = peer.ask(f"edge/dev1/infer/{topic}".rstrip("/"), payload, user_properties=user_properties)

    assert error_of(reply) == "decode_failed"


def test_a_deadline_comes_from_the_body_a_property_or_the_expiry(peer):
    x = floats(1, 16)
    hopeless = {"timeout_ms": 0.0001}

    assert error_of(peer.ask("edge/dev1/infer/queued", request(x, "queued", **hopeless))) in LATE
    properties = [("timeout_ms", "0.0001")]
    assert error_of(peer.ask("edge/dev1/infer/mlp", request(x), user_properties=properties)) in LATE
    assert error_of(peer.ask("edge/dev1/infer/mlp", json_request(x), user_properties=properties)) in LATE
    # The expiry bounds what the body says, and does not lengthen it.
    reply = peer.ask("edge/dev1/infer/mlp", request(x, **hopeless), expiry_s=60)
    assert error_of(reply) in LATE
    assert msgpack.unpackb(peer.ask("edge/dev1/infer/mlp", request(x), expiry_s=60).payload)[0]["model"] == "mlp"


LATE = {"deadline_unmeetable", "deadline_exceeded"}


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "payload", "code"),
    [
        ("mlp", b"", "decode_failed"),
        ("mlp", b"hello", "decode_failed"),
        ("mlp", b"{", "decode_failed"),
        ("mlp", b"[]", "decode_failed"),
        ("mlp", b"\x90", "decode_failed"),
        ("mlp", msgpack.packb([{"v": 1}, 7]), "decode_failed"),
        ("mlp", msgpack.packb([{"v": 1}]) + b"x", "decode_failed"),
        ("mlp", msgpack.packb([{"v": 2}]), "unsupported"),
        ("mlp", msgpack.packb([{"v": 1, "op": "dance"}]), "unsupported"),
        ("mlp", msgpack.packb([{"v": 1, "op": "load"}]), "forbidden"),
        ("mlp", '{"op": "unload"}', "forbidden"),
        ("mlp", msgpack.packb([{"v": 1, "inputs": []}]), "tensor_mismatch"),
        ("nobody", '{"inputs": []}', "model_not_found"),
        ("no way", '{"inputs": []}', "model_not_found"),
        ("mlp", b"\xdd\xff\xff\xff\xff", "decode_failed"),
        ("mlp", b"\x91" * 5000, "decode_failed"),
        ("mlp", b"{" + b'"a":{' * 5000, "decode_failed"),
    ],
)
def test_a_bad_request_is_answered_with_why(peer, topic, payload, code):
    assert error_of(peer.ask(f"edge/dev1/infer/{topic}", payload)) == code


def test_a_bad_request_is_answered_in_the_form_its_content_type_says(peer):
    assert peer.ask("edge/dev1/infer/mlp", b"hello", content_type=JSON).payload[:1] == b"{"
    assert peer.ask("edge/dev1/infer/mlp", b"{}", content_type=MSGPACK).payload[:1] != b"{"


def test_correlation_data_beyond_the_bound_is_refused_and_still_echoed(peer):
    assert error_of(peer.ask("edge/dev1/infer/mlp", request(floats(1, 16)), correlation=b"x" * 1025)) == "decode_failed"


@pytest.mark.parametrize(
    "topic",
    [
        "elsewhere", "reply", "reply/", "replyx/a", "edge/dev1/reply", "edge/dev2/reply/x", "edge/dev1/infer/mlp",
        "edge/dev1/command/check-update", "edge/dev1/status", "$SYS/x", "$share/reply/x", "fleet/all/wake",
        "homeassistant/status", "reply/" + "x" * 600,
    ],
)  # fmt: skip
def test_a_reply_topic_that_is_not_allowed_gets_no_reply_and_is_counted(broker, daemon, topic):
    with Peer(broker.url) as peer:
        before = counted(daemon, "mqtt_forbidden_replies")
        peer.subscribe(topic, 1)
        while not peer.is_silent(0):
            peer.next()  # what is retained there

        peer.publish("edge/dev1/infer/mlp", request(floats(1, 16)), 1, response_topic=topic, correlation=b"1")
        peer.ask("edge/dev1/infer/mlp", request(floats(1, 16)))  # the first was handled before this one

        assert counted(daemon, "mqtt_forbidden_replies") == before + 1
        while not peer.is_silent(0):
            message = peer.next()
            assert message.retain or message.topic == "edge/dev1/infer/mlp"  # a spy sees the request itself


def test_refusals_without_an_address_are_published_on_the_error_topic_now_and_then(models, broker, tmp_path):
    settings = MqttSettings(url=f"{broker.url}/teller", reconnect_min_s=0.05)
    with Peer(broker.url) as peer, running_daemon(models, tmp_path, mqtt=settings):
        wait_status(peer, "teller", b"online")
        peer.subscribe("edge/teller/error", 1)

        for topic in ("elsewhere", "elsewhere", None):
            peer.publish("edge/teller/infer/mlp", request(floats(1, 16)), 1, response_topic=topic)

        told = json.loads(peer.next().payload)
        assert told["topic"] == "edge/teller/infer/mlp"
        assert told["error"]["code"] == "forbidden"
        assert "'elsewhere'" in told["error"]["message"]


def test_requests_with_nowhere_to_reply_are_counted(broker, daemon):
    with Peer(broker.url) as peer:
        before = counted(daemon, "mqtt_without_reply_topic")

        for _ in range(20):
            peer.publish("edge/dev1/infer/mlp", request(floats(1, 16)), 1)

        peer.ask("edge/dev1/infer/mlp", request(floats(1, 16)))
        assert counted(daemon, "mqtt_without_reply_topic") == before + 20


def test_retained_requests_are_ignored_and_counted(peer, daemon):
    before = counted(daemon, "mqtt_retained_ignored")

    peer.subscribe("reply/retained", 1)
    peer.publish("edge/dev1/infer/mlp", request(floats(1, 16)), 1, retain=True, response_topic="reply/retained")
    peer.publish("edge/dev1/infer/mlp", b"", 1, retain=True)  # takes it back
    peer.ask("edge/dev1/infer/mlp", request(floats(1, 16)))

    assert counted(daemon, "mqtt_retained_ignored") >= before + 1
    assert peer.is_silent(0)


def test_a_duplicate_of_qos_1_is_answered_once(peer, daemon):
    before = counted(daemon, "mqtt_duplicates")
    payload = request(floats(1, 16))
    peer.subscribe("reply/twice", 1)

    for _ in range(5):
        peer.publish("edge/dev1/infer/mlp", payload, 1, response_topic="reply/twice", correlation=b"same")
    peer.publish("edge/dev1/infer/mlp", payload, 1, response_topic="reply/twice", correlation=b"other")

    assert peer.next().properties.CorrelationData == b"same"
    assert peer.next().properties.CorrelationData == b"other"
    assert counted(daemon, "mqtt_duplicates") == before + 4


def test_a_refused_request_of_qos_1_may_be_sent_again(peer):
    first = peer.ask("edge/dev1/infer/queued", request(floats(1, 16), "queued", timeout_ms=0.0001), 1, correlation=b"r")
    again = peer.ask("edge/dev1/infer/queued", request(floats(1, 16), "queued", timeout_ms=0.0001), 1, correlation=b"r")

    assert {error_of(first), error_of(again)} <= LATE


# ---- MQTT 3.1.1 -----------------------------------------------------------------------------------------------------


def test_a_client_of_mqtt_3_says_where_to_reply_inside_its_json(broker, daemon):
    with Peer(broker.url, protocol=4) as peer:
        peer.subscribe("reply/old", 1)

        peer.publish("edge/dev1/infer/mlp", json_request(floats(1, 16), reply_to="reply/old", id=7))

        fields = json.loads(peer.next().payload)
        assert (fields["id"], fields["model_name"]) == (7, "mlp")


@pytest.mark.parametrize("request_id", [b"\x00\x01", "text", 42])
def test_a_client_of_mqtt_3_says_where_to_reply_inside_its_header_map(broker, daemon, request_id):
    with Peer(broker.url, protocol=4) as peer:
        peer.subscribe("reply/old", 1)

        for _ in range(3):
            peer.publish("edge/dev1/infer/mlp", request(floats(1, 16), reply_to="reply/old", id=request_id))

            fields, _data = msgpack.unpackb(peer.next().payload)
            assert (fields["id"], fields["model"]) == (request_id, "mlp")


def test_an_error_finds_a_client_of_mqtt_3_as_well(broker, daemon):
    with Peer(broker.url, protocol=4) as peer:
        peer.subscribe("reply/old", 1)

        peer.publish("edge/dev1/infer/mlp", json.dumps({"reply_to": "reply/old", "id": 1, "inputs": 5}))
        peer.publish("edge/dev1/infer/mlp", msgpack.packb([{"v": 1, "reply_to": "reply/old", "id": 2, "op": "load"}]))

        first, second = json.loads(peer.next().payload), msgpack.unpackb(peer.next().payload)[0]
        assert (first["id"], first["error"]["code"]) == (1, "decode_failed")
        assert (second["id"], second["error"]["code"]) == (2, "forbidden")


def test_a_broker_that_does_not_speak_mqtt_5_is_served_with_3(models, broker, tmp_path):
    with (
        FaultProxy(broker.port, refuse_mqtt5=True) as proxy,
        Peer(broker.url) as peer,
        running_daemon(
            models, tmp_path, mqtt=MqttSettings(url=f"mqtt://127.0.0.1:{proxy.port}/old", reconnect_min_s=0.05)
        ) as daemon,
    ):
        wait_status(peer, "old", b"online")
        peer.subscribe("reply/x", 1)

        peer.publish("edge/old/infer/mlp", json_request(floats(1, 16), reply_to="reply/x", id="a"))

        while (message := peer.next()).topic != "reply/x":
            pass
        assert json.loads(message.payload)["id"] == "a"
        assert daemon.status.stats()["mqtt"]["protocol"] == "3.1.1"


def test_a_broker_that_closes_on_mqtt_5_is_spoken_to_in_3_1_1_by_daemon_and_client(models, broker, tmp_path):
    with FaultProxy(broker.port, close_mqtt5=True) as old, Peer(broker.url) as peer:
        url = f"mqtt://127.0.0.1:{old.port}/shut"
        settings = MqttSettings(url=url, reconnect_min_s=0.05, reconnect_max_s=0.1)
        with running_daemon(models, tmp_path, mqtt=settings) as daemon:
            wait_status(peer, "shut", b"online")
            assert daemon.status.stats()["mqtt"]["protocol"] == "3.1.1"
            made = old.connections
            with MqttClient(url, protocol="3.1.1") as client:
                assert client.infer("mlp", {"x": floats(1, 16)})["y"].shape == (1, 4)
            assert old.connections == made + 1, "a named protocol is not tried for"
            old.cut()
            while peer.next().payload != b"online":
                pass
            assert old.connections == made + 3, "one attempt with 5 tells"


def test_a_broker_that_refused_mqtt_5_once_is_asked_again_after_the_next_loss(models, broker, tmp_path):
    with FaultProxy(broker.port, refuse_mqtt5=True) as old, Peer(broker.url) as peer:
        settings = MqttSettings(url=f"mqtt://127.0.0.1:{old.port}/risen", reconnect_min_s=0.05, reconnect_max_s=0.1)
        with running_daemon(models, tmp_path, mqtt=settings) as daemon:
            wait_status(peer, "risen", b"online")
            assert daemon.status.stats()["mqtt"]["protocol"] == "3.1.1"
            old.cut()
            while peer.next().payload != b"online":
                pass
            # It was asked for 5 first, refused, and served with 3.1.1 again.
            assert old.connections >= 4


# ---- presence -------------------------------------------------------------------------------------------------------


def test_the_state_says_profile_models_versions_and_health(peer, daemon):
    peer.subscribe("edge/dev1/state", 1)

    message = peer.next()

    assert message.retain
    state = json.loads(message.payload)
    assert state["profile"] == daemon.status.stats()["profile"]
    assert state["sandbox"] == daemon.status.stats()["sandbox"]
    assert state["health"] == "ok"
    assert state["models"]["mlp"]["version"] == 1
    assert state["models"]["mlp"]["versions"][0]["state"] == "ready"
    assert state["update"] == {"state": "off"}


def test_a_daemon_says_stopped_when_it_stops_and_its_broker_says_offline_when_it_dies(models, broker, tmp_path):
    with Peer(broker.url) as peer, FaultProxy(broker.port) as proxy:
        settings = MqttSettings(url=f"mqtt://127.0.0.1:{proxy.port}/mortal", reconnect_min_s=0.05)
        with running_daemon(models, tmp_path, mqtt=settings):
            wait_status(peer, "mortal", b"online")
            proxy.cut()
            assert peer.next().payload == b"offline"
            assert peer.next().payload == b"online"
        assert peer.next().payload == b"stopped"
    with Peer(broker.url) as late:
        late.subscribe("edge/mortal/status", 1)
        message = late.next()
        assert (message.payload, message.retain) == (b"stopped", True)


def test_the_state_follows_the_models(models, broker, tmp_path):
    folder = tmp_path / "models"
    put_model(folder, "first", onnx_models.mlp)
    settings = MqttSettings(url=f"{broker.url}/changing", reconnect_min_s=0.05)
    with (
        Peer(broker.url) as peer,
        running_daemon(folder, tmp_path / "run", mqtt=settings) as daemon,
        Client(daemon.endpoints[1], control=daemon.endpoints[0]) as client,
    ):
        peer.subscribe("edge/changing/state", 1)
        while json.loads(peer.next().payload)["models"]["first"]["version"] != 1:
            pass

        client.unload("first")

        while json.loads(peer.next().payload)["models"]["first"]["version"] is not None:
            pass


def retained_state(broker, device):
    """What the broker retains of a device's state, by the rest of the topic; without what was removed."""
    found = {}
    with Peer(broker.url) as late:
        late.subscribe(f"edge/{device}/state/#", 1)
        late.subscribe(f"edge/{device}/status", 1)  # retained, too: it comes after those of the first
        while (message := late.next()).topic != f"edge/{device}/status":
            found[message.topic.removeprefix(f"edge/{device}/state")] = message.payload
    return found


def test_the_state_of_many_models_comes_in_parts_and_none_is_left_when_they_go(models, broker, tmp_path):
    folder, count = tmp_path / "models", 250
    for index in range(count):
        shutil.copytree(models / "sleepy", folder / f"sleepy-{index}")
    settings = MqttSettings(url=f"{broker.url}/many", reconnect_min_s=0.05, groups=("line-1",))
    with Peer(broker.url) as peer, running_daemon(folder, tmp_path / "run", mqtt=settings):
        peer.subscribe("edge/many/state", 1)
        while (state := json.loads(peer.next().payload))["totals"]["states"] != {"on_demand": count}:
            pass
        found = retained_state(broker, "many")
        assert len(found) == 1 + len(state["parts"]) > 1
        assert max(map(len, found.values())) <= 16_384
        assert state["groups"] == ["line-1"]
        assert state["since"] <= state["time"]
        with MqttClient(broker.url) as client:
            device = next(each for each in client.devices() if each.device_id == "many")
        assert set(device.state["models"]) == {f"sleepy-{index}" for index in range(count)}

        for index in range(10, count):
            shutil.rmtree(folder / f"sleepy-{index}")
        while (state := json.loads(peer.next().payload))["totals"]["models"] != 10:
            pass
        assert set(state["models"]) == {f"sleepy-{index}" for index in range(10)}
        assert set(retained_state(broker, "many")) == {""}


# ---- drain ----------------------------------------------------------------------------------------------------------


def test_each_admitted_request_is_answered_before_the_daemon_stops(broker, tmp_path):
    folder = tmp_path / "models"
    put_model(folder, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    replies = []
    with Peer(broker.url) as peer:
        settings = MqttSettings(url=f"{broker.url}/drained", reconnect_min_s=0.05)
        with running_daemon(folder, tmp_path / "run", mqtt=settings):
            wait_status(peer, "drained", b"online")
            peer.subscribe("reply/drain", 1)
            for index in range(200):
                peer.publish(
                    "edge/drained/infer/queued", request(floats(1, 16), "queued"), 1,
                    response_topic="reply/drain", correlation=str(index).encode(),
                )  # fmt: skip
        while len(replies) < 200:
            message = peer.next()
            if message.topic == "reply/drain":
                replies.append(message)
    assert len({reply.properties.CorrelationData for reply in replies}) == 200
    for reply in replies:
        fields = msgpack.unpackb(reply.payload)[0]
        assert "outputs" in fields or fields["error"]["code"] == "draining"


def test_a_connection_to_a_broker_is_served_by_the_i_o_thread_and_made_by_another(daemon):
    transport, names = daemon.doors["mqtt"].transport, []
    was_called = threading.Event()
    assert transport.is_online
    transport.call(lambda: (names.append(threading.current_thread().name), was_called.set()))
    assert was_called.wait(ANSWER_S)
    assert names == ["edge-io"]
    assert "edge-mqtt" in {each.name for each in threading.enumerate()}
