"""What every transport's requests have in common: resolve -> admit or run -> encode -> reply.

Owns: the cache of known headers, valid for one generation of the live table, and the lots that are run inline. How a
message is cut and decoded is zmq_frontend.py's and mqtt_frontend.py's. Thread: one transport's own, each transport
having an `InferFrontend`; `_settle` also runs on workers, where it only encodes and posts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from edge_runtime.clock import Clock
from edge_runtime.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    Draining,
    EdgeRuntimeError,
    Forbidden,
    RunFailed,
    Unsupported,
)
from edge_runtime.frontend.control_frontend import ControlFrontend
from edge_runtime.frontend.forms import Form, Frames
from edge_runtime.frontend.tap import Outputs, Tap
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.serving.infer import Infer
from edge_runtime.serving.request_plan import RequestPlan, plan_request
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from edge_runtime.wire import codec

log = logging.getLogger(__name__)

KEEP_FRAME_BYTES = 16 << 10
"""From here a tensor frame is kept uncopied until it is run, and dropped untouched when refused. Smaller frames may lie
unaligned inside libzmq's 8 KiB receive buffer, and copying them is cheaper than keeping them."""

CACHE_BYTES = 4 << 20
"""Bound of the header cache: 20 000 headers of 200 bytes."""

SEEN_HEADERS = 16_384
"""Marks of headers seen once; forgotten all together when there are more, which only delays the cache."""

TALLY_LOTS = 32
"""Inline lots that are counted together: right after a reply the cores are wanted for sending it."""

Entry = tuple[Any, bytes, Any]
"""One request of a known header: where its reply goes, its id, and its tensor (a tuple of tensors for several)."""


class Endpoint(Protocol):
    """Where requests come in, as far as answering them goes. Thread: its transport's, except `post` and `call`."""

    is_control: bool

    @property
    def max_frame_bytes(self) -> int:
        """Largest tensor that can come in here."""
        ...

    def answer_lot(
        self, entries: Sequence[Entry], header: bytes, payloads: Iterable[Sequence[bytes]], reply_bytes: int
    ) -> None:
        """Send answers of equal header to entries, each with its output frames: `reply_bytes` in all each."""
        ...

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one reply, or drop and count it."""
        ...

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """The same. Thread: any."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the transport's thread soon. Thread: any."""
        ...


class InferRoute:
    """A header this daemon has seen before: its plan, and the requests gathered for it in one drain."""

    __slots__ = ("header", "keeps_frames", "key", "lot", "plan", "single_size", "sizes", "tap")

    def __init__(self, key: bytes, header: codec.RequestHeader, plan: RequestPlan, tap: Tap | None = None) -> None:
        self.key = key
        self.header = header
        self.plan = plan
        self.tap = tap
        self.sizes = plan.sizes
        self.keeps_frames = plan.inline is None and plan.nbytes >= KEEP_FRAME_BYTES
        self.single_size = plan.sizes[0] if len(plan.sizes) == 1 else -1
        self.lot: list[Entry] = []

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        """The tensor frames of a request with several inputs when their lengths are right, else None."""
        if len(self.sizes) < 2 or len(frames) != len(self.sizes):
            return None
        for size, frame in zip(self.sizes, frames, strict=True):
            if len(frame) != size:
                return None
        return tuple(frame if self.keeps_frames else frame.bytes for frame in frames)

    def tensors(self, entry: Entry) -> Sequence[Any]:
        """An entry's tensor frames, however many inputs there are."""
        data = entry[2]
        return data if isinstance(data, tuple) else (data,)


