"""XGBoost's and LightGBM's scikit-learn models as steps of a pipeline: registered in skl2onnx, which knows neither.

Owns: how the ONNX that onnx_from_xgboost.py and onnx_from_lightgbm.py write becomes a part of a larger graph.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from edge_runtime_converters.forest import INPUT
from edge_runtime_converters.libraries import import_library
from edge_runtime_converters.onnx_source import read_onnx

EXTRA = "convert-sklearn"

_KINDS = {
    "xgboost.sklearn": ("XGBClassifier", "XGBRFClassifier", "XGBRegressor", "XGBRFRegressor"),
    "lightgbm.sklearn": ("LGBMClassifier", "LGBMRegressor"),
}
_FLOAT = 1
"""TensorProto.FLOAT."""

_WRITERS = {"xgboost": "onnx_from_xgboost", "lightgbm": "onnx_from_lightgbm"}


def register_boosters() -> None:
    """Tell skl2onnx how to write the models of those libraries that are imported; one that it knows already stays."""
    converter = import_library("skl2onnx", EXTRA)
    known = import_library("skl2onnx._supported_operators", EXTRA).sklearn_operator_name_map
    for module, names in _KINDS.items():
        for name in names if module in sys.modules else ():
            kind = getattr(sys.modules[module], name, None)
            if kind is None or kind in known:
                continue
            is_classifier = name.endswith("Classifier")
            options = {"zipmap": [True, False, "columns"], "nocl": [True, False], "raw_scores": [True, False]}
            converter.update_registered_converter(
                kind, f"EdgeRuntime{name}", _classifier_shapes if is_classifier else _estimate_shape, _graft,
                options=options if is_classifier else None,
            )  # fmt: skip


def _classifier_shapes(operator: Any) -> None:
    shapes = import_library("skl2onnx.common.shape_calculator", EXTRA)
    shapes.calculate_linear_classifier_output_shapes(operator)


def _estimate_shape(operator: Any) -> None:
    shapes = import_library("skl2onnx.common.shape_calculator", EXTRA)
    shapes.calculate_linear_regressor_output_shapes(operator)


def _graft(scope: Any, operator: Any, container: Any) -> None:
    """Write a step as our own converter does, with the names of the graph that it becomes a part of."""
    package = type(operator.raw_operator).__module__.partition(".")[0]
    writer = importlib.import_module(f"edge_runtime_converters.{_WRITERS[package]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        writer.convert_model(operator.raw_operator, path)
        graph = read_onnx(path, EXTRA).graph
    numbers = scope.get_unique_variable_name("features")
    container.add_node(
        "Cast", operator.inputs[0].full_name, numbers, to=_FLOAT, op_version=13,
        name=scope.get_unique_operator_name("Cast"),
    )  # fmt: skip
    named = {INPUT: numbers}
    named.update({
        ours.name: theirs.full_name for ours, theirs in zip(graph.output, operator.outputs, strict=True)
    })  # fmt: skip
    for constant in graph.initializer:
        named[constant.name] = scope.get_unique_variable_name(constant.name)
        constant.name = named[constant.name]
        container.initializers.append(constant)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = named[name]
        for place, name in enumerate(node.output):
            named.setdefault(name, scope.get_unique_variable_name(name))
            node.output[place] = named[name]
        node.name = scope.get_unique_operator_name(node.op_type)
        container.nodes.append(node)
        container.node_domain_version_pair_sets.add((node.domain, 3 if node.domain else 17))
