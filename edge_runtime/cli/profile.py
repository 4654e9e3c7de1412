"""Show this device, the profile chosen for it and why not the others, and the backends here.

show asks no daemon: it detects what a daemon started now would detect. list shows every profile.
"""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import asdict

from edge_runtime.backends.base import Probe
from edge_runtime.backends.registry import probe_all
from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.screen import Screen, size_text
from edge_runtime.profiles.detect import detect
from edge_runtime.profiles.facts import Facts, facts_as_json
from edge_runtime.profiles.match import Match, match_profile
from edge_runtime.profiles.profile import EffectiveProfile, load_profiles

INTERESTING_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp",
    "sve", "bf16", "i8mm",
)  # fmt: skip
"""CPU flags that decide the speed of inference, of a CPU's hundred."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `profile` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    show = actions.add_parser("show", help="this device and the profile chosen for it", description=__doc__)
    show.add_argument("--profile", metavar="NAME", help="as if this profile was asked for")
    actions.add_parser("list", help="every profile, and whether it fits", description="Every profile.")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action."""
    if arguments.action is None:
        raise UsageError("profile wants an action: show or list")
    facts, profiles = detect(), load_profiles()
    if arguments.action == "list":
        match = match_profile(facts, profiles)
        if screen.wants_json:
            screen.json([_listed(profile.name, profile.description, match) for profile in profiles])
        else:
            rows = [_listed(profile.name, profile.description, match) for profile in profiles]
            screen.table(("name", "chosen", "description"), [
                [row["name"], "yes" if row["chosen"] else "", row["description"]] for row in rows
            ])  # fmt: skip
        return 0
    match = match_profile(facts, profiles, arguments.profile)
    effective = match.profile.effective(facts)
    with screen.progress("asking the backends"):
        probes = probe_all()
    if screen.wants_json:
        screen.json(_as_json(facts, match, effective, probes))
    else:
        _print(facts, match, effective, probes, screen)
    return 0


def _listed(name: str, description: str, match: Match) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "chosen": name == match.profile.name,
        "why_not": list(match.rejected.get(name, ())),
    }


def _as_json(facts: Facts, match: Match, effective: EffectiveProfile, probes: tuple[Probe, ...]) -> dict[str, Any]:
    from msgspec import to_builtins

    return {
        "facts": facts_as_json(facts),
        "profile": to_builtins(effective),
        "reason": match.reason,
        "rejected": {name: list(reasons) for name, reasons in match.rejected.items()},
        "backends": [asdict(probe) for probe in probes],
    }


def _print(facts: Facts, match: Match, effective: EffectiveProfile, probes: tuple[Probe, ...], screen: Screen) -> None:
    screen.heading("This device")
    screen.fields(_device(facts))
    screen.line()
    screen.heading(f"Profile {effective.name}")
    limits = effective.limits
    screen.fields(
        {
            "what": effective.description,
            "why": match.reason,
            "backends": ", then ".join(_backend_text(each) for each in effective.backends),
            "cores": str(limits.cores),
            "memory for models": size_text(limits.memory_bytes) or "not bounded",
            "queue, each model": f"{limits.queue_rows:,} rows, {size_text(limits.queue_bytes)}",
            "most rows": str(effective.batching.max_batch_rows),
        }
    )
    screen.line()
    screen.heading("Backends here")
    screen.table(
        ("name", "usable", "version", "devices", "why not"),
        [
            [each.name, "yes" if each.is_available else "no", each.version, ", ".join(each.devices), each.reason]
            for each in probes
        ],
    )
    screen.line()
    screen.heading("Not chosen")
    screen.fields({name: "; ".join(reasons) for name, reasons in match.rejected.items()})


def _device(facts: Facts) -> dict[str, str]:
    cores = f"{facts.cores} of {facts.cores_online}" if facts.cores != facts.cores_online else str(facts.cores)
    total, usable = facts.memory_total_bytes, facts.memory_bytes
    memory = size_text(usable) + (f" of {size_text(total)}" if total is not None and total != usable else "")
    hottest = max(facts.temperatures, key=lambda each: each.celsius, default=None)
    return {
        "architecture": facts.architecture,
        "board": facts.device_tree_model or "",
        "CPU": facts.cpu_model or "",
        "CPU flags": " ".join(flag for flag in INTERESTING_FLAGS if flag in facts.cpu_flags),
        "cores": cores,
        "memory": memory,
        "NVIDIA driver": facts.nvidia_driver or "",
        "Jetson Linux": facts.l4t_release or "",
        "accelerators": " ".join((*facts.nvidia_devices, *facts.accelerator_devices)),
        "hottest": f"{hottest.celsius:.0f} °C ({hottest.zone})" if hottest is not None else "",
    }


def _backend_text(choice: Any) -> str:
    options = " ".join(filter(None, (choice.device, choice.precision)))
    return f"{choice.name} ({options})" if options else str(choice.name)
