"""A daemon that updates under load and is killed at random moments: every answer is right, and nothing is forgotten."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.system.killed_device import KilledDevice, Load

LONGEST_CALM_S = 0.8
"""A start takes 0.1 s and an update 0.3 s where nothing else runs: kills fall into both, and after them."""


DEVICES, KILLS = 4, 40


@pytest.mark.long
def test_a_daemon_killed_at_random_while_it_updates_answers_right_after_every_kill_and_forgets_nothing(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(DEVICES) as pool:
        lives = [
            pool.submit(suffer, tmp_path / str(number), random.Random(f"device {number}"), KILLS)
            for number in range(DEVICES)
        ]
    assert [trouble for life in lives for trouble in life.result()[1]] == []
    updates = sum(life.result()[0] for life in lives)
    assert updates > DEVICES * KILLS / 20, "too few updates came to their end to say much"


def suffer(folder: Path, chance: random.Random, kills: int) -> tuple[int, list[str]]:
    """Kill one device so many times, with something to update to each time: updates committed, and what went wrong."""
    with closing(KilledDevice(folder)) as device, Load(device.endpoint) as load:
        for number in range(kills):
            offered = device.offer_next()
            load.expect(device.active, offered)
            device.start()
            # Some kills do not even wait until it serves.
            if device.active and chance.random() < 0.7:
                load.wait_answered()
            # Every fifth update comes to its end, or nearly, however slow this machine is now.
            if number % 5 == 4:
                load.wait_for(offered)
            time.sleep(chance.random() * LONGEST_CALM_S)
            device.kill()
        load.expect(device.active, device.offer_next())
        device.start()
        load.wait_answered()
        device.kill()
        return device.updates, load.troubles
