"""Functions that a child calls in tests: good ones, and ones that misbehave in each way that has a text."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import LoadFailed
from edge_runtime.sandbox import confinement
from edge_runtime.sandbox.confinement import Confinement, PreparedConfinement
from edge_runtime.sandbox.descriptors import CHILD_DESCRIPTORS
from edge_runtime.sandbox.ending import Cause, ShowProgress
from edge_runtime.sandbox.process_memory import limited_memory


class Work(Struct, frozen=True):
    """What to do. place: a fifo."""

    name: str = ""
    place: str = ""
    amount: int = 0


class Sum(Struct, frozen=True):
    """A result."""

    total: int


def add(task: Work, progress: ShowProgress) -> Sum:
    for done in range(4):
        progress("adding", done / 4)
    progress("resting")
    return Sum(sum(range(task.amount)))


def misbehave(task: Work, _: ShowProgress) -> Sum:
    match task.name:
        case "crash":
            print("double free", file=sys.stderr, flush=True)
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "busy":
            while time.process_time() < 3.0:
                pass
        case "exit":
            print("half an installation", flush=True)
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "raise":
            raise LoadFailed("no such operator")
        case "surprise":
            raise KeyError("unknown operator")
        case "print":
            print('{"type":"result","result":{"total":7}}', flush=True)
            os.write(2, b"x" * (1 << 20))
        case "hungry":
            memory = bytearray(400 << 20)
            memory[::4096] = b"x" * len(memory[::4096])
            time.sleep(600)
        case "limited":
            with limited_memory(64 << 20, besides=64 << 20):
                return Sum(len(bytearray(1 << 30)))
        case "leave":
            held = os.open(task.place, os.O_WRONLY)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held])
        case "flood":
            endless = "import os\nwhile True: os.write(1, b'x' * 65536)"
            subprocess.Popen([sys.executable, "-c", endless, task.place], start_new_session=True)
            time.sleep(float(task.amount))
        case "large":
            raise LoadFailed("x" * (4 << 20))
    return Sum(1)


WAYS_TO_FAIL = [
    ("crash", Cause.CRASHED, "its process was ended by SIGSEGV: double free"),
    ("kill", Cause.KILLED, "its process was killed (SIGKILL); is the device out of memory?"),
    ("exit", Cause.SILENT, "its process ended with exit status 3 and no result: half an installation"),
    ("raise", Cause.RAISED, "no such operator"),
    ("surprise", Cause.RAISED, "KeyError: 'unknown operator'"),
    ("limited", Cause.RAISED, f"it needs more memory than the {64 << 20} bytes that it may have"),
]
"""Of `misbehave`: its name, and the cause and the reason that its parent is told."""


CAP_DAC_OVERRIDE = 1 << 1
"""linux/capability.h."""


def describe(task: Work, _: ShowProgress) -> dict[str, str]:
    """What a child sees of itself."""
    facts = {
        "core": str(resource.getrlimit(resource.RLIMIT_CORE)),
        "parent": str(os.getppid()),
        "niceness": str(os.nice(0)),
        "folder": str(Path.cwd()),
        "key": os.environ.get("MY_KEY", ""),
        "stdin": repr(sys.stdin.buffer.read()),
    }
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("NoNewPrivs:"):
            facts["no_new_privileges"] = line.split()[1]
        if line.startswith("CapEff:"):  # the opening of other users' files, where the daemon is root
            facts["capabilities"] = str(int(line.split()[1], 16) & ~CAP_DAC_OVERRIDE)
    facts["goes_first"] = Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip()
    facts["descriptors"] = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= CHILD_DESCRIPTORS)
    for name, family in (("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6), ("unix", socket.AF_UNIX)):
        try:
            socket.socket(family).close()
            facts[name] = "allowed"
        except OSError as error:
            facts[name] = str(error.strerror)
    return facts


def count_lines(task: Work, _: ShowProgress) -> None:
    """Live on: answer each byte on an inherited socket with the number of bytes so far."""
    with socket.socket(fileno=task.amount) as channel:
        count = 0
        while channel.recv(1):
            count += 1
            channel.send(bytes((count,)))


class Attempt(Struct, frozen=True):
    """Steps to try, each a name and a place. Others: of the confinement of a forked process; 0: its own parent."""

    steps: list[tuple[str, str]]
    folder: str = ""
    parent: int = 0
    within: tuple[str, ...] = ()


def attempt(task: Attempt, _: ShowProgress) -> list[str]:
    """What came of each step: "" where it could be done, else the error's name."""
    return [_attempted(name, place) for name, place in task.steps]


def attempt_forked(task: Attempt, progress: ShowProgress) -> list[str]:
    """The same, in a process that this one forks and that confines itself, as a prepared parent's are."""
    held = bytearray(64 << 20)
    reader, writer = os.pipe()
    parent = task.parent or os.getpid()
    wanted = Confinement(parent, reads=(task.folder,), within=task.within, memory_bytes=32 << 20, inherits=True)
    prepared = PreparedConfinement(wanted)
    child = os.fork()
    if child == 0:
        prepared.enter()
        os.write(writer, json.dumps(attempt(task, progress)).encode())
        os._exit(0)
    prepared.close()
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise RuntimeError(f"exit status {status}")
    with os.fdopen(reader, "rb") as report:
        result: list[str] = json.load(report)
    return result if held else []


