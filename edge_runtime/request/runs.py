"""Runs of a model that sees each request by itself, as Triton's python models do.

Owns: the facts that such a model gets of a request beside its tensors, and where each response goes: to its caller at
once where the door takes several, else kept until the run has ended. Thread: that which waits for the run, or hears of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_runtime.errors import EdgeRuntimeError, RunFailed, Unsupported
from edge_runtime.hosts.instance import HostInstance
from edge_runtime.hosts.messages import RequestLine
from edge_runtime.kept_state import END, START
from edge_runtime.messages import RAW, TOP_K
from edge_runtime.request.request import Request, StreamingReply, failure_of
from edge_runtime.request.scheduled_model import BegunRun, Job, PerRequest, RunResult
from edge_runtime.telemetry.tracing import log_fields_of
from edge_runtime.tensors import Array

STREAM_LIMIT_S = 60.0
"""Between two responses of a model that streams, where no limit is configured."""

_NOT_TOLD = (RAW, TOP_K)
"""Parameters that mean declared steps, and nothing to a model."""

_PLAIN = RequestLine()


class RequestRuns:
    """Runs batches of requests on an instance whose `by_request` is not None."""

    def __init__(self, instance: HostInstance) -> None:
        self._instance = instance

    def run_requests(
        self, batch: Sequence[Request], parts: Sequence[Sequence[Array]], limit_s: float
    ) -> list[Array] | PerRequest:
        """Run; return the outputs of the only request, or of each. Raises the error of the only one."""
        responses, rows, lines = _told(batch)
        result = self._instance.run_requests(parts, limit_s, rows, lines, responses.take) or responses.end()
        if isinstance(result, EdgeRuntimeError):
            raise result
        return result

    def begin_requests(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> BegunRun:
        """Begin the run of a job's batch."""
        responses, rows, lines = _told(owner.batch)

        def end(result: list[Array] | EdgeRuntimeError) -> None:
            on_end(result or responses.end())

        return self._instance.begin_requests(parts, limit_s, owner, end, rows, lines, responses.take)


def _told(batch: Sequence[Request]) -> tuple[_Responses, tuple[int, ...], list[RequestLine]]:
    """Where the responses of a batch go, and the rows and lines of each request."""
    lines = [_line(request) for request in batch]
    if all(line is _PLAIN for line in lines):
        lines = []
    else:
        lines = [line for line, request in zip(lines, batch, strict=True) for _ in range(request.count)]
    rows = tuple([each for request in batch for each in (request.rows // request.count,) * request.count])
    return _Responses(batch), rows, lines


def _line(request: Request) -> RequestLine:
    """Return the line of a request, which its model gets beside the tensors."""
    header, name = request.header, request.reply.user_id
    absent = request.plan.absent
    is_plain = not (header.parameters or header.outputs or header.priority or name or absent or request.line)
    if is_plain and request.timeout_s == math.inf:
        return _PLAIN
    step = request.sequence if request.line is not None else None
    of_sequence = (0, 0) if step is None else (step.id, START * step.start | END * step.end)
    timeout_s = 0.0 if request.timeout_s == math.inf else request.timeout_s
    told = {key: value for key, value in (header.parameters or {}).items() if key not in _NOT_TOLD}
    outputs, timeout_us = header.outputs or (), math.ceil(timeout_s * 1e6)
    return RequestLine(name, outputs, told, timeout_us, header.priority, absent, *of_sequence)


class _Responses:
    """The responses of one run, as they come."""

    def __init__(self, batch: Sequence[Request]) -> None:
        self._requests = [request for request in batch for _ in range(request.count)]
        self._answers: list[list[Array] | EdgeRuntimeError | None] = [None] * len(self._requests)

    def take(self, index: int, response: Sequence[Array | None] | EdgeRuntimeError | None, is_last: bool) -> bool:
        """Take a response of one request, as `OnResponse` in backends/base.py; return whether it still wants others."""
        request = self._requests[index]
        known = self._answers[index]
        if isinstance(known, EdgeRuntimeError) or request.is_given_up or response is None:
            streams = is_last and known is None and isinstance(request.reply, StreamingReply)
            if streams:
                self._answers[index] = []
        elif isinstance(response, EdgeRuntimeError):
            self._answers[index] = response
        else:
            self._answers[index] = self._next(request, known, _whole(request, response), is_last)
        return not (request.is_given_up or isinstance(self._answers[index], EdgeRuntimeError))

    def _next(
        self, request: Request, known: list[Array] | None, outputs: list[Array] | EdgeRuntimeError, is_last: bool
    ) -> list[Array] | EdgeRuntimeError | None:
        """Return a request's answer after another response with outputs; None where its caller got them already."""
        if isinstance(outputs, EdgeRuntimeError) or is_last:
            return outputs if known is None else _not_one(request, "more than one response")
        if not isinstance(request.reply, StreamingReply):
            return outputs if known is None else _not_one(request, "more than one response")
        try:
            request.outputs = outputs
            request.reply.part(request)
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            what = f"a part of an answer of model {request.header.model} could not be given"
            return failure_of(error, what, log_fields_of((request,)))
        return None

    def end(self) -> RunResult:
        """Return the outputs of the run's one request or its error; of several, those of each."""
        answers = [
            _not_one(request, "no response") if each is None else each
            for request, each in zip(self._requests, self._answers, strict=True)
        ]
        return PerRequest(answers) if len(answers) > 1 else answers[0]


def _whole(request: Request, outputs: Sequence[Array | None]) -> list[Array] | EdgeRuntimeError:
    """The outputs, where every one that is asked for is there."""
    plan: Any = request.plan
    for index in plan.outputs:
        if outputs[index] is None:
            return RunFailed(f"the response has no output '{plan.servable.spec.outputs[index].name}'")
    return [np.empty(0) if each is None else each for each in outputs]


def _not_one(request: Request, sent: str) -> EdgeRuntimeError:
    """Why a call that takes one response has none. Triton refuses such a model before it runs; here one is answered."""
    return Unsupported(
        f"model '{request.header.model}' is decoupled and sent {sent}; this call doesn't support models with decoupled "
        "transaction policy but for those that send one (generate expects model to produce exactly 1 response); ask by "
        "gRPC's ModelStreamInfer, or by generate_stream"
    )
