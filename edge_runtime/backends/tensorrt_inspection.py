"""In what precision an engine runs, read from what TensorRT's inspector says of its layers. Pure.

The text is JSON whose words differ between versions: a tensor is "Format/Datatype": "Row major linear FP16 format" in 8
and 10, and "Datatype": "Half" in RTX, "DataType" in 11.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "f16", "half": "f16", "float16": "f16",
    "fp8": "f8", "int8": "int8", "fp4": "f4", "int4": "int4", "fp32": "f32", "float32": "f32", "float": "f32",
}  # fmt: skip
"""What a type is called -> its precision, longer words that hold shorter ones first."""

_LOWEST_FIRST = ("f4", "int4", "int8", "f8", "bf16", "f16", "f32")

_COMPUTE = ("conv", "gemm", "matrix", "matmul", "fully", "mha", "attention", "rnn", "caskdeconv", "myelin", "kgen")
"""Words in the type of layers that compute rather than move data."""

_HEAVY = ("conv", "gemm", "matrix", "matmul", "fully", "mha", "attention", "rnn")
"""And of those where a model's time goes; the others count where there are none of these."""

INT8_SHARE = 0.75
"""Of compute layers in int8 from which a model is one of int8: quantisers leave the first or the last as they were."""


def precision_run(information: str, planned: str) -> str:
    """The precision of an engine's compute layers, "mixed" where they differ; `planned` where nothing tells.

    information: `EngineInspector.get_engine_information(JSON)` of an engine that was built with detailed verbosity.
    """
    try:
        layers = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        return planned
    if not isinstance(layers, list):
        return planned
    described = [layer for layer in layers if isinstance(layer, Mapping)]
    for words in (_HEAVY, _COMPUTE):
        found = Counter(filter(None, (_of_layer(layer, words) for layer in described)))
        if found:
            (name, count), *others = found.most_common()
            return name if not others or (name == "int8" and count >= INT8_SHARE * found.total()) else "mixed"
    return planned


def _of_layer(layer: Mapping[str, Any], words: tuple[str, ...]) -> str:
    """The lowest precision among what a compute layer reads; "" for other layers."""
    kind = f"{layer.get('LayerType', '')} {layer.get('ParameterType', '')}".lower()
    if not any(word in kind for word in words):
        return ""
    types = set(_types(layer.get("Inputs"))) or set(_types(layer.get("Outputs")))
    return next((precision for precision in _LOWEST_FIRST if precision in types), "")


def _types(tensors: Any) -> Iterator[str]:
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, Mapping):
            text = str(tensor.get("Format/Datatype") or tensor.get("Datatype") or tensor.get("DataType") or "").lower()
            found = next((precision for word, precision in _WORDS.items() if word in text), None)
            if found is not None:
                yield found
