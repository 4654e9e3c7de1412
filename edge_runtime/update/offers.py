"""Which releases are meant for this device, and why one is not taken.

Pure. Owns: the rule of percent, and the reasons that need no byte of a model. What is signed was verified before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edge_runtime.repository.manifest import Assignment, Manifest
from edge_runtime.repository.release_paths import LONGEST_LEAP, is_code

_SHARE_BITS = 64


@dataclass(frozen=True, slots=True)
class Device:
    """What of a device decides whether a release fits it.

    runtime: its version, as numbers. suffixes: of the artifacts that its backends load; several load ".onnx", so what
    the publisher ran it with says little. precisions: that its profile asks for, which variants may be fetched for.
    """

    device_id: str
    profile: str
    runtime: tuple[int, ...]
    suffixes: frozenset[str]
    memory_bytes: int
    precisions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device remembers of releases: the highest counter of each model, what runs, and what it refused.

    active: hashes of manifests by model. refused: why, by the hash of the manifest.
    """

    counters: Mapping[str, int]
    active: Mapping[str, str]
    refused: Mapping[str, str]


def share(device_id: str, manifest_sha256: str) -> float:
    """Where a device stands for one release, 0 to just under 100; the same for ever, and no two releases alike.

    By hash, so that canaries need no server; by the release, so that it is not always the same devices that go first.
    """
    digest = hashlib.sha256(f"{device_id}\n{manifest_sha256}".encode()).digest()
    return int.from_bytes(digest[: _SHARE_BITS // 8], "big") / (1 << _SHARE_BITS) * 100.0


def takes_part(device_id: str, assignment: Assignment) -> bool:
    """Whether a device is among the percent. Raising the percentage only adds devices."""
    return share(device_id, assignment.manifest_sha256) < assignment.percent


def offers(assignments: Iterable[Assignment], device_id: str) -> dict[str, Assignment]:
    """By model, the release that a device is to run: of those that include it, the one with the highest counter."""
    chosen: dict[str, Assignment] = {}
    for each in assignments:
        best = chosen.get(each.model)
        if takes_part(device_id, each) and (best is None or each.release.counter > best.release.counter):
            chosen[each.model] = each
    return chosen


def why_not_offered(assignment: Assignment, memory: Memory) -> str | None:
    """Why an assignment is passed over before its manifest is read; None: it is to be taken. "" : it runs already."""
    model, counter, sha256 = assignment.model, assignment.release.counter, assignment.manifest_sha256
    if memory.active.get(model) == sha256:
        return ""
    if sha256 in memory.refused:
        return f"release {counter} of {model} was refused here before: {memory.refused[sha256]}"
    highest = memory.counters.get(model, 0)
    if counter < highest:
        return f"release {counter} of {model} is older than {highest}, which was here; publish it under a new counter"
    if counter > highest + LONGEST_LEAP:
        return (
            f"release {counter} of {model} leaps from {highest}; wanted at most {LONGEST_LEAP} more: is a key stolen?"
        )
    return None


def why_not_fit(manifest: Manifest, device: Device) -> str | None:
    """Why a release does not fit this device; None: it does. Not held against it: another profile may take it."""
    name = f"release {manifest.release_counter} of {manifest.model}"
    if manifest.profiles and device.profile not in manifest.profiles:
        return f"{name} is for {', '.join(manifest.profiles)}; this device's profile is {device.profile}"
    needed = version_numbers(manifest.min_runtime)
    if needed > device.runtime:
        return f"{name} needs edge-runtime {manifest.min_runtime}; this is {'.'.join(map(str, device.runtime))}"
    names = [artifact.path.rpartition("/")[2] for artifact in manifest.artifacts]
    code = [file for file in names if is_code(file)]
    if code:
        return f"{name} carries {code[0]}; an update never brings code, nor what was compiled for another machine"
    if not any(file.endswith(tuple(device.suffixes)) for file in names):
        return f"{name} has {', '.join(sorted(names))}; backends here load {', '.join(sorted(device.suffixes))}"
    if manifest.peak_memory_bytes > device.memory_bytes:
        return f"{name} needs {manifest.peak_memory_bytes} bytes of memory; models may have {device.memory_bytes} here"
    return None


def version_numbers(text: str) -> tuple[int, ...]:
    """A version's numbers for comparison, "1.2.0rc1" as (1, 2, 0); what is no number ends it, nothing is ()."""
    found: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits[:18]))
        if digits != part:
            break
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
