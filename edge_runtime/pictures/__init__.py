"""Pictures as inputs, and what outputs say of them: boxes, masks, points."""

import numpy as np

from edge_runtime.answers import AnswerLayout
from edge_runtime.pictures import values
from edge_runtime.steps import StepsDeclaration

STEPS = StepsDeclaration(
    "pictures",
    sources=("picture", "frames", "nv12", "yuyv", "gray"),
    table="edge_runtime.pictures.picture_steps:PictureSteps",
    read="edge_runtime.pictures.declared_steps:declared_steps",
    reader="edge_runtime.pictures.input:picture_input",
    sample="edge_runtime.pictures.sample:made_up",
    presets=("torchvision", "ultralytics", "keras", "mediapipe"),
    offer="edge_runtime.pictures.model_metadata:offered_preset",
    advice="edge_runtime.pictures.declared_steps:why_no_picture",
    drawing="edge_runtime.pictures.drawing",
)

PICTURE = AnswerLayout(
    "picture", "", read=values.read_size, to_json=values.size_to_json, from_json=values.size_from_json
)
"""Of the output PICTURE_SIZE, which `picture_input` gives."""

BOXES = AnswerLayout(
    "boxes",
    "edge_runtime.pictures.answer_makers:BoxesOutput",
    read=values.read_boxes,
    to_json=values.boxes_to_json,
    from_json=values.boxes_from_json,
    lines=values.box_lines,
    short=values.short_boxes,
    has_classes=True,
)
MASK = AnswerLayout(
    "mask",
    "edge_runtime.pictures.answer_makers:MaskOutput",
    read=lambda row: row.array,
    to_json=lambda mask: mask.tolist(),
    from_json=lambda told: np.asarray(told, np.uint8),
    dtype=np.uint8,
    lines=values.mask_lines,
    short=values.short_mask,
    has_classes=True,
)
MASKS = AnswerLayout(
    "masks",
    "edge_runtime.pictures.answer_makers:MasksOutput",
    read=values.read_masks,
    to_json=values.masks_to_json,
    from_json=values.masks_from_json,
    lines=values.object_mask_lines,
    short=values.short_boxes,
    has_classes=True,
)
KEYPOINTS = AnswerLayout(
    "keypoints",
    "edge_runtime.pictures.answer_makers:KeypointsOutput",
    read=values.read_keypoints,
    to_json=values.keypoints_to_json,
    from_json=values.keypoints_from_json,
    lines=values.keypoint_lines,
    short=values.short_boxes,
    has_classes=True,
)
