"""Answers that need no picture: classes, numbers, text, embeddings, and tags of tokens."""

import numpy as np

from edge_runtime.answers import AnswerLayout
from edge_runtime.words import values

CLASSES = AnswerLayout(
    "classes",
    "edge_runtime.words.answer_makers:ClassesOutput",
    read=values.read_classes,
    to_json=values.classes_to_json,
    from_json=values.classes_from_json,
    lines=values.class_lines,
    short=values.short_classes,
    has_classes=True,
)
NUMBER = AnswerLayout(
    "number",
    "edge_runtime.words.answer_makers:NumberOutput",
    read=values.read_number,
    to_json=values.number_to_json,
    from_json=values.number_from_json,
    lines=lambda number, _: [values.number_text(number)],
    short=lambda number: [values.number_text(number)],
)
TEXT = AnswerLayout(
    "text",
    "edge_runtime.words.answer_makers:TextOutput",
    read=values.read_text,
    lines=lambda text, _: [text],
    short=lambda text: [text],
    needs_labels=True,
)
EMBEDDING = AnswerLayout(
    "embedding",
    "edge_runtime.words.answer_makers:EmbeddingOutput",
    read=lambda row: row.array,
    to_json=values.array_to_json,
    from_json=lambda told: np.asarray(told, np.float32),
    dtype=np.float32,
    lines=values.embedding_lines,
    short=values.short_embedding,
)
TAGS = AnswerLayout(
    "tags",
    "edge_runtime.words.answer_makers:TagsOutput",
    read=values.read_tags,
    to_json=values.tags_to_json,
    from_json=values.tags_from_json,
    lines=values.tag_lines,
    short=values.short_tags,
    has_classes=True,
    needs_labels=True,
)
