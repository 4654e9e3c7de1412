"""A device's site: published results of cameras and folders, and what Home Assistant discovers."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb
from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.operations import OperationAnswer
from edge_runtime.site.settings import CameraSettings, PublishRule

CAMERAS = DoorDeclaration("camera", "", tuple[CameraSettings, ...], brings={"": "publish"}, reloads=True)
DOOR = DoorDeclaration("publish", "edge_runtime.site.door:open_door", tuple[PublishRule, ...], reloads=True)
VERB = Verb("cameras", "list cameras and what they give, add and remove one at once", "edge_runtime.site.command")
LIST = OperationAnswer("cameras", "edge_runtime.site.door:list_cameras", door="publish")
RESULTS = OperationAnswer("results", "edge_runtime.site.door:list_results", door="publish")
ADD = OperationAnswer("camera_add", "edge_runtime.site.door:add_camera", door="publish", opens=True)
REMOVE = OperationAnswer("camera_remove", "edge_runtime.site.door:remove_camera", door="publish")
