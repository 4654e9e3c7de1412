"""Text models in hosts: what a folder says is enough, and the numbers are those of the tokenizer and the raw run.

Beside them stands an independent way: `tokenizers`, ONNX Runtime's own `run` and numpy, a row at a time.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import ModelNotFound, NotReady, TensorMismatch
from tests.models import bert_models, ir_models
from tests.models.bert_models import PlainModel

TEXTS = bert_models.texts(200)
LONG = " . ".join(bert_models.texts(12, seed=9))
"""Of some 300 tokens, where the model has room for 64."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    bert_models.classifier(models / "sentiment")
    bert_models.classifier(models / "several", problem_type="multi_label_classification")
    bert_models.classifier(models / "versioned" / "1")
    bert_models.classifier(models / "whole")
    declare(models / "whole", "windows = true\nstride = 8\n")
    bert_models.classifier(models / "short")
    declare(models / "short", "length = 8\n[output.logits]\ntop_k = 1\n")
    return models


def declare(folder: Path, table: str, name: str = "text") -> None:
    (folder / "model.toml").write_text(f'[input.{name}]\ntokenizer = "tokenizer.json"\n{table}')


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Runtime]:
    with Runtime(models) as runtime:
        yield runtime


def scores_of(answer: Any) -> dict[str, float]:
    return {each.label: each.score for each in answer.classes}


def array(*rows: Any) -> np.ndarray:
    return np.array(rows, object)


# ---- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_two_hundred_texts_are_answered_as_transformers_does(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "sentiment")
    answers = [
        each
        for at in range(0, len(TEXTS), 50)
        for each in served.infer("sentiment", {"text": TEXTS[at : at + 50]}).answers
    ]
    numbers = json.loads(Path(__file__).with_name("transformers_numbers.json").read_text())["rows"]
    assert len(answers) == len(numbers) == 200
    for text, answer, row in zip(TEXTS, answers, numbers, strict=True):
        wanted = dict(zip(bert_models.SENTIMENT, row["scores"], strict=True))
        assert scores_of(answer) == pytest.approx(wanted, abs=2e-5)
        assert answer.classes[0].label == max(wanted, key=wanted.__getitem__)
        assert plain.probabilities(text) == pytest.approx(row["scores"], abs=2e-5)


def test_pairs_are_read_as_two_texts(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "sentiment")
    pairs = [[TEXTS[at], TEXTS[at + 1]] for at in range(0, 40, 2)]
    answers = served.infer("sentiment", {"text": pairs}).answers
    for pair, answer in zip(pairs, answers, strict=True):
        wanted = dict(zip(bert_models.SENTIMENT, plain.probabilities(*pair), strict=True))
        assert scores_of(answer) == pytest.approx(wanted, abs=2e-5)


def test_raw_gives_the_models_own_outputs_of_the_same_texts(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "sentiment")
    outputs = served.infer("sentiment", {"text": TEXTS[:8]}, raw=True).outputs
    assert np.allclose(outputs["logits"], [plain.output(text) for text in TEXTS[:8]], atol=1e-5)


def test_the_models_own_tensors_are_still_asked_and_may_be_answered_in_words(served: Runtime, models: Path) -> None:
    ids = {name: np.array([[2, 5, 6, 3]]) * (name == "input_ids") + (name == "attention_mask")
           for name in ("input_ids", "attention_mask", "token_type_ids")}  # fmt: skip
    bare = served.infer("sentiment", ids)
    assert (bare.answers, bare.outputs["logits"].shape) == ((), (1, 3))
    (answer,) = served.infer("sentiment", ids, raw=False).answers
    assert scores_of(answer)["positive"] == pytest.approx(bert_models.softmax(bare.outputs["logits"])[0, 2], abs=1e-6)


def test_labels_that_may_count_together_have_scores_of_their_own(served: Runtime, models: Path) -> None:
    logits = PlainModel(models / "several").output("the film was great")
    (answer,) = served.infer("several", {"text": ["the film was great"]}).answers
    wanted = dict(zip(bert_models.SENTIMENT, 1 / (1 + np.exp(-logits)), strict=True))
    assert scores_of(answer) == pytest.approx(wanted, abs=1e-5)


# ---- long texts -----------------------------------------------------------------------------------------------------


def test_a_text_longer_than_the_model_takes_is_cut_off(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "sentiment")
    (answer,) = served.infer("sentiment", {"text": [LONG]}).answers
    wanted = dict(zip(bert_models.SENTIMENT, plain.probabilities(LONG), strict=True))
    assert scores_of(answer) == pytest.approx(wanted, abs=1e-5)


