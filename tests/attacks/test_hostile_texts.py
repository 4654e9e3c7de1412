"""Texts and tokenizers that mean harm, beside callers who mean none: one answer each, and these notice nothing."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from edge_runtime import Client
from edge_runtime.errors import DeadlineExceeded, RunFailed, TensorMismatch
from tests.contract.raw_http import RawHttp
from tests.fakes.daemon_process import DaemonProcess
from tests.models import bert_models

CONFIG = """
[limits]
run_limit_ms = 3000
[http]
endpoint = "127.0.0.1:0"
openai = true
"""

BOMB = ("a" * 26 + "! ") * 400
"""Of the pattern below each word takes some 0.1 s: steps double with each letter, up to the library's own bound."""

PATTERN = r"(a|aa)+$"
MANY = 2048
TOO_LONG = b"good film " * (1 << 20)
"""Ten times what a text may have."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("run")
    models = folder / "models"
    bert_models.encoder(models / "sentences", length=16)
    bert_models.classifier(models / "honest")
    for name in ("bomb", "heavy"):
        bert_models.classifier(models / name)
    told = json.loads((models / "bomb" / "tokenizer.json").read_text())
    told["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    (models / "bomb" / "tokenizer.json").write_text(json.dumps(told))
    with (models / "heavy" / "tokenizer.json").open("r+b") as file:
        file.truncate(100 << 20)
    with DaemonProcess(folder, config=CONFIG, RUST_BACKTRACE="0") as daemon:
        daemon.wait_ready()
        yield daemon


@contextmanager
def others_are_answered(daemon: DaemonProcess) -> Iterator[None]:
    """Callers of another model, who ask one after another meanwhile, and are answered each time."""
    statuses: Counter[int] = Counter()
    is_over = threading.Event()
    body = json.dumps({"text": ["the film was great", "dull"]}).encode()

    def ask() -> None:
        with RawHttp(daemon.address("http")) as http:
            while not is_over.is_set() or not statuses:
                statuses[http.ask("POST", "/v2/models/honest/infer", body).status] += 1

    thread = threading.Thread(target=ask, name="honest")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert set(statuses) == {200}


def embed(http: RawHttp, texts: object) -> object:
    return http.ask("POST", "/v1/embeddings", json.dumps({"model": "sentences", "input": texts}).encode())


def test_texts_of_ten_megabytes_are_refused_by_every_way_with_their_number(daemon: DaemonProcess) -> None:
    with (
        others_are_answered(daemon),
        Client(daemon.endpoint) as client,
        RawHttp(daemon.address("http")) as http,
    ):
        for _ in range(3):
            with pytest.raises(TensorMismatch, match=r"text 1 has 10,485,760 bytes; at most 1,048,576 are read"):
                client.infer("honest", {"text": np.array([b"good", TOO_LONG], object)})
            answer = http.ask("POST", "/v2/models/honest/infer", TOO_LONG, content_type="text/plain")
            assert (answer.status, answer.code) == (400, "tensor_mismatch")
            assert embed(http, ["good", TOO_LONG.decode()]).status == 400


@pytest.mark.parametrize("text", [b"\xff\xfe\xfa", b"-\xed\xa0\x80", b"ab\xc0\x80", b"\x89PNG\r\n\x1a\n" + bytes(64)])
def test_bytes_that_are_no_text_are_refused_and_texts_of_the_same_burst_are_answered(
    daemon: DaemonProcess, text: bytes
) -> None:
    with others_are_answered(daemon), Client(daemon.endpoint) as client:
        sent = [np.array([each], object) for each in (b"good", text, b"dull", text, b"warm")]
        asked = [client.submit("honest", {"text": each}) for each in sent]
        for number, each in enumerate(asked):
            if number % 2:
                with pytest.raises(TensorMismatch, match="text 0 is not UTF-8 at byte"):
                    each.result()
            else:
                assert each.result().answers[0].classes


def test_half_a_surrogate_pair_in_json_is_refused(daemon: DaemonProcess) -> None:
    with RawHttp(daemon.address("http")) as http:
        for body in (b'{"text": "\\ud800"}', b'{"text": ["good", "\\udfff"]}'):
            assert http.ask("POST", "/v2/models/honest/infer", body).status == 400
        assert embed(http, ["\ud800"]).status == 400


def test_as_many_texts_as_openai_takes_are_one_answer_in_their_order_and_one_more_is_refused(
    daemon: DaemonProcess,
) -> None:
    texts = bert_models.texts(64) * (MANY // 64)
    with others_are_answered(daemon), RawHttp(daemon.address("http")) as http:
        data = embed(http, texts).fields["data"]
        assert [each["index"] for each in data] == list(range(MANY))
        assert data[3]["embedding"] == pytest.approx(data[3 + 64]["embedding"], abs=1e-5)
        assert embed(http, [*texts, "one more"]).status == 400


@pytest.mark.parametrize(
    "body", [b'{"text": []}', b'{"text": [[]]}', b'{"text": null}', b'{"text": {}}', b'{"text": 3}']
)
def test_lists_without_a_text_are_refused(daemon: DaemonProcess, body: bytes) -> None:
    with RawHttp(daemon.address("http")) as http:
        answer = http.ask("POST", "/v2/models/honest/infer", body)
        assert (answer.status, answer.code in {"tensor_mismatch", "decode_failed", "unsupported"}) == (400, True)
        for given in ([], None, {}, [[]], 3):
            assert embed(http, given).status == 400


def test_a_tokenizer_of_a_hundred_megabytes_fails_its_load_alone(daemon: DaemonProcess) -> None:
    with others_are_answered(daemon), Client(daemon.endpoint) as client:
        (heavy,) = [each for each in client.models() if each["name"] == "heavy"]
        assert "tokenizer.json: has over 67108864 bytes" in heavy["reason"]


def test_a_pattern_that_takes_for_ever_costs_its_callers_their_deadline_and_nobody_else_anything(
    daemon: DaemonProcess,
) -> None:
    with others_are_answered(daemon), Client(daemon.endpoint) as client:
        assert client.infer("bomb", {"text": ["the film was great"]}).answers[0].classes
        with pytest.raises(DeadlineExceeded):
            client.infer("bomb", {"text": [BOMB]}, timeout_ms=500)
        with pytest.raises(RunFailed):  # by the bound on a run, which ends the host
            client.infer("bomb", {"text": [BOMB]})
        assert client.infer("bomb", {"text": ["the film was great"]}).answers[0].classes
