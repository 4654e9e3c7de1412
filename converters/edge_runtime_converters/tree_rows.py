"""Rows that reach both sides of a model's splits: made of the thresholds that stand in its ONNX form.

Owns: which columns of the input a tree looks at, and the choice of values. Rows of any other making may all fall into
one leaf, and then a comparison proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.model_spec import ModelSpec
from edge_runtime_converters.onnx_source import read_onnx
from edge_runtime_converters.samples import Run

RUNS, RUN_ROWS = 8, 64
"""512 rows: each threshold of a hundred on a column is met some ten times, and 500 trees take them in milliseconds."""

MISSING_SHARE = 0.1

_AT_A_CUT = 0.7
"""Of the values of a column with cuts; the others lie anywhere, so that no two columns always cut together."""

_SEED = 7
_LARGEST = 1e30
"""Larger thresholds stand for none, and XGBoost takes no infinity."""

_KEEPING = ("Identity", "Cast", "Floor", "Ceil", "Where", "Concat")
"""Operators between an input and its trees that leave columns in place, or lay copies of all side by side."""

Floats = npt.NDArray[np.float32]


def tree_runs(model: Path, spec: ModelSpec, *, missing: bool) -> list[Run]:
    """Rows of the thresholds of an ONNX model, exactly at them and one float32 beside; none where it has no trees.

    missing: with missing values (NaN) among them. The model's trees look at the input itself; behind a Scaler, rows lie
    in its range, and not at thresholds, since its rounding decides there. Raises ConversionFailed.
    """
    if len(spec.inputs) != 1 or spec.inputs[0].datatype != "FP32" or len(spec.inputs[0].shape) != 2:
        return []
    (tensor,) = spec.inputs
    columns = tensor.shape[1]
    if columns < 1 or not tensor.has_dynamic_axis_0:
        return []
    graph = read_onnx(model, "convert-onnx").graph
    cuts, ranges = _cuts(graph, tensor.name, columns), _ranges(graph, tensor.name, columns)
    if not cuts and ranges is None:
        return []
    random = np.random.default_rng(_SEED + missing)
    return [{tensor.name: _rows(random, columns, cuts, ranges, missing=missing)} for _ in range(RUNS)]


# ---- private --------------------------------------------------------------------------------------------------------


def _rows(
    random: np.random.Generator,
    columns: int,
    cuts: Mapping[int, Floats],
    ranges: tuple[Floats, Floats] | None,
    *,
    missing: bool,
) -> Floats:
    shape = (RUN_ROWS, columns)
    rows = random.standard_normal(shape)
    if ranges is not None:
        rows = 2 * rows * ranges[1] + ranges[0]
    found = rows.astype(np.float32)
    for column, values in cuts.items():
        if ranges is None:
            found[:, column] *= np.abs(values).max(initial=1e-30)
        steps = (values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf)))
        chosen = random.choice(np.concatenate(steps), RUN_ROWS)
        found[:, column] = np.where(random.random(RUN_ROWS) < _AT_A_CUT, chosen, found[:, column])
    if missing:
        found[random.random(shape) < MISSING_SHARE] = np.nan
    return found


def _cuts(graph: Any, name: str, columns: int) -> dict[int, Floats]:
    """Thresholds by column of the input, of trees that look at the input itself."""
    direct = {name}
    found: dict[int, list[Floats]] = {}
    for node in graph.node:  # a graph's nodes are in order
        if node.op_type.startswith("TreeEnsemble") and node.input[0] in direct:
            for column, values in _thresholds(node):
                found.setdefault(column % columns, []).append(values)
        elif node.op_type in _KEEPING and any(each in direct for each in node.input):
            direct.update(node.output)
    return {column: np.unique(np.concatenate(values)) for column, values in found.items()}


def _thresholds(node: Any) -> Iterator[tuple[int, Floats]]:
    attributes = {each.name: each for each in node.attribute}
    values = np.array(attributes["nodes_values"].floats, np.float32)
    features = np.array(attributes["nodes_featureids"].ints, np.int64)
    is_split = np.array([mode != b"LEAF" for mode in attributes["nodes_modes"].strings])
    is_split &= np.abs(values) < _LARGEST
    for column in np.unique(features[is_split]):
        yield int(column), values[is_split & (features == column)]


def _ranges(graph: Any, name: str, columns: int) -> tuple[Floats, Floats] | None:
    """Middle and spread of each column, where a Scaler or a Sub and a Div take the input; None for other models."""
    constants = {each.name: np.array(each.float_data, np.float32) for each in graph.initializer}
    divisors = {node.input[0]: node.input[1] for node in graph.node if node.op_type == "Div"}
    direct = {name}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in direct:
            direct.update(node.output)
        if node.op_type == "Sub" and node.input[0] in direct and len(constants.get(node.input[1], ())) == columns:
            spread = constants.get(divisors.get(node.output[0], ""), np.ones(columns, np.float32))
            return constants[node.input[1]], spread
        if node.op_type == "Scaler" and node.input[0] == name:
            attributes = {each.name: np.array(each.floats, np.float32) for each in node.attribute}
            middle, scale = attributes["offset"], attributes["scale"]
            with np.errstate(divide="ignore"):
                spread = np.where(scale == 0, 1, 1 / np.abs(scale))
            return (
                np.broadcast_to(middle, columns).astype(np.float32),
                np.broadcast_to(spread, columns).astype(np.float32),
            )
    return None
