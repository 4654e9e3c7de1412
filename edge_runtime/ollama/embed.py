"""`POST /api/embed` and `/api/embeddings`: texts in, vectors out. Pure. Thread: the door's; answers are made on any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.doors.http.answer import json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.language.texts import encoded, usage, vector_requests, vectors_of, whole
from edge_runtime.models.servable import Servable
from edge_runtime.ollama.errors import refusal
from edge_runtime.request.request import Request


def embed_requests(servable: Servable, fields: Mapping[str, Any], head: HttpHead, call: HttpCall) -> CallRequests:
    """Return the requests that a body means; none where it has no text. Raises EdgeRuntimeError.

    `/api/embeddings`, which is older, has one text as `prompt`, and one vector.
    """
    del head
    is_one = call.values["asks"] == "embeddings"
    key = "prompt" if is_one else "input"
    value = fields.get(key)
    given = value if isinstance(value, list) and not is_one else [] if value in (None, "") else [value]
    if not all(isinstance(each, str) for each in given):
        raise DecodeFailed(f"{key}: wanted text" + ("" if is_one else " or a list of texts"))
    length = whole(fields, "dimensions")
    encoding = EmbedAnswer(str(fields.get("model") or fields.get("name")), length, call.deflates, is_one=is_one)
    texts = [encoded(key, each) for each in given]
    return CallRequests(encoding, vector_requests(servable, texts, length, timeout_ms=call.timeout_ms))


class EmbedAnswer:
    """The vectors of all texts, in their order. length: of each, cut and made one again; None: the model's own."""

    def __init__(self, model: str, length: int | None, deflates: str | None, *, is_one: bool) -> None:
        self._model = model
        self._length = length
        self._deflates = deflates
        self._is_one = is_one

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id)
        """The vectors of one request."""
        return self.join((request,))

    def join(self, requests: Sequence[Request]) -> Frames:
        """The vectors of several. Raises RunFailed: they are not finite numbers."""
        vectors = list(vectors_of(self._model, requests, self._length)) if requests else []
        if self._is_one:
            return json_response({"embedding": vectors[0] if vectors else []}, deflates=self._deflates)
        spent_ns = round(sum(each.queue_s + each.run_s for each in requests) * 1e9)
        fields = {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": spent_ns,
            "load_duration": 0,
            "prompt_eval_count": usage(requests)["prompt_tokens"] if requests else 0,
        }
        return json_response(fields, deflates=self._deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)
