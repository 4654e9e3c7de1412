"""Listing every device behind a broker, whole or not at all, as far as a broker lets that be known.

Owns: in which portions what is retained is asked for, and who shares an answer. MQTT has no pages: a broker sends all
that a filter matches in one burst, and mosquitto drops, without a word to anybody, what its kernel does not take and
its queue (`max_queued_messages`) has no room for. So statuses, of some fifty bytes each, come in one burst, and states,
which are a hundred times as large, by name and few at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from edge_runtime.client.devices import Device, devices_told_by, state_topics, status_filter
from edge_runtime.transports.mqtt_packets import Inbound

STATES_AT_ONCE = 100
"""The queue of a mosquitto that nobody configured was 100 messages before version 2, is 1 000 since, and is 200 in
deploy/broker: so many never meet a limit."""

LOOKS = 4
"""Two looks in a row must show the same devices; so many are taken at most."""


class DeviceListing:
    """The devices under a prefix. `retained`: what a broker retains under filters. Thread: any.

    One listing runs at a time; whoever comes meanwhile waits for the next, and all who wait share that one.
    """

    def __init__(self, retained: Callable[[Sequence[str]], list[Inbound]], prefix: str) -> None:
        self._retained = retained
        self._prefix = prefix
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._next: Future[list[Device]] | None = None

    def devices(self) -> list[Device]:
        """By id, as retained at some time since the call. Raises what `retained` does, ConnectionError if it drops."""
        with self._lock:
            shared, is_mine = self._next, self._next is None
            if shared is None:
                shared = self._next = Future()
        if is_mine:
            self._list_into(shared)
        return list(shared.result())

    def _list_into(self, shared: Future[list[Device]]) -> None:
        """Invariant: however this ends, the future has ended too, and nobody new waits for it."""
        try:
            with self._running:
                self._take_off(shared)
                listed = self._listed()
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to all who wait)
            shared.set_exception(error)
        except BaseException:  # KeyboardInterrupt, which is this thread's alone
            self._take_off(shared)
            shared.set_exception(ConnectionError("the thread that listed devices for this one too was interrupted"))
            raise
        else:
            shared.set_result(listed)

    def _take_off(self, shared: Future[list[Device]]) -> None:
        with self._lock:
            if self._next is shared:
                self._next = None

    def _listed(self) -> list[Device]:
        told = self._statuses()
        found = [device.device_id for device in devices_told_by(told, self._prefix)]
        for begin in range(0, len(found), STATES_AT_ONCE):
            told += self._retained(state_topics(found[begin : begin + STATES_AT_ONCE], self._prefix))
        return devices_told_by(told, self._prefix)

    def _statuses(self) -> list[Inbound]:
        told = self._retained((status_filter(self._prefix),))
        for _ in range(LOOKS - 1):
            if len(told) < STATES_AT_ONCE:
                return told
            before, told = told, self._retained((status_filter(self._prefix),))
            if {message.topic for message in before} == {message.topic for message in told}:
                return told
        raise ConnectionError(
            f"{LOOKS} looks at what the broker retains under {status_filter(self._prefix)} all showed other devices, "
            f"{len(told)} in the last: it drops messages because this client reads too slowly for so many; raise its "
            "max_queued_messages, or give parts of the fleet prefixes of their own"
        )
