"""Confinement of a child process, before any library sees a model.

Owns: the confinement that every child has, and the filter of system calls: it guards what Landlock does not. What it
may reach of the disk is landlock.py's, how memory is bounded process_memory.py's, its time child.py's.
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
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from edge_runtime.sandbox.descriptors import limit_child
from edge_runtime.sandbox.landlock import NVIDIA_NODES, allow_thread_names, make_rules, restrict_by
from edge_runtime.sandbox.process_memory import data_bytes

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
"""linux/prctl.h, linux/seccomp.h."""

_CAPABILITY_VERSION_3 = 0x20080522
_OTHERS_FILES = 1 << 1
"""CAP_DAC_OVERRIDE; linux/capability.h. Not CAP_FOWNER: with it, root's child changes modes of everybody's files."""

_FIRST_TO_GO = "1000"
"""oom_score_adj: when memory runs out, the kernel ends this process and not the one that serves."""


class _Call(NamedTuple):
    """The number of a system call on each kind of machine; -1 where it has none."""

    x86_64: int
    arm64: int
    arm: int


_MACHINES = {
    ("x86_64", 8): (0xC000003E, 0),
    ("aarch64", 8): (0xC00000B7, 1),
    ("aarch64", 4): (0x40000028, 2),
    ("armv8l", 4): (0x40000028, 2),
    ("armv7l", 4): (0x40000028, 2),
}
"""Machine and bytes of a pointer -> its AUDIT_ARCH of linux/audit.h, and its place in a _Call."""

_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32
"""In struct seccomp_data; of arguments the low words, 4 bytes before the high ones. linux/seccomp.h."""

_SOCKET, _SOCKETPAIR, _CONNECT = _Call(41, 198, 281), _Call(53, 199, 288), _Call(42, 203, 283)
_PRLIMIT, _IOCTL, _CLONE = _Call(302, 261, 369), _Call(16, 29, 54), _Call(56, 220, 120)
_SETPRIORITY, _IOPRIO_SET = _Call(141, 140, 97), _Call(251, 30, 314)
_CLONE3 = 435

_RINGS = (425, 426, 427)
"""io_uring_setup, _enter, _register, on every machine: a ring does its work without system calls."""

_SCHEDULING = {
    "sched_setaffinity": _Call(203, 122, 241),
    "sched_setscheduler": _Call(144, 119, 156),
    "sched_setparam": _Call(142, 118, 154),
    "sched_setattr": _Call(314, 274, 380),
}
"""Their first argument is a thread; 0 is the caller. Of any other they answer 0 and do nothing: the C library names
threads so, ONNX Runtime in a `model.py` would log an error for each of its own, and ZeroMQ would abort."""

_GROUPS = {"setsid": _Call(112, 157, 66), "setpgid": _Call(109, 154, 57)}

_STARTS = {
    "fork": _Call(57, -1, 2),
    "vfork": _Call(58, -1, 190),
    "execve": _Call(59, 221, 11),
    "execveat": _Call(322, 281, 387),
}
"""Beside clone, whose flags tell a thread from a process."""

_REFUSED = {
    "shmget": _Call(29, 194, 307), "shmat": _Call(30, 196, 305), "shmctl": _Call(31, 195, 308),
    "semget": _Call(64, 190, 299), "semop": _Call(65, 193, 298), "semctl": _Call(66, 191, 300),
    "semtimedop": _Call(220, 192, 312), "semtimedop_time64": _Call(-1, -1, 420),
    "msgget": _Call(68, 186, 303), "msgsnd": _Call(69, 189, 301), "msgrcv": _Call(70, 188, 302),
    "msgctl": _Call(71, 187, 304), "mq_open": _Call(240, 180, 274),
    "add_key": _Call(248, 217, 309), "request_key": _Call(249, 218, 310), "keyctl": _Call(250, 219, 311),
    "unshare": _Call(272, 97, 337), "setns": _Call(308, 268, 375), "bpf": _Call(321, 280, 386),
    "perf_event_open": _Call(298, 241, 364), "userfaultfd": _Call(323, 282, 388),
}  # fmt: skip
"""System V's memory, semaphores and queues, and keys, outlive who made them and belong to all of a user's processes; a
namespace gives privileges back. No library that runs models uses any of these."""

_UNDONE = {
    "chmod": _Call(90, -1, 15), "fchmod": _Call(91, 52, 94), "fchmodat": _Call(268, 53, 333),
    "fchmodat2": _Call(452, 452, 452), "chown": _Call(92, -1, 182), "fchown": _Call(93, 55, 95),
    "lchown": _Call(94, -1, 16), "fchownat": _Call(260, 54, 325), "chown32": _Call(-1, -1, 212),
    "fchown32": _Call(-1, -1, 207), "lchown32": _Call(-1, -1, 198),
    "setxattr": _Call(188, 5, 226), "lsetxattr": _Call(189, 6, 227),
    "fsetxattr": _Call(190, 7, 228), "removexattr": _Call(197, 14, 235), "lremovexattr": _Call(198, 15, 236),
    "fremovexattr": _Call(199, 16, 237), "setxattrat": _Call(463, 463, 463),
    "removexattrat": _Call(466, 466, 466), "file_setattr": _Call(469, 469, 469),
}  # fmt: skip
"""Modes, owners and attributes of files, which no rule of Landlock guards. They answer 0 and do nothing: `shutil.copy`
ends with one of them."""

_TIMES = {
    "utime": (_Call(132, -1, -1), _SECOND),
    "utimes": (_Call(235, -1, 269), _SECOND),
    "futimesat": (_Call(261, -1, 326), _THIRD),
    "utimensat": (_Call(280, 88, 348), _THIRD),
    "utimensat_time64": (_Call(-1, -1, 412), _THIRD),
}
"""Times of files, and which argument has them. Those to which times are given do nothing too. Those that set the time
of now fail where they name a file: `Path.touch` takes an answer of 0 for a file that is there, and makes none."""

_SET_ATTRIBUTES = (0x40086602, 0x40046602, 0x401C5820)
"""FS_IOC_SETFLAGS, of 64 and of 32 bits, and FS_IOC_FSSETXATTR; linux/fs.h."""

_UNIX, _NETLINK = 1, 16
_STREAM, _SEQPACKET, _KINDS = 1, 5, 0xF
"""AF_, SOCK_; linux/socket.h, linux/net.h. A datagram socket of Unix reaches any other without `connect`, one of a
pair too."""

_USERS_PRIORITY = 2
_USERS_IO_PRIORITY = 3
"""PRIO_USER, IOPRIO_WHO_USER: all processes of a user."""

_NAMESPACES, _THREAD = 0x7E020000, 0x10000
"""CLONE_NEW*, CLONE_THREAD; linux/sched.h."""

_OWN = 0xFFFFFFFE
"""Stands in a filter for the number of the process that installs it. No process has this one."""

_X32 = 0x40000000
"""On x86_64 the same calls have a second number from here on, which no other machine uses."""

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand; linux/filter.h."""

