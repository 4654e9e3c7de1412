"""Which broker is meant: URLs, settings, and the device they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.doors.mqtt.broker import BrokerAddress, broker_access, is_broker_url, parse_broker_url
from edge_runtime.doors.mqtt.identity import check_groups, device_topics, id_from_hostname, reply_prefixes
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtt://broker", BrokerAddress("broker", 1883, is_tls=False)),
        ("mqtts://broker", BrokerAddress("broker", 8883, is_tls=True)),
        ("mqtt://me@10.0.0.1:99/dev1", BrokerAddress("10.0.0.1", 99, is_tls=False, username="me", device_id="dev1")),
        ("mqtt://[::1]:5/", BrokerAddress("::1", 5, is_tls=False)),
    ],
)
def test_a_url_says_host_port_tls_user_and_device(url: str, address: BrokerAddress) -> None:
    assert is_broker_url(url)
    assert parse_broker_url(url) == address


@pytest.mark.parametrize(
    "url",
    ["", "broker", "http://x", "mqtt://", "mqtt://x:0", "mqtt://x:99999", "mqtt://x:y", "mqtt://x/a/b", "mqtt://x?a=1",
     "mqtt://x#f", "mqtt://x/a b+#", "mqtt://x/a?", "mqtt://[::1"],
)  # fmt: skip
def test_another_url_is_refused_with_the_form_that_is_wanted(url: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.url.*wanted mqtt\[s\]"):
        parse_broker_url(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password_file") as caught:
        parse_broker_url("mqtt://me:secret@host")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("host", "is_here"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)]
)
def test_only_loopback_is_this_machine(host: str, is_here: bool) -> None:
    assert BrokerAddress(host, 1883, is_tls=False).is_this_machine is is_here


def test_host_and_port_do_where_there_is_no_url(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    ca.touch()
    assert broker_access(MqttSettings(host="h")).address == BrokerAddress("h", 1883, is_tls=False)
    assert broker_access(MqttSettings(host="h", ca_file=str(ca))).address == BrokerAddress("h", 8883, is_tls=True)
    assert broker_access(MqttSettings(host="h", port=7, url="mqtt://u")).address.host == "u"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MqttSettings(), "neither url nor host"),
        (MqttSettings(host="h", ca_file="/nowhere"), r"mqtt\.ca_file: there is no file"),
        (MqttSettings(host="h", password_file="/nowhere"), r"mqtt\.password_file: there is no file"),
        (MqttSettings(url="mqtt://h", ca_file=__file__), "only mqtts:// uses"),
    ],
)
def test_settings_that_mean_no_broker_are_refused(settings: MqttSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        broker_access(settings)


@pytest.mark.parametrize(("content", "password"), [(b"secret\n", "secret"), (b"\xc3\xa9 x", "é x")])
def test_the_password_is_the_first_line_of_its_file(tmp_path: Path, content: bytes, password: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    assert broker_access(MqttSettings(host="h", password_file=str(file))).password() == password


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\n", b"x" * 70_000])
def test_a_password_that_cannot_be_one_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mqtt\.password_file"):
        broker_access(MqttSettings(host="h", password_file=str(file))).password()


def test_the_device_is_the_urls_else_the_settings_else_the_hosts() -> None:
    settings = MqttSettings(host="h", device_id="set")
    assert device_topics(settings, parse_broker_url("mqtt://h/said")).base == "edge/said"
    assert device_topics(settings, parse_broker_url("mqtt://h")).base == "edge/set"
    assert device_topics(MqttSettings(host="h"), parse_broker_url("mqtt://h"), "cam 7.site").base == "edge/cam-7"
    assert device_topics(MqttSettings(host="h", prefix="a/b/"), parse_broker_url("mqtt://h/x")).base == "a/b/x"


@pytest.mark.parametrize("device_id", ["a/b", "+", "#", "", "x" * 65, "dév"])
def test_a_device_id_that_could_be_a_pattern_is_refused(device_id: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.device_id"):
        device_topics(MqttSettings(host="h", device_id=device_id), parse_broker_url("mqtt://h"))


@pytest.mark.parametrize("hostname", ["", ".local", "---", "..."])
def test_a_host_without_a_name_must_be_given_an_id(hostname: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.device_id"):
        id_from_hostname(hostname)


def test_reply_prefixes_end_in_a_slash_and_have_no_wildcard() -> None:
    topics = device_topics(MqttSettings(host="h"), parse_broker_url("mqtt://h/d"))
    assert reply_prefixes(MqttSettings(host="h"), topics) == ("edge/d/reply/", "reply/")
    assert reply_prefixes(MqttSettings(host="h", reply_prefixes=("a", "b/")), topics) == ("a/", "b/")
    with pytest.raises(ConfigError, match=r"mqtt\.reply_prefixes"):
        reply_prefixes(MqttSettings(host="h", reply_prefixes=("#",)), topics)


def test_a_group_is_an_id() -> None:
    assert check_groups(MqttSettings(host="h", groups=("a", "b"))) == ("a", "b")
    with pytest.raises(ConfigError, match=r"mqtt\.groups"):
        check_groups(MqttSettings(host="h", groups=("a/b",)))
