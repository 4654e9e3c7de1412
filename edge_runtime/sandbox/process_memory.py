"""Memory of a process: how much it has, how much it may have, how much a piece of work added, who died for want of it.

Reads /proc and sets limits of this process only. Called by the sandbox, by the functions that run in it, and by
backends.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h, mallopt(3)."""

_STATUS, _VMSTAT = Path("/proc/self/status"), Path("/proc/vmstat")


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of this process, or of `pid`; 0 where /proc does not report it."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * resource.getpagesize()


def proportional_bytes(pid: int) -> int:
    """Memory of a process with its share of what it shares; 0 where /proc does not report it."""
    return _field_bytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") or 0


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def watch_growth(at_least: int) -> Callable[[], int]:
    """Start to measure; the returned function gives the bytes added since then, and never less than `at_least`.

    Resident memory shows what was mapped, and what the allocator handed out shows what a load took of memory that an
    earlier one freed: the larger counts. at_least: the artifact's size, for loads that overlap others' ends.
    """
    resident, allocated = resident_bytes(), allocated_bytes()
    return lambda: max(resident_bytes() - resident, allocated_bytes() - allocated, at_least)


def allocated_bytes() -> int:
    """Bytes that malloc has handed out in this process, of all its arenas; 0 where the C library does not report it."""
    if _heap_count is None:
        return 0
    told = _heap_count()
    return int(told.uordblks + told.hblkhd)


@contextlib.contextmanager
def limited_memory(nbytes: int, *, besides: int = 0) -> Iterator[None]:
    """Limit this process's data to `nbytes` and `besides`: heap, stacks and private memory, touched or not.

    besides: memory that others than the limited work need. Beyond the limit libraries fail to allocate. Raises
    MemoryError with a sentence that names `nbytes`.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = nbytes + besides
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it needs more memory than the {nbytes} bytes that it may have") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def bound_data(nbytes: int) -> None:
    """Bound this process's data, for good, to `nbytes` more than it has now: heap, stacks, private memory.

    Beyond it libraries fail to allocate, which ends one run and not the process. The kernel counts what is reserved to
    be written, touched or not; shared memory and files do not count.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes() + nbytes
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def share_one_heap() -> None:
    """Have all threads of this process allocate from one heap, where the C library has a heap a thread.

    Threads of Python hold the interpreter while they allocate, so they seldom meet there. Call before there are any.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def data_bytes() -> int:
    """Memory that counts against `limited_memory` and `bound_data` now; 0 where the kernel does not say."""
    return _field_bytes(_STATUS, "VmData:") or 0


def start_peak() -> int:
    """Start to measure peak memory anew; returns the resident memory of now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes()


def peak_bytes() -> int:
    """The highest resident memory since `start_peak`."""
    return _field_bytes(_STATUS, "VmHWM:") or resident_bytes()


class _HeapCount(ctypes.Structure):
    """`struct mallinfo2`: uordblks is what is handed out of arenas, hblkhd what is mapped by itself. mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _find_heap_count() -> Callable[[], Any] | None:
    """Return `mallinfo2`, of glibc 2.33 and later."""
    found: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.argtypes, found.restype = (), _HeapCount
    return cast("Callable[[], Any] | None", found)


_heap_count = _find_heap_count()


def _field_bytes(path: Path, field: str) -> int | None:
    """Read a line of a file in /proc: the field's name, a number, kB."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None
