"""Errors in OpenAI's words: `{"error": {"message", "type", "param", "code"}}`, and the statuses that its clients retry.

Pure. Thread: any.
"""

from __future__ import annotations

from typing import Any

from edge_runtime.doors.http.answer import error_frames, json_response, status_of
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    EdgeRuntimeError,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    Unsupported,
)
from edge_runtime.language.asking import BadField
from edge_runtime.request.request import Request

REFUSED_STATUS = 429
"""Where the daemon is healthy and full: clients send it again after `retry-after-ms`."""

RETRY, NO_RETRY = "x-should-retry: true\r\n", "x-should-retry: false\r\n"
"""Says whether to send the request again: by themselves clients do for each status of 500 and above."""

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that the model's context does not hold, by which clients shorten it."""

INVALID, BUSY, OURS = "invalid_request_error", "rate_limit_error", "server_error"
"""OpenAI's types: the request is wrong, it came at the wrong moment, or the fault is the server's."""


class OpenAiErrors:
    """Writes errors, and results that are JSON with a status. prompt_param: as of `error_body`."""

    def __init__(self, prompt_param: str | None = None) -> None:
        self._prompt_param = prompt_param

    def answer(self, request: Request, request_id: Any) -> Frames:
        """Nothing that runs has this encoding."""
        raise NotImplementedError

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return refusal(error, self._prompt_param)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """The JSON of another call, and its status."""
        return json_response(*result)


def refusal(error: EdgeRuntimeError, prompt_param: str | None = None) -> Frames:
    """Write an error as a response. prompt_param: as of `error_body`.

    A deadline that passed is its caller's, who alone knows whether a later answer helps: no client asks by itself.
    """
    may_retry = error.retryable and type(error) is not DeadlineExceeded
    return error_frames(error, _status(error), error_body(error, prompt_param), RETRY if may_retry else NO_RETRY)


def error_body(error: EdgeRuntimeError, prompt_param: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error. prompt_param: the field with the prompt, which may be too long."""
    is_too_long = isinstance(error, PromptTooLong)
    kind = OURS if _status(error) >= 500 else BUSY if _is_busy(error) else INVALID
    param = error.param if isinstance(error, BadField) else "model" if isinstance(error, ModelNotFound) else None
    fields = {
        "message": error.message,
        "type": kind,
        "param": prompt_param if is_too_long else param,
        "code": TOO_LONG if is_too_long else error.code,
    }
    return {"error": fields}


def _is_busy(error: EdgeRuntimeError) -> bool:
    return isinstance(error, QueueFull | DeadlineUnmeetable)


def _status(error: EdgeRuntimeError) -> int:
    if _is_busy(error):
        return REFUSED_STATUS
    return 400 if isinstance(error, Unsupported) else status_of(error)  # of OpenAI's no field is answered by 501
