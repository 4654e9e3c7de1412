"""A model's metadata in its own file: names of its classes, and the family that exported it. Read without any library.

Owns: the bounds of what is read, since the daemon itself reads it. ONNX has metadata_props, OpenVINO's IR has rt_info.
Called by pictures/declared_steps.py. What cannot be read there is left out: it is only advice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.backends.onnx.zipmap import zipmap_classes
from edge_runtime.backends.protobuf_fields import LENGTH_DELIMITED, ProtobufFields
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import Preset

# Field numbers of onnx.proto.
_MODEL_METADATA = 14
_KEY, _VALUE = 1, 2

_MAX_ENTRIES = 1000
_MAX_FIELDS = 100_000
"""Of a model beside its graph, which is one: opsets, functions, metadata."""
_MAX_KEY_BYTES = 200
_MAX_VALUE_BYTES = 4 << 20
"""Of one entry: names of 100 000 classes."""
_MAX_XML_BYTES = 64 << 20
"""An IR's topology without weights; the largest of OpenVINO's model zoo has 8 MB."""

_MAX_LAYER_CHARACTERS = 8192
"""A layer of an input or output has 300."""

_ESCAPE = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
_TEXT = rf"'(?:[^'\\\n]|{_ESCAPE})*'|\"(?:[^\"\\\n]|{_ESCAPE})*\""
_NAME = re.compile(rf"\s*(?:['\"]?(\d{{1,6}})['\"]?\s*:\s*)?({_TEXT})\s*(,|$)")

_IR_DATATYPES = {"FP32": "FP32", "FP16": "FP16", "U8": "UINT8", "I8": "INT8"}


class ModelMetadata(Struct, frozen=True):
    """The metadata of a file. names: of classes, in order. preset: the family whose exporter wrote it.

    task: Ultralytics' word for what it does. size: height and width of the picture that it was made for. keypoints: of
    a model of poses, the points of a thing and the numbers of a point.
    """

    names: tuple[str, ...] = ()
    preset: Preset | None = None
    task: str = ""
    size: tuple[int, int] | None = None
    keypoints: tuple[int, int] | None = None


def read_metadata(artifact: Path) -> ModelMetadata:
    """Read the metadata of an ONNX or IR file; nothing of any other file. Raises nothing."""
    try:
        if artifact.suffix == ".onnx":
            found = _of_entries(_onnx_entries(artifact))
            return found if found.names else replace(found, names=zipmap_classes(artifact))
        if artifact.suffix == ".xml":
            return _of_ir(_xml(artifact))
    except (LoadFailed, OSError):
        pass  # the load says what is wrong with the file
    return ModelMetadata()


def offered_preset(artifact: Path) -> Preset | None:
    """Return the preset of the family whose exporter wrote a file; None where it does not say. Raises nothing."""
    return read_metadata(artifact).preset


def read_interface(artifact: Path) -> ModelSpec | None:
    """Inputs and outputs that an ONNX or IR file declares, where they can be read. Raises nothing."""
    try:
        if artifact.suffix == ".onnx":
            return declared_interface(artifact)
        if artifact.suffix == ".xml":
            return _ir_interface(_xml(artifact))
    except (LoadFailed, OSError):
        pass
    return None


def parse_names(text: str) -> tuple[str, ...]:
    """Names out of a Python dict or list, as Ultralytics writes it: {0: 'person', 1: 'bicycle'}; () for all else.

    Every element is matched as a whole, so nothing nests, and nothing is computed.
    """
    text = text.strip()
    if (text[:1], text[-1:]) not in (("{", "}"), ("[", "]")):
        return ()
    import ast

    body, position = text[1:-1].rstrip(), 0
    names: list[str] = []
    while position < len(body):
        found = _NAME.match(body, position)
        if found is None or (text[0] == "{") != (found[1] is not None) or int(found[1] or len(names)) != len(names):
            return ()
        try:
            name: str = ast.literal_eval(found[2])
            name.encode()
        except (ValueError, SyntaxError):
            return ()
        names.append(name)
        position = found.end()
    return tuple(names)


def _of_entries(entries: dict[str, str]) -> ModelMetadata:
    """Ultralytics writes names and stride, since version 8 also task, imgsz, kpt_shape (`engine/exporter.py`)."""
    names = parse_names(entries.get("names", ""))
    is_ultralytics = bool(names) and "stride" in entries
    points = re.fullmatch(r"\[(\d{1,3}), ?([23])\]", entries.get("kpt_shape", ""))
    size = re.fullmatch(r"\[(\d{1,5}), ?(\d{1,5})\]", entries.get("imgsz", ""))
    return ModelMetadata(
        names,
        "ultralytics" if is_ultralytics else None,
        entries.get("task", "detect") if is_ultralytics else "",
        (int(size[1]), int(size[2])) if size is not None else None,
        (int(points[1]), int(points[2])) if points is not None else None,
    )


def _onnx_entries(artifact: Path) -> dict[str, str]:
    descriptor, status = open_artifact(artifact)
    try:
        reader = ProtobufFields(descriptor, status.st_size, artifact.name, _MAX_FIELDS)
        found: dict[str, str] = {}
        for number, wire_type, start, end in reader.fields(0, status.st_size):
            if number != _MODEL_METADATA or wire_type != LENGTH_DELIMITED or len(found) >= _MAX_ENTRIES:
                continue
            texts = {_KEY: "", _VALUE: ""}
            for field, kind, first, last in reader.fields(start, end):
                most = _MAX_KEY_BYTES if field == _KEY else _MAX_VALUE_BYTES
                if field in texts and kind == LENGTH_DELIMITED and last - first <= most:
                    texts[field] = reader.content(first, last).decode("utf-8", "replace")
            found[texts[_KEY]] = texts[_VALUE]
        return found
    finally:
        os.close(descriptor)


# ---- OpenVINO's IR --------------------------------------------------------------------------------------------------


def _xml(artifact: Path) -> str:
    """The text of an IR, "" where it is too large. Patterns are found in it; no XML is expanded."""
    descriptor, status = open_artifact(artifact)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_XML_BYTES).decode("utf-8", "replace") if status.st_size <= _MAX_XML_BYTES else ""


def _of_ir(text: str) -> ModelMetadata:
    """`model_info` of rt_info, as Ultralytics and OpenVINO's Model API write it: labels without spaces inside."""
    import html

    told = text.rpartition("<model_info>")[2].partition("</model_info>")[0] if "<model_info>" in text else ""
    told = told[:_MAX_VALUE_BYTES]
    values = {key: html.unescape(value) for key, value in re.findall(r'<(\w+) value="([^"]*)"', told)}
    names = tuple(label.replace("_", " ") for label in values.get("labels", "").split())
    is_ultralytics = values.get("model_type") == "YOLO" and bool(names)
    task = "detect" if "resize_type" in values else "classify"
    return ModelMetadata(names, "ultralytics" if is_ultralytics else None, task if is_ultralytics else "")


def _layers(text: str) -> Iterator[tuple[str, str]]:
    """The layers of inputs and outputs: type and text of each. Every character is looked at once."""
    start = text.find("<layer ")
    while start >= 0 and (end := text.find("</layer>", start)) >= 0:
        body = text[start : min(end, start + _MAX_LAYER_CHARACTERS)]
        kind = re.search(r'\stype="(Parameter|Result)"', body.partition(">")[0])
        if kind is not None:
            yield kind[1], body
        start = text.find("<layer ", end)


def _ir_interface(text: str) -> ModelSpec | None:
    import html

    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for kind, body in _layers(text):
        name = re.search(r'\b(?:output_)?names="([^",]*)', body)
        precision = re.search(r'\bprecision="(\w+)"', body)
        if name is None or precision is None:
            return None
        shape = tuple(int(each) if int(each) >= 0 else DYNAMIC for each in re.findall(r"<dim>(-?\d{1,9})</dim>", body))
        spec = TensorSpec(html.unescape(name[1]), _IR_DATATYPES.get(precision[1], precision[1]), shape)
        (inputs if kind == "Parameter" else outputs).append(spec)
    return ModelSpec(tuple(inputs), tuple(outputs)) if inputs and outputs else None
