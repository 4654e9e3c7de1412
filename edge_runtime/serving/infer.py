"""The way of one request to a servable: resolve, admit, resolve again after a swap, or wait for a load on demand.

Owns: nothing but the order of these steps and whether the door is open; every transport and the in-process runtime go
through here. Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import Draining, EdgeRuntimeError, NotReady
from edge_runtime.scheduling.queue import Pending
from edge_runtime.serving.lobby import Guest, Lobby
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servables import Servables
from edge_runtime.wire.codec import RequestHeader

RESOLVE_TRIES = 8
"""A request whose version was swapped out meanwhile is resolved again; more swaps than this in a row is a bug."""


class Inquiry(Protocol):
    """One request on its way in, as its transport holds it."""

    @property
    def header(self) -> RequestHeader:
        """What it asks for."""
        ...

    @property
    def arrived_s(self) -> float:
        """When its deadline started."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def plan(self) -> RequestPlan:
        """Its header checked against the live servable. Raises RequestError, NotReady."""
        ...

    def request(self, plan: RequestPlan) -> Pending:
        """What the servable is to run. Raises TensorMismatch."""
        ...

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Answer it with an error. Thread: any."""
        ...

    def resume(self, enter: Callable[[], None]) -> None:
        """Call `enter` soon on the thread that `plan` and `request` are to be called on."""
        ...


class Infer:
    """The door to all servables."""

    def __init__(self, servables: Servables, lobby: Lobby) -> None:
        self._servables = servables
        self._lobby = lobby
        self._is_open = True

    def close(self) -> None:
        """Refuse newcomers from now on; what was admitted is answered."""
        self._is_open = False

    def submit(self, inquiry: Inquiry) -> None:
        """Admit one request, or let it wait for its model. Raises EdgeRuntimeError: refused at once."""
        header = inquiry.header
        for _ in range(RESOLVE_TRIES):
            if not self._is_open:
                raise Draining("this daemon is stopping; send it again after its restart")
            try:
                plan = inquiry.plan()
            except NotReady:
                if self._servables.is_coming(header.model, header.version):
                    self._wait(inquiry)
                    return
                if self._servables.is_answering(header.model, header.version):
                    continue  # its load ended between the two looks
                raise
            if plan.canary is not None:
                plan = plan.turn()
            try:
                plan.servable.submit(inquiry.request(plan))
            except Draining:
                continue
            return
        raise NotReady(f"model {header.model} is being replaced again and again")

    def submit_or_refuse(self, inquiry: Inquiry) -> None:
        """The same, with a refusal as the request's answer."""
        try:
            self.submit(inquiry)
        except EdgeRuntimeError as error:
            inquiry.refuse(error)

    def _wait(self, inquiry: Inquiry) -> None:
        header = inquiry.header
        self._lobby.wait(
            header.model,
            Guest(
                enter=lambda: inquiry.resume(lambda: self.submit_or_refuse(inquiry)),
                fail=inquiry.refuse,
            ),
            arrived_s=inquiry.arrived_s,
            timeout_s=math.inf if header.timeout_ms is None else header.timeout_ms / 1e3,
            nbytes=inquiry.nbytes,
            priority=header.priority or DEFAULT_PRIORITY,
        )
        if not self._servables.ask_again(header.model, header.version):
            # The load ended between the look at the table and the lobby's door.
            self._lobby.open(header.model, None)
