"""OpenAI's paths on the HTTP door: which they are, and what answers each.

Owns: the calls, and the fields of models. chat.py, completions.py, embeddings.py and rerank.py know what bodies mean,
errors.py how errors are worded. Thread: the door's; `read` any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.http.call import INFER, HttpCall
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests, paths
from edge_runtime.doors.open_inference.operations import Caller, OpenInference
from edge_runtime.errors import ModelNotFound
from edge_runtime.language.asking import FIRST_TOKEN_MS, BadField
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.servable import Servable
from edge_runtime.openai.chat import chat_requests
from edge_runtime.openai.completions import completion_requests
from edge_runtime.openai.embeddings import embedding_requests
from edge_runtime.openai.errors import OpenAiErrors
from edge_runtime.openai.rerank import only_ranker, ranking_requests
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.replies import Encoding
from edge_runtime.wire import codec, json_codec

MODELS, MODEL = "openai_models", "openai_model"

REQUESTS: Mapping[str, Callable[[Servable, Mapping[str, Any], HttpCall], CallRequests]] = {
    "embeddings": embedding_requests,
    "rerank": ranking_requests,
}
"""What a body means, by the end of its path."""

WRITTEN: Mapping[str, Callable[[Servable, Mapping[str, Any], HttpCall, float], CallRequests]] = {
    "chat/completions": chat_requests,
    "completions": completion_requests,
}
"""The same of bodies that a language model answers, which are told the time, in seconds since 1970."""

PROMPTS: Mapping[str, str] = {"chat/completions": "messages", "completions": "prompt"}
"""The field with the prompt, by the end of the path."""

LISTED = (VersionState.READY.value, VersionState.ON_DEMAND.value)
"""The states of versions that answer."""

OWNER, CREATED_UTC = "edge-runtime", 0
"""Of every model: OpenAI's clients want both; no model says when it was made."""


def open_protocol(context: DoorContext, protocol: OpenInference) -> OpenAi:
    """Return the protocol that answers OpenAI's paths."""
    return OpenAi(protocol, context.core.table)


class OpenAi:
    """OpenAI's calls, as requests for inference and operations of the one table."""

    paths = paths(
        (r"/v1/(?P<asks>chat/completions|completions|embeddings)", {"POST": INFER}),
        (r"(?:/v1|/v2)?/(?P<asks>rerank)", {"POST": INFER}),
        (r"/v1/models", {"GET": MODELS}),
        (r"/v1/models/(?P<name>[^/:]+)", {"GET": MODEL}),
    )
    open_calls: frozenset[str] = frozenset()

    def __init__(self, protocol: OpenInference, table: ModelTable, now_s: Callable[[], float] = time.time) -> None:
        """now_s: seconds since 1970."""
        self._protocol = protocol
        self._table = table
        self._now_s = now_s

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding that words errors as OpenAI does."""
        return OpenAiErrors(PROMPTS.get(call.values.get("asks", "")))

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Note when the first token of an answer is due at the latest."""
        text = head.headers.get("x-first-token-ms")
        if text is not None:
            call.values[FIRST_TOKEN_MS] = text

    def claims(self, call: HttpCall) -> bool:
        """No: it shares no path of inference."""
        del call
        return False

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """Yes: its bodies are JSON."""
        del body, head
        return True

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> dict[str, Any]:
        """Read the fields of a body. Raises DecodeFailed."""
        del head, call
        return json_codec.loads(bytes(body))

    def model_of(self, message: dict[str, Any], call: HttpCall) -> tuple[str, int | None]:
        """Return the model that a body names, or the only one that ranks. Raises BadField."""
        if call.values["asks"] == "rerank" and message.get("model") is None:
            return only_ranker(self._table), None
        return _model_name(message), None

    def requests_of(self, servable: Servable, message: dict[str, Any], head: HttpHead, call: HttpCall) -> CallRequests:
        """Return the requests that a body means. Raises EdgeRuntimeError."""
        del head
        asks = call.values["asks"]
        if asks in WRITTEN:
            return WRITTEN[asks](servable, message, call, self._now_s())
        return REQUESTS[asks](servable, message, call)

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Tell of models. Raises EdgeRuntimeError."""
        del fields
        name = call.values.get("name")

        def respond(entries: list[dict[str, Any]]) -> Any:
            versions = [each for each in entries if each["version"] is not None]
            if name is None:
                names = sorted({each["name"] for each in versions if each["state"] in LISTED})
                return {"object": "list", "data": [_model_fields(each) for each in names]}, 200
            if all(each["name"] != name for each in versions):
                return ModelNotFound(f"there is no model {codec.short(name)}; GET /v1/models lists them")
            return _model_fields(name), 200

        self._protocol.operate("models", {}, caller, reply, respond)

    def close(self) -> None:
        """Nothing: it keeps nothing."""


def _model_fields(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED_UTC, "owned_by": OWNER}


def _model_name(fields: Mapping[str, Any]) -> str:
    """Return the model that a body names. Raises BadField."""
    name = fields.get("model")
    if not isinstance(name, str) or not name:
        raise BadField("model", f"got {type(name).__name__}, wanted the name of a model; GET /v1/models lists them")
    return name
