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

from edge_runtime.answers import kind_of
from edge_runtime.doors.http.answer import json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import EdgeRuntimeError, RunFailed, TensorMismatch
from edge_runtime.model_spec import DYNAMIC
from edge_runtime.models.servable import Servable
from edge_runtime.openai.errors import BadField, refusal
from edge_runtime.openai.texts import (
    MOST_TEXTS,
    encoded,
    no_text_model,
    text_input,
    text_requests,
    usage,
    whole,
)
from edge_runtime.request.request import Request

Vectors = npt.NDArray[np.float32]
"""FP32 [texts, length], or one row of it."""

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
    output = _embedding_of(servable)
    takes = text_input(servable, ((), (1,)))
    if takes is None:
        raise no_text_model(servable, "one input of texts, BYTES [rows] or [rows,1]")
    spec = next(each for each in takes.form.spec.outputs if each.name == output)
    if length is not None and DYNAMIC != spec.shape[-1] < length:
        raise BadField("dimensions", f"model {name} has {spec.shape[-1]}, wanted at most that")
    encoding = EmbeddingsAnswer(name, length, call.deflates, in_base64=form != FORMATS[0])
    return CallRequests(encoding, text_requests(name, takes, texts, timeout_ms=call.timeout_ms, output=output))


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
        vectors = np.concatenate([_vectors(each) for each in requests])
        if self._length is not None:
            vectors = vectors[:, : self._length]
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = np.ascontiguousarray(vectors / np.maximum(lengths, 1e-12), np.float32)
        if not np.isfinite(vectors).all():
            raise RunFailed(f"model {self._model} gave numbers that are not finite")
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


def _embedding_of(servable: Servable) -> str:
    """The output that answers with an embedding. Raises TensorMismatch."""
    outputs = {} if servable.steps is None else servable.steps.outputs
    found = next((name for name, each in outputs.items() if kind_of(each) == "embedding"), None)
    if found is None:
        first = servable.spec.outputs[0].name
        raise TensorMismatch(
            f"model {servable.model} answers with no embedding; where it gives one, say so in its model.toml: "
            f'[output.{first}] answer = "embedding"'
        )
    return found


def _vectors(request: Request) -> Vectors:
    """The vectors of one request, FP32 [rows, length]."""
    array = request.plan.select(request.outputs)[0]
    vectors: Vectors = np.asarray(array, np.float32).reshape(len(array), -1)
    return vectors


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
