"""Answers the requests of one transport: known headers in bursts, others one by one, operations by their handlers.

Owns: the cache of known headers, valid for one generation of the model table, and the bursts that run inline.
doors/zmq/frontend.py and doors/mqtt/frontend.py cut and decode messages. Thread: its transport's, each transport having
an `InferFrontend`; workers use a `TransportReply` too, which encodes and posts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.errors import DecodeFailed, Draining, EdgeRuntimeError, QueueFull, TensorMismatch, Unsupported
from edge_runtime.hosts.regions import Regions, SharedTensor
from edge_runtime.messages import RequestHeader, SequenceStep
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.pending_loads import OnEnd
from edge_runtime.models.servable import Servable
from edge_runtime.request.infer import Infer
from edge_runtime.request.operation_handlers import OperationCall, OperationHandlers
from edge_runtime.request.plan import RequestPlan, plan_head
from edge_runtime.request.replies import (
    FRAMES,
    BurstEncoding,
    BurstReply,
    Encoding,
    Entry,
    OpReply,
    PartsReply,
    ReplyEndpoint,
    TextAnswers,
    TracedFrames,
    TransportReply,
    join_burst,
)
from edge_runtime.request.request import CLIENT, Arrival, Origin, Request, deadline_exceeded, failure_of
from edge_runtime.request.worker import check_in_time
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.tracing import TraceParent, read_traceparent
from edge_runtime.tensors import Array
from edge_runtime.wire.codec import MAX_HEADER_BYTES, pack_error, unpack_extra

if TYPE_CHECKING:
    from edge_runtime.request.call_line import CallLine

log = logging.getLogger(__name__)

TOGETHER_BYTES = 16 << 10
"""Larger requests are submitted one by one: joining them costs a copy of their tensors."""

CACHE_BYTES, ROUTE_BYTES = 4 << 20, 3 << 10
"""Bound of the header cache, and the bytes that a kept header takes beside its own (measured): about 1 300 headers."""

SEEN_HEADERS = 16_384
"""Marks of headers seen once; all are dropped when there are more, which only delays the cache."""

MEASURED_S = 0.05
"""Of two bursts that came within this time, the second shows the cost of refusals: after a longer wait, the thread's
CPU time is that of its other work meanwhile."""

COUNT_RUNS = 32
"""Inline runs counted at once: right after a run the cores are needed for sending its replies."""

Outputs = Sequence[bytes | Array]
"""One answer's outputs, in the order of its plan: arrays, or their bytes as on the wire."""


class Listener(Protocol):
    """Hears the answers of one model, beside its clients; site/results.py publishes it.

    Thread: a transport's, or a worker's: it must not block.

    Its errors are counted (`publish_failed`) and logged, and never reach the caller.
    """

    def answered(self, plan: RequestPlan, answers: Sequence[Outputs], request: Request | None = None) -> None:
        """Requests of one plan, answered just now, in order; at least one. The outputs may be kept.

        request: the answered one, where it came alone.
        """
        ...


class InferRoute:
    """A known header: its plan, and the requests gathered for it in one drain.

    keeps_order: as of `Route`, for what its requests say beside the header may be of one sequence.
    sizes: of the tensor frames, -1 where each request says its own, as texts do (has_texts). has_places: some tensors
    lie in shared memory. has_extra: a frame comes behind them. kept: for its door. encoding: how its replies are
    written; head: of BurstEncoding, None without one.
    is_refused: its last request was refused as it was submitted, so the next is judged before anything is made of it.
    """

    __slots__ = (
        "burst", "encoding", "has_extra", "has_places", "has_texts", "head", "header", "is_refused", "keeps_order",
        "kept", "plan", "single_size", "sizes",
    )  # fmt: skip

    def __init__(self, header: RequestHeader, plan: RequestPlan, encoding: Encoding) -> None:
        self.header = header
        self.plan = plan
        self.encoding = encoding
        self.head = encoding.head(plan) if plan.inline is not None and isinstance(encoding, BurstEncoding) else None
        self.sizes = tuple(size for tensor, size in zip(header.inputs, plan.sizes, strict=True) if tensor.place is None)
        self.has_places = header.has_places
        self.has_extra = self.keeps_order = header.has_extra
        self.has_texts = -1 in self.sizes
        is_single = len(self.sizes) == 1 and not (self.has_places or self.has_extra)
        self.single_size = self.sizes[0] if is_single else -1
        self.burst: list[Entry] = []
        self.is_refused = False
        self.kept: Any = None

    def room(self, nbytes: int) -> memoryview | None:
        """Memory for a tensor frame of this size that has not come, where its host reads it in place."""
        return self.plan.servable.room(nbytes) if nbytes in self.sizes else None

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        """The tensor frames of a message when each has its length, else None: large texts are judged by their own.

        None, too, for a lone tensor of a known length, which the transport takes by itself.
        """
        sizes, tensors, extras = self.sizes, frames[2:], int(self.has_extra)
        if not sizes and not (self.has_places or extras):
            return None
        if len(tensors) != len(sizes) + extras or self.single_size >= 0:
            return None
        for size, frame in zip(sizes, tensors, strict=not extras):
            if len(frame) != size and not (size < 0 and len(frame) < TOGETHER_BYTES):
                return None
        return tuple(tensors)


