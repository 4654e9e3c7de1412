"""A device that really boots: systemd as process 1 of a Debian root, in a container of systemd-nspawn. Needs root.

Owns: its disk (an overlay of layers, the uppermost its own), its control group and its processes; `close` gives all of
them back. It shares the network, the clock and the kernel with this machine. Thread: one owner, which must not end
before the device; `run`, `path` and `endpoint` any thread may call while it is on.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from demo.daemon import DemoFailed
from demo.device_root import why_no_root

if TYPE_CHECKING:
    from typing_extensions import Self

UNIT = "edge-runtime.service"
SOCKET = "/run/edge-runtime/infer.sock"
COMMAND_LIMIT_S = 120.0
BOOT_LIMIT_S = 60.0
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
CGROUPS = Path("/sys/fs/cgroup")
NOTES = "/run/systemd/nspawn"

_NUMBERS = itertools.count(1)


class DeviceFailed(DemoFailed):
    """The device or a command on it failed; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class EndedCommand:
    """A command that ended on a device."""

    status: int
    output: str
    """Standard output and standard error, interleaved."""


class BootedDevice:
    """One device, at first switched off. Its disk is the layers, and all that it wrote since.

    folder: for its disk and console; new. layers: folders, the lowest last; not written to. shared: folders of this
    machine by where the device sees them.
    """

    def __init__(self, folder: Path, layers: Sequence[Path], shared: Mapping[str, Path] | None = None) -> None:
        self.console = folder / "console.log"
        self.own_layer = folder / "own"
        """The files that the device wrote: a layer for others once it is closed."""
        self._root = folder / "root"
        self._scratch = folder / "scratch"
        self._layers = layers
        self._shared = dict(shared or {})
        self._cgroups: list[Path] = []
        self._notices: socket.socket | None = None
        self._container: subprocess.Popen[bytes] | None = None
        self.leader = 0
        """This machine's number of its process 1; 0 while it is off."""
        self._name = f"edge-device-{os.getpid()}-{next(_NUMBERS)}"
        for made in (self.own_layer, self._root, self._scratch):
            made.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_on(self) -> bool:
        """Whether its processes run."""
        return self._container is not None

    @property
    def endpoint(self) -> str:
        """The device's endpoint for clients on this machine. Changes with each boot."""
        return f"ipc://{self.path(SOCKET)}"

    def path(self, inside: str) -> Path:
        """This machine's path of a device's path: through its processes while it is on, else on its disk."""
        root = Path(f"/proc/{self.leader}/root") if self.is_on else self._root
        return root / inside.lstrip("/")

    def boot(self) -> float:
        """Switch it on and wait until systemd has started everything. Returns the time, in seconds."""
        began = time.monotonic()
        if not self._root.is_mount():
            lower = ":".join(str(layer) for layer in self._layers)
            options = f"lowerdir={lower},upperdir={self.own_layer},workdir={self._scratch}"
            _run_here("mount", "-t", "overlay", "overlay", "-o", options, str(self._root))
        self._cgroups = _own_cgroups(self._name)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notices.bind(f"\0{self._name}")
        with self.console.open("ab") as console:
            self._container = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env={**os.environ, "NOTIFY_SOCKET": f"@{self._name}", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )  # fmt: skip
        self._wait_booted()
        return time.monotonic() - began

    def run(
        self, *words: str, user: str | None = None, is_checked: bool = True, limit_s: float = COMMAND_LIMIT_S
    ) -> EndedCommand:
        """Run a command on the device, as root or another of its users. Raises DeviceFailed if checked and failed."""
        as_user = ["runuser", "-u", user, "--"] if user is not None else []
        ended = subprocess.run(
            ["nsenter", "--target", str(self.leader), "--all", *as_user, *words], env=ENVIRONMENT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=limit_s, check=False,
        )  # fmt: skip
        done = EndedCommand(ended.returncode, ended.stdout)
        if is_checked and done.status != 0:
            raise DeviceFailed(f"{' '.join(words)}: exit status {done.status}\n{done.output}{self.last_words()}")
        return done

    def unit(self, name: str, unit: str = UNIT) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).output.strip()

    def journal(self, unit: str = UNIT) -> str:
        """A unit's journal since this boot."""
        return self.run("journalctl", "--boot", "--no-pager", "--output=cat", "--unit", unit).output

    def cut_power(self) -> None:
        """Kill all its processes at once. Their writes stay, since this machine's kernel goes on."""
        if self._container is None:
            return
        with suppress(psutil.NoSuchProcess):
            # The first process of the outer process name space: the kernel ends all others with it, before its parent
            # hears of it.
            for first in psutil.Process(self._container.pid).children():
                first.kill()
        self._let_go()

    def shut_down(self) -> float:
        """Shut it down. Returns the time, in seconds."""
        began = time.monotonic()
        self.run("systemctl", "poweroff", is_checked=False)
        self._let_go()
        return time.monotonic() - began

    def close(self) -> None:
        """Cut its power and remove its disk, except `own_layer`. Idempotent."""
        self.cut_power()
        if self._root.is_mount():
            _run_here("umount", str(self._root))

    def last_words(self, lines: int = 30) -> str:
        """The ends of its console and its journal, each line marked."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        journal = subprocess.run(
            ["journalctl", f"--directory={self._root}/var/log/journal", "--no-pager", f"--lines={lines}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False,
        )  # fmt: skip
        return "".join(f"  | {line}\n" for line in (*text.splitlines()[-lines:], *journal.stdout.splitlines()))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        entered = "".join(f"echo 0 > {cgroup}/cgroup.procs; " for cgroup in self._cgroups)
        shared = [f"--bind={here}:{inside}" for inside, here in self._shared.items()]
        return [
            # All its processes live in one process name space, and go with this program, whatever ends it.
            "setpriv", "--pdeathsig=KILL",
            "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
            # systemd-nspawn leaves notes behind when it is killed; these are gone with it.
            "sh", "-ec", f'{entered}mkdir -p {NOTES}; mount -t tmpfs tmpfs {NOTES}; exec "$@"', "sh",
            "systemd-nspawn", "--register=no", "--keep-unit", "--boot", "--quiet", "--console=pipe",
            "--notify-ready=yes", "--link-journal=no", "--resolv-conf=off", "--timezone=off",
            # No device filters it. nspawn's own filter leaves it out, and hosts would run without what guards the disk.
            "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self",
            "--machine=device", f"--directory={self._root}", *shared,
        ]  # fmt: skip

    def _wait_booted(self) -> None:
        assert self._notices is not None
        assert self._container is not None
        end_s = time.monotonic() + BOOT_LIMIT_S
        self._notices.settimeout(0.5)
        while True:
            with suppress(TimeoutError):
                if "READY=1" in self._notices.recv(4096).decode().splitlines():
                    break
            if self._container.poll() is not None or time.monotonic() > end_s:
                said = self.last_words()
                self.cut_power()
                raise DeviceFailed(f"the device does not boot\n{said}")
        # Nobody reads further notices. Once ten of them wait, the container's first process would wait, too.
        self._notices.close()
        self._notices = None
        (container,) = psutil.Process(self._container.pid).children()
        (first,) = container.children()
        self.leader = first.pid

    def _let_go(self) -> None:
        """Wait for its processes to end, and remove its control group."""
        assert self._container is not None
        try:
            self._container.wait(COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._container.kill()
            self._container.wait()
            raise DeviceFailed(f"the device does not end\n{self.last_words()}") from None
        finally:
            self._container, self.leader = None, 0
            if self._notices is not None:
                self._notices.close()
                self._notices = None
            for cgroup in self._cgroups:
                _remove_cgroup(cgroup)
            self._cgroups = []


def why_no_device() -> str | None:
    """Why no device can be booted here, and what to do about it; None: it can. Makes no root, and needs none."""
    reason = why_no_root()
    if reason is not None:
        return reason
    with tempfile.TemporaryDirectory(prefix="edge-device-") as name:
        folder = Path(name)
        for layer in ("lower", "upper", "work", "root"):
            (folder / layer).mkdir()
        options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        try:
            _run_here(
                "unshare", "--mount", "--pid", "--fork", "--mount-proc",
                "mount", "-t", "overlay", "overlay", "-o", options, f"{folder}/root",
            )  # fmt: skip
            for cgroup in _own_cgroups(f"edge-device-{os.getpid()}-trial"):
                _remove_cgroup(cgroup)
        except (DeviceFailed, OSError) as error:
            return f"this machine does not allow booting a device (a container without the rights?): {error}"
    return None


def _own_cgroups(name: str) -> list[Path]:
    """Create control groups for systemd, one in each hierarchy that it may use. Raises OSError."""
    places = [CGROUPS, CGROUPS / "systemd", CGROUPS / "unified"]
    groups = [place / name for place in places if (place / "cgroup.procs").exists()]
    for group in groups:
        group.mkdir()
    return groups


def _remove_cgroup(cgroup: Path) -> None:
    """Remove a control group and those below it; none has a process left."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with suppress(FileNotFoundError):
            Path(folder).rmdir()


def _run_here(*words: str) -> None:
    """Run a command on this machine. Raises DeviceFailed with its output."""
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode != 0:
        raise DeviceFailed(f"{words[0]}: {(ended.stderr or ended.stdout).strip()}")
