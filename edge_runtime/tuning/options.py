"""The options of a tune: a latency objective, the accuracy it may give up, its time, and its device. Values only.

Owns: how `--slo`, `--accuracy-drop` and `--time` are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.config.settings import Config
from edge_runtime.errors import ConfigError
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import EffectiveProfile

_OBJECTIVE = re.compile(r"p(50|90|95|99)=([0-9]+(?:\.[0-9]+)?)(ms|s)")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(%?)")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}

MAX_LIMIT_S = 600.0
"""Of one request's latency; a search over slower requests would take days."""

MAX_TIME_S = 7 * 86400.0
"""Of a tune; a longer time is a typing error."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantile of latencies (0 to 1) that must stay within `limit_s` seconds."""

    quantile: float
    limit_s: float

    def __str__(self) -> str:
        return f"p{self.quantile * 100:.0f}={self.limit_s * 1e3:g}ms"


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of one tune. drop: accuracy that it may give up, 0 to 1. data None: it makes inputs up.

    scores: the output that labels are compared with; None: the first that fits. is_fresh: ignore kept results.
    accepts_unjudged: choose also by inputs that cannot show how much accuracy is given up.
    """

    objective: Objective
    drop: float
    time_s: float
    data: Path | None = None
    labels: Path | None = None
    scores: str | None = None
    is_fresh: bool = False
    accepts_unjudged: bool = False


@dataclass(frozen=True, slots=True)
class TunedDevice:
    """The device that a tune is for: its facts, its profile, and the configuration that serves on it."""

    facts: Facts
    profile: EffectiveProfile
    config: Config
    state: Path | None


def parse_objective(text: str) -> Objective:
    """`p99=20ms` or `p95=1.5s`. Raises ConfigError."""
    found = _OBJECTIVE.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"--slo: got {text[:80]!r}, wanted p50, p90, p95 or p99 with a time: p99=20ms")
    limit_s = float(found[2]) / (1e3 if found[3] == "ms" else 1.0)
    if not 0 < limit_s <= MAX_LIMIT_S:
        raise ConfigError(f"--slo: got {text!r}, wanted a time above 0 and at most {MAX_LIMIT_S:g} s")
    return Objective(int(found[1]) / 100, limit_s)


def parse_share(text: str) -> float:
    """`0.5%` or `0.005` as a share, 0 to 1. Raises ConfigError."""
    found = _SHARE.fullmatch(text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--accuracy-drop: got {text[:80]!r}, wanted a share from 0 to 100%: 0.5%")
    return share


def parse_duration(text: str) -> float:
    """`90s`, `10m` or `2h` in seconds. Raises ConfigError."""
    found = _DURATION.fullmatch(text.strip().lower())
    duration_s = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < duration_s <= MAX_TIME_S:
        raise ConfigError(f"--time: got {text[:80]!r}, wanted a time above 0 and at most a week: 90s, 10m, 1h")
    return duration_s
