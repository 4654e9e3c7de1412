"""scikit-learn (a skops file, or a model in memory) to ONNX, by skl2onnx.

Owns: the calls of skl2onnx (labels and probabilities as plain tensors, no maps; the names of classes in the metadata),
what its trees leave out (the side of a missing value, of a threshold in double), and the check that a file's trees are
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
from edge_runtime_converters.forest import INPUT, NAMES, OPSETS, float32_below
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole

EXTRA = "convert-sklearn"

TEXT_INPUT = "text"
"""What the input of a model of texts is called: BYTES [rows, 1]."""

_USUAL_WORDS = r"(?u)\b\w\w+\b"
"""scikit-learn's own token_pattern."""

_SEED = 7
_TEXT_ROWS, _TEXT_RUNS = 16, 8

_TREE_MODELS = {
    "sklearn.tree": ("DecisionTreeClassifier", "DecisionTreeRegressor", "ExtraTreeClassifier", "ExtraTreeRegressor"),
    "sklearn.ensemble": (
        "RandomForestClassifier", "RandomForestRegressor", "ExtraTreesClassifier", "ExtraTreesRegressor",
        "HistGradientBoostingClassifier", "HistGradientBoostingRegressor",
    ),
}  # fmt: skip

_TREE = "sklearn.tree._tree.Tree"
"""skops does not trust it because scikit-learn walks its indices unchecked; they are checked here."""
_LEAF = -1


class SklearnModel:
    """A fitted estimator. An `Original`."""

    def __init__(self, model: Any) -> None:
        self.described = f"scikit-learn {import_library('sklearn', EXTRA).__version__}"
        self._model = model
        self._calls = list(_calls(model))
        self.ranks: list[int] = []
        """Axes of the converted model's outputs, once it is there."""

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        if features.dtype == object:
            features = np.array([_text(word) for word in features.reshape(-1)], object)
        with failing_as("scikit-learn cannot run it"):
            found = [np.asarray(call(features)) for call in self._calls]
        if len(found) == 1:
            return rows_first(found)
        label, scores = found
        if not _is_classifier(self._model):  # skl2onnx gives some of these an axis more
            pairs = zip(found, self.ranks, strict=True)
            return [each.reshape(-1, 1) if rank > each.ndim else each for each, rank in pairs]
        if scores.ndim == 1:
            # Of two classes scikit-learn returns only the second's scores, skl2onnx both.
            scores = np.stack([-scores, scores], axis=1)
        return [_words(label) if label.dtype.kind in "US" else label, *rows_first([scores])]

    def made_up(self) -> list[Mapping[str, Array]]:
        """Texts of words that the model knows, as runs; none for a model of numbers, which any numbers do for."""
        vectorizer = _vectorizer(self._model)
        if vectorizer is None:
            return []
        random = np.random.default_rng(_SEED)
        known = np.array([*sorted(vectorizer.vocabulary_), "Unknown", "ÄÖÜ", "a", "don't"], object)
        runs: list[Mapping[str, Array]] = []
        for _ in range(_TEXT_RUNS):
            texts = np.empty((_TEXT_ROWS, 1), object)
            for row in range(_TEXT_ROWS):
                chosen = " ".join(random.choice(known, random.integers(0, 12)))
                texts[row, 0] = (chosen.upper() if random.random() < 0.3 else chosen).encode()
            runs.append({TEXT_INPUT: texts})
        return runs


def _text(word: object) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


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
    vectorizer = _vectorizer(model)
    count = getattr(model, "n_features_in_", None)
    if vectorizer is not None:
        inputs = [(TEXT_INPUT, types.StringTensorType([None, 1]))]
    elif isinstance(count, int) and count >= 1:
        inputs = [(INPUT, types.FloatTensorType([None, count]))]
    else:
        raise ConversionFailed(f"{type(model).__name__} does not say how many features it takes; wanted a fitted model")
    classes = getattr(model, "classes_", None)
    if isinstance(classes, list) and _is_classifier(model):
        raise ConversionFailed(
            f"{type(model).__name__} answers {len(classes)} labels a row, each with classes of its own, and one tensor "
            "of probabilities cannot hold them; convert a classifier for each, and serve them beside each other"
        )
    original = SklearnModel(model)
    with failing_as(f"{type(model).__name__}: skl2onnx cannot write it"), whole(Path(target)) as output:
        converters = _tree_converters()
        for options in _options(model):
            try:
                made = converter.convert_sklearn(
                    model, initial_types=inputs, options={**options, **_text_options(vectorizer)}, target_opset=OPSETS,
                    custom_conversion_functions=converters,
                )  # fmt: skip
            except NameError:
                if not options:
                    raise
            else:
                break
        if isinstance(classes, np.ndarray) and classes.ndim == 1 and _is_classifier(model):
            made.metadata_props.add(key=NAMES, value=repr([str(name) for name in classes]))
        output.write_bytes(made.SerializeToString())
    original.ranks = [len(each.type.tensor_type.shape.dim) for each in made.graph.output]
    return original


