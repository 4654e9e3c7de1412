"""A request that the daemon makes of itself: the same way through queue and batch as a client's.

`infer_once` waits and is counted as a client's: where there is no traffic to judge a version by. `new_request` is for
who must not wait (self_check.py), and counts nothing but the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from edge_runtime.clock import Clock
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError
from edge_runtime.scheduling.queue import Outcome, Pending
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servable import Servable
from edge_runtime.tensors import Array, datatype_name
from edge_runtime.wire.codec import RequestHeader, TensorHeader

LOWEST_PRIORITY = 9


def infer_once(servable: Servable, inputs: Mapping[str, Array], clock: Clock, limit_s: float) -> dict[str, Array]:
    """Run one request on a servable, live or not, behind all others, and wait; outputs by name.

    inputs: as on the wire (BF16 as bits). Raises what a client would be told, and DeadlineExceeded after `limit_s`.
    Thread: any but those that answer requests.
    """
    settled = threading.Event()
    outcomes: list[Outcome] = []

    def settle(_: Pending, outcome: Outcome) -> None:
        outcomes.append(outcome)
        settled.set()

    request = new_request(servable, inputs, clock, limit_s, settle)
    try:
        servable.submit(request)
        if not settled.wait(2 * limit_s):
            servable.cancel(request)
            raise DeadlineExceeded(f"{servable.model} did not answer its own daemon within {2 * limit_s:g} s")
        outcome = outcomes[0]
        if isinstance(outcome, EdgeRuntimeError):
            raise outcome
    except EdgeRuntimeError as error:
        servable.metrics.refused(error.code)
        raise
    servable.metrics.answered(outcome.queue_s, outcome.run_s)
    return {spec.name: array for spec, array in zip(servable.spec.outputs, outcome.outputs, strict=True)}


def new_request(
    servable: Servable,
    inputs: Mapping[str, Array],
    clock: Clock,
    limit_s: float,
    settle: Callable[[Pending, Outcome], None],
) -> Pending:
    """A request that goes behind all others, checked as a client's. Raises RequestError."""
    headers = tuple(TensorHeader(name, datatype_name(each.dtype), each.shape) for name, each in inputs.items())
    plan = RequestPlan(servable, RequestHeader(model=servable.model, inputs=headers, priority=LOWEST_PRIORITY))
    arrays = list(inputs.values())
    return Pending(
        [arrays[index] for index in plan.order], plan.rows, sum(each.nbytes for each in arrays), plan.shape,
        plan.priority, clock.monotonic_s(), limit_s, settle,
    )  # fmt: skip
