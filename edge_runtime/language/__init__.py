"""Language models: text and chats in, text out in parts."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb(
    "chat",
    "chat with a language model in the terminal",
    "edge_runtime.language.command",
    status_fields="edge_runtime.language.status_lines:status_fields",
)
