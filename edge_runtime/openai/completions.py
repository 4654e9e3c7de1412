"""`POST /v1/completions`: a prompt in, as it is, what follows it out. OpenAI calls it legacy; editors complete by it.

Owns: what a body means, and how a choice is written. Pure. Thread: the door's; answers are made on any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.language.asking import BadField, WrittenPart, text_request
from edge_runtime.language.texts import encoded
from edge_runtime.models.servable import Servable
from edge_runtime.openai.writing import MOST_LOGPROBS, WritingAnswer, boolean, steering_of, whole_or_none
from edge_runtime.wire.codec import short


def completion_requests(servable: Servable, fields: Mapping[str, Any], call: HttpCall, now_s: float) -> CallRequests:
    """Return the request that a body means. Raises EdgeRuntimeError."""
    prompt = encoded("prompt", _prompt(fields.get("prompt")))
    if boolean(fields, "echo"):
        raise BadField("echo", "the prompt is not said again; leave it out, and put the prompt before the answer")
    if fields.get("suffix"):
        raise BadField("suffix", "is not offered: write the prompt in the model's own words for what stands behind")
    steering = steering_of(fields, call, ("max_tokens",))
    beside = whole_or_none(fields, "logprobs", 0, MOST_LOGPROBS)
    if beside is not None:
        steering.parameters["logprobs"] = beside
    asked = text_request(servable, prompt, steering.parameters, steering.timeout_ms)
    return CallRequests(WritingAnswer(servable, CompletionChoices(), steering, now_s, call.deflates), [asked])


class CompletionChoices:
    """A text, or its pieces; the last has the finish_reason."""

    prefix, kind, chunk_kind, prompt_param = "cmpl", "text_completion", "text_completion", "prompt"

    def __init__(self) -> None:
        self._length = 0

    def choice(self, part: WrittenPart) -> dict[str, Any]:
        """Return the choice of a whole answer, but its index."""
        return {"text": part.text, "logprobs": self._logprobs(part), "finish_reason": part.finish_reason or None}

    def deltas(self, part: WrittenPart) -> Iterator[dict[str, Any]]:
        """Give the choice of the chunk of one part."""
        if part.text or part.logprobs or part.finish_reason:
            yield self.choice(part)

    def _logprobs(self, part: WrittenPart) -> dict[str, Any] | None:
        """The legacy form of logarithms of probabilities: a list for each. Offsets count the answer's letters."""
        if not part.logprobs:
            self._length += len(part.text)
            return None
        offsets = []
        for each in part.logprobs:
            offsets.append(self._length)
            self._length += len(each["token"])
        return {
            "tokens": [each["token"] for each in part.logprobs],
            "token_logprobs": [each["logprob"] for each in part.logprobs],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in each["top_logprobs"]} for each in part.logprobs
            ],
            "text_offset": offsets,
        }


# ---- private --------------------------------------------------------------------------------------------------------


def _prompt(value: Any) -> str:
    """The one text of a body. Raises BadField."""
    given = value if isinstance(value, list) else [value]
    if given and all(isinstance(each, int | list) for each in given):
        raise BadField("prompt", "got tokens, wanted a text: the model cuts text itself, by its own tokenizer")
    if len(given) != 1:
        raise BadField("prompt", f"got {len(given)} texts, wanted one: a request has one answer; send one for each")
    if not isinstance(given[0], str):
        raise BadField("prompt", f"got {short(given[0])}, wanted a text")
    return given[0]
