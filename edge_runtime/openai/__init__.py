"""OpenAI's protocol on the HTTP door: chats, completions, embeddings, models, and reranking in other servers' forms."""

from edge_runtime.doors.http.protocols import ProtocolDeclaration

PROTOCOL = ProtocolDeclaration("openai", "edge_runtime.openai.protocol:open_protocol")