def test_a_table_says_a_shorter_length_and_what_an_output_tells(served: Runtime, models: Path) -> None:
    wanted = PlainModel(models / "short", length=8).probabilities(LONG)
    (answer,) = served.infer("short", {"text": [LONG]}).answers
    assert [each.label for each in answer.classes] == [bert_models.SENTIMENT[int(wanted.argmax())]]
    assert answer.classes[0].score == pytest.approx(wanted.max(), abs=1e-5)


def test_windows_of_a_long_text_are_joined_by_the_mean_of_their_scores(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "whole")
    plain._tokenizer.enable_truncation(64, stride=8)
    read = plain._tokenizer.encode(LONG)
    windows = [read, *read.overflowing]
    assert len(windows) > 3
    (answer, short) = served.infer("whole", {"text": [LONG, TEXTS[0]]}).answers
    logits = []
    for each in windows:
        rows = {"input_ids": each.ids, "attention_mask": each.attention_mask, "token_type_ids": each.type_ids}
        logits.append(plain._run(None, {name: np.array([row], np.int64) for name, row in rows.items()})[0][0])
    mean = np.average(logits, axis=0, weights=[len(each.ids) for each in windows])
    assert scores_of(answer) == pytest.approx(
        dict(zip(bert_models.SENTIMENT, bert_models.softmax(mean), strict=True)), abs=1e-5
    )
    alone = dict(zip(bert_models.SENTIMENT, plain.probabilities(TEXTS[0]), strict=True))
    assert scores_of(short) == pytest.approx(alone, abs=2e-5)
    assert served.infer("whole", {"text": [LONG, TEXTS[0]]}, raw=True).outputs["logits"].shape == (2, 3)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_of_hugging_faces_is_found_in_a_version_too(served: Runtime) -> None:
    sent = {"text": ["the film was great"]}
    assert served.infer("versioned", sent).answers == served.infer("sentiment", sent).answers


def test_a_folder_of_hugging_faces_is_found_beside_its_versions_too(tmp_path: Path) -> None:
    folder = bert_models.encoder(tmp_path / "m")
    (folder / "1").mkdir()
    (folder / "model.onnx").rename(folder / "1" / "model.onnx")
    with Runtime(tmp_path) as runtime:
        (answer,) = runtime.infer("m", {"text": [TEXTS[0]]}).answers
        assert [each["state"] for each in runtime.models()] == ["ready"]
    assert len(answer.embedding) == bert_models.HIDDEN


def test_a_link_beside_the_versions_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    folder = bert_models.encoder(tmp_path / "models" / "m")
    (folder / "1").mkdir()
    (folder / "model.onnx").rename(folder / "1" / "model.onnx")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with Runtime(tmp_path / "models") as runtime:
        (status,) = runtime.models()
        assert "is a symbolic link that leads outside the models folder" in status["reason"]


def test_an_export_for_openvino_is_found_with_its_tokenizer(tmp_path: Path) -> None:
    folder = bert_models.classifier(tmp_path / "models" / "m")
    wanted = PlainModel(folder).probabilities(TEXTS[0])
    ir_models.from_onnx(folder / "model.onnx", folder, "openvino_model.xml")
    (folder / "model.onnx").unlink()
    with Runtime(tmp_path / "models") as runtime:
        (answer,) = runtime.infer("m", {"text": [TEXTS[0]]}).answers
    assert scores_of(answer) == pytest.approx(dict(zip(bert_models.SENTIMENT, wanted, strict=True)), abs=1e-4)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (array(b"good", b"\xff\xfe"), "text 1 is not UTF-8 at byte 0: wanted text in UTF-8"),
        (array(b"\x89PNG\r\n\x1a\n" + bytes(9)), "it is a picture, and the model takes texts"),
        (array("a" * (1 << 20) + "a"), "text 0 has 1,048,577 bytes; at most 1,048,576 are read"),
        (array(["one", "two", "three"]), "unexpected shape for input 'text' for model 'sentiment'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_in_words_and_its_neighbour_is_answered(
    served: Runtime, rows: np.ndarray, message: str
) -> None:
    bad = served.submit("sentiment", {"text": rows})
    good = [served.submit("sentiment", {"text": ["the film was great"]}) for _ in range(8)]
    with pytest.raises(TensorMismatch) as raised:
        bad.result()
    assert message in raised.value.message
    assert {each.result().answers[0].classes[0].label for each in good} == {"neutral"}


