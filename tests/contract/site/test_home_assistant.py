"""What Home Assistant finds on a broker: the device's discovery message, and that its templates meet what is published.

The format is the page "MQTT" of Home Assistant's documentation, "Device discovery payload".
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager

import jinja2
import numpy as np
import pytest

from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.site.settings import PublishRule
from tests.contract.pictures.test_pictures import COLOURS
from tests.contract.running_daemon import floats, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.fakes.updates import STATUS, FakeUpdates, checked, offered
from tests.models import onnx_models

pytestmark = needs_mosquitto

CONFIG = "homeassistant/device/dev1/config"
BIRTH = "homeassistant/status"

TEMPLATES = jinja2.Environment(autoescape=False)


@pytest.fixture
def models(tmp_path):
    models = tmp_path / "models"
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "my-net.v2_x", onnx_models.mlp)
    return models


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path / "broker") as broker:
        yield broker


@contextmanager
def discovered(models, broker, folder, prefix="homeassistant", **options):
    """A daemon that says what it is, and Home Assistant's place on the broker."""
    settings = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3, home_assistant=prefix)
    with Peer(broker.url) as assistant:
        assistant.subscribe(f"{prefix}/device/+/config", 1)
        with (
            running_daemon(models, folder / "run", mqtt=settings, **options) as daemon,
            Client(daemon.endpoints[1]) as client,
        ):
            yield client, assistant


def components(message):
    return json.loads(message.payload)["components"]


def wait_components(assistant, *keys):
    """The next message that has these components whole."""
    while True:
        found = components(assistant.next())
        if all(len(found.get(key, {})) > 1 for key in keys):
            return found


def test_the_message_has_what_home_assistant_requires(models, broker, tmp_path):
    with discovered(models, broker, tmp_path) as (_, assistant):
        message = assistant.next()
        said = json.loads(message.payload)

    assert (message.topic, message.qos) == (CONFIG, 1)
    assert said["device"]["identifiers"] == ["edge_dev1"]
    assert said["device"]["name"] == "dev1"
    assert said["origin"]["name"] == "edge-runtime"
    assert said["state_topic"] == "edge/dev1/state"
    assert [each["topic"] for each in said["availability"]] == ["edge/dev1/status"]
    expected = {"online", "health", "memory"} | {
        f"{kind}_{name}" for kind in ("version", "rate", "p95") for name in ("mlp", "my-net_-v2__x")
    }
    assert set(said["components"]) - {"temperature"} == expected
    unique_ids = [component["unique_id"] for component in said["components"].values()]
    assert len(set(unique_ids)) == len(unique_ids)
    for key, component in said["components"].items():
        assert re.fullmatch(r"[A-Za-z0-9_-]+", key)
        assert component["unique_id"] == f"edge_dev1_{key}"
        assert component["platform"] in {"sensor", "binary_sensor"}
        assert component["name"]
        assert component["value_template"].startswith("{{ ")


def test_it_is_retained_for_a_home_assistant_that_starts_later(models, broker, tmp_path):
    with discovered(models, broker, tmp_path) as (_, assistant):
        first = assistant.next()
        with Peer(broker.url) as later:
            later.subscribe(CONFIG)
            message = later.next()
    assert message.retain
    assert message.payload == first.payload


def test_the_templates_name_what_the_state_has(models, broker, tmp_path):
    """Without Home Assistant's template engine: each path that a template names is looked up in a real state."""
    with discovered(models, broker, tmp_path) as (client, assistant):
        found = components(assistant.next())
        client.infer("my-net.v2_x", {"x": floats(1, 16)})
        assistant.subscribe("edge/dev1/state", 1)
        state = json.loads(assistant.next().payload)
    for key, component in found.items():
        if key == "online":
            continue
        model = re.search(r"models\.get\('([^']+)', \{\}\)\.get\('(\w+)'\)", component["value_template"])
        if model is not None:
            assert model[2] in state["models"][model[1]], key
        else:
            (field,) = re.findall(r"value_json\.(\w+)", component["value_template"])
            assert state[field] is not None, key


def test_it_is_published_again_when_home_assistant_comes_up(models, broker, tmp_path):
    with discovered(models, broker, tmp_path) as (_, assistant):
        first = assistant.next()
        with Peer(broker.url) as other:
            wait_online(other)
        assistant.publish(BIRTH, b"offline", 1)
        assistant.publish(BIRTH, b"online", 1)
        again = assistant.next()
        assert not again.retain, "a new message, not the broker's copy"
        assert again.payload == first.payload


def test_a_retained_birth_message_counts_as_well(models, broker, tmp_path):
    with Peer(broker.url) as assistant:
        assistant.publish(BIRTH, b"online", 1, retain=True)
    with discovered(models, broker, tmp_path) as (_, assistant):
        assert assistant.next().payload == assistant.next().payload


def test_another_prefix_is_used_everywhere(models, broker, tmp_path):
    with discovered(models, broker, tmp_path, prefix="site/ha") as (_, assistant):
        assert assistant.next().topic == "site/ha/device/dev1/config"
        with Peer(broker.url) as other:
            wait_online(other)
        assistant.publish("site/ha/status", b"online", 1)
        assert assistant.next().topic == "site/ha/device/dev1/config"


