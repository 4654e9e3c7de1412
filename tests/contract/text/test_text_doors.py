"""The same text by every client and door: the same answer, and the same refusal."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tritonclient.http

from edge_runtime.answers import Answer
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import InferResult, RequestHeader, TensorHeader
from edge_runtime.wire.codec import pack_request
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import RawClient, grpc_url, http_url, online_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import bert_models

pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")]

FILM, RIVER = "The film was GREAT!", "the river was cold, and the night was long"
INFER, TOPIC = "/v2/models/sentiment/infer", "edge/dev1/infer/sentiment"

Ask = Callable[..., InferResult]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    bert_models.classifier(models / "sentiment")
    bert_models.classifier(models / "asked")
    (models / "asked" / "model.toml").write_text('[input.question]\ntokenizer = "tokenizer.json"\n')
    bert_models.encoder(models / "sentences")
    bert_models.classifier(models / "reranker", labels=("LABEL_0",))
    return models


@pytest.fixture(scope="module")
def daemon(models: Path, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0", openai=True), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with online_daemon(models, tmp_path_factory.mktemp("run"), f"{broker.url}/dev1", **doors) as daemon:
        yield daemon


def over_asyncio(endpoint: str) -> Ask:
    async def ask(*words: Any, **options: Any) -> InferResult:
        async with AsyncClient(endpoint) as client:
            return await client.infer(*words, **options)

    return lambda *words, **options: asyncio.run(ask(*words, **options))


@pytest.fixture(params=["zmq", "asyncio", "mqtt", "http", "grpc", "process"])
def ask(request: pytest.FixtureRequest, daemon: Daemon, broker: Broker, models: Path) -> Iterator[Ask]:
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


@pytest.fixture(scope="module")
def wanted(models: Path) -> list[list[tuple[str, float]]]:
    """Labels and scores of FILM and RIVER, best first."""
    plain = bert_models.PlainModel(models / "sentiment")
    scored = [zip(bert_models.SENTIMENT, plain.probabilities(text), strict=True) for text in (FILM, RIVER)]
    return [sorted(((label, float(score)) for label, score in each), key=lambda pair: -pair[1]) for each in scored]


def told(answer: Answer) -> list[tuple[str, Any]]:
    return [(each.label, pytest.approx(each.score, abs=2e-5)) for each in answer.classes or ()]


def told_json(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(each["label"], pytest.approx(each["score"], abs=2e-5)) for each in answer["classes"]]


@pytest.fixture
def http(daemon: Daemon) -> Iterator[RawHttp]:
    with RawHttp(http_url(daemon)) as http:
        yield http


def element(data: bytes) -> bytes:
    """One element of BYTES."""
    return struct.pack("<I", len(data)) + data


# ---- clients --------------------------------------------------------------------------------------------------------


def test_every_client_gets_the_same_answers(ask: Ask, wanted: list[Any]) -> None:
    result = ask("sentiment", {"text": [FILM, RIVER]}, timeout_ms=20_000)
    assert [told(each) for each in result.answers] == wanted
    pair = ask("sentiment", {"text": [[FILM, RIVER]]}, timeout_ms=20_000)
    assert len(pair.answers) == 1
    assert told(pair.answer) != wanted[0]
    named = ask("asked", {"question": np.array([FILM.encode()], object)}, timeout_ms=20_000)
    assert told(named.answer) == wanted[0]


def test_every_client_is_refused_alike(ask: Ask) -> None:
    with pytest.raises(EdgeRuntimeError) as raised:
        ask("sentiment", {"text": np.array([b"\xff"], object)}, timeout_ms=20_000)
    assert (raised.value.code, raised.value.message.partition(":")[0]) == (
        "tensor_mismatch", "text 0 is not UTF-8 at byte 0"
    )  # fmt: skip


def test_the_metadata_says_what_is_sent_and_what_comes_back(daemon: Daemon) -> None:
    with Client(daemon.endpoints[1]) as client:
        told = client.metadata("sentiment")
    assert [each["name"] for each in told["inputs"]] == ["input_ids", "attention_mask", "token_type_ids"]
    sent = [each["shape"] for form in told["forms"] for each in form["inputs"]]
    assert {(each["name"], each["datatype"]) for form in told["forms"] for each in form["inputs"]} == {
        ("text", "BYTES")
    }
    assert sent == [[-1], [-1, 2]]
    assert told["steps"]["inputs"]["text"]["length"] == bert_models.POSITIONS
    assert told["steps"]["labels"] == {"logits": list(bert_models.SENTIMENT)}


# ---- doors ----------------------------------------------------------------------------------------------------------


def test_http_takes_a_text_in_json_and_as_the_body_itself(http: RawHttp, wanted: list[Any]) -> None:
    alone = json.loads(http.ask("POST", INFER, json.dumps({"text": FILM}).encode()).body)
    several = json.loads(http.ask("POST", INFER, json.dumps({"text": [FILM, RIVER]}).encode()).body)
    body = json.loads(http.ask("POST", INFER, FILM.encode(), content_type="text/plain; charset=utf-8").body)
    oip = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [FILM]}]}
    spelled = json.loads(http.ask("POST", INFER, json.dumps(oip).encode()).body)
    assert told_json(alone) == told_json(body) == told_json(spelled["answer"]) == wanted[0]
    assert [told_json(each) for each in several["answers"]] == wanted


def test_http_reads_json_that_a_page_in_a_browser_calls_text(http: RawHttp, wanted: list[Any]) -> None:
    body = json.dumps({"text": FILM}).encode()
    assert told_json(json.loads(http.ask("POST", INFER, body, content_type="text/plain").body)) == wanted[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "text: got an empty list, wanted a text, a list of texts, or a list of pairs of texts"),
        ([FILM, [FILM, RIVER]], "text: got "),
        ([[FILM, RIVER], [FILM]], "text: got "),
        (5, "text: got 5, wanted a text"),
        ([[FILM, RIVER, FILM]], "unexpected shape for input 'text' for model 'sentiment'"),
    ],
)
def test_http_says_what_is_wrong_with_texts(http: RawHttp, text: Any, message: str) -> None:
    answer = http.ask("POST", INFER, json.dumps({"text": text}).encode())
    assert answer.status == 400
    assert message in json.loads(answer.body)["error"]


def test_tritons_client_sends_texts_as_bytes(daemon: Daemon, wanted: list[Any]) -> None:
    with tritonclient.http.InferenceServerClient(http_url(daemon).removeprefix("http://")) as client:
        sent = tritonclient.http.InferInput("text", [2], "BYTES")
        sent.set_data_from_numpy(np.array([FILM.encode(), RIVER.encode()], object))
        answer = client.infer("sentiment", [sent])
        classes = answer.as_numpy("logits")
    assert [bert_models.SENTIMENT[int(row[0][0])] for row in classes] == [each[0][0] for each in wanted]


def test_zeromq_takes_a_text_in_json(daemon: Daemon, wanted: list[Any]) -> None:
    with RawClient(daemon.endpoints[1]) as client:
        for _ in range(4):  # from the third on it is known by its text
            assert told_json(client.ask_json(model="sentiment", text=FILM, id="a")) == wanted[0]
        assert told_json(client.ask_json(model="sentiment", text=[RIVER])["answers"][0]) == wanted[1]


def test_mqtt_takes_a_text_in_json_and_as_the_payload_itself(daemon: Daemon, broker: Broker, wanted: list[Any]) -> None:
    with Peer(broker.url) as peer:
        for _ in range(4):
            plain = json.loads(peer.ask(TOPIC, FILM.encode(), content_type="text/plain").payload)
            assert told_json(plain) == wanted[0]
        told = json.loads(peer.ask(TOPIC, json.dumps({"text": FILM}).encode()).payload)
        other = json.loads(peer.ask(TOPIC, RIVER.encode(), content_type="text/plain").payload)
    assert (told_json(told), told_json(other)) == (wanted[0], wanted[1])


def test_texts_of_one_header_are_each_answered_for_themselves_in_a_burst_good_and_bad_ones(
    daemon: Daemon, wanted: list[Any]
) -> None:
    header = pack_request(RequestHeader(model="sentiment", inputs=(TensorHeader("text", "BYTES", (1,)),)))
    sent = {
        b"film": element(FILM.encode()),
        b"cut": element(FILM.encode())[:-1],
        b"river": element(RIVER.encode()),
        b"not text": element(b"\xff"),
        b"long": element(b"the film was long , " * 5_000),
        b"none": b"",
        b"film again": element(FILM.encode()),
    }
    with RawClient(daemon.endpoints[1]) as client:
        for _ in range(3):  # from then on the header is known
            client.ask(header, b"", element(RIVER.encode()))
        for number, payload in sent.items():
            client.send(header, number, payload)
        replies = {reply[1]: msgpack.unpackb(reply[0]) for reply in (client.receive() for _ in sent)}

    assert set(replies) == set(sent)
    assert [replies[each]["error"]["code"] for each in (b"cut", b"none")] == ["tensor_mismatch"] * 2
    assert "not UTF-8" in replies[b"not text"]["error"]["message"]
    assert "error" not in replies[b"long"]
    for number, answer in {b"film": wanted[0], b"river": wanted[1], b"film again": wanted[0]}.items():
        assert told_json(replies[number]["answer"]) == answer


# ---- protocols of texts ---------------------------------------------------------------------------------------------


def test_openais_embeddings_are_those_of_the_model(http: RawHttp, daemon: Daemon) -> None:
    answer = http.ask("POST", "/v1/embeddings", json.dumps({"model": "sentences", "input": [FILM, RIVER]}).encode())
    assert answer.status == 200, answer.body
    with Client(daemon.endpoints[1]) as client:
        wanted = [each.embedding for each in client.infer("sentences", {"text": [FILM, RIVER]}).answers]
    assert np.allclose([each["embedding"] for each in json.loads(answer.body)["data"]], wanted, atol=1e-6)


def test_rerank_orders_documents_by_the_models_numbers(http: RawHttp, daemon: Daemon) -> None:
    documents = [FILM, RIVER, "anna went to london"]
    asked = {"model": "reranker", "query": "cold water", "documents": documents}
    answer = http.ask("POST", "/rerank", json.dumps(asked).encode())
    assert answer.status == 200, answer.body
    with Client(daemon.endpoints[1]) as client:
        answers = client.infer("reranker", {"text": [["cold water", each] for each in documents]}).answers
    scores = [each.number.value for each in answers if each.number is not None]
    found = [(each["index"], each["relevance_score"]) for each in json.loads(answer.body)["results"]]
    assert [index for index, _ in found] == sorted(range(3), key=lambda index: -scores[index])
    assert [score for _, score in found] == pytest.approx(sorted(scores, reverse=True), abs=1e-6)
