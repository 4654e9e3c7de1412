"""Steps that other threads want done on one thread, in order; whoever waits for one is told when that thread has ended.

Owns: the queue between them. Runs nothing itself, but before `begin`: then no thread is there to do it. Thread: any.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from edge_runtime.errors import Draining, EdgeRuntimeError

T = TypeVar("T")

Step = Callable[[], None]
Refuse = Callable[[EdgeRuntimeError], None]


@dataclass(frozen=True, slots=True)
class Order:
    """A step, which raises nothing that matters to others, and who is told when it will never be done."""

    step: Step
    refuse: Refuse


class Orders:
    """One thread's orders."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> None:
        """A thread takes orders from now on."""
        self._has_begun = True

    def end(self) -> None:
        """No thread takes them any more: what waits, and what comes, is refused. Idempotent."""
        self._has_ended = True
        self._refuse_all()

    def give(self, step: Step, refuse: Refuse = lambda _: None) -> None:
        """Have a step done; `refuse` is called instead when the thread has ended."""
        self._queue.put(Order(step, refuse))
        # Invariant: either `end` finds it in the queue, or this line sees that it has ended.
        if self._has_ended:
            self._refuse_all()

    def ask(self, step: Callable[[], T]) -> T:
        """Have a step done, and wait for what it returns or raises. Raises Draining: the thread has ended."""
        if not self._has_begun:
            return step()
        answer: Future[T] = Future()
        self.give(lambda: _fulfil(answer, step), answer.set_exception)
        return answer.result()

    def next(self, timeout_s: float) -> Step | None:
        """The next step; None when none came in time. Thread: the one that takes orders."""
        try:
            return self._queue.get(timeout=timeout_s).step
        except queue.Empty:
            return None

    def are_waiting(self) -> bool:
        """Whether there is a next one now."""
        return not self._queue.empty()

    def _refuse_all(self) -> None:
        while True:
            try:
                order = self._queue.get_nowait()
            except queue.Empty:
                return
            order.refuse(Draining("this daemon is stopping"))


def _fulfil(answer: Future[T], step: Callable[[], T]) -> None:
    try:
        answer.set_result(step())
    except Exception as error:  # noqa: BLE001 (it is raised again where it was asked for)
        answer.set_exception(error)