@pytest.mark.parametrize(("action", "latest"), [("available", 7), ("put off", 7), ("refused", 1), ("passed over", 1)])
def test_with_updates_each_model_has_its_newest_version_and_there_is_a_button(models, broker, tmp_path, action, latest):
    updates = FakeUpdates()
    updates.told = {**STATUS, "checked": checked(offered(action, model="mlp", version=7))}
    with discovered(models, broker, tmp_path, updates=updates) as (_, assistant):
        found = components(assistant.next())
        assistant.subscribe("edge/dev1/state", 1)
        state = json.loads(assistant.next().payload)
    assert {found["update_mlp"]["platform"], found["update_my-net_-v2__x"]["platform"]} == {"update"}
    assert found["check"]["command_topic"] == "edge/dev1/command/check-update"
    assert (state["models"]["mlp"]["version"], state["models"]["mlp"]["latest"]) == (1, latest)
    assert state["models"]["my-net.v2_x"]["latest"] == 1, "nothing was offered"


def test_each_published_result_has_its_sensors_once_its_model_is_loaded(models, broker, tmp_path):
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "pair", onnx_models.two_in_two_out)
    rules = (PublishRule("colours", topic="site/colours"), PublishRule("pair"), PublishRule("late"))
    with discovered(models, broker, tmp_path, publish=rules) as (client, assistant):
        names = {each.get("name"): each for each in wait_components(assistant, "version_colours").values()}
        assert names["colours label"]["state_topic"] == names["colours score"]["state_topic"] == "site/colours"
        assert "colours count" not in names
        assert not [name for name in names if str(name).startswith("late")]
        put_model(models, "late", onnx_models.colours, toml=COLOURS)
        (models / "late" / "labels.txt").write_text("red\ngreen\nblue\n")
        client.load("late")
        while not any(each.get("name") == "late label" for each in components(assistant.next()).values()):
            pass


def test_a_new_model_is_added_and_one_that_leaves_is_removed(models, broker, tmp_path):
    with discovered(models, broker, tmp_path) as (client, assistant):
        assistant.next()
        put_model(models, "newcomer", onnx_models.mlp)
        client.load("newcomer")
        wait_components(assistant, "version_newcomer", "version_mlp")
        shutil.rmtree(models / "mlp")
        while True:
            found = components(assistant.next())
            if found["version_mlp"] == {"platform": "sensor"}:
                break
        assert found["rate_mlp"] == found["p95_mlp"] == {"platform": "sensor"}
        put_model(models, "mlp", onnx_models.mlp)
        client.load("mlp")
        wait_components(assistant, "version_mlp", "version_newcomer")


def test_a_broker_that_forgot_everything_gets_the_status_again(models, broker, tmp_path):
    with discovered(models, broker, tmp_path) as (_, assistant):
        first = assistant.next()
        broker.kill()
        broker.restart()
        with Peer(broker.url) as again:
            again.subscribe(CONFIG)
            assert again.next().payload == first.payload


def test_without_the_setting_nothing_is_reported_and_no_birth_is_awaited(models, broker, tmp_path):
    settings = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05)
    with Peer(broker.url) as assistant:
        assistant.subscribe("homeassistant/#", 1)
        with running_daemon(models, tmp_path / "run", mqtt=settings) as daemon, Client(daemon.endpoints[1]) as client:
            with Peer(broker.url) as other:
                wait_online(other)
            before = client.stats()["metrics"]["counters"].get("mqtt_messages", 0)
            assistant.publish(BIRTH, b"online", 1)
            assert assistant.next().topic == BIRTH
            assert assistant.is_silent(0.6)
            assert client.stats()["metrics"]["counters"].get("mqtt_messages", 0) == before


def wait_online(peer):
    peer.subscribe("edge/dev1/status", 1)
    while peer.next().payload != b"online":
        pass


def rendered(component, payload):
    """What Home Assistant makes of a message by a component's template."""
    return TEMPLATES.from_string(component["value_template"]).render(value_json=json.loads(payload))


def test_a_number_is_a_sensor_with_its_unit_and_a_text_is_one(broker, tmp_path):
    models = tmp_path / "models"
    put_model(models, "gauge", onnx_models.gauge, toml='[output.y]\nanswer = "number"\nunit = "°C"\n')
    put_model(models, "echo", onnx_models.text_copy, toml='[output.y]\nanswer = "text"\n')
    rules = (PublishRule("gauge"), PublishRule("echo"))
    with discovered(models, broker, tmp_path, publish=rules) as (client, assistant):
        found = wait_components(assistant, "version_gauge", "version_echo")
        number = next(each for key, each in found.items() if key.startswith("number_gauge_"))
        text = next(each for key, each in found.items() if key.startswith("text_echo_"))
        assistant.subscribe("edge/dev1/result/+", 1)
        client.infer("gauge", {"x": np.full((1, 4), 21.5, np.float32)}, raw=False)
        assert rendered(number, assistant.next().payload) == "21.5"
        client.infer("gauge", {"x": np.full((1, 4), 21.5, np.float32)})
        assert rendered(number, assistant.next().payload) == "None"
        client.infer("echo", {"x": np.array([b"good morning"], object)}, raw=False)
        assert rendered(text, assistant.next().payload) == "good morning"
    assert number["unit_of_measurement"] == "°C"
    assert (number["platform"], number["state_class"]) == ("sensor", "measurement")
