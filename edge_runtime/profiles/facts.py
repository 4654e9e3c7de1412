"""The facts of a host: one immutable value, read once by detect.py, recorded and replayed as JSON by tests.

Values only. An unknown fact is None or empty, never a guess.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Temperature(Struct, frozen=True):
    """One thermal zone: the kernel's name of its type, and degrees Celsius when it was read."""

    zone: str
    celsius: float


class Facts(Struct, frozen=True, kw_only=True):
    """One host as this process sees it.

    architecture: as `uname -m` ("x86_64", "aarch64"). device_tree_model and _compatible: the board's own names,
    compatible from the most specific to the SoC. cpu_flags: sorted; on ARM the kernel's `Features`. cores_online: of
    the machine. cores: those that this process may use, after affinity and cgroup quotas, at least 1. memory_bytes: the
    RAM or a lower cgroup limit. nvidia_driver: version of a discrete GPU's driver. nvidia_devices, accelerator_devices:
    existing device files. l4t_release: Jetson Linux, "36.4.3".
    """

    architecture: str
    device_tree_model: str | None = None
    device_tree_compatible: tuple[str, ...] = ()
    cpu_model: str | None = None
    cpu_flags: tuple[str, ...] = ()
    cores_online: int = 1
    cores: int = 1
    memory_total_bytes: int | None = None
    memory_bytes: int | None = None
    nvidia_driver: str | None = None
    nvidia_devices: tuple[str, ...] = ()
    accelerator_devices: tuple[str, ...] = ()
    l4t_release: str | None = None
    temperatures: tuple[Temperature, ...] = ()

    @property
    def is_jetson(self) -> bool:
        """Whether the board has an integrated Tegra GPU, by its device tree or by Jetson Linux's release file."""
        return any(name.startswith("nvidia,tegra") for name in self.device_tree_compatible) or bool(self.l4t_release)

    @property
    def has_nvidia_gpu(self) -> bool:
        """Whether a discrete NVIDIA GPU is usable: its driver is loaded and it has a numbered device file."""
        numbered = any(path.removeprefix("/dev/nvidia").isdigit() for path in self.nvidia_devices)
        return self.nvidia_driver is not None and numbered and not self.is_jetson


def facts_as_json(facts: Facts) -> dict[str, Any]:
    """Facts as JSON values, for `profile show --json` and for recording a device."""
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    return fields
