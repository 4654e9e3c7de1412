"""What a tune is asked for, and the device that it is for. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_runtime.config.settings import Config
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import EffectiveProfile
from edge_runtime.tuning.objective import Objective


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. drop: accuracy that may be given up, 0 to 1. data None: inputs are made up.

    scores: the output that labels are compared with; None: the first that could be. is_fresh: results kept earlier do
    not count.
    """

    objective: Objective
    drop: float
    time_s: float
    data: Path | None = None
    labels: Path | None = None
    scores: str | None = None
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """What is tuned for: this host, its profile, and the configuration that serves here."""

    facts: Facts
    profile: EffectiveProfile
    config: Config
    state: Path | None