def attempt_forked_beside_a_gpu(task: Attempt, progress: ShowProgress) -> list[str]:
    """The same, where the node of an NVIDIA GPU's driver is there."""
    confinement.NVIDIA_NODES = ("/dev/null",)
    return attempt_forked(task, progress)


def _attempted(name: str, place: str) -> str:
    try:
        _try(name, place)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:  # noqa: BLE001  its name is what is asked for
        return type(error).__name__
    return ""


def _try(name: str, place: str) -> None:
    path = Path(place)
    match name:
        case "read":
            path.open("rb").read(16)
        case "name thread":
            _name_thread()
        case "name other thread":
            failed: list[OSError] = []
            thread = threading.Thread(target=_name_thread, args=(failed,))
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
        case "list":
            list(path.iterdir())
        case "write":
            path.open("ab").write(b"x")
        case "truncate":
            os.truncate(path, 0)
        case "make":
            path.mkdir()
        case "remove":
            path.unlink()
        case "move":
            path.rename(path.parents[1] / path.name)
        case "rename":
            path.rename(path.with_name("renamed"))
        case "connect":
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(place.replace("@", "\0"))
        case "kill":
            os.kill(int(place), signal.SIGKILL)
        case "memory":
            Path(f"/proc/{place}/mem").open("rb").close()
        case "environment":
            Path(f"/proc/{place}/environ").read_bytes()
        case "trace":
            _checked(ctypes.CDLL(None, use_errno=True).ptrace(0x4206, int(place), 0, 0))  # PTRACE_SEIZE
        case "limit":
            resource.prlimit(int(place), resource.RLIMIT_CPU, (1, 1))
        case "take":
            bytearray(int(place))
        case "session":
            os.setsid()
        case "group":
            os.setpgid(0, 0)
        case "mode":
            path.chmod(0)
        case "modes":
            _checked(ctypes.CDLL(None, use_errno=True).syscall(452, -100, place.encode(), 0, 0))  # fchmodat2
        case "owner":
            os.chown(path, 1, 1)
        case "link_owner":
            os.lchown(path, 1, 1)
        case "times":
            os.utime(path, (1, 1))
        case "times_of_now":
            os.utime(path)
        case "touch":
            path.touch()
            path.open("rb").close()
        case "touch_tool":
            subprocess.run(["touch", path], check=True)
            path.open("rb").close()
        case "attribute":
            os.setxattr(path, "user.edge", b"1")
        case "flags":
            with path.open("rb") as file:
                fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x80))  # FS_IOC_SETFLAGS, FS_NOATIME_FL
        case "copy":
            shutil.copy2(path, path.with_name("copy"))
        case "nice":
            os.setpriority(os.PRIO_PROCESS, int(place), 5)
        case "nice_user":
            os.setpriority(os.PRIO_USER, 0, 5)
        case "affinity":
            os.sched_setaffinity(int(place), {min(os.sched_getaffinity(0))})
        case "policy":
            os.sched_setscheduler(int(place), os.SCHED_BATCH, os.sched_param(0))
        case "io_priority":
            number = {"x86_64": 251, "aarch64": 30}[platform.machine()]
            _checked(ctypes.CDLL(None, use_errno=True).syscall(number, 1, int(place), 3 << 13))  # the idle class
        case "datagram":
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail:
                mail.sendto(b"x", place)
        case "datagram_of_pair":
            for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
                each.close()
        case "pair":
            for each in socket.socketpair():
                each.close()
        case "shared_memory":
            _checked(ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600))
        case "semaphores":
            _checked(ctypes.CDLL(None, use_errno=True).semget(0, 1, 0o1600))
        case "messages":
            _checked(ctypes.CDLL(None, use_errno=True).msgget(0, 0o1600))
        case "ring":
            _checked(ctypes.CDLL(None, use_errno=True).syscall(425, 8, ctypes.create_string_buffer(120)))
        case "namespace":
            _checked(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))  # CLONE_NEWUSER
        case "second_numbers":
            _checked(ctypes.CDLL(None, use_errno=True).syscall(0x40000000 + 39))  # getpid of x32
        case "process":
            subprocess.run(["/bin/true"], check=True)
        case "fork":
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        case "thread":
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
        case "unlimit":
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        case _:
            library, _, cache = name.partition(":")
            extra = {"CACHE_DIR": cache} if cache else {}
            instance = backend(library).load(path, LoadOptions(extra=extra))
            instance.close()


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


PREPARED: list[str] = []
"""What this process imported before it was forked."""


def prepare(what: str) -> None:
    """Stand for an import: keep what was asked for, or misbehave."""
    if what == "crash":
        ctypes.string_at(0)
    if what == "surprise":
        raise KeyError("half an installation")
    if what == "hang":
        time.sleep(600)
    PREPARED.append(what)


def tell_prepared(task: Work, progress: ShowProgress) -> dict[str, str]:
    """What a forked process sees of itself, and what its parent had imported."""
    return {**describe(task, progress), "prepared": " ".join(PREPARED)}


def _name_thread(failed: list[OSError] | None = None) -> None:
    """As CUDA does it, before anything else."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("a name", encoding="ascii")
    except OSError as error:
        if failed is None:
            raise
        failed.append(error)
