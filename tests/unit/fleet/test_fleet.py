"""A fleet as values: what devices said goes in, answers for people come out, and strangers make nothing grow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_runtime.fleet import fleet as fleets
from edge_runtime.fleet.fleet import COUNTED_S, AssignedRelease, Fleet, SignedFleet
from edge_runtime.updates.release_checks import share

NOW_S = 1_795_752_000.0
"""2026-11-27 about noon."""


def state(**fields: Any) -> bytes:
    told = {"health": "ok", "profile": "orin", "runtime_version": "1.0", "groups": ["line-1"], "interval_s": 15.0}
    return json.dumps({**told, **fields}).encode()


def new_fleet() -> Fleet:
    fleet = Fleet(NOW_S - 1_000)
    fleet.listening_s = NOW_S - 1_000
    return fleet


def add(fleet: Fleet, device: str, status: str = "online", **fields: Any) -> None:
    fleet.say_status(device, status, NOW_S, is_retained=False)
    fleet.say_state(device, state(**fields), NOW_S, is_retained=False)


def model(p95_ms: float | None = None, version: int = 1) -> dict[str, Any]:
    return {"version": version, "rate_per_s": 1.0, "p95_ms": p95_ms, "versions": []}


def updates(group: str = "line-1", **fields: Any) -> dict[str, Any]:
    return {"state": "idle", "group": group, "checked": None, **fields}


def release(counter: int, model: str = "digits", **said: Any) -> dict[str, Any]:
    return {"models": {model: {"release": counter, **said}}}


def names(found: dict[str, Any]) -> list[str]:
    return [each["device"] for each in found["devices"]]


# ---- devices --------------------------------------------------------------------------------------------------------


def test_devices_are_listed_by_id_with_group_version_and_health() -> None:
    fleet = new_fleet()
    add(fleet, "b", totals={"models": 3, "states": {"ready": 3}})
    add(fleet, "a", health="degraded", reasons=["model m version 1: no backend", "camera door: no picture"])
    found = fleet.devices(NOW_S)
    assert names(found) == ["a", "b"]
    first, second = found["devices"]
    assert (first["groups"], first["version"], first["condition"]) == (["line-1"], "1.0", "degraded")
    assert first["health"] == "model m version 1: no backend (and 1 more)"
    assert second["health"] == "3 of 3 models are loaded."


def test_groups_count_their_devices_by_condition_version_and_profile() -> None:
    fleet = new_fleet()
    add(fleet, "a", rate_per_s=0)
    add(fleet, "b", "offline", runtime_version="2.0")
    add(
        fleet,
        "c",
        groups=["line-1", "line-2"],
        health="degraded",
        update=updates(refused=[{"model": "m", "release": 1}]),
    )
    add(fleet, "d", groups=[])
    none, line_1, line_2 = fleet.groups(NOW_S)
    assert (none["group"], none["devices"]) == ("", 1)
    assert (line_1["group"], line_1["devices"], line_1["silent"], line_1["refusing"]) == ("line-1", 3, 1, 1)
    assert line_1["conditions"] == {"ok": 1, "offline": 1, "degraded": 1}
    assert line_1["versions"] == {"1.0": 2, "2.0": 1}
    assert (line_2["profiles"], line_2["devices"]) == ({"orin": 1}, 1)


def test_the_largest_groups_are_told_of_where_strangers_name_many(monkeypatch) -> None:
    monkeypatch.setattr(fleets, "SHOWN_GROUPS", 2)
    fleet = new_fleet()
    for index in range(5):
        add(fleet, f"stranger-{index}", groups=[f"group-{index}"])
        add(fleet, f"cam-{index}", groups=["line-1"])
    assert [each["group"] for each in fleet.groups(NOW_S)] == ["group-0", "line-1"]


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ({"search": "CAM"}, ["cam-1", "cam-2"]),
        ({"search": "cam 2"}, ["cam-2"]),
        ({"search": "door"}, ["cam-2"]),
        ({"search": "digits"}, ["gate"]),
        ({"search": "nothing of it"}, []),
        ({"group": "line-2"}, ["gate"]),
        ({"condition": "degraded"}, ["cam-2"]),
        ({"condition": "silent"}, ["cam-1"]),
        ({"condition": "offline"}, ["cam-1"]),
        ({"offset": 1, "limit": 1}, ["cam-2"]),
        ({"offset": -5, "limit": 0}, ["cam-1"]),
    ],
)
def test_devices_are_searched_by_words_group_and_condition(question: dict[str, Any], wanted: list[str]) -> None:
    fleet = new_fleet()
    add(fleet, "cam-1", status="offline")
    add(fleet, "cam-2", health="degraded", reasons=["camera door: no picture"])
    add(fleet, "gate", groups=["line-2"], models={"digits": model()})
    assert names(fleet.devices(NOW_S, **question)) == wanted


def test_a_device_that_publishes_nothing_for_some_intervals_is_mute_since_its_last_message() -> None:
    fleet = new_fleet()
    add(fleet, "a", interval_s=15.0)
    assert fleet.devices(NOW_S + 70)["devices"][0]["condition"] == "ok"
    found = fleet.devices(NOW_S + 80)["devices"][0]
    assert (found["condition"], found["is_silent"], found["silent_since"]) == ("mute", True, NOW_S)


def test_no_device_is_called_mute_while_the_broker_is_away_and_right_after() -> None:
    fleet = new_fleet()
    add(fleet, "a")
    fleet.listening_s = None
    assert fleet.devices(NOW_S + 5_000)["devices"][0]["condition"] == "ok"
    fleet.listening_s = NOW_S + 5_000
    assert fleet.devices(NOW_S + 5_060)["devices"][0]["condition"] == "ok"
    assert fleet.devices(NOW_S + 5_100)["devices"][0]["condition"] == "mute"


def test_an_offline_device_of_before_the_start_is_silent_since_its_own_last_time() -> None:
    fleet = new_fleet()
    fleet.say_status("a", "offline", NOW_S, is_retained=True)
    fleet.say_state("a", state(time="2026-11-27T01:00:00+00:00"), NOW_S, is_retained=True)
    assert fleet.devices(NOW_S)["devices"][0]["silent_since"] == 1_795_741_200.0


@pytest.mark.parametrize("time", ["1970-01-01T00:00:09+00:00", "2999-01-01T00:00:00+00:00", "nonsense"])
def test_a_clock_that_cannot_be_right_says_nothing_of_since_when(time: str) -> None:
    fleet = new_fleet()
    fleet.say_status("a", "offline", NOW_S, is_retained=True)
    fleet.say_state("a", state(time=time), NOW_S, is_retained=True)
    assert fleet.devices(NOW_S)["devices"][0]["silent_since"] is None


def test_a_device_whose_clock_is_wrong_is_told_and_judged_by_ours() -> None:
    fleet = new_fleet()
    add(fleet, "a", time="1970-01-01T00:00:00+00:00")
    add(fleet, "b", time="2026-11-27T04:00:00+00:00")
    first, second = fleet.devices(NOW_S)["devices"]
    assert (first["clock_off_s"], first["condition"]) == (round(-NOW_S), "ok")
    assert second["clock_off_s"] is None
    assert fleet.overview(NOW_S)["clocks_off"] == 1


def test_an_overview_counts_conditions_versions_and_groups() -> None:
    fleet = new_fleet()
    add(fleet, "a")
    add(fleet, "b", runtime_version="1.1", groups=["line-1", "line-2"])
    add(fleet, "c", status="stopped")
    found = fleet.overview(NOW_S)
    assert found["devices"] == 3
    assert found["conditions"] == {"ok": 2, "stopped": 1}
    assert found["versions"] == {"1.0": 2, "1.1": 1}
    assert found["groups"] == {"line-1": 3, "line-2": 1}


def test_models_of_parts_belong_to_a_device_where_their_generation_is_that_of_the_state() -> None:
    fleet = new_fleet()
    add(fleet, "a", parts={"3": "aa"}, totals={"models": 200, "states": {"ready": 200}})
    assert fleet.missing_parts() == ["a"]
    fleet.say_part("a", "3", json.dumps({"generation": "bb", "models": {"old": model()}}).encode())
    assert fleet.device("a", NOW_S)["models"] == []
    assert fleet.missing_parts() == ["a"]
    part = {"generation": "aa", "models": {"new": model(5.0)}, "updates": release(7, "new")["models"]}
    fleet.say_part("a", "3", json.dumps(part).encode())
    assert [(each["name"], each["release"]) for each in fleet.device("a", NOW_S)["models"]] == [("new", 7)]
    assert fleet.missing_parts() == []
    add(fleet, "a", models={"only": model()})
    assert [each["name"] for each in fleet.device("a", NOW_S)["models"]] == ["only"]


def test_a_device_of_which_nothing_is_retained_any_more_is_gone() -> None:
    fleet = new_fleet()
    add(fleet, "a", models={"m": model()})
    fleet.say_status("a", "", NOW_S, is_retained=False)
    assert len(fleet) == 1
    fleet.say_state("a", b"", NOW_S, is_retained=False)
    assert len(fleet) == 0
    add(fleet, "b")
    fleet.forget("b")
    assert fleet.ids() == set()
    assert fleet.device("b", NOW_S) is None


# ---- changes --------------------------------------------------------------------------------------------------------


def test_events_tell_what_changed_and_not_what_was_known_at_the_start() -> None:
    fleet = new_fleet()
    fleet.say_status("a", "online", NOW_S, is_retained=True)
    fleet.say_state("a", state(), NOW_S, is_retained=True)
    assert fleet.take_events() == []
    refused = [{"model": "digits", "release": 4, "reason": "slower than before"}]
    add(fleet, "a", health="degraded", reasons=["why"], runtime_version="1.1", update=updates(refused=refused))
    fleet.say_status("a", "offline", NOW_S, is_retained=False)
    assert [each.text for each in fleet.take_events()] == [
        "went from ok to degraded: why",
        "runs edge-runtime 1.1, before 1.0",
        "refused digits release 4: slower than before",
        "is offline",
    ]


def test_rates_alone_are_not_a_change_that_a_person_sees() -> None:
    fleet = new_fleet()
    add(fleet, "a", totals={"models": 1, "states": {"ready": 1}, "rate_per_s": 1.0})
    before = fleet.revision
    add(fleet, "a", totals={"models": 1, "states": {"ready": 1}, "rate_per_s": 9.0}, temperature_celsius=40.0)
    assert fleet.revision == before
    assert fleet.devices(NOW_S)["devices"][0]["rate_per_s"] == 9.0
    add(fleet, "a", totals={"models": 1, "states": {"failed": 1}})
    assert fleet.revision > before


# ---- releases -------------------------------------------------------------------------------------------------------


def test_a_release_is_installed_refused_or_waiting_with_its_reasons_counted() -> None:
    fleet = new_fleet()
    for index in range(3):
        add(fleet, f"in-{index}", models={"digits": model()}, update=updates(**release(5)))
    for index, p95 in enumerate((31.2, 44.0)):
        refused = [{"model": "digits", "release": 5, "reason": f"p95 {p95} ms, before 10 ms"}]
        add(fleet, f"no-{index}", update=updates(refused=refused))
    offers = [{"model": "digits", "release": 5, "action": "put off", "reason": "the disk is full"}]
    add(fleet, "later", update=updates(checked={"is_ok": True, "offers": offers}))
    add(fleet, "away", status="offline", update=updates())
    add(fleet, "new", update=updates())
    add(fleet, "other", update=updates("line-2"))

    (found,) = fleet.releases(NOW_S, SignedFleet([AssignedRelease("line-1", "digits", 5, 2, 100.0)]))

    assert (found["devices"], found["installed"], found["refused"], found["waiting"]) == (8, 3, 2, 3)
    assert found["reasons"] == [
        {"kind": "refused", "reason": "p95 31.2 ms, before 10 ms", "devices": 2},
        {"kind": "waiting", "reason": "has not looked yet", "devices": 1},
        {"kind": "waiting", "reason": "put off: the disk is full", "devices": 1},
        {"kind": "waiting", "reason": "silent", "devices": 1},
    ]


def test_counts_of_releases_are_kept_until_something_changes_or_somebody_may_be_silent() -> None:
    fleet = new_fleet()
    add(fleet, "a", models={"digits": model()}, update=updates(**release(5)))
    kept = fleet.releases(NOW_S)
    assert fleet.releases(NOW_S + 1.0) is kept
    assert fleet.releases(NOW_S + COUNTED_S) is not kept
    kept = fleet.releases(NOW_S)
    assert fleet.releases(NOW_S, SignedFleet([AssignedRelease("line-1", "digits", 5, 2, 100.0)])) is not kept
    kept = fleet.releases(NOW_S)
    add(fleet, "b", models={"digits": model()}, update=updates(**release(5)))
    assert fleet.releases(NOW_S)[0]["installed"] == 2


def test_a_release_for_a_share_waits_for_those_alone_that_it_means() -> None:
    fleet = new_fleet()
    for index in range(200):
        add(fleet, f"d{index}", update=updates(device_id=f"d{index}"))
    assigned = [
        AssignedRelease("line-1", "digits", 6, 3, 10.0, "a" * 64),
        AssignedRelease("line-1", "digits", 5, 2, 100.0, "b" * 64),
    ]
    newer, older = fleet.releases(NOW_S, SignedFleet(assigned))
    assert 5 <= newer["waiting"] <= 40
    assert newer["waiting"] + newer["not_meant"] == 200
    assert older["waiting"] == newer["not_meant"]  # each device has one of them


def test_each_device_of_a_group_has_one_fate_and_silence_is_counted_beside_it() -> None:
    fleet = new_fleet()
    manifest = "a" * 64
    ids = [f"d{number}" for number in range(400)]
    meant = [each for each in ids if share(each, manifest) < 10.0]
    others = [each for each in ids if each not in meant]
    fine, gone, bad, off, small, late, new = meant[:7]
    notes = {"model": "digits", "release": 6, "reason": "too slow"}
    passed = {**notes, "action": "passed over", "reason": "it is for rpi5"}
    say_more = {
        fine: {"models": {"digits": model()}, "update": updates(device_id=fine, **release(6))},
        gone: {"status": "offline", "models": {"digits": model()}, "update": updates(device_id=gone, **release(6))},
        bad: {"update": updates(device_id=bad, refused=[notes])},
        off: {"status": "offline", "update": updates(device_id=off)},
        small: {"update": updates(device_id=small, checked={"offers": [{**passed, "percent": 10.0}]})},
        # It looked when the release was for fewer, and will look again.
        late: {"update": updates(device_id=late, checked={"offers": [{**passed, "percent": 1e-6}]})},
        new: {"update": updates(device_id=new)},
        others[0]: {"status": "offline", "update": updates(device_id=others[0])},
        others[1]: {"update": updates(device_id=others[1])},
    }
    for each, fields in say_more.items():
        add(fleet, each, **fields)
    add(fleet, "elsewhere", update=updates("line-2"))

    found = fleet.fates(NOW_S, AssignedRelease("line-1", "digits", 6, 3, 10.0, manifest))

    assert (found.devices, found.installed, found.refused, found.passed_over) == (9, 2, 1, 1)
    assert (found.waiting, found.silent, found.not_meant) == (2, 1, 2)
    assert (found.went_silent, found.not_meant_silent) == (2, 1)
    assert {each["reason"] for each in found.reasons} >= {"too slow", "passed over: it is for rpi5"}


MANIFEST = "a" * 64


def rollout_of(fleet: Fleet, moved: dict[str, str] | None = None) -> tuple[int, int, int, int, int]:
    """Devices, installed, refused, waiting and not meant, at a step of 10 %."""
    found = fleet.fates(NOW_S, AssignedRelease("line-1", "digits", 6, 3, 10.0, MANIFEST), moved)
    return found.devices, found.installed, found.refused, found.waiting, found.not_meant


def test_a_rollout_is_moved_by_no_word_of_devices_that_the_release_is_not_for() -> None:
    fleet = new_fleet()
    ids = [f"d{number}" for number in range(100)]
    meant = [each for each in ids if share(each, MANIFEST) < 10.0]
    for each in ids:
        add(fleet, each, update=updates(device_id=each))
    before = rollout_of(fleet)
    refused = [{"model": "digits", "release": 6, "reason": "because"}]
    for number, each in enumerate(each for each in ids if each not in meant):
        says = {"refused": refused} if number % 2 else release(6)
        add(fleet, each, models={"digits": model()}, update=updates(device_id=each, **says))
    assert rollout_of(fleet) == before == (100, 0, 0, len(meant), 100 - len(meant))


def test_a_device_that_says_the_id_of_another_is_neither_believed_nor_counted_in_its_place() -> None:
    fleet = new_fleet()
    ids = [f"d{number}" for number in range(100)]
    real = next(each for each in ids if share(each, MANIFEST) < 10.0)
    rogue = next(each for each in ids if share(each, MANIFEST) >= 10.0)
    add(fleet, real, models={"digits": model()}, update=updates(device_id=real, **release(6)))
    refused = [{"model": "digits", "release": 6, "reason": "because"}]
    add(fleet, rogue, update=updates(device_id=real, refused=refused))
    assert rollout_of(fleet) == (2, 1, 0, 1, 0)
    found = fleet.fates(NOW_S, AssignedRelease("line-1", "digits", 6, 3, 10.0, MANIFEST))
    assert "leave that key out" in found.reasons[0]["reason"]


def test_a_device_that_was_moved_counts_in_its_new_group_alone_whatever_it_says() -> None:
    fleet = new_fleet()
    ids = [each for each in (f"d{number}" for number in range(100)) if share(each, MANIFEST) < 10.0]
    came, left, stayed = ids[:3]
    add(fleet, came, update=updates("line-2", device_id=came))
    add(fleet, left, update=updates("line-1", device_id=left))
    add(fleet, stayed, update=updates("line-1", device_id=stayed))
    assert rollout_of(fleet, {came: "line-1", left: "line-2"})[0] == 2
    other = fleet.fates(NOW_S, AssignedRelease("line-2", "digits", 6, 3, 100.0), {came: "line-1", left: "line-2"})
    assert other.devices == 1


def test_releases_without_a_repository_are_those_that_devices_tell_of() -> None:
    fleet = new_fleet()
    add(fleet, "a", models={"digits": model()}, update=updates(**release(5)))
    add(fleet, "b", models={"digits": model()}, update=updates(**release(4)))
    found = fleet.releases(NOW_S)
    assert [(each["model"], each["release"], each["installed"]) for each in found] == [
        ("digits", 5, 1),
        ("digits", 4, 1),
    ]


def test_releases_that_devices_tell_of_have_one_line_each_and_the_version_of_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = new_fleet()
    for device in ("a", "b"):
        add(fleet, device, models={"digits": model()}, update=updates(**release(5, version=3)))
    add(fleet, "liar", models={"digits": model()}, update=updates(**release(5, version=9)))
    add(fleet, "refuses", update=updates(refused=[{"model": "digits", "release": 5, "reason": "slow"}]))
    many = {f"m{number}": {"release": 1} for number in range(50)}
    add(fleet, "stranger", models={name: model() for name in many}, update=updates(models=many))
    (first, *_) = found = fleet.releases(NOW_S)
    assert (first["release"], first["version"]) == (5, 3)
    assert (first["installed"], first["refused"], first["waiting"]) == (2, 1, 2)
    assert len(found) == 51
    monkeypatch.setattr(fleets, "SHOWN_RELEASES", 10)
    found = fleet.releases(NOW_S + COUNTED_S)
    assert len(found) == 10
    assert found[0]["release"] == 5


SIGNED = SignedFleet(
    [AssignedRelease("line-1", "digits", 5, 3, 100.0, "a" * 64)], {"moved": "line-1"}, {"digits": frozenset((3, 4, 5))}
)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (release(5), ""),
        (release(5, version=3, manifest_sha256="a" * 64), ""),
        (release(5, version=9), "says that it runs release 5 as version 9; it is version 3"),
        (
            release(5, version=3, manifest_sha256="f" * 64),
            "says that it runs release 5 by another manifest than the one that is signed",
        ),
        (release(4, version=9), "has not looked yet"),
        (release(999), "says that it runs release 999, which the repository does not have"),
        (release(-5), "has not looked yet"),
        (release(1 << 63), "has not looked yet"),
    ],
)
def test_a_device_that_says_of_a_release_what_is_not_signed_is_not_counted_as_having_it(
    said: dict[str, Any], reason: str
) -> None:
    fleet = new_fleet()
    add(fleet, "a", models={"digits": model()}, update=updates(**said))
    (found,) = fleet.releases(NOW_S, SIGNED)
    assert (found["installed"], found["waiting"]) == ((0, 1) if reason else (1, 0))
    assert [each["reason"] for each in found["reasons"]] == ([reason] if reason else [])


def test_a_moved_device_is_counted_where_the_repository_has_it_and_nobody_else_can_say_a_group_of_none() -> None:
    fleet = new_fleet()
    add(fleet, "moved", models={"digits": model()}, update=updates("line-9", **release(5)))
    add(fleet, "other", models={"digits": model()}, update=updates("line-9", **release(5)))
    (found,) = fleet.releases(NOW_S, SIGNED)
    assert (found["devices"], found["installed"]) == (1, 1)
    add(fleet, "markup", models={"digits": model()}, update=updates("<b>", **release(5)))
    assert {each["group"] for each in fleet.releases(NOW_S)} == {"line-9"}


def test_a_rollout_counts_no_device_that_says_another_version_of_its_release() -> None:
    fleet = new_fleet()
    ids = [each for each in (f"d{number}" for number in range(100)) if share(each, MANIFEST) < 10.0]
    for device, version in zip(ids, (3, 4), strict=False):
        said = release(6, version=version, manifest_sha256=MANIFEST)
        add(fleet, device, models={"digits": model()}, update=updates(device_id=device, **said))
    assert rollout_of(fleet) == (2, 1, 0, 1, 0)


# ---- slow -----------------------------------------------------------------------------------------------------------


def test_slow_models_are_judged_against_their_own_profile_worst_first() -> None:
    fleet = new_fleet()
    for index in range(9):
        add(fleet, f"orin-{index}", models={"digits": model(10.0 + index / 10), "even": model(3.0)})
        add(fleet, f"pi-{index}", profile="pi5", models={"digits": model(80.0)})
    add(fleet, "orin-hot", models={"digits": model(60.0)})
    add(fleet, "gone", status="offline", models={"digits": model(900.0)})
    found = fleet.slow()
    found_names = [(each["profile"], each["model"]) for each in found]
    assert found_names == [("orin", "digits"), ("pi5", "digits"), ("orin", "even")]
    assert found[0]["slowest"][0] == {"device": "orin-hot", "p95_ms": 60.0, "version": 1}
    assert (found[0]["devices"], found[0]["median_p95_ms"], found[0]["worst_p95_ms"]) == (10, 10.45, 60.0)
    assert found[0]["worst_ratio"] == 5.74
    assert fleet.slow(group="line-9") == []


# ---- strangers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["", "a b", "x" * 65, "<b>", "a\x00", "ü"])
def test_an_id_that_is_none_is_counted_and_not_kept(device: str) -> None:
    fleet = new_fleet()
    add(fleet, device)
    assert len(fleet) == 0
    assert fleet.overview(NOW_S)["ignored"]["topics"] == 2


def test_a_word_that_is_not_a_status_makes_no_device() -> None:
    fleet = new_fleet()
    fleet.say_status("a", "<script>", NOW_S, is_retained=False)
    assert len(fleet) == 0


def test_an_unreadable_state_is_counted_and_leaves_the_one_before() -> None:
    fleet = new_fleet()
    add(fleet, "a")
    fleet.say_state("a", b"\xff" * 100, NOW_S, is_retained=False)
    assert fleet.devices(NOW_S)["devices"][0]["version"] == "1.0"
    assert fleet.overview(NOW_S)["ignored"]["states"] == 1


def test_devices_and_models_beyond_the_bounds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MAX_DEVICES", 3)
    monkeypatch.setattr(fleets, "MAX_MODEL_LINES", 10)
    fleet = new_fleet()
    for index in range(5):
        add(fleet, f"d{index}", models={f"m{number}": model() for number in range(4)})
    found = fleet.overview(NOW_S)
    assert (found["devices"], found["ignored"]["devices"], found["ignored"]["models"]) == (3, 4, 4)
    assert [each["models"] for each in fleet.devices(NOW_S)["devices"]] == [4, 4, 4]
    assert fleet.device("d2", NOW_S)["models"] == []
    add(fleet, "d0")  # which gives its room back
    add(fleet, "d2", models={f"m{number}": model() for number in range(4)})
    assert len(fleet.device("d2", NOW_S)["models"]) == 4
