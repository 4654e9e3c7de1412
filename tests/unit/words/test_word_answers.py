"""Answers that need no picture: numbers, tags of tokens, and embeddings of tokens, from arrays to words and JSON."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.answers import (
    Answer,
    Number,
    Tag,
    answer_fields,
    answer_kinds,
    answers_from_fields,
    answers_of,
    layout_of,
    steps_of_host,
)
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.steps_instance import AnswerSteps, TextRow
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import ModelSteps, OutputSteps
from edge_runtime.tensors import bf16_from_fp32
from edge_runtime.words.values import number_text
from tests.unit.hosts.test_steps_instance import Outputs

X = TensorSpec("x", "FP32", (DYNAMIC, 4))
IDS = TensorSpec("input_ids", "INT64", (DYNAMIC, DYNAMIC))
COUNTS = TensorSpec("attention_mask", "INT64", (DYNAMIC, DYNAMIC))
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def words(array, output, labels=(), shape=None, datatype="FP32", inputs=None, places=()) -> list[Answer]:
    """The answers of one output's rows, as a caller has them."""
    array = np.asarray(array)
    steps = ModelSteps({}, {"out": output}, {"out": tuple(labels)} if labels else {})
    inputs = {"x": np.zeros((len(array), 4), np.float32)} if inputs is None else inputs
    specs = tuple(each for each in (X, IDS, COUNTS) if each.name in inputs)
    spec = ModelSpec(specs, (TensorSpec("out", datatype, shape or (DYNAMIC, *array.shape[1:])),))
    made = AnswerSteps(Outputs(spec), steps_of_host(steps), None)
    (told,) = made.make({"out": array}, inputs, places)
    assert made.specs[0].fits(told.shape)
    return answers_of(steps, {"out": told})


def there_and_back(answer: Answer) -> Answer:
    (back,) = answers_from_fields(answer_fields([answer], as_list=False))
    return back


# ---- kinds ----------------------------------------------------------------------------------------------------------


def test_every_kind_that_an_output_can_declare_has_a_layout_and_a_field():
    for kind in answer_kinds():
        assert layout_of(kind).name == kind
        assert kind in Answer.__struct_fields__


def test_a_kind_that_nothing_declares_is_refused_with_the_kinds_there_are():
    with pytest.raises(ValueError, match=r"output.y.answer: got 'clases', wanted one of classes, number, text"):
        ModelSettings(output={"y": OutputSteps(answer="clases")})
    with pytest.raises(ValueError, match="got 'picture'"):
        ModelSettings(output={"y": OutputSteps(answer="picture")})


def test_fields_that_a_newer_daemon_has_are_left_out():
    assert answers_from_fields({"text": "a", "smell": [1]}) == [Answer(text="a")]


def test_a_host_gets_the_text_of_labels_where_an_answer_needs_it():
    outputs = {"y": OutputSteps(answer="tags"), "z": OutputSteps(answer="classes", wanted=("b",))}
    steps = steps_of_host(ModelSteps({}, outputs, {"y": ("O", "B-X"), "z": ("a", "b")}))
    assert steps.labels == {"y": ("O", "B-X"), "z": ("", "b")}


# ---- number ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "datatype", "told"),
    [
        (np.array([[21.1], [3.0]], np.float32), "FP32", [21.1, 3.0]),
        (np.array([21.1, 3.0], np.float32), "FP32", [21.1, 3.0]),
        (np.array([[[0.1]]], np.float64), "FP64", [0.1]),
        (np.array([[0.1]], np.float16), "FP16", [0.1]),
        (bf16_from_fp32(np.array([[0.5]], np.float32)), "BF16", [0.5]),
        (np.array([[2**60]], np.int64), "INT64", [2**60]),
        (np.array([[math.nan], [math.inf]], np.float32), "FP32", [None, None]),
    ],
)
def test_a_number_is_told_as_it_is(array, datatype, told):
    found = words(array, OutputSteps(answer="number"), datatype=datatype)
    assert [each.number for each in found] == [Number(value) for value in told]


