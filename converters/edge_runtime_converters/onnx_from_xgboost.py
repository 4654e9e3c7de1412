"""XGBoost (its JSON or UBJ file, or a booster in memory) to ONNX.

Owns: what XGBoost's trees mean (`x < threshold` in float32, NaN to the side that training chose, categories to the
right), and what each objective makes of their sums. Source: XGBoost's doc/model.schema, src/common/categorical.h.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.forest import Ending, Forest
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first

EXTRA = "convert-xgboost"

ENDINGS: Mapping[str, Ending] = {
    "binary:logistic": "binary", "multi:softprob": "softmax", "multi:softmax": "softmax",
    "reg:logistic": "sigmoid", "binary:logitraw": "none", "binary:hinge": "step",
    **dict.fromkeys(("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft"), "exp"),
    **dict.fromkeys(
        ("reg:squarederror", "reg:linear", "reg:squaredlogerror", "reg:pseudohubererror", "reg:absoluteerror",
         "reg:quantileerror", "reg:expectileerror", "rank:pairwise", "rank:ndcg", "rank:map"), "none",
    ),
}  # fmt: skip
"""The ending of each objective's sums. Source: PredTransform in src/objective of XGBoost 3.2."""


class XgboostModel:
    """A booster. An `Original`."""

    def __init__(self, xgboost: Any, booster: Any, rounds: int) -> None:
        self.described = f"XGBoost {xgboost.__version__}"
        self._xgboost = xgboost
        self._booster = booster
        self._rounds = (0, rounds)
        self._ending = ENDINGS[objective_of(booster)]

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("XGBoost cannot run it"):
            matrix = matrix_of(self._xgboost, self._booster, features)
            if self._ending == "softmax":  # multi:softmax predicts only the label
                sums = self._booster.predict(matrix, output_margin=True, iteration_range=self._rounds)
                return labelled(_softmax(sums))
            found = self._booster.predict(matrix, iteration_range=self._rounds)
        if self._ending == "binary":
            return labelled(np.stack([1 - found, found], axis=1))
        return rows_first([found])


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write an XGBoost file as ONNX; returns the source, loaded. shapes: unused. Raises ConversionFailed.

    As XGBoost predicts: all rounds, but the best ones of a file that its scikit-learn interface wrote.
    """
    xgboost = import_library("xgboost", EXTRA)
    booster = xgboost.Booster()
    with failing_as(f"{source}: XGBoost {xgboost.__version__} cannot read it"):
        booster.load_model(bytearray(source.read_bytes()))
    is_of_wrapper = booster.attr("scikit_learn") is not None
    return _written(xgboost, booster, _best_rounds(booster) if is_of_wrapper else 0, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write an `xgboost.Booster` (or a wrapper that has one) as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are label and probabilities. Raises ConversionFailed.
    """
    xgboost = import_library("xgboost", EXTRA)
    if isinstance(model, xgboost.Booster):
        return _written(xgboost, model, 0, Path(target))
    booster = model.get_booster()
    missing = getattr(model, "missing", np.nan)
    if missing is not None and not np.isnan(missing):
        raise ConversionFailed(
            f"its missing value is {missing}, and ONNX knows NaN alone; write NaN for {missing}, and train again"
        )
    return _written(xgboost, booster, _best_rounds(booster), Path(target))


def objective_of(booster: Any) -> str:
    """The objective that a booster was trained for, by XGBoost's name."""
    return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def matrix_of(xgboost: Any, booster: Any, features: Array, **words: Any) -> Any:
    """Features as XGBoost takes them, named and typed as the booster wants."""
    types = booster.feature_types
    return xgboost.DMatrix(
        features, feature_names=booster.feature_names, feature_types=types,
        enable_categorical=bool(types) and "c" in types, nthread=1, **words,
    )  # fmt: skip


def labelled(chances: Array) -> list[Array]:
    """Label and probabilities of a classifier that gives probabilities."""
    return [chances.argmax(axis=1).astype(np.int64), chances]


# ---- private --------------------------------------------------------------------------------------------------------


def _best_rounds(booster: Any) -> int:
    """Rounds up to the best one, where training was stopped early; 0 for all."""
    best = booster.attr("best_iteration")
    return int(best) + 1 if best is not None else 0


