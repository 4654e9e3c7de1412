"""An image's root on this machine, run as a container runtime would: its user, a read-only root, its own volumes.

Needs root. Mounts are in a namespace of the daemon alone and end with it. Another architecture runs by qemu, named
outright: nothing is registered with the kernel. It sees no /sys: this machine's tells of an x86, and ONNX Runtime 1.31
for arm64, which looks for its cores there, ends with a segmentation fault.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross import oci

LIMIT_S = 600.0
"""For a start under emulation on a busy machine; natively it takes half a second."""

EMULATORS = {"arm64": "qemu-aarch64-static", "amd64": "qemu-x86_64-static"}
NATIVE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

MOUNT_AND_RUN = """set -e
root=$1 volumes=$2 emulator=$3
shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
if [ -z "$emulator" ]; then mount --rbind /sys "$root/sys"; fi
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$volumes/models" "$root/models"
mount -o remount,bind,ro "$root/models"
if [ -d "$volumes/mnt" ]; then
  mount --bind "$volumes/mnt" "$root/mnt/models"
  mount -o remount,bind,ro "$root/mnt/models"
fi
mount --bind "$volumes/state" "$root/var/lib/edge-runtime"
mount --bind "$volumes/run" "$root/run/edge-runtime"
if [ -n "$emulator" ]; then cp "$emulator" "$root/tmp/emulator"; fi
mount -o remount,bind,ro "$root"
exec chroot --userspec="$IMAGE_USER" --groups= "$root" "$@"
"""


def missing(architecture: str) -> str:
    """Why an image of an architecture cannot be run here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root, for mounts"
    if architecture != NATIVE and shutil.which(EMULATORS[architecture]) is None:
        return f"no {EMULATORS[architecture]}; do: sudo apt-get install qemu-user-static"
    return ""


@dataclass(frozen=True)
class ImageRoot:
    """An unpacked image, and the folders that stand for its volumes."""

    architecture: str
    root: Path
    config: dict[str, Any]
    volumes: Path

    @property
    def endpoint(self) -> str:
        """Of the daemon in it, seen from outside."""
        return f"ipc://{self.volumes}/run/infer.sock"

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Run a program of the image in its own mount namespace; the process is that program itself."""
        emulator = ""
        if self.architecture != NATIVE:
            emulator = shutil.which(EMULATORS[self.architecture]) or ""
            words = ("/tmp/emulator", *self._interpreted(words))
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT_AND_RUN, "sh",
             str(self.root), str(self.volumes), emulator, *words],
            env={**dict(line.split("=", 1) for line in self.config["Env"]), "IMAGE_USER": self.config["User"],
                 "PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"},
            **options,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """Run a program of the image to its end; what it printed."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, error = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        assert process.returncode == 0, error.decode()
        return out.decode()

    def _interpreted(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """The kernel reads `#!` lines only where it knows the format behind them; here it does not."""
        first = (self.root / words[0].lstrip("/")).read_bytes()[:64]
        if not first.startswith(b"#!"):
            return words
        return (*first.splitlines()[0][2:].decode().split(), *words)


def unpack(archive: Path, model: Path, folder: Path) -> ImageRoot:
    """Lay an archive's layers over each other as a container runtime does; make its volumes, with one model.

    A folder `mnt` among the volumes is mounted as KServe's /mnt/models.
    """
    image = oci.read_archive(archive)
    root, volumes = folder / "root", folder / "volumes"
    root.mkdir(parents=True)
    for layer in image.layers:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(read_blob(layer.blob)))) as tar:
            # As root and all, since it is our own; Python 3.12 wants to be told so, and early ones of 3.11 cannot be.
            told = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(root, numeric_owner=True, **told)
    (root / "mnt/models").mkdir(parents=True)  # as a container runtime makes the places of its mounts
    config = json.loads(image.config.data or b"")["config"]
    unpacked = ImageRoot(image.architecture, root, config, volumes)
    make_volumes(unpacked)
    shutil.copytree(model, volumes / "models" / model.name)
    return unpacked


def make_volumes(image: ImageRoot) -> None:
    """Make the folders that stand for an image's volumes, those that it writes its user's."""
    user = int(image.config["User"].partition(":")[0])
    for name in ("state", "run"):
        (image.volumes / name).mkdir(parents=True)
        (image.volumes / name).chmod(0o750)
        os.chown(image.volumes / name, user, user)
    (image.volumes / "models").mkdir()


def read_blob(blob: oci.Blob) -> bytes:
    if blob.data is not None:
        return blob.data
    assert blob.archive is not None
    with blob.archive.open("rb") as file:
        file.seek(blob.offset)
        return file.read(blob.size)


@contextmanager
def serving(image: ImageRoot) -> Iterator[subprocess.Popen[bytes]]:
    """The image's own command, from ready to stopped by SIGTERM; it must drain and exit with 0."""
    log = (image.volumes / "log").open("wb")
    daemon = image.start(*image.config["Entrypoint"], *image.config["Cmd"], stdout=log, stderr=log)
    try:
        end_s = time.monotonic() + LIMIT_S
        while not (image.volumes / "run/infer.sock").exists() and daemon.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        assert (image.volumes / "run/infer.sock").exists(), (image.volumes / "log").read_text()
        yield daemon
        daemon.terminate()
        assert daemon.wait(LIMIT_S) == 0, (image.volumes / "log").read_text()
    finally:
        log.close()
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
