"""Reads this host's facts, once, from the kernel's files. Takes a few milliseconds and imports no library.

Owns: where each fact is read, below an injectable root so that tests read recorded trees. A missing or odd file leaves
its fact unknown: detection never fails, since a daemon on an unknown host still has to serve.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from edge_runtime.profiles.facts import Facts, Temperature

_L4T = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+)")
_DRIVER = re.compile(r"(\d+\.\d+(?:\.\d+)*)")

MAX_FILE_BYTES = 1 << 20
"""Enough for /proc/cpuinfo of 256 cores; bounded, since container runtimes put odd files into /proc."""

MAX_CPUS = 1 << 16
"""More than any kernel can number (CONFIG_NR_CPUS is at most 8 192): a list with more is not a CPU list."""

NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63; a number above this is not a limit."""

MIN_CELSIUS, MAX_CELSIUS = -60.0, 200.0
"""The range of a chip; zones that are switched off report 0 K or the largest integer."""


def detect(root: Path = Path("/"), architecture: str | None = None, usable_cpus: int | None = None) -> Facts:
    """Facts of the host whose files lie under `root`.

    architecture, usable_cpus (after affinity): None asks the kernel; a recorded tree brings its own. Raises nothing
    for missing or unreadable files.
    """
    cpuinfo = _text(root / "proc/cpuinfo")
    online = _count_online(root, cpuinfo)
    allowed = usable_cpus if usable_cpus is not None else _affinity() if root == Path("/") else online
    quota = _cpu_quota(root)
    total = _memory_total(root)
    limit = _memory_limit(root)
    return Facts(
        architecture=architecture or platform.machine(),
        device_tree_model=_first(_strings(root / "proc/device-tree/model")),
        device_tree_compatible=_strings(root / "proc/device-tree/compatible"),
        cpu_model=_cpu_field(cpuinfo, "model name") or _arm_model(cpuinfo),
        cpu_flags=tuple(sorted(set((_cpu_field(cpuinfo, "flags") or _cpu_field(cpuinfo, "Features") or "").split()))),
        cores_online=online,
        # With a quota of 1.5 cores two threads would stand still a quarter of the time: whole cores only, at least one.
        cores=max(min(allowed, math.floor(quota) if quota is not None else allowed), 1),
        memory_total_bytes=total,
        memory_bytes=min((known for known in (total, limit) if known is not None), default=None),
        nvidia_driver=_nvidia_driver(root),
        nvidia_devices=_device_files(root, "dev", "nvidia*"),
        accelerator_devices=_device_files(root, "dev/dri", "renderD*") + _device_files(root, "dev/accel", "accel*"),
        l4t_release=_l4t_release(root),
        temperatures=tuple(_temperatures(root)),
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):  # a path made from another file may hold a NUL
        return ""


def _strings(path: Path) -> tuple[str, ...]:
    """The NUL-terminated strings of a device-tree property."""
    return tuple(part.strip() for part in _text(path).split("\0") if part.strip())


def _first(values: tuple[str, ...]) -> str | None:
    return values[0] if values else None


def _number(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None


# ---- processor ------------------------------------------------------------------------------------------------------


def _cpu_field(cpuinfo: str, name: str) -> str | None:
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name and value.strip():
            return value.strip()
    return None


def _arm_model(cpuinfo: str) -> str | None:
    """ARM's implementer and part numbers, "0x41/0xd0b", as in lscpu's tables."""
    implementer, part = _cpu_field(cpuinfo, "CPU implementer"), _cpu_field(cpuinfo, "CPU part")
    return f"{implementer}/{part}" if implementer and part else None


def _count_online(root: Path, cpuinfo: str) -> int:
    listed = _count_cpu_list(_text(root / "sys/devices/system/cpu/online"))
    return listed or sum(line.startswith("processor") for line in cpuinfo.splitlines()) or 1


def _count_cpu_list(text: str) -> int:
    """The number of CPUs in a list such as "0-3,6"; 0 when it is not such a list."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = _number(first), _number(last or first)
        if low is None or high is None or high < low:
            return 0
        count += high - low + 1
    return count if count <= MAX_CPUS else 0


def _affinity() -> int:
    return len(os.sched_getaffinity(0))


# ---- cgroups --------------------------------------------------------------------------------------------------------


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders whose limits bind this process, innermost first, and whether each is of cgroup v2.

    /proc/self/cgroup has a line `id:controllers:path` a hierarchy; v2's is `0::path` (cgroups(7)). In a container the
    path may be the host's while only the innermost folder is mounted, so missing parents are skipped.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"] if is_v2 else [f"sys/fs/cgroup/{controllers}"]
        if not is_v2 and controllers != controller:
            tops.append(f"sys/fs/cgroup/{controller}")
        for top in tops:
            parts = [part for part in path.split("/") if part not in ("", "..", ".")]
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(top, *parts[:depth]), is_v2


def _cpu_quota(root: Path) -> float | None:
    """The lowest CPU quota of the enclosing cgroups, in cores; None without one."""
    return min(
        (quota for folder, is_v2 in _cgroup_folders(root, "cpu") if (quota := _quota(folder, is_v2))), default=None
    )


def _quota(folder: Path, is_v2: bool) -> float | None:
    if is_v2:
        granted, _, period = _text(folder / "cpu.max").strip().partition(" ")
    else:
        granted, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    granted_us, period_us = _number(granted), _number(period)
    if granted_us is None or granted_us <= 0 or not period_us:
        return None
    return granted_us / period_us


def _memory_total(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            kib = _number(line.removeprefix("MemTotal:").removesuffix("kB"))
            return kib * 1024 if kib is not None and kib > 0 else None
    return None


def _memory_limit(root: Path) -> int | None:
    limits = []
    for folder, is_v2 in _cgroup_folders(root, "memory"):
        limit = _number(_text(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")))
        if limit is not None and 0 < limit < NO_LIMIT_BYTES:
            limits.append(limit)
    return min(limits, default=None)


# ---- devices --------------------------------------------------------------------------------------------------------


def _device_files(root: Path, folder: str, pattern: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(f"/{folder}/{path.name}" for path in (root / folder).glob(pattern)))
    except OSError:
        return ()


def _nvidia_driver(root: Path) -> str | None:
    """The version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  …"; absent on a Jetson before Thor."""
    for line in _text(root / "proc/driver/nvidia/version").splitlines():
        if line.startswith("NVRM version:"):
            found = _DRIVER.search(line)
            return found[1] if found else "unknown"
    return None


def _l4t_release(root: Path) -> str | None:
    found = _L4T.search(_text(root / "etc/nv_tegra_release"))
    return f"{found[1]}.{found[2]}" if found else None


def _temperatures(root: Path) -> Iterator[Temperature]:
    try:
        zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    except OSError:
        return
    for zone in zones:
        millidegrees = _number(_text(zone / "temp"))
        if millidegrees is not None and MIN_CELSIUS < millidegrees / 1000 < MAX_CELSIUS:
            yield Temperature(_text(zone / "type").strip() or zone.name, millidegrees / 1000)
