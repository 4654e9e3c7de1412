"""Bursts of small requests to a model in a host, each burst as one `Request`: then a request costs some microseconds.

Owns: how such a request is made of entries, and how its outputs become the answers of many. A burst that cannot be
admitted whole, or whose run fails, is taken apart, so each entry has the fate that it would have had by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import iter_unpack
from typing import TYPE_CHECKING, Any

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.frontend.encodings import frame_of
from edge_runtime.scheduling.request import Request
from edge_runtime.serving.request_plan import RequestPlan

if TYPE_CHECKING:
    from edge_runtime.frontend.infer_frontend import Entry, InferFrontend, InferRoute, ReplyEndpoint


class BurstReply:
    """The reply to entries of one sender and one known header. Thread: any."""

    __slots__ = ("_endpoint", "_entries", "_frontend", "_route")

    def __init__(
        self, frontend: InferFrontend, endpoint: ReplyEndpoint, route: InferRoute, entries: Sequence[Entry]
    ) -> None:
        self._frontend = frontend
        self._endpoint = endpoint
        self._route = route
        self._entries = entries

    def answer(self, request: Request) -> None:
        """Cut the outputs into as many answers as there are entries, and post these at once."""
        plan: RequestPlan = request.plan
        selected = plan.select(request.outputs)
        header = plan.answer_header([array[: plan.rows] for array in selected])
        count, columns, nbytes = request.count, [], 0
        for array in selected:
            size = array.nbytes // count
            columns.append([part for (part,) in iter_unpack(f"{size}s", frame_of(array))])
            nbytes += size
        post = self._endpoint.post_answers
        assert post is not None
        post(self._entries, header, list(zip(*columns, strict=True)), nbytes)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error to each."""
        for origin, request_id, _ in self._entries:
            self._endpoint.post((origin,), self._route.encoding.refusal(error, request_id))

    def split(self, request: Request) -> list[Request]:
        """Make a request of each entry, which stands where the burst did."""
        return self._frontend.apart(self._endpoint, self._route, self._entries, request)


def join_burst(plan: RequestPlan, entries: Sequence[tuple[Any, Any, Any]]) -> list[Any]:
    """The only input of all entries together, in their order: [entries * rows, *inner]."""
    return plan.rows_of(b"".join([entry[2] for entry in entries]))
