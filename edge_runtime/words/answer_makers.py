"""Outputs as answers that need no picture, in the host: the arrays that words/values.py reads.

Owns: what each kind asks of an output, and the arithmetic. hosts/steps_instance.py makes them by the table of answers,
each with the output, its steps, its labels, and the model's tensors. Thread: any runner of the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.hosts.steps_instance import FLOATS, DeclaredOutput, PlainOutput, RunRows, TextRow
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.steps import OutputSteps
from edge_runtime.tensors import Array

Floats = npt.NDArray[np.float32]

INTEGERS = ("BOOL", "UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64")
"""Datatypes of numbers that are told without a point, and of classes that a model chose itself."""

DEFAULT_THRESHOLD = OutputSteps().threshold
"""Classes are left out only above it: a model's best guess is an answer, however unsure."""

BLANKS = ("<blank>", "[blank]", "<pad>", "[PAD]", "")
"""Labels that CTC's blank has in files of alphabets."""

ATTENTION_MASK = "attention_mask"
"""The input that says which tokens count, in every model that `transformers` exports: 1 for those, 0 for padding."""

OUTSIDE = "O"
"""The label of a token that is none of the tags (IOB2: Ramshaw and Marcus, 1995)."""

_BEGINS, _GOES_ON = ("B-", "S-", "U-"), ("I-", "E-", "L-")
"""Prefixes of IOB2, IOBES and BILOU."""


class ScoredOutput(PlainOutput):
    """Scores that may be logits. is_logits: None until it is known."""

    def __init__(self, spec: TensorSpec, output: OutputSteps) -> None:
        super().__init__(spec)
        self._is_sigmoid = output.sigmoid is True
        self.is_logits = False if self._is_sigmoid else output.softmax

    def probabilities(self, scores: Floats) -> Floats:
        """The scores of classes along the last axis, as they are told."""
        if self._is_sigmoid:
            return _sigmoid(scores)
        if not self.is_logits:
            return scores
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found: Floats = powers / powers.sum(axis=-1, keepdims=True)
        return found


class ClassesOutput(ScoredOutput):
    """The best classes of a row of scores."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: these are not scores of classes, or not of these labels."""
        spec, output, labels = declared.spec, declared.steps, declared.labels
        check_floats(spec, "classes")
        count = row_length(spec)
        check_labels(spec, labels, count)
        super().__init__(TensorSpec(spec.name, "FP32", (DYNAMIC, min(output.top_k, count), 2)), output)
        self._top = min(output.top_k, count)
        self._threshold = output.threshold if output.threshold > DEFAULT_THRESHOLD else -math.inf
        self._others = np.ones(count, np.bool_) if output.wanted else np.zeros(count, np.bool_)
        for label in output.wanted:
            if label not in labels:
                raise LoadFailed(f"[output.{spec.name}]: wanted has {label!r}, which is none of {len(labels)} labels")
            self._others[list(labels).index(label)] = False

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """FP32 [rows, top, 2]: index and score, best first; -1 and 0 in the rest.

        A score that is not a number is left out; one among a row's logits leaves no probability in it.
        """
        scores = self.probabilities(rows_of(results, self.spec.name, rows.count))
        scores = np.where(np.isnan(scores) | self._others, np.float32(-np.inf), scores)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top]
        told = np.take_along_axis(scores, best, 1)
        is_told = told > self._threshold
        return np.stack([np.where(is_told, best, -1), np.where(is_told, told, 0)], axis=2).astype(np.float32)


class NumberOutput(PlainOutput):
    """One number a row."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: it does not hold one number a row."""
        spec = declared.spec
        if spec.datatype not in (*FLOATS, *INTEGERS[1:]) or any(length != 1 for length in spec.shape[1:]):
            raise LoadFailed(
                f'[output.{spec.name}]: it is {spec.datatype} {list(spec.shape)}; answer = "number" wants one number a '
                "row: [rows] or [rows, 1]"
            )
        self._is_sigmoid = declared.steps.sigmoid is True
        kept = "FP32" if self._is_sigmoid or spec.datatype == "BF16" else spec.datatype
        super().__init__(TensorSpec(spec.name, kept, (DYNAMIC,)))

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """[rows], of the model's own datatype; FP32 where it is made of a logit."""
        numbers = checked_rows(results, self.spec.name, rows.count).reshape(rows.count)
        return _sigmoid(numbers.astype(np.float32, copy=False)) if self._is_sigmoid else numbers


