"""A forest as ONNX: any library's trees in ONNX Runtime's operator for them, and what becomes of their sums.

Owns: the writing of the graph. A library's own rules (which side a missing value takes, how a threshold is rounded,
what an objective does with a sum) are its reader's: onnx_from_xgboost.py, onnx_from_lightgbm.py, onnx_from_catboost.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import import_library
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"
INPUT = "features"
OPSETS = {"": 17, "ai.onnx.ml": 3}
IR_VERSION = 8
"""Every allowed ONNX Runtime reads them."""

MAX_NODES = 2_000_000
"""Of all trees: as many as edge-runtime reads of one file."""

NAMES = "names"
"""The entry of a model's metadata that names its classes, as Ultralytics writes it and edge-runtime reads it."""

LARGEST_ZERO = float(np.float32(1e-35))
"""LightGBM counts values up to this as 0. Source: kZeroThreshold in LightGBM's meta.h."""

View = Literal["plain", "zero is missing", "floor", "truncated"]
"""How a split looks at a feature: as it is, with 0 as a missing value, or as a category's number."""

_VIEWS: tuple[View, ...] = ("plain", "zero is missing", "floor", "truncated")

Ending = Literal["none", "sigmoid", "exp", "softplus", "signed square", "step", "binary", "softmax", "each by itself"]
"""How the sums end: the last three make a label and probabilities, the others an estimate."""

_CLASSIFYING = ("binary", "softmax", "each by itself")


