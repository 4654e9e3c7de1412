"""One daemon for each state folder: two would overwrite each other's state.

Owns: the lock, which ends with the process however that ends. Writes nothing: the folder itself is locked, so that a
full disk or one that cannot be written keeps no daemon from serving. Called by the daemon, at its start and end.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from edge_runtime.errors import StateTaken

log = logging.getLogger(__name__)


class StateLock:
    """The right to be the only daemon of a folder. `take` and `release` are idempotent. Thread: main.

    is_shared: after `take`, whether another daemon uses the folder.
    """

    def __init__(self, folder: Path | None, *, may_share: bool) -> None:
        """folder: None, there is none. may_share: where another daemon has it, only say so.

        That is for a folder of no setting, with nothing in it but measurements, each written whole.
        """
        self._folder = folder
        self._may_share = may_share
        self._fd: int | None = None
        self.is_shared = False

    def take(self) -> None:
        """Lock the folder until `release`. Raises StateTaken: another daemon has it.

        A folder that cannot be locked at all (some network file systems lock only what is open for writing) is used
        without.
        """
        if self._folder is None or self._fd is not None:
            return
        try:
            self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            if not self._may_share:
                raise StateTaken(
                    f"state: {str(self._folder)!r} is another daemon's; give each a folder of its own (--state)"
                ) from None
            self.is_shared = True
            log.warning("another daemon keeps its measurements here too", extra={"folder": str(self._folder)})
        except OSError as error:
            self.release()
            log.debug("the state folder cannot be locked", extra={"folder": str(self._folder), "reason": str(error)})

    def release(self) -> None:
        """Let another daemon have it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
