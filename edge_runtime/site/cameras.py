"""The cameras of a device by what rules call them: one reader for each, whichever rules look at it.

Owns: which camera a rule means, and which are read. results.py opens and closes them with its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from edge_runtime.errors import ConfigError
from edge_runtime.hosts.regions import Regions
from edge_runtime.site.camera import Camera, CameraAddress
from edge_runtime.site.settings import WHOLE, CameraSettings, PublishRule


class CameraPlace(NamedTuple):
    """A camera's place and view: another of these is another camera. name: empty where rules call it by its address."""

    name: str
    url: str
    rotate: int = 0
    crop: tuple[float, float, float, float] = WHOLE

    @property
    def address(self) -> CameraAddress:
        """Where it is. Raises ConfigError."""
        return CameraAddress(self.url, "camera.url" if self.name else "publish.camera")


class Cameras:
    """The cameras that are read. changed: called when the state of one has changed, on its own thread.

    regions: of Camera.
    """

    def __init__(self, changed: Callable[[], object], regions: Regions | None = None) -> None:
        self._changed = changed
        self._regions = regions
        self._open: dict[CameraPlace, Camera] = {}

    def all(self) -> list[Camera]:
        """Those that are read."""
        return list(self._open.values())

    def open(self, places: Iterable[CameraPlace]) -> None:
        """Make the cameras of these places that are not there yet; who calls starts them."""
        for place in places:
            if place not in self._open:
                self._open[place] = Camera(
                    place.address,
                    name=place.name,
                    rotate=place.rotate,
                    crop=place.crop,
                    regions=self._regions,
                    changed=self._changed,
                )

    def at(self, place: CameraPlace) -> Camera:
        """The camera of a place that is open."""
        return self._open[place]

    def leave(self, places: Iterable[CameraPlace]) -> list[Camera]:
        """Forget all but these places. Return the cameras that are to be closed."""
        kept = set(places)
        gone = [place for place in self._open if place not in kept]
        return [self._open.pop(place) for place in gone]


def by_name(cameras: Sequence[CameraSettings]) -> dict[str, CameraSettings]:
    """The table of `[[camera]]`. Raises ConfigError: a name is there twice, or an address cannot be."""
    found: dict[str, CameraSettings] = {}
    for each in cameras:
        CameraAddress(each.url, "camera.url")
        if each.name in found:
            raise ConfigError(f"camera.name: two cameras are named {each.name!r}; give each a name of its own")
        found[each.name] = each
    return found


def place_of(rule: PublishRule, cameras: Mapping[str, CameraSettings]) -> CameraPlace | None:
    """The camera that a rule looks at; None for a rule of another source. Raises ConfigError: there is none."""
    if rule.camera is None:
        return None
    named = cameras.get(rule.camera)
    if named is not None:
        return CameraPlace(named.name, named.url, named.rotate, named.crop)
    if "/" not in rule.camera:
        known = ", ".join(sorted(cameras)) or "none now"
        raise ConfigError(
            f"publish.camera: got {rule.camera!r}; wanted the name of a [[camera]] ({known}), a path from the root, as "
            "/dev/video0, rtsp://, rtsps://, http:// or https://"
        )
    place = CameraPlace("", rule.camera)
    place.address  # noqa: B018 (it raises)
    return place
