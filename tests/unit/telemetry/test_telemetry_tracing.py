"""A caller's context, as W3C Trace Context has it."""

from __future__ import annotations

import pytest

from edge_runtime.telemetry.tracing import TraceParent, read_traceparent, written_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "text",
    [
        f"00-{TRACE}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-03 ",  # further flags
        f"cc-{TRACE}-{SPAN}-01-what-the-future-brings",
    ],
)
def test_traceparent_of_a_traced_caller_is_read(text: str) -> None:
    assert read_traceparent(text) == TraceParent(int(TRACE, 16), int(SPAN, 16))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-00",  # its caller does not trace it
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-more, 00-{TRACE}-{SPAN}-01",
    ],
)
def test_traceparent_that_means_no_traced_span_is_none(text: str | None) -> None:
    assert read_traceparent(text) is None


def test_traceparent_that_is_written_is_read_again() -> None:
    assert written_traceparent(TraceParent(int(TRACE, 16), int(SPAN, 16))) == f"00-{TRACE}-{SPAN}-01"
    small = TraceParent(1, 2)
    assert read_traceparent(written_traceparent(small)) == small
