"""Which loaded models leave so that another fits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded version: what it holds, when it was last asked for (monotonic seconds), and whether it must stay."""

    model: str
    number: int
    memory_bytes: int
    used_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """What to unload, in order; `missing_bytes` > 0 means that even then the newcomer does not fit."""

    leave: tuple[Resident, ...]
    missing_bytes: int


def plan_eviction(residents: Sequence[Resident], wanted_bytes: int, budget_bytes: int) -> Eviction:
    """Make room for `wanted_bytes` under the budget: least recently used first, pinned ones never.

    Nothing leaves when even all of it would not be enough: unloading for nothing helps nobody.
    """
    free = budget_bytes - sum(resident.memory_bytes for resident in residents)
    leave: list[Resident] = []
    for resident in sorted(residents, key=lambda each: each.used_s):
        if free >= wanted_bytes:
            break
        if not resident.is_pinned:
            leave.append(resident)
            free += resident.memory_bytes
    if free < wanted_bytes:
        return Eviction((), wanted_bytes - free)
    return Eviction(tuple(leave), 0)