def test_a_number_has_its_unit_in_words_and_json():
    (answer,) = words([[21.5]], OutputSteps(answer="number", unit="°C"), shape=(DYNAMIC, 1), datatype="FP64")
    assert answer_fields([answer], as_list=False) == {"number": {"value": 21.5, "unit": "°C"}}
    assert there_and_back(answer) == answer
    assert layout_of("number").lines(answer.number, ()) == ["21.5 °C"]
    assert number_text(Number(3, "%")) == "3%"
    assert number_text(Number(None)) == "not a number"


@pytest.mark.parametrize(
    ("shape", "datatype"), [((DYNAMIC, 2), "FP32"), ((DYNAMIC,), "BYTES"), ((DYNAMIC, -1), "FP32")]
)
def test_an_output_that_is_not_one_number_a_row_fails_the_load(shape, datatype):
    with pytest.raises(LoadFailed, match=r"wants one number a row: \[rows\] or \[rows, 1\]"):
        AnswerSteps(
            Outputs(ModelSpec((X,), (TensorSpec("out", datatype, shape),))),
            ModelSteps({}, {"out": OutputSteps(answer="number")}),
            None,
        )


# ---- embeddings of tokens -------------------------------------------------------------------------------------------


TOKENS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def unit(vector):
    return np.asarray(vector) / np.linalg.norm(vector)


def test_an_embedding_is_the_mean_of_the_tokens_that_count():
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    inputs = {"input_ids": np.zeros((2, 3), np.int64), "attention_mask": mask}
    found = words(TOKENS, OutputSteps(answer="embedding", pool="mean"), inputs=inputs, shape=(DYNAMIC, DYNAMIC, 4))
    assert found[0].embedding == pytest.approx(unit(TOKENS[0, :2].mean(axis=0)), abs=1e-6)
    assert found[1].embedding == pytest.approx(unit(TOKENS[1].mean(axis=0)), abs=1e-6)


def test_an_embedding_without_an_attention_mask_is_the_mean_of_all_tokens():
    (found, _) = words(TOKENS, OutputSteps(answer="embedding", pool="mean"))
    assert found.embedding == pytest.approx(unit(TOKENS[0].mean(axis=0)), abs=1e-6)


def test_an_embedding_is_the_first_token_where_that_is_declared():
    (_, found) = words(TOKENS, OutputSteps(answer="embedding", pool="cls"), shape=(DYNAMIC, DYNAMIC, 4))
    assert found.embedding == pytest.approx(unit(TOKENS[1, 0]), abs=1e-6)
    assert there_and_back(found).embedding == pytest.approx(found.embedding)


def test_vectors_of_tokens_want_their_pool():
    with pytest.raises(LoadFailed, match='a vector for each token; say pool = "mean" or "cls"'):
        words(TOKENS, OutputSteps(answer="embedding"), shape=(DYNAMIC, DYNAMIC, 4))
    with pytest.raises(LoadFailed, match=r"pool wants \[rows, tokens, n\]"):
        words(TOKENS[:, 0], OutputSteps(answer="embedding", pool="mean"))


# ---- tags -----------------------------------------------------------------------------------------------------------


def scores_of(rows, sure=0.9):
    """Probabilities [rows, tokens, labels] whose best label is the named one."""
    rest = (1 - sure) / (len(LABELS) - 1)
    return np.array(
        [[[sure if label == each else rest for label in LABELS] for each in row] for row in rows], np.float32
    )


TEXT = "Ada Lovelace met Bob in Rome"
READ = TextRow(TEXT, [(0, 0), (0, 3), (4, 8), (8, 12), (13, 16), (17, 20), (21, 23), (24, 28), (0, 0), (0, 0)])
FOUND = ["O", "B-PER", "I-PER", "I-PER", "O", "B-PER", "O", "I-LOC", "I-LOC", "B-LOC"]
"""The first token and the last two stand for nothing."""


