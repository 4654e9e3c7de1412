"""The answers of a language model that are under way: who begins, what each step is told, what goes to each caller.

Owns: the requests from their admission to their one end. Requests that wait for a slot lie in the dispatcher's queue,
with its bounds, turns and expiry; a step of the engine is an ordinary run, of the form STEP_FORM of the model's host,
so that cores and priorities are shared with every other model. One step is under way while anything is live, a second
waits in the host while short steps only write, and none when nothing is live. Which text a token makes is the host's;
when a request may begin is admission.py's.

Thread: any. What a step made is put in order under the lock, the next step is sent, and then one thread at a time tells
the callers. Invariant: each request has one end, by the delivery that ends it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmeetable,
    Draining,
    EdgeRuntimeError,
    LoadFailed,
    QueueFull,
    TensorMismatch,
)
from edge_runtime.language.admission import Forecast, Mean, StepRates, WaitingWork, Work
from edge_runtime.language.messages import (
    ORDERS,
    SEES,
    STEP_FORM,
    Begin,
    Orders,
    StepEvents,
    TextEvent,
    ToolCall,
    encoded,
    error_of,
    events_of,
)
from edge_runtime.language.parameters import Parameters, parameters_of
from edge_runtime.language.pictures import MOST_PICTURES, PICTURE_PARTS
from edge_runtime.language.settings import LanguageSettings
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.chains import OwnChain
from edge_runtime.models.servable import AskedModel
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.policy import ADMISSION_MARGIN
from edge_runtime.request.request import (
    STEP,
    CallbackReply,
    Request,
    StreamingReply,
    deadline_exceeded,
    failure_of,
)
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

WAITING_A_SLOT = 4
"""Requests that may wait for each slot, where `max_queue_rows` does not say: the last waits for four answers."""

STEP_LIMIT_S = 60.0
"""A step may last that long, where no limit is configured: one that reads a prompt takes many times one that does not,
so that the curve of those before would end it."""

MOST_AWAY = 1024
LONGEST_TURN_S = 30.0
"""Refused callers whose return is reckoned with, and for how long they are kept apart: some may never come again."""

SHORT_STEP_S = 0.05
"""Behind a shorter step that only writes, the next one waits in the host, which idles no more for the way to the daemon
and back; one that is new, or gone, waits a step longer."""

STEP_BYTES = 4096
"""The size of a step's request."""


class Prompt(NamedTuple):
    """A prompt with its bounds.

    kind: "text" or "chat". nbytes: of the text that the model reads. bound: most tokens that its request lets the
    answer have. pictures: how many it has, of a model that sees them.
    """

    kind: str
    data: bytes
    nbytes: int
    parameters: Parameters
    bound: int | None
    pictures: int = 0

    @property
    def first_token_s(self) -> float:
        """How long after its arrival the first token is due; math.inf: at no time."""
        given = self.parameters.first_token_ms
        return math.inf if given is None else given / 1e3


class _Stream(Struct, eq=False):
    """One answer under way.

    size: tokens of its prompt, a guess until they were counted. left: of them, those to be read. made: tokens of the
    answer so far. first_s: when the first of them came; before, when it began. is_sent: whether the host knows it.
    is_over: its end is on its way to its caller. texts, calls, scores: of an answer that is given whole.
    """

    id: int
    request: Request
    prompt: Prompt
    size: float
    left: float
    first_s: float
    made: int = 0
    is_sent: bool = False
    is_over: bool = False
    has_ended: bool = False
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)

    @property
    def first_due_s(self) -> float:
        """When the first token is due, until it is there."""
        return math.inf if self.made else self.request.arrived_s + self.prompt.first_token_s


class _Delivery(NamedTuple):
    """News for one caller: an event of its answer, or the error that ends it."""

    stream: _Stream
    event: TextEvent | None
    error: EdgeRuntimeError | None


def make_generation(parts: OwnChain) -> Generation:
    """Make the chain of a language model. Raises LoadFailed: its host has no steps."""
    return Generation(parts)