_INSTRUCTION_BYTES, _OPERAND_AT = 8, 4

_LOAD, _AND = 0x20, 0x54  # BPF_LD|W|ABS, BPF_ALU|AND|K
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP|BPF_K and JEQ, JGE, JSET


def _answer(error: int) -> _Instruction:
    return (0x06, 0, 0, 0x00050000 | error)  # BPF_RET|K, SECCOMP_RET_ERRNO


_ALLOW: _Instruction = (0x06, 0, 0, 0x7FFF0000)  # SECCOMP_RET_ALLOW
_DENY, _NOT_PERMITTED, _NOTHING, _UNKNOWN = map(_answer, (errno.EACCES, errno.EPERM, 0, errno.ENOSYS))


_NO_DATAGRAMS: list[_Instruction] = [
    (_AND, 0, 0, _KINDS),
    (_EQUAL, 2, 0, _STREAM),
    (_EQUAL, 1, 0, _SEQPACKET),
    _NOT_PERMITTED,
    _ALLOW,
]
"""Once the kind of a socket is loaded."""


def _of_now(times: int) -> list[_Instruction]:
    """Refuse the time of now for a path: no times, in the argument at `times`, and a path in the one before."""
    no_times = [(_LOAD, 0, 0, times), (_EQUAL, 0, 6, 0), (_LOAD, 0, 0, times + 4), (_EQUAL, 0, 4, 0)]
    no_path = [(_LOAD, 0, 0, times - 8), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, times - 4), (_EQUAL, 0, 1, 0)]
    return [*no_times, *no_path, _NOTHING, _NOT_PERMITTED]


