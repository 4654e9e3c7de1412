"""Bodies that name no shapes: Triton's `generate`, and a body that is one input's bytes.

`generate` is a JSON object whose keys are a model's inputs, answered by one whose keys are its outputs. Pure. For
models of one row a request, whose inputs leave one length open at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.doors.open_inference import oip
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.models.servable import Servable
from edge_runtime.tensors import Array, datatype, element_count
from edge_runtime.wire.codec import short


def generate_fields(servable: Servable, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for inference that a body stands for: keys that name no input are parameters, as with Triton.

    Raises DecodeFailed, TensorMismatch.
    """
    specs = {spec.name: spec for spec in servable.spec.inputs}
    others = {key: value for key, value in body.items() if key not in specs}
    if not isinstance(others.get("parameters", {}), dict):
        raise DecodeFailed(f"Expected JSON object for keyword: 'parameters'; got {short(others['parameters'])}")
    fields: dict[str, Any] = {"parameters": {**others.get("parameters", {}), **others}}
    fields["parameters"].pop("parameters", None)
    if "id" in fields["parameters"]:
        fields["id"] = fields["parameters"].pop("id")
    given = [(spec, body[name]) for name, spec in specs.items() if name in body]
    fields["inputs"] = [_input(spec, value, batches=servable.batches) for spec, value in given]
    return fields


def generate_answer(servable: Servable, outputs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The answer: each output's elements, one of them as itself. outputs: name and flat data."""
    named = {name: data[0] if len(data) == 1 else data for name, data in outputs}
    return {"model_name": servable.model, "model_version": str(servable.number), **named}


def raw_request(servable: Servable, body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The request, and its tensor, that a body of nothing but one input's data stands for; of BYTES its one element.

    Raises TensorMismatch.
    """
    fields = raw_fields(servable, len(body))
    (item,) = fields["inputs"]
    if item["datatype"] != "BYTES":
        return fields, [body]
    if DYNAMIC in servable.spec.inputs[0].shape[servable.batches :] or element_count(item["shape"]) != 1:
        raise TensorMismatch(
            f"For BYTE datatype raw input '{item['name']}', the model must have input shape [1]; {servable.model} "
            f"takes {list(servable.spec.inputs[0].shape)}; send it with its lengths, or as JSON"
        )
    element: Array = np.empty(1, object)
    element[0] = bytes(body)
    return fields, [element.reshape(item["shape"])]


def raw_fields(servable: Servable, nbytes: int) -> dict[str, Any]:
    """The fields of a raw request. Raises TensorMismatch."""
    inputs = servable.spec.inputs
    name = servable.model
    if len(inputs) != 1:
        raise TensorMismatch(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in '{name}' "
            "model configuration; send JSON, or binary tensors behind a JSON head"
        )
    (tensor,) = inputs
    shape = list(tensor.shape)
    if servable.batches:
        shape[0] = 1
    free = [axis for axis, length in enumerate(shape) if length == DYNAMIC]
    if len(free) > 1:
        raise TensorMismatch(
            f"The shape of the raw input '{tensor.name}' can not be deduced because there are more than one "
            f"variable-sized dimension: model '{name}' takes {list(tensor.shape)}; send its shape, in a JSON head"
        )
    if tensor.datatype == "BYTES":
        if free:
            shape[free[0]] = 1
    elif free:
        row = element_count([length for length in shape if length != DYNAMIC]) * datatype(tensor.datatype).itemsize
        shape[free[0]] = nbytes // row if row else 0
    item = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": shape,
        "parameters": {oip.BINARY_SIZE: nbytes},
    }
    return {"inputs": [item], "parameters": {oip.BINARY_OUTPUTS: True}}


def _input(spec: TensorSpec, value: Any, *, batches: bool) -> dict[str, Any]:
    if isinstance(value, dict) or value is None:
        why = "attempt to access JSON non-string as string: " if spec.datatype == "BYTES" else ""
        raise DecodeFailed(
            f"generate: {short(spec.name)}: {why}got {type(value).__name__}, wanted a value or a list of them"
        )
    data = value if isinstance(value, list) else [value]
    shape = list(spec.shape)
    if batches:
        shape[0] = 1
    free = [axis for axis, length in enumerate(shape) if length == DYNAMIC]
    if len(free) > 1:
        raise TensorMismatch(f"generate: input {short(spec.name)} has the shape {list(spec.shape)}; use infer")
    if free:
        others = element_count([length for length in shape if length != DYNAMIC])
        shape[free[0]] = len(data) // others if others else 0
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": data}
