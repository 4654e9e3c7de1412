"""Text models in signed releases: tokenizer and steps go with them, and a device checks both by golden texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import PublishError, UpdateError
from edge_runtime.updates.release_checks import check_choice
from edge_runtime.updates.staging import choose_artifacts
from tests.contract.updates.published_models import device, founded, publish
from tests.fakes.publishing import Publisher
from tests.models import bert_models, ir_models

TEXTS = bert_models.texts(6)


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return founded(tmp_path)


def own_answers(folder: Path, name: str) -> list[object]:
    """The answers of the folder as it is, served from a models folder."""
    with Runtime(folder) as runtime:
        return list(runtime.infer(name, {"text": TEXTS}).answers)


@pytest.mark.smoke
def test_a_folder_of_hugging_faces_is_published_with_its_tokenizer_and_answers_alike_on_the_device(
    publisher: Publisher, tmp_path: Path
) -> None:
    bert_models.classifier(tmp_path / "models" / "sentiment")
    ir_models.from_onnx(
        tmp_path / "models" / "sentiment" / "model.onnx", tmp_path / "models" / "sentiment", "model.xml"
    )
    golden = tmp_path / "golden.txt"
    golden.write_text("\n".join(TEXTS) + "\n")
    prepared = publish(publisher, tmp_path / "models" / "sentiment", golden)
    manifest = prepared.manifest
    assert {each.path.rpartition("/")[2]: each.backend for each in manifest.artifacts} == {
        "model.onnx": "onnxruntime",
        "model.xml": "openvino",
        "model.bin": "openvino",
        "tokenizer.json": "",
    }
    assert manifest.settings["output"]["logits"]["labels"] == bert_models.SENTIMENT
    assert manifest.settings["input"]["text"]["length"] == bert_models.POSITIONS
    assert [(each.name, each.datatype, each.shape) for each in manifest.golden.inputs] == [("text", "BYTES", (6,))]
    assert prepared.notes == (
        "not published: what they say of texts is in its settings: config.json, tokenizer_config.json",
    )
    wanted = own_answers(tmp_path / "models", "sentiment")
    with device(publisher, tmp_path / "device") as fresh:
        assert fresh.outcome("sentiment")[0] == "installed"
        assert list(fresh.runtime.infer("sentiment", {"text": TEXTS}).answers) == wanted


def test_vectors_of_sentences_are_published_with_their_pooling_which_lies_in_a_folder_of_its_own(
    publisher: Publisher, tmp_path: Path
) -> None:
    bert_models.encoder(tmp_path / "models" / "sentences" / "1")
    prepared = publish(publisher, tmp_path / "models" / "sentences")
    assert prepared.manifest.settings["output"]["last_hidden_state"]["pool"] == "mean"
    assert "a sentence of ours" in prepared.notes[1]
    (wanted, *_) = own_answers(tmp_path / "models", "sentences")
    with device(publisher, tmp_path / "device") as fresh:
        assert fresh.outcome("sentences")[0] == "installed"
        (answer, *_) = fresh.runtime.infer("sentences", {"text": TEXTS}).answers
    assert answer.embedding == pytest.approx(wanted.embedding)


@pytest.mark.parametrize(
    ("make", "toml", "golden"),
    [
        (lambda folder: bert_models.classifier(folder, labels=("LABEL_0",)), "", "the river\tthe cold river\n"),
        (
            lambda folder: bert_models.classifier(folder, labels=bert_models.ENTAILMENT),
            'preset = "zero-shot"\n',
            "the film was long\tcinema\tsport\n",
        ),
        (bert_models.tagger, "", "anna went to berlin\n"),
    ],
)
def test_pairs_labels_and_tags_are_golden_too(
    publisher: Publisher, tmp_path: Path, make: object, toml: str, golden: str
) -> None:
    make(tmp_path / "m")  # type: ignore[operator]
    if toml:
        (tmp_path / "m" / "model.toml").write_text(toml)
    (tmp_path / "golden.tsv").write_text(golden)
    manifest = publish(publisher, tmp_path / "m", tmp_path / "golden.tsv").manifest
    columns = golden.count("\t") + 1
    assert [each.shape for each in manifest.golden.inputs] == [(1,) if columns == 1 else (1, columns)]
    with device(publisher, tmp_path / "device") as fresh:
        assert "0 failed" in fresh.outcome("m")[1]


def test_a_new_tokenizer_is_a_new_version_and_swaps_in(publisher: Publisher, tmp_path: Path) -> None:
    bert_models.classifier(tmp_path / "m" / "1")
    publish(publisher, tmp_path / "m")
    with device(publisher, tmp_path / "device") as fresh:
        assert fresh.outcome("m")[0] == "installed"
        (before,) = fresh.runtime.infer("m", {"text": ["good film"]}).answers
        shutil.copytree(tmp_path / "m" / "1", tmp_path / "m" / "2")
        told = json.loads((tmp_path / "m" / "2" / "tokenizer.json").read_text())
        words = told["model"]["vocab"]
        words["good"], words["bad"] = words["bad"], words["good"]
        (tmp_path / "m" / "2" / "tokenizer.json").write_text(json.dumps(told))
        publish(publisher, tmp_path / "m")
        assert fresh.outcome("m")[0] == "installed"
        (after,) = fresh.runtime.infer("m", {"text": ["bad film"]}).answers
    assert after == before


def test_a_tokenizer_is_fetched_with_any_graph_and_a_release_without_it_is_not_served(
    publisher: Publisher, tmp_path: Path
) -> None:
    bert_models.classifier(tmp_path / "m")
    manifest = publish(publisher, tmp_path / "m").manifest
    chosen = {each.place for each in choose_artifacts(manifest, (".onnx",))}
    assert chosen == {"model.onnx", "tokenizer.json"}
    check_choice(manifest, chosen, tmp_path)
    with pytest.raises(UpdateError, match=r"tokenizer\.json: is missing; the release cannot be loaded without it"):
        check_choice(manifest, {"model.onnx"}, tmp_path)
    with pytest.raises(UpdateError, match=r"has no artifact; wanted model\.onnx"):
        check_choice(manifest, {"tokenizer.json"}, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: is not a tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not what it is called"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer = 'tokenizer.json': no such file"),
    ],
)
def test_a_folder_whose_texts_cannot_be_read_is_not_published(
    publisher: Publisher, tmp_path: Path, spoil: object, reason: str
) -> None:
    bert_models.classifier(tmp_path / "m")
    (tmp_path / "m" / "model.toml").write_text('[input.text]\ntokenizer = "tokenizer.json"\n')
    spoil(tmp_path / "m")  # type: ignore[operator]
    with pytest.raises(PublishError) as raised:
        publish(publisher, tmp_path / "m")
    assert reason in raised.value.message


@pytest.mark.parametrize(
    ("golden", "reason"),
    [("a\tb\nc\n", "wanted a text a line"), ("\n \n", "wanted a text a line"), ("a\tb\tc\n", "the model takes text")],
)
def test_golden_texts_that_the_model_does_not_take_are_refused_in_words(
    publisher: Publisher, tmp_path: Path, golden: str, reason: str
) -> None:
    bert_models.classifier(tmp_path / "m")
    (tmp_path / "golden.txt").write_text(golden)
    with pytest.raises(PublishError) as raised:
        publish(publisher, tmp_path / "m", tmp_path / "golden.txt")
    assert reason in raised.value.message