@dataclass(slots=True)
class Forest:
    """Trees, node by node in any order, each tree's root first; ids of nodes count from 0 in each tree."""

    features: int
    targets: int
    trees: int = 0
    _nodes: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: []
            for name in (
                "nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_modes", "nodes_values",
                "nodes_truenodeids", "nodes_falsenodeids", "nodes_missing_value_tracks_true",
            )
        }
    )  # fmt: skip
    _views: list[View] = field(default_factory=list)
    _leaves: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: [] for name in ("target_treeids", "target_nodeids", "target_ids", "target_weights")
        }
    )

    def begin_tree(self) -> None:
        """Begin the next tree; nodes are added to it from now on."""
        self.trees += 1

    def branch(
        self, node: int, mode: str, feature: int, value: float, sides: tuple[int, int], *, missing: bool, view: View
    ) -> None:
        """Add a split. mode: ONNX's word. sides: nodes where it is so, and where not. missing: whether NaN is so.

        Raises ConversionFailed: no such feature, or too many nodes.
        """
        if not 0 <= feature < self.features:
            raise ConversionFailed(f"a split is on feature {feature} of {self.features}; the file is damaged")
        self._add(node, mode, feature, value, sides, missing=missing, view=view)

    def member(
        self, node: int, feature: int, values: Sequence[int], sides: tuple[int, int], spare: int, *, missing: bool,
        view: View,
    ) -> int:  # fmt: skip
        """Add a split on whether a category is one of `values`, as a chain of comparisons.

        spare: the first id that no node has. Returns the next such id. missing: whether NaN counts as one of them.
        """
        found, other = sides
        at = node
        for place, value in enumerate(values):
            following = other if place == len(values) - 1 else spare
            self.branch(at, "BRANCH_EQ", feature, value, (found, following), missing=missing, view=view)
            at, spare = spare, spare + (following != other)
        if not values:  # no category's number is a half
            self.branch(at, "BRANCH_EQ", feature, 0.5, sides, missing=missing, view=view)
        return spare

    def leaf(self, node: int, weights: Sequence[tuple[int, float]]) -> None:
        """Add a leaf. weights: (target, what it adds to that target)."""
        self._add(node, "LEAF", 0, 0.0, (0, 0), missing=False, view="plain")
        for target, weight in weights:
            row = (self.trees - 1, node, target, float(weight))
            for column, value in zip(self._leaves.values(), row, strict=True):
                column.append(value)

    def write(
        self,
        target: Path,
        ending: Ending,
        *,
        base: Sequence[float],
        scale: float = 1.0,
        classes: Sequence[str | int] = (),
        threshold: float = 0.5,
        made_by: str,
    ) -> None:
        """Write the model, durably. base: what each target's sum begins with. scale: of sums before a sigmoid.

        classes: the labels in order, where they are not 0, 1 and so on. threshold: the probability above which the
        second of two classes is the label. Input `features` FP32 [rows, n]. A classifier's
        outputs are `label` INT64 or BYTES [rows] and `probabilities` FP32 [rows, classes], others' is `variable` FP32
        [rows, targets]. Raises ConversionFailed.
        """
        if not self.trees:
            raise ConversionFailed("it has no trees; wanted a model that was trained")
        graph = _ForestGraph()
        columns = self._columns(graph)
        attributes: dict[str, Any] = {
            name: values for name, values in {**self._nodes, **self._leaves}.items() if values
        }
        views = self._used_views()
        offsets = np.array([views.index(view) * self.features for view in self._views], np.int64)
        attributes["nodes_featureids"] = (np.array(self._nodes["nodes_featureids"], np.int64) + offsets).tolist()
        if not any(self._nodes["nodes_missing_value_tracks_true"]):
            del attributes["nodes_missing_value_tracks_true"]
        sums = graph.node(
            "TreeEnsembleRegressor", [columns], domain="ai.onnx.ml", n_targets=self.targets,
            base_values=[float(value) for value in base], **attributes,
        )  # fmt: skip
        if scale != 1.0:
            sums = graph.node("Mul", [sums, graph.number(scale)])
        if ending in _CLASSIFYING:
            outputs = _labelled(graph, sums, ending, self.targets, classes, threshold=threshold)
        else:
            outputs = _estimated(graph, sums, ending, self.targets)
        with whole(target) as output:
            output.write_bytes(graph.model(self.features, outputs, classes, made_by))

    def _add(
        self, node: int, mode: str, feature: int, value: float, sides: tuple[int, int], *, missing: bool, view: View
    ) -> None:
        if len(self._views) >= MAX_NODES:
            raise ConversionFailed(f"it has more than {MAX_NODES} nodes; train fewer or smaller trees")
        row = (self.trees - 1, node, feature, mode, float(value), *sides, int(missing))
        for column, each in zip(self._nodes.values(), row, strict=True):
            column.append(each)
        self._views.append(view)

    def _used_views(self) -> list[View]:
        used = {view for view, mode in zip(self._views, self._nodes["nodes_modes"], strict=True) if mode != "LEAF"}
        # A leaf looks at column 0, which is there in any case.
        return [view for view in _VIEWS if view in used or view == "plain"]

    def _columns(self, graph: _ForestGraph) -> str:
        """The features in every way that a split looks at them, side by side."""
        seen = []
        for view in self._used_views():
            if view == "plain":
                seen.append(INPUT)
            elif view == "zero is missing":
                is_zero = graph.node("LessOrEqual", [graph.node("Abs", [INPUT]), graph.number(LARGEST_ZERO)])
                seen.append(graph.node("Where", [is_zero, graph.number(math.nan), INPUT]))
            elif view == "floor":
                seen.append(graph.node("Floor", [INPUT]))
            else:
                is_negative = graph.node("Less", [INPUT, graph.number(0.0)])
                whole_numbers = [graph.node("Ceil", [INPUT]), graph.node("Floor", [INPUT])]
                seen.append(graph.node("Where", [is_negative, *whole_numbers]))
        return seen[0] if len(seen) == 1 else graph.node("Concat", seen, axis=1)


