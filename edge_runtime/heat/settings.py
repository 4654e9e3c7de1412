"""The settings of `[thermal]`, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from edge_runtime.config.settings import DEFAULT_PRIORITY, LOWEST_PRIORITY

LIGHTER = "int8"
"""The precision of lighter variants: `model.int8.onnx` beside `model.onnx`."""

Celsius = Annotated[float, Meta(ge=0, le=150)]
LowPriority = Annotated[int, Meta(ge=DEFAULT_PRIORITY, le=LOWEST_PRIORITY)]


class ThermalSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The governor of a device that cannot shed all its heat; see [Heat](heat.md). Without this table: none."""

    limit_celsius: Celsius | None = None
    """Temperature that the hottest of `zones` is held below. When absent: two degrees below the profile's
    `throttle_celsius`, from which on the device slows itself, urgent work too."""

    zones: tuple[str, ...] = ()
    """Thermal zones that count, by the kernel's names of their types: `["cpu-thermal", "gpu-thermal"]`. When empty:
    all."""

    low_priority: LowPriority = 6
    """Requests of this priority and of less urgent ones are slowed first, and refused last. The default, 6, leaves
    those that say no priority."""

    lighter: bool = False
    """Whether a model's variant at int8, where its version holds one, answers in its place while that much heat has to
    go. Its answers are less exact."""

    @property
    def precisions(self) -> frozenset[str]:
        """Variants of releases that are of use here, beside those of the profile."""
        return frozenset({LIGHTER}) if self.lighter else frozenset()
