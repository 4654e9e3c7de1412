"""A device's heat: a governor that slows work before the kernel slows the device."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.heat.settings import ThermalSettings

DOOR = DoorDeclaration(
    "thermal",
    "edge_runtime.heat.door:open_door",
    ThermalSettings,
    status_fields="edge_runtime.heat.status_line:status_fields",
)
