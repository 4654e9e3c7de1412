"""What `[[publish]]` puts on a broker, as those who only listen see it: a real daemon, a real broker."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone

import numpy as np
import pytest
from PIL import Image

from edge_runtime.doors.zmq.client import Client
from edge_runtime.site.settings import PublishRule
from tests.contract.doors.mqtt.test_mqtt_wire import wait_status
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, online_daemon, put_model
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

QUIET_S = 0.6
"""Longer than anything that is published at once takes, by far; a slow machine can only hide a fault, not make one."""


COLOURS = """
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
top_k = 1
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    # Arithmetic may differ in the last bit from run to run, which is a change: what counts changes must be exact.
    put_model(models, "echo", onnx_models.identity, datatype="FP32")
    put_model(models, "slow-echo", onnx_models.identity, datatype="FP32", toml='mode = "workers"\n')
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "undeclared", onnx_models.colours)
    return models


@contextmanager
def publishing(models, broker, folder, *rules, device="dev1"):
    """A daemon with these rules that is online, a client of it, and a listener on everything that it publishes."""
    with Peer(broker.url) as listener:
        listener.subscribe("site/#", 1)
        listener.subscribe(f"edge/{device}/result/#", 1)
        with (
            online_daemon(models, folder / "run", f"{broker.url}/{device}", publish=rules) as daemon,
            Client(daemon.endpoints[1]) as client,
        ):
            yield client, listener


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def outputs(message):
    """A published result's outputs as arrays."""
    return {item["name"]: np.reshape(item["data"], item["shape"]) for item in json.loads(message.payload)["outputs"]}


def assert_is_result(message, x, model):
    said = json.loads(message.payload)
    assert (said["model_name"], said["model_version"], said["id"]) == (model, "1", None)
    np.testing.assert_allclose(outputs(message)["y"], expected(x), rtol=1e-4, atol=1e-4)


def counted(client, name):
    return client.stats()["metrics"]["counters"].get(name, 0)


def wait_counted(client, name, count):
    """Until a counter has reached a number."""
    end_s = time.monotonic() + ANSWER_S
    while counted(client, name) < count:
        assert time.monotonic() < end_s, (name, client.stats()["metrics"]["counters"])


# ---- what ZeroMQ clients are answered -------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_an_answer_is_published_as_open_inference_json_with_its_time(models, broker, tmp_path, model):
    x = floats(2, 16)
    before = datetime.now(timezone.utc)
    with publishing(models, broker, tmp_path, PublishRule(model)) as (client, listener):
        client.infer(model, {"x": x})
        message = listener.next()

    assert message.topic == f"edge/dev1/result/{model}"
    assert (message.qos, message.retain, message.properties.ContentType) == (0, False, "application/json")
    assert_is_result(message, x, model)
    heard = datetime.fromisoformat(json.loads(message.payload)["time"])
    assert abs((heard - before).total_seconds()) < 60
    assert "file" not in json.loads(message.payload)


def values(seed):
    return floats(1, 2, seed=seed)


def assert_echoes(message, x):
    np.testing.assert_array_equal(outputs(message)["y"].astype(np.float32), x)


@pytest.mark.parametrize("model", ["echo", "slow-echo"])
def test_only_changes_are_published_in_their_order(models, broker, tmp_path, model):
    """Each header comes often enough to go all ways: alone, into the cache, and from the cache."""
    with publishing(models, broker, tmp_path, PublishRule(model)) as (client, listener):
        for seed in (1, 1, 1, 1, 2, 2, 2, 1, 1, 3):
            client.infer(model, {"x": values(seed)})
        for seed in (1, 2, 1, 3):
            assert_echoes(listener.next(), values(seed))
        assert listener.is_silent(QUIET_S)
        assert counted(client, "mqtt_results") == 4


@pytest.mark.parametrize("model", ["echo", "slow-echo"])
def test_many_answers_at_once_are_all_heard(models, broker, tmp_path, model):
    with publishing(models, broker, tmp_path, PublishRule(model)) as (client, listener):
        for future in [client.submit(model, {"x": values(1)}) for _ in range(500)]:
            future.result()
        client.infer(model, {"x": values(2)})
        assert_echoes(listener.next(), values(1))
        assert_echoes(listener.next(), values(2))
        assert listener.is_silent(QUIET_S)


