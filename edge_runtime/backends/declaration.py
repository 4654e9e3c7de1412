"""The declaration of a backend, read before its library is imported: the core decides by values and knows no name.

Owns: the fields, and what follows from them for the place of a model: inside the daemon, or in a host. A declaration
stands beside each factory, in the package of its backend, and imports nothing but this. It is data: prepared parents
and hosts get it with their task. Text like "module:attribute" names what is imported late.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from edge_runtime.plugins import named

if TYPE_CHECKING:
    from edge_runtime.backends.base import LoadOptions

_TRIED_PRECISIONS = ("", "f32", "int8")
"""Precisions in which the rule's models were tried."""


class Declaration(Struct, frozen=True, kw_only=True):
    """A backend, as the core knows it."""

    name: str
    """In profiles and configuration."""

    factory: str
    """"module:attribute" of what makes a `LibraryBackend`."""

    artifacts: tuple[str, ...]
    """Names of the files that it loads, best first."""

    beside: tuple[str, ...] = ()
    """Files that lie beside each of its artifacts, under these names; without one of them the artifact is another's."""

    data: tuple[str, ...] = ()
    """Further files beside an artifact that it reads where they are there: a release carries them too. Data, never
    code."""

    libraries: tuple[str, ...] = ()
    """Modules, of which it needs one."""

    extra: str = ""
    """The optional dependencies of this distribution that bring its library."""

    advice: str = ""
    """How to install the library, where no extra brings it."""

    # ---- a load -----------------------------------------------------------------------------------------------------

    load_cost: int = 0
    """What a load takes, to sort by: reading a file 0, compiling it 1, importing a framework 5, running code 6."""

    is_code: bool = False
    """Its files are code: they run where the configuration allows it, which the factory takes as `allow`, and in a host
    alone, which has the variables of the environment that are meant for them."""

    takes_delegate: bool = False
    """A profile may name a library that takes operators over."""

    less_clear_than: tuple[str, ...] = ()
    """Backends that say more about a file that neither could load."""

    loads_functions: bool = False
    """It loads the functions of a pipeline's steps: it has `load_functions`."""

    why_one_run: str = ""
    """Why one model has one run at a time, where that is so."""

    builder: str = ""
    """"module:class" of the kind of build (builds/build_store.py) that makes what it loads on this device. The factory
    takes the source of that as `builds`, and it has `prepare`."""

    serves_meanwhile: bool = False
    """It may serve a model until another backend has built what it needs, and be asked beside the model's requests."""

    # ---- a model inside the daemon ----------------------------------------------------------------------------------

    inside: tuple[str, ...] = ()
    """Suffixes of artifacts that `isolation = "never"` may keep inside. Some other formats hold code, and few of their
    readers were made for files of strangers."""

    rule: str = ""
    """"module:function" that takes an artifact and returns why it must not run inside, None where it may; "": never."""

    plain_options: tuple[str, ...] = ()
    """Its options that change no kernel, and take nothing but one model's own: with these alone a model may run inside,
    or share a host."""

    # ---- a host -----------------------------------------------------------------------------------------------------

    prepare: str = ""
    """"module", or "module:function" to be called: imported before hosts are forked, which then share it. Starts no
    thread."""

    sees: Literal["folder", "file"] = "file"
    """What a host may read: the folder of the artifact, or that file alone."""

    cache_option: str = ""
    """The option that names a folder where the library may write."""

    starts_processes: bool = False
    """Hosts may start processes."""

    ends_softly: bool = False
    """A host ends by itself once its channel is closed, with all that Python does then; others just end."""

    shares: tuple[str, ...] = ()
    """Suffixes of artifacts that quiet models may share a host with: they hold no code, and come opened, to
    `load_opened`."""

    begins_early: bool = False
    """A start may prepare hosts before it knows that one is wanted."""

    yields_to: tuple[str, ...] = ()
    """Libraries of backends that profiles prefer for the same files: where one is here, no start begins early."""

    # ---- runs in a host ---------------------------------------------------------------------------------------------

    runs_ahead: bool = False
    """A host takes a run while others are on."""

    reads_in_place: bool = False
    """It reads inputs where they lie, and never writes there. Others get copies of what is read-only."""

    interrupts: bool = False
    """It can end a run that is on: its instances have `attach` and `interrupt`."""

    calls_models: bool = False
    """Its models may call others: its instances have `attach`."""

    chain: str = ""
    """"module:function", (OwnChain of models/chains.py) -> `ModelChain`: what answers the requests of its models in the
    daemon, by runs of the forms that their host has. Without one, each request is a run."""

    tuner: str = ""
    """"module:function", (TableTrial) -> `TableChoice`, both of models/table_choice.py: what `tune` chooses for its
    models, in place of backend, precision and layout."""

    tuned_table: str = ""
    """The table of `model.toml` that it chooses keys of."""

    @property
    def callables(self) -> tuple[str, ...]:
        """The functions and classes that the daemon and hosts call, as text."""
        return (self.factory,)


def why_always_hosted(declaration: Declaration, artifact: Path) -> str | None:
    """Return why an artifact runs in a host, whatever the settings say; None where they decide."""
    if declaration.is_code:
        return "is code"
    return None if artifact.suffix in declaration.inside else "is of a kind that is read in a host alone"


def why_not_inside(declaration: Declaration, artifact: Path, options: LoadOptions) -> str | None:
    """Return why this artifact must run in a host, in words; None where it may run inside the daemon.

    Reads the file (some milliseconds), loads no library, raises nothing: a file that cannot be read belongs in a host.
    """
    reason = _why_not_covered(declaration, options)
    if reason is not None:
        return reason
    why_not: str | None = named(declaration.rule)(artifact)
    return why_not


def _why_not_covered(declaration: Declaration, options: LoadOptions) -> str | None:
    """Return the part of the way that a model is loaded that was not tried."""
    if not declaration.rule:
        return f"models of {declaration.name} always run in a host"
    if options.device.upper() not in ("", "CPU") or options.delegate:
        return f"it runs on {options.device or options.delegate}, and the rule covers the CPU alone"
    if options.precision not in _TRIED_PRECISIONS:
        return f"it runs in {options.precision}, and the rule covers f32 and int8 alone"
    if untried := sorted(set(options.extra) - set(declaration.plain_options)):
        return f"it is loaded with the option {untried[0]!r}, which the rule does not cover"
    return None
