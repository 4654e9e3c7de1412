"""An ONNX file as the source of a step: checked before a library sees it, then read.

Owns: the bound on its size, and how its opset is raised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime_converters.libraries import failing_as, import_library, reason_of

MAX_BYTES = 2_000_000_000
"""Steps write one protobuf file, which ends at 2 GiB."""


def check_source(source: Path) -> int:
    """Check an ONNX model; returns its bytes with data. Raises ConversionFailed: broken, or its data lies elsewhere."""
    try:
        total = check_onnx_files(source).total_bytes
    except LoadFailed as error:
        raise ConversionFailed(f"{source}: {error.message}") from error
    if total > MAX_BYTES:
        raise ConversionFailed(f"{source}: {total} bytes with its data; wanted at most {MAX_BYTES}, one protobuf file")
    return total


def read_onnx(source: Path, extra: str) -> Any:
    """The `onnx.ModelProto` of a file, its data in it. Raises ConversionFailed."""
    check_source(source)
    onnx = import_library("onnx", extra)
    with failing_as(f"{source}: onnx cannot read it"):
        return onnx.load(str(source))


def opset_of(model: Any) -> int:
    """The version of ONNX's own operators in a model; 0 where it uses none of them."""
    return max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=0)


def opsets_of(model: Any) -> str:
    """The versions of all operators in a graph, for a person: "17, ai.onnx.ml 3"."""
    used = {"" if node.domain == "ai.onnx" else node.domain for node in model.graph.node}
    each = sorted((entry.domain, entry.version) for entry in model.opset_import if entry.domain in used)
    return ", ".join(str(version) if domain in ("", "ai.onnx") else f"{domain} {version}" for domain, version in each)


def with_opset(model: Any, least: int, extra: str) -> Any:
    """The model in opset `least` or newer. Raises ConversionFailed: onnx cannot raise it."""
    if opset_of(model) >= least:
        return model
    converter = import_library("onnx.version_converter", extra)
    try:
        return converter.convert_version(model, least)
    except Exception as error:
        text = f"opset {opset_of(model)}, wanted {least}, and onnx cannot raise it: {reason_of(error)}"
        raise ConversionFailed(f"{text}; export the model again in a newer opset") from error