def test_a_json_client_is_heard_too_and_a_refusal_is_not_a_result(models, broker, tmp_path):
    with publishing(models, broker, tmp_path, PublishRule("mlp")) as (client, listener):
        with RawClient(client.endpoint) as raw:
            item = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16}
            assert "error" in raw.ask_json(model="mlp", inputs=[{**item, "name": "z"}])
            raw.ask_json(model="mlp", inputs=[item])
        assert_is_result(listener.next(), np.full((1, 16), 0.5, np.float32), "mlp")
        assert listener.is_silent(QUIET_S)


def read_until(listener, x):
    """Results up to the one that echoes `x`: a machine that stalls for an interval gives more, never fewer."""
    found = [outputs(listener.next())["y"].astype(np.float32)]
    while not np.array_equal(found[-1], x):
        found.append(outputs(listener.next())["y"].astype(np.float32))
    return found


@pytest.mark.parametrize("on", ["change", "interval"])
def test_with_an_interval_the_latest_of_many_is_published_when_it_is_over(models, broker, tmp_path, on):
    with publishing(models, broker, tmp_path, PublishRule("echo", on=on, interval_s=1.5)) as (client, listener):
        for seed in range(20):
            client.infer("echo", {"x": values(seed)})
        found = read_until(listener, values(19))
        told = [next(seed for seed in range(20) if np.array_equal(each, values(seed))) for each in found]
        assert told == sorted(set(told))  # which of them were the latest, the machine decides
        assert len(told) < 20
        client.infer("echo", {"x": values(19)})
        if on == "interval":
            assert_echoes(listener.next(), values(19))
        assert listener.is_silent(QUIET_S)


def test_only_the_outputs_named_are_compared_and_published(models, broker, tmp_path):
    rule = PublishRule("pair", outputs=("twice",), topic="site/line1/pair")
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        for number, value in ((1, 0.0), (1, 1.0), (1, 2.0), (2, 2.0)):
            inputs = {"a": np.full((1, 3), value, np.float32), "b": np.full((1, 2), number, np.int64)}
            client.infer("pair", inputs)
        first, second = listener.next(), listener.next()
        assert first.topic == "site/line1/pair"
        assert {name: array.tolist() for name, array in outputs(first).items()} == {"twice": [[2, 2]]}
        assert {name: array.tolist() for name, array in outputs(second).items()} == {"twice": [[4, 4]]}
        client.infer("pair", inputs, outputs=["sum"])
        wait_counted(client, "mqtt_results_without_output", 1)
        assert listener.is_silent(QUIET_S)


def test_an_output_that_the_model_does_not_have_is_counted_and_nobody_is_refused(models, broker, tmp_path):
    with publishing(models, broker, tmp_path, PublishRule("mlp", outputs=("z",))) as (client, listener):
        for _ in range(5):
            client.infer("mlp", {"x": floats(1, 16)})
        wait_counted(client, "mqtt_results_without_output", 5)
        assert counted(client, "mqtt_results") == 0
        assert listener.is_silent(0)


def test_a_retained_result_is_there_for_those_who_come_later(models, broker, tmp_path):
    x = floats(1, 16)
    with publishing(models, broker, tmp_path, PublishRule("mlp", retain=True, qos=1)) as (client, listener):
        client.infer("mlp", {"x": x})
        assert listener.next().qos == 1
        with Peer(broker.url) as late:
            late.subscribe("edge/dev1/result/mlp")
            message = late.next()
            assert message.retain
            assert_is_result(message, x, "mlp")
        listener.publish("edge/dev1/result/mlp", b"", 1, retain=True)