def _written(xgboost: Any, booster: Any, rounds: int, target: Path) -> Original:
    objective = objective_of(booster)
    if objective not in ENDINGS:
        raise ConversionFailed(
            f"what the objective {objective!r} makes of its sums is not known; known: {', '.join(sorted(ENDINGS))}"
        )
    with failing_as("this booster is not as XGBoost's schema says"):
        learner = json.loads(bytes(booster.save_raw("json")))["learner"]
        forest = _forest(learner, rounds)
        base = _base(xgboost, booster, forest.targets)
    forest.write(target, ENDINGS[objective], base=base, made_by=f"XGBoost {xgboost.__version__}, {objective}")
    return XgboostModel(xgboost, booster, rounds)


def _base(xgboost: Any, booster: Any, targets: int) -> Sequence[float]:
    """Return the start of the sums: base_score, as the objective changes it. By XGBoost itself, on one row of NaN."""
    row = np.full((1, booster.num_features()), np.nan, np.float32)
    zero = np.zeros((1, targets) if targets > 1 else 1, np.float32)
    with_base = booster.predict(matrix_of(xgboost, booster, row), output_margin=True)
    without = booster.predict(matrix_of(xgboost, booster, row, base_margin=zero), output_margin=True)
    found: list[float] = (with_base.astype(np.float64) - without).reshape(targets).tolist()
    return found


def _forest(learner: Mapping[str, Any], rounds: int) -> Forest:
    gradient_booster = learner["gradient_booster"]
    if gradient_booster["name"] == "gblinear":
        raise ConversionFailed("it is a linear model (booster gblinear), and has no trees; scikit-learn's convert")
    model = gradient_booster.get("gbtree", gradient_booster)["model"]
    told = learner["learner_model_param"]
    forest = Forest(int(told["num_feature"]), max(int(told["num_class"]), int(told.get("num_target", 1)), 1))
    trees = model["trees"]
    weights = gradient_booster.get("weight_drop") or [1.0] * len(trees)
    count = model["iteration_indptr"][rounds] if rounds else len(trees)
    for tree, group, weight in zip(trees[:count], model["tree_info"], weights, strict=False):
        forest.begin_tree()
        _add_tree(forest, tree, int(group), float(weight))
    return forest


def _add_tree(forest: Forest, tree: Mapping[str, Any], group: int, weight: float) -> None:
    left, right = tree["left_children"], tree["right_children"]
    values, kinds = tree["split_conditions"], tree.get("split_type") or [0] * len(left)
    size = int(tree["tree_param"].get("size_leaf_vector", 1))
    spare = len(left)
    begins = dict(zip(tree["categories_nodes"], zip(tree["categories_segments"], tree["categories_sizes"])))  # noqa: B905
    waiting, seen = [0], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > len(left):
            raise ConversionFailed("a tree in it leads round; the file is damaged or hostile")
        yes, no = int(left[node]), int(right[node])
        if yes < 0:
            forest.leaf(node, _leaf(tree, node, size, group, weight))
            continue
        feature, missing_left = int(tree["split_indices"][node]), bool(tree["default_left"][node])
        if kinds[node]:
            begin, length = begins[node]
            chosen = [int(each) for each in tree["categories"][begin : begin + length]]
            spare = forest.member(
                node, feature, chosen, (no, yes), spare, missing=not missing_left, view="floor"
            )  # fmt: skip
        else:
            forest.branch(
                node, "BRANCH_LT", feature, values[node], (yes, no), missing=missing_left, view="plain"
            )  # fmt: skip
        waiting += (no, yes)


def _leaf(tree: Mapping[str, Any], node: int, size: int, group: int, weight: float) -> list[tuple[int, float]]:
    if size <= 1:
        return [(group, weight * tree["split_conditions"][node])]
    vectors, place = tree.get("leaf_weights"), int(tree["right_children"][node])
    if vectors is None:  # before XGBoost 3.1
        vectors, place = tree["base_weights"], node
    return [(index, weight * vectors[place * size + index]) for index in range(size)]


def _softmax(margins: Array) -> Array:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
