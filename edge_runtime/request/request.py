"""One request from any door to any runner: its facts for the rules, its inputs, its plan, and the outputs of its run.

Owns: that a request ends once, answered or refused, and is counted for its model. Knows no wire and no model: doors
make a request, with the reply that says where and how it is answered; the queue, pending loads, the mirror and the
runners hold it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, QueueFull, QueueTimeExpired, RunFailed
from edge_runtime.messages import RequestHeader
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from edge_runtime.telemetry.tracing import RequestTrace, log_fields_of
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from edge_runtime.request.queue import Line, Share

log = logging.getLogger(__name__)

REQUEST_BYTES = 1024
"""A request's own objects, which outweigh small tensors."""

NO_BOUND_BYTES = 1 << 62


class Origin(Struct, frozen=True):
    """Where a request comes from: its door says it, and nothing that a client writes.

    is_check: the daemon asks itself whether it answers. Such a request is answered like any other, but does not count
    as use of its model: it neither counts, nor keeps a model loaded, nor has one loaded, nor is it heard, mirrored or
    published. is_step: it belongs to a pipeline's request, which was admitted with it: a forecast may use all of its
    time, a stopping daemon takes it, and its refusal costs its sender nothing. asks_closed: it may ask a model that was
    brought to one door alone.
    """

    is_check: bool = False
    is_step: bool = False
    asks_closed: bool = False

    @property
    def of_step(self) -> Origin:
        """The origin of a step's requests, where this is that of the whole."""
        return CHECK_STEP if self.is_check else STEP


CLIENT = Origin()
DOOR = Origin(asks_closed=True)
CHECK = Origin(is_check=True, asks_closed=True)
STEP = Origin(is_step=True)
CHECK_STEP = Origin(is_check=True, is_step=True, asks_closed=True)


class Reply(Protocol):
    """Where and how one request is answered. One of the two is called, once, from any thread."""

    @property
    def user_id(self) -> str:
        """The caller's own name for its request, "" for none."""
        ...

    @property
    def writes_text(self) -> bool:
        """Whether outputs are not sent as they are, which takes large ones long."""
        ...

    def answer(self, request: Request) -> None:
        """Send the outputs that its plan selects. May raise: the request is then refused instead."""
        ...

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send an error."""
        ...


@runtime_checkable
class StreamingReply(Reply, Protocol):
    """A reply that may have several parts; `answer` sends the last, or with no outputs only says that it was."""

    def part(self, request: Request) -> None:
        """Send the outputs that its plan selects; more come. Thread: the run's. May raise: the request then ends."""
        ...


