"""Pictures as inputs, and what outputs say of them: boxes, masks, points."""

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
