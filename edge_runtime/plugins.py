"""Backends, doors, importers, file kinds and verbs by name: what we ship, and plug-ins of other distributions.

Owns: how a name becomes its declaration, and the state of each plug-in. A declaration is imported when it is asked for;
what we ship is found by a table (shipped.py), plug-ins by the entry points of the distributions that `plugins` in
`config.toml` names, and no other. One that is missing or broken has a state and a reason, and ends nothing. The
plug-ins are those of the process: `use` says which, once. Thread: any.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.errors import ConfigError
from edge_runtime.shipped import ADDRESSES, CODE_BACKENDS, ENTRIES, OPTIONS, SHIPPED

if TYPE_CHECKING:
    from importlib.metadata import Distribution


log = logging.getLogger(__name__)

DECLARATIONS = {
    "backends": "edge_runtime.backends.declaration:Declaration",
    "doors": "edge_runtime.doors.door:DoorDeclaration",
    "importers": "edge_runtime_converters.importing.importers:Importer",
    "kinds": "edge_runtime.models.folder_files:FolderFile",
    "verbs": "edge_runtime.cli.verbs:Verb",
    "protocols": "edge_runtime.doors.http.protocols:ProtocolDeclaration",
    "steps": "edge_runtime.steps:StepsDeclaration",
    "answers": "edge_runtime.answers:AnswerLayout",
}
"""The kinds of plug-ins, with the class of their declarations. Its `callables` are texts "module:attribute" of what it
is called by."""

_NAME = re.compile(r"[a-z][a-z0-9._-]{0,63}")
_OWN_DISTRIBUTION = "edge-runtime"
_VARIABLE = "EDGE_RUNTIME_USED_PLUGINS"

COLUMNS = ("kind", "name", "distribution", "version", "state", "reason")
"""The columns of the listing."""

State = Literal["found", "ready", "failed", "missing", "unused"]
"""found: not imported yet. ready: it was imported, and is what it has to be. missing: its distribution is not
installed. unused: it is installed, and `plugins` does not name its distribution."""


class Option(Struct, frozen=True):
    """An option of the command line that a door brings, such as `--http-control`.

    metavar: of its value; "" for one that is said or not. keys: of `serve`, the keys of `config.toml` that it sets
    where no option before it does; of a verb that asks a daemon, the doors whose client takes it.
    """

    name: str
    metavar: str
    help: str
    keys: tuple[str, ...] = ()
    default: str | None = None

    @property
    def attribute(self) -> str:
        """Where argparse puts its value."""
        return self.name.removeprefix("--").replace("-", "_")


class ClientAddress(Struct, frozen=True):
    """The addresses of a door. form: for people. client_class: takes them; its name in `edge_runtime`."""

    door: str
    form: str
    schemes: tuple[str, ...]
    client_class: str


class Plugin(Struct, frozen=True):
    """One entry point of a distribution, or a distribution without any. location: "module:attribute".

    kind, name, location: empty where the distribution is missing, or has no entry points. reason: why it is not ready.
    """

    kind: str
    name: str
    distribution: str
    version: str
    state: State
    reason: str = ""
    location: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether nothing is known that keeps it from being used."""
        return self.state in ("found", "ready")

    def as_json(self) -> dict[str, str]:
        """Its entry in the result of `stats`, and in what `edge-runtime plugins` prints."""
        return {column: getattr(self, column) for column in COLUMNS}


def code_backends() -> tuple[str, ...]:
    """Return the names of backends of code, which every profile has. Imports nothing."""
    return CODE_BACKENDS


def options(of: str) -> tuple[Option, ...]:
    """Return the options that our doors bring: "serve" for that verb's, "connect" for those of verbs that ask a daemon.

    Imports nothing.
    """
    return tuple(Option(name, *row) for name, row in OPTIONS[of].items())


def entries() -> tuple[str, ...]:
    """Return the entries of the result of `stats` that are null where no door fills them. Imports nothing."""
    return ENTRIES


def addresses() -> tuple[ClientAddress, ...]:
    """Return the addresses of our doors that have a client. Imports nothing."""
    return tuple(ClientAddress(door, *row) for door, row in ADDRESSES.items())


