"""Made-up texts for a model's first runs: a sentence or two. Thread: the loader's."""

from __future__ import annotations

import numpy as np

from edge_runtime.model_spec import TensorSpec
from edge_runtime.steps import InputKind
from edge_runtime.tensors import Array
from edge_runtime.text.text_input import LABELLED, PAIR

LENGTHS = (20, 4, 40, 9, 120, 12, 60, 28)
"""Words of made-up texts, by turns: questions, sentences, a paragraph. The first is that of SENTENCE."""

SENTENCE = b"It rained all night, and by the morning the river had risen to the second step of the old stairs."
"""Of 20 words of everyday English: a text of the first runs."""


def made_up(sent: TensorSpec, kind: InputKind) -> Array:
    """A text, a pair of texts, or a text with two labels, once for each row that the model has at least.

    The first is a sentence; others have fewer words, or several sentences.
    """
    rows = max(sent.shape[0], 1)
    words = SENTENCE.split()
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(rows)]
    texts: Array = np.empty(rows, object)
    texts[:] = [b" ".join((words * (length // len(words) + 1))[:length]) for length in lengths]
    if kind not in (PAIR, LABELLED):
        return texts
    beside: Array = np.full(rows, b"rain", object)  # it leaves room for a passage
    return np.stack([beside, texts] if kind == PAIR else [texts, beside, beside], axis=1)
