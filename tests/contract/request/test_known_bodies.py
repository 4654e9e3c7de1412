"""JSON and pictures that come again are planned once, and answered as if each came first: over every door."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import error_from_wire
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.pictures.test_pictures import COLOURS, picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import RawClient, http_url, put_model
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

Ask = Callable[[str, Any, str | None], dict]
"""Asks a model with a body and an id; returns the fields of the answer. Raises the error that it is."""

TIMES = 5
"""From the third on a body is known."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, mode in (("inline", "inline"), ("queued", "workers"), ("later", "workers")):
        put_model(models, name, onnx_models.mlp, toml=f'mode = "{mode}"\n')
    put_model(models, "hosted", onnx_models.mlp, toml='isolation = "always"\n')
    put_model(models, "text", onnx_models.text_copy)
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    return models


@pytest.fixture(scope="module")
def doors(broker, models, tmp_path_factory) -> Iterator[OpenDoors]:
    http = HttpSettings(endpoint="127.0.0.1:0")
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "known", http=http) as doors:
        yield doors


@contextmanager
def asked_by(door: str, doors: OpenDoors, broker) -> Iterator[Ask]:
    """How a door is asked."""
    with ExitStack() as stack:
        if door == "zmq":
            raw = stack.enter_context(RawClient(doors.zmq))

            def ask(model: str, body: Any, request_id: str | None) -> dict:
                assert isinstance(body, dict)
                return json.loads(raw.ask(json.dumps({"model": model, "id": request_id, **body}).encode())[0])
        elif door == "mqtt":
            peer = stack.enter_context(Peer(broker.url))

            def ask(model: str, body: Any, request_id: str | None) -> dict:
                payload = body if isinstance(body, bytes) else json.dumps({"id": request_id, **body}).encode()
                return json.loads(peer.ask(f"edge/known/infer/{model}", payload).payload)
        else:
            http = stack.enter_context(RawHttp(http_url(doors.daemon)))
            named = {"accept-encoding": "gzip"} if door == "http, compressed" else {}

            def ask(model: str, body: Any, request_id: str | None) -> dict:
                payload = body if isinstance(body, bytes) else json.dumps({"id": request_id, **body}).encode()
                response = http.ask("POST", f"/v2/models/{model}/infer", payload, **named)
                return json.loads(inflated(response))

        yield ask


def inflated(response) -> bytes:
    import gzip

    return gzip.decompress(response.body) if response.headers.get("content-encoding") == "gzip" else response.body


def said(reply: dict) -> dict:
    """An answer but its id. Raises the error that it is."""
    if "error" in reply:
        error = reply["error"] if isinstance(reply["error"], dict) else {"message": reply["error"], **reply}
        raise error_from_wire(error["code"], error["message"])
    return {key: value for key, value in reply.items() if key != "id"}


def tensor(values: list, shape: tuple[int, ...] = (1, 16), datatype: str = "FP32", **fields: Any) -> dict:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": list(shape), "data": values, **fields}]}


DOORS = ["zmq", "mqtt", "http", "http, compressed"]
ROWS = [np.random.default_rng(seed).normal(size=16).astype(np.float32) for seed in range(2)]


def wanted(row: np.ndarray) -> np.ndarray:
    first, second = onnx_models.mlp_weights()
    return np.maximum(row @ first, 0) @ second


@pytest.mark.smoke
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["inline", "queued", "hosted"])
def test_json_that_comes_again_is_answered_with_its_own_data_and_id(doors, broker, door, model):
    with asked_by(door, doors, broker) as ask:
        for number in range(2 * TIMES):
            row = ROWS[number % 2]
            reply = ask(model, tensor(row.tolist()), f"id {number}")
            assert reply["id"] == f"id {number}"
            assert (reply["model_name"], reply["model_version"]) == (model, "1")
            (output,) = reply["outputs"]
            assert (output["name"], output["datatype"], output["shape"]) == ("y", "FP32", [1, 4])
            np.testing.assert_allclose(output["data"], wanted(row), rtol=1e-4)


