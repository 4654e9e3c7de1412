"""Chooses a host's profile, and says why not the others. Pure: facts and profiles in, a decision out.

The rule: among the profiles whose rules all hold, the most specific wins. Two profiles are compared by the first
difference in this order: the board (device tree), a GPU, CPU flags, memory, architecture; then the number of rules;
then the name, so that the choice is never chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from edge_runtime.errors import ConfigError
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import MatchRules, Profile


class Match(Struct, frozen=True):
    """A decision: the profile, its reason, and at least one reason against every other profile."""

    profile: Profile
    reason: str
    rejected: dict[str, tuple[str, ...]] = field(default_factory=dict)


def match_profile(facts: Facts, profiles: Sequence[Profile], name: str | None = None) -> Match:
    """Choose a profile.

    name: the name that the command line or the configuration gives, whether it fits or not. Raises ConfigError: no
    profile has that name, or none fits this host.
    """
    reasons = {profile.name: tuple(why_not(profile.match, facts)) for profile in profiles}
    if name is not None:
        return _named_profile(name, profiles, reasons)
    fitting = sorted((profile for profile in profiles if not reasons[profile.name]), key=_precedence)
    if not fitting:
        known = "; ".join(f"{name}: {', '.join(why)}" for name, why in sorted(reasons.items()))
        raise ConfigError(f"no device profile fits this host; name one with --profile ({known})")
    chosen = fitting[0]
    for profile in fitting[1:]:
        reasons[profile.name] = (f"fits, but {chosen.name} is more specific: {_difference(chosen, profile)}",)
    rules = ", ".join(_rule_texts(chosen.match)) or "it has no rules"
    return Match(chosen, f"fits: {rules}", {name: why for name, why in reasons.items() if name != chosen.name})


def why_not(rules: MatchRules, facts: Facts) -> Iterator[str]:
    """A sentence for each rule that does not hold: got, wanted. Empty when all hold."""
    if rules.architectures and facts.architecture not in rules.architectures:
        yield f"architecture is {facts.architecture}, wanted {' or '.join(rules.architectures)}"
    model = facts.device_tree_model
    if rules.device_tree_models and not any(text in (model or "") for text in rules.device_tree_models):
        yield f"board is {model or 'unknown'}, wanted {' or '.join(rules.device_tree_models)}"
    if rules.device_tree_compatible and not set(rules.device_tree_compatible) & set(facts.device_tree_compatible):
        there = " ".join(facts.device_tree_compatible) or "nothing"
        yield f"board is compatible with {there}, wanted {' or '.join(rules.device_tree_compatible)}"
    missing = [flag for flag in rules.cpu_flags if flag not in facts.cpu_flags]
    if missing:
        yield f"the CPU lacks {' '.join(missing)}"
    if rules.jetson is not None and rules.jetson != facts.is_jetson:
        yield "is not a Jetson" if rules.jetson else "is a Jetson"
    if rules.nvidia_gpu is not None and rules.nvidia_gpu != facts.has_nvidia_gpu:
        yield "no NVIDIA GPU with its driver" if rules.nvidia_gpu else "has an NVIDIA GPU"
    yield from _memory_reasons(rules, facts.memory_bytes)


# ---- private --------------------------------------------------------------------------------------------------------


def _named_profile(chosen: str, profiles: Sequence[Profile], reasons: dict[str, tuple[str, ...]]) -> Match:
    named = {profile.name: profile for profile in profiles}
    if chosen not in named:
        raise ConfigError(f"profile: got {chosen!r}, wanted one of {', '.join(sorted(named))}")
    misfits = reasons[chosen]
    reason = "asked for" + (f", although {'; '.join(misfits)}" if misfits else "")
    return Match(named[chosen], reason, {
        name: why or (f"{chosen} was asked for",) for name, why in reasons.items() if name != chosen
    })  # fmt: skip


def _memory_reasons(rules: MatchRules, memory_bytes: int | None) -> Iterator[str]:
    if rules.min_memory_bytes is not None and (memory_bytes is None or memory_bytes < rules.min_memory_bytes):
        yield f"usable memory is {_bytes(memory_bytes)}, wanted at least {_bytes(rules.min_memory_bytes)}"
    if rules.max_memory_bytes is not None and (memory_bytes is None or memory_bytes > rules.max_memory_bytes):
        yield f"usable memory is {_bytes(memory_bytes)}, wanted at most {_bytes(rules.max_memory_bytes)}"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"


_SPECIFIC = (
    ("device_tree_models", "it names the board"),
    ("device_tree_compatible", "it names the SoC"),
    ("jetson", "it is for Jetsons"),
    ("nvidia_gpu", "it is for the GPU"),
    ("cpu_flags", "it asks for CPU flags"),
    ("min_memory_bytes", "it asks for memory"),
    ("max_memory_bytes", "it bounds memory"),
    ("architectures", "it names the architecture"),
)
"""Rules from the most to the least specific, with the words for a profile that has one which another lacks.

A rule that something is absent (`jetson = false`) is less specific than any: it is not counted.
"""


def _precedence(profile: Profile) -> tuple[list[bool], int, str]:
    """Sort key: the most specific first."""
    has_rule = _has_rules(profile.match)
    return [not has for has in has_rule], -_count_rules(profile.match), profile.name


def _has_rules(rules: MatchRules) -> list[bool]:
    return [bool(getattr(rules, name)) for name, _ in _SPECIFIC]


def _count_rules(rules: MatchRules) -> int:
    return sum(_has_rules(rules)) + len(rules.cpu_flags)


def _difference(chosen: Profile, other: Profile) -> str:
    for (_, words), mine, its in zip(_SPECIFIC, _has_rules(chosen.match), _has_rules(other.match), strict=True):
        if mine and not its:
            return words
    has_more = _count_rules(chosen.match) > _count_rules(other.match)
    return "it has more rules" if has_more else "its name comes first"


def _rule_texts(rules: MatchRules) -> Iterator[str]:
    for name, _ in _SPECIFIC:
        value = getattr(rules, name)
        if value:
            yield f"{name} {' '.join(value) if isinstance(value, tuple) else str(value).lower()}"
