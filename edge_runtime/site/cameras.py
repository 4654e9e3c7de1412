"""The cameras and microphones of a device by what rules call them. Pure; results.py opens them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge_runtime.errors import ConfigError
from edge_runtime.hosts.regions import Regions
from edge_runtime.site.camera import Camera, CameraAddress
from edge_runtime.site.microphone import MicrophonePlace
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

    def open(self, changed: Callable[[], object], regions: Regions | None) -> Camera:
        """Return the camera."""
        return Camera(
            self.address, name=self.name, rotate=self.rotate, crop=self.crop, regions=regions, changed=changed
        )


def by_name(cameras: Sequence[CameraSettings]) -> dict[str, CameraSettings]:
    """The table of `[[camera]]`. Raises ConfigError: a name is there twice, or an address cannot be."""
    found: dict[str, CameraSettings] = {}
    for each in cameras:
        CameraAddress(each.url, "camera.url")
        if each.name in found:
            raise ConfigError(f"camera.name: two cameras are named {each.name!r}; give each a name of its own")
        found[each.name] = each
    return found


def place_of(rule: PublishRule, cameras: Mapping[str, CameraSettings]) -> CameraPlace | MicrophonePlace | None:
    """The camera or microphone of a rule; None for a rule of another source. Raises ConfigError: there is none."""
    if rule.audio is not None:
        microphone = MicrophonePlace(rule.audio)
        microphone.shown  # noqa: B018 (it raises)
        return microphone
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
