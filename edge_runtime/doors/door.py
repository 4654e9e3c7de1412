"""The contract of a door, and the part that doors share: how each is opened and closed.

A door is what the daemon opens beside its core and closes with it: the addresses of a protocol, a broker, results that
are published. A row of the table of what is shipped, or a plug-in, names its `DoorDeclaration`; the daemon imports that
where the configuration has its table, and keeps a list of `Door`s that it knows nothing else of.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from edge_runtime.errors import ConfigError
from edge_runtime.plugins import Option

if TYPE_CHECKING:
    from edge_runtime.request.infer_frontend import InferFrontend

log = logging.getLogger(__name__)

TLS_OPTIONS = (
    Option(
        "--ca-file",
        "FILE",
        "PEM file of the authority that signed the server's certificate (mqtts://, https://, grpcs://)",
    ),
    Option("--cert-file", "FILE", "PEM file of this client's certificate (for the same)"),
    Option("--key-file", "FILE", "PEM file of that certificate's key"),
)
"""Of every client over TLS."""


class Door(Protocol):
    """One door. Thread: main, every call but `status`."""

    def start(self) -> None:
        """Bind, and answer from now on: models are loaded afterwards. Raises ConfigError, AddressTaken."""
        ...

    def ready(self) -> None:
        """Begin the work that waits for the models: all that the start found are loaded, or `start_limit_s` is over."""
        ...

    def reload(self) -> None:
        """Read again the files that may change while serving; a broken one leaves things as they are.

        Raises ConfigError, which is logged by then: the table of a new configuration was not taken over.
        """
        ...

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests, and wait at most `limit_s` until the door's thread does."""
        ...

    def close(self) -> None:
        """Send the replies that are there, and close: the core is closed. Idempotent."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Its entries in the result of `stats`, as JSON values; {} for none. Thread: any."""
        ...


class DoorDeclaration(Struct, frozen=True):
    """A door as its folder declares it, which imports nothing for that.

    name: of its table in the configuration. opens: "module:function" of a function that takes the daemon's
    `DoorContext` and returns the Door; its ConfigError says what cannot be. Empty: another door reads this table,
    which is one of `brings`. settings: the type of its table: a struct as those of config/settings.py, or of ours a
    tuple of structs; where it has `rules`, "module:function" that reads the addresses in a table and who may do what
    there, the door is opened if there is an address. extra: brings the libraries that the module imports. keys: of its
    table; it is opened where one of them is set, () where the table is there. brings: by a key of its table, another
    row that is opened too where it is set; by "", where the table is there. reloads: whether a reload takes its table
    over, which the door then finds in its context.

    options: of `edge-runtime serve`, with the keys of `config.toml` that each sets. entries: of the result of `stats`,
    null where the door is closed. status_fields: as of a `Verb`.

    schemes: of the addresses that its client takes; form: of such an address, for people. client: "module:function" of
    a function that takes the options of a verb and such an address, and returns a context manager that gives a client;
    its ConfigError says what cannot be. client_class: the client's name in `edge_runtime`. client_options: of the verbs
    that ask a daemon. offers: what the client can do of a daemon's control endpoint: the commands of the command line,
    as "models load".

    What verbs and the start need of a door of ours before they import it, shipped.py has too: options, entries,
    addresses. Those of a plug-in's door are not looked at.
    """

    name: str
    opens: str
    settings: Any
    extra: str = ""
    keys: tuple[str, ...] = ()
    brings: Mapping[str, str] = {}
    reloads: bool = False
    options: tuple[Option, ...] = ()
    entries: tuple[str, ...] = ()
    status_fields: str = ""
    schemes: tuple[str, ...] = ()
    form: str = ""
    client: str = ""
    client_class: str = ""
    client_options: tuple[Option, ...] = ()
    offers: tuple[str, ...] = ()

    @property
    def callables(self) -> tuple[str, ...]:
        """The functions that the daemon and the command line call, as text."""
        return tuple(filter(None, (self.opens, self.client)))

    def is_wanted(self, table: Any) -> bool:
        """Whether a table of the configuration opens this door."""
        return not self.keys or any(getattr(table, key) for key in self.keys)


def drain(call: Callable[[Callable[[], None]], None], frontend: InferFrontend, limit_s: float) -> None:
    """Have a door's thread refuse new requests for inference, and wait until it does. call: runs a function there."""
    has_stopped = threading.Event()
    call(frontend.drain)
    call(has_stopped.set)
    has_stopped.wait(limit_s)


@contextmanager
def keeping(what: str, reasons: list[str] | None = None) -> Iterator[None]:
    """Log a ConfigError raised inside: what cannot be read again is as before. what: its name, with "is" or "are".

    reasons: gets its message.
    """
    try:
        yield
    except ConfigError as error:
        log.error(f"{what} as before", extra={"reason": error.message})
        if reasons is not None:
            reasons.append(error.message)
