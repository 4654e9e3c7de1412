"""Steps are done in order on one thread, and whoever waits for one is told when that thread has ended."""

from __future__ import annotations

import threading

import pytest

from edge_runtime.errors import Draining, LoadFailed
from edge_runtime.serving.orders import Orders


def test_before_a_thread_takes_orders_a_step_is_done_where_it_is_asked_for():
    assert Orders().ask(threading.get_ident) == threading.get_ident()


def test_a_step_is_done_on_the_thread_that_takes_orders_and_gives_back_what_it_returns_or_raises():
    orders = Orders()
    orders.begin()

    def take():
        for _ in range(2):
            step = orders.next(30.0)
            step()

    def fail():
        raise LoadFailed("no")

    taker = threading.Thread(target=take)
    taker.start()
    assert orders.ask(threading.get_ident) == taker.ident
    with pytest.raises(LoadFailed, match="no"):
        orders.ask(fail)
    taker.join()


def test_what_waits_when_the_thread_ends_and_what_comes_after_is_refused():
    orders = Orders()
    orders.begin()
    refused = []
    orders.give(lambda: refused.append("was done"), refused.append)
    orders.end()
    orders.give(lambda: refused.append("was done"), refused.append)
    assert [type(error) for error in refused] == [Draining, Draining]
    with pytest.raises(Draining, match="stopping"):
        orders.ask(list)


def test_no_order_in_time_is_none():
    assert Orders().next(0.0) is None
