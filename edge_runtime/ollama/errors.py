"""Errors in Ollama's words, `{"error": text}`, with the statuses that its clients know. Pure. Thread: any."""

from __future__ import annotations

from typing import Any

from edge_runtime.doors.http.answer import error_frames, json_response
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError, QueueFull
from edge_runtime.request.request import Request

BUSY_STATUS = 429
"""Where the daemon is healthy and full: `retry-after-ms` says when to ask again."""


class OllamaErrors:
    """Writes errors, and results that are a response already, or JSON with a status."""

    def answer(self, request: Request, request_id: Any) -> Frames:
        """Nothing that runs has this encoding."""
        raise NotImplementedError

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """A response, or the JSON of another call and its status."""
        return result if isinstance(result[0], bytes) else json_response(*result)


def refusal(error: EdgeRuntimeError) -> Frames:
    """Write an error as a response: its text, and its code beside it."""
    return error_frames(error, BUSY_STATUS if isinstance(error, QueueFull | DeadlineUnmeetable) else None)