def test_several_rules_of_one_model_are_each_their_own(models, broker, tmp_path):
    rules = [PublishRule("echo", topic="site/a"), PublishRule("echo", topic="site/b", on="interval", interval_s=60.0)]
    with publishing(models, broker, tmp_path, *rules) as (client, listener):
        for seed in range(3):
            client.infer("echo", {"x": values(seed)})
        topics = sorted(listener.next().topic for _ in range(4))
        assert topics == ["site/a", "site/a", "site/a", "site/b"]


def test_without_a_rule_nothing_is_published_and_no_thread_is_started(models, broker, tmp_path):
    with publishing(models, broker, tmp_path) as (client, listener):
        client.infer("mlp", {"x": floats(1, 16)})
        assert "edge-results" not in {thread.name for thread in threading.enumerate()}
        assert listener.is_silent(QUIET_S)


def test_other_models_and_mqtt_clients_are_not_heard(models, broker, tmp_path):
    item = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16}
    with publishing(models, broker, tmp_path, PublishRule("mlp")) as (client, listener):
        client.infer("queued", {"x": floats(1, 16)})
        with Peer(broker.url) as peer:
            peer.ask("edge/dev1/infer/mlp", json.dumps({"inputs": [item]}))
        assert listener.is_silent(QUIET_S)


def test_a_model_that_is_not_there_at_start_is_published_once_it_is(broker, tmp_path):
    models = tmp_path / "models"
    put_model(models, "other", onnx_models.mlp)
    with publishing(models, broker, tmp_path, PublishRule("late")) as (client, listener):
        put_model(models, "late", onnx_models.mlp)
        client.load("late")
        client.infer("late", {"x": floats(1, 16)})
        assert_is_result(listener.next(), floats(1, 16), "late")


def test_publishing_goes_on_after_the_broker_was_away(models, tmp_path):
    rule = PublishRule("mlp")
    with Broker(tmp_path / "broker") as broker, publishing(models, broker, tmp_path, rule) as (client, listener):
        client.infer("mlp", {"x": floats(1, 16, seed=1)})
        listener.next()
        broker.kill()
        client.infer("mlp", {"x": floats(1, 16, seed=2)})
        broker.restart()
        with Peer(broker.url) as again:
            again.subscribe("edge/dev1/result/#", 1)
            wait_status(again, "dev1", b"online")
            client.infer("mlp", {"x": floats(1, 16, seed=3)})
            while not np.allclose(outputs(again.next())["y"], expected(floats(1, 16, seed=3)), atol=1e-4):
                pass


def test_a_result_that_the_broker_would_not_take_is_counted_and_others_go_on(models, tmp_path):
    small = Broker(tmp_path / "broker", config="max_packet_size 2000")
    with small as broker, publishing(models, broker, tmp_path, PublishRule("mlp")) as (client, listener):
        client.infer("mlp", {"x": floats(100, 16)})
        wait_counted(client, "mqtt_results_too_large", 1)
        client.infer("mlp", {"x": floats(1, 16)})
        assert_is_result(listener.next(), floats(1, 16), "mlp")


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drops(tmp_path):
    drops = tmp_path / "drops"
    drops.mkdir()
    return drops


