"""Backends, doors, importers, file kinds and verbs by name: what this distribution ships.

Owns: how a name becomes its declaration. Imports a declaration when it is asked for, never at the start. Nothing else
reads shipped.py. Thread: any.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edge_runtime.shipped import SHIPPED

KINDS = tuple(SHIPPED)
"""backends, doors, importers, kinds, verbs; operations, which are not for plug-ins."""


def names(kind: str) -> tuple[str, ...]:
    """Return the names of all of one of `KINDS`, in their order. Imports nothing."""
    return tuple(SHIPPED[kind])


def declared(kind: str, name: str) -> Any:
    """Import and return the declaration of one name. Raises KeyError: `names` has no such name."""
    return named(SHIPPED[kind][name])


def named(text: str) -> Any:
    """Import and return what a declaration names as "module:attribute"."""
    module, _, attribute = text.partition(":")
    return getattr(import_module(module), attribute)
