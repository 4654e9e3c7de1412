"""XGBoost (its JSON or UBJ file, or a booster in memory) to ONNX, by onnxmltools.

Owns: the calls of onnxmltools, and the labels and probabilities of XGBoost's answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_from_sklearn import INPUT
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole

EXTRA = "convert-xgboost"
OPSET = 15
"""The newest opset that onnxmltools 1.14 to 1.16 write."""


class XgboostModel:
    """A booster. An `Original`."""

    def __init__(self, xgboost: Any, booster: Any) -> None:
        self.described = f"XGBoost {xgboost.__version__}"
        self._xgboost = xgboost
        self._booster = booster
        self._objective = objective_of(booster)

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("XGBoost cannot run it"):
            matrix = self._xgboost.DMatrix(features, feature_names=self._booster.feature_names)
            if self._objective == "multi:softmax":  # predicts only the label
                return _labelled(_softmax(self._booster.predict(matrix, output_margin=True)))
            found = self._booster.predict(matrix)
        if self._objective == "binary:logistic":
            return _labelled(np.stack([1 - found, found], axis=1))
        return _labelled(found) if self._objective.startswith("multi:") else rows_first([found])


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write an XGBoost file as ONNX; returns the source, loaded. shapes: unused. Raises ConversionFailed."""
    xgboost = import_library("xgboost", EXTRA)
    booster = xgboost.Booster()
    with failing_as(f"{source}: XGBoost {xgboost.__version__} cannot read it"):
        booster.load_model(bytearray(source.read_bytes()))
    return convert_model(booster, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write an `xgboost.Booster` (or a wrapper that has one) as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are label and probabilities. Raises ConversionFailed.
    """
    xgboost = import_library("xgboost", EXTRA)
    tools = import_library("onnxmltools", EXTRA)
    types = import_library("onnxmltools.convert.common.data_types", EXTRA)
    booster = model if isinstance(model, xgboost.Booster) else model.get_booster()
    plain = booster.copy()
    plain.feature_names = None  # onnxmltools needs f0, f1 …; only the order matters
    if objective_of(plain) == "multi:softmax":  # onnxmltools would write its margins as probabilities
        plain.set_param({"objective": "multi:softprob"})
    with failing_as("onnxmltools cannot write this booster"), whole(Path(target)) as output:
        made = tools.convert_xgboost(
            plain,
            initial_types=[(INPUT, types.FloatTensorType([None, booster.num_features()]))],
            target_opset=OPSET,
        )
        output.write_bytes(made.SerializeToString())
    return XgboostModel(xgboost, booster)


def objective_of(booster: Any) -> str:
    """The objective that a booster was trained for, by XGBoost's name."""
    return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def _labelled(chances: Array) -> list[Array]:
    return [chances.argmax(axis=1).astype(np.int64), chances]


def _softmax(margins: Array) -> Array:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