class CallbackReply:
    """The reply of a request that comes from no door: calls a function at its end.

    on_end: called once, with the answered request, or with the error of a refused one. Thread: whichever ends it.
    user_id, writes_text: as of a door's reply, for which it stands.
    """

    __slots__ = ("_on_end", "user_id", "writes_text")

    def __init__(
        self, on_end: Callable[[Request | EdgeRuntimeError], object], user_id: str = "", *, writes_text: bool = False
    ) -> None:
        self._on_end = on_end
        self.user_id = user_id
        self.writes_text = writes_text

    def answer(self, request: Request) -> None:
        """Tell the request, with its outputs."""
        self._on_end(request)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Tell the error."""
        self._on_end(error)


class Terms(Protocol):
    """A checked header for queues and runs (serving's RequestPlan).

    timeout_s: math.inf without a deadline. level, queue_timeout_s (math.inf: without end): of a queue with `[queue]`.
    copies_shared: its client may change inputs meanwhile, and the library must
    not see that.
    """

    rows: int
    priority: int
    timeout_s: float
    level: int
    queue_timeout_s: float
    metrics: ModelMetrics
    copies_shared: bool

    @property
    def shape(self) -> object:
        """Equal for requests that may share a batch."""
        ...


class Arrival:
    """A request of which its header alone is known: the facts that admission reads, before anything is made of it.

    nbytes: of its tensors. The others: as a `Request` has them.
    """

    __slots__ = (
        "arrived_s", "deadline_s", "nbytes", "plan", "priority", "rows", "sender", "shape", "timeout_s",
    )  # fmt: skip

    is_step = False
    trace: RequestTrace | None = None

    def __init__(self, plan: Any, nbytes: int, sender: Hashable, arrived_s: float) -> None:
        """plan: of its header, a RequestPlan; a HeadPlan where only its head has come."""
        self.plan = plan
        self.nbytes = nbytes
        self.sender = sender
        self.arrived_s = arrived_s
        self.rows: int = plan.rows
        self.shape: object = plan.shape
        self.priority: int = plan.priority
        self.timeout_s: float = plan.timeout_s
        self.deadline_s = arrived_s + self.timeout_s


class Request:
    """One request, from its door to its reply. Instants are monotonic seconds.

    header: as decoded. tensors: in the header's order, arrays or frames as they came; nbytes: of all. sender: which
    connection asks, a key that its door makes: equal for requests that share one turn in a queue. destinations:
    its memory where outputs go, in the order of the plan's, None: to a frame; empty: all to frames. plan: serving's
    RequestPlan, None until the model is found. rows, shape (equal for requests that may share a batch), priority,
    timeout_s, deadline_s, inputs (arrays in the model's order): of that plan. outputs (in the model's order), queue_s,
    run_s, batch_rows: of its run; error: why there are none. lost_runs: runs of it that ended with their host, for
    which it is not to blame as far as is known. share, due_s, number: its place in a queue, which sets them.
    longest_s: a bound that its door puts on its timeout, beside its header's. is_given_up: no caller waits for its
    answer any more, or it has ended. count: how many requests of its sender it stands for, all of one header and one
    arrival. split: makes them of it, where each has to end by itself; None: it is one. origin: where it comes from.
    sequence: the sequence that it belongs to; line: the requests that run one at a time with it; None: none.
    trace: hears of its end; None: nothing is traced, or it was not decided yet.
    """

    __slots__ = (
        "arrived_s", "batch_rows", "count", "deadline_s", "destinations", "due_s", "error", "header", "held", "inputs",
        "is_given_up", "line", "longest_s", "lost_runs", "metrics", "nbytes", "number", "origin", "outputs", "plan",
        "priority", "queue_s", "reply", "rows", "run_s", "sender", "sequence", "shape", "share", "split", "tensors",
        "timeout_s", "trace",
    )  # fmt: skip

    plan: Any  # RequestPlan; scheduling only carries it
    inputs: Sequence[Array]
    outputs: list[Array]
    queue_s: float
    run_s: float
    batch_rows: int
    rows: int
    shape: object
    priority: int
    timeout_s: float
    deadline_s: float
    due_s: float
    number: int

    def __init__(  # noqa: PLR0917 (on the data path, where keywords cost)
        self,
        header: RequestHeader,
        tensors: Sequence[Any],
        nbytes: int,
        reply: Reply,
        sender: Hashable,
        arrived_s: float,
        metrics: Metrics | ModelMetrics,
        origin: Origin = CLIENT,
    ) -> None:
        """metrics: the daemon's, which count it until its model is known."""
        self.header = header
        self.tensors = tensors
        self.nbytes = nbytes
        self.reply = reply
        self.sender = sender
        self.arrived_s = arrived_s
        self.metrics = metrics
        self.origin = origin
        self.plan = None
        self.share: Share | None = None
        self.error: EdgeRuntimeError | None = None
        self.lost_runs = 0
        self.held: tuple[UnansweredBytes, Hashable, int] | None = None
        self.destinations: Sequence[Array | None] = ()
        self.longest_s = math.inf
        self.is_given_up = False
        self.count = 1
        self.split: Callable[[Request], list[Request]] | None = None
        self.sequence = header.sequence
        self.line: Line | None = None
        self.trace: RequestTrace | None = None

    @property
    def is_step(self) -> bool:
        """Whether it belongs to a pipeline's request."""
        return self.origin.is_step

    def hold(self, unanswered: UnansweredBytes, nbytes: int) -> None:
        """Count as unanswered from now until it ends. Raises QueueFull."""
        self.held = unanswered, self.sender, unanswered.hold(self.sender, nbytes)

    def let_go(self) -> None:
        """End the count by `hold`: before the reply, or its client could be refused for it."""
        held, self.held = self.held, None
        if held is not None:
            held[0].give_back(held[1], held[2])

    def take(self, plan: Terms, inputs: Sequence[Array]) -> None:
        """Become a request for one servable."""
        self.plan = plan
        self.inputs = inputs
        self.rows = plan.rows * self.count
        self.shape = plan.shape
        self.priority = plan.priority
        self.timeout_s = min(plan.timeout_s, self.longest_s)
        self.deadline_s = self.arrived_s + self.timeout_s
        self.metrics = plan.metrics

    def forget_tensors(self, error: EdgeRuntimeError) -> None:
        """Become a refused request whose reply waits, without tensors and without a hold on its servable."""
        self.error = error
        error.__traceback__ = None  # its frames hold the tensors
        self.tensors = self.inputs = self.destinations = ()
        self.plan = None
        self.let_go()

    def complete(self) -> None:
        """Answer with the outputs of its run, or refuse with its error. Called once; never raises."""
        self.is_given_up = True
        if self.error is None:
            self.let_go()
            try:
                self.reply.answer(self)
            except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
                what = f"an answer of model {self.header.model} could not be given"
                self.error = failure_of(error, what, log_fields_of((self,)))
            else:
                self.plan.metrics.answered(self.queue_s, self.run_s, self.count)
                if self.trace is not None:
                    self.trace.end(self, None)
                return
        self.refuse(self.error)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """End it with an error. Called once; never raises."""
        self.is_given_up = True
        error.__traceback__ = None  # its frames hold the request's memory, and the request may hold the error
        self.metrics.refused(error.code, self.count)
        if self.trace is not None:
            self.trace.end(self, error)
        self.let_go()
        try:
            self.reply.refuse(error)
        except Exception:
            log.exception("a refusal by model %s could not be given", self.header.model, extra=log_fields_of((self,)))


class UnansweredBytes:
    """Bytes of unanswered requests. total: of all senders; total_bytes: the bound on it.

    Invariant: no sender gets more than is then left free for the others, so that none shuts another out: of k greedy
    ones each ends with 1/(k + 1) of the bound in all, and as much stays free.
    """

    def __init__(self, sender_bytes: int = NO_BOUND_BYTES, total_bytes: int = NO_BOUND_BYTES) -> None:
        self._sender_bytes = sender_bytes
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def hold(self, sender: Hashable, nbytes: int) -> int:
        """Count one more request; return the bytes to give back when it ends. Raises QueueFull.

        A sender without any may have one above its own bound.
        """
        nbytes += REQUEST_BYTES
        with self._lock:
            before = self._of.get(sender, 0)
            if before and before + nbytes > self._sender_bytes:
                raise QueueFull(
                    f"{before} bytes of this connection's requests wait for their answers, its bound is "
                    f"{self._sender_bytes} (limits.unanswered_bytes); wait for answers before you send more"
                )
            if before + nbytes > self.total_bytes - self.total:
                raise QueueFull(
                    f"{self.total} bytes of requests wait for their answers, the bound is {self.total_bytes} "
                    "(limits.total_unanswered_bytes)"
                )
            self._of[sender] = before + nbytes
            self.total += nbytes
        return nbytes

    def has_room(self, sender: Hashable, nbytes: int) -> bool:
        """Whether `hold` would count one more request now. Takes no lock: a change meanwhile may prove it wrong."""
        before = self._of.get(sender, 0)
        after = before + nbytes + REQUEST_BYTES
        return (not before or after <= self._sender_bytes) and after <= self.total_bytes - self.total

    def give_back(self, sender: Hashable, nbytes: int) -> None:
        """End the count by `hold`."""
        with self._lock:
            self.total -= nbytes
            left = self._of[sender] - nbytes
            if left:
                self._of[sender] = left
            else:
                del self._of[sender]

    def has(self, sender: Hashable) -> bool:
        """Whether a request of this sender waits."""
        return sender in self._of


def failure_of(error: Exception, what: str, fields: Mapping[str, str] | None = None) -> EdgeRuntimeError:
    """Return the error that refuses a request after an exception: RunFailed where a library or a bug raised it.

    what: is logged then, for example "a run of model m failed". fields: of that line.
    """
    if isinstance(error, EdgeRuntimeError):
        return error
    log.error(what, exc_info=error, extra=fields)
    return RunFailed(f"{type(error).__name__}: {error}")


def queue_time_expired(arrived_s: float, timeout_s: float, now_s: float) -> QueueTimeExpired:
    """Return the error of a request that waited in a queue for longer than its model allows."""
    return QueueTimeExpired(
        f"Request timeout expired: waited {(now_s - arrived_s) * 1e3:.1f} ms in the queue, whose policy allows "
        f"{timeout_s * 1e3:.1f} ms"
    )


def deadline_exceeded(arrived_s: float, timeout_s: float, now_s: float) -> DeadlineExceeded:
    """Return the error of a request whose deadline cannot be, or was not, met."""
    return DeadlineExceeded(
        f"Request timeout expired: waited {(now_s - arrived_s) * 1e3:.1f} ms of its {timeout_s * 1e3:.1f} ms"
    )
