"""A device's site: published results of cameras and folders, and what Home Assistant discovers."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.site.settings import PublishRule

DOOR = DoorDeclaration("publish", "edge_runtime.site.door:open_door", tuple[PublishRule, ...])
