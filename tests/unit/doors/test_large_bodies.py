"""Large bodies are read beside their door's thread, within a bound, and none is lost at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from edge_runtime.doors.large_bodies import LargeBodies
from edge_runtime.errors import QueueFull

ANSWER_S = 60.0


class DoorThread:
    """A door's thread that runs its calls when the test says so. taken: the results that it was handed."""

    def __init__(self, most_bytes: int = 100) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.bodies = LargeBodies("test-body", most_bytes)
        self.taken: list[str] = []

    def read(self, nbytes: int) -> None:
        self.bodies.read(nbytes, lambda: threading.current_thread().name, self.calls.put, self.taken.append)

    def run_call(self) -> None:
        self.calls.get(timeout=ANSWER_S)()


def test_a_body_is_read_by_the_helper_and_its_result_taken_by_the_doors_thread() -> None:
    door = DoorThread()
    door.read(1)
    call = door.calls.get(timeout=ANSWER_S)
    assert door.taken == []
    call()
    door.bodies.close()
    assert door.taken == ["test-body_0"]


def test_a_small_body_that_has_an_order_waits_for_those_before_it_and_they_for_none_after() -> None:
    door = DoorThread()
    earlier: list[bool] = []

    def take_in_order(name: str) -> None:
        earlier.append(door.bodies.has_earlier)
        door.taken.append(name)

    assert not door.bodies.has_earlier
    door.bodies.read(1, lambda: "large", door.calls.put, take_in_order)
    assert door.bodies.has_earlier
    door.bodies.behind(1, door.calls.put, lambda: take_in_order("small"))
    door.bodies.read(1, lambda: "large too", door.calls.put, take_in_order)
    for _ in range(3):
        door.run_call()
    door.bodies.close()
    assert door.taken == ["large", "small", "large too"]
    assert earlier == [False] * 3
    assert not door.bodies.has_earlier


def test_no_more_bytes_wait_than_the_bound_until_results_are_taken() -> None:
    door = DoorThread(most_bytes=100)
    door.read(60)
    door.read(40)
    with pytest.raises(QueueFull, match="too many large bodies"):
        door.read(1)
    door.run_call()
    door.read(60)
    with pytest.raises(QueueFull):
        door.read(1)
    door.bodies.close()


def test_the_end_waits_for_what_was_given_and_what_comes_then_is_read_at_once() -> None:
    door = DoorThread()
    for _ in range(5):
        door.read(1)
    door.bodies.close()
    door.bodies.close()
    assert door.calls.qsize() == 5
    door.read(1)
    assert door.taken == [threading.current_thread().name]
