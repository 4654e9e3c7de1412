"""Operations that change cameras, and a reload that does too: each is made of what the other left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

from edge_runtime.site.door import SiteDoor, add_camera, remove_camera
from edge_runtime.site.settings import CameraSettings, PublishRule


class Changing:
    """A door of results whose rules and cameras a reload changes each time that it may."""

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.rules: tuple[PublishRule, ...] = ()
        self.reloaded: set[str] = set()
        self._cameras: tuple[CameraSettings, ...] = (CameraSettings("old", "/dev/video0"),)

    @property
    def cameras(self) -> tuple[CameraSettings, ...]:
        found = self._cameras
        if not self.changing.locked():
            self.reloaded.add(f"reloaded-{len(self.reloaded)}")
            self._cameras = (*found, CameraSettings(f"reloaded-{len(self.reloaded) - 1}", "/dev/video9"))
        return found

    def take(self, rules: Sequence[PublishRule], cameras: Sequence[CameraSettings]) -> None:
        self.rules, self._cameras = tuple(rules), tuple(cameras)

    def sources(self) -> list[dict[str, Any]]:
        return []


def test_camera_that_is_added_or_removed_while_a_reload_comes_undoes_nothing_of_it() -> None:
    door = Changing()
    assert [each.name for each in door.cameras] == ["old"]
    add_camera(cast("SiteDoor", cast("Any", door)), "gate", "/dev/video1", "people")
    remove_camera(cast("SiteDoor", cast("Any", door)), "old")
    reloaded = set(door.reloaded)
    assert {each.name for each in door.cameras} == {"gate", *reloaded}
