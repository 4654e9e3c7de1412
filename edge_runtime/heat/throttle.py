"""The decisions of the governor of heat: how hard it presses at a temperature, and what that leaves to runs. Pure.

One number, the pressure, is what all follows from: from 0 to 1 it takes the share of low work, from 1 to 2 cores of
all work. Where both are taken and the device is still too hot, two steps follow in turn: lighter variants answer, and
low priorities are refused. The pressure follows the temperature and its change (a PI controller in its velocity form,
which winds up nothing at its ends); each step stays for a while, so that nothing goes to and fro.
"""

from __future__ import annotations

import math
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.request.policy import Allowance

AIM_BELOW_C = 1.5
"""The governor aims this far below the limit: a sensor's step on a Raspberry Pi is 0.55 °C, and one core more or less
moves the chip by 2 °C within seconds."""

PER_RISE = 0.05
"""Pressure for each degree that the temperature rose since the last reading: it acts before the limit is reached."""

PER_OVER = 0.002
"""Pressure a second for each degree above the aim; below it, the pressure falls alike."""

MOST_UNDER_C = 5.0
"""A temperature further below the aim than this counts as this far: it comes back slowly, as heat does."""

OVER_LIMIT = 0.1
"""Pressure a second for each degree above the limit itself."""

SLOWED_C = 1.0
"""A device that says it is slowed counts as this far above the aim at least, whatever its sensors say."""

LEAST_SHARE = 0.02
"""What is left of low work when the pressure is 1. It falls by the same part for each step of pressure on the way."""

MOST_PRESSURE = 2.0

HOLD_S = 20.0
"""A step follows the one before it after this time at the earliest: the heat sinks of small boards need as long to show
what it brought."""

LIGHTER_S = 120.0
"""Lighter variants stay for this long at least: to load a model is work too."""

RELAXED = 1.0
"""The last step is taken back below this pressure, when runs have all cores again."""

LEAST_CORES = 0.1
"""Of one core: what is left of all work that is not urgent when the pressure is 2."""

RETRY_S = 10.0
"""Low priorities that are refused are told to ask again after this time."""


class HeatStage(Enum):
    """How far the governor goes. Each has what those before it have."""

    FREE = "free"
    SHARE = "low_share"
    CORES = "fewer_cores"
    LIGHTER = "lighter_models"
    REFUSING = "refuses_low"


class HeatLimits(Struct, frozen=True):
    """Limits of one device. cores: all that runs may have. has_lighter: whether a lighter variant may answer."""

    limit_celsius: float
    cores: int
    low_priority: int
    has_lighter: bool = False


class HeatReading(Struct, frozen=True):
    """A reading of a device at one moment.

    celsius: of the hottest zone that counts; None: no sensor answers. is_slowed: by the kernel or the firmware; None:
    they do not tell. cores, low_cores: that all work and low work took lately.
    """

    now_s: float
    celsius: float | None
    is_slowed: bool | None = None
    cores: float = math.inf
    low_cores: float = math.inf


class Throttle(Struct, frozen=True):
    """The governor's state, and its decision. pressure: 0 to 2.

    cores: that runs may have, as a mean; cores_now: until the next reading, whole ones; owed_cores: the difference so
    far. of_cores: that they took when the first was taken from them.
    is_lighter, refuses: the steps that follow. changed_s: when the last of them came or went, or became due first.
    """

    pressure: float = 0.0
    cores: float = 1.0
    cores_now: int = 1
    owed_cores: float = 0.0
    of_cores: float = 1.0
    is_lighter: bool = False
    refuses: bool = False
    changed_s: float = math.inf
    read_s: float = -math.inf
    celsius: float | None = None

    @property
    def low_share(self) -> float:
        """The share of its time that low work has."""
        return math.pow(LEAST_SHARE, min(self.pressure, 1.0))

    def stage(self, limits: HeatLimits) -> HeatStage:
        """Return how far it goes."""
        if self.refuses:
            return HeatStage.REFUSING
        if self.is_lighter:
            return HeatStage.LIGHTER
        if self.cores < limits.cores:
            return HeatStage.CORES
        return HeatStage.SHARE if self.pressure > 0 else HeatStage.FREE

    def allowance(self, limits: HeatLimits) -> Allowance | None:
        """Return what runs may take; None: everything."""
        if self.stage(limits) is HeatStage.FREE:
            return None
        return Allowance(self.cores_now, limits.low_priority, self.low_share, self.refuses, RETRY_S)


