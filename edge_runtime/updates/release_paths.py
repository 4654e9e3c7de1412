"""Names in a signed repository: roles, and the paths that each role may sign.

Pure: text in, text out. Owns: every rule about the name of a team, a group and a file there, so that publisher and
device cannot differ. A parsed path has no separator but the known ones, no dot at a part's start and no character
beyond ASCII.
"""

from __future__ import annotations

import re

from msgspec import Struct

from edge_runtime.errors import UpdateError
from edge_runtime.models.names import FILE_RULE, is_file_name, is_model_name, parse_version

OWNER_RULE = "1 to 64 of a-z, 0-9 and '-'"

MANIFEST_FILE = "manifest.json"
GOLDEN_FILE = "golden.bin"
ISSUED_FIELD = "issued"
"""Extra field of the timestamp: when it was signed, which gives a device without a clock a lower bound of the time. TUF
keeps unknown fields, signed."""

LONGEST_LEAP = 1 << 20
"""How far a release counter may exceed the highest one that was active on a device. Counters grow by one with each
release: a thief who publishes under the highest possible one would leave no counter for the release after his."""

RESERVED_FILES = frozenset((MANIFEST_FILE, GOLDEN_FILE))

MODELS_FOLDER = "models"
"""In the folder of a pipeline's release: one folder for each of its models."""

_OF_STEPS = ".step"
"""The end of the names of such models' files. Invariant: no artifact's name ends so, so that a device that knows no
releases of pipelines passes them over: no backend of its loads any file."""

_OWNER = re.compile(r"[a-z0-9-]{1,64}")


def is_owner_name(text: str) -> bool:
    """Return whether a text may name a team or a group."""
    return _OWNER.fullmatch(text) is not None


def team_role(team: str) -> str:
    """Return the role that signs a team's releases."""
    return f"team-{team}"


def group_role(group: str) -> str:
    """Return the role that signs a group's assignments."""
    return f"fleet-{group}"


def team_pattern(team: str) -> str:
    """Return the pattern of paths that a team may sign; TUF's `*` does not cross a `/`."""
    return f"team/{team}/*/*/*"


def assignments_path(group: str) -> str:
    """Return the only path that a group's role may sign."""
    return f"fleet/{group}/assign.json"


GROUPS_FILE = "groups.json"
"""Signed by targets alone: which device is in which group, where its own configuration does not say it."""


def configuration_role(group: str) -> str:
    """Return the role that signs a group's configuration."""
    return f"config-{group}"


def configuration_path(group: str) -> str:
    """Return the only path that this role may sign."""
    return f"config/{group}/overlay.toml"


class ReleasePath(Struct, frozen=True):
    """The path of one release of a model. counter: the release counter, which only grows for a model."""

    team: str
    model: str
    counter: int

    @property
    def folder(self) -> str:
        """Return the beginning of the paths of all its files."""
        return f"team/{self.team}/{self.model}/{self.counter}"

    @property
    def manifest(self) -> str:
        """Return the path of its manifest."""
        return self.file(MANIFEST_FILE)

    def file(self, name: str) -> str:
        """Return the path of one of its files. Raises UpdateError: `name` is not a file name."""
        if not is_file_name(name):
            raise UpdateError(f"{self.folder}: {name[:200]!r} cannot be published; wanted {FILE_RULE}")
        return f"{self.folder}/{name}"


def step_file(name: str, model: str) -> str:
    """Return the name by which a release publishes a file of one of a pipeline's models."""
    return f"{model}--{name}{_OF_STEPS}"


def place_of(path: str, model: str) -> str:
    """Return where a file of a release lies in the release's folder. model: of a pipeline, "" for a model's release.

    Raises UpdateError: the name does not begin with the model, or what is left of it is not a file name.
    """
    name = path.rpartition("/")[2]
    if not model:
        return name
    own = name.removeprefix(f"{model}--").removesuffix(_OF_STEPS)
    if name != step_file(own, model) or not is_file_name(own):
        raise UpdateError(f"{path[:200]}: is not a file of model {model}; wanted a name like {step_file('F', model)}")
    return f"{MODELS_FOLDER}/{model}/{own}"


def parse_release_file(path: str) -> tuple[ReleasePath, str]:
    """Return the release that a path belongs to, and the file's name.

    Raises UpdateError: the path is not `team/<team>/<model>/<counter>/<file>`.
    """
    parts = path.split("/")
    if len(parts) == 5:
        kind, team, model, counter, name = parts
        number = parse_version(counter)
        if kind == "team" and is_owner_name(team) and is_model_name(model) and number and is_file_name(name):
            return ReleasePath(team, model, number), name
    raise UpdateError(f"{path[:200]!r} is not a file of a release; wanted team/<team>/<model>/<counter>/<file>")
