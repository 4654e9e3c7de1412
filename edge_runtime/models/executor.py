"""An executor: steps that other threads submit to one thread, in order.

Owns: the queue between them. Before `begin` there is no thread, and `call` runs a step where it is called. Thread: any.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from edge_runtime.errors import Draining, EdgeRuntimeError

T = TypeVar("T")

Step = Callable[[], None]
Refuse = Callable[[EdgeRuntimeError], None]


class Executor:
    """The steps of one thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Step, Refuse]] = queue.SimpleQueue()
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> None:
        """Declare that a thread takes steps from now on."""
        self._has_begun = True

    def end(self) -> None:
        """Declare that the thread takes no more steps: refuse those that wait, and those that come. Idempotent."""
        self._has_ended = True
        self._refuse_all()

    def submit(self, step: Step, refuse: Refuse = lambda _: None) -> None:
        """Queue a step, which handles its own errors. refuse: called instead when the thread has ended."""
        self._queue.put((step, refuse))
        # Invariant: either `end` finds it in the queue, or this line sees that it has ended.
        if self._has_ended:
            self._refuse_all()

    def wake(self) -> None:
        """Make `next` return, so that the thread looks at its other work."""
        self.submit(lambda: None)

    def call(self, step: Callable[[], T]) -> T:
        """Queue a step and wait; return or raise its result. Raises Draining: the thread has ended."""
        if not self._has_begun:
            return step()
        answer: Future[T] = Future()
        self.submit(lambda: _complete(answer, step), answer.set_exception)
        return answer.result()

    def next(self, timeout_s: float) -> Step | None:
        """Return the next step; None when none came in time. Thread: the one that takes steps."""
        try:
            step, _ = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return step

    def has_work(self) -> bool:
        """Whether a step waits now."""
        return not self._queue.empty()

    def _refuse_all(self) -> None:
        while True:
            try:
                _, refuse = self._queue.get_nowait()
            except queue.Empty:
                return
            refuse(Draining("this daemon is stopping"))


def _complete(answer: Future[T], step: Callable[[], T]) -> None:
    try:
        answer.set_result(step())
    except Exception as error:  # noqa: BLE001 (it is raised again in `call`)
        answer.set_exception(error)
