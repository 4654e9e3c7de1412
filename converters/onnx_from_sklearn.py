"""scikit-learn (a skops file, or a model in memory) to ONNX, by skl2onnx.

Owns: how skl2onnx is asked (labels and chances as plain tensors, no maps), and that trees of a file are sound before
anything walks them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import import_library, reason_of
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole
from edge_runtime_converters.wish import Shapes

EXTRA = "convert-sklearn"
INPUT = "features"
OPSETS = {"": 17, "ai.onnx.ml": 3}
"""Read by every ONNX Runtime that we allow."""

_TREE = "sklearn.tree._tree.Tree"
"""skops calls it untrusted because scikit-learn walks its indices unchecked; they are checked here."""
_LEAF = -1


class SklearnModel:
    """A fitted estimator. See Original."""

    def __init__(self, model: Any) -> None:
        self.described = f"scikit-learn {import_library('sklearn', EXTRA).__version__}"
        self._model = model
        self._calls = list(_calls(model))

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """See Original."""
        (features,) = inputs.values()
        try:
            found = [np.asarray(call(features)) for call in self._calls]
        except Exception as error:
            raise ConversionFailed(f"scikit-learn cannot run it: {reason_of(error)}") from error
        if len(found) == 1:
            return rows_first(found)
        label, scores = found
        if scores.ndim == 1:
            # Of two classes scikit-learn gives the second's only, skl2onnx both.
            scores = np.stack([-scores, scores], axis=1)
        return [_words(label) if label.dtype.kind in "US" else label, *rows_first([scores])]


def _words(label: Array) -> Array:
    """Text as edge-runtime has it: bytes."""
    found = np.empty(label.shape, object)
    found[:] = [str(word).encode() for word in label]
    return found


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a skops file as ONNX; returns it, loaded. shapes: not needed, the model says how many features.

    Only types that skops knows to be harmless are loaded. Raises ConversionFailed.
    """
    skops = import_library("skops.io", EXTRA)
    import_library("sklearn", EXTRA)
    try:
        strange = [name for name in skops.get_untrusted_types(file=source) if name != _TREE]
        if strange:
            raise ConversionFailed(
                f"{source}: holds {', '.join(strange)[:300]}, which could run code; nothing was loaded. Convert it "
                "in the program that has it: edge_runtime_converters.onnx_from_sklearn.convert_model(model, target)"
            )
        model = skops.load(source, trusted=[_TREE])
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"{source}: skops cannot read it: {reason_of(error)}") from error
    for tree, features in _trees(model):
        _check_tree(tree, features, source)
    return convert_model(model, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a fitted estimator or pipeline in memory as ONNX; returns it.

    One input, `features` FP32 [rows, n]. A classifier gives its label, and its chances or, where it has none, its
    decision function, a column for each class of two as well. Raises ConversionFailed.
    """
    converter = import_library("skl2onnx", EXTRA)
    types = import_library("skl2onnx.common.data_types", EXTRA)
    count = getattr(model, "n_features_in_", None)
    if not isinstance(count, int) or count < 1:
        raise ConversionFailed(f"{type(model).__name__} does not say how many features it takes; wanted a fitted model")
    original = SklearnModel(model)
    inputs = [(INPUT, types.FloatTensorType([None, count]))]
    try:
        with whole(Path(target)) as output:
            for options in _options(model):
                try:
                    made = converter.convert_sklearn(model, initial_types=inputs, options=options, target_opset=OPSETS)
                except NameError:
                    if not options:
                        raise
                else:
                    break
            output.write_bytes(made.SerializeToString())
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"{type(model).__name__}: skl2onnx cannot write it: {reason_of(error)}") from error
    return original


def _options(model: Any) -> Iterator[dict[int, dict[str, bool]]]:
    """What to ask of skl2onnx, best first: scores as a tensor and not as maps, and those of the decision function.

    It knows each option for some classifiers only, and raises NameError for the others. A pipeline hands none to its
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
    """The methods whose results ONNX gives, in its order."""
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
    """Every tree in a model, with how many features it may look at."""
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
    """Children come after their parent and exist, features exist: a walk ends, inside the arrays."""
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
