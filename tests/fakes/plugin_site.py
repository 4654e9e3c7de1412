"""Distributions with entry points, as pip lays them down: modules and their metadata in a folder of the path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from edge_runtime import plugins


class PluginSite:
    """A folder on the path of this process and of those that it starts. `put` lays a distribution down in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: list[str] = []

    def put(self, name: str, source: str, entries: Mapping[str, str], *, module: str = "") -> None:
        """Lay down a distribution of one module. entries: "kind.name" -> the entry point's value."""
        module = module or name.replace("-", "_")
        self._modules.append(module)
        (self.folder / f"{module}.py").write_text(dedent(source))
        described = self.folder / f"{name.replace('-', '_')}-1.5.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = []
        for entry, value in entries.items():
            kind, _, own = entry.partition(".")
            lines += [f"[edge_runtime.{kind}]", f"{own} = {value}"]
        (described / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()

    def forget(self) -> None:
        """Unload what was imported of it."""
        for name in self._modules:
            sys.modules.pop(name, None)


@contextmanager
def plugin_site(folder: Path) -> Iterator[PluginSite]:
    """A site in this folder; at the end no plug-in is in use."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    site = PluginSite(folder)
    try:
        yield site
    finally:
        plugins.use(())
        site.forget()
        sys.path.remove(str(folder))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
