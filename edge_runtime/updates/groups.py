"""Which device is in which group, as the owner of a repository says it: one file, signed by its targets role alone.

Pure. A device that is not in it is in the group that its own configuration says. The file is a few bytes for each
device: 300 KB for 10 000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import UpdateError
from edge_runtime.updates.release_paths import GROUPS_FILE

MAX_GROUPS_BYTES = 4 << 20
"""100 000 devices."""

DeviceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
GroupName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]


class _Groups(Struct, frozen=True):
    devices: dict[DeviceName, GroupName]


def encode_groups(devices: Mapping[str, str]) -> bytes:
    """Return the file's bytes. devices: the group of each, by id."""
    return msgspec.json.format(msgspec.json.encode(_Groups(dict(sorted(devices.items())))), indent=1) + b"\n"


def decode_groups(data: bytes) -> dict[str, str]:
    """Return the group of each device that the file names, by id. Raises UpdateError: it is not of that form."""
    try:
        return msgspec.json.decode(data, type=_Groups).devices
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpdateError(f"{GROUPS_FILE}: is not what it should be: {error}") from error
