"""What a way is tried on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from edge_runtime.config.settings import ModelSettings, Warmup
from edge_runtime.errors import LoadFailed
from edge_runtime.tuning.trial import WayTask, try_way

ONLY = 7
"""The one input that the model takes: made-up ones are 0 and 1."""


def write_model(path: Path) -> None:
    path.parent.mkdir(parents=True)
    nodes = [helper.make_node("Sub", ["x", "only"], ["index"]), helper.make_node("Gather", ["data", "index"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "picky",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [
            numpy_helper.from_array(np.array([ONLY], np.int64), "only"),
            numpy_helper.from_array(np.ones(1, np.float32), "data"),
        ],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


def task(artifact: Path, settings: ModelSettings) -> WayTask:
    return WayTask("onnxruntime", str(artifact), "", "", 1, settings)


@pytest.mark.parametrize("folder", ["picky", "picky/1"], ids=["beside model.toml", "in the version"])
def test_a_way_is_tried_on_the_sample_that_the_model_names(tmp_path: Path, folder: str) -> None:
    artifact = tmp_path / "picky" / "1" / "model.onnx"
    write_model(artifact)
    sample = tmp_path / folder / "sample.npz"
    np.savez(sample, x=np.array([ONLY, ONLY], np.int64))
    asked = task(artifact, ModelSettings(warmup=Warmup(inputs="sample.npz")))
    assert asked.samples() == [sample]
    found = try_way(asked, lambda *_: None)
    assert (found.fault, found.batches) == ("", True)


def test_a_way_that_cannot_run_on_made_up_inputs_says_what_to_do(tmp_path: Path) -> None:
    artifact = tmp_path / "picky" / "1" / "model.onnx"
    write_model(artifact)
    with pytest.raises(LoadFailed, match=r'\[warmup\] inputs = "sample.npz"'):
        try_way(task(artifact, ModelSettings()), lambda *_: None)