class Confinement(Struct, frozen=True):
    """How a child confines itself.

    parent: the process whose thread makes the child; the kernel ends the child with that thread. niceness: added to the
    parent's. has_network: whether it may open sockets other than Unix ones, and connect any. reads: folders and files
    that it may read, beside Python and the system's libraries; None for the whole disk. writes: those that it may
    change too, where `reads` is not None. within: real folders and files that `reads` must lie in, wherever links lead
    by then, and so the plain files that links in them lead to; () for anywhere, and no links. has_unix: whether a child
    with network may open Unix sockets too, which no rule of the disk guards: the daemon takes orders by them.
    memory_bytes: what its heap and stacks may take beyond what they have when it confines itself; None for no limit.
    has_children: whether it makes confined processes of its own, each in a group of its own; then it is our code that
    runs, is the parent of all orphans below it, so that they end with it, and may change modes and times of files too.
    starts_none: whether it may start threads only, no process.
    file_bytes: of each file that it writes. inherits: whether the process that it was forked from was confined, whose
    privileges and limits it has.
    """

    parent: int
    niceness: int = 0
    has_network: bool = False
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    memory_bytes: int | None = None
    has_unix: bool = True
    has_children: bool = False
    starts_none: bool = False
    file_bytes: int | None = None
    inherits: bool = False

    def apply(self) -> None:
        """Confine this process, and all that it starts, for good. Call before it has threads.

        It dies with its parent, gains no privileges, leaves no core dump, dies first where memory runs out, and can
        neither signal nor look into the processes outside. What it starts stays in its process group, so that one
        signal ends all of it. Descriptors that are open stay usable. Raises OSError: the kernel refuses what it has.
        """
        PreparedConfinement(self).enter()

    def program(self, architecture: int, column: int) -> list[_Instruction]:
        """Return the filter. Without network it refuses `connect`: with it a child could give orders to the daemon.

        A jump counts the instructions that it leaves out; a rule's own instructions end with an answer on every way.
        """

        def on(call: _Call | int, *answer: _Instruction) -> list[_Instruction]:
            number = call if isinstance(call, int) else call[column]
            return [(_EQUAL, 0, len(answer), number), *answer] if number >= 0 else []

        def of_caller(at: int, otherwise: _Instruction) -> list[_Instruction]:
            return [(_LOAD, 0, 0, at), (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, _OWN), _ALLOW, otherwise]

        program: list[_Instruction] = [
            (_LOAD, 0, 0, _ARCHITECTURE),
            (_EQUAL, 1, 0, architecture),
            _DENY,  # programs of a second architecture
            (_LOAD, 0, 0, _NUMBER),
            (_AT_LEAST, 0, 1, _X32),
            _DENY,
        ]
        for ring in _RINGS:
            program += on(ring, _DENY)
        program += on(_PRLIMIT, (_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, 0), _DENY, _ALLOW)
        if not self.has_network:
            program += on(_CONNECT, _DENY)
        program += on(_SOCKET, *self._sockets())
        if self.has_children:
            return [*program, _ALLOW]
        program += on(_SOCKETPAIR, (_LOAD, 0, 0, _SECOND), *_NO_DATAGRAMS)
        for call in (*_REFUSED.values(), *_GROUPS.values()):
            program += on(call, _NOT_PERMITTED)
        for call in _UNDONE.values():
            program += on(call, _NOTHING)
        for call, times in _TIMES.values():
            program += on(call, *_of_now(times))
        for call in _SCHEDULING.values():
            program += on(call, *of_caller(_FIRST, _NOTHING))
        for call, users in ((_SETPRIORITY, _USERS_PRIORITY), (_IOPRIO_SET, _USERS_IO_PRIORITY)):
            not_of_user = [(_LOAD, 0, 0, _FIRST), (_EQUAL, 0, 1, users), _NOT_PERMITTED]
            program += on(call, *not_of_user, *of_caller(_SECOND, _NOT_PERMITTED))
        attributes = [each for value in _SET_ATTRIBUTES for each in ((_EQUAL, 0, 1, value), _NOT_PERMITTED)]
        program += on(_IOCTL, (_LOAD, 0, 0, _SECOND), *attributes, _ALLOW)
        program += on(_CLONE3, _UNKNOWN)  # its flags lie in memory; the C library then takes `clone`
        no_process = [(_ANY_BIT, 1, 0, _THREAD), _NOT_PERMITTED] if self.starts_none else []
        no_namespace = [(_ANY_BIT, 0, 1, _NAMESPACES), _NOT_PERMITTED]
        program += on(_CLONE, (_LOAD, 0, 0, _FIRST), *no_namespace, *no_process, _ALLOW)
        if self.starts_none:
            for call in _STARTS.values():
                program += on(call, _NOT_PERMITTED)
        return [*program, _ALLOW]

    def _sockets(self) -> list[_Instruction]:
        """Answer `socket`: without network Unix ones and netlink, by which libraries list devices."""
        of_unix: list[_Instruction] = [_DENY]
        if self.has_children:
            of_unix = [_ALLOW]
        elif self.has_unix or not self.has_network:
            of_unix = [(_LOAD, 0, 0, _SECOND), *_NO_DATAGRAMS]
        others = [_ALLOW] if self.has_network else [(_EQUAL, 0, 1, _NETLINK), _ALLOW, _DENY]
        return [(_LOAD, 0, 0, _FIRST), (_EQUAL, 0, len(of_unix), _UNIX), *of_unix, *others]


