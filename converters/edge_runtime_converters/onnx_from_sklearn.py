"""scikit-learn (a skops file, or a model in memory) to ONNX, by skl2onnx.

Owns: the calls of skl2onnx (labels and probabilities as plain tensors, no maps; the names of classes in the metadata),
and what its trees leave out (the side of a missing value, of a threshold in double). What a file may hold is
skops_files.py's, columns are sklearn_columns.py's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.boosted_steps import register_boosters
from edge_runtime_converters.forest import INPUT, NAMES, OPSETS, float32_below
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole
from edge_runtime_converters.sklearn_columns import Columns, first_step, split_columns
from edge_runtime_converters.skops_files import load_skops, parts_of_model, vars_of

EXTRA = "convert-sklearn"

TEXT_INPUT = "text"
"""The name of the input of a model of texts: BYTES [rows, 1]."""

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

_COLUMN = "edge_runtime_column_"
"""Begins what an input is called until the graph is written."""

_BY_THRESHOLD = frozenset((
    *(name for names in _TREE_MODELS.values() for name in names), "GradientBoostingClassifier",
    "GradientBoostingRegressor", "XGBClassifier", "XGBRegressor", "LGBMClassifier", "LGBMRegressor",
))  # fmt: skip

_WAY_OUT = "serve it by a model.py with scikit-learn instead (docs/python-models.md)"


class SklearnModel:
    """A fitted estimator. An `Original`."""

    def __init__(self, model: Any, columns: Columns | None = None) -> None:
        self.described = f"scikit-learn {import_library('sklearn', EXTRA).__version__}"
        self._model = model
        self.columns = columns
        """Those of the inputs; None for one input of features of one kind."""
        self._calls = list(_calls(model))
        self.ranks: list[int] = []
        """Axes of the converted model's outputs, once it is there."""

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        features = self.columns.rows(inputs) if self.columns is not None else next(iter(inputs.values()))
        if self.columns is None and features.dtype == object:
            features = np.array([_text(word) for word in features.reshape(-1)], object)
        with failing_as("scikit-learn cannot run it"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="X does not have valid feature names")  # by place is meant
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
        """Texts that the model knows, or rows with them, as runs; none for a model of numbers, which any do for."""
        if self.columns is not None:
            return self.columns.made_up()
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

    Raises ConversionFailed: among others, the file holds what could run code.
    """
    return convert_model(load_skops(source), target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a fitted estimator or pipeline in memory as ONNX; returns the source.

    One input, `features` FP32 [rows, n]; `text` where it begins with a vectorizer; one input a column, FP32 or BYTES
    [rows, 1], where its columns differ. A classifier's outputs are its label, and its probabilities or, without those,
    its decision function, with a column for each class, also of two. Raises ConversionFailed.
    """
    converter = import_library("skl2onnx", EXTRA)
    register_boosters()
    split = split_columns(model)
    model, columns = split or (model, None)
    vectorizer = _vectorizer(model)
    inputs = _inputs(model, columns, vectorizer)
    classes = getattr(model, "classes_", None)
    if isinstance(classes, list) and _is_classifier(model):
        raise ConversionFailed(
            f"{type(model).__name__} answers {len(classes)} labels a row, each with classes of its own, and one tensor "
            "of probabilities cannot hold them; convert a classifier for each, and serve them beside each other"
        )
    original = SklearnModel(model, columns)
    failure = f"{type(model).__name__}: skl2onnx cannot write it; replace the step that it names, or {_WAY_OUT}"
    with failing_as(failure), whole(Path(target)) as output, _as_skl2onnx_wants(model) as written:
        converters = _tree_converters()
        if any(type(each).__name__ in _BY_THRESHOLD for each in parts_of_model(model)):
            converters[import_library("sklearn.preprocessing", EXTRA).StandardScaler] = _scaled
        for options in _options(model):
            try:
                made = converter.convert_sklearn(
                    written, initial_types=inputs, options={**options, **_text_options(vectorizer)},
                    target_opset=OPSETS, custom_conversion_functions=converters,
                )  # fmt: skip
            except NameError:
                if not options:
                    raise
            else:
                break
        if any(node.op_type == "Solve" for node in made.graph.node):
            raise ConversionFailed(f"{type(model).__name__} solves equations, and ONNX Runtime cannot; {_WAY_OUT}")
        if columns is not None:
            _name_inputs(made.graph, columns.names)
            original.columns = replace(columns, names=tuple(each.name for each in made.graph.input))
        if isinstance(classes, np.ndarray) and classes.ndim == 1 and _is_classifier(model):
            made.metadata_props.add(key=NAMES, value=repr([str(name) for name in classes]))
        output.write_bytes(made.SerializeToString())
    original.ranks = [len(each.type.tensor_type.shape.dim) for each in made.graph.output]
    return original


