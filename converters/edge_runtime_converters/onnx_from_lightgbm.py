"""LightGBM (its text file, or a booster in memory) to ONNX.

Owns: what LightGBM's trees mean, by its text format (`x <= threshold` with thresholds in double, what counts as
missing, categories to the left), and what each objective makes of their sums. Source: LightGBM's src/io/tree.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.forest import LARGEST_ZERO, Ending, Forest, float32_below, label_array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first

EXTRA = "convert-lightgbm"

ENDINGS: Mapping[str, Ending] = {
    "": "none", "binary": "binary", "multiclass": "softmax", "multiclassova": "each by itself",
    "cross_entropy": "sigmoid", "cross_entropy_lambda": "softplus",
    **dict.fromkeys(("poisson", "gamma", "tweedie"), "exp"),
    **dict.fromkeys(
        ("regression", "regression_l1", "huber", "fair", "quantile", "mape", "lambdarank", "rank_xendcg"), "none"
    ),
}  # fmt: skip
"""The ending of an objective's sums; "" is the trainer's own. Source: ConvertOutput in src/objective, LightGBM 4.7."""

_CATEGORICAL, _DEFAULT_LEFT, _MISSING_SHIFT = 1, 2, 2
_MISSING_NONE, _MISSING_ZERO, _MISSING_NAN = 0, 1, 2


class LightgbmModel:
    """A booster. An `Original`."""

    def __init__(self, lightgbm: Any, booster: Any, ending: Ending, classes: Sequence[str | int]) -> None:
        self.described = f"LightGBM {lightgbm.__version__}"
        self._booster = booster
        self._ending = ending
        self._classes = classes

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("LightGBM cannot run it"):
            found = np.asarray(self._booster.predict(features))
        if self._ending == "binary":
            found = np.stack([1 - found, found], axis=1)
        elif self._ending not in ("softmax", "each by itself"):
            return rows_first([found])
        return [label_array(self._classes or range(found.shape[1]), found.argmax(axis=1)), found]


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a LightGBM text file as ONNX; returns the source, loaded. shapes: unused. Raises ConversionFailed."""
    lightgbm = import_library("lightgbm", EXTRA)
    with failing_as(f"{source}: LightGBM {lightgbm.__version__} cannot read it"):
        booster = lightgbm.Booster(model_str=source.read_text(encoding="utf-8"))
    return convert_model(booster, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a `lightgbm.Booster` (or a wrapper that has one) as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are label and probabilities; only a wrapper knows names
    of classes. Raises ConversionFailed.
    """
    lightgbm = import_library("lightgbm", EXTRA)
    booster = model if isinstance(model, lightgbm.Booster) else model.booster_
    with failing_as("this booster is not as LightGBM's format says"):
        head, trees = _sections(booster.model_to_string())
        objective, words = _objective(head.get("objective", ""))
        ending = _ending(objective, words)
        forest = _forest(head, trees)
        named = getattr(model, "classes_", None)  # of a wrapper: numbers or text
        classes = [] if named is None else [name if isinstance(name, int) else str(name) for name in named.tolist()]
    forest.write(
        Path(target), ending, base=[0.0] * forest.targets, scale=float(words.get("sigmoid", 1.0)), classes=classes,
        made_by=f"LightGBM {lightgbm.__version__}, {objective or 'an objective of its trainer'}",
    )  # fmt: skip
    return LightgbmModel(lightgbm, booster, ending, classes)


# ---- private --------------------------------------------------------------------------------------------------------

_Section = Mapping[str, str]


def _sections(text: str) -> tuple[_Section, list[_Section]]:
    """The head of a model's text, and its trees."""
    model = text.partition("\nend of trees")[0]
    head, *trees = model.split("\nTree=")
    return _keys(head), [_keys(tree) for tree in trees]


def _keys(section: str) -> _Section:
    found = {}
    for line in section.splitlines():
        key, equals, value = line.partition("=")
        found[key.strip()] = value.strip() if equals else "1"  # average_output stands alone
    return found


def _objective(said: str) -> tuple[str, Mapping[str, str]]:
    """An objective's name and its settings: "binary sigmoid:1"."""
    name, *rest = said.split(" ")
    return name, {word.partition(":")[0]: word.partition(":")[2] for word in rest}


def _ending(objective: str, words: Mapping[str, str]) -> Ending:
    if objective not in ENDINGS:
        raise ConversionFailed(
            f"what the objective {objective!r} makes of its sums is not known; known: {', '.join(sorted(ENDINGS))}"
        )
    return "signed square" if objective == "regression" and "sqrt" in words else ENDINGS[objective]


def _forest(head: _Section, trees: Sequence[_Section]) -> Forest:
    targets = int(head.get("num_tree_per_iteration", "1"))
    forest = Forest(int(head["max_feature_idx"]) + 1, targets)
    # A forest of boosting = "rf" answers the mean of its rounds.
    weight = 1.0 / max(len(trees) // targets, 1) if "average_output" in head else 1.0
    for index, tree in enumerate(trees):
        if tree.get("is_linear", "0") != "0":
            raise ConversionFailed(
                "its leaves are linear models (linear_tree), which ONNX's trees cannot be; train without linear_tree"
            )
        forest.begin_tree()
        _add_tree(forest, tree, index % targets, weight)
    return forest


def _add_tree(forest: Forest, tree: _Section, target: int, weight: float) -> None:
    leaves = _floats(tree["leaf_value"])
    if int(tree["num_leaves"]) <= 1:
        forest.leaf(0, [(target, weight * leaves[0])])
        return
    left, right = _wholes(tree["left_child"]), _wholes(tree["right_child"])
    features, kinds, thresholds = (
        _wholes(tree["split_feature"]), _wholes(tree["decision_type"]), _floats(tree["threshold"]),
    )  # fmt: skip
    bounds, bits = _wholes(tree.get("cat_boundaries", "")), _wholes(tree.get("cat_threshold", ""))
    inner = len(left)
    count = spare = inner + len(leaves)

    def place(child: int) -> int:
        return child if child >= 0 else inner + ~child

    for node in range(inner):  # the root is the first; ONNX wants no other order
        sides = place(left[node]), place(right[node])
        if not all(node < side < count for side in sides):
            raise ConversionFailed("a tree in it leads out of itself; the file is damaged or hostile")
        if kinds[node] & _CATEGORICAL:
            which = int(thresholds[node])
            chosen = _members(bits[bounds[which] : bounds[which + 1]])
            spare = forest.member(node, features[node], chosen, sides, spare, missing=False, view="truncated")
            continue
        missing_kind, is_left = kinds[node] >> _MISSING_SHIFT & 3, bool(kinds[node] & _DEFAULT_LEFT)
        forest.branch(
            node, "BRANCH_LEQ", features[node], _cut(thresholds[node]), sides,
            # Where nothing counts as missing, LightGBM takes NaN for 0.
            missing=thresholds[node] >= 0 if missing_kind == _MISSING_NONE else is_left,
            view="zero is missing" if missing_kind == _MISSING_ZERO else "plain",
        )  # fmt: skip
    for leaf, value in enumerate(leaves):
        forest.leaf(inner + leaf, [(target, weight * value)])


def _cut(threshold: float) -> float:
    """A threshold for float32. LightGBM takes a value near 0 for 0, so no threshold lies among those."""
    if 0 <= threshold <= LARGEST_ZERO:
        return LARGEST_ZERO
    if -LARGEST_ZERO <= threshold < 0:
        return float(np.nextafter(np.float32(-LARGEST_ZERO), np.float32(-np.inf)))
    return float32_below(threshold)


def _members(words: Sequence[int]) -> list[int]:
    """The categories of a set, written as bits of 32-bit words."""
    return [32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def _wholes(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split()]


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