class RefusedEntries(NamedTuple):
    """Entries of one sender and one burst that are refused alike."""

    sender: Hashable
    error: EdgeRuntimeError
    entries: list[Entry]


class InferFrontend:
    """Answers the requests of one transport. tracer: as of `Infer`."""

    def __init__(
        self,
        table: ModelTable,
        infer: Infer,
        operations: OperationHandlers,
        clock: Clock,
        metrics: Metrics,
        *,
        listeners: Mapping[str, Listener] | None = None,
        regions: Regions | None = None,
        encoding: Encoding = FRAMES,
        origin: Origin = CLIENT,
        door: str = "",
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """listeners: by model, hear the answers given here. regions: None where clients share no memory.

        door: its name, for traces.

        encoding: how replies to known headers are written. origin: of all requests that come here. thread_s: the CPU
        time of the calling thread.
        """
        self._table = table
        self._infer = infer
        self._operations = operations
        self._clock = clock
        self._metrics = metrics
        self._generation = -1
        # By the bytes of a msgpack header, or by the text of a JSON one: never equal.
        self._routes: dict[Any, InferRoute] = {}
        self._seen: set[int] = set()
        self._regions = regions
        self._encoding = encoding
        self._origin = origin
        self.listeners: Mapping[str, Listener] = listeners or {}
        self._cached_bytes = 0
        self._lines: dict[str, CallLine] = {}
        self._streams: dict[tuple[Hashable, str], Request] = {}  # answered in parts, by sender and id
        self._runs: list[tuple[Servable, int, int, float, float, float]] = []
        self._door = door
        self.tracer = infer.tracer
        self._thread_s = thread_s
        # Invariant: -inf after any other work than a hosted burst, so that none of it is taken for refusing.
        self._marked_s, self._marked_cpu_s, self._marked_works = -math.inf, 0.0, 0

    def drain(self) -> None:
        """Refuse new requests from now on; admitted ones are answered. Thread: I/O."""
        self._infer.close()
        self._forget_routes()
        self.count_runs()

    def tell_stop(self) -> None:
        """Tell connections that asked for it that this daemon stops: once all is answered, and nothing is read."""
        self._operations.stop_notices.tell()

    def unheard(self, sender: Hashable) -> None:
        """Note that a reply to a sender was dropped: to it, a request that was run must not look as if it was not."""
        self._operations.stop_notices.forget(sender)

    def gone(self, sender: Hashable) -> None:
        """Drop the waiting requests of a sender that no reply reaches any more. Thread: I/O."""
        self._operations.stop_notices.forget(sender)
        dropped = self._infer.drop(sender)
        if dropped:
            self._metrics.count("requests_dropped", dropped)

    def owes(self, sender: Hashable) -> bool:
        """Whether a request of this sender waits for its answer."""
        return self._infer.unanswered.has(sender)

    def count_runs(self) -> None:
        """Add the inline runs since the last call to counters and forecasts. Thread: I/O, at least each beat."""
        runs, self._runs = self._runs, []
        for servable, rows, requests, queue_s, run_s, _ in runs:
            if self._infer.dispatcher.is_slowed:
                for each in (servable, *servable.owned):
                    self._infer.dispatcher.teach_apart(each.scheduled)
            servable.scheduled.layout.run_times.observe(rows, run_s)
            servable.metrics.answered_batch(rows, requests, queue_s, run_s)
        if self.tracer is not None and runs:
            self.tracer.ran_inline(self._door, runs)

    def routes(self) -> Mapping[Any, InferRoute]:
        """Known headers; emptied when a version is published or withdrawn, so a swap forces a new check."""
        if self._generation != self._table.generation:
            self._generation = self._table.generation
            self._forget_routes()
        return self._routes

    def answer_burst(self, endpoint: ReplyEndpoint, route: InferRoute, burst: list[Entry]) -> None:
        """Answer requests of one known header: inline in batches, or one by one into the queue.

        Invariant: an exception is the answer of the requests that it hit, and touches no other.
        """
        if route.plan.inline is not None:
            self._marked_s = -math.inf
            if route.plan.priority < self._infer.dispatcher.refuses_from or self._origin.is_check:
                self._run_burst(endpoint, route, burst)
            else:
                self._submit_each(endpoint, route, burst, self._clock.monotonic_s(), None)
            return
        arrived_s = self._clock.monotonic_s()
        refused: list[RefusedEntries] = []
        try:
            if len(burst) == 1:
                self._submit_each(endpoint, route, burst, arrived_s, refused)
            else:
                self._submit_burst(endpoint, route, burst, arrived_s, refused)
        finally:
            count = self._tell_refused(endpoint, route, refused, arrived_s) if refused else 0
            self._measure(route, arrived_s, count if count == len(burst) else 0)

    def answer_bursts(
        self, endpoint: ReplyEndpoint, touched: Sequence[InferRoute]
    ) -> list[tuple[list[Entry], EdgeRuntimeError]]:
        """Answer the bursts that a round gathered; return those that a bug hit, with the error to end them with.

        Invariant: no route keeps entries beyond this call, also where an error is raised on the way.
        """
        failed: list[tuple[list[Entry], EdgeRuntimeError]] = []
        for route in touched:
            burst, route.burst = route.burst, []
            try:
                self.answer_burst(endpoint, route, burst)
            except Exception as error:  # noqa: BLE001 (its door answers; failure_of logs it)
                failed.append((burst, failure_of(error, f"a bug hit a burst of {len(burst)} requests")))
        return failed

    def ask(  # noqa: PLR0917 (one message, and everything read from it)
        self,
        endpoint: ReplyEndpoint,
        origin: Any,
        reply: OpReply,
        header: RequestHeader,
        tensors: Sequence[Any],
        key: bytes | str | None,
        encoding: Encoding | None = None,
        /,
        timeout_s: float = math.inf,
        sequence: SequenceStep | None = None,
        traceparent: str | None = None,
    ) -> Request | None:
        """Submit one decoded request, which is returned, or answer an op.

        origin: as in an `Entry`. key: of an equal header later on; None: keep no plan. encoding: of the replies to
        these; None: the door's. timeout_s: a bound beside the header's timeout. sequence, traceparent: said beside
        the header.
        Raises EdgeRuntimeError: refused, and not answered yet.
        """
        self._marked_s = -math.inf
        if header.op != "infer":
            self._op(endpoint, origin, reply, header)
            return None
        destinations: Sequence[Array | None] = ()
        if header.has_places:
            tensors, destinations = self._shared(endpoint.connection(origin), header, tensors)
        nbytes = sum(len(each) if isinstance(each, bytes) else _nbytes(each) for each in tensors)
        arrived_s, sender = self._clock.monotonic_s(), endpoint.sender(origin)
        request = Request(header, tensors, nbytes, reply, sender, arrived_s, self._metrics, self._origin)
        request.destinations = destinations
        request.longest_s = timeout_s
        if sequence is not None:
            request.sequence = sequence
        if isinstance(reply, PartsReply):
            key = None
            if destinations:
                raise Unsupported("stream: parts of an answer come in frames; name outputs without a place")
            reply.key = sender, reply.name
            self._streams[reply.key] = request
        request.hold(self._infer.unanswered, 0 if header.has_places else nbytes)
        if self.tracer is not None:
            self._begin_trace(endpoint, origin, request, traceparent)
        route = self.routes().get(key) if key is not None else None
        plan = self._infer.submit(request, route.plan if route is not None else None)
        # The requests of a sequence have an order, also where their headers differ: bursts of several would lose it.
        if key is not None and route is None and plan is not None and header.sequence is None:
            self._remember(key, header, plan, encoding)
        return request

    def foresee(self, sender: Hashable, header: RequestHeader, nbytes: int, servable: Servable) -> None:
        """Raise where a large request would be refused now, of which only its head has come. header: what that says."""
        arrival = Arrival(plan_head(servable, header), nbytes, sender, self._clock.monotonic_s())
        self._infer.foresee(servable, arrival)

    def await_model(
        self,
        endpoint: ReplyEndpoint,
        origin: Any,
        header: RequestHeader,
        on_end: OnEnd,
        *,
        nbytes: int,
        arrived_s: float,
    ) -> None:
        """Call `on_end` once a model is loaded that a message is for, which must be read by the model's inputs.

        header: names the model, which is coming, and the deadline. Raises EdgeRuntimeError: it is not waited for.
        """
        self._infer.await_model(header, on_end, endpoint.sender(origin), nbytes=nbytes, arrived_s=arrived_s)

    def line(self, model: str) -> CallLine:
        """Return the line of calls that each become several requests to a model."""
        found = self._lines.get(model)
        if found is None:
            from edge_runtime.request.call_line import CallLine  # further protocols alone have such calls

            found = self._lines[model] = CallLine(model, self._infer.dispatcher, self._clock)
        return found

    def cancel_stream(self, sender: Hashable, name: str) -> bool:
        """End a request of a sender that is answered in parts; whether there was one. name: its id as text."""
        request = self._streams.get((sender, name))
        if request is None:
            return False
        self.cancel(request)
        return True

    def forget_stream(self, reply: PartsReply) -> None:
        """Forget a request that was answered in parts. Thread: any."""
        key = reply.key
        found = self._streams.get(key) if key is not None else None
        if key is not None and found is not None and found.reply is reply:
            self._streams.pop(key, None)

    @staticmethod
    def cancel(request: Request) -> None:
        """Refuse one request that waits, or is answered in parts: its caller does not wait. Any other run goes on."""
        if request.plan is not None and not request.plan.servable.cancel(request):
            request.is_given_up = True

    @contextmanager
    def answering(self, reply: OpReply) -> Iterator[None]:
        """Reply with any exception raised inside: the message became no request."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            failed = failure_of(error, "a message could not become a request")
            self._marked_s = -math.inf  # reading it was not part of what refusing bursts costs
        else:
            return
        failed.__traceback__ = None  # its frames hold this message's memory, and they this error
        endpoint, envelope = getattr(reply, "at", (None, ()))
        self.count_refused(endpoint, envelope[0] if envelope else None, failed)
        reply.refuse(failed)

    def count_refused(
        self, endpoint: ReplyEndpoint | None, origin: Any, error: EdgeRuntimeError, model: str = ""
    ) -> None:
        """Count a request that ends with an error before it became one. origin: as in an `Entry`."""
        self._metrics.refused(error.code)
        if self.tracer is not None:
            self.tracer.refused(self._door, error, (_came(endpoint, origin, None),), model=model)

    def _begin_trace(self, endpoint: ReplyEndpoint, origin: Any, request: Request, traceparent: str | None) -> None:
        """Have a request traced that its caller traces, who hears of it, or that its turn is."""
        assert self.tracer is not None
        came = _came(endpoint, origin, traceparent)
        self.tracer.begin(request, came, self._door)
        if came is None or request.trace is None:
            return
        tell: Any = getattr(endpoint, "tell_trace", None)
        if tell is not None:
            tell(origin, request.trace.traceparent)
        elif isinstance(request.reply, TransportReply) and request.reply.encoding is FRAMES:
            request.reply.encoding = TracedFrames(request.trace.traceparent)

    def _trace_refused(
        self, endpoint: ReplyEndpoint, route: InferRoute, entries: Sequence[Entry], error: EdgeRuntimeError
    ) -> None:
        """Note refused entries of a known header, of which no request was made."""
        assert self.tracer is not None
        came = [_came(endpoint, entry[0], _extra_traceparent(route, entry[2])) for entry in entries]
        self.tracer.refused(self._door, error, came, plan=route.plan)

    # ---- known headers ----------------------------------------------------------------------------------------------

    def _run_burst(self, endpoint: ReplyEndpoint, route: InferRoute, entries: list[Entry]) -> None:
        """Run a burst on this thread: one join per input, one run, one unpack per output, then the answers.

        The lean path: an entry becomes no `Request`, which would cost as much as all else here. Deadline and failure
        are judged by the rules of request/worker.py.
        """
        plan = route.plan
        buffers, cut, servable = plan.servable.inline, plan.inline, plan.servable
        assert buffers is not None
        assert cut is not None
        now, run_times, timeout_s = self._clock.monotonic_s, servable.scheduled.layout.run_times, plan.timeout_s
        step = max(buffers.max_rows // plan.rows, 1)
        arrived_s = now()
        if not self._origin.is_check:
            servable.used_s = arrived_s
        for start in range(0, len(entries), step):
            batch = entries if len(entries) <= step else entries[start : start + step]
            rows = len(batch) * plan.rows
            try:
                with servable.inline_lock:
                    if not servable.is_open:
                        # Swapped out between look-up and use: the same header is resolved against the live version.
                        self._submit_each(endpoint, route, entries[start:], arrived_s, None)
                        return
                    started_s = now()
                    check_in_time(run_times, rows, arrived_s, timeout_s, started_s)
                    if len(plan.sizes) == 1:
                        buffers.run_single([entry[2] for entry in batch], rows)
                    else:
                        buffers.run([entry[2] for entry in batch], rows)
                    finished_s = now()
                    payloads = buffers.unpack(cut.outputs, rows)
                if finished_s - arrived_s > timeout_s:
                    raise deadline_exceeded(arrived_s, timeout_s, finished_s)
                if type(route.head) is not TextAnswers:
                    endpoint.send_answers(batch, route.head, payloads, cut.nbytes)
                else:
                    self._send_texts(endpoint, route.head, batch, payloads)
            except Draining:
                # A step of a pipeline was swapped for one that does not run here: nothing has run, and nothing is sent.
                self._submit_each(endpoint, route, entries[start:], arrived_s, None)
                return
            except Exception as error:  # noqa: BLE001 (these requests' answer; failure_of logs it)
                failed = failure_of(error, f"a run of model {servable.model} failed")
                self._refuse_batch(endpoint, route, batch, failed)
                continue
            if self.listeners:
                self.tell(plan, payloads)
            count = 0 if self._origin.is_check else len(batch)
            self._runs.append((servable, rows, count, started_s - arrived_s, finished_s - started_s, finished_s))
        if len(self._runs) >= COUNT_RUNS:
            self.count_runs()

    @staticmethod
    def _send_texts(
        endpoint: ReplyEndpoint, head: TextAnswers, entries: Sequence[Entry], payloads: Sequence[Sequence[bytes]]
    ) -> None:
        """Write all answers, then send them: a failure before has sent none."""
        texts = [head.answers.pack(entry[1], frames) for entry, frames in zip(entries, payloads, strict=True)]
        for (origin, _, _), text in zip(entries, texts, strict=True):
            endpoint.send((origin,), head.whole(text))

    def _refuse_batch(
        self, endpoint: ReplyEndpoint, route: InferRoute, entries: Sequence[Entry], error: EdgeRuntimeError
    ) -> None:
        """Send each entry the error, whose frame is written once."""
        if not entries:
            return
        route.plan.metrics.refused(error.code, len(entries))
        if self.tracer is not None and not self._origin.is_check:
            self._trace_refused(endpoint, route, entries, error)
        encoding = route.encoding
        if encoding is FRAMES:
            header = pack_error(error)
            for origin, request_id, _ in entries:
                endpoint.send((origin,), (header, request_id))
            return
        for origin, request_id, _ in entries:
            endpoint.send((origin,), encoding.refusal(error, request_id))

    def _submit_burst(
        self,
        endpoint: ReplyEndpoint,
        route: InferRoute,
        entries: list[Entry],
        arrived_s: float,
        refused: list[RefusedEntries],
    ) -> None:
        """Submit a burst; no run begins with the first of it alone. refused: as of `_submit_each`."""
        dispatcher = self._infer.dispatcher
        may_be_one = self._may_be_one(route)
        if may_be_one:
            entries = self._start_together(endpoint, route, entries, arrived_s)
            if not entries:
                return
        dispatcher.begin_burst()
        try:
            if may_be_one:
                entries = self._submit_together(endpoint, route, entries, arrived_s, refused)
            self._submit_each(endpoint, route, entries, arrived_s, refused)
        finally:
            dispatcher.end_burst()

    def runs_together(self, route: InferRoute) -> bool:
        """Whether requests of a burst become one, since their runs are so short."""
        dispatcher = self._infer.dispatcher
        return self._may_be_one(route) and dispatcher.rows_together(route.plan.servable.scheduled) > route.plan.rows

    def _may_be_one(self, route: InferRoute) -> bool:
        """Whether small requests of a known header may be one `Request`: no listener looks at each."""
        return route.plan.makes_bursts and route.plan.nbytes < TOGETHER_BYTES and not self.listeners

    def _start_together(
        self, endpoint: ReplyEndpoint, route: InferRoute, entries: list[Entry], arrived_s: float
    ) -> list[Entry]:
        """Have requests of all senders run together, as long as a run can begin at once; return the others.

        Nothing waits then, so no sender can be in another's way: the route stands for all.
        """
        plan, dispatcher = route.plan, self._infer.dispatcher
        scheduled = plan.servable.scheduled
        most = dispatcher.rows_together(scheduled) // plan.rows
        while len(entries) > 1 and most > 1 and dispatcher.starts_at_once(scheduled, min(len(entries), most)):
            if not self._submit_as_one(endpoint, route, entries[:most], route, arrived_s):
                break
            entries = entries[most:]
        return entries

    def _submit_as_one(
        self, endpoint: ReplyEndpoint, route: InferRoute, part: list[Entry], sender: Hashable, arrived_s: float
    ) -> bool:
        """Submit requests as one; False: they were not admitted so."""
        plan = route.plan
        reply = BurstReply(self, endpoint, route, part)
        nbytes = plan.nbytes * len(part)
        request = Request(route.header, (), nbytes, reply, sender, arrived_s, self._metrics, self._origin)
        request.count, request.split = len(part), reply.split
        if self.tracer is not None:
            self.tracer.begin(request, None, self._door)
        return self._infer.submit_burst(request, plan, join_burst(plan, part))

    def _submit_together(
        self,
        endpoint: ReplyEndpoint,
        route: InferRoute,
        entries: list[Entry],
        arrived_s: float,
        refused: list[RefusedEntries],
    ) -> list[Entry]:
        """Submit each sender's requests as one; return those that are to be submitted by themselves.

        refused: gets those of senders of which nothing is admitted now.
        """
        plan = route.plan
        most = self._infer.dispatcher.rows_together(plan.servable.scheduled) // plan.rows
        if most < 2:  # there is nothing to put together
            return entries
        left: list[Entry] = []
        senders: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            senders.setdefault(endpoint.sender(entry[0]), []).append(entry)
        for sender, own in senders.items():
            error, is_for_more = self._judge(route, sender, arrived_s)
            if error is not None and is_for_more:
                refused.append(RefusedEntries(sender, error, own))
                continue
            for start in range(0, len(own), most):
                part = own[start : start + most]
                if len(part) == 1 or not self._submit_as_one(endpoint, route, part, sender, arrived_s):
                    left += part
        return left

    def apart(
        self, endpoint: ReplyEndpoint, route: InferRoute, entries: Sequence[Entry], burst: Request
    ) -> list[Request]:
        """Make the requests that a burst stands for, as if each were submitted by itself. Thread: any."""
        plan: RequestPlan = burst.plan
        made: list[Request] = []
        for origin, request_id, data in entries:
            reply = TransportReply(self, endpoint, (origin,), route.encoding, request_id)
            sender = endpoint.sender(origin)
            request = Request(
                route.header, (data,), plan.nbytes, reply, sender, burst.arrived_s, self._metrics, burst.origin
            )
            request.take(plan, plan.arrays((data,)))
            request.error, request.lost_runs = burst.error, burst.lost_runs
            if self.tracer is not None:
                self.tracer.begin(request, None, self._door)
            made.append(request)
        made[0].held, burst.held = burst.held, None  # all of it: they end soon
        return made

    def _submit_each(
        self,
        endpoint: ReplyEndpoint,
        route: InferRoute,
        entries: Sequence[Entry],
        arrived_s: float,
        refused: list[RefusedEntries] | None,
    ) -> None:
        """Submit requests one by one.

        refused: gets those that are refused now, before anything is made of them; a lone one is judged so only after
        another was refused. None: their version was swapped out, and the header is resolved again.
        """
        plan = route.plan if refused is not None else None
        header, submit, metrics = route.header, self._infer.submit, self._metrics
        unanswered = self._infer.unanswered
        alike: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            origin, request_id, data = entry
            sender = endpoint.sender(origin)
            if refused is not None and (route.is_refused or len(entries) > 1):
                if sender in alike:
                    alike[sender].append(entry)
                    continue
                error, is_for_more = self._judge(route, sender, arrived_s)
                if error is not None:
                    route.is_refused = True
                    refused.append(RefusedEntries(sender, error, [entry]))
                    if is_for_more:
                        alike[sender] = refused[-1].entries
                    continue
                alike.clear()
            sequence = traceparent = None
            if route.has_extra:
                try:
                    (sequence, traceparent), data = unpack_extra(data[-1]), data[:-1]
                except DecodeFailed as error:
                    self.count_refused(endpoint, origin, error, header.model)
                    endpoint.send((origin,), route.encoding.refusal(error, request_id))
                    continue
            if route.has_places:
                own = origin, request_id, data
                self._submit_shared(endpoint, route, own, arrived_s, plan, sequence, traceparent)
                continue
            reply = TransportReply(self, endpoint, (origin,), route.encoding, request_id)
            tensors = data if isinstance(data, tuple) else (data,)
            nbytes = sum(map(len, tensors)) if route.has_texts else route.plan.nbytes
            request = Request(header, tensors, nbytes, reply, sender, arrived_s, metrics, self._origin)
            if sequence is not None:
                request.sequence = sequence
            if self.tracer is not None:
                self._begin_trace(endpoint, origin, request, traceparent)
            try:
                request.hold(unanswered, nbytes)
            except QueueFull as full:
                request.refuse(full)
                continue
            submit(request, plan)
            route.is_refused = request.is_given_up or request.error is not None

    def _judge(self, route: InferRoute, sender: Hashable, arrived_s: float) -> tuple[EdgeRuntimeError | None, bool]:
        """As `Infer.judge`; None, too, for more than the sender may have unanswered."""
        plan = route.plan
        if not plan.is_judged_first or not self._infer.unanswered.has_room(
            sender, 0 if route.has_places else plan.nbytes
        ):
            return None, False
        return self._infer.judge(plan, Arrival(plan, plan.nbytes, sender, arrived_s))

    def _tell_refused(
        self, endpoint: ReplyEndpoint, route: InferRoute, refused: Sequence[RefusedEntries], arrived_s: float
    ) -> int:
        """Refuse entries of which no request was made, and return how many; one that is to be held becomes one."""
        plan, dispatcher, count = route.plan, self._infer.dispatcher, 0
        copied_bytes = 0 if route.has_places else plan.nbytes
        for sender, error, entries in refused:
            count += len(entries)
            told = dispatcher.told_now(sender, route.header.model, copied_bytes, len(entries))
            self._refuse_batch(endpoint, route, entries[:told], error)
            for origin, request_id, data in entries[told:]:
                reply = TransportReply(self, endpoint, (origin,), route.encoding, request_id)
                request = Request(route.header, (), plan.nbytes, reply, sender, arrived_s, self._metrics, self._origin)
                request.take(plan, ())
                if self.tracer is not None:
                    self.tracer.begin(request, _came(endpoint, origin, _extra_traceparent(route, data)), self._door)
                dispatcher.refuse(request, type(error)(error.message, retry_after_ms=error.retry_after_ms))
        return count

    def _measure(self, route: InferRoute, arrived_s: float, refused: int) -> None:
        """Count the CPU time of this thread since the last burst as the cost of a burst that was refused whole.

        That is all of it: its messages were received, judged and answered, and the thread woke for them. But where
        anything was queued, began or ended meanwhile, the thread may have done that.
        """
        cpu_s, dispatcher = self._thread_s(), self._infer.dispatcher
        works = dispatcher.works
        if refused and arrived_s - self._marked_s < MEASURED_S and works == self._marked_works:
            nbytes = 0 if route.has_places else refused * route.plan.nbytes
            dispatcher.observe_refusals(cpu_s - self._marked_cpu_s, refused, nbytes)
        self._marked_s, self._marked_cpu_s, self._marked_works = arrived_s, cpu_s, works

    def _submit_shared(  # noqa: PLR0917 (as of `_submit_each`)
        self,
        endpoint: ReplyEndpoint,
        route: InferRoute,
        entry: Entry,
        arrived_s: float,
        plan: RequestPlan | None,
        sequence: SequenceStep | None,
        traceparent: str | None,
    ) -> None:
        """Submit one request of a known header whose tensors lie in shared memory, or refuse it."""
        origin, request_id, frames = entry
        reply = TransportReply(self, endpoint, (origin,), route.encoding, request_id)
        with self.answering(reply):
            tensors, destinations = self._shared(endpoint.connection(origin), route.header, frames)
            sender, nbytes = endpoint.sender(origin), route.plan.nbytes
            request = Request(route.header, tensors, nbytes, reply, sender, arrived_s, self._metrics, self._origin)
            request.destinations = destinations
            if sequence is not None:
                request.sequence = sequence
            request.hold(self._infer.unanswered, 0)
            if self.tracer is not None:
                self._begin_trace(endpoint, origin, request, traceparent)
            self._infer.submit(request, plan)
            route.is_refused = request.is_given_up or request.error is not None

    def _shared(
        self, connection: Hashable, header: RequestHeader, frames: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Array | None]]:
        """The tensors of a request, in its header's order, and where its outputs go. Raises TensorMismatch."""
        if self._regions is None or connection is None:
            raise TensorMismatch("no memory is shared here: it belongs to ipc endpoints; send the tensors themselves")
        owner = self._regions.owner_of(connection)
        count = sum(tensor.place is None for tensor in header.inputs)
        if len(frames) != count:
            raise TensorMismatch(f"{count} inputs lie in no region, {len(frames)} tensor frames came")
        left = iter(frames)
        tensors = [next(left) if tensor.place is None else owner.input(tensor) for tensor in header.inputs]
        return tensors, [
            None if place is None else owner.output(name, place)
            for name, place in zip(header.outputs or (), header.output_places, strict=True)
        ] if header.output_places else ()

    def _op(self, endpoint: ReplyEndpoint, origin: Any, reply: OpReply, header: RequestHeader) -> None:
        self.count_runs()  # for stats
        call = OperationCall(
            reply.result,
            endpoint.is_control,
            endpoint.max_frame_bytes,
            endpoint.connection(origin),
            endpoint.sender(origin),
            partial(self.cancel_stream, endpoint.sender(origin)),
        )
        self._operations.answer(header, call)

    # ---- the cache of headers ---------------------------------------------------------------------------------------

    def _remember(self, key: bytes | str, header: RequestHeader, plan: RequestPlan, encoding: Encoding | None) -> None:
        """Keep a plan when its header is seen a second time. All are forgotten when they are too many."""
        if len(key) > MAX_HEADER_BYTES:  # of JSON
            return
        mark = hash(key)
        if mark in self._seen:
            if self._cached_bytes + len(key) + ROUTE_BYTES > CACHE_BYTES:
                self._forget_routes()  # those in use come back at once; a flood must not keep them out for good
            self._routes[key] = InferRoute(header, plan, encoding or self._encoding)
            self._cached_bytes += len(key) + ROUTE_BYTES
            return
        if len(self._seen) >= SEEN_HEADERS:
            self._seen.clear()
        self._seen.add(mark)

    def _forget_routes(self) -> None:
        self._routes, self._cached_bytes = {}, 0

    # ---- listeners --------------------------------------------------------------------------------------------------

    def tell_of(self, request: Request) -> None:
        """Tell the model's listener of one answered request. Thread: any."""
        plan: RequestPlan = request.plan
        self.tell(plan, (plan.select(request.outputs),), request)

    def tell(self, plan: RequestPlan, answers: Sequence[Outputs], request: Request | None = None) -> None:
        """Tell the model's listener of answers. Thread: any.

        Invariant: a listener that raises costs no request its answer.
        """
        listener = self.listeners.get(plan.servable.model)
        if listener is None:
            return
        try:
            listener.answered(plan, answers, request)
        except Exception:
            self._metrics.count("publish_failed")
            log.exception("the listener of model %s failed", plan.servable.model)


def _came(endpoint: ReplyEndpoint | None, origin: Any, traceparent: str | None) -> TraceParent | None:
    """Return the span of a request's caller, as its frame of extras or its door has it. Where requests are traced."""
    if traceparent is not None:
        return read_traceparent(traceparent)
    read: Any = getattr(endpoint, "traceparent", None)
    found: TraceParent | None = read(origin) if read is not None and origin is not None else None
    return found


def _extra_traceparent(route: InferRoute, data: Any) -> str | None:
    """Return the context in a request's frame of extras; None where there is none, or it cannot be read."""
    if not route.has_extra:
        return None
    with suppress(DecodeFailed):
        return unpack_extra(data[-1]).traceparent
    return None


def _nbytes(tensor: Any) -> int:
    if isinstance(tensor, np.ndarray) and tensor.dtype == object:
        return sum(map(len, tensor.flat))  # BYTES, read out of JSON or protobuf
    return tensor.nbytes if isinstance(tensor, np.ndarray | SharedTensor) else len(tensor)
