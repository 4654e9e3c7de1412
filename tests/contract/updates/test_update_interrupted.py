"""Killed at any durable call of an update, a device serves the old release or the new one, and completes the update."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.updates.interrupted_device import Home, Life, Memory
from tests.fakes.update_site import UpdateSite, adder, chain


@dataclass(frozen=True, slots=True)
class Scenario:
    """A device before an update, the memory it has then, and what serves before and after: None is nothing."""

    before: Home
    memory: Memory
    old: float | None
    new: float | None
    is_bad: bool = False


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    """The first release of a device; the second; and a second one whose answers are not those it claims.

    A second one that is a pipeline with its models, and one whose answers are not those it claims.
    """
    folder = tmp_path_factory.mktemp("scenarios")
    site = UpdateSite()
    new_device = Home(folder / "new", folder / "mirror", site.root)
    (folder / "new").mkdir()
    site.release(adder(folder / "made" / "1", 1))
    first = Home(folder / "new", site.write(folder / "first"), site.root)
    served = new_device.copy(folder / "served", first.mirror)
    assert served.live().served[-1] == 1.0
    site.release(adder(folder / "made" / "2", 2))
    good = Home(served.folder, site.write(folder / "second"), site.root)
    site.release(adder(folder / "made" / "3", 3, says=5.0))
    bad = Home(served.folder, site.write(folder / "third"), site.root)
    site.release(chain(folder / "made" / "4", 2, counter=4))
    pipeline = Home(served.folder, site.write(folder / "fourth"), site.root)
    site.release(chain(folder / "made" / "5", 3, says=5.0, counter=5))
    bad_pipeline = Home(served.folder, site.write(folder / "fifth"), site.root)
    empty = Memory({}, {}, {}, {}, [], is_lost=False)
    known = good.memory(folder / "aside")
    return {
        "first": Scenario(first, empty, None, 1.0),
        "next": Scenario(good, known, 1.0, 2.0),
        "bad": Scenario(bad, known, 1.0, 1.0, is_bad=True),
        "pipeline": Scenario(pipeline, known, 1.0, 2.0),
        "bad pipeline": Scenario(bad_pipeline, known, 1.0, 1.0, is_bad=True),
    }


@pytest.mark.sample
@pytest.mark.parametrize("name", ["first", "next", "bad", "pipeline", "bad pipeline"])
def test_a_device_killed_now_and_then_in_an_update_serves_the_old_release_or_the_new_and_completes(
    scenarios: dict[str, Scenario], name: str, tmp_path: Path
) -> None:
    scenario = scenarios[name]
    calls = scenario.before.copy(tmp_path / "whole").live().calls
    assert calls > 40
    chosen = sorted(random.Random(name).sample(range(1, calls + 1), 3 if "pipeline" in name else 6))
    assert troubles(scenario, [[number] for number in chosen], tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["first", "next", "bad", "pipeline", "bad pipeline"])
def test_a_device_killed_at_any_durable_call_of_an_update_serves_the_old_release_or_the_new_and_completes(
    scenarios: dict[str, Scenario], name: str, tmp_path: Path
) -> None:
    scenario = scenarios[name]
    # A death at any other call leaves the same bytes as one at a call before it: a folder was opened, or synced.
    changes = scenario.before.copy(tmp_path / "whole").live(watches=True).changes
    assert len(changes) > 25
    assert troubles(scenario, [[number] for number in changes], tmp_path) == []


@pytest.mark.long
def test_a_device_killed_again_and_again_in_one_update_completes_it_or_refuses_it_after_three_tries(
    scenarios: dict[str, Scenario], tmp_path: Path
) -> None:
    chance = random.Random("again and again")
    # Two deaths at most can fall into the trial of the release, which would be refused at the third.
    deaths = [[chance.randint(1, 90), chance.randint(1, 60)] for _ in range(30)]
    assert troubles(scenarios["next"], deaths, tmp_path) == []


def troubles(scenario: Scenario, deaths: Iterable[list[int]], folder: Path) -> list[str]:
    """What went wrong, a line each, in updates that were ended at these calls, one after another."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda each: list(_one(scenario, each, folder)), deaths)
        return [trouble for several in found for trouble in several]


def _one(scenario: Scenario, deaths: list[int], folder: Path) -> Iterable[str]:
    name = "-".join(map(str, deaths))
    home = scenario.before.copy(folder / name)
    known = scenario.memory
    serving = scenario.old
    for at in deaths:
        life = home.live(at)
        now = home.memory(folder / f"{name} aside")
        for trouble in (*_wrong_answers(scenario, life, serving), *_forgotten(known, now)):
            yield f"killed at {name}: {trouble}"
        known, serving = now, _serving(now)
    life = home.live()
    for trouble in (*_wrong_answers(scenario, life, serving), *_not_complete(scenario, home, life, folder / name)):
        yield f"killed at {name}, and restarted: {trouble}"


def _serving(memory: Memory) -> float | None:
    """What is to answer after a restart."""
    return float(memory.active["adder"].version) if memory.active else None


def _wrong_answers(scenario: Scenario, life: Life, first: float | None) -> Iterable[str]:
    """It begins with what is active, and goes on from the old to the new one, with nothing between."""
    if life.served and life.served[0] != first:
        yield f"it began with {life.served[0]}, wanted {first}"
    if life.served not in ([], [scenario.old], [scenario.new], [scenario.old, scenario.new]):
        yield f"it served {life.served}"


def _forgotten(before: Memory, now: Memory) -> Iterable[str]:
    if now.is_lost:
        yield "the state is lost"
    for name, version in {**before.marks, **before.counters}.items():
        if {**now.marks, **now.counters}.get(name, 0) < version:
            yield f"{name} was {version} and went back"
    if not before.refused.keys() <= now.refused.keys():
        yield "a refused release is forgotten"
    if not set(before.active) <= set(now.active):
        yield "nothing is active any more"


def _not_complete(scenario: Scenario, home: Home, life: Life, folder: Path) -> Iterable[str]:
    memory = home.memory(folder / "aside")
    if life.checked is None or not life.checked["is_ok"]:
        yield f"the check did not go well: {life.checked}"
    if life.served[-1:] != [scenario.new] or _serving(memory) != scenario.new:
        yield f"in the end it served {life.served} and has {memory.active}; wanted {scenario.new}"
    ends = [entry.what for entry in memory.history if entry.what in ("committed", "rejected")]
    wanted = ["rejected"] if scenario.is_bad else ["committed"]
    if ends != wanted + ["committed"] * (scenario.old is not None):
        yield f"its history is {memory.history}"
    if len(memory.refused) != scenario.is_bad:
        yield f"it refused {memory.refused}"
