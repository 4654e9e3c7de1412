"""A Debian or Ubuntu system as a folder, entered by chroot in a mount namespace of the command's.

Needs root. Another architecture's programs run by qemu, registered with a binfmt_misc of a user namespace of its own
(Linux 6.7): this machine's registrations are neither needed nor touched.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.debian_root import kept_root

ROOT = Path(__file__).parents[2]
LIMIT_S = 1_800.0
"""For an installation under emulation on a busy machine; natively it takes ten seconds."""

UBUNTU = ("jammy", "noble")
UBUNTU_SOURCE = "deb [signed-by={key}] http://archive.ubuntu.com/ubuntu {suite} main universe"
UBUNTU_KEY = Path(__file__).with_name("ubuntu-archive-key.asc")
"""F6EC B376 2474 EDA9 D21B 7022 8719 20D1 991B C93C, Ubuntu's of 2018: Debian has no package with it."""

NATIVE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
PACKAGES = "python3,libstdc++6,passwd,init-system-helpers"
ESSENTIAL = "base-files,base-passwd,bash,coreutils,dash,diffutils,dpkg,findutils,grep,libc-bin,perl-base,sed,tar"
EMULATOR = "/usr/bin/qemu-aarch64-static"

ENTER = """set -e
root=$1; shift
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
exec chroot "$@"
"""

# The ELF header of a program for aarch64, as qemu's own scripts/qemu-binfmt-conf.sh has it.
EMULATE = f"""set -e
echo; read -r _
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s ':aarch64:M::\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00:\
\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff:{EMULATOR}:OF' \
  > /proc/sys/fs/binfmt_misc/register
"""


class DebianRoot:
    """One system. `run` and `start` go into it as root or as a user of its own."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder = folder
        self.architecture = architecture
        self._is_emulated = architecture != NATIVE

    def path(self, inside: str) -> Path:
        """A file of it, seen from outside."""
        return self.folder / inside.lstrip("/")

    def run(self, *words: str, check: bool = True) -> str:
        """A command to its end: what it said on both outputs."""
        process = self.start(*words)
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
        assert not check or process.returncode == 0, said.decode()
        return said.decode()

    def start(self, *words: str, user: str = "root", **environment: str) -> subprocess.Popen[bytes]:
        """A command; the process is that command itself, so that signals reach it."""
        options = ["--user"] if self._is_emulated else []
        process = subprocess.Popen(
            ["unshare", "--mount", *options, "bash", "-c", (EMULATE if self._is_emulated else "") + ENTER, "enter",
             str(self.folder), f"--userspec={user}", str(self.folder), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive",
                 **environment},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        if self._is_emulated:
            process.stdout.readline()
            for kind in ("uid", "gid"):
                Path(f"/proc/{process.pid}/{kind}_map").write_text("0 0 4294967295")
            process.stdin.write(b"\n")
        process.stdin.close()
        process.stdin = None
        return process


def native_root(suite: str, folder: Path) -> DebianRoot:
    """A small system of a release, unpacked into a folder from an archive that is made once."""
    _need("mmdebstrap")
    source = [UBUNTU_SOURCE.format(key=UBUNTU_KEY, suite=suite)] if suite in UBUNTU else []
    _unpack(_archive(suite, "--variant=minbase", f"--include={PACKAGES}", source=source), folder)
    return DebianRoot(folder, NATIVE)


def emulated_root(suite: str, folder: Path) -> DebianRoot:
    """A system for arm64 whose packages are unpacked and not configured: that would take four minutes of emulation."""
    _need("mmdebstrap", EMULATOR)
    if tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 7):
        pytest.skip("Linux before 6.7 has one binfmt_misc for all: another architecture cannot be tried apart")
    included = f"--include={PACKAGES},{ESSENTIAL}"
    _unpack(_archive(suite, "--architectures=arm64", "--variant=extract", included), folder)
    for name in ("passwd", "group"):
        shutil.copyfile(folder / f"usr/share/base-passwd/{name}.master", folder / f"etc/{name}")
    return DebianRoot(folder, "arm64")


def _need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}; do: apt-get install mmdebstrap qemu-user-static")


def _archive(suite: str, *options: str, source: Sequence[str] = ()) -> Path:
    try:
        return kept_root(suite, options, form=".tar", source=source)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no Debian root can be made (no network?): {error.stderr.strip()[-300:]}")


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    # Device nodes are not needed, and not allowed where /tmp is mounted nodev: /dev is this machine's.
    subprocess.run(
        ["tar", "--extract", f"--file={archive}", f"--directory={folder}", "--exclude=./dev/*"],
        check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