class EmbeddingOutput(PlainOutput):
    """Vectors of length 1, of a row or of its tokens together."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: it does not hold floats of a known number, or of tokens."""
        spec, self._pool = declared.spec, declared.steps.pool
        check_floats(spec, "embedding")
        is_of_tokens = len(spec.shape) == 3 and spec.shape[2] > 0
        if self._pool is not None and not is_of_tokens:
            raise LoadFailed(
                f"[output.{spec.name}]: its shape is {list(spec.shape)}; pool wants [rows, tokens, n] with a known n"
            )
        if self._pool is None and is_of_tokens and spec.shape[1] == DYNAMIC:
            raise LoadFailed(
                f'[output.{spec.name}]: its shape is {list(spec.shape)}, a vector for each token; say pool = "mean" or '
                '"cls", as the model was trained'
            )
        super().__init__(TensorSpec(spec.name, "FP32", (DYNAMIC, spec.shape[2] if self._pool else row_length(spec))))

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """FP32 [rows, length], each of length 1; zeros stay zeros, and NaN stays NaN."""
        if self._pool is None:
            vectors = rows_of(results, self.spec.name, rows.count)
        else:
            tokens = checked_rows(results, self.spec.name, rows.count).astype(np.float32, copy=False)
            vectors = tokens[:, 0] if self._pool == "cls" else _mean_of_tokens(tokens, rows)
        lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True).astype(np.float32)
        units: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
        return units


class TextOutput(PlainOutput):
    """Texts, as they are or of the best character of each step."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: it is not text, nor are these scores of its characters."""
        spec, labels = declared.spec, declared.labels
        super().__init__(TensorSpec(spec.name, "BYTES", (DYNAMIC,)))
        self._letters: list[str] = []
        if spec.datatype == "BYTES":
            if len(spec.shape) not in (1, 2) or (len(spec.shape) == 2 and spec.shape[1] != 1):
                raise LoadFailed(
                    f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted one text a row: [rows]"
                )
            return
        wanted = "BYTES [rows], or scores of characters, FP32 [rows, steps, characters]"
        if spec.datatype not in FLOATS or len(spec.shape) != 3 or spec.shape[2] == DYNAMIC:
            raise LoadFailed(f"[output.{spec.name}]: it is {spec.datatype} {list(spec.shape)}; wanted {wanted}")
        count = spec.shape[2]
        self._letters = ["", *labels] if len(labels) == count - 1 else list(labels)
        blanks = [index for index, label in enumerate(self._letters) if label in BLANKS]
        if len(self._letters) != count or not blanks:
            raise LoadFailed(
                f"[output.{spec.name}]: there are {len(labels)} labels for {count} characters; wanted {count - 1}, "
                f"where the blank is the model's first, or {count} with a line <blank> in its place"
            )
        self._blank = blanks[0]

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """BYTES [rows], UTF-8: the model's own, or the best character of each step, repeats and blanks taken out."""
        array = checked_rows(results, self.spec.name, rows.count)
        texts: Array = np.empty(rows.count, object)
        if not self._letters:
            texts[:] = [
                each.encode() if isinstance(each, str) else bytes(each) for each in array.reshape(rows.count).tolist()
            ]
            return texts
        best = array.argmax(axis=2)
        is_told = best != self._blank
        is_told[:, 1:] &= best[:, 1:] != best[:, :-1]
        for row in range(rows.count):
            texts[row] = "".join(self._letters[index] for index in best[row][is_told[row]]).encode()
        return texts


