"""The line of `edge-runtime status` for a device's broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def status_fields(stats: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the broker, the device's id there, and whether it is connected; empty without a broker."""
    broker = stats.get("mqtt")
    if not isinstance(broker, dict):
        return {}
    if broker.get("connected"):
        how = f"connected, MQTT {broker.get('protocol', '?')}"
    else:
        how = f"not connected: {broker.get('reason') or 'no reason was given'}"
    return {"mqtt": f"{broker.get('broker')}, device {broker.get('device_id')}, {how}"}
