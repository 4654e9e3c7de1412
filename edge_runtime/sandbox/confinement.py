"""What a child process does to itself before any library sees a model.

Owns: the confinement that every child has, and the filter of system calls. What it may reach of the disk is
landlock.py's, how memory is bounded process_memory.py's, its time child.py's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from edge_runtime.sandbox.descriptors import limit_child
from edge_runtime.sandbox.landlock import restrict
from edge_runtime.sandbox.process_memory import bound_data

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
"""linux/prctl.h, linux/seccomp.h."""

_CAPABILITY_VERSION_3 = 0x20080522
_OTHERS_FILES = 1 << 1 | 1 << 3
"""CAP_DAC_OVERRIDE, CAP_FOWNER; linux/capability.h."""

_FIRST_TO_GO = "1000"
"""oom_score_adj: when memory runs out, the kernel ends this process and not the one that serves."""


class _Calls(NamedTuple):
    """Numbers of system calls on one kind of machine, and its AUDIT_ARCH of linux/audit.h."""

    architecture: int
    socket: int
    connect: int
    prlimit: int


_ARM = _Calls(0x40000028, 281, 283, 369)
_MACHINES = {
    ("x86_64", 8): _Calls(0xC000003E, 41, 42, 302),
    ("aarch64", 8): _Calls(0xC00000B7, 198, 203, 261),
    ("aarch64", 4): _ARM,
    ("armv8l", 4): _ARM,
    ("armv7l", 4): _ARM,
}
"""Machine and bytes of a pointer -> its system calls."""

_IO_URING_SETUP = 425
"""On every machine. A ring makes and connects sockets without those system calls."""

_X32 = 0x40000000
"""On x86_64 the same calls have a second number from here on, which no other machine uses."""


class Confinement(Struct, frozen=True):
    """How a child confines itself.

    parent: the process whose thread makes the child; the kernel ends the child with that thread. niceness: added to the
    parent's. has_network: whether it may open sockets other than Unix ones, and connect any. reads: folders and files
    that it may read, beside Python and the system's libraries; None for the whole disk. writes: those that it may
    change too, where `reads` is not None. within: real folders and files that `reads` must lie in, wherever links lead
    by then, and so the plain files that links in them lead to; () for anywhere, and no links. has_unix: whether a child
    with network may open Unix sockets too, which no rule of the disk guards: the daemon takes orders by them.
    memory_bytes: what its heap and stacks may take beyond what they have when it confines itself; None for no limit.
    """

    parent: int
    niceness: int = 0
    has_network: bool = False
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    memory_bytes: int | None = None
    has_unix: bool = True

    def apply(self) -> None:
        """Confine this process, and all that it starts, for good. Call before it has threads.

        It dies with its parent, gains no privileges, leaves no core dump, dies first where memory runs out, and can
        neither signal nor look into the processes outside. Descriptors that are open stay usable. It may be called in
        a child that was forked from a parent with libraries loaded. Raises OSError: the kernel refuses what it has.
        """
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.parent:  # the parent ended before the line above
            os._exit(1)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_child()
        os.nice(self.niceness)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
        _drop_capabilities(libc)
        if self.memory_bytes is not None:
            bound_data(self.memory_bytes)
        restrict(self.reads, self.writes, has_network=self.has_network, within=self.within)
        _filter_calls(libc, has_network=self.has_network, has_unix=self.has_unix)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Where the daemon is root: keep nothing of it but the access to files that belong to others."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)  # twice: effective, permitted, inheritable
    if libc.capget(header, held) == 0:
        low = struct.unpack_from("=I", held, 4)[0] & _OTHERS_FILES
        if any(held.raw):
            libc.capset(header, struct.pack("=6I", low, low, 0, 0, 0, 0))


def _filter_calls(libc: ctypes.CDLL, *, has_network: bool, has_unix: bool) -> None:
    """Install a seccomp filter. It refuses to change other processes' limits, which Landlock does not guard.

    Without network it refuses `connect`, and `socket` but for Unix and netlink ones, by which libraries list devices;
    with Unix sockets a child could else give orders to the daemon. Best effort: nothing changes on a kernel without
    filters or a machine that is not in the table.
    """
    calls = _MACHINES.get((platform.machine(), struct.calcsize("P")))
    if calls is None:
        return
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    allow, deny = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EACCES)  # SECCOMP_RET_ALLOW, _ERRNO
    # (code, jump if true, jump if false, operand); struct seccomp_data: nr at 0, arch at 4, args[0] at 16.
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, calls.architecture),
        deny,  # programs of a second architecture
        (load, 0, 0, 0),
        (at_least, 0, 1, _X32),
        deny,
        (equal, 0, 1, _IO_URING_SETUP),
        deny,
        (equal, 0, 4, calls.prlimit),
        (load, 0, 0, 16),
        (equal, 0, 1, 0),  # of this process
        allow,
        deny,
    ]
    if not has_network:
        program += [
            (equal, 0, 1, calls.connect),
            deny,
            (equal, 0, 5, calls.socket),
            (load, 0, 0, 16),
            (equal, 2, 0, 1),  # AF_UNIX
            (equal, 1, 0, 16),  # AF_NETLINK
            deny,
            allow,
        ]
    elif not has_unix:
        program += [
            (equal, 0, 3, calls.socket),
            (load, 0, 0, 16),
            (equal, 0, 1, 1),  # AF_UNIX
            deny,
        ]
    program.append(allow)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    kept = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HP", len(program), ctypes.addressof(kept))
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0)