class TransportInquiry:
    """One request off the lean path: where its reply goes, in which form, and since when it waits."""

    __slots__ = ("_frontend", "arrived_s", "endpoint", "envelope", "form", "header", "key", "used_plan")

    def __init__(
        self, frontend: InferFrontend, endpoint: Endpoint, envelope: tuple[Any, ...], form: Form, arrived_s: float
    ) -> None:
        self._frontend = frontend
        self.endpoint = endpoint
        self.envelope = envelope
        self.form = form
        self.arrived_s = arrived_s
        self.header = codec.RequestHeader()
        self.key: bytes | None = None
        self.used_plan: RequestPlan | None = None

    @property
    def nbytes(self) -> int:
        """See serving's Inquiry."""
        return self.form.nbytes

    def plan(self) -> RequestPlan:
        """See serving's Inquiry."""
        return self._frontend.plan(self.header, self.key)

    def request(self, plan: RequestPlan) -> Pending:
        """See serving's Inquiry."""
        self.used_plan = plan
        return Pending(
            self.form.arrays(plan), plan.rows, self.form.nbytes, plan.shape, plan.priority, self.arrived_s,
            plan.timeout_s, self._frontend.settle, self,
        )  # fmt: skip

    def refuse(self, error: EdgeRuntimeError) -> None:
        """See serving's Inquiry."""
        self._frontend.count_refusal(error)
        self.post(self.form.refusal(error))

    def resume(self, enter: Callable[[], None]) -> None:
        """See serving's Inquiry."""
        self.endpoint.call(enter)

    def post(self, frames: Sequence[Any]) -> None:
        """Send frames to where the request came from. Thread: any."""
        self.endpoint.post(self.envelope, frames)


