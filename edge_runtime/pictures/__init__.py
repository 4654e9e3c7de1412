"""Pictures as inputs, and what outputs mean: classes, boxes, masks."""

from edge_runtime.answers import AnswerLayout
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

CLASSES = AnswerLayout("classes", "edge_runtime.pictures.answer_makers:ClassesOutput")
BOXES = AnswerLayout("boxes", "edge_runtime.pictures.answer_makers:BoxesOutput")
MASK = AnswerLayout("mask", "edge_runtime.pictures.answer_makers:MaskOutput")
EMBEDDING = AnswerLayout("embedding", "edge_runtime.pictures.answer_makers:EmbeddingOutput")
TEXT = AnswerLayout("text", "edge_runtime.pictures.answer_makers:TextOutput")
