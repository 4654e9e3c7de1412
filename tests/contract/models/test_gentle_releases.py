"""A release that begins with copies of requests, or with some of them, and only then answers all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.telemetry.metrics import ModelMetrics
from tests.contract.models.test_bad_releases import install, refused, release, traffic
from tests.contract.updates.updated_device import Fleet
from tests.models import onnx_models


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1 on the device, which adds 1."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    install(fleet)
    return fleet


@pytest.mark.parametrize("observe", ["shadow", "canary"])
def test_a_release_that_does_as_well_is_installed_and_no_request_fails(fleet: Fleet, observe: str) -> None:
    same = onnx_models.added(fleet.folder / "same", 1.0)
    with fleet.device(observe=observe, window_s=1.0) as device, traffic(device, device.adds) as errors:
        release(fleet, same, says=1.0)
        assert device.outcome()[0] == "installed"
        assert device.status()["models"]["adder"]["version"] == 2
    assert errors == []


def test_a_release_that_answers_copies_differently_never_answers_a_request(fleet: Fleet) -> None:
    answers: set[float] = set()
    with fleet.device(observe="shadow", window_s=3600.0) as device:
        release(fleet, onnx_models.added(fleet.folder / "other", 2.0))
        with traffic(device, lambda: answers.add(device.adds())) as errors:
            assert "copies" in (reason := refused(device))
            assert "were answered differently" in reason
    assert (answers, errors) == ({1.0}, [])


def test_a_classifier_may_answer_otherwise_as_long_as_its_highest_score_is_the_same(fleet: Fleet) -> None:
    settings = {"observe": "shadow", "shadow_agreement": 0.9, "window_s": 1.0}
    with fleet.device(**settings) as device, traffic(device, device.adds):
        release(fleet, onnx_models.added(fleet.folder / "other", 2.0))
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


def test_a_classifier_whose_highest_score_is_another_never_answers_a_request(fleet: Fleet) -> None:
    with fleet.device(observe="shadow", shadow_agreement=0.9, window_s=3600.0) as device:
        release(fleet, onnx_models.moody(fleet.folder / "moody", 1.0), says=1.0)
        rows = np.array([[1.0, 2.0]], np.float32)
        with traffic(device, lambda: device.run("adder", x=rows)) as errors:
            assert "wanted 90.0%" in refused(device)
    assert errors == []


@pytest.mark.long
def test_a_release_whose_copies_take_ten_times_as_long_never_answers_a_request(fleet: Fleet) -> None:
    with fleet.device(observe="shadow", window_s=3600.0, latency_ratio=3.0) as device:
        release(fleet, onnx_models.slow(fleet.folder / "slow", 1.0), says=1.0)
        with traffic(device, device.adds, threads=1) as errors:
            assert "a run takes" in refused(device)
    assert errors == []


def test_a_canary_that_fails_is_rolled_back_after_some_requests(fleet: Fleet) -> None:
    large = np.full((1, 2), 100.0, np.float32)
    answered = [0]

    with fleet.device(observe="canary", canary_percent=10.0, window_s=3600.0) as device:

        def ask() -> None:
            device.run("adder", x=large)
            answered[0] += 1

        release(fleet, onnx_models.picky(fleet.folder / "picky", 1.0), says=1.0)
        with traffic(device, ask) as errors:
            assert "requests failed" in refused(device)
        assert {error.code for error in errors} == {"run_failed"}
        assert len(errors) < 0.15 * answered[0]


@pytest.mark.long
def test_without_traffic_a_gentle_release_is_judged_by_its_golden_input(fleet: Fleet) -> None:
    for observe in ("shadow", "canary"):
        with fleet.device(observe=observe, window_s=0.3, latency_ratio=3.0) as device:
            release(fleet, onnx_models.slow(fleet.folder / observe, 2.0), number=2 if observe == "shadow" else 3)
            assert "a run takes" in device.outcome()[1]
            assert device.adds() == 1.0


def test_golden_runs_are_judged_though_each_answer_is_counted_after_it_was_given(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[int, tuple[float, float, int]] = {}
    count = ModelMetrics.answered

    def count_the_one_before(metrics: ModelMetrics, queue_s: float, run_s: float, requests: int = 1) -> None:
        before = given.get(id(metrics))
        given[id(metrics)] = (queue_s, run_s, requests)
        if before is not None:
            count(metrics, *before)

    monkeypatch.setattr(ModelMetrics, "answered", count_the_one_before)
    with fleet.device(observe="shadow", window_s=0.0, latency_ratio=3.0) as device:
        release(fleet, onnx_models.slow(fleet.folder / "slow", 2.0))
        assert "a run takes" in device.outcome()[1]
