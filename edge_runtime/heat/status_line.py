"""The words of `edge-runtime status` about a device's heat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def status_fields(stats: Mapping[str, Any]) -> dict[str, str]:
    """Return the governor's line of the result of `stats`; {} for a daemon without one."""
    told = stats.get("thermal")
    if not isinstance(told, Mapping):
        return {}
    celsius = told.get("celsius")
    now = "no sensor answers" if celsius is None else f"{celsius:.0f} °C"
    return {"heat": f"{now}: {told.get('reason', '')}"}
