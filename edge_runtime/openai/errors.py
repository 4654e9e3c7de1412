"""Errors in OpenAI's words: `{"error": {"message", "type", "param", "code"}}`, and the statuses that its clients retry.

Pure. Thread: any.
"""

from __future__ import annotations

from typing import Any

from edge_runtime.doors.http.answer import error_frames, json_response, status_of
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError, ModelNotFound, QueueFull
from edge_runtime.language.asking import BadField
from edge_runtime.request.request import Request

REFUSED_STATUS = 429
"""Where the daemon is healthy and full: clients send it again after `retry-after-ms`."""

NO_RETRY = "x-should-retry: false\r\n"
"""Keeps clients from sending again what fails again: by themselves they do for each status of 500 and above."""

INVALID, BUSY, OURS = "invalid_request_error", "rate_limit_error", "server_error"
"""OpenAI's types: the request is wrong, it came at the wrong moment, or the fault is the server's."""


class OpenAiErrors:
    """Writes errors, and results that are JSON with a status."""

    def answer(self, request: Request, request_id: Any) -> Frames:
        """Nothing that runs has this encoding."""
        raise NotImplementedError

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return refusal(error)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """The JSON of another call, and its status."""
        return json_response(*result)


def refusal(error: EdgeRuntimeError) -> Frames:
    """Write an error as a response."""
    is_busy = isinstance(error, QueueFull | DeadlineUnmeetable)
    status = REFUSED_STATUS if is_busy else status_of(error)
    kind = OURS if status >= 500 else BUSY if is_busy else INVALID
    param = error.param if isinstance(error, BadField) else "model" if isinstance(error, ModelNotFound) else None
    fields = {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}
    return error_frames(error, status, fields, "" if error.retryable else NO_RETRY)
