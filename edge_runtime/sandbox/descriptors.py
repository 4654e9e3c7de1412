"""File descriptors: how many this process and its children may open, and who may still take one.

The one answer to "how many connections may there be": every door asks it before it keeps one, hosts and regions of
shared memory before they are made. Where none is left, no file can be read and no host can
be started, so connections have to leave some. Reads /proc; sets limits of this process only. Thread: any.
"""

from __future__ import annotations

import resource
from pathlib import Path

from edge_runtime.errors import ConfigError

LEAST_DESCRIPTORS = 128
"""A daemon with a few models, hosts and clients. One without any has 24."""

LEAST_RESERVED, MOST_RESERVED = 64, 4096
"""Kept free of connections: for hosts, which take about eight each, and for files."""

CHILD_DESCRIPTORS = 1024
"""Of a child process: select(2) takes no descriptor from 1 024 on, and libraries that use it may run there. A library
that wants more may raise it, to the daemon's own."""

_OPEN = Path("/proc/self/fd")


class Descriptors:
    """The descriptors of this process. limit: how many it may have, as it was when this was made."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
        if self.limit == resource.RLIM_INFINITY:
            self.limit = 1 << 20
        self._reserved = min(max(self.limit // 4, LEAST_RESERVED), MOST_RESERVED)

    def share(self, most: int) -> int:
        """Return how many of `most` connections a door may have: a quarter of all descriptors, so that others last."""
        return max(min(most, self.limit // 4), 1)

    def may_connect(self, *, is_control: bool = False) -> bool:
        """Return whether one more connection may be kept. is_control: by the control endpoint, which has a reserve."""
        return self._free() >= (self._reserved // 2 if is_control else self._reserved)

    def may_open(self) -> bool:
        """Return whether a host or a region may take some: as long as listeners have a reserve."""
        return self._free() >= self._reserved // 2

    def _free(self) -> int:
        """Return how many may still be opened."""
        try:
            # The size is their number since Linux 6.2.
            found = _OPEN.stat().st_size or sum(1 for _ in _OPEN.iterdir())
        except OSError:  # no /proc, or none is left to list it
            return 0
        return self.limit - found


def raise_limit() -> None:
    """Let this process have as many descriptors as it may: the default of 1 024 is for programs that use select(2).

    Raises ConfigError where that is too few to serve.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < LEAST_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {hard} files, and a daemon needs {LEAST_DESCRIPTORS}; raise the limit with "
            "`ulimit -n`, or LimitNOFILE= of its service"
        )


def limit_child() -> None:
    """Give this child process the limit that programs expect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > CHILD_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (CHILD_DESCRIPTORS, hard))
