"""The detector socket of Frigate's cameras."""

from edge_runtime.doors.door import DoorDeclaration

DOOR = DoorDeclaration("frigate", "edge_runtime.frigate.door:open_door", keys=("endpoint",))
