"""The requests that wait for one model, in the order in which they run.

Owns: the order, the shares of senders, and the sums that admission reads. Priorities come first. Inside one, senders
take turns: who got least goes next, and of equals the request that is due first. A sender's own requests go by
deadline. So a burst delays its own sender, and a sender alone is served by deadline as if there were no turns. Requests
of one `Line` run one at a time, in order of arrival.

Every step costs O(log n) in senders and requests; a removal in the middle of one sender's requests, or of the list of
senders, also moves that many pointers. Knows no lock, no clock and no model. Thread: under the dispatcher's lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from heapq import heappop, heappush
from typing import Protocol

from edge_runtime.errors import DeadlineExceeded, DecodeFailed, EdgeRuntimeError, SequenceLost, TensorMismatch
from edge_runtime.request import policy
from edge_runtime.request.request import Arrival, Request

KEPT_TURNS = 1024
"""Senders without a waiting request whose turn is remembered: more have just been served, and start level again."""

SIZES = 64
"""Shares are counted by the bits of their rows."""

Key = tuple[int, float, int, "Share"]
"""A share's place among those of its priority: its turn, when its first request is due, and that request's number."""


class Share(deque[Request]):
    """One sender's waiting requests of one priority, due first first.

    turn: rows that the sender was served while others waited. rows: of all its waiting requests.
    """

    __slots__ = ("key", "rows", "sender", "turn")

    key: Key

    def __init__(self, sender: Hashable, turn: int) -> None:
        super().__init__()
        self.sender = sender
        self.turn = turn
        self.rows = 0


class Tier:
    """The requests of one priority.

    rows: of all. most_rows: of one request, since the tier was last empty. unserved_since_s: when one was last taken,
    or the first came.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.rows = 0
        self.most_rows = 0
        self.unserved_since_s = 0.0
        self._turn = 0
        self._shares: dict[Hashable, Share] = {}
        self._order: list[Key] = []
        self._kept_turns: dict[Hashable, int] = {}
        self._of_size: list[dict[Hashable, Share]] = [{} for _ in range(SIZES)]
        self._rows_of_size = [0] * SIZES

    def __len__(self) -> int:
        return sum(len(share) for share in self._shares.values())

    def place(self, now_s: float) -> tuple[int, int]:
        """Where it stands among the priorities now, least first."""
        return policy.aged_priority(self.priority, self.unserved_since_s, now_s), self.priority

    def share_of(self, sender: Hashable) -> Share | None:
        """A sender's requests."""
        return self._shares.get(sender)

    def largest(self) -> Share | None:
        """A share with the most rows, within a factor of two."""
        return next((share for shares in reversed(self._of_size) for share in shares.values()), None)

    def in_order(self) -> Iterable[Request]:
        """The requests as they will run if nothing else comes."""
        order = self._order
        return order[0][3] if len(order) == 1 else self._by_turns()

    def _by_turns(self) -> Iterator[Request]:
        order, place = self._order, 0
        later: list[tuple[int, float, int, Share, int]] = []
        while True:
            if later and (place >= len(order) or later[0] < order[place]):
                turn, _, _, share, index = heappop(later)
            elif place < len(order):
                turn, _, _, share = order[place]
                index, place = 0, place + 1
            else:
                return
            request = share[index]
            yield request
            index += 1
            if index < len(share):
                following = share[index]
                heappush(later, (turn + request.rows, following.due_s, following.number, share, index))

    def rows_before(self, request: Request | Arrival, due_s: float) -> int:
        """Rows that run before a request that comes now: its sender's rows due before it, and the others' turns.

        Exact for requests of one row while each sender was served alike; else rather too many than too few.
        """
        order, share = self._order, self._shares.get(request.sender)
        own = 0
        if share is None:
            turn = max(self._turn, self._kept_turns.get(request.sender, 0))
        else:
            own = share.rows
            if due_s < share[-1].due_s:
                own = -(-own * bisect_right(share, due_s, key=_due_s) // len(share))
            turn = share.turn + own
        if len(order) == (share is not None):
            return own
        ahead = turn - order[0][0]
        if ahead <= 0:
            return own + bisect_left(order, (turn, due_s, math.inf)) * self.most_rows
        return own + self._rows_within(ahead + self.most_rows, share)

    def push(self, request: Request) -> None:
        """Add a request, whose due_s and number are set."""
        share = self._shares.get(request.sender)
        if share is None:
            if not self._shares:
                self.unserved_since_s, self.most_rows = request.arrived_s, 0
            turn = max(self._turn, self._kept_turns.pop(request.sender, 0))
            share = self._shares[request.sender] = Share(request.sender, turn)
            share.append(request)
            share.key = (turn, request.due_s, request.number, share)
            insort(self._order, share.key)
        elif request.due_s >= share[-1].due_s:
            share.append(request)
        else:
            insort(share, request, key=_due_s)
            if share[0] is request:
                self._move(share)
        request.share = share
        self.most_rows = max(self.most_rows, request.rows)
        self._resize(share, request.rows)

    def remove(self, request: Request, share: Share, runs_at_s: float | None) -> None:
        """Remove a request. runs_at_s: its sender's turn goes on, for it runs now; None: it does not run."""
        is_moved = runs_at_s is not None or share[0] is request
        if runs_at_s is not None:
            self.unserved_since_s = runs_at_s
            self._turn = max(self._turn, share.turn)
            share.turn += request.rows
        if share[0] is request:
            share.popleft()
        else:
            share.remove(request)
        request.share = None
        self._resize(share, -request.rows)
        if share:
            if is_moved:
                self._move(share)
            return
        # Of a share without requests the turn is kept, where it is ahead of the others'.
        del self._shares[share.sender]
        del self._order[bisect_left(self._order, share.key)]
        del share.key  # it holds the share
        if not self._shares:
            self._kept_turns.clear()
        elif share.turn > self._turn:
            if len(self._kept_turns) >= KEPT_TURNS:
                del self._kept_turns[next(iter(self._kept_turns))]
            self._kept_turns[share.sender] = share.turn

    def _move(self, share: Share) -> None:
        """Put a share in its place again after its turn or its first request changed."""
        order, first = self._order, share[0]
        key = (share.turn, first.due_s, first.number, share)
        if len(order) == 1:
            order[0] = key
        else:
            del order[bisect_left(order, share.key)]
            insort(order, key)
        share.key = key

    def _resize(self, share: Share, rows: int) -> None:
        before = share.rows
        share.rows = after = before + rows
        self.rows += rows
        old, new = before.bit_length(), after.bit_length()
        if old == new:
            self._rows_of_size[old] += rows
            return
        if before:
            del self._of_size[old][share.sender]
            self._rows_of_size[old] -= before
        if after:
            self._of_size[new][share.sender] = share
            self._rows_of_size[new] += after

    def _rows_within(self, bound: int, but: Share | None) -> int:
        """At most `bound` rows of each share but one. Never too few; exact where no share is about as long as that."""
        found = -min(but.rows, bound) if but is not None else 0
        for shares, rows in zip(self._of_size, self._rows_of_size, strict=True):
            if rows:
                found += min(rows, len(shares) * bound)
        return found


class RequestQueue:
    """Waiting requests of one model."""

    def __init__(self) -> None:
        self.rows = 0
        self.nbytes = 0
        self._number = 0
        self._tiers: dict[int, Tier] = {}
        self._deadlines: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers.values())

    def in_order(self, now_s: float, below: float = math.inf) -> Iterable[Request]:
        """Requests in the order in which they run if nothing else comes. Not to be changed meanwhile.

        below: those of smaller priorities alone, which are more urgent.
        """
        tiers = [tier for tier in self._tiers.values() if tier.rows and tier.priority < below]
        if len(tiers) == 1:
            return tiers[0].in_order()
        tiers.sort(key=lambda tier: tier.place(now_s))
        return (request for tier in tiers for request in tier.in_order())

    def by_deadline(self) -> Iterable[Request]:
        """Those that have a deadline, the earliest first."""
        return (entry[2] for entry in self._deadlines)

    def first_priority(self, now_s: float) -> int:
        """The priority of the request that runs next. Some request waits."""
        return min(tier.place(now_s)[0] for tier in self._tiers.values() if tier.rows)

    def rows_at(self, priority: int) -> int:
        """Rows waiting at this priority or a more urgent one."""
        return sum(tier.rows for tier in self._tiers.values() if tier.priority <= priority)

    def rows_before(self, request: Request | Arrival, now_s: float, batch_rows: int) -> int:
        """Rows that run before a request that would come now. batch_rows: the most in one run."""
        priority, rows = request.priority, 0
        for tier in self._tiers.values():
            if not tier.rows:
                continue
            if tier.priority == priority:
                rows += tier.rows_before(request, policy.due_s(request.arrived_s, request.deadline_s))
            elif tier.priority < priority:
                rows += tier.rows
            elif tier.place(now_s) < (priority, priority):
                rows += min(tier.rows, batch_rows)
        return rows

    def push(self, request: Request) -> None:
        """Add a request."""
        tier = self._tiers.get(request.priority)
        if tier is None:
            tier = self._tiers[request.priority] = Tier(request.priority)
        self._number = request.number = self._number + 1
        request.due_s = policy.due_s(request.arrived_s, request.deadline_s)
        tier.push(request)
        if request.deadline_s != math.inf:
            entry = (request.deadline_s, request.number, request)
            deadlines = self._deadlines
            if not deadlines or entry > deadlines[-1]:
                deadlines.append(entry)
            else:
                insort(deadlines, entry)
        self.rows += request.rows
        self.nbytes += request.nbytes

    def remove(self, requests: Iterable[Request], runs_at_s: float | None = None) -> None:
        """Remove requests; those that wait no longer are passed over. runs_at_s: they run now; None: without a run."""
        deadlines = self._deadlines
        for request in requests:
            if request.share is None:
                continue
            self._tiers[request.priority].remove(request, request.share, runs_at_s)
            self.rows -= request.rows
            self.nbytes -= request.nbytes
            if request.deadline_s != math.inf:
                entry = (request.deadline_s, request.number)
                del deadlines[0 if deadlines[0][2] is request else bisect_left(deadlines, entry)]

    def remove_sender(self, sender: Hashable) -> list[Request]:
        """Remove and return a sender's requests."""
        shares = [tier.share_of(sender) for tier in self._tiers.values()]
        found = [request for share in shares if share is not None for request in share]
        self.remove(found)
        return found

    def clear(self) -> list[Request]:
        """Remove and return everything."""
        everything = [request for tier in self._tiers.values() for request in tier.in_order()]
        self.remove(everything)
        return everything

    def one_in_the_way(self, request: Request | Arrival) -> Request | None:
        """The last request of a sender that has more waiting than this request's would have; None: there is none.

        Of its priority or a less urgent one.
        """
        for priority in sorted(self._tiers, reverse=True):
            if priority < request.priority:
                return None
            share = self._tiers[priority].largest()
            own = self._tiers[priority].share_of(request.sender)
            own_rows = own.rows if own is not None else 0
            if share is not None and share is not own and share.rows - share[-1].rows >= own_rows + request.rows:
                return share[-1]
        return None