@pytest.mark.parametrize("door", DOORS)
def test_a_body_that_differs_in_more_than_its_data_is_read_anew(doors, broker, door):
    same, nested = ROWS[0].tolist(), [ROWS[0].tolist()]
    odd: list[tuple[dict, str | None]] = [
        (tensor([True, *same[1:]]), "tensor_mismatch"),
        (tensor(same[1:]), "tensor_mismatch"),
        (tensor(same, (1, 17)), "tensor_mismatch"),
        (tensor(same, datatype="FP64"), "tensor_mismatch"),
        ({**tensor(same), "outputs": [{"name": "z"}]}, "tensor_mismatch"),
        ({**tensor(same), "parameters": {"timeout_ms": 0}}, "deadline_unmeetable"),
        (tensor(nested), None),
        (tensor(["NaN", *same[1:]]), None),
    ]
    with asked_by(door, doors, broker) as ask:
        for _ in range(TIMES):
            first = said(ask("queued", tensor(same), None))
            for body, code in odd:
                reply = ask("queued", body, None)
                if code is None:
                    assert said(reply)["outputs"][0]["shape"] == first["outputs"][0]["shape"]
                else:
                    told = reply["error"] if isinstance(reply["error"], dict) else reply
                    assert told["code"] == code, body


@pytest.mark.parametrize("door", DOORS)
def test_booleans_beside_the_data_are_known_and_none_in_it_is_a_number(doors, broker, door):
    marked = {"parameters": {"own": True}}
    with asked_by(door, doors, broker) as ask:
        for _ in range(TIMES):
            assert said(ask("queued", {**tensor(ROWS[0].tolist()), **marked}, None))["outputs"]
            for data in ([True, *ROWS[0][1:].tolist()], [*ROWS[0][1:].tolist(), False]):
                told = ask("queued", {**tensor(data), **marked}, None)
                assert (told["error"] if isinstance(told["error"], dict) else told)["code"] == "tensor_mismatch"


@pytest.mark.parametrize("door", DOORS)
def test_text_that_comes_again_may_have_another_length(doors, broker, door):
    with asked_by(door, doors, broker) as ask:
        for number in range(TIMES):
            texts = ["a" * number, "true"]
            (output,) = said(ask("text", tensor(texts, (2,), "BYTES"), str(number)))["outputs"]
            assert output["data"] == texts


def shown(*pictures: bytes) -> dict:
    texts = [base64.b64encode(each).decode() for each in pictures]
    return {"picture": texts[0]} if len(texts) == 1 else {"pictures": texts}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["plain", "JSON"])
def test_pictures_that_come_again_are_each_looked_at(doors, broker, door, kind):
    if door == "zmq" and kind == "plain":
        pytest.skip("ZeroMQ has pictures in JSON, or as tensors")
    with asked_by(door, doors, broker) as ask:
        for number in range(2 * TIMES):
            colour = ("red", "blue")[number % 2]
            body = picture(colour) if kind == "plain" else shown(picture(colour))
            assert said(ask("colours", body, None))["classes"][0]["label"] == colour
        for _ in range(TIMES if kind == "JSON" else 0):
            answers = said(ask("colours", shown(picture("red"), picture("green")), None))["answers"]
            assert [each["classes"][0]["label"] for each in answers] == ["red", "green"]
            few = said(ask("colours", {**shown(picture("red")), "parameters": {"top_k": 1}}, None))
            assert len(few["classes"]) == 1
            assert "classes" not in said(ask("colours", {**shown(picture("red")), "parameters": {"raw": True}}, None))


@pytest.mark.parametrize("door", DOORS)
def test_a_known_body_is_forgotten_with_its_version(doors, broker, models, door):
    with asked_by(door, doors, broker) as ask, RawClient(doors.daemon.endpoints[0]) as control:
        number = int(said(ask("later", tensor(ROWS[0].tolist()), None))["model_version"])
        for _ in range(TIMES):
            assert said(ask("later", tensor(ROWS[0].tolist()), None))["model_version"] == str(number)
        put_model(models, "later", onnx_models.mlp, number + 1)
        control.result("load", model="later")
        assert said(ask("later", tensor(ROWS[0].tolist()), None))["model_version"] == str(number + 1)
