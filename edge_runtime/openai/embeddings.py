"""`POST /v1/embeddings`: texts in, vectors of length 1 out, as OpenAI's clients send and read them.

Owns: what a body means, and how vectors are written, as numbers or in base64. Pure. Thread: the door's; answers are
made on any.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.doors.http.answer import json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.language.asking import BadField
from edge_runtime.language.texts import MOST_TEXTS, encoded, usage, vector_requests, vectors_of, whole
from edge_runtime.models.servable import Servable
from edge_runtime.openai.errors import refusal
from edge_runtime.request.request import Request

FORMATS = ("float", "base64")
"""The values of `encoding_format`, the usual one first: a list of numbers, or FP32 little-endian in base64."""


def embedding_requests(servable: Servable, fields: Mapping[str, Any], call: HttpCall) -> CallRequests:
    """Return the requests that a body means. Raises EdgeRuntimeError."""
    name = servable.model
    texts = _texts(fields.get("input"))
    form = fields.get("encoding_format", FORMATS[0])
    if form not in FORMATS:
        raise BadField("encoding_format", f"wanted {' or '.join(FORMATS)}")
    length = whole(fields, "dimensions")
    encoding = EmbeddingsAnswer(name, length, call.deflates, in_base64=form != FORMATS[0])
    return CallRequests(encoding, vector_requests(servable, texts, length, timeout_ms=call.timeout_ms))


class EmbeddingsAnswer:
    """The vectors of all texts, in their order. length: of each, cut and made one again; None: the model's own."""

    def __init__(self, model: str, length: int | None, deflates: str | None, *, in_base64: bool) -> None:
        self._model = model
        self._length = length
        self._deflates = deflates
        self._in_base64 = in_base64

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id)
        """The vectors of one request."""
        return self.join((request,))

    def join(self, requests: Sequence[Request]) -> Frames:
        """The vectors of several. Raises RunFailed: they are not finite numbers."""
        vectors = vectors_of(self._model, requests, self._length)
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if self._in_base64 else vector}
            for index, vector in enumerate(vectors)
        ]
        return json_response(
            {"object": "list", "data": data, "model": self._model, "usage": usage(requests)}, deflates=self._deflates
        )

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)


# ---- private --------------------------------------------------------------------------------------------------------


def _texts(value: Any) -> list[bytes]:
    """The texts of `input`. Raises BadField."""
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= MOST_TEXTS:
        raise BadField("input", f"got {len(given)} texts, wanted 1 to {MOST_TEXTS}")
    if any(isinstance(each, int | list) for each in given):
        raise BadField(
            "input",
            "got tokens, wanted text or a list of texts: the model cuts text itself, by its own tokenizer "
            "(LangChain: check_embedding_ctx_length=False)",
        )
    if not all(isinstance(each, str) for each in given):
        raise BadField("input", "wanted text or a list of texts")
    return [encoded("input", each) for each in given]


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
