"""Steps as a family of models means them, for what `[input.NAME]` and `[output.NAME]` leave out. Pure.

A preset that `model.toml` names also makes the tables that are missing. One in the model's own metadata fills
tables that are there, and nothing else: a model without steps stays as it is. Called by declared_steps.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.model_metadata import ModelMetadata
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import DEFAULT_OVERLAP, BoxLayout, InputSteps, OutputSteps, Preset

# torchvision: `transforms/_presets.py`, ImageClassification: resize 256, crop 224, these means and deviations of 0..1.
_MEAN = (123.675, 116.28, 103.53)
_SCALE = tuple(1 / (255 * deviation) for deviation in (0.229, 0.224, 0.225))
_RESIZE, _CROP = 256, 224

_MOST_QUERIES = 1000
"""RT-DETR has 300; heads of YOLOs have thousands of places."""

_RANGES: dict[Preset, dict[str, Any]] = {
    "torchvision": {"mean": _MEAN, "scale": _SCALE},
    "ultralytics": {"range": "0..1"},  # `engine/predictor.py`, preprocess: im /= 255
    "keras": {"range": "-1..1"},  # `applications/imagenet_utils.py`, mode "tf": MobileNet, Inception, Xception, NASNet
    "mediapipe": {"range": "-1..1"},  # NormalizationOptions of its float models: mean 127.5, deviation 127.5
}
_OVERLAPS: dict[Preset, float] = {"ultralytics": 0.7}
"""`cfg/default.yaml`: iou: 0.7; conf is 0.25 there as it is here."""

_TASKS = ("", "detect", "classify", "segment", "pose", "obb")
_ANSWERS = {"segment": "masks", "pose": "keypoints"}
"""Ultralytics' tasks, and the answers of those that are neither classes nor boxes."""

_LEAST_POINTS = 2
"""Of a thing whose file does not say that it has points."""

_CHANNELS = (1, 3)


def fill_inputs(
    inputs: Mapping[str, InputSteps],
    preset: Preset | None,
    spec: ModelSpec | None,
    metadata: ModelMetadata,
    *,
    adds: bool,
) -> dict[str, PictureSteps]:
    """The tables of pictures, whole. spec: of the file, where it can be read. adds: whether to make a missing one.

    Raises LoadFailed: it is not known which input takes pictures, or keys contradict.
    """
    pictures = {name: steps for name, steps in inputs.items() if isinstance(steps, PictureSteps)}
    if preset is None:
        return {name: _whole(name, steps, {}) for name, steps in pictures.items()}
    if not pictures and adds:
        able = [each.name for each in spec.inputs if _is_picture(each)] if spec is not None else []
        if len(able) != 1:
            there = (
                f"it has {', '.join(each.name for each in spec.inputs)}" if spec is not None else "its file is not read"
            )
            raise LoadFailed(f'preset = "{preset}": say which input takes pictures by a table [input.NAME]; {there}')
        pictures = {able[0]: PictureSteps()}
    tensors = {each.name: each for each in spec.inputs} if spec is not None else {}
    return {name: _fill_input(name, steps, preset, tensors.get(name), metadata) for name, steps in pictures.items()}


def fill_outputs(
    outputs: Mapping[str, OutputSteps],
    preset: Preset | None,
    spec: ModelSpec | None,
    metadata: ModelMetadata,
    *,
    adds: bool,
) -> dict[str, OutputSteps]:
    """The tables of outputs, whole. An output of which a preset knows nothing gets none, so it comes as it is."""
    tensors = {each.name: each for each in spec.outputs} if spec is not None else {}
    if preset == "ultralytics" and metadata.task == "detect":
        metadata = _with_task(metadata, tensors.values())
    if not outputs and adds and preset is not None:
        first = next(iter(tensors.values()), None)
        is_known = first is not None and (
            len(first.shape) == 2 if preset != "ultralytics" else _has_task(metadata.task, tensors.values())
        )
        if first is not None and is_known and (preset == "ultralytics" or len(tensors) == 1):
            outputs = {first.name: OutputSteps()}
    filled: dict[str, OutputSteps] = {}
    for name, steps in outputs.items():
        values: dict[str, Any] = {}
        if preset == "ultralytics" and steps.answer is None and steps.layout is None:
            tensor = tensors.get(name)
            values["answer"] = _ANSWERS.get(metadata.task) if tensor is None or len(tensor.shape) == 3 else None
        answer = steps.answer or values.get("answer")
        if preset == "ultralytics" and answer in (None, "boxes") and steps.layout is None:
            values["layout"] = _layout_of(tensors.get(name), metadata)
        if answer == "keypoints" and steps.keypoints is None:
            values["keypoints"] = metadata.keypoints
        if steps.overlap is None:
            values["overlap"] = _OVERLAPS.get(preset, DEFAULT_OVERLAP) if preset is not None else DEFAULT_OVERLAP
        filled[name] = replace(steps, **values)
    return filled