def _inputs(model: Any, columns: Columns | None, vectorizer: Any) -> list[tuple[str, Any]]:
    types = import_library("skl2onnx.common.data_types", EXTRA)
    if columns is not None:
        width = 1 if len(columns.names) == len(columns.are_text) else len(columns.are_text)
        kinds = [types.StringTensorType if is_text else types.FloatTensorType for is_text in columns.are_text]
        return [(f"{_COLUMN}{place}", kind([None, width])) for place, kind in enumerate(kinds[: len(columns.names)])]
    count = getattr(model, "n_features_in_", None)
    if vectorizer is not None:
        return [(TEXT_INPUT, types.StringTensorType([None, 1]))]
    if isinstance(count, int) and count >= 1:
        return [(INPUT, types.FloatTensorType([None, count]))]
    raise ConversionFailed(f"{type(model).__name__} does not say how many features it takes; wanted a fitted model")


def _name_inputs(graph: Any, names: Sequence[str]) -> None:
    """Give inputs the names of their columns, as they are: skl2onnx changes blanks, and names that it uses itself.

    A column that is called as an output (`label`) is `label_column`.
    """
    outputs = {each.name for each in graph.output}
    renamed = {each: f"{each}.inner" for node in graph.node for each in node.output if each in names}
    renamed.update({each.name: f"{each.name}.inner" for each in graph.initializer if each.name in names})
    renamed = {name: inner for name, inner in renamed.items() if name not in outputs}
    for place, name in enumerate(names):
        renamed[f"{_COLUMN}{place}"] = f"{name}_column" if name in outputs else name
    for node in graph.node:
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                values[place] = renamed.get(name, name)
    for value in (*graph.input, *graph.initializer):
        value.name = renamed.get(value.name, value.name)


@contextmanager
def _as_skl2onnx_wants(model: Any) -> Iterator[Any]:
    """The model as skl2onnx writes it right, with settings changed meanwhile that change no prediction."""
    voting = [each for each in parts_of_model(model) if vars_of(each).get("flatten_transform")]
    for each in voting:
        each.flatten_transform = False
    try:
        if type(model).__module__.startswith("sklearn.gaussian_process"):
            # Its weights are large and cancel each other: float32 leaves no digit of their sum.
            cast = import_library("skl2onnx.sklapi", EXTRA).CastTransformer(dtype=np.float64)
            yield import_library("sklearn.pipeline", EXTRA).Pipeline([("cast", cast), ("model", model)])
        else:
            yield model
    finally:
        for each in voting:
            each.flatten_transform = True


def _vectorizer(model: Any) -> Any:
    """The first step, where it makes numbers of the words of a text; None for every other model."""
    first = first_step(model)
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


def _scaled(scope: Any, operator: Any, container: Any) -> None:
    """Write a StandardScaler with scikit-learn's own roundings.

    Thresholds of trees behind it are often rows of the training data, where one bit decides. skl2onnx multiplies by the
    inverse.
    """
    types = import_library("skl2onnx.common.data_types", EXTRA)
    kind = types.guess_proto_type(types.guess_tensor_type(operator.inputs[0].type))  # whole numbers become floats

    def add(name: str, *inputs: str, **words: Any) -> str:
        made: str = scope.get_unique_variable_name("scaled")
        container.add_node(
            name, list(inputs), made, name=scope.get_unique_operator_name(name), op_version=13, **words
        )  # fmt: skip
        return made

    scaler, value = operator.raw_operator, add("Cast", operator.inputs[0].full_name, to=kind)
    steps = [("Sub", scaler.mean_ if scaler.with_mean else None), ("Div", scaler.scale_ if scaler.with_std else None)]
    for name, numbers in steps:
        if numbers is not None:
            constant = scope.get_unique_variable_name(name)
            container.add_initializer(constant, kind, [len(numbers)], numbers.tolist())
            value = add(name, value, constant)
    container.add_node(
        "Identity", value, operator.outputs[0].full_name, name=scope.get_unique_operator_name("Identity"), op_version=13
    )


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


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
