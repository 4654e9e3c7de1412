"""Ollama's protocol on the HTTP door: chats and texts of language models, embeddings, and the list of models."""

from edge_runtime.doors.http.protocols import ProtocolDeclaration

PROTOCOL = ProtocolDeclaration("ollama", "edge_runtime.ollama.protocol:open_protocol")