def _with_task(metadata: ModelMetadata, outputs: Collection[TensorSpec]) -> ModelMetadata:
    """The task by the outputs' shapes, of a file that does not say it: an IR, or one of Ultralytics before version 8.

    Behind the classes a segmenter has a number for each prototype, a pose 3 for each point, a turned box its angle.
    """
    head = next((each for each in outputs if len(each.shape) == 3), None)
    if head is None or not metadata.names or not DYNAMIC < head.shape[1] <= head.shape[2]:
        return metadata
    extras = head.shape[1] - 4 - len(metadata.names)
    if any(len(each.shape) == 4 and extras in (each.shape[1], each.shape[3]) for each in outputs):
        return replace(metadata, task="segment")
    if extras == 1:
        return replace(metadata, task="obb")
    if extras >= _LEAST_POINTS * 3 and extras % 3 == 0:
        return replace(metadata, task="pose", keypoints=metadata.keypoints or (extras // 3, 3))
    return metadata


def _has_task(task: str, outputs: Collection[TensorSpec]) -> bool:
    """Whether outputs are those of a task that is read; masks are made of prototypes, which another output has."""
    return task in _TASKS and (task != "segment" or any(len(each.shape) == 4 for each in outputs))


def _fill_input(
    name: str, steps: PictureSteps, preset: Preset, tensor: TensorSpec | None, metadata: ModelMetadata
) -> PictureSteps:
    values: dict[str, Any] = {}
    sides = steps.size or _sides(tensor)
    if preset == "ultralytics" and sides is None and metadata.size is not None:
        values["size"] = sides = metadata.size
    is_detector = preset == "ultralytics" and metadata.task != "classify"
    if steps.fit is None and preset in ("torchvision", "ultralytics"):
        values["fit"] = "letterbox" if is_detector else "crop"
    if steps.filter is None and is_detector:
        values["filter"] = "linear"  # `data/augment.py`, LetterBox: cv2.INTER_LINEAR
    is_cropped = (steps.fit or values.get("fit")) == "crop"
    if preset == "torchvision" and is_cropped and steps.shorter_side is None and sides is not None:
        values["shorter_side"] = round(min(sides) * _RESIZE / _CROP)
    is_float = tensor is None or tensor.datatype.startswith(("FP", "BF"))
    if is_float and steps.range is None and not steps.mean and not steps.scale:
        numbers = _RANGES[preset]
        if "mean" in numbers and steps.color == "gray":
            raise LoadFailed(f'[input.{name}]: preset = "{preset}" has means of three colours; say mean and scale')
        turned = steps.color == "bgr" and "mean" in numbers
        values |= {key: value[::-1] if turned else value for key, value in numbers.items()}
    return _whole(name, steps, values)


def _whole(name: str, steps: PictureSteps, values: Mapping[str, Any]) -> PictureSteps:
    """The table with what a preset knows, and defaults for the rest. Raises LoadFailed: keys contradict."""
    known = {"fit": steps.fit or "stretch", "filter": steps.filter or "bilinear", **values}
    try:
        return replace(steps, **known)
    except ValueError as error:
        raise LoadFailed(f"[input.{name}]: {error}") from None


def _layout_of(tensor: TensorSpec | None, metadata: ModelMetadata) -> BoxLayout | None:
    """Ultralytics' own: v5 writes [rows, n, 5 + classes], later ones [rows, 4 + classes, n] or [rows, n, 6].

    RT-DETR writes [rows, n, 4 + classes].
    """
    if metadata.task == "obb":
        return "yolov8-obb"
    if tensor is None:
        return None if metadata.task == "classify" else "yolov8"
    if len(tensor.shape) != 3:
        return None
    from edge_runtime.pictures.box_layouts import is_finished

    _, first, last = tensor.shape
    if is_finished(tensor) and first != DYNAMIC:
        return "yolov8"
    if metadata.names and last == 4 + len(metadata.names) and first not in (last, DYNAMIC) and first <= _MOST_QUERIES:
        return "rtdetr"
    is_v5 = last == 5 + len(metadata.names) if metadata.names else last != DYNAMIC and 6 < last < first
    return "yolov5" if is_v5 else "yolov8"


def _is_picture(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and (spec.shape[1] in _CHANNELS or spec.shape[3] in _CHANNELS)


def _sides(tensor: TensorSpec | None) -> tuple[int, int] | None:
    """Height and width, where the model fixes them."""
    if tensor is None or not _is_picture(tensor):
        return None
    height, width = tensor.shape[2:] if tensor.shape[1] in _CHANNELS else tensor.shape[1:3]
    return (height, width) if DYNAMIC not in (height, width) else None
