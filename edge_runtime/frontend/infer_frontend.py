"""Requests as frames to replies as frames: decode -> resolve -> admit or run -> encode.

Owns: the cache of known headers, valid for one generation of the live table. Every message gets exactly one reply.
Thread: the I/O thread; `_settle` also runs on workers, where it only encodes and posts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    DecodeFailed,
    Draining,
    EdgeRuntimeError,
    Forbidden,
    NotReady,
    RunFailed,
    Unsupported,
)
from edge_runtime.frontend.control_frontend import ControlFrontend
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import array_to_wire
from edge_runtime.transports.zmq_transport import Endpoint, Entry, Peer
from edge_runtime.wire import codec

log = logging.getLogger(__name__)

KEEP_FRAME_BYTES = 16 << 10
"""From here a tensor frame is kept uncopied until it is run, and dropped untouched when refused. Smaller frames may lie
unaligned inside libzmq's 8 KiB receive buffer, and copying them is cheaper than keeping them."""

CACHE_BYTES = 4 << 20
"""Bound of the header cache: 20 000 headers of 200 bytes."""

RESOLVE_TRIES = 8
"""A request whose version was swapped out meanwhile is resolved again; more swaps than this in a row is a bug."""


class InferRoute:
    """A header this daemon has seen before: its plan, and the requests gathered for it in one drain."""

    __slots__ = ("header", "keeps_frames", "lot", "plan", "single_size", "sizes")

    def __init__(self, header: bytes, plan: RequestPlan) -> None:
        self.header = header
        self.plan = plan
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


