"""XGBoost (its JSON or UBJ file, or a booster in memory) to ONNX, by onnxmltools.

Owns: how onnxmltools is asked, and what XGBoost's answers are called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import import_library, reason_of
from edge_runtime_converters.onnx_from_sklearn import INPUT
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole
from edge_runtime_converters.wish import Shapes

EXTRA = "convert-xgboost"
OPSET = 15
"""The newest that onnxmltools 1.14 to 1.16 write."""


class XgboostModel:
    """A booster. See Original."""

    def __init__(self, xgboost: Any, booster: Any) -> None:
        self.described = f"XGBoost {xgboost.__version__}"
        self._xgboost = xgboost
        self._booster = booster
        self._objective = objective_of(booster)

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """See Original."""
        (features,) = inputs.values()
        try:
            matrix = self._xgboost.DMatrix(features, feature_names=self._booster.feature_names)
            if self._objective == "multi:softmax":  # which predicts the label alone
                return _labelled(_softmax(self._booster.predict(matrix, output_margin=True)))
            found = self._booster.predict(matrix)
        except Exception as error:
            raise ConversionFailed(f"XGBoost cannot run it: {reason_of(error)}") from error
        if self._objective == "binary:logistic":
            return _labelled(np.stack([1 - found, found], axis=1))
        return _labelled(found) if self._objective.startswith("multi:") else rows_first([found])


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write an XGBoost file as ONNX; returns it, loaded. shapes: not needed. Raises ConversionFailed."""
    xgboost = import_library("xgboost", EXTRA)
    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(source.read_bytes()))
    except Exception as error:
        raise ConversionFailed(f"{source}: XGBoost {xgboost.__version__} cannot read it: {reason_of(error)}") from error
    return convert_model(booster, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write an `xgboost.Booster` (or a wrapper that has one) as ONNX; returns it.

    One input, `features` FP32 [rows, n]. A classifier gives its label and its chances. Raises ConversionFailed.
    """
    xgboost = import_library("xgboost", EXTRA)
    tools = import_library("onnxmltools", EXTRA)
    types = import_library("onnxmltools.convert.common.data_types", EXTRA)
    booster = model if isinstance(model, xgboost.Booster) else model.get_booster()
    plain = booster.copy()
    plain.feature_names = None  # onnxmltools wants f0, f1 …; the order is what counts
    if objective_of(plain) == "multi:softmax":  # of which onnxmltools writes margins as chances
        plain.set_param({"objective": "multi:softprob"})
    try:
        with whole(Path(target)) as output:
            made = tools.convert_xgboost(
                plain,
                initial_types=[(INPUT, types.FloatTensorType([None, booster.num_features()]))],
                target_opset=OPSET,
            )
            output.write_bytes(made.SerializeToString())
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"onnxmltools cannot write this booster: {reason_of(error)}") from error
    return XgboostModel(xgboost, booster)


def objective_of(booster: Any) -> str:
    """What a booster was trained for, in XGBoost's word."""
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
