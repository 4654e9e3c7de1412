"""`POST /rerank`: a question and texts in, the texts in the order of how well they answer it out.

Jina's and Cohere's form (`documents`), and that of Hugging Face's text-embeddings-inference (`texts`, answered by a
plain list). Owns: what a body means, and how scores are written. Pure. Thread: the door's; answers are made on any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.answers import kind_of
from edge_runtime.doors.http.answer import json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import EdgeRuntimeError, RunFailed, TensorMismatch
from edge_runtime.language.asking import BadField
from edge_runtime.language.texts import (
    MOST_TEXTS,
    TextInput,
    encoded,
    no_text_model,
    text_input,
    text_requests,
    usage,
    whole,
)
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.openai.errors import refusal
from edge_runtime.request.request import Request

PAIR = (2,)
"""The row of a model that ranks: question and text."""


def ranking_requests(servable: Servable, fields: Mapping[str, Any], call: HttpCall) -> CallRequests:
    """Return the requests that a body means. Raises EdgeRuntimeError."""
    query = fields.get("query")
    if not isinstance(query, str):
        raise BadField("query", "wanted text")
    key = next((each for each in ("documents", "texts") if each in fields), "documents")
    texts = _texts(fields, key)
    takes = text_input(servable, (PAIR,))
    if takes is None:
        raise no_text_model(servable, "one input of pairs of texts, BYTES [rows,2]")
    question = encoded("query", query)
    rows = [each for text in texts for each in (question, encoded(key, text))]
    shows = fields.get("return_documents" if key == "documents" else "return_text", False)
    if not isinstance(shows, bool):
        raise BadField("return_documents" if key == "documents" else "return_text", "wanted true or false")
    most = whole(fields, "top_n") or len(texts)
    encoding = RankingAnswer(
        servable.model, most, call.deflates, texts=texts if shows else None, is_plain_list=key == "texts"
    )
    output = _score_of(servable, takes)
    return CallRequests(encoding, text_requests(servable.model, takes, rows, timeout_ms=call.timeout_ms, output=output))


def only_ranker(table: ModelTable) -> str:
    """Return the one model that ranks, for bodies that name none. Raises BadField."""
    names = sorted({each.model for each in table.live() if _ranks(each)})
    if not names:
        raise BadField("model", "is missing, and no model here gives pairs of texts a score")
    if len(names) != 1:
        raise BadField("model", f"is missing, and {len(names)} models here give pairs of texts a score; name one")
    return names[0]


class RankingAnswer:
    """The best texts, best first. most: how many; texts: where they are wanted beside their scores."""

    def __init__(
        self, model: str, most: int, deflates: str | None, *, texts: Sequence[str] | None, is_plain_list: bool
    ) -> None:
        self._model = model
        self._most = most
        self._deflates = deflates
        self._texts = texts
        self._is_plain_list = is_plain_list

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have no id)
        """The ranking by one request."""
        return self.join((request,))

    def join(self, requests: Sequence[Request]) -> Frames:
        """The ranking by several. Raises RunFailed: a score is not a finite number."""
        scores = np.concatenate([np.ravel(each.plan.select(each.outputs)[0]) for each in requests]).astype(np.float32)
        if not np.isfinite(scores).all():
            raise RunFailed(f"model {self._model} gave scores that are not finite")
        best = np.argsort(-scores, kind="stable")[: self._most]
        named = "score" if self._is_plain_list else "relevance_score"
        results: list[dict[str, Any]] = []
        for index in best.tolist():
            result = {"index": index, named: scores[index]}
            if self._texts is not None and self._is_plain_list:
                result["text"] = self._texts[index]
            elif self._texts is not None:
                result["document"] = {"text": self._texts[index]}
            results.append(result)
        if self._is_plain_list:
            return json_response(results, deflates=self._deflates)
        fields = {"model": self._model, "results": results, "usage": usage(requests)}
        return json_response(fields, deflates=self._deflates)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)


# ---- private --------------------------------------------------------------------------------------------------------


def _texts(fields: Mapping[str, Any], key: str) -> list[str]:
    """The texts to rank: each is text, or an object with it. Raises BadField."""
    given = fields.get(key)
    if not isinstance(given, list):
        raise BadField(key, "wanted a list of texts")
    if not 1 <= len(given) <= MOST_TEXTS:
        raise BadField(key, f"got {len(given)} texts, wanted 1 to {MOST_TEXTS}")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in given]
    if not all(isinstance(each, str) for each in texts):
        raise BadField(key, 'wanted a list of texts, or of {"text": …}')
    return texts


def _ranks(servable: Servable) -> bool:
    takes = text_input(servable, (PAIR,))
    return takes is not None and len(_scores(servable, takes)) == 1


def _score_of(servable: Servable, takes: TextInput) -> str:
    """The output with one number a pair. Raises TensorMismatch."""
    found = _scores(servable, takes)
    if len(found) != 1:
        own = ", ".join(f"{each.name} {list(each.shape)}" for each in takes.form.spec.outputs if not each.is_optional)
        raise TensorMismatch(f"model {servable.model} gives {own}; wanted one output with a number a row, [rows,1]")
    return found[0]


def _scores(servable: Servable, takes: TextInput) -> list[str]:
    """The outputs with one number a row: those that are declared so, else all."""
    declared = {} if servable.steps is None else servable.steps.outputs
    given = [each for each in takes.form.spec.outputs if not each.is_optional]
    fitting = [each.name for each in given if _is_number(each.shape) and each.datatype != "BYTES"]
    return [name for name in fitting if name in declared and str(kind_of(declared[name])) == "number"] or fitting


def _is_number(shape: Sequence[int]) -> bool:
    return len(shape) in (1, 2) and tuple(shape[1:]) in ((), (1,))