def test_tokens_of_one_tag_are_joined_to_a_span_of_the_text():
    (answer,) = words(scores_of([FOUND]), OutputSteps(answer="tags", softmax=False), LABELS, places=[READ])
    assert [(each.label, each.start, each.end, each.text) for each in answer.tags] == [
        ("PER", 0, 12, "Ada Lovelace"),
        ("PER", 17, 20, "Bob"),
        ("LOC", 24, 28, "Rome"),
    ]
    assert [each.index for each in answer.tags] == [1, 1, 4]
    assert answer.tags[0].score == pytest.approx(0.9, abs=1e-6)
    assert there_and_back(answer).tags[2].text == "Rome"
    assert layout_of("tags").lines(answer.tags, ())[1] == "PER  0.9000  17..20  Bob"
    assert layout_of("tags").short(answer.tags) == ["PER Ada Lovelace", "PER Bob", "LOC Rome"]


def test_a_tag_that_begins_anew_is_one_of_its_own():
    read = TextRow("a b c", [(0, 1), (2, 3), (4, 5)])
    (answer,) = words(
        scores_of([["B-PER", "B-PER", "I-LOC"]]), OutputSteps(answer="tags", softmax=False), LABELS, places=[read]
    )
    assert [(each.label, each.text) for each in answer.tags] == [("PER", "a"), ("PER", "b"), ("LOC", "c")]


def test_tags_of_tensors_are_told_by_their_tokens_without_padding():
    inputs = {"input_ids": np.zeros((1, 10), np.int64), "attention_mask": np.array([[1] * 8 + [0] * 2])}
    (answer,) = words(scores_of([FOUND]), OutputSteps(answer="tags", softmax=False), LABELS, inputs=inputs)
    assert answer.tags == tuple(
        Tag(label, index, pytest.approx(0.9), start, end)
        for label, index, start, end in (("PER", 1, 1, 4), ("PER", 1, 5, 6), ("LOC", 4, 7, 8))
    )
    assert answer_fields([answer], as_list=False)["tags"][1] == {
        "label": "PER", "index": 1, "score": 0.9, "start": 5, "end": 6,
    }  # fmt: skip


def test_logits_of_tokens_become_probabilities():
    logits = np.log(scores_of([["B-LOC"]], sure=0.6)) + 3
    (answer,) = words(logits, OutputSteps(answer="tags", softmax=True), LABELS)
    assert answer.tags[0].score == pytest.approx(0.6, abs=1e-6)


def test_only_wanted_tags_above_the_threshold_are_told():
    row = scores_of([FOUND])
    row[0, 5, 1] = 0.5
    wanted = OutputSteps(answer="tags", softmax=False, wanted=("PER",), threshold=0.7)
    (answer,) = words(row, wanted, LABELS, places=[READ])
    assert [each.text for each in answer.tags] == ["Ada Lovelace"]
    with pytest.raises(LoadFailed, match="wanted has 'B-PER', which is none of its tags"):
        words(row, OutputSteps(answer="tags", softmax=False, wanted=("B-PER",)), LABELS)


def test_a_tag_whose_score_is_not_a_number_is_not_told():
    row = scores_of([FOUND])
    row[0, 5] = math.nan
    (answer,) = words(row, OutputSteps(answer="tags", softmax=False), LABELS, places=[READ])
    assert [each.text for each in answer.tags] == ["Ada Lovelace", "Rome"]


def test_labels_without_prefixes_are_joined_while_they_stay_the_same():
    read = TextRow("ab cd", [(0, 1), (1, 2), (3, 5)])
    scores = np.array([[[0.1, 0.9], [0.2, 0.8], [0.9, 0.1]]], np.float32)
    (answer,) = words(scores, OutputSteps(answer="tags", softmax=False), ("O", "NOUN"), places=[read])
    assert [(each.label, each.text, each.score) for each in answer.tags] == [("NOUN", "ab", pytest.approx(0.85))]
