"""What a group's signed configuration may say, and what becomes of a device's own settings under it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config.loading import config_kind, configured
from edge_runtime.config.settings import Config, LimitSettings, LogSettings, UpdateSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import ConfigError
from edge_runtime.profiles.facts import Facts
from edge_runtime.site.settings import CameraSettings, PublishRule
from edge_runtime.updates.overlay import FLOORS, HANG_ON_MEMORY, LISTS, TABLES, is_under, laid_over, read_overlay

PREFIXES = ("/dev/video", "rtsp://10.0.4.*/", "http://cams.site:8080/live/", "hw:")


def device(**changes: Any) -> Config:
    """A device with a broker, one camera and one rule of its own."""
    usual = {
        "mqtt": MqttSettings(url="mqtt://127.0.0.1"),
        "update": UpdateSettings(root_file="r", camera_prefixes=PREFIXES),
        "camera": (CameraSettings("door", "rtsp://192.168.1.4/door"),),
        "publish": (PublishRule("faces", name="mine", source="camera", camera="door"),),
    }
    return configured(**{**usual, **changes})


def test_overlay_merges_tables_by_key_and_adds_cameras_and_rules() -> None:
    own = device(limits=LimitSettings(queue_rows=7, cores=2), log=LogSettings(format="json"))
    text = """
        [log]
        level = "debug"
        [limits]
        queue_rows = 9
        [[camera]]
        name = "gate"
        url = "rtsp://user:secret@10.0.4.17/gate"
        [[publish]]
        model = "cars"
        source = "camera"
        camera = "gate"
        [[publish]]
        model = "people"
        name = "mine"
        source = "camera"
        camera = "door"
    """
    merged = laid_over(own, text)
    assert merged.log == LogSettings("debug", "json")
    assert (merged.limits.queue_rows, merged.limits.cores) == (9, 2)
    assert [each.name for each in merged.table("camera")] == ["door", "gate"]
    assert [(each.model, each.name) for each in merged.table("publish")] == [("cars", None), ("people", "mine")]
    assert merged.table("mqtt") == own.table("mqtt")


def test_overlay_that_says_nothing_changes_nothing() -> None:
    own = device()
    merged = laid_over(own, "# nothing\n")
    assert all(getattr(merged, name) == getattr(own, name) for name in type(own).__struct_fields__)


def test_overlay_adds_the_tables_of_a_device_that_has_none() -> None:
    own = configured(mqtt=MqttSettings(url="mqtt://h"), update=UpdateSettings(root_file="r"))
    merged = laid_over(own, '[[publish]]\nmodel = "m"\n')
    assert merged.table("publish") == (PublishRule("m"),)


@pytest.mark.parametrize(
    "text",
    [
        'models = "/"',
        "python_models = true",
        'plugins = ["x"]',
        '[http]\naddress = "0.0.0.0:80"',
        '[mqtt]\nurl = "mqtt://evil"',
        "[zmq]\ninsecure = true",
        '[update]\nroot_file = "/tmp/r"',
        "[update]\nrequire_signed = false",
        '[update]\ncamera_prefixes = ["/"]',
        '[log]\nformat = "json"',
        '[[backends]]\nname = "onnxruntime"\ndelegate = "/tmp/x.so"',
        '[[publish]]\nmodel = "m"\nsource = "folder"\nfolder = "/"',
        '[[publish]]\nmodel = "m"\nfolder = "/"',
        '[[publish]]\nmodel = "m"\nremove = true',
        '[[publish]]\nmodel = "m"\ntopic = "edge/other/command/check-update"',
        "[metrics]\nport = 1",
        'isolation = "never"',
        "camera = 1",
        "log = []\n",
    ],
)
def test_overlay_that_opens_a_door_or_names_a_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_overlay(text, "f")
    with pytest.raises(ConfigError):
        laid_over(device(), text)


KEYS = sorted(
    {*Config.__struct_fields__, *config_kind(("http", "grpc", "mqtt", "camera", "publish")).__struct_fields__}
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([key for key in KEYS if key not in TABLES]), st.sampled_from(["true", "1", '"x"', "[]", "{}"]))
def test_overlay_of_any_other_table_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="may not say this"):
        read_overlay(f"{key} = {value}", "f")


def test_overlay_keys_are_settings_of_today() -> None:
    kinds = {"camera": CameraSettings, "publish": PublishRule}
    for table, keys in TABLES.items():
        kind = kinds.get(table) or type(getattr(device(), table))
        assert keys <= set(kind.__struct_encode_fields__), table
    assert set(LISTS) == set(kinds)


@pytest.mark.parametrize(("key", "least"), FLOORS.items())
def test_overlay_with_a_limit_by_which_a_daemon_serves_nothing_is_refused_by_its_name(key: str, least: float) -> None:
    assert read_overlay(f"[limits]\n{key} = {least}\n", "f")
    less = type(least)(least * 0.99)
    with pytest.raises(ConfigError, match=rf"f: limits\.{key}: got {less};.*wanted {least} or more"):
        read_overlay(f"[limits]\n{key} = {less}\n", "f")


@pytest.mark.parametrize("key", ["queue_rows", "cores", "queue_bytes", "memory_bytes"])
def test_overlay_with_a_limit_of_nothing_is_refused_by_its_name(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read_overlay(f"[limits]\n{key} = 0\n", "f")


SMALL = Facts(architecture="x86_64", memory_bytes=4 << 30, cores=4)


@pytest.mark.parametrize("key", HANG_ON_MEMORY)
def test_overlay_lowers_a_limit_that_memory_hangs_on_and_does_not_raise_it(key: str) -> None:
    own = device(limits=LimitSettings(**{key: 1 << 30}))
    assert getattr(laid_over(own, f"[limits]\n{key} = {1 << 30}\n").limits, key) == 1 << 30
    assert getattr(laid_over(own, f"[limits]\n{key} = {1 << 29}\n").limits, key) == 1 << 29
    with pytest.raises(ConfigError, match=rf"limits\.{key}: got {(1 << 30) + 1}; wanted at most {1 << 30}"):
        laid_over(own, f"[limits]\n{key} = {(1 << 30) + 1}\n")


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("memory_bytes", 3 << 30),
        ("host_memory_bytes", 3 << 30),
        ("queue_bytes", 512 << 20),
        ("total_unanswered_bytes", 512 << 20),
        ("message_bytes", 128 << 20),
        ("unanswered_bytes", 128 << 20),
        ("message_frames", 4098),
    ],
)
def test_overlay_raises_no_limit_above_the_profile_of_a_device_whose_file_says_none(key: str, most: int) -> None:
    own = device(profile="x86-generic")
    assert getattr(laid_over(own, f"[limits]\n{key} = {most}\n", facts=SMALL).limits, key) == most
    with pytest.raises(ConfigError, match=rf"wanted at most {most}, which this device has without it"):
        laid_over(own, f"[limits]\n{key} = {most + 1}\n", facts=SMALL)


def test_overlay_of_limits_of_time_and_rows_may_raise_them() -> None:
    own = device(limits=LimitSettings(queue_rows=7, max_run_ms=5.0, run_limit_ms=2000.0))
    merged = laid_over(own, "[limits]\nqueue_rows = 9\nmax_run_ms = 6.0\nrun_limit_ms = 3000.0\n")
    assert (merged.limits.queue_rows, merged.limits.max_run_ms, merged.limits.run_limit_ms) == (9, 6.0, 3000.0)


@pytest.mark.parametrize("table", ["camera", "publish"])
def test_overlay_with_an_empty_list_is_refused_by_its_name(table: str) -> None:
    for own in (device(), configured(update=UpdateSettings(root_file="r"))):
        with pytest.raises(ConfigError, match=f"{table}: got an empty list"):
            laid_over(own, f"{table} = []\n")


def test_overlay_with_more_cameras_or_rules_than_a_device_can_have_is_refused() -> None:
    cameras = "".join(f'[[camera]]\nname = "c{number}"\nurl = "rtsp://10.0.4.7/{number}"\n' for number in range(65))
    with pytest.raises(ConfigError, match="camera: got 65; in a signed configuration wanted at most 64"):
        read_overlay(cameras, "f")
    direct = "".join(
        f'[[publish]]\nmodel = "m{number}"\nsource = "camera"\ncamera = "rtsp://10.0.4.7/{number}"\n'
        for number in range(65)
    )
    with pytest.raises(ConfigError, match="camera: got 65; in a signed configuration wanted at most 64"):
        read_overlay(direct, "f")
    with pytest.raises(ConfigError, match="publish: got 257; in a signed configuration wanted at most 256"):
        read_overlay('[[publish]]\nmodel = "m"\n' * 257, "f")


def test_overlays_rule_needs_a_broker() -> None:
    with pytest.raises(ConfigError, match=r"no \[mqtt\]"):
        laid_over(configured(update=UpdateSettings(root_file="r")), '[[publish]]\nmodel = "m"\n')


@pytest.mark.parametrize(
    "text",
    [
        '[[camera]]\nname = "x"\nurl = "rtsp://10.0.5.1/"',
        '[[camera]]\nname = "x"\nurl = "/etc/passwd"',
        '[[camera]]\nname = "door"\nurl = "http://evil/"',
        '[[publish]]\nmodel = "m"\nsource = "camera"\ncamera = "http://evil/x"',
        '[[publish]]\nmodel = "m"\nsource = "audio"\naudio = "/srv/secret.wav"',
    ],
)
def test_overlays_camera_off_the_listed_prefixes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="under no prefix that this device lists"):
        laid_over(device(), text)


@pytest.mark.parametrize(
    "address",
    ["/dev/video0", "rtsp://10.0.4.7/x", "rtsp://u:p@10.0.4.255/", "http://cams.site:8080/live/1?a=b", "hw:0"],
)
def test_address_under_a_prefix_is_taken(address: str) -> None:
    assert is_under(address, PREFIXES)


@pytest.mark.parametrize(
    "address",
    [
        "/dev/video/../../etc/shadow",
        "/dev/../dev/video0",
        "dev/video0",
        "rtsp://10.0.4.7@evil/x",
        "rtsp://10.0.4.7:554/x",
        "rtsp://10.0.4.7.evil.com/",
        "rtsp://10.0.4.x/",
        "rtsps://10.0.4.7/",
        "rtsp://evil#10.0.4.7/",
        "rtsp://evil\\@10.0.4.7/",
        "rtsp://evil/@10.0.4.7/",
        "rtsp://evil?@10.0.4.7/",
        "http://cams.site:8080/other",
        "http://cams.site:8080/live/../x",
        "http://cams.site:8080/live/%2e%2e/x",
        "http://cams.site/live/",
        "file:///dev/video0",
        "",
    ],
)
def test_address_beside_every_prefix_is_refused(address: str) -> None:
    assert not is_under(address, PREFIXES)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="rtsp:/@.10472evil#?\\%", max_size=40))
def test_address_that_passes_names_the_listed_host(address: str) -> None:
    if is_under(address, ["rtsp://10.0.4.7/"]):
        rest = address.removeprefix("rtsp://").partition("/")[0]
        assert rest.rpartition("@")[2] == "10.0.4.7"


def test_address_is_under_no_empty_list() -> None:
    assert not is_under("/dev/video0", ())
    assert not is_under("/dev/video0", ("",))