def drop(path, write):
    """Put a file there whole, as a careful writer does."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        write(file)
    part.rename(path)


def wait_gone(path):
    end_s = time.monotonic() + ANSWER_S
    while os.path.lexists(path):
        assert time.monotonic() < end_s, f"{path} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_files_are_run_and_their_results_published_with_their_names(models, broker, tmp_path, drops, model):
    x = floats(1, 16)
    rule = PublishRule(model, source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        drop(drops / "a.npy", lambda file: np.save(file, x))
        message = listener.next()
        assert json.loads(message.payload)["file"] == "a.npy"
        assert_is_result(message, x, model)
        wait_gone(drops / "a.npy")
        drop(drops / "b.json", lambda file: file.write(json.dumps((x[0] * 2).tolist()).encode()))
        assert_is_result(listener.next(), x * 2, model)
        wait_gone(drops / "b.json")
        assert counted(client, "publish_files") == 2
        assert not (drops / ".failed").exists()
        client.infer(model, {"x": x * 3})
        assert listener.is_silent(QUIET_S), "what clients are answered is another source"


def test_files_that_are_there_at_start_are_run_oldest_first_and_once(models, broker, tmp_path, drops):
    for index in (3, 1, 2):
        np.save(drops / f"{index}.npy", floats(1, 16, seed=index))
        os.utime(drops / f"{index}.npy", (1_000 + index, 1_000 + index))
    rule = PublishRule("mlp", source="folder", folder=str(drops))
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        drop(drops / "4.npy", lambda file: np.save(file, floats(1, 16, seed=4)))
        names = [json.loads(listener.next().payload)["file"] for _ in range(4)]
        assert names == ["1.npy", "2.npy", "3.npy", "4.npy"]
        assert listener.is_silent(QUIET_S)
        assert sorted(path.name for path in drops.iterdir()) == ["1.npy", "2.npy", "3.npy", "4.npy"]
        assert counted(client, "publish_files") == 4


def test_a_file_that_changes_is_run_again(models, broker, tmp_path, drops):
    rule = PublishRule("mlp", source="folder", folder=str(drops))
    with publishing(models, broker, tmp_path, rule) as (_, listener):
        for seed in (1, 2):
            drop(drops / "frame.npy", lambda file, seed=seed: np.save(file, floats(1, 16, seed=seed)))
            assert_is_result(listener.next(), floats(1, 16, seed=seed), "mlp")


def test_a_file_for_a_model_that_sees_no_picture_is_answered_in_the_words_that_it_declares(broker, tmp_path, drops):
    models = tmp_path / "models"
    put_model(models, "gauge", onnx_models.gauge, toml='[output.y]\nanswer = "number"\nunit = "°C"\n')
    rule = PublishRule("gauge", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (_, listener):
        drop(drops / "a.npy", lambda file: np.save(file, np.full((1, 4), 21.5, np.float32)))
        said = json.loads(listener.next().payload)
        assert (said["number"], said["file"]) == ({"value": 21.5, "unit": "°C"}, "a.npy")
        assert "outputs" not in said
        wait_gone(drops / "a.npy")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_pictures_are_answered_by_the_steps_that_their_model_declares(models, broker, tmp_path, drops, kind):
    rule = PublishRule("colours", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (_, listener):
        drop(drops / f"a.{kind.lower()}", lambda file: Image.new("RGB", (30, 20), "blue").save(file, kind))
        said = json.loads(listener.next().payload)
        assert [(each["label"], each["index"]) for each in said["classes"]] == [("blue", 2)]
        assert said["picture"] == {"width": 30, "height": 20, "fit": "stretch", "color": "rgb"}
        assert (said["file"], said["model_name"]) == (f"a.{kind.lower()}", "colours")
        wait_gone(drops / f"a.{kind.lower()}")


def test_a_picture_for_a_model_that_declares_no_steps_is_never_guessed(models, broker, tmp_path, drops, caplog):
    rule = PublishRule("undeclared", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        drop(drops / "a.png", lambda file: Image.new("RGB", (30, 20), "blue").save(file, "PNG"))
        wait_counted(client, "publish_files_failed", 1)
        (told,) = client.stats()["mqtt"]["sources"]
        assert told["reason"].startswith("a.png: model 'undeclared' declares no steps for a picture")
        assert "\n[input.image]\nrange = " in told["reason"]
        assert "[input.image]" in next(each.reason for each in caplog.records if "could not be used" in each.message)
        drop(drops / "b.npy", lambda file: np.save(file, np.zeros((1, 3, 8, 8), np.float32)))
        assert json.loads(listener.next().payload)["file"] == "b.npy"
        assert client.stats()["mqtt"]["sources"][0]["reason"] == ""


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pgm", b"P5 1 1 255 a"),
        ("a.gif", b"GIF89a"),
        ("a.jpg", b"\xff\xd8\xff\xe0"),
        ("a.png", b""),
        ("a.jpg", b"text"),
    ],
)
def test_a_file_that_is_not_a_picture_is_set_aside(models, broker, tmp_path, drops, name, data):
    rule = PublishRule("colours", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (client, _):
        drop(drops / name, lambda file: file.write(data))
        wait_counted(client, "publish_files_failed", 1)
        wait_gone(drops / name)
        assert (drops / ".failed" / name).exists()


def npy_of_objects():
    """A header that promises Python objects, and a pickle of one."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x80\x04]."


