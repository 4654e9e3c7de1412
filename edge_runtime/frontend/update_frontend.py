"""The ops of updates: what may be asked, with which parameters, and what the updater is told.

Owns: the shapes of these ops (wire v1). What changes something is answered on control endpoints only, so nothing that
comes by MQTT names a folder. Thread: `answer` is called on a transport's thread; whatever takes longer replies from the
updater's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.wire.headers import RequestHeader, short, typed

Reply = Callable[[Any], None]

DEFAULT_HISTORY = 50
MAX_HISTORY = 1_000
"""As many as a device keeps (update/journal_tables.py): some 200 KB."""

PARAMETERS = {"update_history": ("count",), "update_import": ("folder",)}
"""What else than its name an op takes; the others take nothing."""


class Updates(Protocol):
    """An updater as far as ops see it. Each `done` gets the result or an EdgeRuntimeError, once, from any thread."""

    def status(self) -> dict[str, Any]:
        """What runs, what is under way, what was refused, how the last check ended."""
        ...

    def history(self, count: int) -> list[dict[str, Any]]:
        """The last things that happened, newest first."""
        ...

    def check(self, done: Reply) -> None:
        """Look what is offered, and install nothing."""
        ...

    def apply(self, done: Reply) -> None:
        """Look, and install what is meant for this device."""
        ...

    def import_folder(self, folder: str, done: Reply) -> None:
        """The same from a folder."""
        ...

    def roll_back(self, model: str, done: Reply) -> None:
        """Let the release before serve again."""
        ...


class UpdateFrontend:
    """Answers the ops of updates by name."""

    CONTROL_OPS: ClassVar[frozenset[str]] = frozenset(
        {"update_check", "update_apply", "update_import", "update_rollback"}
    )
    OPS: ClassVar[frozenset[str]] = CONTROL_OPS | {"update_status", "update_history"}

    def __init__(self, updates: Updates | None) -> None:
        self._updates = updates

    def answer(self, header: RequestHeader, reply: Reply) -> None:
        """Call `reply` exactly once with the op's result or an EdgeRuntimeError; raises EdgeRuntimeError instead."""
        updates = self._updates
        if updates is None:
            raise Unsupported(
                "updates are not configured; add [update] with root_file, and url or folder, to the daemon's "
                "configuration, and restart it"
            )
        _check_parameters(header)
        match header.op:
            case "update_status":
                reply(updates.status())
            case "update_history":
                reply(updates.history(_count(header)))
            case "update_check":
                updates.check(reply)
            case "update_apply":
                updates.apply(reply)
            case "update_import":
                updates.import_folder(_folder(header), reply)
            case "update_rollback":
                updates.roll_back(_model(header), reply)


def _check_parameters(header: RequestHeader) -> None:
    known = PARAMETERS.get(header.op, ())
    for name in header.parameters:
        if name not in known:
            wanted = " and ".join(known) or "none"
            raise DecodeFailed(f"parameters: {header.op} does not know {short(name)}; wanted {wanted}")


def _count(header: RequestHeader) -> int:
    count: int = typed(header.parameters, "count", int, DEFAULT_HISTORY)
    if not 1 <= count <= MAX_HISTORY:
        raise DecodeFailed(f"count: got {short(count)}, wanted 1 to {MAX_HISTORY} entries")
    return count


def _folder(header: RequestHeader) -> str:
    folder: str = typed(header.parameters, "folder", str, "")
    if not Path(folder).is_absolute() or "\0" in folder:
        raise DecodeFailed(f"folder: got {short(folder)}, wanted the whole path of a folder that the daemon sees")
    return folder


def _model(header: RequestHeader) -> str:
    if not header.model:
        raise DecodeFailed("update_rollback wants a model; `edge-runtime update status` says which have a release")
    return header.model
