"""Waiting requests of one model: FIFO lanes, and the sums that admission reads.

Owns: who waits, and how many rows and bytes. Decides nothing. Thread: every call is under the dispatcher's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array

PRIORITIES = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run gave one request: its outputs in the model's order, and where its time went (seconds)."""

    outputs: list[Array]
    queue_s: float
    run_s: float
    batch_rows: int


Outcome = Answer | EdgeRuntimeError


class Pending:
    """A request on its way: what the rules read, its inputs, and where its one outcome goes.

    inputs: arrays in the model's order. shape: inner shapes, equal for requests that may share a batch. settle: called
    exactly once with (this, outcome), on whichever thread decides its fate; `tag` is the submitter's own.
    """

    __slots__ = (
        "arrived_s", "deadline_s", "inputs", "lane", "nbytes", "priority",
        "rows", "settle", "shape", "tag", "timeout_s",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 (one call site, on the data path, where keywords cost)
        self,
        inputs: Sequence[Array],
        rows: int,
        nbytes: int,
        shape: object,
        priority: int,
        arrived_s: float,
        timeout_s: float,
        settle: Callable[[Pending, Outcome], None],
        tag: object = None,
    ) -> None:
        self.inputs = inputs
        self.rows = rows
        self.nbytes = nbytes
        self.shape = shape
        self.priority = priority
        self.arrived_s = arrived_s
        self.timeout_s = timeout_s
        self.deadline_s = arrived_s + timeout_s
        self.settle = settle
        self.tag = tag
        self.lane: FifoLane | None = None


class FifoLane(deque[Pending]):
    """Requests of one priority, timeout and inner shape, in order of arrival and so of deadline."""

    def __init__(self, priority: int, shape: object) -> None:
        super().__init__()
        self.priority = priority
        self.shape = shape


class RequestQueue:
    """The lanes of one model, with rows and bytes waiting."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, float, object], FifoLane] = {}
        self._rows_by_priority = [0] * PRIORITIES
        self.rows = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def lanes(self) -> Iterator[FifoLane]:
        """Every lane that is not empty."""
        return iter(self._lanes.values())

    def heads(self) -> Iterator[Pending]:
        """The first request of each lane."""
        return (lane[0] for lane in self._lanes.values())

    def rows_before(self, priority: int) -> int:
        """Rows waiting at this priority or a more urgent one."""
        return sum(self._rows_by_priority[: priority + 1])

    def push(self, request: Pending) -> None:
        """Append to its lane."""
        key = (request.priority, request.timeout_s, request.shape)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = FifoLane(request.priority, request.shape)
        lane.append(request)
        request.lane = lane
        self._count(request, 1)

    def remove(self, requests: Sequence[Pending]) -> None:
        """Take requests out; cheap for prefixes of lanes, which is what the rules return."""
        for request in requests:
            lane = request.lane
            if lane is None:
                continue
            if lane[0] is request:
                lane.popleft()
            else:
                lane.remove(request)
            request.lane = None
            self._count(request, -1)
            if not lane:
                del self._lanes[(request.priority, request.timeout_s, request.shape)]

    def clear(self) -> list[Pending]:
        """Take everything out, in no particular order."""
        everything = [request for lane in self._lanes.values() for request in lane]
        self.remove(everything)
        return everything

    def _count(self, request: Pending, sign: int) -> None:
        self.rows += sign * request.rows
        self.nbytes += sign * request.nbytes
        self._rows_by_priority[request.priority] += sign * request.rows
