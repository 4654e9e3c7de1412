"""Landlock: what a process, and all that it starts, may reach of the disk, the network and other processes.

Owns: the kernel's numbers, why a machine guards less, and what every child needs of the disk: Python, its packages, the
system's libraries, and the nodes of accelerators. Never fails for an old kernel: each adds rights to those before, and
the rest stays allowed. Called by confinement.py. Source: linux/landlock.h, Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the same number on every machine."""

_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGE_FOLDER = 0x1FF0  # remove, and make anything, in a folder
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15
_REFERS_SINCE = 2
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_IOCTL
"""All other rights are those of folders; the kernel refuses them for a file."""

_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals

_READ = _READ_FILE | _READ_FOLDER
_WRITE = _READ | _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER | _REFER | _DEVICE_IOCTL
_USE_DEVICE = _READ | _WRITE_FILE | _TRUNCATE | _DEVICE_IOCTL

_LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt/intel", "/opt/nvidia", "/nix/store")

_FACTS = (
    "/proc",  # processors, memory, a process's own state; that of processes outside stays closed
    "/sys",
    *(f"/etc/{name}" for name in (
        "alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
        "nsswitch.conf", "nv_tegra_release", "OpenCL", "os-release", "passwd", "protocols", "resolv.conf", "services",
        "ssl/certs", "ssl/openssl.cnf", "timezone", "vulkan",
    )),
)  # fmt: skip
"""Not /etc: it holds keys."""

_DEVICES = (
    *("null", "zero", "full", "random", "urandom"),
    *("accel", "apex_*", "davinci*", "dma_heap", "dri", "dxg", "host1x*", "kfd", "mali*", "nvhost*", "nvidia*"),
    *("nvmap", "nvsciipc"),
)
"""Patterns in /dev: what every program uses, and accelerators."""

_OWN_MEMORY_PEAK = "/proc/self/clear_refs"
"""Writing it starts a new measurement of the peak (process_memory.py)."""

_OWN_THREADS = "/proc/self/task"

NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvmap")
"""Of a discrete GPU's driver, of a Jetson's: where there is one, libraries may use CUDA."""


class Guard(NamedTuple):
    """The guard of Landlock on this machine.

    version: of Landlock, 0 where there is none. unguarded: the acts that it cannot keep children from, as words. cause:
    of that, a word for metrics, "" where all is guarded. reason: the same as a sentence.
    """

    version: int
    unguarded: tuple[str, ...]
    cause: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        """As `stats` and the device's state have it."""
        return {"landlock": self.version, "unguarded": list(self.unguarded), "cause": self.cause, "reason": self.reason}


_ACTS = ((1, "other files"), (3, "truncating files that they may read"), (6, "signals to other processes"))
"""By the version of Landlock that keeps children from it; by the last one all that is used here is guarded."""

_FIRST_KERNEL, _LAST_KERNEL = (5, 13), "6.12"
"""With Landlock at all, and with all that is used here."""

_KERNELS_LIST = Path("/sys/kernel/security/lsm")


def guard() -> Guard:
    """Return what this machine's Landlock guards, and why not all. The kernel is asked anew each time."""
    version, error = _asked()
    active = ""
    if version < 1:
        with contextlib.suppress(OSError):  # in most containers it is not there
            active = _KERNELS_LIST.read_text("ascii")
    return judge_guard(version, error, release=os.uname().release, active=active)


def judge_guard(version: int, error: int, *, release: str, active: str) -> Guard:
    """Judge what the kernel answered. version: 0 and below: it refused, with `error`. Pure.

    release: of the kernel, as 5.15.148-tegra. active: its list of security modules, "" where it cannot be read.
    """
    unguarded = tuple(words for needed, words in _ACTS if version < needed)
    if not unguarded:
        return Guard(version, (), "", "")
    kernel = tuple(int(each) for each in re.findall(r"\d+", release)[:2])
    if version > 0:
        cause, reason = "kernel_too_old", f"Linux {release} has version {version} of Landlock; all needs {_LAST_KERNEL}"
    elif error == errno.EOPNOTSUPP:
        cause, reason = "switched_off", f"Linux {release} was started without Landlock (lsm=)"
    elif error in (errno.EPERM, errno.EACCES) or "landlock" in active.strip().split(","):
        cause, reason = "filtered", "a container's or a unit's filter of system calls keeps Landlock from this process"
    elif kernel < _FIRST_KERNEL:
        cause, reason = "kernel_too_old", f"Linux {release} has no Landlock, which came with 5.13"
    else:
        cause, reason = "absent", f"Linux {release} was built without Landlock, or a container's filter hides it"
    return Guard(max(version, 0), unguarded, cause, reason)


def landlock_version() -> int:
    """The version of Landlock that this process may use; 0: none, or it is switched off."""
    return max(_asked()[0], 0)


def make_rules(
    reads: Iterable[str] | None, writes: Iterable[str], *, has_network: bool, within: tuple[str, ...] = ()
) -> int:
    """Make the rules of a process, as a descriptor for `restrict_by`; -1 where this kernel has none.

    They bind no process yet. reads: folders and files that it may read beside what every child needs; None for the
    whole disk. writes: those that it may change as well. has_network: whether it may use TCP and other programs'
    abstract Unix sockets. within: real folders and files that `reads` must lie in, wherever links lead by now, and so
    the plain files that links in them lead to; () for anywhere, and no links. Signals reach no process that was not
    restricted with it or by it. Raises OSError: the kernel refuses what it has.
    """
    version = landlock_version()
    network = 0 if version < 4 or has_network else _TCP
    scopes = 0 if version < 6 else _SCOPES & (0b10 if has_network else 0b11)
    files = 0 if reads is None else _handled(version)
    if not (files or network or scopes):
        return -1
    rules = _rules(reads or (), writes, within)
    if reads is None and version >= _REFERS_SINCE:
        # Any rules at all refuse moves between folders, to this process and to those that confine themselves further.
        files, rules = _REFER, iter([_Rule("/", _REFER)])
    libc = _libc()
    attributes = struct.pack("=QQQ", files, network, scopes)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "the kernel refused the rules of Landlock")
    try:
        for rule in rules if files else ():
            _allow(libc, ruleset, rule, rule.rights & files)
    except BaseException:
        os.close(ruleset)
        raise
    return int(ruleset)


