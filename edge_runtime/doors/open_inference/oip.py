"""The Open Inference Protocol's own words that doors and clients share: statuses, and names of parameters.

Pure tables. KServe's protocol v2, as Triton Inference Server answers it; `operations.py` beside it uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import (
    EdgeRuntimeError,
    LoadsNotAsked,
    NotServed,
    QueueTimeExpired,
    RegionExists,
    RegionNotFound,
    RegionNotOpened,
)
from edge_runtime.messages import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START

STATUSES: Mapping[str, tuple[int, str]] = {
    "decode_failed": (400, "INVALID_ARGUMENT"),
    "tensor_mismatch": (400, "INVALID_ARGUMENT"),
    "sequence_lost": (400, "INVALID_ARGUMENT"),
    "unsupported": (501, "UNIMPLEMENTED"),
    "unauthenticated": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "model_not_found": (404, "NOT_FOUND"),
    "not_ready": (503, "UNAVAILABLE"),
    "queue_full": (503, "UNAVAILABLE"),
    "deadline_unmeetable": (503, "UNAVAILABLE"),
    "draining": (503, "UNAVAILABLE"),
    "deadline_exceeded": (504, "DEADLINE_EXCEEDED"),
    "cancelled": (499, "CANCELLED"),
    "run_failed": (500, "INTERNAL"),
}
"""HTTP status and gRPC status name of each code on the wire."""

OTHER_STATUS = (500, "INTERNAL")
"""Of every other code, such as `load_failed`: the daemon's or the model's fault."""

KIND_STATUSES: Mapping[type[EdgeRuntimeError], tuple[int, str]] = {
    NotServed: (404, "NOT_FOUND"),
    LoadsNotAsked: (503, "UNAVAILABLE"),
    QueueTimeExpired: (503, "UNAVAILABLE"),
    RegionNotFound: (404, "NOT_FOUND"),
    RegionExists: (400, "ALREADY_EXISTS"),
    RegionNotOpened: (500, "INTERNAL"),
}
"""Of errors that have a status of their own, beside that of their code: a model that loads is worth asking again, one
that is unloaded or failed is not. A queue's timeout, shared memory that cannot be opened, and a load where nobody
may ask for one, are as by Triton."""


def oip_status(code: str) -> tuple[int, str]:
    """HTTP status and gRPC status name of a code; `error_status` where the error itself is there."""
    return STATUSES.get(code, OTHER_STATUS)


def error_status(error: EdgeRuntimeError) -> tuple[int, str]:
    """HTTP status and gRPC status name of an error."""
    return KIND_STATUSES.get(type(error)) or oip_status(error.code)


def error_body(error: EdgeRuntimeError) -> dict[str, Any]:
    """The body of an error over HTTP."""
    return {"error": error.message, "code": error.code}


def readiness_status(answer: Mapping[str, Any]) -> int:
    """HTTP status of an answer to server_ready or model_ready: 503 while the daemon drains."""
    if answer["ready"]:
        return 200
    return 503 if answer.get("reason") == DRAINING else 400


DRAINING = "draining"
"""The reason in the answer to server_ready while the daemon stops."""

# ---- names of request and tensor parameters -------------------------------------------------------------------------


BINARY_SIZE, BINARY_OUTPUT, BINARY_OUTPUTS = "binary_data_size", "binary_data", "binary_data_output"
CLASSES = "classification"
TIMEOUT_US, TIMEOUT_MS, PRIORITY, TIMING = "timeout", "timeout_ms", "priority", "timing"
ANSWER = "answer"
"""The key of the outputs in words, beside them as tensors: a field over HTTP, a parameter of JSON text over gRPC,
whose message has no place for it.

Decision. Context: `raw = false` gave these doors arrays of index and score, and no labels. Options: words in place of
tensors; a parameter in both protocols; labels by `classification` alone. Chosen: beside the tensors, by the name that
ZeroMQ and MQTT have for it, wherever outputs are answers. Cost: a few hundred bytes of JSON in such an answer, and a
client that refuses unknown fields would have to ask with `raw = true`."""
REGION, REGION_OFFSET, REGION_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
SEQUENCE = (SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
ENABLE_FINAL = "triton_enable_empty_final_response"
"""Asks for the mark of the last answer on a stream."""
PROTOCOLS_OWN = frozenset((TIMEOUT_US, TIMEOUT_MS, PRIORITY, TIMING, BINARY_OUTPUTS, *SEQUENCE, ENABLE_FINAL))
"""Parameters of a request that mean something to the protocol; the others are its model's."""