class TagsOutput(ScoredOutput):
    """A label for each token, joined to spans."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: these are not scores of tokens, or not of these labels."""
        spec, labels = declared.spec, declared.labels
        check_floats(spec, "tags")
        if len(spec.shape) != 3 or spec.shape[2] == DYNAMIC:
            raise LoadFailed(
                f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted [rows, tokens, labels] with a known "
                "last length"
            )
        check_labels(spec, labels, spec.shape[2])
        super().__init__(TensorSpec(spec.name, "BYTES", (DYNAMIC,)), declared.steps)
        self._parts = [_parts_of(label) for label in labels or map(str, range(spec.shape[2]))]
        self._wanted = declared.steps.wanted
        self._threshold = declared.steps.threshold if declared.steps.threshold > DEFAULT_THRESHOLD else -math.inf
        unknown = set(self._wanted) - {tag for _, tag in self._parts}
        if unknown:
            raise LoadFailed(f"[output.{spec.name}]: wanted has {min(unknown)!r}, which is none of its tags")

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """BYTES [rows]: JSON, for each tag in order [label, index, score, start, end, text], text null where unknown.

        score: the mean of its tokens'. start, end: characters of the text, or tokens where a tensor was sent.
        """
        scores = self.probabilities(checked_rows(results, self.spec.name, rows.count).astype(np.float32, copy=False))
        best = scores.argmax(axis=2)
        told = np.take_along_axis(scores, best[:, :, None], 2)[:, :, 0]
        counts = _counting_tokens(rows, scores.shape[1])
        found: Array = np.empty(rows.count, object)
        for row in range(rows.count):
            read = rows.places[row] if rows.places else None
            found[row] = msgspec.json.encode(
                self._tags(best[row].tolist(), told[row].tolist(), counts[row].tolist(), read)
            )
        return found

    def _tags(
        self, best: Sequence[int], scores: Sequence[float], counts: Sequence[bool], read: TextRow | None
    ) -> list[tuple[object, ...]]:
        """The tags of one row. As `transformers` groups entities by aggregation_strategy="simple"."""
        spans: list[tuple[str, list[int]]] = []  # of tokens
        last = ""
        for token, index in enumerate(best):
            if not counts[token] or (read is not None and not _has_characters(read, token)):
                continue  # a special token or padding is between no two words
            begins, tag = self._parts[index]
            if tag == last and not begins:
                spans[-1][1].append(token)
            else:
                spans.append((tag, [token]))
            last = tag
        found: list[tuple[object, ...]] = []
        for tag, tokens in spans:
            score = sum(scores[token] for token in tokens) / len(tokens)
            if tag == OUTSIDE or (self._wanted and tag not in self._wanted) or not score > self._threshold:
                continue
            start, end = tokens[0], tokens[-1] + 1
            text = None
            if read is not None:
                start, end = read.offsets[tokens[0]][0], read.offsets[tokens[-1]][1]
                text = read.text[start:end]
            found.append((tag, best[tokens[0]], score, start, end, text))
        return found


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _counting_tokens(rows: RunRows, tokens: int) -> npt.NDArray[np.bool_]:
    """Which tokens count, [rows, tokens]: by the model's attention mask; all, where it has none."""
    mask = rows.inputs.get(ATTENTION_MASK)
    if mask is None or mask.shape != (rows.count, tokens):
        return np.ones((rows.count, tokens), np.bool_)
    is_counting: npt.NDArray[np.bool_] = mask != 0
    return is_counting


def _has_characters(read: TextRow, token: int) -> bool:
    """Whether a token stands for characters of the text. Rows may be padded beyond what was read."""
    start, end = read.offsets[token] if token < len(read.offsets) else (0, 0)
    return start < end


def _mean_of_tokens(tokens: Floats, rows: RunRows) -> Floats:
    """The mean of the tokens that count (sentence-transformers, `models/Pooling.py`). tokens: [rows, tokens, n]."""
    weights = _counting_tokens(rows, tokens.shape[1]).astype(np.float32)[:, :, None]
    mean: Floats = (tokens * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), np.float32(1e-9))
    return mean


def _parts_of(label: str) -> tuple[bool, str]:
    """Whether a label begins a tag, and the tag: B-PER is (True, PER), I-PER (False, PER), O (False, O)."""
    if label.startswith(_BEGINS + _GOES_ON) and len(label) > 2:
        return label.startswith(_BEGINS), label[2:]
    return False, label


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _sigmoid(logits: Floats) -> Floats:
    """Probabilities of logits, each by itself."""
    found: Floats = (1 / (1 + np.exp(-logits))).astype(np.float32)
    return found


def row_length(spec: TensorSpec) -> int:
    """Numbers of one row. Raises LoadFailed: it is left open, or there are no rows."""
    if len(spec.shape) < 2 or not spec.has_fixed_inner_shape or 0 in spec.shape[1:]:
        raise LoadFailed(
            f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted [rows, n] with known lengths behind axis 0"
        )
    return math.prod(spec.shape[1:])


def check_floats(spec: TensorSpec, kind: str) -> None:
    """Raise LoadFailed unless it holds floats."""
    if spec.datatype not in FLOATS:
        raise LoadFailed(f'[output.{spec.name}]: it is {spec.datatype}; answer = "{kind}" wants {", ".join(FLOATS)}')


def check_labels(spec: TensorSpec, labels: Sequence[str], classes: int) -> None:
    """Raise LoadFailed where the number of labels is another than that of classes."""
    if labels and len(labels) != classes:
        raise LoadFailed(f"[output.{spec.name}]: there are {len(labels)} labels, and the model has {classes} classes")


def rows_of(results: Mapping[str, Array], name: str, rows: int) -> Floats:
    """FP32 [rows, n] of an output of any rank."""
    return checked_rows(results, name, rows).reshape(rows, -1).astype(np.float32, copy=False)


def checked_rows(results: Mapping[str, Array], name: str, rows: int) -> Array:
    """Return an output, which has a row for each row of the input. Raises RunFailed: it has not."""
    array = results[name]
    if not array.ndim or len(array) != rows:
        raise RunFailed(f"output {name} has the shape {list(array.shape)} for {rows} rows; wanted as many along axis 0")
    return array
