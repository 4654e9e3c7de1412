"""MQTT names: what is a device's own, and where a reply may never go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.mqtt.topics import Address, DeviceTopics, check_prefix, check_reply_topic, is_id, reply_owner
from edge_runtime.errors import ConfigError, DecodeFailed, EdgeRuntimeError, Forbidden

TOPICS = DeviceTopics("dev1")
PREFIXES = TOPICS.reply_prefixes()


@pytest.mark.parametrize("text", ["a", "dev-1", "dev_1", "A" * 64, "0"])
def test_an_id_is_letters_digits_dash_and_underscore(text: str) -> None:
    assert is_id(text)


@pytest.mark.parametrize("text", ["", "a" * 65, "a/b", "+", "#", "a b", "dev1\n", "é", "a.b", "$SYS", "\x00"])
def test_anything_else_is_not_an_id(text: str) -> None:
    assert not is_id(text)


@pytest.mark.parametrize(
    ("topic", "address"),
    [
        ("edge/dev1/infer", Address()),
        ("edge/dev1/infer/digits", Address("digits")),
        ("edge/dev1/infer/digits/3", Address("digits", 3)),
        ("edge/dev1/infer/digits/9223372036854775807", Address("digits", (1 << 63) - 1)),
    ],
)
def test_a_topic_names_a_model_and_a_version(topic: str, address: Address) -> None:
    assert TOPICS.address(topic) == address
    assert TOPICS.infer(address.model, address.version) == topic


@pytest.mark.parametrize(
    "topic",
    [
        "edge/dev1/infer/", "edge/dev1/infer//1", "edge/dev1/infer/a/0", "edge/dev1/infer/a/x", "edge/dev1/infer/a/",
        "edge/dev1/infer/a/-1", "edge/dev1/infer/a/1/2", "edge/dev1/infer/a/9223372036854775808", "edge/dev1/inferno",
        "edge/dev1/infer/a/1\n", "edge/dev2/infer/a", "edge/dev1", "", "edge/dev1/infer/a/٣",
    ],
)  # fmt: skip
def test_another_topic_is_refused(topic: str) -> None:
    with pytest.raises(DecodeFailed):
        TOPICS.address(topic)


@pytest.mark.parametrize("topic", ["reply/me", "reply/a/b/c", "edge/dev1/reply/x", "reply//", "reply/ü"])
def test_a_reply_goes_below_an_allowed_prefix(topic: str) -> None:
    check_reply_topic(topic, PREFIXES)


@pytest.mark.parametrize(
    "topic",
    [
        "", "reply", "reply/", "replies/x", "edge/dev1/reply/", "edge/dev2/reply/x", "edge/dev1/infer/m", "x",
        "reply/+", "reply/#", "reply/a+b", "reply/a\x00", "reply/a\n", "reply/a\x7f", "reply/\ud800",
        "reply/" + "x" * 600,
    ],
)  # fmt: skip
def test_and_nowhere_else(topic: str) -> None:
    with pytest.raises(Forbidden):
        check_reply_topic(topic, PREFIXES)


@pytest.mark.parametrize(
    "topic",
    [
        "edge/dev2/command/check-update", "edge/dev2/infer/m", "edge/dev2/status", "edge/dev2/state", "edge/dev2/error",
        "edge/dev2/result/m", "fleet/all/wake", "$SYS/x", "$share/g/t",
    ],
)  # fmt: skip
def test_no_prefix_however_wide_lets_a_reply_speak_for_somebody_else(topic: str) -> None:
    with pytest.raises(Forbidden, match="no reply goes there"):
        check_reply_topic(topic, ("edge/", "fleet/", "$"))


@given(st.text(max_size=200))
def test_any_reply_topic_is_allowed_or_forbidden(topic: str) -> None:
    try:
        check_reply_topic(topic, PREFIXES)
    except Forbidden:
        return
    assert topic.startswith(PREFIXES)
    assert not set(topic) & set("+#\x00\n")


@given(st.text(max_size=200))
def test_any_topic_is_an_address_or_refused(topic: str) -> None:
    try:
        address = TOPICS.address(topic)
    except EdgeRuntimeError:
        return
    assert TOPICS.infer(address.model, address.version) == topic


@pytest.mark.parametrize(("given", "used"), [("edge", "edge"), ("site/line1/", "site/line1"), ("ü", "ü")])
def test_a_prefix_is_levels_without_a_slash_at_the_end(given: str, used: str) -> None:
    assert check_prefix("mqtt.prefix", given) == used


@pytest.mark.parametrize("given", ["", "/", "/a", "a//b", "a/+", "#", "$SYS", "a\x00", "x" * 300])
def test_a_prefix_that_makes_no_topics_is_refused_by_its_key(given: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.prefix"):
        check_prefix("mqtt.prefix", given)


@pytest.mark.parametrize(
    ("topic", "owner"),
    [
        ("reply/alice/17", "reply/alice"),
        ("reply/alice", "reply/alice"),
        ("reply/alice/door/17", "reply/alice"),
        ("edge/cam-7/reply/alice/17", "edge/cam-7/reply/alice"),
        ("reply/team-2/alice/1", "reply/team-2/alice"),
    ],
)
def test_a_reply_belongs_to_the_client_that_the_level_below_its_prefix_names(topic: str, owner: str) -> None:
    assert reply_owner(topic, ("reply/", "edge/cam-7/reply/", "reply/team-2/")) == owner