def plan_throttle(before: Throttle, reading: HeatReading, limits: HeatLimits) -> Throttle:
    """Decide by a reading what a device may do until the next one. Pure."""
    elapsed_s = min(max(reading.now_s - before.read_s, 0.0), HOLD_S) if before.read_s > -math.inf else 0.0
    over_c = _over(reading, limits)
    rise_c = 0.0
    if before.celsius is not None and reading.celsius is not None:
        rise_c = reading.celsius - before.celsius
    pressure = before.pressure + PER_RISE * rise_c + PER_OVER * max(over_c, -MOST_UNDER_C) * elapsed_s
    if over_c > AIM_BELOW_C:
        pressure += OVER_LIMIT * (over_c - AIM_BELOW_C) * elapsed_s
    if over_c <= -MOST_UNDER_C and not before.pressure:
        pressure = 0.0
    if 0.0 < pressure < 1.0 and pressure > before.pressure and reading.low_cores < LEAST_SHARE * limits.cores / 2:
        pressure = 1.0  # there is no low work, whose share could be taken
    pressure = min(max(pressure, 0.0), MOST_PRESSURE)
    planned = replace(before, pressure=pressure, read_s=reading.now_s, celsius=reading.celsius)
    return _with_steps(_with_cores(planned, before, reading, limits), over_c, limits)


# ---- private --------------------------------------------------------------------------------------------------------


def _over(reading: HeatReading, limits: HeatLimits) -> float:
    """Degrees above the aim."""
    over_c = -MOST_UNDER_C if reading.celsius is None else reading.celsius - (limits.limit_celsius - AIM_BELOW_C)
    return max(over_c, SLOWED_C) if reading.is_slowed else over_c


def _with_cores(planned: Throttle, before: Throttle, reading: HeatReading, limits: HeatLimits) -> Throttle:
    """Take cores, of those that are in use: from a model on a GPU, which uses two of twelve, the first ten are none.

    Parts of a core are one more or less from one reading to the next.
    """
    if planned.pressure <= RELAXED:
        return replace(planned, cores=limits.cores, cores_now=limits.cores, of_cores=limits.cores, owed_cores=0.0)
    of_cores = before.of_cores
    if before.pressure <= RELAXED:
        of_cores = float(min(max(math.ceil(min(reading.cores, limits.cores)), 1), limits.cores))
    cores = max(of_cores * (MOST_PRESSURE - planned.pressure), LEAST_CORES)
    due = cores + before.owed_cores
    return replace(planned, cores=cores, cores_now=int(due), of_cores=of_cores, owed_cores=due - int(due))


def _with_steps(planned: Throttle, over_c: float, limits: HeatLimits) -> Throttle:
    """Add the next step, or take the last one back, where it is due."""
    if planned.pressure >= MOST_PRESSURE and over_c > 0 and not planned.refuses:
        return _with_next_step(planned, limits)
    since_s = planned.read_s - planned.changed_s
    if planned.pressure > RELAXED:
        return planned
    if planned.refuses:
        return replace(planned, refuses=False, changed_s=planned.read_s) if since_s >= HOLD_S else planned
    if planned.is_lighter and (since_s < LIGHTER_S or planned.pressure > 0):
        return planned
    return replace(planned, is_lighter=False, changed_s=math.inf)


def _with_next_step(planned: Throttle, limits: HeatLimits) -> Throttle:
    if planned.changed_s == math.inf:
        return replace(planned, changed_s=planned.read_s)
    if planned.read_s - planned.changed_s < HOLD_S:
        return planned
    if limits.has_lighter and not planned.is_lighter:
        return replace(planned, is_lighter=True, changed_s=planned.read_s)
    return replace(planned, refuses=True, changed_s=planned.read_s)
