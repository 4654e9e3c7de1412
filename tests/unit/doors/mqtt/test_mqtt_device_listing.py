"""A list of devices is whole, or an error: what is asked of a broker, and what becomes of its answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_runtime.doors.mqtt.client import LISTINGS, STATES_AT_ONCE, DeviceListing
from edge_runtime.doors.mqtt.packets import Inbound

FLEET = [f"d{index:04}" for index in range(250)]


class DroppingBroker:
    """Retains the statuses and states of FLEET. takes: how many statuses each look brings, the last for ever."""

    def __init__(self, *takes: int) -> None:
        self.asked: list[Sequence[str]] = []
        self.most_at_once = 0
        self._takes = list(takes)
        self._at_once = 0
        self._lock = threading.Lock()

    def retained(self, filters: Sequence[str], _limit_s: float) -> list[Inbound]:
        with self._lock:
            self.asked.append(filters)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if filters != ("edge/+/status",):
                return [Inbound(topic, b"{}", 0, retain=True) for topic in filters]
            count = self._takes.pop(0) if len(self._takes) > 1 else self._takes[0]
            return [Inbound(f"edge/{device}/status", b"online", 0, retain=True) for device in FLEET[:count]]
        finally:
            with self._lock:
                self._at_once -= 1


def test_states_are_asked_for_by_name_and_few_at_a_time():
    broker = DroppingBroker(250)
    found = DeviceListing(broker, "edge").devices()
    assert [device.device_id for device in found] == FLEET
    assert all(device.state == {} for device in found)
    portions = [filters for filters in broker.asked if filters != ("edge/+/status",)]
    assert [len(portion) for portion in portions] == [100, 100, 50]
    assert portions[0][0] == "edge/d0000/state"


def test_a_few_devices_are_looked_at_once():
    broker = DroppingBroker(STATES_AT_ONCE - 1)
    DeviceListing(broker, "edge").devices()
    assert broker.asked.count(("edge/+/status",)) == 1


def test_a_short_look_is_repeated_until_two_agree():
    assert len(DeviceListing(DroppingBroker(120, 180, 250), "edge").devices()) == 250


def test_looks_that_never_agree_are_an_error_and_no_short_list():
    broker = DroppingBroker(*range(130, 130 + LISTINGS))
    with pytest.raises(ConnectionError, match=r"drops messages .* max_queued_messages"):
        DeviceListing(broker, "edge").devices()


def test_one_listing_runs_at_a_time_and_all_who_ask_get_it_whole():
    broker = DroppingBroker(250)
    listing, start = DeviceListing(broker, "edge"), threading.Barrier(8)

    def ask(_: int) -> int:
        start.wait()
        return len(listing.devices())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {250}
    assert broker.most_at_once == 1


def test_an_interrupt_is_its_own_threads_and_the_next_asks_again():
    class Interrupted(DroppingBroker):
        def retained(self, filters: Sequence[str], limit_s: float) -> list[Inbound]:
            if not self.asked:
                self.asked.append(filters)
                raise KeyboardInterrupt
            return super().retained(filters, limit_s)

    listing = DeviceListing(Interrupted(250), "edge")
    with pytest.raises(KeyboardInterrupt):
        listing.devices()
    assert len(listing.devices()) == 250


def test_those_who_wait_share_the_error_too_and_the_next_asks_again():
    broker = DroppingBroker(130, 140, 150, 160, 250)
    listing = DeviceListing(broker, "edge")
    with pytest.raises(ConnectionError):
        listing.devices()
    assert len(listing.devices()) == 250
