"""The state of a device with many models is bounded, in parts that change alone, and reads back as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from edge_runtime.doors.mqtt.device_state import (
    PARTS,
    REMOVED,
    STATE_BYTES,
    StateMessagesMaker,
    joined,
    model_totals,
    part_of,
)


def model(
    state: str = "ready", reason: str = "", rate_per_s: float = 0.0, p95_ms: float | None = None
) -> dict[str, Any]:
    version = {
        "version": 1, "state": state, "reason": reason, "backend": "onnxruntime", "device": "cpu", "precision": "fp32",
        "mode": "workers", "memory_bytes": 1 << 20, "host": {"pid": 12_345, "restarts": 0},
    }  # fmt: skip
    ready = 1 if state == "ready" else None
    return {"version": ready, "rate_per_s": rate_per_s, "p95_ms": p95_ms, "versions": [version], "latest": ready}


def models(count: int, **fields: Any) -> dict[str, Any]:
    return {f"model-{index}": model(**fields) for index in range(count)}


def state(found: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    told = {"device_id": "dev1", "health": "ok", "reasons": [], "cameras": {}, "update": {"state": "off"}, **fields}
    return {**told, "totals": model_totals(found), "models": dict(found)}


class Broker:
    """Retains what a device publishes, and counts it."""

    def __init__(self) -> None:
        self.maker = StateMessagesMaker()
        self.state: dict[str, Any] = {}
        self.parts: dict[int, dict[str, Any]] = {}
        self.changed: set[int] = set()
        self.largest = 0

    def take(self, told: Mapping[str, Any]) -> None:
        messages = self.maker.messages(told, ("cameras",))
        self.changed = set(messages.parts)
        self.largest = max(map(len, (messages.state, *messages.parts.values())))
        for number, part in messages.parts.items():
            if part == REMOVED:
                self.parts.pop(number, None)
            else:
                self.parts[number] = json.loads(part)
        self.state = json.loads(messages.state)

    @property
    def read(self) -> dict[str, Any]:
        return joined(self.state, self.parts.values())


def test_a_state_of_fifty_models_is_one_message_as_it_always_was() -> None:
    broker, told = Broker(), state(models(50))
    broker.take(told)
    assert broker.state == told
    assert broker.parts == {}
    assert broker.largest <= STATE_BYTES


@pytest.mark.parametrize("count", [80, 247, 1_000, 5_000])
def test_a_larger_one_is_in_parts_each_within_the_bound(count: int) -> None:
    broker = Broker()
    broker.take(state(models(count)))
    assert broker.largest <= STATE_BYTES
    assert broker.state["totals"] == {"models": count, "states": {"ready": count}, "rate_per_s": 0.0}
    assert broker.state["models"] == {}
    assert {int(number): each for number, each in broker.state["parts"].items()} == {
        number: part["generation"] for number, part in broker.parts.items()
    }
    if count <= 1_000:
        assert set(broker.read["models"]) == set(models(count))


def test_the_parts_of_a_state_read_back_as_the_whole() -> None:
    broker, found = Broker(), models(247)
    releases = {name: {"version": 1, "release": 3, "manifest_sha256": "0" * 64, "not_served": ""} for name in found}
    told = state(found, update={"state": "idle", "models": releases, "refused": [], "checked": None})
    broker.take(told)
    assert broker.read["models"] == found
    assert broker.read["update"]["models"] == releases


def test_only_the_part_of_a_model_that_changed_is_published_again() -> None:
    broker, found = Broker(), models(247)
    broker.take(state(found))
    broker.take(state(found))
    assert broker.changed == set()
    found["model-7"] = model("unloaded")
    broker.take(state(found))
    assert broker.changed == {part_of("model-7")}
    assert broker.read["models"]["model-7"]["versions"][0]["state"] == "unloaded"


def test_a_rate_that_moves_little_publishes_no_part_and_one_that_moves_does() -> None:
    broker, found = Broker(), models(247, rate_per_s=40.0, p95_ms=8.0)
    broker.take(state(found))
    for rate, p95_ms in ((44.0, 8.4), (36.0, None), (49.0, 9.9), (31.0, 7.1)):
        broker.take(state(models(247, rate_per_s=rate, p95_ms=p95_ms)))
        assert broker.changed == set()
    found = models(247, rate_per_s=40.0, p95_ms=8.0)
    found["model-3"] = model(rate_per_s=80.0, p95_ms=8.0)
    broker.take(state(found))
    assert broker.changed == {part_of("model-3")}
    assert broker.read["models"]["model-3"]["rate_per_s"] == 80.0


def test_models_that_are_not_ready_stay_in_the_state_failed_ones_first() -> None:
    broker, found = Broker(), models(247)
    found["model-200"] = model("loading")
    found["model-100"] = model("failed", reason="no backend reads it")
    broker.take(state(found, reasons=["model model-100 version 1: no backend reads it"]))
    assert list(broker.state["models"]) == ["model-100", "model-200"]
    assert broker.state["models"]["model-100"]["versions"][0]["reason"] == "no backend reads it"
    assert broker.state["totals"]["states"] == {"ready": 245, "loading": 1, "failed": 1}


def test_everything_that_can_grow_is_cut_to_the_bound() -> None:
    broker, text = Broker(), "because " * 1_000
    found = models(900, state="failed", reason=text)
    offers = [{"model": name, "release": 1, "percent": 100.0, "action": "put off", "reason": text} for name in found]
    refused = [{"model": name, "release": 1, "reason": text} for name in found]
    not_served = {name: {"version": 1, "release": 3, "manifest_sha256": "0" * 64, "not_served": text} for name in found}
    told = state(
        found,
        health="degraded",
        reasons=[text] * 900,
        cameras={f"camera-{index}": {"state": "lost", "reason": text} for index in range(500)},
        update={"models": not_served, "refused": refused, "checked": {"reason": text, "offers": offers}},
    )
    broker.take(told)
    assert broker.largest <= STATE_BYTES
    assert broker.state["left_out"]["reasons"] == 890
    assert broker.state["left_out"]["cameras"] == 460
    assert broker.state["update"]["refused"][-1]["model"] == "model-899"
    assert broker.state["models"]


def test_a_device_that_loses_most_models_leaves_no_part_behind() -> None:
    broker = Broker()
    broker.take(state(models(250)))
    assert len(broker.parts) == PARTS
    broker.take(state(models(10)))
    assert broker.parts == {}
    assert "parts" not in broker.state
    assert set(broker.read["models"]) == set(models(10))


def test_parts_of_a_daemon_before_are_removed_with_the_first_state() -> None:
    broker = Broker()
    broker.take(state(models(250)))
    broker.maker = StateMessagesMaker()
    broker.take(state(models(10)))
    assert broker.parts == {}
    broker.take(state(models(10)))
    assert broker.changed == set()


def test_a_state_at_the_bound_does_not_go_to_and_fro() -> None:
    broker = Broker()
    count = next(
        count for count in range(50, 200) if len(json.dumps(state(models(count)), separators=(",", ":"))) > STATE_BYTES
    )
    broker.take(state(models(count)))
    assert broker.maker.is_in_parts
    broker.take(state(models(count - 2)))
    assert broker.maker.is_in_parts
    broker.take(state(models(count // 2)))
    assert not broker.maker.is_in_parts


def test_a_part_of_another_state_is_not_read_with_this_one() -> None:
    broker, found = Broker(), models(247)
    broker.take(state(found))
    before = dict(broker.parts)
    found["model-7"] = model("failed")
    broker.take(state(found))
    number = part_of("model-7")
    read = joined(broker.state, (before[number],))
    assert list(read["models"]) == ["model-7"]  # the state's own: the old part says that it is ready
    assert read["models"]["model-7"]["version"] is None


@pytest.mark.parametrize("part", [{}, {"generation": 1}, {"generation": "x", "models": []}, {"models": {"m": 1}}])
def test_a_malformed_part_is_ignored(part: dict[str, Any]) -> None:
    told = {"models": {}, "parts": {"0": "x"}, "update": 3}
    assert joined(told, [part]) == told
    assert joined({"parts": [1]}, [part]) == {"parts": [1]}
