"""When a reply that did not come may be called missing, and what its caller is told.

A process that was held up past a deadline (short of CPU, stopped, its loop busy) finds the clock run out and nothing
read: the reply lies in the kernel, and libzmq's thread has yet to run. So silence is believed only after further looks
(measured, after 1.2 s of SIGSTOP with 256 in flight: each such reply came 2 to 13 ms after its future had failed).
Does no I/O: `SecondLooks` is told the time, `acquire` waits for another thread. Called by link.py with its lock held,
by asyncio_client.py, and for MQTT by mqtt_link.py and mqtt_in_flight.py.
"""

from __future__ import annotations

import threading
from typing import Protocol

LOOK_S = 0.010
"""Between two looks: the time libzmq's thread gets to bring what came."""

LOOKS = 5
"""Looks after the first. Counted, not timed: whoever is held up again in between has still looked after that."""

HELD_UP_S = 0.050
"""Later than this for a deadline is worth a word: a machine that is merely busy wakes a thread sooner."""

ALWAYS_S = float("-inf")


class SecondLooks:
    """Decides up to which deadline replies are missing. One round at a time: a first look, then LOOKS further ones."""

    def __init__(self) -> None:
        self.due_s = ALWAYS_S
        """No look before this one counts."""
        self._first_s = ALWAYS_S
        self._left = 0

    def judge(self, now_s: float, earliest_s: float) -> float | None:
        """The time up to which deadlines are missed for good; None: look again at `due_s`.

        Call after a look that took every reply there was; earliest_s: the earliest deadline still without one. What
        became overdue after the round's first look is left to the next round.
        """
        if now_s < earliest_s:
            self._end()
            return None
        if not self._left:
            self._first_s, self._left = now_s, LOOKS
        elif now_s >= self.due_s:
            self._left -= 1
            if not self._left:
                self._end()
                return self._first_s
        else:
            return None
        self.due_s = now_s + LOOK_S
        return None

    def _end(self) -> None:
        self._left = 0
        self.due_s = ALWAYS_S


class Gate(Protocol):
    """A lock or semaphore that another thread opens."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See threading.Lock."""
        ...


def acquire(gate: Gate, limit_s: float) -> bool:
    """Wait so long for what another thread opens, then look LOOKS times more: it may have been held up as this one was.

    Whether it opened. limit_s: cut to what a thread can wait; below 0 it is 0.
    """
    is_open = gate.acquire(timeout=min(max(limit_s, 0.0), threading.TIMEOUT_MAX))
    return is_open or any(gate.acquire(timeout=LOOK_S) for _ in range(LOOKS))


def no_reply(endpoint: str, waited_s: float, behind_s: float = 0.0) -> TimeoutError:
    """What a caller is told when nothing came in time; behind_s: how late its own process first looked."""
    told = f"no reply from {endpoint} within {waited_s:.3f} s; the daemon is stuck, overloaded or gone: see "
    held_up = f" (this process was held up, too: it looked {behind_s:.2f} s late; is it short of CPU?)"
    return TimeoutError(f"{told}`edge-runtime status`{held_up if behind_s > HELD_UP_S else ''}")
