"""Brings a request to a servable: resolve, admit, resolve again after a swap, or wait for a load on demand.

Owns: the order of these steps, and whether requests are taken. Every door calls it. Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

from edge_runtime.errors import DeadlineUnmeetable, Draining, EdgeRuntimeError, NotReady, QueueFull
from edge_runtime.messages import RequestHeader, SequenceStep
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.pending_loads import OnEnd, PendingLoads
from edge_runtime.models.servable import Servable
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.plan import RequestPlan, plan_request
from edge_runtime.request.policy import CHAIN_REFUSAL_S
from edge_runtime.request.request import Arrival, Request, UnansweredBytes, failure_of
from edge_runtime.telemetry.tracing import Tracer, log_fields_of
from edge_runtime.tensors import Array

RESOLVE_TRIES = 8
"""A request whose version was swapped out meanwhile is resolved again; more swaps than this in a row is a bug."""


class Infer:
    """Submits requests to the servables. tracer: decides which are traced; None without `[tracing]`."""

    def __init__(
        self,
        table: ModelTable,
        pending_loads: PendingLoads,
        dispatcher: Dispatcher,
        unanswered: UnansweredBytes | None = None,
    ) -> None:
        """dispatcher: where doors begin bursts. unanswered: counts the requests they hold; None: without a bound."""
        self.unanswered = unanswered or UnansweredBytes()
        self._table = table
        self.dispatcher = dispatcher
        self._pending_loads = pending_loads
        self._is_open = True
        self.tracer: Tracer | None = None

    def close(self) -> None:
        """Refuse new requests from now on; those admitted are answered, and held refusals are sent."""
        self._is_open = False
        self.dispatcher.tell_refusals()

    def drop(self, sender: Hashable) -> int:
        """Cancel requests of a sender that is gone that wait for a run, a load or a pipeline's next step; how many."""
        # Chains first: each answers once, and takes its steps out of the queues.
        servables = (*self._table.loaded(), *self._table.ending())
        chains = [each.chain for each in servables if each.chain is not None]
        return sum(chain.drop(sender) for chain in chains) + self.dispatcher.drop(sender)

    def foresee(self, servable: Servable, arrival: Arrival) -> None:
        """Raise Draining, or DeadlineUnmeetable, where a request whose tensors have not come would be refused now."""
        if not self._is_open:
            raise Draining("this daemon is stopping; send it again after its restart")
        self.dispatcher.foresee(servable.scheduled, arrival)

    def judge(self, plan: RequestPlan, arrival: Arrival) -> tuple[EdgeRuntimeError | None, bool]:
        """Return the error that refuses a request of a known header now, and whether that holds for more like it.

        None: `submit` decides. As `Dispatcher.judge`.
        """
        if not self._is_open:
            return None, False
        servable = plan.servable
        if plan.priority >= self.dispatcher.refuses_from and not plan.origin.is_check:
            hot = self.dispatcher.refusal_of_low(plan.priority)
            if hot is not None:
                return hot, True
        refusal, is_for_more = self.dispatcher.judge(servable.scheduled, arrival)
        if refusal is not None and not plan.origin.is_check:
            servable.used_s = arrival.arrived_s
        return refusal, is_for_more

    def submit(self, request: Request, plan: RequestPlan | None = None) -> RequestPlan | None:
        """Admit one request, let it wait for its model, or refuse it. Never raises.

        plan: its header's, where the door kept it; an old one costs another try. Returns the plan that it was admitted
        or refused by, for the door to keep; None when there is none.
        """
        header, is_at_home = request.header, False
        if self.tracer is not None and request.trace is None:
            self.tracer.begin(request)
        try:
            for _ in range(RESOLVE_TRIES):
                if not self._is_open and not request.is_step:
                    raise Draining("this daemon is stopping; send it again after its restart")
                kept = plan
                if request.sequence is not None:
                    plan = self._plan_at_home(request, request.sequence, plan)
                is_at_home = plan is not kept
                if plan is None:
                    try:
                        plan = plan_request(self._table, header, request.origin)
                    except NotReady:
                        is_coming = self._table.is_coming(header.model, header.version)
                        if is_coming and not request.origin.is_check:
                            self._wait(request)
                            return None
                        if self._table.is_answering(header.model, header.version):
                            continue  # its load ended between the two looks
                        raise
                chosen = plan if plan.canary is None else plan.turn()
                try:
                    if request.destinations:
                        chosen.check_destinations(request.destinations)
                    request.take(chosen, chosen.arrays(request.tensors))
                    if request.priority >= self.dispatcher.refuses_from:
                        self._check_heat(request)
                    chosen.servable.submit(request)
                except Draining:
                    plan = None
                    continue
                return None if is_at_home else plan  # others of its header go elsewhere
            raise NotReady(f"model {header.model} is being replaced again and again")
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            what = f"a request for model {header.model} could not be admitted"
            self._refuse(request, failure_of(error, what, log_fields_of((request,))))
        return None if is_at_home else plan

    def _plan_at_home(self, request: Request, step: SequenceStep, plan: RequestPlan | None) -> RequestPlan | None:
        """Return the plan of a request whose sequence runs on a certain version; else the plan as it is."""
        header = request.header
        home = self._table.home_of(header.model, header.version, step)
        if home is None or (plan is not None and plan.servable.sequences is home.sequences):
            return plan
        return RequestPlan(home, header, None, request.origin)

    def submit_burst(self, request: Request, plan: RequestPlan, inputs: Sequence[Array]) -> bool:
        """Admit a request that stands for many; False: it was not admitted, and each of them is to be submitted.

        inputs: of all, in a row. Never raises.
        """
        if not self._is_open:
            return False
        try:
            request.hold(self.unanswered, request.nbytes)
            request.take(plan, inputs)
            if request.priority >= self.dispatcher.refuses_from:
                self._check_heat(request)
            plan.servable.submit(request)
        except EdgeRuntimeError:
            request.let_go()
            return False
        except Exception as error:  # noqa: BLE001 (their clients' answer; failure_of logs it)
            request.refuse(failure_of(error, f"a burst for model {request.header.model} could not be admitted"))
        return True

    def _check_heat(self, request: Request) -> None:
        """Raise QueueFull for low work of a client while the device is too hot for any."""
        if request.is_step or request.origin.is_check:
            return
        if (hot := self.dispatcher.refusal_of_low(request.priority)) is not None:
            raise hot

    def _refuse(self, request: Request, error: EdgeRuntimeError) -> None:
        """Refuse at once, or later where a sender is refused all the time; a request without a plan has no deadline."""
        if request.plan is not None and isinstance(error, QueueFull | DeadlineUnmeetable) and not request.is_step:
            is_chain = request.plan.servable.chain is not None
            self.dispatcher.refuse(request, error, CHAIN_REFUSAL_S if is_chain else 0.0)
        else:
            request.refuse(error)

    def _wait(self, request: Request) -> None:
        self.await_model(
            request.header,
            partial(self._go_on, request),
            request.sender,
            nbytes=request.nbytes,
            arrived_s=request.arrived_s,
            longest_s=request.longest_s,
        )

    def await_model(
        self,
        header: RequestHeader,
        on_end: OnEnd,
        sender: Hashable,
        *,
        nbytes: int,
        arrived_s: float,
        longest_s: float = math.inf,
    ) -> None:
        """Call `on_end` once the load of a header's model has ended, which is coming. Raises as `PendingLoads.wait`."""
        self._pending_loads.wait(header, on_end, sender, nbytes=nbytes, arrived_s=arrived_s, longest_s=longest_s)
        if not self._table.ask_again(header.model, header.version):
            # The load ended between the look at the table and the wait.
            self._pending_loads.end(header.model, None)

    def _go_on(self, request: Request, error: EdgeRuntimeError | None) -> None:
        """Submit a request again whose model is loaded, or refuse it. Never raises."""
        if error is None:
            self.submit(request)
        else:
            request.refuse(error)