def names(kind: str) -> tuple[str, ...]:
    """Return the names of all of one kind of `SHIPPED`, ours first, in their order. Imports nothing."""
    return (*SHIPPED[kind], *(each.name for each in _used if each.kind == kind and each.is_usable))


def declared(kind: str, name: str) -> Any:
    """Import and return the declaration of one name.

    Raises KeyError: there is no such name. ConfigError: a plug-in's cannot be imported, or is not a declaration.
    """
    if name in SHIPPED[kind]:
        return named(SHIPPED[kind][name])
    plugin = next((each for each in _used if (each.kind, each.name) == (kind, name)), None)
    if plugin is None:
        raise KeyError(name)
    if not plugin.is_usable:
        raise ConfigError(_sentence(plugin))
    try:
        found = checked(kind, name, plugin.location)
    except (Exception, SystemExit) as error:
        plugin = _replaced(plugin, replace(plugin, state="failed", reason=reason_of(error)))
        raise ConfigError(_sentence(plugin)) from error
    _replaced(plugin, replace(plugin, state="ready"))
    return found


def fail(kind: str, name: str, error: BaseException) -> None:
    """Tell of a plug-in in use that it broke its contract: from now on it is none of `names`."""
    for plugin in _used:
        if (plugin.kind, plugin.name) == (kind, name) and plugin.is_usable:
            failed = _replaced(plugin, replace(plugin, state="failed", reason=reason_of(error)))
            log.error("a plug-in failed", extra={"kind": kind, "plugin": name, "reason": failed.reason})


def is_plugin(kind: str, name: str) -> bool:
    """Return whether a name is that of a plug-in in use, usable or not, and none of ours."""
    return name not in SHIPPED[kind] and any((each.kind, each.name) == (kind, name) for each in _used)


def named(text: str) -> Any:
    """Import and return what a text names: "module:attribute", or "module"."""
    module, _, attribute = text.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def use(distributions: Iterable[str]) -> None:
    """Use the plug-ins of these distributions and of no others, from now on. Imports none of them. Raises nothing.

    Where just these are in use, their states stay as they are.
    """
    global _used  # noqa: PLW0603 (the plug-ins of the process)
    wanted = {_normalised(each): each for each in distributions}
    if [*wanted] == list(dict.fromkeys(_normalised(each.distribution) for each in _used)):
        return
    found: list[Plugin] = []
    for distribution in wanted.values():
        found += _without_clashes(_plugins_of(distribution), found)
    _used = tuple(found)


def use_as_parent(environment: Mapping[str, str]) -> None:
    """Use the plug-ins that the process which started this one uses, as its `for_children` says. Raises nothing."""
    if said := environment.get(_VARIABLE):
        use(said.split(","))


def for_children() -> dict[str, str]:
    """Return the variable that names the distributions in use to child processes; none where none is."""
    named_ones = dict.fromkeys(each.distribution for each in _used)
    return {_VARIABLE: ",".join(named_ones)} if named_ones else {}


def used() -> tuple[Plugin, ...]:
    """Return the plug-ins in use, in the order of `plugins`, with what is known of them now."""
    return _used


def installed_unused() -> tuple[Plugin, ...]:
    """Return the plug-ins of installed distributions that are not in use. Looks at every distribution."""
    from importlib.metadata import distributions

    named_ones = {_normalised(each.distribution) for each in _used}
    found = {_normalised(name): name for each in distributions() if (name := each.metadata["Name"])}
    others = [name for key, name in sorted(found.items()) if key not in named_ones and key != _OWN_DISTRIBUTION]
    reason = 'to use it, add its distribution to "plugins" in config.toml'
    return tuple(
        replace(plugin, state="unused", reason=reason) for each in others for plugin in _plugins_of(each) if plugin.kind
    )


def start(distributions: Iterable[str]) -> None:
    """Use the plug-ins of these distributions, try each, and log its state. Raises nothing. Thread: as of `try_all`."""
    use(distributions)
    try_all()
    for plugin in _used:
        words = {"kind": plugin.kind, "plugin": plugin.name, "distribution": plugin.distribution}
        if plugin.state == "ready":
            log.info("a plug-in is ready", extra={**words, "version": plugin.version})
        else:
            log.error("a plug-in is not used", extra={**words, "state": plugin.state, "reason": plugin.reason})