BAD = {
    "text.txt": lambda path: path.write_text("no tensor"),
    "pickle.npy": lambda path: path.write_bytes(b"\x80\x04."),
    "shape.npy": lambda path: np.save(path, floats(1, 17)),
    "object.npy": lambda path: path.write_bytes(npy_of_objects()),
    "words.json": lambda path: path.write_text('{"x": '),
    "deep.json": lambda path: path.write_text("[" * 100_000),
    "link.npy": lambda path: path.symlink_to("/etc/passwd"),
    "pipe.npy": os.mkfifo,
    "large.npy": lambda path: os.truncate(path, (64 << 20) + 1) if path.touch() is None else None,
    "large.json": lambda path: os.truncate(path, (4 << 20) + 1) if path.touch() is None else None,
}


@pytest.mark.parametrize("remove", [True, False])
def test_bad_files_are_counted_set_aside_and_never_tried_again(models, broker, tmp_path, drops, remove):
    for name, make in BAD.items():
        make(drops / name)
    rule = PublishRule("mlp", source="folder", folder=str(drops), remove=remove)
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        wait_counted(client, "publish_files_failed", len(BAD))
        drop(drops / "good.npy", lambda file: np.save(file, floats(1, 16)))
        assert_is_result(listener.next(), floats(1, 16), "mlp")
        drop(drops / "better.npy", lambda file: np.save(file, floats(1, 16, seed=5)))
        assert_is_result(listener.next(), floats(1, 16, seed=5), "mlp")
        assert counted(client, "publish_files_failed") == len(BAD)
        where = drops / ".failed" if remove else drops
        assert {path.name for path in where.iterdir()} >= set(BAD)


def test_half_written_and_hidden_files_and_folders_are_left_alone(models, broker, tmp_path, drops):
    for name in ("a.npy.part", "b.npy.tmp", ".c.npy"):
        (drops / name).write_bytes(b"half")
    (drops / "folder.npy").mkdir()
    rule = PublishRule("mlp", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        drop(drops / "good.npy", lambda file: np.save(file, floats(1, 16)))
        listener.next()
        assert counted(client, "publish_files_failed") == 0
        wait_gone(drops / "good.npy")
        assert {path.name for path in drops.iterdir()} == {"a.npy.part", "b.npy.tmp", ".c.npy", "folder.npy"}


def test_files_wait_for_a_model_and_for_a_folder_that_are_not_there_yet(broker, tmp_path):
    models, drops = tmp_path / "models", tmp_path / "later"
    put_model(models, "other", onnx_models.mlp)
    rule = PublishRule("late", source="folder", folder=str(drops), remove=True)
    with publishing(models, broker, tmp_path, rule) as (client, listener):
        drops.mkdir()
        drop(drops / "a.npy", lambda file: np.save(file, floats(1, 16)))
        assert listener.is_silent(QUIET_S)
        put_model(models, "late", onnx_models.mlp)
        client.load("late")
        assert_is_result(listener.next(), floats(1, 16), "late")
        assert counted(client, "publish_files_failed") == 0


def test_files_wait_while_there_is_no_broker(models, tmp_path, drops):
    rule = PublishRule("mlp", source="folder", folder=str(drops), remove=True, retain=True)
    with Broker(tmp_path / "broker") as broker, publishing(models, broker, tmp_path, rule) as (client, _):
        broker.kill()
        while client.stats()["mqtt"]["connected"]:
            pass
        drop(drops / "a.npy", lambda file: np.save(file, floats(1, 16)))
        broker.restart()
        with Peer(broker.url) as again:
            again.subscribe("edge/dev1/result/#", 1)
            assert_is_result(again.next(), floats(1, 16), "mlp")
        wait_gone(drops / "a.npy")
        assert counted(client, "publish_files") == 1
