"""What is known of this host: one immutable value, gathered once by detect.py, recorded and replayed as JSON by tests.

Values only. A fact that the host does not tell is None or empty, never a guess.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Temperature(Struct, frozen=True):
    """One thermal zone: its type as the kernel names it, and degrees Celsius when it was read."""

    zone: str
    celsius: float


class Facts(Struct, frozen=True, kw_only=True):
    """One host as this process sees it.

    architecture: as `uname -m` says ("x86_64", "aarch64"). device_tree_model and _compatible: what the board calls
    itself, compatible from the most specific to the SoC. cpu_flags: sorted; on ARM the kernel's `Features`.
    cores_online: of the machine. cores: those this process may use, after affinity and cgroup quotas, at least 1.
    memory_bytes: what this process may use: RAM, or a lower cgroup limit. nvidia_driver: version of a discrete GPU's
    driver. nvidia_devices, accelerator_devices: device files that are there. l4t_release: Jetson Linux, "36.4.3".
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
        """Whether this is a board with an integrated Tegra GPU, by its device tree, else by Jetson Linux's own file."""
        return any(name.startswith("nvidia,tegra") for name in self.device_tree_compatible) or bool(self.l4t_release)

    @property
    def has_nvidia_gpu(self) -> bool:
        """Whether a discrete NVIDIA GPU can be used: its driver is loaded and a numbered device file is there."""
        numbered = any(path.removeprefix("/dev/nvidia").isdigit() for path in self.nvidia_devices)
        return self.nvidia_driver is not None and numbered and not self.is_jetson


def facts_as_json(facts: Facts) -> dict[str, Any]:
    """Facts as JSON holds them, for `profile show --json` and for recording a device."""
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    return fields


def facts_from_json(text: str | bytes) -> Facts:
    """Recorded facts. Raises msgspec.ValidationError when they are not facts."""
    return msgspec.json.decode(text, type=Facts)
