"""The dispatcher's memory of senders, bounded: whose request ended a host, and the cost of refusing each one.

Owns: `Culprits` of one model, whose requests run alone; `Refusals`, which are sent late to a sender that asks again at
once, so that they do not cost others their runs. A refusal is judged on the request's arrival; only its reply is held.
Knows no lock and no clock. Thread: under the dispatcher's lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from msgspec import Struct

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request import policy
from edge_runtime.request.request import Request

ALONE_S = 60.0
"""How long a culprit's requests run alone after its last death (issue 12: a minute)."""

FIRST_WAIT_S = 0.1
"""A culprit waits this long after its first death, about the time that the next host takes to load a small model."""

LONGEST_WAIT_S = 8.0
"""The wait doubles with each death, up to this: then the other senders lose some 2 % of their time to its deaths."""

MOST_CULPRITS = 1024
"""Beyond this the oldest is forgotten: a client may come back under as many names as it likes."""

MOST_HELD = 16_384
"""Held refusals in all: 8 MB at some 500 bytes each, for their tensors are dropped."""

MOST_HELD_OF_SENDER = 4096
"""Held refusals of one sender; more are sent at once."""

MOST_ACCOUNTS = 8192
"""Senders whose refusals are counted, one for each of their models; the one counted longest ago is forgotten."""


class Culprit(Struct):
    """One sender. until_s: it is forgotten then. not_before_s: its next request runs then; wait_s: that long a wait."""

    until_s: float
    not_before_s: float
    wait_s: float


class Culprits(dict[Hashable, Culprit]):
    """The culprits of one model, by sender."""

    def add(self, sender: Hashable, now_s: float) -> None:
        """A sender's request, alone in its host, has ended it."""
        known = self.pop(sender, None)
        is_again = known is not None and now_s < known.until_s
        wait_s = min(known.wait_s * 2, LONGEST_WAIT_S) if known is not None and is_again else FIRST_WAIT_S
        if len(self) >= MOST_CULPRITS:
            del self[next(iter(self))]
        self[sender] = Culprit(now_s + ALONE_S, now_s + wait_s, wait_s)

    def has(self, sender: Hashable, now_s: float) -> bool:
        """Whether a sender's requests run alone now."""
        known = self.get(sender)
        if known is None:
            return False
        if now_s >= known.until_s:
            del self[sender]
            return False
        return True

    def not_before_s(self, sender: Hashable) -> float:
        """The instant from which a sender's next request may run."""
        known = self.get(sender)
        return known.not_before_s if known is not None else 0.0


