"""Parts of the core that capabilities bring: updates by their table in the configuration, builds once one is wanted.

A capability declares its part in its folder, which imports nothing for that; shipped.py finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.errors import ConfigError

if TYPE_CHECKING:
    from edge_runtime.config.settings import Config
    from edge_runtime.doors.door import DoorDeclaration


class PartDeclaration(Struct, frozen=True):
    """A part of the core. name: of its table, if any. opens: "module:function" that makes it. extra: its libraries.

    lays_over: "module:function" of a function that takes the settings as they were read, the state folder, and whether
    the daemon starts now (`is_start`). It returns the settings with those that the part keeps laid over, and why they
    are not. takes_back: "module:function" of a function that takes the settings as they were read, the state folder,
    and why a start with kept settings failed. It has the next start leave them out. Both need none of the libraries.
    """

    name: str
    opens: str
    extra: str
    lays_over: str = ""
    takes_back: str = ""


class ReadSettings(NamedTuple):
    """A daemon's settings as they were read last.

    config: with those that parts keep laid over. own: without. left_out: why kept ones are not in `config`; "" where
    they are, or there are none. folder: of the state, where parts keep some.
    """

    config: Config
    own: Config
    left_out: str = ""
    folder: Path | None = None

    def give_up(self, reason: str) -> bool:
        """Have the next start leave out what is laid over, since this one failed; False: nothing is."""
        if self.config is self.own:
            return False
        for declaration in _keepers(self.own):
            plugins.named(declaration.takes_back)(self.own, self.folder, reason)
        return True


def keeps_settings(config: Config) -> bool:
    """Return whether a part of its tables may keep settings: its state is locked before they are read."""
    return bool(_keepers(config))


def with_kept(own: Config, folder: Path | None, *, is_start: bool) -> ReadSettings:
    """Return settings as they were read, with those that the parts of their tables keep laid over.

    folder: of the state that this daemon has locked, whatever `own` says by now.
    """
    config, reasons = own, list[str]()
    for declaration in _keepers(own):
        config, reason = plugins.named(declaration.lays_over)(config, folder, is_start=is_start)
        reasons += [reason] if reason else []
    return ReadSettings(config, own, "; ".join(reasons), folder)


def load(declaration: PartDeclaration | DoorDeclaration) -> Any:
    """Import what makes a part or a door. Raises ConfigError: a library of its extra is missing."""
    try:
        return plugins.named(declaration.opens)
    except ImportError as error:
        from edge_runtime.extras import install_advice

        advice = f"; {install_advice(declaration.extra)}" if declaration.extra else ""
        raise ConfigError(f"{declaration.name}: {error}{advice}") from None


def _keepers(config: Config) -> list[PartDeclaration]:
    declared = [plugins.declared("parts", name) for name in plugins.names("parts") if config.table(name) is not None]
    return [each for each in declared if each.lays_over]