class Generation:
    """Answers the requests of one language model, as `ModelChain`."""

    def __init__(self, parts: OwnChain) -> None:
        step = parts.forms.get(STEP_FORM)
        if step is None:
            raise LoadFailed(f"the host of model {parts.model} has no form {STEP_FORM.kind!r}; wanted one run a step")
        settings = parts.settings.language or LanguageSettings()
        self._settings = settings
        self._model = parts.model
        self._scheduled = parts.scheduled
        self._dispatcher = parts.dispatcher
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._step_servable = step
        self._inputs = [spec.name for spec in parts.instance.spec.inputs]
        self._sees = any(spec.name == SEES for spec in step.spec.outputs)
        if parts.settings.max_queue_rows is None:
            self._scheduled.max_queue_rows = WAITING_A_SLOT * settings.max_streams
        step.scheduled.may_rerun = False  # what it knew is gone with its host
        if step.scheduled.layout.run_limit_s is None:
            step.scheduled.layout.run_limit_s = STEP_LIMIT_S
        self._header = RequestHeader(model=parts.model, inputs=(TensorHeader(ORDERS, "BYTES", (1,)),))
        self._plan = RequestPlan(step, self._header, None, STEP)
        self._plan.metrics = ModelMetrics()  # the model's count requests
        self._lock = threading.Lock()
        # Under the lock.
        self._rates = StepRates(settings.max_streams, settings.prefill_tokens)
        self._live: dict[int, _Stream] = {}
        self._of: dict[Request, _Stream] = {}
        self._cancels: list[int] = []
        self._ids = 0
        self._under_way = 0
        self._held: list[tuple[float, StepEvents]] = []  # made before those of the step before were here; when sent
        self._alarm_s = math.inf
        self._away: dict[Hashable, float] = {}  # when refused callers come again
        self._ended_s = 0.0
        self._deliveries: deque[_Delivery] = deque()
        self._is_delivering = False
        self._last = StepEvents()
        self._first_token_s = Mean()
        self._read = self._written = 0

    # ---- ModelChain --------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> Sequence[AskedModel]:
        """Return no models: its steps are its own host's."""
        return ()

    def fields(self) -> dict[str, Any]:
        """Return its bounds, and its numbers now, as metadata has them."""
        told: dict[str, Any] = {
            "max_streams": self._settings.max_streams,
            "prefill_tokens": self._settings.prefill_tokens,
            "pictures": MOST_PICTURES if self._sees else 0,
            "waiting": self._scheduled.queue.rows,
        }
        if self._last.context:  # else no step has told it
            told["context"] = self._last.context
        return {"language": told | {name: read() for name, read in self.gauges().items()}}

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return how its numbers are read. Thread: any."""
        rates = self._rates
        return {
            "streams": lambda: len(self._live),
            "kv_used_tokens": lambda: self._last.kv_used,
            "kv_total_tokens": lambda: self._last.kv_total,
            "prompt_tokens": lambda: self._read,
            "written_tokens": lambda: self._written,
            "prefill_tokens_s": lambda: round(1 / rates.prefill_s.mean, 1) if rates.prefill_s.mean else 0.0,
            "step_ms": lambda: round(rates.plain_step_s(max(len(self._live), 1)) * 1e3, 3),
            "first_token_ms": lambda: round(self._first_token_s.mean * 1e3, 3),
        }

    def submit(self, request: Request) -> None:
        """Begin an answer, or have it wait for a slot.

        Raises DecodeFailed, TensorMismatch: it is not a request of a language model; Draining, QueueFull,
        DeadlineUnmeetable: its first token, or its last, would be late.
        """
        prompt = self._read_request(request)
        scheduled, dispatcher = self._scheduled, self._dispatcher
        with self._lock:
            if self._sees:
                self._rates.observe_request(request.nbytes, prompt.nbytes, prompt.pictures)
            forecast = self._judge(request, prompt)
            begins = not scheduled.queue.rows and self._may_begin(request)
            if begins:
                dispatcher.begin_chain(scheduled)
                self._begin(request, prompt)
        if begins:
            self._step()
            self._watch_deadlines()
            return
        request.timeout_s = min(request.timeout_s, prompt.first_token_s)  # while it waits, that is due first
        request.deadline_s = request.arrived_s + request.timeout_s
        try:
            dispatcher.queue_chain(scheduled, request)
        except QueueFull as error:
            with self._lock:
                raise QueueFull(
                    error.message, retry_after_ms=self._retry_ms(request.sender, forecast.first_token_s)
                ) from None
        self._go_on()  # a slot may have become free meanwhile

    def cancel(self, request: Request) -> bool:
        """Refuse a request as cancelled, and free its slot with the next step; False: it was answered already."""
        if self._dispatcher.cancel(self._scheduled, request):
            return True
        with self._lock:
            stream = self._of.get(request)
            if stream is None:
                return False
            self._end(stream, Cancelled("cancelled by its caller"))
        self._go_on()
        return True

    def drop(self, sender: Hashable) -> int:
        """End the answers under way of a sender that is gone; how many."""
        with self._lock:
            found = [each for each in self._live.values() if each.request.sender == sender]
            for stream in found:
                self._end(stream, Cancelled("its sender is gone"))
        if found:
            self._go_on()
        return len(found)

    def end_all(self) -> None:
        """Refuse what is under way: the model is closed, and had its time."""
        with self._lock:
            for stream in list(self._live.values()):
                self._end(stream, Draining("stopped before this request was answered; send it again later"))
        self._deliver()

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _read_request(self, request: Request) -> Prompt:
        """Read what a request asks for. Raises DecodeFailed, TensorMismatch."""
        given = {name: array for name, array in zip(self._inputs, request.inputs, strict=True) if array.size}
        is_check = request.origin.is_check  # which sends every input
        if len(given) != 1 and not (given and is_check):
            raise TensorMismatch(
                f"model {self._model} got {' and '.join(given) or 'neither ' + ' nor '.join(self._inputs)}; wanted "
                f"exactly one of {' and '.join(self._inputs)}: a prompt as it is, or the JSON of a chat"
            )
        kind, array = next(iter(given.items()))
        element = array.reshape(-1)[0]
        data = element.encode() if isinstance(element, str) else bytes(element)
        parameters = parameters_of(request.header.parameters or {})
        if is_check:
            parameters = replace(parameters, max_tokens=1)
        bound = parameters.max_tokens or self._settings.max_tokens
        nbytes, pictures = _to_read(kind, data, sees=self._sees)
        return Prompt(kind, data, nbytes, parameters, bound, pictures)

    def _judge(self, request: Request, prompt: Prompt) -> Forecast:
        """Return when it would have its first token and its last. Raises DeadlineUnmeetable. Under the lock."""
        forecast = self._forecast(request, prompt)
        for what, forecast_s, timeout_s in (
            ("the first token", forecast.first_token_s, prompt.first_token_s),
            ("the whole answer", forecast.whole_s, request.timeout_s),
        ):
            if forecast_s > timeout_s * ADMISSION_MARGIN:
                if not self._live:
                    self._rates.relax()
                # A refusal that is held for a while is told before the first token was due.
                request.deadline_s = min(request.deadline_s, request.arrived_s + prompt.first_token_s)
                raise DeadlineUnmeetable(
                    f"forecast {forecast_s * 1e3:.1f} ms for {what}, timeout {timeout_s * 1e3:.1f} ms",
                    retry_after_ms=self._retry_ms(request.sender, forecast_s - timeout_s * ADMISSION_MARGIN),
                )
        return forecast

    def _retry_ms(self, sender: Hashable, room_s: float) -> float:
        """Return when a refused caller is to come again: behind those refused before it, not all at once.

        room_s: until there is room for it. Under the lock.
        """
        now_s, away = self._clock.monotonic_s(), self._away
        away.pop(sender, None)
        while away and (len(away) >= MOST_AWAY or next(iter(away.values())) <= now_s):
            del away[next(iter(away))]
        turn_s = self._rates.step_s(self._rates.slots) * self._rates.length(None) / self._rates.slots
        retry_s = max(room_s, 0.0) + min(len(away) * turn_s, LONGEST_TURN_S)
        away[sender] = now_s + retry_s
        return retry_s * 1e3

    def _forecast(self, request: Request, prompt: Prompt, *, is_first: bool = False) -> Forecast:
        """Forecast a request. is_first: it begins before all that wait. Under the lock."""
        rates, waiting = self._rates, WaitingWork()
        rates.heed_heat(is_slowed=self._dispatcher.is_slowed)
        if not is_first and self._scheduled.queue.rows:
            before, _, _ = self._dispatcher.chain_load(self._scheduled, (), request)
            rows, nbytes = self._dispatcher.queued(self._scheduled)
            share = min(before / rows, 1.0) if rows else 0.0
            tokens = before * rates.length(self._settings.max_tokens)
            waiting = rates.waiting_work(before, prompt.kind, nbytes * share, tokens)
        live = [Work(each.left, self._tokens_left(each), self._looking_s(each)) for each in self._live.values()]
        new = rates.work(prompt.kind, prompt.nbytes, prompt.pictures, rates.length(prompt.bound))
        return rates.forecast(live, waiting, new)

    def _looking_s(self, stream: _Stream) -> float:
        return 0.0 if stream.made else stream.prompt.pictures * self._rates.picture_s

    def _tokens_left(self, stream: _Stream) -> float:
        return self._rates.left(stream.prompt.bound, stream.made)

    def _may_begin(self, request: Request) -> bool:
        """Whether a slot is free, and room in the cache for what is likely. Under the lock."""
        if len(self._live) >= self._settings.max_streams:
            return False
        total = self._last.kv_total
        if not total or not self._live:
            return True
        rates = self._rates
        held = sum(each.size + each.made + self._tokens_left(each) for each in self._live.values())
        likely = rates.likely_tokens("text", request.nbytes) + rates.length(self._settings.max_tokens)
        return held + likely <= total

    def _begin(self, request: Request, prompt: Prompt) -> None:
        """Count a request as live; the next step tells the host. Under the lock."""
        self._ids += 1
        rates, nbytes = self._rates, prompt.nbytes
        seen = prompt.pictures * rates.picture_tokens
        size, left = rates.prompt_tokens(prompt.kind, nbytes) + seen, rates.to_read(prompt.kind, nbytes) + seen
        stream = _Stream(self._ids, request, prompt, size, left, self._clock.monotonic_s())
        self._live[stream.id] = self._of[request] = stream

    def _begin_waiting(self) -> list[Request]:
        """Begin what waits, as far as it may; return what expired, for the caller to refuse. Under the lock."""
        expired: list[Request] = []
        while self._scheduled.queue.rows:
            request, gone = self._dispatcher.next_chain(self._scheduled, self._may_begin)
            expired += gone
            if request is None:
                if gone:
                    continue
                break
            prompt = self._read_request(request)
            plan: RequestPlan = request.plan
            request.timeout_s = min(plan.timeout_s, request.longest_s)
            request.deadline_s = request.arrived_s + request.timeout_s
            self._begin(request, prompt)
            # Before it costs a step: what was forecast at its admission took longer.
            now_s, stream = self._clock.monotonic_s(), self._of[request]
            forecast = self._forecast(request, prompt, is_first=True)
            if now_s + forecast.first_token_s > stream.first_due_s or now_s + forecast.whole_s > request.deadline_s:
                self._end(stream, deadline_exceeded(request.arrived_s, request.timeout_s, now_s))
        return expired

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        """Have the timer look at the first instant at which an answer is overdue: a step may hang until its limit."""
        with self._lock:
            due_s = min(
                [min(each.first_due_s, each.request.deadline_s) for each in self._live.values()], default=math.inf
            )
            if due_s >= self._alarm_s and (self._live or self._alarm_s == math.inf):
                return  # it looks sooner, and then again
            self._alarm_s = due_s
        self._dispatcher.set_alarm(self._on_time, due_s)

    def _on_time(self) -> None:
        """End what is overdue. Thread: the timer's."""
        with self._lock:
            self._alarm_s = math.inf
            self._expire(self._clock.monotonic_s())
        self._go_on()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin what waits, send the next step, and tell callers what is new. Never raises."""
        with self._lock:
            expired = self._begin_waiting()
        now_s = self._clock.monotonic_s()
        for request in expired:
            request.refuse(deadline_exceeded(request.arrived_s, request.timeout_s, now_s))
        self._step()
        self._deliver()
        self._watch_deadlines()

    def _step(self) -> None:
        """Send the orders of the next steps, as far as there is anything to do. Never raises."""
        while (next_step := self._next_step()) is not None:
            self._ask(*next_step)

    def _next_step(self) -> tuple[Orders, int] | None:
        """Return the orders of a step that may be sent now, and its priority."""
        with self._lock:
            if not (self._live or self._cancels or self._last.wants_rest):
                return None
            if self._under_way and (self._under_way > 1 or not self._only_writes()):
                return None
            self._under_way += 1
            return self._orders()

    def _only_writes(self) -> bool:
        """Whether the next step is a short one, and begins and reads nothing. Under the lock."""
        is_short = 0.0 < self._rates.plain_step_s(len(self._live)) < SHORT_STEP_S
        return is_short and all(each.is_sent and not each.left for each in self._live.values())

    def _ask(self, orders: Orders, priority: int) -> None:
        """Have a step made. Never raises."""
        element: Array = np.empty(1, object)
        element[0] = encoded(orders)
        now_s = self._clock.monotonic_s()
        reply = CallbackReply(partial(self._stepped, now_s))
        # A sender of its own: that a step ended its host speaks against no other step.
        request = Request(self._header, (element,), STEP_BYTES, reply, object(), now_s, self._plan.metrics, STEP)
        request.take(self._plan, (element,))
        request.priority = priority
        try:
            self._step_servable.submit(request)
        except Exception as error:  # noqa: BLE001 (its callers' answer; failure_of logs it)
            self._stepped(now_s, failure_of(error, f"a step of model {self._model} could not be asked"))

    def _orders(self) -> tuple[Orders, int]:
        """Return the next step's orders and priority. Under the lock."""
        begins: list[Begin] = []
        live: list[int] = []
        priority = self._step_servable.settings.priority
        for stream in self._live.values():
            priority = min(priority, stream.request.priority) if begins or live else stream.request.priority
            if stream.is_sent:
                live.append(stream.id)
                continue
            stream.is_sent = True
            data, parameters = stream.prompt.data, stream.prompt.parameters
            is_text = stream.prompt.kind == self._inputs[0]
            begins.append(Begin(stream.id, data if is_text else None, None if is_text else data, parameters))
        cancels, self._cancels = tuple(self._cancels), []
        return Orders(tuple(begins), cancels, tuple(live)), priority

    def _stepped(self, sent_s: float, result: Request | EdgeRuntimeError) -> None:
        """Take what a step made. Never raises. Thread: whichever ends it."""
        try:
            events = result if isinstance(result, EdgeRuntimeError) else events_of(result.outputs[0].reshape(-1)[0])
        except Exception as error:  # noqa: BLE001 (as above)
            events = failure_of(error, f"what a step of model {self._model} made cannot be read")
        with self._lock:
            self._under_way -= 1
            now_s = self._clock.monotonic_s()
            if isinstance(events, EdgeRuntimeError):
                self._lose(events)
            else:
                self._held.append((sent_s, events))
            if self._held and (not self._under_way or self._held[-1][1].number <= self._last.number + 1):
                for began_s, made in sorted(self._held, key=lambda each: each[1].number):
                    self._take(made, began_s, now_s)
                self._held.clear()
            self._expire(now_s)
        self._go_on()

    def _lose(self, error: EdgeRuntimeError) -> None:
        """End every answer that the host knows: with this step, all that it had of them is gone."""
        self._last = replace(self._last, kv_used=0, wants_rest=False)
        for stream in [each for each in self._live.values() if each.is_sent]:
            self._end(stream, error)

    def _take(self, step: StepEvents, sent_s: float, now_s: float) -> None:
        """Learn from a step, and have its events delivered. Under the lock."""
        self._last = step
        took_s, self._ended_s = now_s - max(sent_s, self._ended_s), now_s
        self._rates.heed_heat(is_slowed=self._dispatcher.is_slowed)
        self._rates.observe_step(max(0.0, took_s - step.looked_s), step.decode_tokens, step.prefill_tokens)
        self._rates.observe_picture(step.picture_tokens, step.picture_s)
        self._read += step.prefill_tokens
        self._written += step.decode_tokens
        for event in step.events:
            stream = self._live.get(event.id)
            if stream is None:
                continue  # it ended meanwhile
            if event.code:
                self._forget(stream, is_known=False)
                self._deliveries.append(_Delivery(stream, None, error_of(event)))
                continue
            if now_s > min(stream.first_due_s, stream.request.deadline_s):
                continue  # too late, and ended as that
            self._note(stream, event, now_s)
            self._deliveries.append(_Delivery(stream, event, None))

    def _note(self, stream: _Stream, event: TextEvent, now_s: float) -> None:
        """Keep what an event says of its answer. Under the lock."""
        rates = self._rates
        if event.prompt_tokens and not stream.made:
            text = max(event.prompt_tokens - stream.prompt.pictures * rates.picture_tokens, 1.0)
            cached = text * event.cached_tokens / event.prompt_tokens
            rates.observe_prompt(stream.prompt.kind, stream.prompt.nbytes, text, cached)
            stream.size, stream.left = float(event.prompt_tokens), 0.0
        if event.completion_tokens and not stream.made:
            stream.first_s = now_s
            self._first_token_s.observe(now_s - stream.request.arrived_s)
        stream.made = event.completion_tokens
        if event.finish_reason:
            if not stream.request.origin.is_check:
                rates.observe_length(event.completion_tokens)
            self._forget(stream, is_known=False)

    def _expire(self, now_s: float) -> None:
        """End the answers whose first token or whose end is overdue. Under the lock."""
        for stream in list(self._live.values()):
            request = stream.request
            if now_s > request.deadline_s:
                self._end(stream, deadline_exceeded(request.arrived_s, request.timeout_s, now_s))
            elif now_s > stream.first_due_s:
                self._end(stream, _first_token_late(stream, now_s))

    def _end(self, stream: _Stream, error: EdgeRuntimeError) -> None:
        """Have an answer end with an error, and its slot freed. Under the lock."""
        if stream.is_over:
            return
        self._forget(stream, is_known=stream.is_sent)
        self._deliveries.append(_Delivery(stream, None, error))

    def _forget(self, stream: _Stream, *, is_known: bool) -> None:
        """Count an answer as live no more. is_known: the host has it still. Under the lock."""
        stream.is_over = True
        del self._live[stream.id], self._of[stream.request]
        if is_known:
            self._cancels.append(stream.id)

    # ---- callers -----------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Tell callers what is new, in order. Returns at once where another call does it. Never raises."""
        with self._lock:
            if self._is_delivering:
                return
            self._is_delivering = True
        while True:
            with self._lock:
                if not self._deliveries:
                    self._is_delivering = False
                    return
                stream, event, error = self._deliveries.popleft()
            if stream.has_ended:
                continue
            try:
                if event is not None:
                    self._tell(stream, event)
            except Exception as failed:  # noqa: BLE001 (its caller's answer; failure_of logs it)
                error = failure_of(failed, f"a part of an answer of model {self._model} could not be given")
                with self._lock:
                    if not stream.is_over:
                        self._forget(stream, is_known=True)
            if error is not None:
                self._refuse(stream, error)

    def _tell(self, stream: _Stream, event: TextEvent) -> None:
        """Give one event to its caller: a part, or the end. Raises what the reply raises at a part."""
        request = stream.request
        is_last, calls = bool(event.finish_reason), list(event.tool_calls)
        if not isinstance(request.reply, StreamingReply):
            stream.texts.append(event.text)
            stream.calls += calls
            stream.scores += event.logprobs
            if is_last:
                outputs = _outputs("".join(stream.texts), stream.calls, stream.scores, event)
                self._answer(stream, outputs)
            return
        # Each call is a part of its own; what comes last goes with the end.
        pieces: list[tuple[str, Sequence[ToolCall], Sequence[Any]]] = [("", (call,), ()) for call in calls]
        if event.text or event.logprobs or not pieces:
            pieces.insert(0, (event.text, (), event.logprobs))
        end = pieces.pop() if is_last else None
        for piece in pieces:
            if any(piece):
                request.outputs = _outputs(*piece, None)
                request.reply.part(request)
        if end is not None:
            self._answer(stream, _outputs(*end, event))

    def _answer(self, stream: _Stream, outputs: list[Array]) -> None:
        request = stream.request
        stream.has_ended = True
        now_s = self._clock.monotonic_s()
        request.outputs = outputs
        request.queue_s, request.run_s = stream.first_s - request.arrived_s, now_s - stream.first_s
        request.batch_rows = 1
        request.error = None
        request.complete()
        self._dispatcher.end_chain(self._scheduled, 0.0)

    def _refuse(self, stream: _Stream, error: EdgeRuntimeError) -> None:
        stream.has_ended = True
        stream.request.refuse(error)
        self._dispatcher.end_chain(self._scheduled, 0.0)