def _vectorizer(model: Any) -> Any:
    """The first step, where it makes numbers of the words of a text; None for every other model."""
    first = model
    while getattr(first, "steps", None):
        first = first.steps[0][1]
    return first if hasattr(first, "vocabulary_") and hasattr(first, "token_pattern") else None


def _text_options(vectorizer: Any) -> dict[int, dict[str, str]]:
    """How skl2onnx writes a vectorizer so that ONNX Runtime cuts words as scikit-learn does, letters beyond ASCII too.

    Without a locale it writes en_US.UTF-8, which few devices have.
    """
    if vectorizer is None:
        return {}
    options = {"locale": "C.UTF-8"}
    if vectorizer.analyzer == "word" and vectorizer.token_pattern == _USUAL_WORDS:
        options["tokenexp"] = r"[\p{L}\p{N}_][\p{L}\p{N}_]+"
    return {id(vectorizer): options}


def _tree_converters() -> dict[type, Any]:
    """skl2onnx's converters of trees, with what they leave out."""
    registry = import_library("skl2onnx.common._registration", EXTRA)
    names = import_library("skl2onnx._supported_operators", EXTRA).sklearn_operator_name_map
    found = {}
    for module, kinds in _TREE_MODELS.items():
        for kind in (getattr(import_library(module, EXTRA), name) for name in kinds):
            if kind in names:
                found[kind] = _mended(registry.get_converter(names[kind]))
    return found


def _mended(converter: Any) -> Any:
    def convert(scope: Any, operator: Any, container: Any) -> None:
        converter(scope, operator, _TreeContainer(container, operator.raw_operator))

    return convert


class _TreeContainer:
    """skl2onnx's container of nodes; those of trees get the sides of missing values, and thresholds for float32."""

    def __init__(self, container: Any, model: Any) -> None:
        self._container = container
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def add_node(self, operator: str, *words: Any, **attributes: Any) -> Any:
        """Add a node. Raises ConversionFailed: a split by category."""
        if operator.startswith("TreeEnsemble"):
            self._mend(attributes)
            if operator == "TreeEnsembleRegressor" and _is_logarithmic(self._model):
                inputs, output = words
                sums = f"{output}_sums"
                self._container.add_node(operator, inputs, sums, **attributes)
                return self._container.add_node("Exp", sums, output, name=f"{attributes.get('name', '')}_exp")
        return self._container.add_node(operator, *words, **attributes)

    def _mend(self, attributes: dict[str, Any]) -> None:
        trees = _trees_of(self._model)
        values = [float(value) for value in attributes["nodes_values"]]
        tracks = [0] * len(values)
        columns = (attributes[f"nodes_{name}"] for name in ("treeids", "nodeids", "modes"))
        for place, (tree, node, mode) in enumerate(zip(*columns, strict=True)):
            if mode not in ("LEAF", b"LEAF"):
                threshold, tracks[place] = _split(trees[tree], node)
                values[place] = float32_below(threshold)
        for name, value in attributes.items():
            if isinstance(value, list):  # onnx takes none of numpy's whole numbers
                attributes[name] = [each.item() if isinstance(each, np.generic) else each for each in value]
        attributes["nodes_values"] = values
        attributes["nodes_missing_value_tracks_true"] = tracks


def _is_logarithmic(model: Any) -> bool:
    """Whether the sums are logarithms of what is estimated (poisson, gamma), which skl2onnx leaves out."""
    return type(getattr(getattr(model, "_loss", None), "link", None)).__name__ == "LogLink"


def _trees_of(model: Any) -> list[Any]:
    """The trees of an estimator, as skl2onnx numbers them."""
    if hasattr(model, "_predictors"):
        return [tree for each in model._predictors for tree in each]  # noqa: SLF001  skl2onnx reads it too
    return [each.tree_ for each in model.estimators_] if hasattr(model, "estimators_") else [model.tree_]


def _split(tree: Any, node: int) -> tuple[float, int]:
    """A split's threshold, and 1 where a missing value goes left. Raises ConversionFailed: it is by category."""
    if hasattr(tree, "nodes"):
        told = tree.nodes[node]
        if told["is_categorical"]:
            raise ConversionFailed("a tree splits by category, which skl2onnx cannot write; encode it before training")
        return float(told["num_threshold"]), int(told["missing_go_to_left"])
    missing = getattr(tree, "missing_go_to_left", None)
    return float(tree.threshold[node]), int(missing[node]) if missing is not None else 0


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
    elif import_library("sklearn.base", EXTRA).is_outlier_detector(model):
        yield from (model.predict, model.decision_function)
    elif hasattr(model, "predict") and import_library("sklearn.base", EXTRA).is_regressor(model):
        yield model.predict
    elif hasattr(model, "predict") and hasattr(model, "transform"):  # a cluster, and the distances to all
        yield from (model.predict, model.transform)
    elif hasattr(model, "predict") and hasattr(model, "predict_proba"):  # a part of a mixture, and the chances of all
        yield from (model.predict, model.predict_proba)
    elif hasattr(model, "transform"):
        yield model.transform
    else:
        raise ConversionFailed(
            f"{type(model).__name__} neither classifies, estimates, finds outliers, clusters nor transforms; wanted "
            "one of these"
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
