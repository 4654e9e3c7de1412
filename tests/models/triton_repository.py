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


PREPROCESS = """
name: "preprocess"
backend: "python"
max_batch_size: 8
input [
  { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 8, 8, 3 ] }
]
output [
  { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
]
instance_group [ { kind: KIND_CPU } ]
"""

PREPROCESS_PY = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        output_config = pb_utils.get_output_config_by_name(model_config, "PIXELS")
        self.output_dtype = pb_utils.triton_string_to_numpy(output_config["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            pixels = np.transpose(image, (0, 3, 1, 2)).astype(self.output_dtype) / 255.0
            tensor = pb_utils.Tensor("PIXELS", pixels.astype(self.output_dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses

    def finalize(self):
        print("Cleaning up...")
"""

CLASSIFIER = """
name: "classifier"
platform: "onnxruntime_onnx"
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
"""
"""Its tensors are found out, as with Triton's auto-complete."""

POSTPROCESS = """
name: "postprocess"
backend: "python"
max_batch_size: 8
input [
  { name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] }
]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] }
]
parameters: { key: "labels" value: { string_value: "red,green,blue" } }
"""

POSTPROCESS_PY = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.labels = np.array(parameters["labels"]["string_value"].split(","), dtype=object)

    def execute(self, requests):
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()
            best = self.labels[scores.argmax(axis=1)].reshape(-1, 1)
            tensor = pb_utils.Tensor("LABEL", best)
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
"""

PICTURES = """
name: "pictures"
platform: "ensemble"
max_batch_size: 8
input [
  { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 8, 8, 3 ] }
]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "preprocess"
      model_version: -1
      input_map { key: "IMAGE" value: "IMAGE" }
      output_map { key: "PIXELS" value: "preprocessed_image" }
    },
    {
      model_name: "classifier"
      model_version: -1
      input_map { key: "pixels" value: "preprocessed_image" }
      output_map { key: "scores" value: "class_scores" }
    },
    {
      model_name: "postprocess"
      model_version: -1
      input_map { key: "SCORES" value: "class_scores" }
      output_map { key: "LABEL" value: "LABEL" }
    }
  ]
}
"""
"""Preprocessing in Python, a network, postprocessing in Python: Triton's tutorial on ensembles."""

BLS = """
name: "bls"
backend: "python"
max_batch_size: 0
input [
  { name: "IMAGE" data_type: TYPE_UINT8 dims: [ -1, 8, 8, 3 ] },
  { name: "MODEL_NAME" data_type: TYPE_STRING dims: [ 1 ] }
]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ -1, 1 ] }
]
"""

BLS_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE")
            model_name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
            infer_request = pb_utils.InferenceRequest(
                model_name=model_name.decode(), requested_output_names=["LABEL"], inputs=[image]
            )
            infer_response = infer_request.exec()
            if infer_response.has_error():
                error = pb_utils.TritonError(infer_response.error().message())
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            responses.append(pb_utils.InferenceResponse(output_tensors=infer_response.output_tensors()))
        return responses
"""
"""Triton's synchronous BLS example: it asks the model that its request names."""


PICTURE_MODELS = ("pictures", "preprocess", "classifier", "postprocess")


def pictures(repository: Path) -> None:
    """`pictures` with its three steps, and `bls`, which asks one of them by name."""
    for name, config, source in (
        ("preprocess", PREPROCESS, PREPROCESS_PY),
        ("postprocess", POSTPROCESS, POSTPROCESS_PY),
        ("bls", BLS, BLS_PY),
    ):
        (put(repository, name, config) / "model.py").write_text(source)
    onnx_models.means(put(repository, "classifier", CLASSIFIER))
    put(repository, "pictures", PICTURES)