class _Guide(Struct):
    """The part of a chat that guides its answer; the model does not read it."""

    response_format: msgspec.Raw = msgspec.Raw()


class _SeenMessage(Struct):
    content: Any = None


class _SeeingGuide(_Guide):
    """The same, with what may have pictures."""

    messages: list[_SeenMessage] = field(default_factory=list)


_guide = msgspec.json.Decoder(_Guide)
_seen = msgspec.json.Decoder(_SeeingGuide)


def _to_read(kind: str, data: bytes, *, sees: bool) -> tuple[int, int]:
    """Return about how many bytes of a prompt become tokens, and how many pictures it has. sees: whether any count."""
    if kind != "chat":
        return len(data), 0
    try:
        if not sees:
            return len(data) - len(_guide.decode(data).response_format), 0
        chat = _seen.decode(data)
    except msgspec.DecodeError:  # the host says what is wrong in it
        return len(data), 0
    parts = [part for each in chat.messages if isinstance(each.content, list) for part in each.content]
    pictures = [part for part in parts if isinstance(part, dict) and part.get("type") in PICTURE_PARTS]
    nbytes = len(data) - len(chat.response_format) - sum(map(_url_bytes, pictures))
    return max(nbytes, 1), min(len(pictures), MOST_PICTURES)


def _url_bytes(part: dict[str, Any]) -> int:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    return len(url) if isinstance(url, str) else 0


def _first_token_late(stream: _Stream, now_s: float) -> DeadlineExceeded:
    waited_s = now_s - stream.request.arrived_s
    return DeadlineExceeded(
        f"Request timeout expired: no token after {waited_s * 1e3:.1f} ms, the first was due after "
        f"{stream.prompt.first_token_s * 1e3:.1f} ms"
    )


def _outputs(text: str, calls: Sequence[ToolCall], scores: Sequence[Any], last: TextEvent | None) -> list[Array]:
    """Return the outputs of a part, or with the last event of an answer."""
    usage = _NO_USAGE
    if last is not None:
        usage = np.array([last.prompt_tokens, last.completion_tokens, last.cached_tokens], np.int32)
    return [
        _element(text.encode()) if text else _NO_TEXT,
        _element(last.finish_reason.encode()) if last is not None else _NO_TEXT,
        usage,
        _element(msgspec.json.encode(calls)) if calls else _EMPTY,
        _element(msgspec.json.encode(scores)) if scores else _EMPTY,
    ]


def _element(data: bytes) -> Array:
    array: Array = np.empty(1, object)
    array[0] = data
    return array


_NO_TEXT, _EMPTY, _NO_USAGE = _element(b""), _element(b"[]"), np.zeros(3, np.int32)