class PreparedConfinement:
    """A confinement whose rules are made, for this process or for one that it forks, which then enters it.

    Entering is a few system calls: each page that a forked process writes is memory of its own, and making the rules
    there took 1.6 MiB of each host. `close` where the process that enters is another.
    """

    def __init__(self, wanted: Confinement) -> None:
        """Raises OSError."""
        self._wanted = wanted
        self._prctl = ctypes.CDLL(None).prctl
        self._limits: list[tuple[int, tuple[int, int]]] = []
        if wanted.memory_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = data_bytes() + wanted.memory_bytes
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            self._limits.append((resource.RLIMIT_DATA, (most, most)))
        if wanted.file_bytes is not None:
            self._limits.append((resource.RLIMIT_FSIZE, (wanted.file_bytes, wanted.file_bytes)))
        # Its code is that of its kind: a process that forks many makes it once.
        kind = Confinement(
            0,
            has_network=wanted.has_network,
            has_unix=wanted.has_unix,
            has_children=wanted.has_children,
            starts_none=wanted.starts_none,
        )
        found = _filter_code(kind)
        self._code: ctypes.Array[ctypes.c_char] | None = None
        self._header = ctypes.create_string_buffer(0)
        self._own_at: tuple[int, ...] = ()
        if found is not None:
            code, self._own_at = found
            self._code = ctypes.create_string_buffer(code, len(code))
            header = struct.pack("HP", len(code) // _INSTRUCTION_BYTES, ctypes.addressof(self._code))
            self._header = ctypes.create_string_buffer(header, len(header))
        self._rules = make_rules(wanted.reads, wanted.writes, has_network=wanted.has_network, within=wanted.within)
        # Elsewhere it may not: there it could take back that it is the first to go.
        self._names_threads = wanted.reads is not None and self._rules >= 0 and any(map(os.path.exists, NVIDIA_NODES))

    def enter(self) -> None:
        """Confine this process, and all that it starts, for good. Raises OSError."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._wanted.parent:  # the parent ended before the line above
            os._exit(1)
        if not self._wanted.inherits:
            self._drop_rights()
        for kind, limit in self._limits:
            resource.setrlimit(kind, limit)
        if self._names_threads:
            allow_thread_names(self._rules)
        if self._rules >= 0:
            restrict_by(self._rules)
            self.close()
        # Best effort: nothing changes on a kernel without filters, or another machine.
        if self._code is not None:
            for place in self._own_at:
                struct.pack_into("=I", self._code, place, os.getpid())
            self._prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._header, 0, 0)

    def close(self) -> None:
        """Release the rules. Idempotent."""
        if self._rules >= 0:
            os.close(self._rules)
            self._rules = -1

    def _drop_rights(self) -> None:
        """Give up what a process that is forked from this one then has not."""
        self._prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self._wanted.has_children:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_child()
        os.nice(self._wanted.niceness)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
        _drop_capabilities()


@cache
def _filter_code(kind: Confinement) -> tuple[bytes, tuple[int, ...]] | None:
    """Return a filter, and where in it the process's own number is to stand; None for a machine without filters."""
    machine = _MACHINES.get((platform.machine(), struct.calcsize("P")))
    if machine is None:
        return None
    program = kind.program(*machine)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    places = (number * _INSTRUCTION_BYTES + _OPERAND_AT for number, each in enumerate(program) if each[3] == _OWN)
    return code, tuple(places)


def _drop_capabilities() -> None:
    """Where the daemon is root: keep nothing of it but the opening of files that belong to others."""
    libc = ctypes.CDLL(None)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)  # twice: effective, permitted, inheritable
    if libc.capget(header, held) == 0:
        low = struct.unpack_from("=I", held, 4)[0] & _OTHERS_FILES
        if any(held.raw):
            libc.capset(header, struct.pack("=6I", low, low, 0, 0, 0, 0))