class Refusals:
    """Accounts of the cost of refusals, and those held."""

    def __init__(self) -> None:
        self._paid_until_s: dict[tuple[Hashable, str], float] = {}
        self._all_paid_until_s: dict[str, float] = {}
        self._held: list[tuple[float, int, Request, float]] = []
        self._held_of: dict[Hashable, int] = {}
        self._number = 0
        self._cost_s = policy.LEAST_REFUSAL_S
        self._late_s = policy.LEAST_REFUSAL_S

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Request, error: EdgeRuntimeError, now_s: float, least_s: float = 0.0) -> bool:
        """Hold a refusal whose sender's cost too much lately; False: send it now.

        A held request has `error` and no tensors, and `due` returns it in time. least_s: the least that it cost.
        """
        account = (request.sender, request.header.model)
        small_s = max(self._cost_s, least_s)
        cost_s = policy.refusal_cost_s(small_s, 0 if request.header.has_places else request.nbytes)
        charged_s = cost_s * self._price(request.header.model, now_s)
        paid_until_s = self._paid_until(account, now_s) + charged_s / policy.REFUSAL_SHARE
        self._keep(account, paid_until_s)
        retry_s = (error.retry_after_ms or 0.0) / 1e3
        until_s = policy.hold_refusal_until_s(paid_until_s, retry_s, request.deadline_s, now_s)
        held = self._held_of.get(request.sender, 0)
        if until_s <= now_s or held >= MOST_HELD_OF_SENDER or len(self._held) >= MOST_HELD:
            self._sent(request.header.model, cost_s, now_s)
            return False
        request.forget_tensors(error)
        self._keep(account, paid_until_s + self._late_s / policy.REFUSAL_SHARE)
        self._number += 1
        heappush(self._held, (until_s, self._number, request, now_s + retry_s))
        self._held_of[request.sender] = held + 1
        return True

    def pay(self, sender: Hashable, model: str, nbytes: int, count: int, now_s: float) -> int:
        """Count refusals of `count` requests of one header as far as they are sent now; return how many are.

        nbytes: copied for each, of its tensors. The others are for `hold`, which counts them.
        """
        account = (sender, model)
        cost_s = policy.refusal_cost_s(self._cost_s, nbytes)
        each_s = cost_s * self._price(model, now_s) / policy.REFUSAL_SHARE
        paid_until_s = self._paid_until(account, now_s)
        told = min(policy.refusals_told_now(paid_until_s, each_s, now_s), count)
        if told:
            self._keep(account, paid_until_s + told * each_s)
            self._sent(model, cost_s * told, now_s)
        return told

    def observe(self, cpu_s: float, count: int, nbytes: int) -> None:
        """Learn from `count` refusals, which took `cpu_s` of one core. nbytes: of all their tensors, copied."""
        self._cost_s = policy.learnt_refusal_s(self._cost_s, policy.small_refusals_s(cpu_s, nbytes), count)

    def observe_late(self, cpu_s: float, count: int) -> None:
        """Learn from `count` held refusals, whose sending took `cpu_s` of one core beside the cost of refusing."""
        self._late_s = policy.learnt_refusal_s(self._late_s, cpu_s, count)

    def next_s(self) -> float | None:
        """When the next one is due; None: none is held."""
        return self._held[0][0] if self._held else None

    def due(self, now_s: float) -> list[Request]:
        """Remove and return the requests whose refusal is to be sent now: `Request.complete` does it."""
        found: list[Request] = []
        while self._held and self._held[0][0] <= now_s:
            _, _, request, retry_at_s = heappop(self._held)
            found.append(self._released(request, retry_at_s, now_s))
        return found

    def remove_sender(self, sender: Hashable, now_s: float) -> list[Request]:
        """Remove and return a sender's."""
        if sender not in self._held_of:
            return []
        found = [self._released(entry[2], entry[3], now_s) for entry in self._held if entry[2].sender == sender]
        self._held = [entry for entry in self._held if entry[2].sender != sender]
        heapify(self._held)
        return found

    def _price(self, model: str, now_s: float) -> float:
        return policy.refusal_price(self._all_paid_until_s.get(model, now_s), now_s)

    def _sent(self, model: str, cost_s: float, now_s: float) -> None:
        """Count refusals that are sent now: of all senders together, so that each pays for the crowd."""
        most_s = now_s + policy.MOST_REFUSAL_PRICE * policy.REFUSAL_BURST_S
        paid_until_s = max(self._all_paid_until_s.pop(model, now_s), now_s) + cost_s / policy.REFUSALS_SHARE
        self._all_paid_until_s[model] = min(paid_until_s, most_s)
        if len(self._all_paid_until_s) > MOST_ACCOUNTS:
            del self._all_paid_until_s[next(iter(self._all_paid_until_s))]

    def _paid_until(self, account: tuple[Hashable, str], now_s: float) -> float:
        return max(self._paid_until_s.get(account, now_s), now_s)

    def _keep(self, account: tuple[Hashable, str], paid_until_s: float) -> None:
        self._paid_until_s.pop(account, None)  # the one counted last is forgotten last
        self._paid_until_s[account] = paid_until_s
        if len(self._paid_until_s) > MOST_ACCOUNTS:
            del self._paid_until_s[next(iter(self._paid_until_s))]

    def _released(self, request: Request, retry_at_s: float, now_s: float) -> Request:
        left = self._held_of[request.sender] - 1
        if left:
            self._held_of[request.sender] = left
        else:
            del self._held_of[request.sender]
        if request.error is not None and request.error.retry_after_ms is not None:
            # It was told too late, so the time to wait is over by as much.
            request.error.retry_after_ms = max(retry_at_s - now_s, 0.0) * 1e3
        return request
