"""Requests as the queue and the runners hold them, with no door and no model behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import RequestHeader
from edge_runtime.request.request import Request
from edge_runtime.telemetry.metrics import ModelMetrics


class KeptReply:
    """Keeps how its request ended, and fails on a second end. told: called with the end."""

    user_id = ""
    writes_text = False

    def __init__(self, tag: Any = None, told: Callable[[Any, Any], None] = lambda _tag, _end: None) -> None:
        self.tag = tag
        self.end: Request | EdgeRuntimeError | None = None
        self._told = told

    def answer(self, request: Request) -> None:
        self._end(request)

    def refuse(self, error: EdgeRuntimeError) -> None:
        self._end(error)

    def _end(self, end: Request | EdgeRuntimeError) -> None:
        assert self.end is None, "a second end"
        self.end = end
        self._told(self.tag, end)


def request_of(
    inputs: Sequence[Any],
    reply: KeptReply | None = None,
    *,
    rows: int = 1,
    nbytes: int = 4,
    shape: object = (),
    priority: int = 5,
    arrived_s: float = 0.0,
    timeout_s: float = math.inf,
    sender: Hashable = "one",
    level: int = 0,
    queue_timeout_s: float = math.inf,
) -> Request:
    """A request for a model whose plan says so."""
    metrics = ModelMetrics()
    request = Request(RequestHeader(), inputs, nbytes, reply or KeptReply(), sender, arrived_s, metrics)
    plan = SimpleNamespace(
        rows=rows,
        shape=shape,
        priority=priority,
        timeout_s=timeout_s,
        metrics=metrics,
        copies_shared=False,
        level=level,
        queue_timeout_s=queue_timeout_s,
    )
    request.take(plan, inputs)
    return request
