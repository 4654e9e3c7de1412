"""A release runs copies of live requests beside what serves; who asks never waits for one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edge_runtime.errors import Draining
from edge_runtime.updates.mirror import begin_shadow
from tests.contract.models.release_kits import (
    INLINE,
    WORKERS,
    Hammer,
    answer_of,
    put_adder,
    release,
    release_of,
    runtime,
)
from tests.contract.running_daemon import floats, put_model
from tests.models import python_models

LIMIT_S = 60.0
"""For what takes milliseconds: a test that waits longer hangs."""


def until(is_so, ask):
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it never came"
        ask()


@pytest.fixture(params=[INLINE, WORKERS], ids=["inline", "workers"])
def shadow(tmp_path, request):
    """A runtime whose model adds 1, and what makes a swap with one that adds another number."""
    put_adder(tmp_path / "models", 1, toml=request.param)
    with runtime(tmp_path / "models", tmp_path) as rt:
        yield rt, lambda value: rt.core.loader.swap(release(tmp_path / "r1", value, version=2, toml=request.param))


@pytest.mark.smoke
def test_a_release_of_the_same_model_shows_no_difference(shadow):
    rt, swap_with = shadow
    mirror = begin_shadow(swap_with(1), 1.0)
    until(lambda: mirror.read().requests >= 10, lambda: answer_of(rt))
    found = mirror.read()
    assert (found.failures, found.different) == (0, 0)
    assert found.top1_rows == found.top1_agreements == found.requests
    assert found.current_p95_s > 0
    assert found.candidate_p95_s > 0


def test_a_release_that_answers_otherwise_is_seen_and_nobody_gets_its_answers(shadow):
    rt, swap_with = shadow
    swap = swap_with(2)
    mirror = begin_shadow(swap, 1.0)
    answers = set()
    until(lambda: mirror.read().requests >= 10, lambda: answers.add(answer_of(rt)))
    found = mirror.read()
    assert found.different == found.requests
    assert found.top1_agreements == found.top1_rows, "both columns are higher by the same"
    assert answers == {(1, 1.0)}
    assert swap.candidate.metrics.requests == 0


def test_scores_whose_highest_changed_are_counted(tmp_path):
    def swapped(folder):
        body = "def infer(inputs):\n    return {'y': inputs['x'][:, ::-1]}\n"
        return python_models.write(folder, [("x", "FP32", [-1, 2])], [("y", "FP32", [-1, 2])], body)

    put_adder(tmp_path / "models", 0)
    with runtime(tmp_path / "models", tmp_path, python_models=True) as rt:
        mirror = begin_shadow(rt.core.loader.swap(release_of(tmp_path / "r1", swapped, version=2)), 1.0)
        until(lambda: mirror.read().requests >= 5, lambda: rt.infer("m", {"x": floats(3, 2)}))
        found = mirror.read()
        assert (found.top1_rows, found.top1_agreements, found.top1_distinct) == (3 * found.requests, 0, 1)
        both_ways = floats(2, 2)
        both_ways[1] = both_ways[1, ::-1]
        until(lambda: mirror.read().top1_distinct == 2, lambda: rt.infer("m", {"x": both_ways}))


@pytest.mark.parametrize(
    ("body", "shows"),
    [
        ("time.sleep(0.05)", lambda found: found.candidate_p95_s >= 0.04 and not found.failures),
        ("raise ValueError('no')", lambda found: found.failures == found.requests and found.candidate_p95_s is None),
    ],
    ids=["slower", "failing"],
)
def test_a_release_that_is_slower_or_fails_is_seen(tmp_path, body, shows):
    same = lambda folder, body="": python_models.on_first_value(folder, f"if value:\n    {body or 'pass'}")  # noqa: E731
    put_model(tmp_path / "models", "m", same)
    with runtime(tmp_path / "models", tmp_path, python_models=True) as rt:
        swap = rt.core.loader.swap(release_of(tmp_path / "r1", lambda f: same(f, body), version=2))
        mirror = begin_shadow(swap, 1.0)
        until(lambda: mirror.read().requests >= 3, lambda: rt.infer("m", {"x": np.ones((1, 1), np.float32)}))
        assert shows(mirror.read()), mirror.read()


def test_requests_are_answered_while_a_copy_takes_for_ever(tmp_path):
    gate = tmp_path / "gate"
    stuck = f"if value:\n    while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    put_model(tmp_path / "models", "m", lambda folder: python_models.on_first_value(folder, "pass"))
    with runtime(tmp_path / "models", tmp_path, python_models=True) as rt:
        maker = lambda folder: python_models.on_first_value(folder, stuck)  # noqa: E731
        staged = release_of(tmp_path / "r1", maker, version=2, toml="[limits]\nrun_limit_ms = 600_000\n")
        swap = rt.core.loader.swap(staged)
        mirror = begin_shadow(swap, 1.0)
        ask = lambda: rt.infer("m", {"x": np.ones((1, 1), np.float32)}, timeout_ms=60_000)  # noqa: E731
        answers = [ask() for _ in range(200)]
        assert {answer.version for answer in answers} == {1}
        assert mirror.read().requests == 0
        assert mirror.read().dropped >= 198, "one is run at a time, and none waits"
        gate.touch()
        until(lambda: mirror.read().requests >= 3, ask)
        swap.commit()
        assert ask().version == 2


@pytest.mark.parametrize("end", ["switch", "commit", "roll_back", "split"])
def test_it_ends_with_any_decision_and_loses_no_request(shadow, end):
    rt, swap_with = shadow
    with Hammer().asking(lambda: answer_of(rt)) as hammer:
        swap = swap_with(1)
        mirror = begin_shadow(swap, 1.0)
        until(lambda: mirror.read().requests >= 3, lambda: answer_of(rt))
        swap.split(50) if end == "split" else getattr(swap, end)()
        found = mirror.read()
        for _ in range(20):
            answer_of(rt)
        assert mirror.read() == found
    assert hammer.errors == []


def test_a_daemon_that_stops_in_the_middle_of_it_ends_cleanly(shadow):
    rt, swap_with = shadow
    swap = swap_with(1)
    mirror = begin_shadow(swap, 1.0)
    stopped = []

    def ask():
        try:
            answer_of(rt)
        except Draining as error:
            stopped.append(error)
            raise

    with Hammer().asking(ask) as hammer:
        until(lambda: mirror.read().requests >= 3, lambda: None)
        rt.close()
    assert {type(error) for error in hammer.errors} == {Draining}
    assert not swap.candidate.is_open


def test_a_share_that_is_none_is_refused(shadow):
    _, swap_with = shadow
    swap = swap_with(1)
    for share in (0, -1, 1.5):
        with pytest.raises(ValueError, match="share"):
            begin_shadow(swap, share)
