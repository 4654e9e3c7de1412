"""What the daemon's doors share: how each is opened and closed.

A door binds the addresses of one protocol: doors/http/door.py, doors/grpc/door.py and frigate/door.py, started with the
daemon, and doors/mqtt/door.py, started once the daemon is ready. daemon/daemon.py calls them. Thread: main, except
where a method says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edge_runtime.doors.binding import PASSING
from edge_runtime.errors import AddressTaken, ConfigError

if TYPE_CHECKING:
    from edge_runtime.config.door_access import DoorAddress
    from edge_runtime.request.infer_frontend import InferFrontend

log = logging.getLogger(__name__)


class DaemonDoor(Protocol):
    """A door that opens with the daemon."""

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        ...

    def reload(self) -> None:
        """Read again the files that may change while serving; a broken one leaves things as they are."""
        ...

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests, and wait at most `limit_s` until the door's thread does."""
        ...

    def close(self) -> None:
        """Send the replies that are there, and close. Idempotent."""
        ...


def drain(call: Callable[[Callable[[], None]], None], frontend: InferFrontend, limit_s: float) -> None:
    """Have a door's thread refuse new requests for inference, and wait until it does. call: runs a function there."""
    has_stopped = threading.Event()
    call(frontend.drain)
    call(has_stopped.set)
    has_stopped.wait(limit_s)


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Log a ConfigError raised inside: what cannot be read again is as before. what: its name, with "is" or "are"."""
    try:
        yield
    except ConfigError as error:
        log.error(f"{what} as before", extra={"reason": error.message})


def why_not_bound(address: DoorAddress, error: OSError, option: str) -> ConfigError:
    """The error for an address that cannot be bound. option: the command line's, that names another."""
    text = f"cannot bind {address}: {error.strerror or error}"
    if error.errno in PASSING:
        return AddressTaken(f"{text}; free it, or name another address with {option}")
    return ConfigError(f"{text}; wanted an address of this machine")
