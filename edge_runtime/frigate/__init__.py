"""The detector socket of Frigate's cameras."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.frigate.settings import FrigateSettings

DOOR = DoorDeclaration("frigate", "edge_runtime.frigate.door:open_door", FrigateSettings, keys=("endpoint",))
