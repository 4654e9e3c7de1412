"""A file system of its own in an image file, whose power can be cut: FS_IOC_SHUTDOWN without a flush of the log.

What was not on its way to the block device is gone then, as after a power cut; mounted again, the file system finds of
its journal what the cut left. Needs root and loop devices. What a disk's own cache would lose is not modelled.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.fork_server import end_fork_server

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
CLONE_NEWNS = 0x00020000
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A kind of file system: what makes it, how it is mounted, and how large its images are (they are sparse)."""

    name: str
    make: tuple[str, ...]
    options: str
    image_bytes: int


EXT4 = FileSystem("ext4", ("mkfs.ext4", "-q", "-F"), "loop", 256 << 20)
# Without this heuristic, ext4 does not save those who rename over a file without a sync.
EXT4_NO_ALLOC = FileSystem("ext4-noauto_da_alloc", EXT4.make, "loop,noauto_da_alloc", EXT4.image_bytes)
# mkfs.xfs makes nothing smaller than 300 MB.
XFS = FileSystem("xfs", ("mkfs.xfs", "-q", "-f"), "loop", 320 << 20)
FILE_SYSTEMS = (EXT4, EXT4_NO_ALLOC, XFS)


def why_no_cut(kind: FileSystem, folder: Path) -> str | None:
    """Why the power of such a file system cannot be cut here, and what to do about it; None: it can."""
    if os.geteuid() != 0:
        return "cutting the power of a file system needs root: sudo make test"
    if shutil.which(kind.make[0]) is None:
        return f"no {kind.make[0]}: sudo apt-get install {'xfsprogs' if kind is XFS else 'e2fsprogs'}"
    disk = LoopDisk(kind, folder)
    try:
        disk.mount()
        disk.cut()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"{kind.name} cannot be mounted and cut here (a container without loop devices?): {reason}"
    finally:
        disk.close()
    return None


class LoopDisk:
    """One image and the folder that it is mounted on. Made unmounted; `close` is idempotent. Thread: one owner."""

    def __init__(self, kind: FileSystem, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "disk"
        self._image = folder / "image"
        self._kind = kind
        self._is_mounted = False

    def mount(self) -> None:
        """Mount it, made anew where there is none yet. Raises CalledProcessError with what the tools say."""
        if not self._image.exists():
            self.path.mkdir()
            with self._image.open("wb") as image:
                image.truncate(self._kind.image_bytes)
            _run(*self._kind.make, str(self._image))
        _enter_own_namespace()
        kind = self._kind.make[0].partition(".")[2]
        _run("mount", "-t", kind, "-o", self._kind.options, str(self._image), str(self.path))
        self._is_mounted = True

    def cut(self) -> None:
        """Cut its power: from now on every call on it fails with EIO, until it is mounted again."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("=I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restore(self) -> None:
        """Give it power again. Whoever had files open on it is gone by now."""
        _run("umount", str(self.path))
        self._is_mounted = False
        self.mount()

    def close(self) -> None:
        """Unmount it, whoever uses it, and let go of its image and loop device."""
        if self._is_mounted:
            # The loop device goes with the last user: `mount -o loop` asks for that.
            _run("umount", "--lazy", str(self.path))
            self._is_mounted = False
        self._image.unlink(missing_ok=True)


@functools.cache
def _enter_own_namespace() -> None:
    """Mount where no other process sees it, for the rest of this thread's life and its children's.

    Whoever copies the host's mounts meanwhile, as every container does, would keep alive a file system that was cut and
    unmounted here, and mounting its image again would give the dead one back. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")
    _run("mount", "--make-rprivate", "/")
    # One that runs already would go on to fork children who do not see these mounts.
    end_fork_server()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True, text=True)
