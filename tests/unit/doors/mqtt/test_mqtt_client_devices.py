"""The list of devices is made of retained messages, which anybody may have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.mqtt.client import Device, devices_told_by, state_topics, status_filter
from edge_runtime.doors.mqtt.packets import Inbound


def told(topic: str, payload: bytes) -> Inbound:
    return Inbound(topic, payload, 0, True)


def test_status_and_state_of_one_device_belong_together_in_whatever_order_they_come():
    status, state = told("edge/a/status", b"online"), told("edge/a/state", b'{"health": "ok"}')
    for messages in ([status, state], [state, status]):
        assert devices_told_by(messages, "edge") == [Device("a", "online", {"health": "ok"})]


def test_devices_come_by_id_and_the_last_word_counts():
    messages = [told("edge/b/status", b"online"), told("edge/a/status", b"offline"), told("edge/b/status", b"stopped")]
    assert devices_told_by(messages, "edge") == [Device("a", "offline"), Device("b", "stopped")]


def test_a_device_is_online_only_when_it_says_so():
    words = (b"online", b"stopped", b"offline", b"ONLINE", b"")
    devices = [devices_told_by([told("edge/a/status", word)], "edge")[0] for word in words]
    assert [device.is_online for device in devices] == [True, False, False, False, False]


@pytest.mark.parametrize("state", [b"", b"[1]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_a_state_that_cannot_be_read_is_none(state):
    messages = [told("edge/a/status", b"online"), told("edge/a/state", state)]
    assert devices_told_by(messages, "edge") == [Device("a", "online")]


@pytest.mark.parametrize(
    "topic",
    ["edge/a/b/status", "edge//status", "edge/a b/status", "edge/a", "edge", "other/a/status", "edgex/a/status"],
)
def test_a_topic_that_is_not_of_a_devices_status_names_no_device(topic):
    assert devices_told_by([told(topic, b"online")], "edge") == []


def test_a_prefix_of_several_levels_is_taken_off_whole():
    assert status_filter("site/line1") == "site/line1/+/status"
    assert state_topics(["a", "b"], "site/line1") == ["site/line1/a/state", "site/line1/b/state"]
    assert devices_told_by([told("site/line1/a/status", b"online")], "site/line1") == [Device("a", "online")]


@given(st.lists(st.tuples(st.text(max_size=30) | st.sampled_from(["edge/a/status", "edge/a/state"]), st.binary())))
def test_any_retained_messages_make_a_list(messages):
    for device in devices_told_by([told(*message) for message in messages], "edge"):
        assert device.device_id
        assert len(device.status) <= 32
