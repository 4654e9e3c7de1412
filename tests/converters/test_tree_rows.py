"""Made-up rows reach both sides of a model's splits, so a comparison on them sees a tree that went wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from demo.digits import load_training
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.original import serve
from edge_runtime_converters.tree_rows import RUN_ROWS, RUNS, tree_runs
from tests.converters.sources import needs


def booster() -> Any:
    (xgboost,) = needs("xgboost")
    digits = load_training()
    settings = {"objective": "multi:softprob", "num_class": 10, "max_depth": 3, "nthread": 1}
    return xgboost.train(settings, xgboost.DMatrix(digits.images, digits.labels), 5)


def rows_of(artifact: Path, *, missing: bool) -> np.ndarray[Any, Any]:
    served = serve(artifact)
    runs = tree_runs(artifact, served.spec, missing=missing)
    served.close()
    return np.concatenate([next(iter(run.values())) for run in runs])


def test_most_leaves_of_a_forest_are_reached(tmp_path: Path) -> None:
    from edge_runtime_converters.onnx_from_xgboost import convert_model, matrix_of

    (xgboost,) = needs("xgboost")
    model = booster()
    convert_model(model, tmp_path / "model.onnx")
    rows = rows_of(tmp_path / "model.onnx", missing=False)
    assert rows.shape == (RUNS * RUN_ROWS, 64)
    reached = model.predict(matrix_of(xgboost, model, rows), pred_leaf=True)
    leaves = sum(len(np.unique(column)) for column in reached.T)
    there = sum(tree.count("leaf=") for tree in model.get_dump())
    assert leaves > 0.8 * there


def test_rows_lie_at_thresholds_and_one_float_beside(tmp_path: Path) -> None:
    from edge_runtime_converters.onnx_from_xgboost import convert_model

    convert_model(booster(), tmp_path / "model.onnx")
    (node,) = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type.startswith("Tree")]
    words = {each.name: each for each in node.attribute}
    features, values = np.array(words["nodes_featureids"].ints), np.array(words["nodes_values"].floats, np.float32)
    is_split = np.array(words["nodes_modes"].strings) != b"LEAF"
    column = np.bincount(features[is_split]).argmax()
    cuts = np.unique(values[is_split & (features == column)])
    found = rows_of(tmp_path / "model.onnx", missing=False)[:, column]
    assert np.isin(cuts, found).all()
    assert np.isin(np.nextafter(cuts, np.float32(-np.inf)), found).any()
    assert np.isin(np.nextafter(cuts, np.float32(np.inf)), found).any()


def test_missing_values_are_among_them_where_asked_for(tmp_path: Path) -> None:
    from edge_runtime_converters.onnx_from_xgboost import convert_model

    convert_model(booster(), tmp_path / "model.onnx")
    assert not np.isnan(rows_of(tmp_path / "model.onnx", missing=False)).any()
    assert 0.05 < np.isnan(rows_of(tmp_path / "model.onnx", missing=True)).mean() < 0.15


@pytest.mark.parametrize("place", ["nodes_missing_value_tracks_true", "nodes_modes", "nodes_values"])
def test_a_conversion_that_loses_a_side_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_runtime_converters import conversion, forest

    model = booster()
    model.save_model(tmp_path / "model.json")
    write = forest.Forest.write

    def wrong(self: forest.Forest, *words: Any, **more: Any) -> None:
        column = self._nodes[place]
        changed = {
            "nodes_missing_value_tracks_true": lambda each: 1 - each,
            "nodes_modes": lambda each: "BRANCH_LEQ" if each == "BRANCH_LT" else each,
            "nodes_values": lambda each: each + 1.0,
        }[place]
        is_split = [mode != "LEAF" for mode in self._nodes["nodes_modes"]]
        column[:] = [changed(each) if split else each for each, split in zip(column, is_split, strict=True)]
        write(self, *words, **more)

    monkeypatch.setattr(forest.Forest, "write", wrong)
    (tmp_path / "out").mkdir()
    task = conversion.ConversionTask(
        ConversionOptions(
            source=str(tmp_path / "model.json"), target="onnx", output=str(tmp_path / "out" / "model.onnx")
        ),
        "XGBOOST",
        str(tmp_path),
        1 << 40,
    )
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # a conversion's child sets both for itself
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    report = conversion.convert_in_child(task, lambda *_: None)
    assert not report.is_near_enough
    assert "label" in " ".join(report.faults) or "probabilities" in " ".join(report.faults)


def test_the_report_says_what_rows_were_made_up(tmp_path: Path) -> None:
    booster().save_model(tmp_path / "model.json")
    report = convert(ConversionOptions(source=str(tmp_path / "model.json"), target="onnx"))
    assert report.is_near_enough, report.faults
    assert report.compared_on == (
        "1088 made-up rows, 1024 of them in the range that it tells apart, 512 with missing values"
    )