class _Ticket:
    """Where the outcome of one queued request goes, and in which form."""

    __slots__ = ("endpoint", "envelope", "is_json", "plan", "request_id")

    def __init__(
        self, endpoint: Endpoint, envelope: tuple[bytes, ...], request_id: Any, plan: RequestPlan, is_json: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.envelope = envelope
        self.request_id = request_id
        self.plan = plan
        self.is_json = is_json


class InferFrontend:
    """The receiver of every infer and control endpoint."""

    def __init__(self, servables: Servables, control: ControlFrontend, clock: Clock, metrics: Metrics) -> None:
        self._servables = servables
        self._control = control
        self._clock = clock
        self._metrics = metrics
        self._generation = -1
        self._routes: dict[bytes, InferRoute] = {}
        self._seen: set[int] = set()
        self._cached_bytes = 0
        self._is_draining = False

    def drain(self) -> None:
        """Refuse new requests from now on; what was admitted is answered."""
        self._is_draining = True
        self._routes = {}

    # ---- the transport's receiver -----------------------------------------------------------------------------------

    def routes(self) -> Mapping[bytes, InferRoute]:
        """Known headers; emptied when a version was published or withdrawn, so that a swap forces a new check."""
        if self._generation != self._servables.generation:
            self._generation = self._servables.generation
            self._routes, self._cached_bytes = {}, 0
            self._seen.clear()
        return self._routes

    def lot(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        """Answer requests of one known header: inline in batches, or one by one into the queue."""
        if route.plan.inline is not None:
            self._answer_inline(endpoint, route, entries)
        else:
            self._enqueue(endpoint, route, entries)

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> None:
        """Answer anything else: a header not seen before, another op, JSON, REQ, or what a hostile peer sends."""
        first = frames[0].bytes if len(frames[0]) <= codec.MAX_HEADER_BYTES or len(frames) == 1 else b""
        if len(frames) == 1 and first[:1] == b"{":
            self._json_message(endpoint, peer, first)
            return
        request_id = frames[1].bytes if len(frames) > 1 and len(frames[1]) <= codec.MAX_ID_BYTES else b""
        try:
            if len(frames[0]) > codec.MAX_HEADER_BYTES:
                raise DecodeFailed(
                    f"the header is {len(frames[0])} bytes; at most {codec.MAX_HEADER_BYTES} are read"
                )
            if len(frames) < 2:
                raise DecodeFailed("one frame that is no JSON object; wanted a header, an id, and a frame a tensor")
            if len(frames[1]) > codec.MAX_ID_BYTES:
                raise DecodeFailed(f"the id is {len(frames[1])} bytes; at most {codec.MAX_ID_BYTES} are echoed")
            self._binary_message(endpoint, peer, first, request_id, frames[2:])
        except EdgeRuntimeError as error:
            self._refuse(endpoint, peer.envelope, request_id, error)
        except Exception as error:
            log.exception("a message could not be answered otherwise")
            self._refuse(endpoint, peer.envelope, request_id, RunFailed(f"{type(error).__name__}: {error}"))

    # ---- known headers ----------------------------------------------------------------------------------------------

    def _answer_inline(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        plan = route.plan
        servable, cut, buffers = plan.servable, plan.inline, plan.servable.inline
        assert cut is not None
        assert buffers is not None
        now = self._clock.monotonic_s
        run_times = servable.scheduled.layout.run_times
        step = max(buffers.max_rows // plan.rows, 1)
        arrived_s = now()
        servable.used_s = arrived_s
        for start in range(0, len(entries), step):
            batch = entries if len(entries) <= step else entries[start : start + step]
            rows = len(batch) * plan.rows
            with servable.inline_lock:
                if not servable.is_open:
                    self._again(endpoint, route, entries[start:])
                    return
                started_s = now()
                if started_s + run_times.predict_s(rows) - arrived_s > plan.timeout_s:
                    run_times.relax()
                    late = DeadlineUnmeetable(f"a run takes longer than the timeout of {plan.timeout_s * 1e3:.3f} ms")
                    self._refuse_lot(endpoint, batch, late, servable.metrics)
                    continue
                try:
                    if len(plan.sizes) == 1:
                        buffers.run_single([entry[2] for entry in batch], rows)
                    else:
                        buffers.run([entry[2] for entry in batch], rows)
                except Exception as error:  # noqa: BLE001 (a failing run is an answer, never the I/O thread's end)
                    failed = error if isinstance(error, EdgeRuntimeError) else RunFailed(f"{error}")
                    self._refuse_lot(endpoint, batch, failed, servable.metrics)
                    continue
                finished_s = now()
                if len(cut.outputs) == 1:
                    index, row = cut.outputs[0]
                    payloads: Any = buffers.unpack(index, row, rows)
                else:
                    columns = (buffers.unpack(index, row, rows) for index, row in cut.outputs)
                    payloads = [tuple(part for (part,) in parts) for parts in zip(*columns, strict=True)]
            run_s = finished_s - started_s
            run_times.observe(rows, run_s)
            if finished_s - arrived_s > plan.timeout_s:
                self._refuse_lot(endpoint, batch, DeadlineExceeded("the run ended after the deadline"), servable.metrics)
                continue
            endpoint.answer_lot(batch, cut.header, payloads)
            servable.metrics.answered_batch(rows, len(batch), started_s - arrived_s, run_s)

    def _enqueue(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        plan = route.plan
        arrived_s = self._clock.monotonic_s()
        is_single = len(plan.sizes) == 1
        for index, (identity, request_id, data) in enumerate(entries):
            ticket = _Ticket(endpoint, (identity,), request_id, plan)
            try:
                self._submit(plan, ticket, (data,) if is_single else data, arrived_s)
            except Draining:
                self._again(endpoint, route, entries[index:])
                return
            except EdgeRuntimeError as error:
                plan.servable.metrics.refused(error.code)
                endpoint.send(ticket.envelope, (codec.pack_error(error), request_id))

    def _again(self, endpoint: Endpoint, route: InferRoute, entries: list[Entry]) -> None:
        """The servable was swapped out between look-up and use: resolve the same header against the live one."""
        for identity, request_id, data in entries:
            peer = Peer(identity, has_delimiter=False)
            try:
                self._resolve_and_submit(endpoint, peer, route.header, request_id, data if isinstance(data, tuple) else (data,))
            except EdgeRuntimeError as error:
                self._refuse(endpoint, peer.envelope, request_id, error)

    def _submit(self, plan: RequestPlan, ticket: _Ticket, frames: Sequence[Any], arrived_s: float) -> None:
        request = Pending(
            plan.arrays(frames), plan.rows, plan.nbytes, plan.shape, plan.priority, arrived_s, plan.timeout_s,
            self._settle, ticket,
        )  # fmt: skip
        plan.servable.submit(request)

    # ---- other messages ---------------------------------------------------------------------------------------------

    def _binary_message(
        self, endpoint: Endpoint, peer: Peer, header: bytes, request_id: bytes, frames: Sequence[Any]
    ) -> None:
        route = self._routes.get(header)
        if route is not None:
            route.plan.check_frames([len(frame) for frame in frames])
        else:
            decoded = codec.unpack_request(header)
            if decoded.op != "infer":
                self._op(endpoint, decoded, lambda result: self._reply_op(endpoint, peer, request_id, result))
                return
            self._refuse_when_draining()
        data = tuple(frame.bytes if len(frame) < KEEP_FRAME_BYTES else frame for frame in frames)
        self._resolve_and_submit(endpoint, peer, header, request_id, data)

    def _resolve_and_submit(
        self, endpoint: Endpoint, peer: Peer, header: bytes, request_id: bytes, frames: tuple[Any, ...]
    ) -> None:
        arrived_s = self._clock.monotonic_s()
        decoded = codec.unpack_request(header)
        for _ in range(RESOLVE_TRIES):
            plan = self._plan(header, decoded)
            plan.check_frames([len(frame) for frame in frames])
            ticket = _Ticket(endpoint, peer.envelope, request_id, plan)
            try:
                self._submit(plan, ticket, frames, arrived_s)
            except Draining:
                self._refuse_when_draining()
                continue
            return
        raise NotReady(f"model {decoded.model} is being replaced again and again")

    def _plan(self, header: bytes, decoded: codec.RequestHeader) -> RequestPlan:
        """The plan of a header, from the cache or made now; a header is kept when it is seen a second time."""
        route = self.routes().get(header)
        if route is not None:
            return route.plan
        plan = RequestPlan(self._servables.resolve(decoded.model, decoded.version), decoded)
        mark = hash(header)
        if mark in self._seen and self._cached_bytes + len(header) <= CACHE_BYTES:
            self._routes[header] = InferRoute(header, plan)
            self._cached_bytes += len(header)
        elif len(self._seen) < CACHE_BYTES // 256:
            self._seen.add(mark)
        else:
            self._seen.clear()
        return plan

    def _json_message(self, endpoint: Endpoint, peer: Peer, frame: bytes) -> None:
        request_id: Any = None
        try:
            request_id = codec.json_id(frame)
            request = codec.unpack_json_request(frame)
            if request.header.op != "infer":
                reply = _JsonOpReply(endpoint, peer, request_id)
                self._op(endpoint, request.header, reply)
                return
            self._refuse_when_draining()
            self._submit_json(endpoint, peer, request)
        except EdgeRuntimeError as error:
            self._count_refusal(error)
            endpoint.send(peer.envelope, (codec.pack_json_error(request_id, error),))
        except Exception as error:
            log.exception("a JSON message could not be answered otherwise")
            failed = RunFailed(f"{type(error).__name__}: {error}")
            endpoint.send(peer.envelope, (codec.pack_json_error(None, failed),))

    def _submit_json(self, endpoint: Endpoint, peer: Peer, request: codec.JsonRequest) -> None:
        header = request.header
        arrived_s = self._clock.monotonic_s()
        for _ in range(RESOLVE_TRIES):
            plan = RequestPlan(self._servables.resolve(header.model, header.version), header)
            arrays = [request.arrays[index] for index in plan.order]
            nbytes = sum(array.nbytes for array in arrays)
            ticket = _Ticket(endpoint, peer.envelope, request.id, plan, is_json=True)
            pending = Pending(
                arrays, plan.rows, nbytes, plan.shape, plan.priority, arrived_s, plan.timeout_s, self._settle, ticket
            )
            try:
                plan.servable.submit(pending)
            except Draining:
                self._refuse_when_draining()
                continue
            return
        raise NotReady(f"model {header.model} is being replaced again and again")

    def _op(self, endpoint: Endpoint, header: codec.RequestHeader, reply: Any) -> None:
        if header.op in ControlFrontend.CONTROL_OPS and not endpoint.is_control:
            raise Forbidden(f"{header.op} is answered on the control endpoint only")
        if header.op not in ControlFrontend.OPS:
            known = ", ".join(("infer", *sorted(ControlFrontend.OPS)))
            raise Unsupported(f"unknown op {header.op!r}; wanted one of {known}")
        self._control.answer(header, reply)

    def _refuse_when_draining(self) -> None:
        if self._is_draining:
            raise Draining("the daemon is stopping; send it again after its restart")

    # ---- replies ----------------------------------------------------------------------------------------------------

    def _settle(self, request: Pending, outcome: Outcome) -> None:
        """Encode one outcome and post it. Thread: whichever decided the request's fate."""
        ticket: _Ticket = request.tag  # type: ignore[assignment]
        plan = ticket.plan
        metrics = plan.servable.metrics
        if not isinstance(outcome, Answer):
            metrics.refused(outcome.code)
            ticket.endpoint.post(ticket.envelope, _error_frames(ticket, outcome))
            return
        selected = plan.select(outcome.outputs)
        timing = _timing(outcome) if plan.wants_timing else None
        if ticket.is_json:
            headers = plan.tensor_headers([array.shape for array in selected])
            outputs = list(zip(headers, selected, strict=True))
            servable = plan.servable
            frames: tuple[Any, ...] = (
                codec.pack_json_answer(ticket.request_id, servable.model, servable.number, outputs, timing),
            )
        else:
            tensors = (array_to_wire(array) for array in selected)
            frames = (plan.answer_header(selected, timing), ticket.request_id, *tensors)
        ticket.endpoint.post(ticket.envelope, frames)
        metrics.answered(outcome.queue_s, outcome.run_s)

    def _refuse(
        self, endpoint: Endpoint, envelope: Sequence[bytes], request_id: bytes, error: EdgeRuntimeError
    ) -> None:
        self._count_refusal(error)
        endpoint.send(envelope, (codec.pack_error(error), request_id))

    def _refuse_lot(self, endpoint: Endpoint, entries: list[Entry], error: EdgeRuntimeError, metrics: Any) -> None:
        packed = codec.pack_error(error)
        for identity, request_id, _ in entries:
            metrics.refused(error.code)
            endpoint.send((identity,), (packed, request_id))

    def _reply_op(self, endpoint: Endpoint, peer: Peer, request_id: bytes, result: Any) -> None:
        packed = codec.pack_error(result) if isinstance(result, EdgeRuntimeError) else codec.pack_result(result)
        endpoint.post(peer.envelope, (packed, request_id))

    def _count_refusal(self, error: EdgeRuntimeError) -> None:
        self._metrics.count(f"refused_{error.code}")


class _JsonOpReply:
    """Answers an op that came as JSON."""

    def __init__(self, endpoint: Endpoint, peer: Peer, request_id: Any) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._request_id = request_id

    def __call__(self, result: Any) -> None:
        is_error = isinstance(result, EdgeRuntimeError)
        pack = codec.pack_json_error if is_error else codec.pack_json_result
        self._endpoint.post(self._peer.envelope, (pack(self._request_id, result),))


def _error_frames(ticket: _Ticket, error: EdgeRuntimeError) -> tuple[Any, ...]:
    if ticket.is_json:
        return (codec.pack_json_error(ticket.request_id, error),)
    return (codec.pack_error(error), ticket.request_id)


def _timing(answer: Answer) -> dict[str, float]:
    return {
        "queue_ms": round(answer.queue_s * 1e3, 3),
        "run_ms": round(answer.run_s * 1e3, 3),
        "batch_rows": answer.batch_rows,
    }
