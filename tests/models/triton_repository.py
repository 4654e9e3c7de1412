"""A model repository in the forms that Triton's documentation and examples show, made on the spot."""

from __future__ import annotations

from pathlib import Path

from tests.models import onnx_models

DENSENET = """
name: "densenet_onnx"
platform: "onnxruntime_onnx"
max_batch_size : 0
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 8, 8 ]
    reshape { shape: [ 1, 3, 8, 8 ] }
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 3 ]
    reshape { shape: [ 1, 3, 1, 1 ] }
    label_filename: "densenet_labels.txt"
  }
]
"""
"""Of the quick start, with pictures of 8 x 8 and three classes."""

SIMPLE = """
name: "simple"
backend: "onnxruntime"
max_batch_size: 8
input [
  {
    name: "INPUT0"
    data_type: TYPE_INT32
    dims: [ 16 ]
  },
  {
    name: "INPUT1"
    data_type: TYPE_INT32
    dims: [ 16 ]
  }
]
output [
  {
    name: "OUTPUT0"
    data_type: TYPE_INT32
    dims: [ 16 ]
  },
  {
    name: "OUTPUT1"
    data_type: TYPE_INT32
    dims: [ 16 ]
  }
]
"""
"""Of the client examples: OUTPUT0 is the sum, OUTPUT1 the difference."""

SIMPLE_ENSEMBLE = """
name: "ensemble_add_sub"
platform: "ensemble"
max_batch_size: 8
input [
  { name: "A" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "B" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "TWICE_A" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "TWICE_B" data_type: TYPE_INT32 dims: [ 16 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "simple"
      model_version: -1
      input_map { key: "INPUT0" value: "A" }
      input_map { key: "INPUT1" value: "B" }
      output_map { key: "OUTPUT0" value: "sum" }
      output_map { key: "OUTPUT1" value: "difference" }
    },
    {
      model_name: "simple"
      model_version: -1
      input_map { key: "INPUT0" value: "sum" }
      input_map { key: "INPUT1" value: "difference" }
      output_map { key: "OUTPUT0" value: "TWICE_A" }
      output_map { key: "OUTPUT1" value: "TWICE_B" }
    }
  ]
}
"""
"""(A + B) + (A - B) and (A + B) - (A - B)."""


def put(repository: Path, name: str, config: str, *, version: int = 1) -> Path:
    """Write a model's `config.pbtxt`, and return the folder of its version, which is empty."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return folder


def densenet(repository: Path) -> None:
    """`densenet_onnx`: one picture in, the means of its channels out, as three classes with labels."""
    onnx_models.channel_means(put(repository, "densenet_onnx", DENSENET))
    (repository / "densenet_onnx" / "densenet_labels.txt").write_text("red\ngreen\nblue\n")


def simple(repository: Path, name: str = "simple", config: str = SIMPLE) -> None:
    """`simple` of the client examples."""
    onnx_models.add_sub(put(repository, name, config))


def ensemble(repository: Path) -> None:
    """An ensemble of two steps of `simple`, with the empty version folder that Triton wants."""
    put(repository, "ensemble_add_sub", SIMPLE_ENSEMBLE)
