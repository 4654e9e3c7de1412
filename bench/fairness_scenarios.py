"""One client must not spoil another, nor itself: a polite one beside a greedy one, and a storm of refusals.

The greedy ones send again the moment they are refused, as a client without a thought does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bench import makers
from bench.load import Load
from bench.scenarios import Background, Bench

STORM_DEADLINE_MS = 1000.0
POLITE_DEADLINE_MS = 2000.0
POLITE_RATE = 2.0
GREEDY_IN_FLIGHT = 100
CROWD_DEADLINE_MS = 500.0


def storm(bench: Bench) -> None:
    """64 requests of 600 KB in flight, where 8 are enough: what is refused must not take the cores from the runs."""
    model, figures = makers.mobilenetv2() if bench.is_quick else makers.resnet18(), bench.figures
    daemon, request = bench.daemon(model), bench.request(model, STORM_DEADLINE_MS)
    daemon.start_and_settle(bench.request(model))
    seconds = 3.0 if bench.is_quick else 60.0
    for _ in bench.rounds("storm"):
        calm = bench.generator.closed(daemon.endpoint, request, 8, max(bench.seconds, 3.0), warm_s=1.0)
        stormy = bench.generator.closed(daemon.endpoint, request, 64, seconds, warm_s=1.0)
        after = bench.generator.closed(daemon.endpoint, request, 8, max(bench.seconds, 3.0), warm_s=1.0)
        figures.add("storm.calm_rate", calm.rate)
        figures.add("storm.goodput_ratio", stormy.rate / calm.rate)
        figures.add("storm.refused_per_s", stormy.refused / seconds)
        figures.add("storm.lost", stormy.lost + stormy.stray)
        figures.add("storm.after_p50_ratio", after.p50_ms / calm.p50_ms)
    daemon.stop()


def polite(bench: Bench) -> None:
    """A client with a deadline beside one with 100 in flight and none, and beside one that sends ten times as much."""
    model, figures = makers.mobilenetv2(), bench.figures
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    seconds = 5.0 if bench.is_quick else 20.0
    for number in bench.rounds("polite"):
        greedy = _beside(
            partial(bench.generator.closed, daemon.endpoint, bench.request(model), GREEDY_IN_FLIGHT, seconds + 4.0),
            partial(
                bench.generator.open,
                daemon.endpoint,
                bench.request(model, POLITE_DEADLINE_MS),
                POLITE_RATE,
                seconds,
                deadline_ms=POLITE_DEADLINE_MS,
                seed=number,
            ),
        )
        figures.add("polite.beside_greedy.answered_ratio", _answered_ratio(greedy))
        figures.add("polite.beside_greedy.p99_ms", greedy.p99_ms)
        capacity = bench.capacity(daemon.endpoint, bench.request(model))
        request = bench.request(model, CROWD_DEADLINE_MS)
        crowd = _beside(
            partial(bench.generator.open, daemon.endpoint, request, 1.5 * capacity, seconds + 4.0, seed=number),
            partial(
                bench.generator.open,
                daemon.endpoint,
                request,
                0.15 * capacity,
                seconds,
                deadline_ms=CROWD_DEADLINE_MS,
                seed=number + 100,
            ),
        )
        figures.add("polite.beside_crowd.answered_ratio", _answered_ratio(crowd))
        figures.add("polite.beside_crowd.p99_ms", crowd.p99_ms)
    daemon.stop()


def _answered_ratio(load: Load) -> float:
    """Of what was to begin in the measured time; `sent` counts the time before it too."""
    return load.answered / max(load.answered + load.refused + load.lost, 1)


def _beside(greedy: Callable[[], Load], polite_run: Callable[..., Load]) -> Load:
    """What the polite one saw, measured once the greedy one is well under way."""
    background = Background(greedy)
    seen = polite_run(warm_s=2.0)
    background.result()
    return seen


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"storm": storm, "polite": polite}
