"""How calls over MQTT end: each frees its slot once, and what failed is not sent any more. No broker, no real time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from edge_runtime.client.in_flight import Call, InFlight
from edge_runtime.doors.mqtt import link as mqtt_link
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.link import WITHDRAWN_S, MqttLink
from edge_runtime.doors.mqtt.packets import Inbound, Outgoing
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.errors import QueueFull
from edge_runtime.wire import codec
from tests.fakes.clock import FakeClock

REPLY_TOPIC = "reply/test/1"
EMPTY = codec.pack_array(b"\x80", [])


class ScriptedTransport:
    """Online from its start, on a thread of its own; keeps what is posted."""

    protocol = 5
    packet_limit = 1 << 20
    reason = ""

    def __init__(self, access: Any, options: Any, receiver: Any, *_: Any, **__: Any) -> None:
        self.access = access
        self.posted: list[Outgoing] = []
        self._receiver = receiver

    def start(self) -> None:
        threading.Thread(target=self._receiver.online).start()

    def post(self, message: Outgoing) -> None:
        self.posted.append(message)

    def close(self) -> None:
        pass


class InterruptedClock(FakeClock):
    """Runs `handler` once, where it is looked at next, as a signal would: `submit` looks while it holds the lock."""

    handler: Callable[[], None] | None = None

    def monotonic_s(self) -> float:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        return super().monotonic_s()


@pytest.fixture
def clock() -> InterruptedClock:
    return InterruptedClock(0.0)


@pytest.fixture
def link(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[MqttLink]:
    monkeypatch.setattr(mqtt_link, "MqttTransport", ScriptedTransport)
    link = MqttLink(
        broker_access(MqttSettings(url="mqtt://127.0.0.1")),
        "test",
        REPLY_TOPIC,
        DeviceTopics("d"),
        qos=0,
        in_flight=InFlight(4, looks=1),
        clock=clock,
    )
    yield link
    link.close()


def call(wait_s: float) -> Call:
    made = Call(b"\x80", (), wait_s, len)
    made.topic = "edge/d/infer/m"
    return made


def answer(link: MqttLink, calls: Sequence[Call]) -> None:
    link.messages(
        ScriptedTransport(None, None, None),  # type: ignore[arg-type]
        [Inbound(REPLY_TOPIC, EMPTY, 0, retain=False, correlation=each.number) for each in calls],
    )


def test_each_end_frees_one_slot_and_withdraws_what_has_no_answer(link: MqttLink, clock: FakeClock) -> None:
    answered, missed, lost, given_up = calls = [call(wait_s) for wait_s in (99.0, 10.0, 99.0, 0.0)]
    futures = [link.submit(each) for each in (answered, missed, lost)]
    with pytest.raises(TimeoutError, match="no reply from edge/d"):
        link.ask(given_up)
    answer(link, [answered])
    for now_s in (11.0, 12.0):
        clock.advance(now_s - clock.monotonic_s())
        link.beat()
    with pytest.raises(TimeoutError, match="no reply from edge/d"):
        futures[1].result(timeout=0)
    link.offline("the broker is gone")
    with pytest.raises(ConnectionError, match="the broker is gone"):
        futures[2].result(timeout=0)
    assert futures[0].result(timeout=0) == 2  # a header and an empty id
    assert [each.message is not None and each.message.expires_s == WITHDRAWN_S for each in calls] == [
        each is not answered for each in calls
    ]
    online = threading.Thread(target=link.online)
    online.start()
    online.join()
    for _ in calls:
        link.submit(call(99.0))
    link.online()  # from now this thread is the transport's, which may not wait
    with pytest.raises(QueueFull):
        link.submit(call(99.0))


def test_a_call_that_has_ended_cannot_be_ended_again(link: MqttLink) -> None:
    asked = call(10.0)
    future = link.submit(asked)
    answer(link, [asked, asked])  # again, as QoS 1 may
    link.offline("too late")
    assert future.result(timeout=0) == 2
    assert asked.message is not None
    assert asked.message.expires_s != WITHDRAWN_S


def test_a_handler_that_interrupts_its_threads_call_under_the_lock_may_close_but_not_ask(
    link: MqttLink, clock: InterruptedClock
) -> None:
    def handler() -> None:
        with pytest.raises(RuntimeError, match="in the middle of the same thread's call"):
            link.ask(call(0.0))
        link.close()  # a transport's close waits for its thread, and that for the lock

    clock.handler = handler
    future = link.submit(call(99.0))
    with pytest.raises(ConnectionError, match="closed before an answer"):
        future.result(timeout=10)
    assert clock.handler is None
