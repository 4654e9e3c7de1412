"""This process's memory and CPU use, and the host's temperatures. Read on request, never by itself.

Owns: reading temperatures from the kernel's files; psutil reads the rest. It is imported at the first reading of memory
and never at the start: that takes about 20 ms and 1 MiB, each later reading of a number some 20 µs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MIN_CELSIUS, MAX_CELSIUS = -60.0, 200.0
"""The range of a chip; sensors that are switched off report 0 K or the largest integer."""


FIRMWARE_FLAGS = "sys/devices/platform/soc/soc:firmware/get_throttled"
"""Of a Raspberry Pi's kernel, in hexadecimals; the documentation of `vcgencmd get_throttled` has the bits."""

SLOWED_NOW = 0b1110
"""Of those flags: the clock is capped, the cores are throttled, the soft limit of temperature is reached."""

COOLS_CORES = ("processor", "cpufreq", "thermal-cpufreq", "cpuidle")
"""Beginnings of the types of cooling devices that slow cores down; others are fans, or slow a GPU or a screen."""


class HostProbe:
    """Measures this process and its host. Thread: any, though `cpu_cores` counts from any caller's last reading.

    root: where /sys lies, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._read_s = time.monotonic()
        self._cpu_s = self.cpu_seconds()
        self._machine_s: tuple[float, float] | None = None

    def rss_bytes(self) -> int | None:
        """Resident memory with shared pages counted in full; None when the kernel does not tell."""
        import psutil

        with suppress(psutil.Error, OSError):
            return int(psutil.Process().memory_info().rss)
        return None

    def pss_bytes(self) -> int | None:
        """Resident memory with shared pages divided among their users: what the process frees when it ends.

        The kernel walks every mapping for it: some milliseconds in a large process.
        """
        import psutil

        with suppress(psutil.Error, OSError):
            return int(psutil.Process().memory_full_info().pss)
        return None

    def memory_available_bytes(self) -> int | None:
        """Memory that the host can still give without swapping (MemAvailable)."""
        import psutil

        with suppress(psutil.Error, OSError):
            return int(psutil.virtual_memory().available)
        return None

    def cpu_seconds(self) -> float:
        """CPU time of all threads since the process began, user and system."""
        return time.process_time()

    def started_s(self) -> float | None:
        """When this process began, in Unix seconds; None when the kernel does not tell."""
        import psutil

        with suppress(psutil.Error, OSError):
            return float(psutil.Process().create_time())
        return None

    def cpu_cores(self) -> float:
        """CPU time per wall time since the last reading: 1.0 is one busy core."""
        now_s, cpu_s = time.monotonic(), self.cpu_seconds()
        elapsed_s, used_s = now_s - self._read_s, cpu_s - self._cpu_s
        self._read_s, self._cpu_s = now_s, cpu_s
        return used_s / elapsed_s if elapsed_s > 0 else 0.0

    def machine_cpu_share(self) -> float | None:
        """CPU time of all processes per time of all cores since the last reading, 0 to 1; None at the first reading."""
        import psutil

        times = psutil.cpu_times()
        idle_s, all_s = times.idle + times.iowait, sum(times[:8])  # the other fields are parts of these
        before, self._machine_s = self._machine_s, (idle_s, all_s)
        if before is None or all_s <= before[1]:
            return None
        share: float = 1.0 - (idle_s - before[0]) / (all_s - before[1])
        return min(max(share, 0.0), 1.0)

    def temperatures(self) -> dict[str, float]:
        """Degrees Celsius by sensor: thermal zones by type, hwmon sensors as "chip/label"; empty without any."""
        found: dict[str, float] = {}
        for name, path in (*self._zones(), *self._sensors()):
            celsius = _celsius(path)
            if celsius is not None:
                found[name if name not in found else f"{name} {path.parent.name}/{path.name}"] = celsius
        return found

    def zones(self, types: Collection[str] = ()) -> dict[str, float]:
        """Degrees Celsius of the kernel's thermal zones by type; sensors of chips where it has none.

        types: of the zones that are read; empty: all.
        """
        found: dict[str, float] = {}
        for name, path in self._zones():
            celsius = _celsius(path) if not types or name in types else None
            if celsius is not None:
                found[name] = max(celsius, found.get(name, MIN_CELSIUS))
        return found if found or types else self.temperatures()

    def frequency_share(self) -> float | None:
        """The clock of the cores now, as a share of the highest that they may have; None where it is not told."""
        shares = []
        for policy in (self._root / "sys/devices/system/cpu/cpufreq").glob("policy*"):
            now, most = _number(policy / "scaling_cur_freq"), _number(policy / "cpuinfo_max_freq")
            if now is not None and most:
                shares.append(now / most)
        return sum(shares) / len(shares) if shares else None

    def power_watts(self) -> float | None:
        """Power of the rail that has most: the input, on boards that measure it; None without a sensor.

        Drivers tell microwatts, or as a Jetson's INA3221 millivolts and milliamperes of each rail.
        """
        watts = []
        for chip in (self._root / "sys/class/hwmon").glob("hwmon*"):
            watts += [_number(each) for each in chip.glob("power*_input")]
            for rail in chip.glob("curr*_input"):
                milliamperes, millivolts = _number(rail), _number(rail.with_name(f"in{rail.name[4:]}"))
                if milliamperes is not None and millivolts is not None:
                    watts.append(milliamperes * millivolts)  # of 1e-3 each: microwatts too
        known = [each for each in watts if each is not None and each >= 0]
        return max(known) / 1e6 if known else None

    def is_slowed(self) -> bool | None:
        """Whether the cores are held back to cool, or for lack of power; None where the kernel does not tell.

        By a Raspberry Pi's firmware, which acts below the kernel, and by the kernel's cooling devices of cores.
        """
        told = [_flags(self._root / FIRMWARE_FLAGS)]
        for device in sorted((self._root / "sys/class/thermal").glob("cooling_device*")):
            if _text(device / "type").strip().lower().startswith(COOLS_CORES):
                told.append(_number(device / "cur_state"))
        known = [each for each in told if each is not None]
        return any(each > 0 for each in known) if known else None

    def snapshot(self) -> dict[str, Any]:
        """Everything for the `stats` op, as JSON values; None where the host does not report it."""
        return {
            "rss_bytes": self.rss_bytes(),
            "pss_bytes": self.pss_bytes(),
            "memory_available_bytes": self.memory_available_bytes(),
            "cpu_cores": round(self.cpu_cores(), 4),
            "cpu_s": round(self.cpu_seconds(), 3),
            "temperatures_celsius": self.temperatures(),
        }

    def _zones(self) -> Iterator[tuple[str, Path]]:
        for zone in sorted((self._root / "sys/class/thermal").glob("thermal_zone*")):
            yield _text(zone / "type").strip() or zone.name, zone / "temp"

    def _sensors(self) -> Iterator[tuple[str, Path]]:
        for path in sorted((self._root / "sys/class/hwmon").glob("hwmon*/temp*_input")):
            sensor = path.name.removesuffix("_input")
            chip = _text(path.parent / "name").strip() or path.parent.name
            yield f"{chip}/{_text(path.with_name(f'{sensor}_label')).strip() or sensor}", path


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(_text(path), base)
    except ValueError:
        return None


def _flags(path: Path) -> int | None:
    found = _number(path, 16)
    return None if found is None else found & SLOWED_NOW


def _celsius(path: Path) -> float | None:
    """A reading in millidegrees; None for a sensor that is off: unreadable, or outside the range of a chip."""
    try:
        celsius = int(_text(path)) / 1000
    except ValueError:
        return None
    return celsius if MIN_CELSIUS < celsius < MAX_CELSIUS else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
