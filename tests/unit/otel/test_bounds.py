"""What callers write is cut before it is sent: a collector keeps no text without end, and no names without number."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.errors import ModelNotFound, TensorMismatch
from edge_runtime.messages import RequestHeader
from edge_runtime.otel.log_records import MOST_BODY, MOST_TRACEBACK, LogRecords
from edge_runtime.otel.otlp import MOST_CHARACTERS, attributes
from edge_runtime.otel.spans import MOST_NAME, span_pieces
from edge_runtime.otel.tracer import MAX_NAME_CHARS, ErrorFacts, RequestTracer
from edge_runtime.telemetry.tracing import TraceParent
from tests.unit.otel.test_tracer import Kept, new_request

LONG = "x" * 70_000


def spans_of(kept):
    pieces = list(span_pieces(kept.ended, 0, lambda _bits: 7))
    return [span for piece in pieces for span in json.loads(b"[" + piece + b"]")]


def value_of(span, key):
    (found,) = [each["value"] for each in span["attributes"] if each["key"] == key]
    return found["stringValue"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("short", {"stringValue": "short"}),
        ("ü" * 2000, {"stringValue": "ü" * (MOST_CHARACTERS - 1) + "…"}),
        ("half \ud800 a pair", {"stringValue": "half ? a pair"}),
        ((1 << 63) - 1, {"intValue": str((1 << 63) - 1)}),
        (1 << 63, {"stringValue": str(1 << 63)}),
        ([1, 2], {"stringValue": "[1, 2]"}),
    ],
)
def test_attribute_is_cut_and_readable_by_every_collector(value, told):
    (found,) = attributes({"key": value})
    assert found["value"] == told


def test_models_that_are_not_there_add_no_names_of_spans():
    kept = Kept()
    tracer = RequestTracer(1.0, kept, lambda: 1.0, is_model={"m"}.__contains__)
    for number in range(5):
        tracer.refused("zmq", ModelNotFound("no such model"), [None], model=f"none-{number}")
    tracer.refused("zmq", TensorMismatch("wrong"), [TraceParent(1, 2)], model="m")
    call = new_request()
    tracer.begin(call)
    call.trace.begin_step(asked := new_request(), "call whatever")
    tracer.refused("zmq", ModelNotFound("none"), [None], model=LONG)
    asked.header = RequestHeader(model="whatever")
    asked.refuse(ModelNotFound("no such model"))
    spans = spans_of(kept)
    assert [each["name"] for each in spans] == ["infer"] * 5 + ["infer m", "infer", "step call"]
    assert value_of(spans[3], "edge_runtime.model") == "none-3"
    assert len(value_of(spans[6], "edge_runtime.model")) == MAX_NAME_CHARS <= MOST_NAME


def test_of_an_error_its_words_are_kept_and_not_its_traceback():
    kept = Kept()
    tracer, request = RequestTracer(1.0, kept, lambda: 1.0), new_request()
    tracer.begin(request)
    request.refuse(ModelNotFound(f"no model {LONG}", retry_after_ms=5.0))
    (ended,) = kept.ended
    assert type(ended.error) is ErrorFacts
    assert (ended.error.code, ended.error.retry_after_ms) == ("model_not_found", 5.0)
    (span,) = spans_of(kept)
    assert len(span["status"]["message"]) == MOST_CHARACTERS


def test_log_records_are_cut_the_traceback_to_its_end():
    records = LogRecords(logging.WARNING, SystemClock())
    try:
        raise ValueError(LONG + "the end")
    except ValueError:
        failure = sys.exc_info()
    fields = {"name": "edge_runtime.x", "levelno": 30, "levelname": "WARNING", "args": ()}
    records.handle(logging.makeLogRecord({**fields, "msg": LONG, "exc_info": failure, "model": LONG}))
    (record,) = json.loads(b"[" + b",".join(records.pieces()) + b"]")
    assert len(record["body"]["stringValue"]) == MOST_BODY
    assert len(value_of(record, "model")) == MOST_CHARACTERS
    traceback = value_of(record, "exception.stacktrace")
    assert len(traceback) == MOST_TRACEBACK
    assert traceback.endswith("the end")
