"""LightGBM (its text file, or a booster in memory) to ONNX, by onnxmltools.

Owns: the calls of onnxmltools, and the labels and probabilities of LightGBM's answers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_from_sklearn import INPUT
from edge_runtime_converters.onnx_from_xgboost import OPSET
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original, rows_first
from edge_runtime_converters.output_files import whole

EXTRA = "convert-lightgbm"


class LightgbmModel:
    """A booster. An `Original`."""

    def __init__(self, lightgbm: Any, booster: Any) -> None:
        self.described = f"LightGBM {lightgbm.__version__}"
        self._booster = booster
        self._objective = str(booster.dump_model(num_iteration=1).get("objective", "")).split(" ", maxsplit=1)[0]

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        (features,) = inputs.values()
        with failing_as("LightGBM cannot run it"):
            found = np.asarray(self._booster.predict(features))
        if self._objective == "binary":
            found = np.stack([1 - found, found], axis=1)
        elif not self._objective.startswith("multiclass"):
            return rows_first([found])
        return [found.argmax(axis=1).astype(np.int64), found]


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a LightGBM text file as ONNX; returns the source, loaded. shapes: unused. Raises ConversionFailed."""
    lightgbm = import_library("lightgbm", EXTRA)
    with failing_as(f"{source}: LightGBM {lightgbm.__version__} cannot read it"):
        booster = lightgbm.Booster(model_str=source.read_text(encoding="utf-8"))
    return convert_model(booster, target)


def convert_model(model: Any, target: str | Path) -> Original:
    """Write a `lightgbm.Booster` (or a wrapper that has one) as ONNX; returns the source.

    One input, `features` FP32 [rows, n]. A classifier's outputs are label and probabilities. Raises ConversionFailed.
    """
    lightgbm = import_library("lightgbm", EXTRA)
    tools = import_library("onnxmltools", EXTRA)
    types = import_library("onnxmltools.convert.common.data_types", EXTRA)
    booster = model if isinstance(model, lightgbm.Booster) else model.booster_
    with failing_as("onnxmltools cannot write this booster"), whole(Path(target)) as output:
        made = tools.convert_lightgbm(
            booster, initial_types=[(INPUT, types.FloatTensorType([None, booster.num_feature()]))], zipmap=False,
            target_opset=OPSET,
        )  # fmt: skip
        for each in made.graph.output:  # onnxmltools 1.16 writes a label of one row
            each.type.tensor_type.shape.dim[0].Clear()
            each.type.tensor_type.shape.dim[0].dim_param = "rows"
        output.write_bytes(made.SerializeToString())
    return LightgbmModel(lightgbm, booster)


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
