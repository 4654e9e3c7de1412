"""scikit-learn (a skops file, or a model in memory) to ONNX, by skl2onnx.

Owns: the calls of skl2onnx (labels and probabilities as plain tensors, no maps), and the check that a file's trees are
sound before anything walks them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.forest import INPUT, OPSETS
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole

EXTRA = "convert-sklearn"

_TREE = "sklearn.tree._tree.Tree"
"""skops does not trust it because scikit-learn walks its indices unchecked; they are checked here."""
_LEAF = -1


class SklearnModel:
    """A fitted estimator. An `Original`."""

    def __init__(self, model: Any) -> None:
        self.described = f"scikit-learn {import_library('sklearn', EXTRA).__version__}"
        self._model = model
        self._calls = list(_calls(model))

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("scikit-learn cannot run it"):
            found = [np.asarray(call(features)) for call in self._calls]
        if len(found) == 1:
            return rows_first(found)
        label, scores = found
        if scores.ndim == 1:
            # Of two classes scikit-learn returns only the second's scores, skl2onnx both.
            scores = np.stack([-scores, scores], axis=1)
        return [_words(label) if label.dtype.kind in "US" else label, *rows_first([scores])]


def _words(label: Array) -> Array:
    """Text as edge-runtime holds it: bytes."""
    found = np.empty(label.shape, object)
    found[:] = [str(word).encode() for word in label]
    return found


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a skops file as ONNX; returns the source, loaded. shapes: unused, the model knows its features.

    Loads only types that skops knows to be harmless. Raises ConversionFailed.
    """
    skops = import_library("skops.io", EXTRA)
    import_library("sklearn", EXTRA)
    with failing_as(f"{source}: skops cannot read it"):
        strange = [name for name in skops.get_untrusted_types(file=source) if name != _TREE]
        if strange:
            raise ConversionFailed(
                f"{source}: holds {', '.join(strange)[:300]}, which could run code; nothing was loaded. Convert it "
                "in the program that has it: edge_runtime_converters.onnx_from_sklearn.convert_model(model, target)"
            )
        model = skops.load(source, trusted=[_TREE])
    for tree, features in _trees(model):
        _check_tree(tree, features, source)
    return convert_model(model, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a fitted estimator or pipeline in memory as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are its label, and its probabilities or, without those,
    its decision function, with a column for each class, also of two. Raises ConversionFailed.
    """
    converter = import_library("skl2onnx", EXTRA)
    types = import_library("skl2onnx.common.data_types", EXTRA)
    count = getattr(model, "n_features_in_", None)
    if not isinstance(count, int) or count < 1:
        raise ConversionFailed(f"{type(model).__name__} does not say how many features it takes; wanted a fitted model")
    original = SklearnModel(model)
    inputs = [(INPUT, types.FloatTensorType([None, count]))]
    with failing_as(f"{type(model).__name__}: skl2onnx cannot write it"), whole(Path(target)) as output:
        for options in _options(model):
            try:
                made = converter.convert_sklearn(model, initial_types=inputs, options=options, target_opset=OPSETS)
            except NameError:
                if not options:
                    raise
            else:
                break
        output.write_bytes(made.SerializeToString())
    return original


def _options(model: Any) -> Iterator[dict[int, dict[str, bool]]]:
    """Options of skl2onnx, best first: scores as a tensor and not as maps, and those of the decision function.

    It has each option for some classifiers only, and raises NameError for the others. A pipeline passes none to its
    last step.
    """
    last = model
    while getattr(last, "steps", None):
        last = last.steps[-1][1]
    if _is_classifier(last):
        if not hasattr(last, "predict_proba"):
            yield {id(last): {"zipmap": False, "raw_scores": True}}
            yield {id(last): {"raw_scores": True}}
        yield {id(last): {"zipmap": False}}
    yield {}


def _is_classifier(model: Any) -> bool:
    return bool(import_library("sklearn.base", EXTRA).is_classifier(model))


def _calls(model: Any) -> Iterator[Any]:
    """The methods whose results are the ONNX outputs, in order."""
    if _is_classifier(model):
        yield model.predict
        for scores in ("predict_proba", "decision_function"):
            if hasattr(model, scores):
                yield getattr(model, scores)
                return
        raise ConversionFailed(f"{type(model).__name__} gives neither chances nor a decision function beside its label")
    elif hasattr(model, "predict") and import_library("sklearn.base", EXTRA).is_regressor(model):
        yield model.predict
    elif hasattr(model, "transform"):
        yield model.transform
    else:
        raise ConversionFailed(
            f"{type(model).__name__} neither classifies, estimates nor transforms; wanted one of these"
        )


def _trees(root: Any) -> Iterator[tuple[Any, int]]:
    """Every tree in a model, with its number of features."""
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value).__name__ == "Tree" and hasattr(value, "children_left"):
            yield value, int(value.n_features)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif isinstance(value, np.ndarray):
            waiting += list(value.flat) if value.dtype == object else []
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()


def _check_tree(tree: Any, features: int, source: Path) -> None:
    """Raise ConversionFailed unless children exist and follow their parent, and features exist: then walks end."""
    left, right, feature = tree.children_left, tree.children_right, tree.feature
    places = np.arange(len(left))
    is_leaf = left == _LEAF
    inner = ~is_leaf
    sound = (
        len(left) > 0
        and bool((right[is_leaf] == _LEAF).all())
        and all(bool(((child > places) & (child < len(left)))[inner].all()) for child in (left, right))
        and bool(((feature >= 0) & (feature < features))[inner].all())
    )
    if not sound:
        raise ConversionFailed(f"{source}: a tree in it leads out of itself; the file is damaged or hostile")


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
