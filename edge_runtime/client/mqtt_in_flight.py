"""The requests that wait for a device's replies: how many may, which are overdue, and how each one ends.

Owns: what is pending, and the slots that bound it. Sends and reads nothing: mqtt_link.py does, and tells it.

Invariant: whoever takes a request out of `_pending` ends it, and nobody else does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from edge_runtime.client.lateness import ALWAYS_S, acquire
from edge_runtime.client.mqtt_requests import Part, reply_parts
from edge_runtime.errors import QueueFull
from edge_runtime.transports.outbox import Outgoing

NEVER_S = math.inf

WITHDRAWN_S = -math.inf
"""A message that expired here is not sent any more: its caller has been told that it failed."""


class Asked:
    """One request in flight. When it has ended, exactly one of `payload` and `error` is set."""

    __slots__ = ("deadline_s", "decode", "error", "future", "gate", "message", "number", "payload", "topic", "wait_s")

    def __init__(self, topic: str, wait_s: float) -> None:
        self.topic = topic
        self.wait_s = wait_s
        self.deadline_s = NEVER_S  # until it is sent
        self.number = b""
        self.message: Outgoing | None = None
        self.payload = b""
        self.error: Exception | None = None
        self.gate: threading.Lock | None = None
        self.future: Future[Any] | None = None
        self.decode: Callable[[list[Part]], Any] | None = None


class InFlight:
    """Requests by number. Thread: any; a future's callbacks run on the thread that ends it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = threading.Semaphore(most)
        self._pending: dict[bytes, Asked] = {}
        self._looked_s = ALWAYS_S

    def take_slot(self, wait_s: float, may_wait: Callable[[], bool]) -> None:
        """Before a request is added. Raises TimeoutError after wait_s seconds, QueueFull for who may not wait."""
        if self._slots.acquire(blocking=False):
            return
        if not may_wait():
            raise QueueFull(
                f"{self._most} requests are in flight, as many as this client may have, and a future's "
                "callback cannot wait for one of them; submit from another thread or raise max_in_flight"
            )
        if not acquire(self._slots, wait_s):
            raise TimeoutError(
                f"{self._most} requests were in flight for {wait_s:.3f} s, as many as this client "
                "may have; raise max_in_flight, or ask less often"
            )

    def leave_slot(self) -> None:
        """A request is not added after all."""
        self._slots.release()

    def add(self, asked: Asked) -> None:
        """It is sent next; its number, message and deadline are set, and it has a slot."""
        self._pending[asked.number] = asked

    def answer(self, number: bytes, payload: bytes) -> None:
        """A reply came. One that nobody waits for is dropped: its caller gave up, or it came twice, as QoS 1 may."""
        asked = self._pending.pop(number, None)
        if asked is not None:
            asked.payload = payload
            self._end(asked)

    def messages(self) -> list[Outgoing]:
        """What was sent and is not answered yet."""
        return [asked.message for asked in list(self._pending.values()) if asked.message is not None]

    def give_up(self, asked: Asked) -> bool:
        """Its caller waits no longer. False when it has ended already."""
        if not self._take_back(asked):
            return False
        self._slots.release()
        return True

    def take_missed(self, now_s: float) -> list[Asked]:
        """Futures that were overdue at the last call already; each is to be ended by `fail`.

        Not those that became so since: a process that was held up finds the clock run out, and replies not read yet.
        """
        looked_s, self._looked_s = self._looked_s, now_s
        overdue = [asked for asked in list(self._pending.values()) if asked.deadline_s <= looked_s]
        return [asked for asked in overdue if asked.future is not None and self._take_back(asked)]

    def fail(self, asked: Asked, error: Exception) -> None:
        """End what was taken out."""
        asked.error = error
        self._end(asked)

    def fail_all(self, reason: str) -> None:
        """End everything with ConnectionError."""
        for asked in list(self._pending.values()):
            if self._take_back(asked):
                self.fail(asked, ConnectionError(reason))

    def _take_back(self, asked: Asked) -> bool:
        if self._pending.pop(asked.number, None) is None:
            return False
        assert asked.message is not None
        asked.message.expires_s = WITHDRAWN_S
        return True

    def _end(self, asked: Asked) -> None:
        """Tell who waits. Only for who took it out of `_pending`."""
        self._slots.release()
        if asked.gate is not None:
            asked.gate.release()
        else:
            _complete(asked)


def _complete(asked: Asked) -> None:
    """Give a future its result or error; its callbacks run here."""
    future, decode = asked.future, asked.decode
    assert future is not None
    assert decode is not None
    if not future.set_running_or_notify_cancel():
        return
    if asked.error is not None:
        future.set_exception(asked.error)
        return
    try:
        result = decode(reply_parts(asked.payload))
    except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to the future)
        future.set_exception(error)
    else:
        future.set_result(result)