def test_an_empty_text_and_a_whole_book_are_answered(served: Runtime, models: Path) -> None:
    plain = PlainModel(models / "sentiment")
    book = "the river was cold and long . " * 34_000
    empty, whole = served.infer("sentiment", {"text": ["", book]}, timeout_ms=60_000).answers
    for text, answer in (("", empty), (book, whole)):
        wanted = dict(zip(bert_models.SENTIMENT, plain.probabilities(text), strict=True))
        assert scores_of(answer) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("table", "spoil", "message"),
    [
        ("", lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json: is not a tokenizer: "),
        ("", lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer = 'tokenizer.json': no such file in "),
        ('ids = "tokens"\n', None, "[input.text]: the model has no input tokens; say ids = "),
        ("windows = true\nlength = 8\nstride = 7\n", None, "[input.text]: 8 tokens with a stride of 7"),
        ('[output.logits]\nlabels = ["a", "b"]\n', None, "there are 2 labels, and the model has 3 classes"),
        ("", lambda folder: (folder / "config.json").write_text("{"), "config.json: is not what it is called: "),
    ],
)
def test_a_folder_that_does_not_fit_fails_its_load_with_the_reason(
    tmp_path: Path, table: str, spoil: Any, message: str
) -> None:
    bert_models.classifier(tmp_path / "m")
    declare(tmp_path / "m", table)
    if spoil is not None:
        spoil(tmp_path / "m")
    with pytest.raises((NotReady, ModelNotFound)) as raised, Runtime(tmp_path) as runtime:
        runtime.infer("m", {"text": ["good"]})
    assert message in raised.value.message


def test_a_model_that_its_own_files_do_not_fit_is_served_with_its_tensors(tmp_path: Path) -> None:
    folder = bert_models.classifier(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    shutil.copyfile(bert_models.tagger(tmp_path / "other") / "model.onnx", folder / "model.onnx")
    shutil.rmtree(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    sent = {name: np.ones((1, 3), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    with Runtime(tmp_path) as runtime:
        assert runtime.infer("m", sent).outputs["logits"].shape == (1, 3, 5)
        with pytest.raises(TensorMismatch, match="expected 3 inputs but got 1"):
            runtime.infer("m", {"text": ["good"]})


# ---- presets --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("presets")
    bert_models.tagger(models / "tags")
    bert_models.tagger(models / "all_tags")
    declare(models / "all_tags", "windows = true\nstride = 8\n")
    bert_models.encoder(models / "sentences", length=16)
    bert_models.encoder(models / "all_sentences", length=16)
    declare(models / "all_sentences", "windows = true\n")
    bert_models.encoder(models / "first", pooling="cls_token")
    bert_models.classifier(models / "reranker", labels=("LABEL_0",))
    bert_models.classifier(models / "whole_reranker", labels=("LABEL_0",))
    declare(models / "whole_reranker", "windows = true\n")
    bert_models.classifier(models / "rating", labels=("LABEL_0",), problem_type="regression")
    bert_models.classifier(models / "chooser", labels=bert_models.ENTAILMENT)
    (models / "chooser" / "model.toml").write_text('preset = "zero-shot"\n')
    bert_models.classifier(models / "several", labels=bert_models.ENTAILMENT)
    declare(models / "several", 'hypothesis = "It is of {}."\n[output.logits]\nanswer = "classes"\nsigmoid = true\n')
    return models


@pytest.fixture(scope="module")
def asked(presets: Path) -> Iterator[Runtime]:
    with Runtime(presets) as runtime:
        yield runtime


def test_tags_are_joined_to_spans_of_the_text(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "tags")
    for text in TEXTS[:20]:
        read = plain._tokenizer.encode(text)
        best = plain.output(text).argmax(axis=1)
        (answer,) = asked.infer("tags", {"text": [text]}).answers
        tagged = {
            place
            for place, (start, end), label in zip(range(len(read.ids)), read.offsets, best, strict=True)
            if end > start and bert_models.ENTITIES[label] != "O"
        }
        covered = {
            place
            for tag in answer.tags
            for place, (start, end) in enumerate(read.offsets)
            if end > start and tag.start <= start and end <= tag.end
        }
        assert covered == tagged
        assert all(text[tag.start : tag.end] == tag.text for tag in answer.tags)
        assert {tag.label for tag in answer.tags} <= {"PER", "LOC"}


def test_tags_of_a_long_text_are_of_all_its_windows_and_none_is_there_twice(asked: Runtime) -> None:
    (cut,) = asked.infer("tags", {"text": [LONG]}).answers
    (whole, _) = asked.infer("all_tags", {"text": [LONG, TEXTS[0]]}).answers
    assert max(tag.end for tag in whole.tags) > 4 * max(tag.end for tag in cut.tags)
    ends = [(tag.start, tag.end) for tag in whole.tags]
    assert ends == sorted(ends)
    assert all(left <= right for (_, left), (right, _) in itertools.pairwise(ends))
    assert all(LONG[tag.start : tag.end] == tag.text for tag in whole.tags)


def test_sentences_become_vectors_by_the_mean_of_their_tokens(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "sentences", length=16)
    answers = asked.infer("sentences", {"text": TEXTS[:32]}).answers
    assert np.allclose([each.embedding for each in answers], [plain.sentence(text) for text in TEXTS[:32]], atol=1e-5)


def test_sentences_become_vectors_by_their_first_token(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "first", length=16)
    (answer,) = asked.infer("first", {"text": [TEXTS[3]]}).answers
    first = plain.output(TEXTS[3])[0]
    assert np.allclose(answer.embedding, first / np.linalg.norm(first), atol=1e-5)


def test_the_vector_of_a_long_text_is_the_mean_of_all_its_tokens(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "all_sentences", length=16)
    read = plain._tokenizer.encode(LONG)
    tokens = []
    for each in [read, *read.overflowing]:
        rows = {"input_ids": each.ids, "attention_mask": each.attention_mask, "token_type_ids": each.type_ids}
        tokens.append(plain._run(None, {name: np.array([row], np.int64) for name, row in rows.items()})[0][0])
    mean = np.concatenate(tokens).mean(axis=0)
    answers = asked.infer("all_sentences", {"text": [LONG, TEXTS[0]]}).answers
    assert np.allclose(answers[0].embedding, mean / np.linalg.norm(mean), atol=1e-5)


def test_a_reranker_scores_pairs_from_0_to_1(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "reranker")
    pairs = [["the cold river", text] for text in TEXTS[:10]]
    answers = asked.infer("reranker", {"text": pairs}).answers
    wanted = [1 / (1 + np.exp(-plain.output(*pair)[0])) for pair in pairs]
    assert [each.number.value for each in answers] == pytest.approx(wanted, abs=1e-5)


def test_a_long_passage_is_as_good_as_its_best_window(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "whole_reranker")
    plain._tokenizer.enable_truncation(64, strategy="only_second")
    read = plain._tokenizer.encode("the cold river", LONG)
    logits = []
    for each in [read, *read.overflowing]:
        rows = {"input_ids": each.ids, "attention_mask": each.attention_mask, "token_type_ids": each.type_ids}
        logits.append(plain._run(None, {name: np.array([row], np.int64) for name, row in rows.items()})[0][0, 0])
    assert len(logits) > 3
    (answer,) = asked.infer("whole_reranker", {"text": [["the cold river", LONG]]}).answers
    assert answer.number.value == pytest.approx(1 / (1 + np.exp(-max(logits))), abs=1e-5)


def test_a_regression_is_a_number_as_it_is(asked: Runtime, presets: Path) -> None:
    (answer,) = asked.infer("rating", {"text": [TEXTS[0]]}).answers
    assert answer.number.value == pytest.approx(float(PlainModel(presets / "rating").output(TEXTS[0])[0]), abs=1e-5)


def test_labels_of_the_request_are_chosen_from_by_entailment(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "chooser")
    labels = ["film", "river", "train station"]
    answers = asked.infer("chooser", {"text": [[TEXTS[0], *labels], [TEXTS[1], *labels]]}).answers
    for text, answer in zip(TEXTS, answers, strict=False):
        follows = [plain.output(text, f"This example is {label}.")[2] for label in labels]
        assert scores_of(answer) == pytest.approx(
            dict(zip(labels, bert_models.softmax(np.array(follows)), strict=True)), abs=1e-5
        )
    with pytest.raises(TensorMismatch, match="a row has 0 labels; wanted 1 to 100"):
        asked.infer("chooser", {"text": [[TEXTS[0]]]})


def test_several_labels_of_the_request_may_be_right(asked: Runtime, presets: Path) -> None:
    plain = PlainModel(presets / "several")
    labels = ["film", "river"]
    (answer,) = asked.infer("several", {"text": [[TEXTS[0], *labels]]}).answers
    for label in labels:
        against, _, follows = plain.output(TEXTS[0], f"It is of {label}.")
        assert scores_of(answer)[label] == pytest.approx(1 / (1 + np.exp(against - follows)), abs=1e-5)


# ---- in a pipeline --------------------------------------------------------------------------------------------------


def test_a_pipeline_hands_a_text_to_its_model_as_it_is(tmp_path: Path) -> None:
    bert_models.classifier(tmp_path / "sentiment")
    (tmp_path / "flow").mkdir()
    step = '[[step]]\nname = "look"\nmodel = "sentiment"\ninputs = {text = "input.review"}\n'
    step += '[output]\nmood = "look.logits"\n'
    (tmp_path / "flow" / "pipeline.toml").write_text(step)
    with Runtime(tmp_path) as runtime:
        for text in ("good", "the film was great"):  # four letters are base64, too
            wanted = runtime.infer("sentiment", {"text": [text]}).answers
            assert runtime.infer("flow", {"review": [text]}).answers == wanted
