"""Parts of texts: how a model is run on them, and how what it gave is put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import ModelSteps, OutputSteps
from edge_runtime.text.joined_parts import MOST_LABELS, MOST_TOKENS, JoinedParts, SentText
from edge_runtime.text.text_steps import TextSteps

LOGITS = TensorSpec("logits", "FP32", (DYNAMIC, 2))


def model(
    rows: int = DYNAMIC, tokens: int = DYNAMIC, *, has_mask: bool = True, output: TensorSpec = LOGITS
) -> ModelSpec:
    names = ("input_ids", "attention_mask") if has_mask else ("input_ids",)
    return ModelSpec(tuple(TensorSpec(name, "INT64", (rows, tokens)) for name in names), (output,))


def parts(steps: TextSteps, spec: ModelSpec, **output: Any) -> JoinedParts:
    return JoinedParts(steps, ModelSteps({}, {"logits": OutputSteps(**output)}), spec)


def texts(*lengths: tuple[int, ...], is_pair: bool = False) -> list[SentText]:
    return [SentText("", (), each, is_pair) for each in lengths]


class Runs:
    """A model whose logits are the number of a row's ids, and of those that are not zero; it keeps the shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tensors: Any) -> list[Any]:
        ids = tensors["input_ids"]
        self.shapes.append(ids.shape)
        return [np.stack([np.full(len(ids), ids.shape[1]), (ids != 0).sum(axis=1)], axis=1).astype(np.float32)]


def ids_of(*lengths: int) -> dict[str, Any]:
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = 1
    return {"input_ids": ids, "attention_mask": ids}


def test_rows_of_one_request_are_one_run() -> None:
    run = Runs()
    parts(TextSteps(), model()).run(run, ids_of(3, 5), texts((3,), (5,)))
    assert run.shapes == [(2, 5)]


def test_a_model_without_a_mask_gets_no_padding() -> None:
    run = Runs()
    (logits,) = parts(TextSteps(), model(has_mask=False)).run(run, ids_of(3, 5), texts((3,), (5,)))
    assert run.shapes == [(1, 3), (1, 5)]
    assert logits.tolist() == [[3, 3], [5, 5]]


def test_a_model_of_one_row_is_run_once_for_each_window() -> None:
    run = Runs()
    tensors = ids_of(8, 8, 4)
    parts(TextSteps(windows=True), model(rows=1, tokens=8)).run(run, tensors, texts((8, 8, 4)))
    assert run.shapes == [(1, 8)] * 3


def test_many_windows_are_run_some_at_a_time() -> None:
    run = Runs()
    count = MOST_TOKENS // 512 + 1
    tensors = ids_of(*[512] * count)
    (logits,) = parts(TextSteps(windows=True), model()).run(run, tensors, texts((512,) * count))
    assert run.shapes == [(count - 1, 512), (1, 512)]
    assert logits.shape == (count, 2)


def test_scores_of_windows_weigh_as_much_as_they_have_tokens() -> None:
    joins = parts(TextSteps(windows=True), model())
    logits = np.array([[1, 0], [4, 0], [7, 7]], np.float32)
    found, _ = joins.join({"logits": logits}, ids_of(4, 2, 3), texts((4, 2), (3,)))
    assert found["logits"].tolist() == [[2, 0], [7, 7]]


def test_a_number_of_a_pair_is_its_best_windows_and_of_a_text_the_mean() -> None:
    one = TensorSpec("logits", "FP32", (DYNAMIC, 1))
    joins = parts(TextSteps(windows=True), model(output=one), answer="number")
    logits = np.array([[1], [3]], np.float32)
    pair, _ = joins.join({"logits": logits}, ids_of(2, 2), texts((2, 2), is_pair=True))
    text, _ = joins.join({"logits": logits}, ids_of(2, 2), texts((2, 2)))
    assert (pair["logits"].tolist(), text["logits"].tolist()) == ([[3]], [[2]])


def test_tokens_of_windows_stand_in_line_with_their_mask() -> None:
    spec = TensorSpec("logits", "FP32", (DYNAMIC, DYNAMIC, 1))
    joins = parts(TextSteps(windows=True), model(output=spec), answer="embedding", pool="mean")
    tokens = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
    found, inputs = joins.join({"logits": tokens}, ids_of(2, 1, 2), texts((2, 1), (2,)))
    assert found["logits"][:, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_labels_of_a_request_get_shares_and_nothing_stands_behind_them() -> None:
    spec = TensorSpec("logits", "FP32", (DYNAMIC, 3))
    joins = parts(TextSteps(hypothesis="{}", entailment=2), model(output=spec))
    assert joins.spec(model(output=spec)).outputs[0].shape == (DYNAMIC, MOST_LABELS)
    logits = np.array([[9, 0, 1], [9, 0, 1]], np.float32)
    found, _ = joins.join({"logits": logits}, ids_of(1, 1), [SentText("", (), (1, 1), labels=("a", "b"))])
    assert found["logits"][0, :2].tolist() == [0.5, 0.5]
    assert np.isnan(found["logits"][0, 2:]).all()


@pytest.mark.parametrize(("shape", "entailment"), [((DYNAMIC, 1), None), ((DYNAMIC, 3), 3), ((DYNAMIC, 4, 3), None)])
def test_a_hypothesis_wants_a_model_of_entailment(shape: tuple[int, ...], entailment: int | None) -> None:
    with pytest.raises(LoadFailed, match="a hypothesis wants the scores of a model of entailment"):
        parts(TextSteps(hypothesis="{}", entailment=entailment), model(output=TensorSpec("logits", "FP32", shape)))


def test_bare_outputs_are_those_of_each_texts_first_window() -> None:
    joins = parts(TextSteps(windows=True), model())
    (found,) = joins.bare([np.array([[1], [2], [3]])], texts((4, 2), (3,)))
    assert found.tolist() == [[1], [3]]
