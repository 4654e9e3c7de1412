"""Texts on the command line, against a real daemon: by option, by word, by line of stdin, in pairs, with labels."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.daemon.daemon import Daemon
from tests.contract.running_daemon import running_daemon
from tests.models import bert_models, onnx_models

FILM, RIVER = "the film was great", "the river was cold"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    bert_models.classifier(models / "sentiment")
    bert_models.tagger(models / "tags")
    bert_models.classifier(models / "reranker", labels=("LABEL_0",))
    bert_models.classifier(models / "chooser", labels=bert_models.ENTAILMENT)
    (models / "chooser" / "model.toml").write_text('preset = "zero-shot"\n')
    onnx_models.mlp(models / "numbers")
    return models


@pytest.fixture(scope="module")
def daemon(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def run(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, status: int = 0) -> str:
        assert main([*words, "--connect", daemon.endpoints[1]]) == status
        said = capsys.readouterr()
        return said.out if status == 0 else said.err

    return call


def best_of(said: str) -> list[str]:
    """The best label of each answer."""
    told = json.loads(said)
    return [each["classes"][0]["label"] for each in told.get("answers", [told])]


def test_texts_are_given_by_option_by_word_and_by_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    both = best_of(run("infer", "sentiment", "--json", "--text", FILM, "--text", RIVER))
    assert best_of(run("infer", "sentiment", "--json", FILM, RIVER)) == both
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{FILM}\n{RIVER}\n"))
    assert best_of(run("infer", "sentiment", "--json", "--text", "-")) == both
    assert both[0] == "neutral"


def test_an_answer_is_shown_in_words(run: Run) -> None:
    said = run("infer", "sentiment", "--text", FILM)
    assert "neutral   0.6776" in said
    shown = run("models", "show", "sentiment")
    assert "text: texts in place of the tensor" in shown
    assert "tokenizer.json" in shown


def test_tags_pairs_and_labels_are_asked(run: Run) -> None:
    tags = json.loads(run("infer", "tags", "--json", "--text", "anna went to london"))["tags"]
    assert {each["label"] for each in tags} <= {"PER", "LOC"}
    score = json.loads(run("infer", "reranker", "--json", "--pair", RIVER, FILM))["number"]
    assert 0 < score["value"] < 1
    said = json.loads(run("infer", "chooser", "--json", "--labels", "film,river", "--text", FILM, "--text", RIVER))
    assert [{each["label"] for each in answer["classes"]} for answer in said["answers"]] == [{"film", "river"}] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("numbers", "--text", FILM), "--text: model 'numbers' takes no texts"),
        (("sentiment", "--text", FILM, "--pair", FILM, RIVER), "got --pair beside other texts; ask twice"),
        (("sentiment", "--labels", "a,b", "--text", FILM), "--labels: model 'sentiment' has labels of its own"),
        (("chooser", "--text", FILM), "model 'chooser' chooses among labels; wanted --labels LABEL,… beside the text"),
    ],
)
def test_an_option_that_does_not_fit_is_said(run: Run, words: tuple[str, ...], message: str) -> None:
    assert message in run("infer", *words, status=2)


def test_a_text_model_without_a_text_says_how_to_give_one(run: Run) -> None:
    assert "a TEXT, or " in run("infer", "sentiment", status=2)


def test_the_bare_outputs_are_shown_too(run: Run) -> None:
    said: dict[str, Any] = json.loads(run("infer", "sentiment", "--json", "--raw", "--text", FILM))
    assert said["outputs"][0]["name"] == "logits"


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("sentiment", ()),
        ("sentiment", ("--text", FILM, "--text", RIVER)),
        ("reranker", ("--pair", RIVER, FILM)),
        ("chooser", ("--text", FILM, "--labels", "film,river")),
    ],
)
def test_bench_asks_a_model_of_texts_with_a_sentence_or_the_texts_that_are_given(
    run: Run, model: str, texts: tuple[str, ...]
) -> None:
    said = json.loads(run("bench", model, "--json", "--in-flight", "2", "--seconds", "0.2", "--warmup", "0", *texts))
    (measured,) = said["runs"]
    assert measured["requests_per_s"] > 0
    assert not measured["refused"]


def test_bench_says_that_a_model_wants_labels_beside_the_texts(run: Run) -> None:
    assert "wanted --labels" in run("bench", "chooser", status=2)