class _ForestGraph:
    """A graph that is written node by node."""

    def __init__(self) -> None:
        self._onnx = import_library("onnx", EXTRA)
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def node(self, operator: str, inputs: Sequence[str], *, output: str = "", domain: str = "", **words: Any) -> str:
        """Add a node; returns its output's name."""
        name = output or f"value_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [name], domain=domain or None, **words))
        return name

    def number(self, value: float) -> str:
        """Add a constant of one element; returns its name."""
        return self.constant(np.array([value], np.float32))

    def constant(self, values: Array) -> str:
        """Add a constant; returns its name."""
        name = f"constant_{len(self._constants)}"
        self._constants.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def model(
        self, features: int, outputs: Mapping[str, tuple[str, int]], classes: Sequence[str | int], made_by: str
    ) -> bytes:
        """The whole model. outputs: name -> type and columns, 0 for labels."""
        make, types = self._onnx.helper, self._onnx.TensorProto
        graph = make.make_graph(
            self._nodes,
            "forest",
            [make.make_tensor_value_info(INPUT, types.FLOAT, ["rows", features])],
            [
                make.make_tensor_value_info(name, getattr(types, kind), ["rows", columns] if columns else ["rows"])
                for name, (kind, columns) in outputs.items()
            ],
            self._constants,
        )
        opsets = [make.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        model = make.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edge-runtime", doc_string=made_by
        )
        if classes:
            make.set_model_props(model, {NAMES: repr([str(name) for name in classes])})
        found: bytes = model.SerializeToString()
        return found


def float32_below(threshold: float) -> float:
    """The largest float32 that is at most a double: a float32 is at most the one exactly where it is the other."""
    with np.errstate(over="ignore"):
        near = np.float32(threshold)
    return float(near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf)))


def label_array(classes: Sequence[str | int], places: Array) -> Array:
    """The labels of classes by their places, as edge-runtime holds them: whole numbers, or bytes."""
    if all(isinstance(name, int) for name in classes):
        found: Array = np.array(classes, np.int64)[places]
        return found
    named = np.empty(len(classes), object)
    named[:] = [str(name).encode() for name in classes]
    labels: Array = named[places]
    return labels


def _labelled(
    graph: _ForestGraph, sums: str, ending: Ending, targets: int, classes: Sequence[str | int], *, threshold: float
) -> dict[str, tuple[str, int]]:
    """A classifier's outputs: name -> type and columns, 0 for labels. Raises ConversionFailed."""
    if ending == "binary":
        if targets != 1:
            raise ConversionFailed(f"two classes have one sum, and this has {targets}; wanted one label a row")
        second = graph.node("Sigmoid", [sums])
        first = graph.node("Sub", [graph.number(1.0), second])
        chances = graph.node("Concat", [first, second], output="probabilities", axis=1)
    elif ending == "softmax":
        chances = graph.node("Softmax", [sums], output="probabilities", axis=1)
    else:
        chances = graph.node("Sigmoid", [sums], output="probabilities")
    count = max(targets, 2)
    if classes and len(classes) != count:
        raise ConversionFailed(f"it names {len(classes)} classes and has {count}; the file is damaged")
    is_by_place = not classes or list(classes) == list(range(count))
    shown = {"output": "label"} if is_by_place else {}
    if ending == "binary" and threshold != 0.5:
        is_second = graph.node(
            "Greater", [graph.node("Squeeze", [second, graph.constant(np.array([1]))]), graph.number(threshold)]
        )
        place = graph.node("Cast", [is_second], to=7, **shown)
    else:
        place = graph.node("ArgMax", [chances], axis=1, keepdims=0, **shown)
    if is_by_place:
        return {"label": ("INT64", 0), "probabilities": ("FLOAT", count)}
    labels = label_array(classes, np.arange(count))
    graph.node("Gather", [graph.constant(labels), place], output="label")
    return {"label": ("INT64" if labels.dtype == np.int64 else "STRING", 0), "probabilities": ("FLOAT", count)}


def _estimated(graph: _ForestGraph, sums: str, ending: Ending, targets: int) -> dict[str, tuple[str, int]]:
    """The one output of what is not a classifier: name -> type and columns."""
    if ending == "step":
        graph.node("Cast", [graph.node("Greater", [sums, graph.number(0.0)])], output="variable", to=1)
    elif ending == "signed square":
        graph.node("Mul", [sums, graph.node("Abs", [sums])], output="variable")
    else:
        operator = {"none": "Identity", "sigmoid": "Sigmoid", "exp": "Exp", "softplus": "Softplus"}[ending]
        graph.node(operator, [sums], output="variable")
    return {"variable": ("FLOAT", targets)}
