"""Clients of a broker that mean harm: one answer each or a counted drop, no state changed, everybody else served."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.contract.doors.mqtt.test_mqtt_faults import eventually
from tests.contract.doors.mqtt.test_mqtt_wire import counted, error_of, wait_status
from tests.contract.running_daemon import floats, header, online_daemon, put_held_model, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.daemon_process import GROWTH_BYTES, resident_bytes
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

X = floats(1, 16)
GOOD = msgpack.packb([msgpack.unpackb(header("mlp")), X.tobytes()])
TOPIC = "edge/dev1/infer/mlp"


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), config="max_queued_messages 0\n") as broker:
        yield broker


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    return models


@pytest.fixture(scope="module")
def daemon(broker, models, tmp_path_factory):
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def attacker(broker, daemon):
    with Peer(broker.url) as peer:
        peer.subscribe("reply/harm", 1)
        yield peer


def is_served(peer) -> bool:
    return msgpack.unpackb(peer.ask(TOPIC, GOOD).payload)[0]["model"] == "mlp"


LEVELS = st.text(st.characters(exclude_characters="+#", exclude_categories=("Cc", "Cn", "Cs")), max_size=30)
"""What a broker lets through: it throws out whoever sends control characters or wildcards."""

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
KEYS = st.sampled_from(
    ["v", "op", "model", "version", "inputs", "outputs", "timeout_ms", "priority", "timing", "parameters", "id",
     "reply_to", "name", "shape", "datatype", "data"]
)  # fmt: skip
NEARLY_REQUESTS = st.dictionaries(KEYS, JSON_VALUES, max_size=6)
PAYLOADS = st.one_of(
    st.binary(max_size=300),
    NEARLY_REQUESTS.map(lambda value: json.dumps(value).encode()),
    st.tuples(NEARLY_REQUESTS, st.lists(st.binary(max_size=80), max_size=3)).map(
        lambda value: _packed([value[0], *value[1]])
    ),
    st.binary(max_size=40).map(lambda tail: GOOD[: len(GOOD) - len(tail)] + tail),
)
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cn", "Cs")), max_size=12)
PROPERTIES = st.lists(st.tuples(st.sampled_from(["version", "priority", "timeout_ms", "x"]), TEXT), max_size=3)


def _packed(value) -> bytes:
    try:
        return msgpack.packb(value)
    except (OverflowError, ValueError):
        return b"\x91\x80"


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    topic=st.one_of(st.just("mlp"), st.just("queued/1"), LEVELS),
    payload=PAYLOADS,
    qos=st.sampled_from([0, 1]),
    content_type=st.sampled_from([None, "application/json", "application/msgpack", "text/plain", "\u00e9"]),
    expiry_s=st.sampled_from([None, 1, 0xFFFFFFFF]),
    user_properties=PROPERTIES,
)
def test_each_message_is_answered_once_and_changes_nothing(attacker, daemon, topic, payload, **options):
    correlation = uuid.uuid4().bytes  # an equal one would be a duplicate
    attacker.publish(
        f"edge/dev1/infer/{topic}", payload, response_topic="reply/harm", correlation=correlation, **options
    )

    assert attacker.next().properties.CorrelationData == correlation
    assert is_served(attacker)
    assert attacker.is_silent(0), "a second reply"
    assert [entry["state"] for entry in daemon.status.stats()["models"]] == ["ready", "ready"]
    assert counted(daemon, "mqtt_errors") == 0


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    response_topic=st.one_of(LEVELS.filter(bool), LEVELS.map("reply/".__add__), LEVELS.map("edge/dev1/".__add__)),
    payload=st.sampled_from([GOOD, b"", b"{", b"\x92\x80"]),
)
def test_replies_are_published_to_allowed_topics_only(attacker, daemon, response_topic, payload):
    before = counted(daemon, "mqtt_forbidden_replies")

    attacker.publish(TOPIC, payload, 1, response_topic=response_topic)

    assert is_served(attacker)
    is_allowed = counted(daemon, "mqtt_forbidden_replies") == before
    assert not is_allowed or response_topic.startswith(("reply/", "edge/dev1/reply/"))
    while not attacker.is_silent(0):
        assert attacker.next().topic == "reply/harm"


def test_a_flood_beyond_the_queue_is_refused_by_message(broker, tmp_path):
    models, gate = tmp_path / "models", tmp_path / "gate"
    put_held_model(models, gate, "max_queue_rows = 4\n")
    gate.touch()
    mqtt = MqttSettings(url=f"{broker.url}/held", reconnect_min_s=0.05)
    payload = json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0]}]})
    with (
        Peer(broker.url) as peer,
        running_daemon(models, tmp_path / "run", mqtt=mqtt, python_models=True, calibrate=False) as daemon,
    ):
        wait_status(peer, "held", b"online")
        peer.subscribe("reply/flood", 1)
        gate.unlink()
        for index in range(200):
            if index == 2:  # so that no more than four wait of the first ones that come together
                eventually(lambda: daemon.status.stats()["metrics"]["models"]["held"]["queue_rows"] == 1)
            peer.publish(
                "edge/held/infer/held", payload, 1, response_topic="reply/flood", correlation=str(index).encode()
            )
        refused = [flooded(peer) for _ in range(195)]  # one runs, four wait
        gate.touch()
        answered = [flooded(peer) for _ in range(5)]

        assert {error_of(reply) for reply in refused} == {"queue_full"}
        assert all("outputs" in json.loads(reply.payload) for reply in answered)
        assert len({reply.properties.CorrelationData for reply in (*refused, *answered)}) == 200
        assert daemon.status.stats()["mqtt"]["connected"]


def flooded(peer):
    while (message := peer.next()).topic != "reply/flood":
        pass
    return message


def test_a_flood_of_hostile_messages_leaves_no_memory_behind(attacker, daemon):
    def flood(seed: int) -> None:
        for index in range(1500):
            attacker.publish(
                f"edge/dev1/infer/{seed}-{index}/x", b"\x91\x80" + b"%d" % index * 50, 1,
                response_topic=f"reply/{seed}/{index}", correlation=b"%d" % index,
            )  # fmt: skip
        assert is_served(attacker)

    flood(0)
    before = resident_bytes()
    flood(1)
    flood(2)
    assert resident_bytes() - before < GROWTH_BYTES


def test_correlation_data_that_is_refused_for_its_length_is_not_kept(attacker, daemon):
    def flood(seed: int) -> None:
        for index in range(500):
            correlation = b"%d-%d" % (seed, index) + b"c" * 60_000
            attacker.publish(TOPIC, GOOD, response_topic="reply/harm", correlation=correlation)
        for _ in range(500):
            assert error_of(attacker.next()) == "decode_failed"

    flood(0)
    before = resident_bytes()
    flood(1)
    assert resident_bytes() - before < GROWTH_BYTES


def test_a_retained_wake_or_request_runs_nothing_when_the_device_comes_back(broker, models, tmp_path):
    with Peer(broker.url) as peer:
        peer.subscribe("reply/stale", 1)
        peer.publish("edge/back/infer/mlp", GOOD, 1, retain=True, response_topic="reply/stale", correlation=b"1")
        peer.publish("edge/back/infer/mlp/1", b'{"op": "models"}', 1, retain=True, response_topic="reply/stale")
        mqtt = MqttSettings(url=f"{broker.url}/back", reconnect_min_s=0.05)
        with running_daemon(models, tmp_path / "run", mqtt=mqtt) as daemon:
            wait_status(peer, "back", b"online")
            assert msgpack.unpackb(peer.ask("edge/back/infer/queued", _for("queued")).payload)[0]["model"] == "queued"
            assert counted(daemon, "mqtt_retained_ignored") == 2
            assert peer.is_silent(0)


def _for(model: str) -> bytes:
    return msgpack.packb([msgpack.unpackb(header(model)), X.tobytes()])


def test_no_topic_names_a_path(attacker, daemon, models):
    before = sorted(Path(models).rglob("*"))

    for name in ("../mlp", "/etc/passwd", "mlp/../mlp", "..", ".", "%2e%2e"):
        reply = attacker.ask(f"edge/dev1/infer/{name}", GOOD)
        assert error_of(reply) in {"model_not_found", "decode_failed"}

    assert sorted(Path(models).rglob("*")) == before
