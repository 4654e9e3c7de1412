"""Parts of the core that capabilities bring: updates by their table in the configuration, builds once one is wanted.

A capability declares its part in its folder, which imports nothing for that; shipped.py finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.errors import ConfigError

if TYPE_CHECKING:
    from edge_runtime.config.settings import Config
    from edge_runtime.doors.door import DoorDeclaration


class PartDeclaration(Struct, frozen=True):
    """A part of the core. name: of its table, if any. opens: "module:function" that makes it. extra: its libraries.

    lays_over: "module:function" of a function that takes the settings as they were read, and whether the daemon starts
    now (`is_start`), and returns them with those that the part keeps laid over; it needs none of the libraries.
    """

    name: str
    opens: str
    extra: str
    lays_over: str = ""


def with_kept(config: Config, *, is_start: bool) -> Config:
    """Return settings as they were read, with those that the parts of their tables keep laid over."""
    for name in plugins.names("parts"):
        if config.table(name) is not None:
            declaration: PartDeclaration = plugins.declared("parts", name)
            if declaration.lays_over:
                config = plugins.named(declaration.lays_over)(config, is_start=is_start)
    return config


def load(declaration: PartDeclaration | DoorDeclaration) -> Any:
    """Import what makes a part or a door. Raises ConfigError: a library of its extra is missing."""
    try:
        return plugins.named(declaration.opens)
    except ImportError as error:
        from edge_runtime.extras import install_advice

        advice = f"; {install_advice(declaration.extra)}" if declaration.extra else ""
        raise ConfigError(f"{declaration.name}: {error}{advice}") from None
