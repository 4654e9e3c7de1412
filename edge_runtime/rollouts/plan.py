"""The decisions of a rollout: wait, raise the percentage, stop, or be done. Pure: counts and instants in, a value out.

| what is seen | decision |
|---|---|
| at least two refusals, and more than `stop_share` of the devices that take part | stop at once |
| one refusal that is more than `stop_share`, after the hold | stop, unless nine others took part: it is that device |
| more silent devices than chance explains among those that the release is for | stop at once |
| the hold is over, four of five that take part have told how it went, one of them that it runs | raise, or be done |
| anything else | wait |

A device takes part when the release is for it, it answers, and it did not pass it over. Devices are counted that take
part, and not those that told: a release that fails its trial is refused within seconds, and one that passes it is
observed for a minute, so that the first to tell would be mostly refusals.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import comb

from msgspec import Struct

from edge_runtime.fleet.fleet import ReleaseFates

LEAST_REFUSALS = 2
"""One device may be broken itself; where few take part, one is judged too, after the hold."""

FEW_DEVICES = 10

COMPLETE_SHARE = 0.8
"""Of the devices that take part, those that must have told: some are always slow, or in a corner without network."""

CHANCE = 0.001
"""Of so many silent devices without the release's doing: in a year of daily rollouts it stops one that was good."""

LEAST_SILENT = 3


class RolloutPlan(Struct, frozen=True):
    """The plan of a rollout. percents: rising, each above 0, at most 100. hold_s: of each, before the next.

    stop_share: of the devices that take part, those that may refuse it, 0 to 1.
    """

    percents: tuple[float, ...] = (1.0, 10.0, 50.0, 100.0)
    hold_s: float = 3600.0
    stop_share: float = 0.02

    def fault(self) -> str:
        """Return why it cannot be; "" where it can."""
        if not self.percents or not all(0 < each <= 100 for each in self.percents):
            return f"steps are {_list(self.percents)}; wanted percentages above 0, at most 100"
        if any(after <= before for before, after in zip(self.percents, self.percents[1:], strict=False)):
            return f"steps are {_list(self.percents)}; wanted rising ones, such as 1,10,50,100"
        if not 0 <= self.hold_s <= 366 * 86_400:
            return f"hold is {self.hold_s:g} s; wanted at most a year"
        if not 0 <= self.stop_share <= 1:
            return f"stop-at is {self.stop_share:.1%}; wanted 0 to 100 %"
        return ""


class RolloutPosition(Struct, frozen=True):
    """The position of a rollout in its plan. step: index of the percentage that devices are given, since since_s.

    silent_share: of the group's devices, those that did not answer before the rollout.
    """

    step: int
    since_s: float
    silent_share: float = 0.0


class RolloutAct(Enum):
    """The act that follows a look at the fleet."""

    WAIT = "wait"
    RAISE = "raise"
    STOP = "stop"
    FINISH = "finish"


class RolloutDecision(Struct, frozen=True):
    """An act with its reason in words. due_s: the instant before which nothing changes by itself, of a hold."""

    act: RolloutAct
    reason: str
    due_s: float | None = None


def decide_rollout(plan: RolloutPlan, position: RolloutPosition, fates: ReleaseFates, now_s: float) -> RolloutDecision:
    """Decide what follows from the fates of a release at one of the steps. Pure."""
    if bad := _why_refused(plan, fates) or _why_silent(plan, fates, position.silent_share):
        return RolloutDecision(RolloutAct.STOP, bad)
    percent, is_last = plan.percents[position.step], position.step + 1 == len(plan.percents)
    if fates.devices and fates.not_meant == fates.devices and not is_last:
        return RolloutDecision(RolloutAct.RAISE, f"no device falls into {percent:g} %")
    left_s = min(position.since_s + plan.hold_s - now_s, plan.hold_s)  # a clock set back must not hold it for years
    if left_s > 0:
        return RolloutDecision(RolloutAct.WAIT, f"holds {percent:g} %", now_s + left_s)
    return _decide_held(plan, fates, is_last=is_last)


# ---- private --------------------------------------------------------------------------------------------------------


def _decide_held(plan: RolloutPlan, fates: ReleaseFates, *, is_last: bool) -> RolloutDecision:
    """Decide when the hold is over."""
    if fates.refused and _is_over(plan, fates) and _taking_part(fates) < FEW_DEVICES:
        return RolloutDecision(RolloutAct.STOP, _refused_text(fates))
    if missing := _why_unclear(fates):
        return RolloutDecision(RolloutAct.WAIT, missing)
    reason = f"{fates.installed} run it, {fates.refused} refused it"
    return RolloutDecision(RolloutAct.FINISH if is_last else RolloutAct.RAISE, reason)


def _taking_part(fates: ReleaseFates) -> int:
    return fates.installed + fates.refused + fates.waiting


def _is_over(plan: RolloutPlan, fates: ReleaseFates) -> bool:
    return fates.refused > plan.stop_share * _taking_part(fates)


def _why_refused(plan: RolloutPlan, fates: ReleaseFates) -> str:
    return _refused_text(fates) if fates.refused >= LEAST_REFUSALS and _is_over(plan, fates) else ""


def _refused_text(fates: ReleaseFates) -> str:
    reason = next((each["reason"] for each in fates.reasons if each["kind"] == "refused"), "")
    return f"{fates.refused} of {_taking_part(fates)} devices refused it{f': {reason}' if reason else ''}"


def _why_silent(plan: RolloutPlan, fates: ReleaseFates, silent_share: float) -> str:
    """Return the fault where a release silences devices: more of them than of the others, and than before."""
    meant = fates.devices - fates.not_meant
    others = fates.not_meant_silent / fates.not_meant if fates.not_meant else 0.0
    usual = min(max(silent_share, others) + plan.stop_share, 1.0)
    if fates.went_silent < LEAST_SILENT or chance_of(fates.went_silent, meant, usual) >= CHANCE:
        return ""
    return f"{fates.went_silent} of the {meant} devices that it is for do not answer; {usual:.0%} are usual"


def _why_unclear(fates: ReleaseFates) -> str:
    """Return what is missing before more devices may have it; "" where nothing is."""
    parts, told = _taking_part(fates), fates.installed + fates.refused
    if not fates.devices:
        return "the broker knows no device of the group"
    if not fates.installed:
        return f"no device runs it yet; {fates.waiting} wait for it, {fates.silent} do not answer"
    if told < COMPLETE_SHARE * parts:
        return f"{told} of {parts} devices have told; {COMPLETE_SHARE:.0%} must"
    return ""


def chance_of(count: int, of: int, share: float) -> float:
    """Return the chance that `count` or more of `of` things happen, each with the chance `share`. Pure."""
    if count <= 0 or share >= 1:
        return 1.0
    if of > 1_000:  # the same share of a thousand: exact enough, and no number grows beyond a float
        count, of = round(count * 1_000 / of), 1_000
    return sum(comb(of, each) * share**each * (1 - share) ** (of - each) for each in range(count, of + 1))


def _list(percents: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in percents) or "none"