def allow_thread_names(rules: int) -> None:
    """Add to the rules that this process, which is about to enter them, may write below its own threads in /proc.

    CUDA names its threads there (`comm`), and begins in no process that may not: cuInit fails with 304. The rules were
    made by the process that forked this one, and hold for files: so each adds its own. The folder stays open, because
    the kernel would make another one in its place. Raises OSError.
    """
    folder = os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
    _add(_libc(), rules, folder, (_WRITE_FILE | _TRUNCATE) & _handled(landlock_version()), _OWN_THREADS)


def restrict_by(rules: int) -> None:
    """Restrict this thread, and all that it starts, for good. Needs `no new privileges` to be set. Raises OSError."""
    if _libc().syscall(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0)) < 0:
        raise OSError(ctypes.get_errno(), "the kernel refused to restrict a child by Landlock")


# ---- private --------------------------------------------------------------------------------------------------------


def _asked() -> tuple[int, int]:
    """The version that the kernel answers, and the error where it is below 0."""
    ctypes.set_errno(0)
    version = int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION)))
    return version, ctypes.get_errno()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _handled(version: int) -> int:
    """The rights to files that a kernel knows; all that is not handled stays allowed."""
    if version < 1:
        return 0
    rights = _EXECUTE | _WRITE_FILE | _READ | _CHANGE_FOLDER
    return rights | sum(
        right for since, right in ((_REFERS_SINCE, _REFER), (3, _TRUNCATE), (5, _DEVICE_IOCTL)) if version >= since
    )


class _Rule(NamedTuple):
    """A path and the rights beneath it. within: where it must lie, () anywhere. is_file: it must be a plain file."""

    path: str
    rights: int
    within: tuple[str, ...] = ()
    is_file: bool = False


def _rules(reads: Iterable[str], writes: Iterable[str], within: tuple[str, ...]) -> Iterator[_Rule]:
    """Return the allowed paths, absent ones of a pattern included."""
    yield from _fixed_rules()
    names: list[str] = []
    with contextlib.suppress(OSError):  # a child of a child does not see the folder
        names = os.listdir("/dev")  # each time: some come later  # noqa: PTH208
    for pattern in _DEVICES:
        for name in fnmatch.filter(names, pattern):
            yield _Rule(f"/dev/{name}", _USE_DEVICE)
    for path in reads:
        yield _Rule(path, _READ, within)
        if within:
            yield from (_Rule(link, _READ_FILE, within, is_file=True) for link in _links_in(path))
    for path in writes:
        yield _Rule(path, _WRITE)


@cache
def _fixed_rules() -> tuple[_Rule, ...]:
    """Return the rules of every child: made once in a process that forks many."""
    return (
        *(_Rule(path, _READ | _EXECUTE) for path in (*_LIBRARIES, *_python_paths())),
        *(_Rule(path, _READ) for path in _FACTS),
        _Rule(_OWN_MEMORY_PEAK, _WRITE_FILE),
    )


def _python_paths() -> Iterator[str]:
    """Where Python, its packages and the libraries that the environment names are; never the whole disk."""
    variables = ("LD_LIBRARY_PATH", "CUDA_PATH")
    named = [path for name in variables for path in os.environ.get(name, "").split(os.pathsep)]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    for path in dict.fromkeys((*prefixes, *sys.path, *named)):
        if path and os.path.realpath(path) != "/":  # `python -m` has its working folder on the path
            yield path


def _links_in(folder: str) -> Iterator[str]:
    """The links in a folder: what counts for the kernel is where a file lies."""
    if Path(folder).is_dir():
        with os.scandir(folder) as entries:
            yield from [entry.path for entry in entries if entry.is_symlink()]


def _allow(libc: ctypes.CDLL, ruleset: int, rule: _Rule, rights: int) -> None:
    try:
        descriptor = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)  # follows links
    except OSError:  # not there, or not for us: then there is nothing to allow
        return
    try:
        mode = os.fstat(descriptor).st_mode
        # Judged by what was opened, which the rule is for: a link that is changed meanwhile leads nowhere else.
        if (rule.is_file and not stat.S_ISREG(mode)) or not _lies_within(descriptor, rule.within):
            return
        if not stat.S_ISDIR(mode):
            rights &= _OF_FILES
        if rights:
            _add(libc, ruleset, descriptor, rights, rule.path)
    finally:
        os.close(descriptor)


def _add(libc: ctypes.CDLL, ruleset: int, descriptor: int, rights: int, path: str) -> None:
    packed = struct.pack("=Qi", rights, descriptor)
    if libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), packed, 0) < 0:
        raise OSError(ctypes.get_errno(), "the kernel refused a rule of Landlock", path)


def _lies_within(descriptor: int, within: tuple[str, ...]) -> bool:
    if not within:
        return True
    place = Path(f"/proc/self/fd/{descriptor}").readlink()
    return any(place.is_relative_to(each) for each in within)
