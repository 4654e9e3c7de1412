"""Steps run in order on one thread; when it has ended, waiting and later ones are refused."""

from __future__ import annotations

import threading

import pytest

from edge_runtime.errors import Draining, LoadFailed
from edge_runtime.models.executor import Executor


def test_before_a_thread_takes_steps_a_step_runs_where_it_is_called():
    assert Executor().call(threading.get_ident) == threading.get_ident()


def test_a_step_runs_on_the_thread_that_takes_steps_and_its_result_or_error_comes_back():
    executor = Executor()
    executor.begin()

    def take():
        for _ in range(2):
            step = executor.next(30.0)
            step()

    def fail():
        raise LoadFailed("no")

    taker = threading.Thread(target=take)
    taker.start()
    assert executor.call(threading.get_ident) == taker.ident
    with pytest.raises(LoadFailed, match="no"):
        executor.call(fail)
    taker.join()


def test_a_step_that_waits_when_the_thread_ends_or_comes_after_is_refused():
    executor = Executor()
    executor.begin()
    refused = []
    executor.submit(lambda: refused.append("was done"), refused.append)
    executor.end()
    executor.submit(lambda: refused.append("was done"), refused.append)
    assert [type(error) for error in refused] == [Draining, Draining]
    with pytest.raises(Draining, match="stopping"):
        executor.call(list)


def test_no_step_in_time_is_none():
    assert Executor().next(0.0) is None
