"""Texts as inputs, tokenised beside the model, and folders of Hugging Face's that say what such a model is."""

from edge_runtime.answers import AnswerLayout
from edge_runtime.models.folder_files import FolderFile
from edge_runtime.steps import StepsDeclaration

STEPS = StepsDeclaration(
    "text",
    sources=("text",),
    table="edge_runtime.text.text_steps:TextSteps",
    read="edge_runtime.text.declared_texts:declared_texts",
    reader="edge_runtime.text.text_input:text_input",
    sample="edge_runtime.text.sample:made_up",
    mark="tokenizer",
    presets=("text-classification", "token-classification", "sentence-embedding", "reranking", "zero-shot"),
)

LABELS = AnswerLayout(
    "labels", "", read=lambda row: tuple(bytes(each).decode() for each in row.array), to_json=list, from_json=tuple
)
"""Of the output SENT_LABELS: the labels that a text came with, by which its classes are named."""

TOKENS = AnswerLayout("tokens", "", read=lambda row: int(row.array))
"""Of the output TOKEN_COUNTS: how many tokens of a text the model ran, special ones among them."""

CONFIG = FolderFile("config.json", inputs="edge_runtime.text.hugging_face:text_inputs")
"""Of Hugging Face's, beside a model and its tokenizer: it takes texts without a `model.toml`."""
