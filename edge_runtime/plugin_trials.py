"""The trial of plug-ins: a child process imports their declarations, and what they are called by, before the daemon.

A module that raises, exits, crashes, or does not end costs that child, and gives its plug-in a reason. plugins.py calls
this where plug-ins are in use, and imports it then.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from edge_runtime.plugins import Plugin, checked, named, reason_of
from edge_runtime.sandbox.child import run_child
from edge_runtime.sandbox.ending import ShowProgress

TRIAL_S = 20.0
"""For the imports of one distribution's declarations: they take milliseconds, and seconds from a slow disk's first
read."""


class DeclarationTask(Struct, frozen=True):
    """Declarations to import: each a kind, a name, and "module:attribute"."""

    declarations: tuple[tuple[str, str, str], ...]


def try_plugins(plugins: Sequence[Plugin]) -> list[str]:
    """Return why each of one distribution's plug-ins cannot be used; "" for those that can. Raises nothing."""
    if not plugins:
        return []
    task = DeclarationTask(tuple((each.kind, each.name, each.location) for each in plugins))
    try:
        ending = run_child(import_in_child, task, limit_s=TRIAL_S)
    except OSError as error:
        return [f"no process can be made to try it: {error.strerror or error}"] * len(plugins)
    return ending.result or [f"importing it: {ending.reason}"] * len(plugins)


def import_in_child(task: DeclarationTask, progress: ShowProgress) -> list[str]:
    """Import each declaration; returns the reason why it cannot be used, "" for none."""
    reasons = []
    for kind, name, location in task.declarations:
        progress(f"importing {location}")
        try:
            for text in getattr(checked(kind, name, location), "callables", ()):
                if not callable(named(text)):
                    raise TypeError(f"{text} cannot be called")
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a plug-in's module may raise anything)
            reasons.append(reason_of(error))
        else:
            reasons.append("")
    return reasons
