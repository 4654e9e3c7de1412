"""Made-up texts for a model's first runs: a sentence or two. Thread: the loader's."""

from __future__ import annotations

import numpy as np

from edge_runtime.model_spec import TensorSpec
from edge_runtime.steps import InputKind
from edge_runtime.tensors import Array
from edge_runtime.text.text_input import LABELLED, PAIR

SENTENCE = b"It rained all night, and by the morning the river had risen to the second step of the old stairs."


def made_up(sent: TensorSpec, kind: InputKind) -> Array:
    """A text, a pair of texts, or a text with two labels, once for each row that the model has at least."""
    rows = max(sent.shape[0], 1)
    shape = {PAIR: (rows, 2), LABELLED: (rows, 3)}.get(kind, (rows,))
    texts: Array = np.full(shape, SENTENCE, object)
    if kind == PAIR:
        texts[:, 0] = b"rain"  # it leaves room for a passage
    if kind == LABELLED:
        texts[:, 1:] = b"rain"
    return texts
