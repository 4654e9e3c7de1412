"""CatBoost (its .cbm file, or a model in memory) to ONNX.

Owns: what CatBoost's trees mean, by its JSON export (`x > border`, NaN to the side that the feature's mode says), and
their writing as a forest. The ending of each loss stands in backends/catboost/backend.py, which serves what
ONNX cannot hold. CatBoost's own ONNX export leaves out Poisson's exponent, the sigmoids of one against all, several
targets and trees that are not symmetric.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_runtime.backends.catboost.backend import CatBoostAnswers, answers_of
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.forest import Forest
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original

EXTRA = "convert-catboost"

_OTHER_FEATURES = {"categorical_features": "categories", "text_features": "text", "embedding_features": "embeddings"}


class CatboostModel:
    """A model. An `Original`."""

    def __init__(self, catboost: Any, model: Any, answers: CatBoostAnswers) -> None:
        self.described = f"CatBoost {catboost.__version__}"
        self._catboost = catboost
        self._model = model
        self._answers = answers

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("CatBoost cannot run it"):
            return self._answers.of(self._catboost, self._model, features, 1)


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a CatBoost file as ONNX; returns the source, loaded. shapes: unused. Raises ConversionFailed."""
    catboost = import_library("catboost", EXTRA)
    model = catboost.CatBoost()
    with failing_as(f"{source}: CatBoost {catboost.__version__} cannot read it"):
        model.load_model(str(source), format="json" if source.suffix == ".json" else "cbm")
    return convert_model(model, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a CatBoost model in memory as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are label, text where its classes are, and
    probabilities. Raises ConversionFailed.
    """
    catboost = import_library("catboost", EXTRA)
    with failing_as("this model is not as CatBoost's JSON export says"):
        told = _told(model)
        try:
            answers = answers_of(model)
        except LoadFailed as error:
            raise ConversionFailed(error.message) from error
        scale, base = told["scale_and_bias"]
        forest = _forest(told, len(base), float(scale))
    forest.write(
        Path(target), answers.ending, base=base, classes=answers.classes, threshold=answers.threshold,
        made_by=f"CatBoost {catboost.__version__}, {answers.loss}",
    )  # fmt: skip
    return CatboostModel(catboost, model, answers)


# ---- private --------------------------------------------------------------------------------------------------------


def _told(model: Any) -> Any:
    """A model as JSON. Raises ConversionFailed: it takes more than numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        try:
            model.save_model(str(path), format="json")
        except Exception as error:
            if not model.get_cat_feature_indices():
                raise
            raise ConversionFailed(_no_numbers("categories")) from error
        told = json.loads(path.read_bytes())
    for name, words in _OTHER_FEATURES.items():
        if told["features_info"].get(name):
            raise ConversionFailed(_no_numbers(words))
    return told


def _no_numbers(words: str) -> str:
    return (
        f"some of its features are {words}, which CatBoost turns into numbers by statistics of its training data, and "
        "ONNX cannot; encode them before training (as numbers), or put its file into the models folder as it is, where "
        "edge-runtime[catboost] serves it (docs/models.md, CatBoost)"
    )


def _forest(told: Mapping[str, Any], targets: int, scale: float) -> Forest:
    features = told["features_info"]["float_features"]
    columns = {each["feature_index"]: each["flat_feature_index"] for each in features}
    missing = {each["flat_feature_index"]: each.get("nan_value_treatment") == "AsTrue" for each in features}
    forest = Forest(max(columns.values(), default=0) + 1, targets)

    def branch(node: int, split: Mapping[str, Any], sides: tuple[int, int]) -> None:
        if split.get("split_type", "FloatFeature") != "FloatFeature":
            raise ConversionFailed(_no_numbers("categories"))
        column = columns[split["float_feature_index"]]
        forest.branch(node, "BRANCH_GT", column, split["border"], sides, missing=missing[column], view="plain")

    for tree in told.get("oblivious_trees", ()):
        forest.begin_tree()
        splits, values = tree.get("splits") or [], tree["leaf_values"]
        inner = (1 << len(splits)) - 1
        for node in range(inner):  # numbered level by level; the last split is the highest bit of a leaf's number
            level = (node + 1).bit_length() - 1
            branch(node, splits[len(splits) - 1 - level], (2 * node + 2, 2 * node + 1))
        for leaf in range(inner + 1):
            weights = [(target, scale * values[leaf * targets + target]) for target in range(targets)]
            forest.leaf(inner + leaf, weights)
    for tree in told.get("trees", ()):
        forest.begin_tree()
        for node, part, children in _walked(tree):
            if children is None:
                found = part["value"] if isinstance(part["value"], list) else [part["value"]]
                forest.leaf(node, [(target, scale * value) for target, value in enumerate(found)])
            else:
                branch(node, part["split"], children[::-1])
    return forest


def _walked(tree: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any], tuple[int, int] | None]]:
    """The nodes of a tree that is not symmetric, numbered, the root first; with the numbers left and right of each."""
    waiting, spare = [(0, tree)], 1
    while waiting:
        node, part = waiting.pop()
        if "split" not in part:
            yield node, part, None
            continue
        yield node, part, (spare, spare + 1)
        waiting += [(spare, part["left"]), (spare + 1, part["right"])]
        spare += 2


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
