"""Answers of language models as Ollama's clients read them: one object, or one a line while it is written.

Owns: the fields of an answer and of its last line, and the parting of thoughts from the answer. Pure. Thread: any; one
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from edge_runtime.clock import SystemClock
from edge_runtime.doors.http.answer import json_response, response
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.language.asking import WrittenPart, part_of
from edge_runtime.ollama.errors import refusal
from edge_runtime.request.request import Request
from edge_runtime.wire import json_codec

LINES_TYPE = "application/x-ndjson"

REASONS = {"length": "length"}
"""Ollama's names of why an answer ended; all others are `stop`, a call of tools too."""

LOADED = "load"
"""Why an answer ended that asked for nothing but that its model is loaded."""

Words = Callable[[str, str, Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Takes the answer's text, thoughts and calls of tools; returns the fields that hold them."""


def message_fields(words: str, thoughts: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": words}
    if thoughts:
        message["thinking"] = thoughts
    if calls:
        message["tool_calls"] = [_tool_call(each) for each in calls]
    return {"message": message}


def response_fields(words: str, thoughts: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `/api/generate`, which has no tools."""
    del calls
    return {"response": words, **({"thinking": thoughts} if thoughts else {})}


class WrittenAnswer:
    """The answer to one request, whole or in lines. words: the fields of its text. shows_thoughts: where there are any.

    model: the name by which it was asked.
    """

    kind = LINES_TYPE
    end = b""

    def __init__(
        self, model: str, words: Words, deflates: str | None, *, is_stream: bool, parts_thoughts: bool, shows: bool
    ) -> None:
        """parts_thoughts: from the answer, as those of a chat's begin it. shows: thoughts come beside the answer."""
        self._model = model
        self._words = words
        self._deflates = deflates
        self.is_stream = is_stream
        self._thoughts = Thoughts() if parts_thoughts else None
        self._shows = shows
        self._first_s: float | None = None

    def event(self, request: Request, request_id: Any) -> bytes:  # noqa: ARG002 (answers have no id)
        """A line for what is new, and the last one; b"" where nothing is new."""
        if self._first_s is None:
            self._first_s = SystemClock.monotonic_s()
        part = part_of(request)
        words, thoughts = self._parted(part)
        lines = b""
        if words or thoughts or part.tool_calls or part.logprobs:
            lines = _line({**self._new(part, words, thoughts), "done": False})
        if part.finish_reason:
            lines += _line({**self._named(), **self._words("", "", ()), **self._ended(part, request)})
        return lines

    def failed_event(self, error: EdgeRuntimeError) -> bytes:
        """A line with the error."""
        return _line({"error": error.message})

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """All of it."""
        part = part_of(request)
        words, thoughts = self._parted(part)
        fields = {**self._new(part, words, thoughts), **self._ended(part, request)}
        return json_response(fields, deflates=self._deflates)

    def join(self, requests: Sequence[Request]) -> Frames:
        """The answer where nothing was asked but that the model is loaded."""
        assert not requests
        fields = {**self._named(), **self._words("", "", ()), "done": True, "done_reason": LOADED}
        return response((_line(fields),), LINES_TYPE) if self.is_stream else json_response(fields)

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)

    def _parted(self, part: WrittenPart) -> tuple[str, str]:
        if self._thoughts is None:
            return part.text, ""
        words, thoughts = self._thoughts.read(part.text, is_last=bool(part.finish_reason))
        return words, thoughts if self._shows else ""

    def _new(self, part: WrittenPart, words: str, thoughts: str) -> dict[str, Any]:
        logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
        return {**self._named(), **self._words(words, thoughts, part.tool_calls), **logprobs}

    def _ended(self, part: WrittenPart, request: Request) -> dict[str, Any]:
        """The fields of the last line. Times in nanoseconds: to the first token, and from there to the end."""
        now_s = SystemClock.monotonic_s()
        first_s = now_s - request.run_s if self._first_s is None else self._first_s
        first_ns = max(round((first_s - request.arrived_s) * 1e9), 0)
        rest_ns = round((now_s - first_s) * 1e9)
        return {
            "done": True,
            "done_reason": REASONS.get(part.finish_reason, "stop"),
            "total_duration": first_ns + rest_ns,
            "load_duration": 0,
            "prompt_eval_count": part.prompt_tokens,
            "prompt_eval_duration": first_ns,
            "eval_count": part.completion_tokens,
            "eval_duration": rest_ns,
        }

    def _named(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")}


class Thoughts:
    """Parts what a model thinks, between `<think>` and `</think>` at the beginning of its text, from its answer."""

    BEGIN, END = "<think>", "</think>"

    def __init__(self) -> None:
        self._kept = ""
        self._place = "before"  # then "begun", "within" and "behind" the thoughts, where there are any; then "answer"

    def read(self, new: str, *, is_last: bool) -> tuple[str, str]:
        """Take new text; return what there is now of the answer, and of the thoughts. Keeps what may begin a mark."""
        text, self._kept = self._kept + new, ""
        if self._place == "before":
            bare = text.lstrip()
            if bare.startswith(self.BEGIN):
                self._place, text = "begun", bare.removeprefix(self.BEGIN)
            elif self.BEGIN.startswith(bare) and not is_last:
                self._kept = text
                return "", ""
            else:
                self._place = "answer"
        if self._place == "begun":
            text = text.lstrip()
            self._place = "within" if text else "begun"
        if self._place == "within":
            thoughts, mark, rest = text.partition(self.END)
            if not mark:
                kept = 0 if is_last else _beginning(text, self.END)
                self._kept = text[len(text) - kept :]
                return "", text[: len(text) - kept]
            self._place = "behind"
            return self.read(rest, is_last=is_last)[0], thoughts
        if self._place == "behind":  # lines between thoughts and answer are neither's
            text = text.lstrip()
            if text:
                self._place = "answer"
        return text, ""


# ---- private --------------------------------------------------------------------------------------------------------


def _line(fields: Mapping[str, Any]) -> bytes:
    return json_codec.dumps(fields) + b"\n"


def _beginning(text: str, mark: str) -> int:
    """How many letters at the end of a text may be the beginning of a mark."""
    return next((count for count in range(len(mark) - 1, 0, -1) if text.endswith(mark[:count])), 0)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, where OpenAI has text."""
    function = call["function"]
    arguments = json_codec.load_value(function["arguments"].encode())
    return {"id": call["id"], "function": {"name": function["name"], "arguments": arguments}}
