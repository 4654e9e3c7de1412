"""A request of the daemon's own to one version, live or not, through queue and batch as a client's.

It is counted as a client's: updates/observation.py judges a version by it where there is no traffic.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from queue import Empty, SimpleQueue

from edge_runtime.clock import Clock
from edge_runtime.config.settings import LOWEST_PRIORITY
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError
from edge_runtime.messages import RAW, RequestHeader, SequenceStep, TensorHeader
from edge_runtime.models.servable import Servable
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import CallbackReply, Request
from edge_runtime.tensors import Array, datatype_name

SENDER = "self"
"""The sender of the daemon's own requests."""


def infer_once(servable: Servable, inputs: Mapping[str, Array], clock: Clock, limit_s: float) -> dict[str, Array]:
    """Run one request on a servable, live or not, behind all others, and wait; the model's own outputs by name.

    inputs: as on the wire (BF16 as bits), of the model or of what its host makes them of. Raises a client's errors, and
    DeadlineExceeded after `limit_s`. Thread: any but those that answer requests.
    """
    headers = tuple(TensorHeader(name, datatype_name(each.dtype), each.shape) for name, each in inputs.items())
    is_own = inputs.keys() <= {spec.name for spec in servable.spec.inputs}
    header = RequestHeader(
        model=servable.model,
        inputs=headers,
        timeout_ms=limit_s * 1e3,
        priority=LOWEST_PRIORITY,
        parameters={} if is_own else {RAW: True},
        # A sequence of one, whose id nobody else has.
        sequence=SequenceStep(secrets.randbits(63) | 1 << 63, True, True) if servable.sequences is not None else None,
    )
    plan = RequestPlan(servable, header)
    arrays, ends = list(inputs.values()), SimpleQueue[Request | EdgeRuntimeError]()
    nbytes = sum(each.nbytes for each in arrays)
    request = Request(header, arrays, nbytes, CallbackReply(ends.put), SENDER, clock.monotonic_s(), servable.metrics)
    request.take(plan, plan.arrays(arrays))
    try:
        plan.servable.submit(request)
    except EdgeRuntimeError as error:
        request.refuse(error)
    try:
        ended = ends.get(timeout=2 * limit_s)
    except Empty:
        plan.servable.cancel(request)
        raise DeadlineExceeded(f"{servable.model} did not answer its own daemon within {2 * limit_s:g} s") from None
    if isinstance(ended, EdgeRuntimeError):
        raise ended
    return {spec.name: array for spec, array in zip(plan.servable.spec.outputs, request.outputs, strict=True)}