def try_all() -> None:
    """Import each plug-in in use, first in a child process. Raises nothing.

    What ends the child, or does not end, is not imported here. Thread: one that outlives the children: main.
    """
    from edge_runtime.plugin_trials import try_plugins

    for distribution in dict.fromkeys(each.distribution for each in _used):
        plugins = [each for each in _used if each.distribution == distribution and each.state == "found"]
        for plugin, reason in zip(plugins, try_plugins(plugins), strict=True):
            if reason:
                _replaced(plugin, replace(plugin, state="failed", reason=reason))
    for plugin in _used:
        if plugin.state == "found":
            with suppress(ConfigError):  # which its state has
                declared(plugin.kind, plugin.name)


def checked(kind: str, name: str, location: str) -> Any:
    """Import a declaration. Raises TypeError, ValueError: it is not one; or whatever its module raises."""
    found, wanted = named(location), named(DECLARATIONS[kind])
    if not isinstance(found, wanted):
        raise TypeError(f"{location} is of type {type(found).__name__}, wanted {wanted.__module__}.{wanted.__name__}")
    if found.name != name:
        raise ValueError(f"{location} says that its name is {found.name!r}, and its entry point {name!r}")
    return found


def reason_of(error: BaseException) -> str:
    """Return why a plug-in cannot be used: the first line of an error, with its type."""
    text = str(error).strip().partition("\n")[0][:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- private --------------------------------------------------------------------------------------------------------

_used: tuple[Plugin, ...] = ()


def _plugins_of(distribution: str) -> list[Plugin]:
    """Read the entry points of a distribution. Raises nothing."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find_distribution

    def one(state: State, reason: str, version: str = "") -> list[Plugin]:
        return [Plugin("", "", distribution, version, state, reason)]

    if _normalised(distribution) == _OWN_DISTRIBUTION:
        return one("failed", "it is this distribution, whose parts need no naming")
    try:
        found = find_distribution(distribution)
        plugins = list(_entries(found, distribution))
        version = found.version
    except PackageNotFoundError:
        return one("missing", f"there is no distribution of this name here; pip install {distribution}")
    except Exception as error:  # noqa: BLE001 (its metadata may be anything)
        return one("failed", f"its metadata cannot be read: {reason_of(error)}")
    return plugins or one("failed", f"it has no entry points of edge_runtime.{', .'.join(DECLARATIONS)}", version)


def _entries(found: Distribution, distribution: str) -> Iterable[Plugin]:
    for entry in found.entry_points:
        kind = entry.group.removeprefix("edge_runtime.")
        if kind == entry.group or kind not in DECLARATIONS:
            continue
        plugin = Plugin(kind, entry.name, distribution, found.version, "found", location=entry.value)
        if not _NAME.fullmatch(entry.name):
            yield replace(plugin, state="failed", reason="a name has small letters, digits, dots, - and _ alone")
        elif not re.fullmatch(r"[\w.]+:\w+", entry.value):
            yield replace(plugin, state="failed", reason=f"got {entry.value!r}, wanted module:attribute")
        else:
            yield plugin


def _without_clashes(found: Iterable[Plugin], before: Sequence[Plugin]) -> Iterable[Plugin]:
    """Fail the plug-ins whose names we ship, or others took before."""
    taken = {(each.kind, each.name): each.distribution for each in before if each.is_usable}
    for plugin in found:
        owner = (
            _OWN_DISTRIBUTION if plugin.name in SHIPPED.get(plugin.kind, ()) else taken.get((plugin.kind, plugin.name))
        )
        if owner is not None and plugin.is_usable:
            yield replace(plugin, state="failed", reason=f"{owner} has {plugin.kind} of this name")
            continue
        if plugin.is_usable:
            taken[plugin.kind, plugin.name] = plugin.distribution
        yield plugin


def _replaced(old: Plugin, new: Plugin) -> Plugin:
    global _used  # noqa: PLW0603
    _used = tuple(new if each is old else each for each in _used)
    return new


def _sentence(plugin: Plugin) -> str:
    return f"the plug-in {plugin.name} of {plugin.distribution} cannot be used: {plugin.reason}"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