class LineEnd(Enum):
    """How a request left its line. REFUSED: it did not run, or its answer was not given: as if it had not come."""

    COUNTED = "counted"
    FAILED = "failed"
    REFUSED = "refused"
    LOST = "lost"


class Line(Protocol):
    """Requests that run one at a time, in order of arrival: a batch has one of them at most."""

    @property
    def first(self) -> Request | None:
        """The request whose turn it is, waiting or running."""
        ...

    def join(self, request: Request) -> None:
        """Put a request behind all others; one that is there already stays where it is."""
        ...

    def why_not(self, request: Request) -> EdgeRuntimeError | None:
        """Return why a request whose turn it is cannot run; None: it can."""
        ...

    def begin(self, request: Request) -> None:
        """Hear that its run begins."""
        ...

    def leave(self, request: Request, end: LineEnd) -> None:
        """Take a request out, which has ended and runs no more; one that left before changes nothing."""
        ...


def in_turn(waiting: Iterable[Request], lost: list[Request]) -> Iterator[Request]:
    """Yield the waiting requests that may run now. lost: gets those that never can, with their error."""
    for request in waiting:
        line = request.line
        if line is None:
            yield request
        elif line.first is request:
            error = line.why_not(request)
            if error is None:
                yield request
            else:
                request.error = error
                lost.append(request)


def end_of(request: Request) -> LineEnd:
    """Return how a request leaves its line whose run has ended, by its error."""
    error = request.error
    if error is None:
        return LineEnd.COUNTED
    if isinstance(error, SequenceLost):
        return LineEnd.LOST
    # The caller's fault, as a host finds it: a picture that cannot be read, a snapshot of another model.
    is_refused = isinstance(error, DeadlineExceeded | DecodeFailed | TensorMismatch)
    return LineEnd.REFUSED if is_refused else LineEnd.FAILED


def _due_s(request: Request) -> float:
    return request.due_s