class InferFrontend:
    """Answers the requests of one transport."""

    def __init__(
        self, servables: Servables, infer: Infer, control: ControlFrontend, clock: Clock, metrics: Metrics
    ) -> None:
        self._servables = servables
        self._infer = infer
        self._control = control
        self._clock = clock
        self._metrics = metrics
        self._generation = -1
        self._routes: dict[bytes, InferRoute] = {}
        self._seen: set[int] = set()
        self._taps: Mapping[str, Tap] = {}
        self.settle: Callable[[Pending, Outcome], None] = _settle
        self._cached_bytes = 0
        self._tally: list[tuple[Servable, int, int, float, float]] = []

    def listen(self, taps: Mapping[str, Tap]) -> None:
        """Have taps, by model, hear what is answered here. Before the transport starts."""
        self._taps = taps
        self.settle = self._settle_heard if taps else _settle

    def drain(self) -> None:
        """Refuse new requests from now on; what was admitted is answered. Thread: I/O."""
        self._infer.close()
        self._forget_routes()

    def fold_tally(self) -> None:
        """Bring counters and forecasts up to date with the lots answered since. Thread: I/O, at least each beat."""
        tally, self._tally = self._tally, []
        for servable, rows, requests, queue_s, run_s in tally:
            servable.scheduled.layout.run_times.observe(rows, run_s)
            servable.metrics.answered_batch(rows, requests, queue_s, run_s)

    def routes(self) -> Mapping[bytes, InferRoute]:
        """Known headers; emptied when a version was published or withdrawn, so that a swap forces a new check."""
        if self._generation != self._servables.generation:
            self._generation = self._servables.generation
            self._forget_routes()
        return self._routes

    def lot(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        """Answer requests of one known header: inline in batches, or one by one into the queue."""
        if route.plan.inline is not None:
            self._answer_inline(endpoint, route, entries)
        else:
            self._enqueue(endpoint, route, entries)

    def ask(self, inquiry: TransportInquiry, header: codec.RequestHeader, key: bytes | None) -> None:
        """Admit one decoded request, or answer an op; key: what the same header is known by when it comes again.

        Raises EdgeRuntimeError: refused, and not answered yet.
        """
        if header.op != "infer":
            self._op(inquiry, header)
            return
        inquiry.header, inquiry.key = header, key
        self._infer.submit(inquiry)

    def inquiry(self, endpoint: Endpoint, envelope: tuple[Any, ...], form: Form) -> TransportInquiry:
        """A request that came in just now."""
        return TransportInquiry(self, endpoint, envelope, form, self._clock.monotonic_s())

    @contextmanager
    def answering(self, inquiry: TransportInquiry) -> Iterator[None]:
        """Whatever is raised inside is the request's answer."""
        try:
            yield
        except EdgeRuntimeError as error:
            inquiry.refuse(error)
        except Exception as error:
            log.exception("a message could not be answered otherwise")
            inquiry.refuse(RunFailed(f"{type(error).__name__}: {error}"))

    # ---- known headers ----------------------------------------------------------------------------------------------

    def _answer_inline(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        """Run a lot on this thread: a join in, one run, one unpack an output, then the answers."""
        plan = route.plan
        buffers, cut, servable = plan.servable.inline, plan.inline, plan.servable
        assert buffers is not None
        assert cut is not None
        now, metrics = self._clock.monotonic_s, servable.metrics
        run_times = servable.scheduled.layout.run_times
        step = max(buffers.max_rows // plan.rows, 1)
        arrived_s = servable.used_s = now()
        for start in range(0, len(entries), step):
            batch = entries if len(entries) <= step else entries[start : start + step]
            rows = len(batch) * plan.rows
            with servable.inline_lock:
                if not servable.is_open:
                    self._again(endpoint, route, entries[start:], arrived_s)
                    return
                started_s = now()
                if started_s + run_times.predict_s(rows) - arrived_s > plan.timeout_s:
                    run_times.relax()
                    error = DeadlineUnmeetable(f"a run takes longer than the timeout, {plan.timeout_s * 1e3:.3f} ms")
                    _refuse_lot(endpoint, batch, error, metrics)
                    continue
                try:
                    if len(plan.sizes) == 1:
                        buffers.run_single([entry[2] for entry in batch], rows)
                    else:
                        buffers.run([entry[2] for entry in batch], rows)
                except Exception as error:  # noqa: BLE001 (a failing run is an answer, never the I/O thread's end)
                    failed = error if isinstance(error, EdgeRuntimeError) else RunFailed(f"{error}")
                    _refuse_lot(endpoint, batch, failed, metrics)
                    continue
                finished_s = now()
                payloads = buffers.unpack(cut.outputs, rows)
            if finished_s - arrived_s > plan.timeout_s:
                _refuse_lot(endpoint, batch, DeadlineExceeded("the run ended after the deadline"), metrics)
                continue
            endpoint.answer_lot(batch, cut.header, payloads, cut.nbytes)
            if route.tap is not None:
                self._tell(route.tap, plan, payloads)
            self._tally.append((servable, rows, len(batch), started_s - arrived_s, finished_s - started_s))
        if len(self._tally) >= TALLY_LOTS:
            self.fold_tally()

    def _enqueue(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        arrived_s, plan = self._clock.monotonic_s(), route.plan
        for index, entry in enumerate(entries):
            inquiry = TransportInquiry(self, endpoint, (entry[0],), Frames(entry[1], route.tensors(entry)), arrived_s)
            if route.plan.canary is not None:
                plan = route.plan.turn()
            try:
                plan.servable.submit(inquiry.request(plan))
            except Draining:
                self._again(endpoint, route, entries[index:], arrived_s)
                return
            except EdgeRuntimeError as error:
                plan.servable.metrics.refused(error.code)
                endpoint.send(inquiry.envelope, inquiry.form.refusal(error))

    def _again(self, endpoint: Endpoint, route: InferRoute, entries: Sequence[Entry], arrived_s: float) -> None:
        """The servable was swapped out between look-up and use: resolve the same header against the live one."""
        for entry in entries:
            inquiry = TransportInquiry(self, endpoint, (entry[0],), Frames(entry[1], route.tensors(entry)), arrived_s)
            inquiry.header, inquiry.key = route.header, route.key
            self._infer.submit_or_refuse(inquiry)

    def _op(self, inquiry: TransportInquiry, header: codec.RequestHeader) -> None:
        if header.op in ControlFrontend.CONTROL_OPS and not inquiry.endpoint.is_control:
            raise Forbidden(f"{header.op} is answered on the control endpoint only")
        if header.op not in ControlFrontend.OPS:
            known = ", ".join(("infer", *sorted(ControlFrontend.OPS)))
            raise Unsupported(f"unknown op {header.op!r}; wanted one of {known}")
        if header.op == "stats":
            self.fold_tally()
        form = inquiry.form
        self._control.answer(
            header,
            lambda result: inquiry.post(
                form.refusal(result) if isinstance(result, EdgeRuntimeError) else form.result(result)
            ),
            max_frame_bytes=inquiry.endpoint.max_frame_bytes,
        )

    # ---- plans ------------------------------------------------------------------------------------------------------

    def plan(self, header: codec.RequestHeader, key: bytes | None) -> RequestPlan:
        """The plan of a header, from the cache or made now; one with a key is kept when it is seen a second time."""
        routes = self.routes()
        route = routes.get(key) if key is not None else None
        if route is not None:
            return route.plan
        plan = plan_request(self._servables, header)
        if key is not None:
            self._remember(key, header, plan)
        return plan

    def _remember(self, key: bytes, header: codec.RequestHeader, plan: RequestPlan) -> None:
        mark = hash(key)
        if mark in self._seen:
            if self._cached_bytes + len(key) <= CACHE_BYTES:
                self._routes[key] = InferRoute(key, header, plan, self._taps.get(plan.servable.model))
                self._cached_bytes += len(key)
            return
        if len(self._seen) >= SEEN_HEADERS:
            self._seen.clear()
        self._seen.add(mark)

    def _forget_routes(self) -> None:
        self._routes, self._cached_bytes = {}, 0

    # ---- taps -------------------------------------------------------------------------------------------------------

    def _settle_heard(self, request: Pending, outcome: Outcome) -> None:
        """As `_settle`, and a tap of the model hears the answer. Thread: whichever decided the request's fate.

        The tap hears it first: who has its answer may ask again, and have another worker tell of that one before.
        """
        inquiry: TransportInquiry = request.tag  # type: ignore[assignment]
        plan = inquiry.used_plan
        if isinstance(outcome, Answer) and plan is not None:
            tap = self._taps.get(plan.servable.model)
            if tap is not None:
                self._tell(tap, plan, (plan.select(outcome.outputs),))
        _settle(request, outcome)

    def _tell(self, tap: Tap, plan: RequestPlan, answers: Sequence[Outputs]) -> None:
        """Invariant: whatever a tap does, these requests and the next are answered."""
        try:
            tap.answered(plan, answers)
        except Exception:
            self._metrics.count("publish_failed")
            log.exception("what listens to the answers of model %s failed", plan.servable.model)

    def count_refusal(self, error: EdgeRuntimeError) -> None:
        """Count an error of a request that reached no model. Thread: any."""
        self._metrics.count(f"refused_{error.code}")


def _settle(request: Pending, outcome: Outcome) -> None:
    """Encode one outcome and post it. Thread: whichever decided the request's fate."""
    inquiry: TransportInquiry = request.tag  # type: ignore[assignment]
    plan = inquiry.used_plan
    assert plan is not None
    metrics = plan.servable.metrics
    if not isinstance(outcome, Answer):
        metrics.refused(outcome.code)
        inquiry.post(inquiry.form.refusal(outcome))
        return
    inquiry.post(inquiry.form.answer(plan, outcome))
    metrics.answered(outcome.queue_s, outcome.run_s)


def _refuse_lot(endpoint: Endpoint, entries: Sequence[Entry], error: EdgeRuntimeError, metrics: ModelMetrics) -> None:
    packed = codec.pack_error(error)
    metrics.refused(error.code, len(entries))
    for identity, request_id, _ in entries:
        endpoint.send((identity,), (packed, request_id))
