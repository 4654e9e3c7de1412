"""Backends by name, each made on request.

Owns: how a declaration is found and its backend made. Importing this module imports no backend, and asking for one
imports that alone.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from edge_runtime import plugins
from edge_runtime.backends.base import Backend, LibraryBackend, Probe
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.library_import import not_installed
from edge_runtime.errors import BackendUnavailable, ConfigError
from edge_runtime.plugins import named

if TYPE_CHECKING:
    from edge_runtime.backends.base import BeginCall, BuildSource
    from edge_runtime.clock import Clock
    from edge_runtime.hosts.hosts import Hosts


def known_backends() -> tuple[str, ...]:
    """Every backend's name, whether or not its library is installed."""
    return plugins.names("backends")


def find_declaration(name: str) -> Declaration | None:
    """Return the declaration of a backend; None where there is no such backend, or it cannot be imported."""
    try:
        return declaration_of(name)
    except BackendUnavailable:
        return None


def declaration_of(name: str) -> Declaration:
    """Return the declaration of a backend. Imports no library.

    Raises BackendUnavailable: there is no such backend, or it is a plug-in that cannot be imported.
    """
    if name not in known_backends():
        raise BackendUnavailable(f"there is no backend {name!r}; known: {', '.join(known_backends())}")
    try:
        found: Declaration = plugins.declared("backends", name)
    except ConfigError as error:
        raise BackendUnavailable(error.message) from error
    return found


def installed(name: str) -> Declaration:
    """Return the declaration of an installed backend. Raises BackendUnavailable with the extra to install."""
    found = declaration_of(name)
    _check_installed(found)
    return found


def is_installed(declaration: Declaration) -> bool:
    """Whether a backend's library is there, imported or not."""
    return not declaration.libraries or any(map(_is_there, declaration.libraries))


def backend(name: str, *, allows_code: bool = False, builds: BuildSource | None = None) -> LibraryBackend:
    """Make one backend. It looks for its library, and imports it only in `probe` and `load`.

    allows_code: whether it may load files that are code (`python_models` in the configuration). builds: the source of
    what it has built; None builds at load. Raises BackendUnavailable with the extra to install.
    """
    return declared_backend(declaration_of(name), allows_code=allows_code, builds=builds)


def declared_backend(
    declaration: Declaration, *, allows_code: bool = False, builds: BuildSource | None = None
) -> LibraryBackend:
    """Make the backend of a declaration, as `backend` does: in a process that may know no plug-in's name."""
    _check_installed(declaration)
    return make_backend(declaration, allows_code=allows_code, builds=builds)


def make_backend(
    declaration: Declaration, *, allows_code: bool = False, builds: BuildSource | None = None
) -> LibraryBackend:
    """Make the backend of a declaration, whether or not its library is installed."""
    given: dict[str, Any] = {"allow": allows_code} if declaration.is_code else {}
    if declaration.builder:
        given["builds"] = builds
    made: LibraryBackend = named(declaration.factory)(**given)
    return made


class Backends:
    """The backends of one daemon, each made once. Thread: any.

    allows_code, builds: as of `backend`. begin_call: as of `HostedBackend`.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        allows_code: bool = False,
        builds: BuildSource | None = None,
        clock: Clock | None = None,
        begin_call: BeginCall | None = None,
    ) -> None:
        self._hosts = hosts
        self._allows_code = allows_code
        self._builds = builds
        self._clock = clock
        self._begin_call = begin_call
        self._lock = threading.RLock()
        self._here: dict[str, LibraryBackend] = {}
        self._hosted: dict[str, Backend] = {}

    def has(self, name: str) -> bool:
        """Return whether there is such a backend, and its library is installed."""
        found = find_declaration(name)
        return found is not None and is_installed(found)

    def installed(self, name: str) -> Declaration:
        """Return the declaration of an installed backend, as `installed`. Raises BackendUnavailable."""
        return installed(name)

    def here(self, name: str) -> LibraryBackend:
        """Return the backend of this name whose instances live in this process. Raises BackendUnavailable."""
        with self._lock:
            if name not in self._here:
                self._here[name] = backend(name, allows_code=self._allows_code, builds=self._builds)
            return self._here[name]

    def hosted(self, name: str) -> Backend:
        """Return the backend of this name whose instances live in hosts. Raises BackendUnavailable."""
        with self._lock:
            if name not in self._hosted:
                from edge_runtime.hosts.instance import HostedBackend

                self._hosted[name] = HostedBackend(
                    self.here(name),
                    self._hosts,
                    allows_code=self._allows_code,
                    builds=self._builds,
                    clock=self._clock,
                    begin_call=self._begin_call,
                )
            return self._hosted[name]


def probe_all() -> tuple[Probe, ...]:
    """Probe every backend; imports their libraries."""
    return tuple(make_backend(declaration_of(name)).probe() for name in known_backends())


def _check_installed(declaration: Declaration) -> None:
    """Raise BackendUnavailable, with the extra to install, where no library of a backend is there."""
    if not is_installed(declaration):
        raise not_installed(declaration)


def _is_there(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):  # a broken package of that name
        return False
