"""Files of a model's folder that capabilities read, beside the artifacts or in their place: a table by name.

A capability declares its `FolderFile` in its own `__init__.py`, which hosts import too, so this imports little.
"""

from __future__ import annotations

from msgspec import Struct

from edge_runtime import plugins


class FolderFile(Struct, frozen=True):
    """A file of a model's folder that a capability reads, beside the artifacts or in their place.

    reader: "module:function" that reads it beside `model.toml`, (path, model's name) -> `FolderConfig`, and raises
    ConfigError; "" for one that stands in the place of artifacts, in a version's folder, or in the model's own for each
    version without one. beside: names of further files that it stands there with. loader: "module:class" of the
    `ChainLoader` of versions that ask other models. counts_requests: beside it, `max_batch_rows` says how many requests
    a run has, and each of them may have many rows. inputs: "module:function" that reads it among a version's artifacts,
    (path) -> the tables `[input.NAME]` that it stands for where `model.toml` has none, and raises OSError.
    """

    name: str
    reader: str = ""
    beside: tuple[str, ...] = ()
    loader: str = ""
    counts_requests: bool = False
    inputs: str = ""

    @property
    def callables(self) -> tuple[str, ...]:
        """The functions that it names."""
        return tuple(filter(None, (self.reader, self.loader, self.inputs)))

    @property
    def is_version(self) -> bool:
        """Whether it makes a folder a version, without any artifact."""
        return bool(self.loader) and not self.reader


def folder_file(name: str) -> FolderFile | None:
    """Return the `FolderFile` of this name, which imports the capability that reads it; None: none reads it."""
    if name not in plugins.names("kinds"):
        return None
    found = plugins.declared("kinds", name)
    return found if isinstance(found, FolderFile) else None
