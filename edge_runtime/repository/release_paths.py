"""What things are called in a signed repository: roles, and the paths that each may speak of (DESIGN 8).

Pure: text in, text out. Owns: every rule about a team's, a group's and a file's name there, so that publisher and
device cannot differ. A path that was parsed here holds no separator but the known ones, no dot at a part's start and no
character beyond ASCII.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_runtime.errors import UpdateError
from edge_runtime.repository.names import is_model_name, parse_version

OWNER_RULE = "1 to 64 of a-z, 0-9 and '-'"
FILE_RULE = "a letter, digit or '_', then at most 127 letters, digits, '.', '_' or '-'"

MANIFEST_FILE = "manifest.json"
GOLDEN_FILE = "golden.bin"
ISSUED_FIELD = "issued"
"""Extra field of the timestamp: when it was signed, so that a device whose clock forgot knows what time it is at least.
TUF keeps fields that it does not know, signed."""

LONGEST_LEAP = 1 << 20
"""Of a release counter on a device, beyond the highest that was active there. Counters grow by one with each release: a
thief who publishes under the highest one there is would leave no counter for the release that replaces his."""

RESERVED_FILES = frozenset((MANIFEST_FILE, GOLDEN_FILE))

_CODE = re.compile(r".*(\.py[cdow]?|\.so(\.[0-9.]+)?|\.dll|\.dylib|\.plan|\.engine|\.trt|\.sh)", re.IGNORECASE)
_OWNER = re.compile(r"[a-z0-9-]{1,64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_owner_name(text: str) -> bool:
    """Whether a text may name a team or a group."""
    return _OWNER.fullmatch(text) is not None


def is_file_name(text: str) -> bool:
    """Whether a text may name a file of a release."""
    return _FILE.fullmatch(text) is not None


def is_code(name: str) -> bool:
    """Whether a file would run as code, or was compiled for one machine: no release carries such (DESIGN 8)."""
    return _CODE.fullmatch(name) is not None


def team_role(team: str) -> str:
    """The role that signs a team's releases."""
    return f"team-{team}"


def group_role(group: str) -> str:
    """The role that signs what a group of devices runs."""
    return f"fleet-{group}"


def team_pattern(team: str) -> str:
    """The paths that a team may sign; TUF's `*` does not cross a `/`."""
    return f"team/{team}/*/*/*"


def assignments_path(group: str) -> str:
    """The only path that a group's role may sign."""
    return f"fleet/{group}/assign.json"


@dataclass(frozen=True, slots=True)
class ReleasePath:
    """Where one release of a model lies. counter: the release counter, which only grows for a model."""

    team: str
    model: str
    counter: int

    @property
    def folder(self) -> str:
        """What the paths of all its files begin with."""
        return f"team/{self.team}/{self.model}/{self.counter}"

    @property
    def manifest(self) -> str:
        """The path of its manifest."""
        return self.file(MANIFEST_FILE)

    def file(self, name: str) -> str:
        """The path of one of its files. Raises UpdateError: that is no file's name."""
        if not is_file_name(name):
            raise UpdateError(f"{self.folder}: {name[:200]!r} cannot be published; wanted {FILE_RULE}")
        return f"{self.folder}/{name}"


def parse_release_file(path: str) -> tuple[ReleasePath, str]:
    """The release that a path belongs to, and the file's name.

    Raises UpdateError: the path is not `team/<team>/<model>/<counter>/<file>`.
    """
    parts = path.split("/")
    if len(parts) == 5:
        kind, team, model, counter, name = parts
        number = parse_version(counter)
        if kind == "team" and is_owner_name(team) and is_model_name(model) and number and is_file_name(name):
            return ReleasePath(team, model, number), name
    raise UpdateError(f"{path[:200]!r} is no file of a release; wanted team/<team>/<model>/<counter>/<file>")
