"""Debian's mender-client, stand-alone, with our update module: install, commit, rollback, a release that is refused.

Mender wants its files in /etc, /usr/share and /var/lib: it runs with mounts of its own, which nothing else sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client
from tests.contract.updates.updated_device import Fleet
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.update_site import GROUP

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    name: shutil.which(name) or shutil.which(name, path=ROOT / "build/unpacked/usr/bin")
    for name in ("mender", "mender-artifact")
}
MODULE = ROOT / "deploy/engines/mender-edge-runtime"
DEVICE, LIMIT_S = "test-device", 120.0

MOUNTS = """\
mount -t tmpfs none /usr/share
mount -t tmpfs none /var/lib
mkdir -p /usr/share/mender/modules/v3 /var/lib/mender /var/lib/etc /var/lib/work
mount -t overlay none -o lowerdir=/etc,upperdir=/var/lib/etc,workdir=/var/lib/work /etc
mkdir -p /etc/mender
"""
INSIDE = f"""\
{MOUNTS}
cp "$MODULE" /usr/share/mender/modules/v3/edge-runtime
mount --bind "$MENDER_DATA" /var/lib/mender
echo artifact_name=factory >/etc/mender/artifact_info
exec "$MENDER" --config "$MENDER_DATA/mender.conf" "$@"
"""


def why_no_mender() -> str:
    """Why Mender cannot run here; "": it can."""
    missing = [name for name, program in PROGRAMS.items() if program is None]
    if missing:
        return f"no {', '.join(missing)}; do: make unpacked"
    command = ["unshare", "-m", "sh", "-ec", MOUNTS]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no mounts of one's own here: {tried.stderr.strip()}" if tried.returncode else ""


NO_MENDER = why_no_mender()
pytestmark = pytest.mark.skipif(bool(NO_MENDER), reason=NO_MENDER)


class MenderDevice:
    """A device with a daemon that takes releases from artifacts only, and Mender beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleet = Fleet(folder)
        self._data = folder / "mender"
        self._data.mkdir()
        (self._data / "device_type").write_text(f"device_type={DEVICE}\n")
        (self._data / "mender.conf").write_text(f'{{"DeviceTypeFile": "{self._data}/device_type"}}')
        (folder / "1.root.json").write_bytes(self.fleet.site.root)
        (folder / "models").mkdir()
        self.daemon = DaemonProcess(
            folder,
            config=f'[update]\nroot_file = "{folder}/1.root.json"\ngroup = "{GROUP}"\ndevice_id = "dev1"\n'
            "window_s = 0\nreserve_bytes = 0\nlatency_ratio = 1000\n[limits]\ncores = 1\n",
        )

    def artifact(self, name: str) -> Path:
        """What a publisher makes of the repository as it is now: the page's commands, after `repo bundle`."""
        bundle = self.fleet.site.write(self.folder / "bundle")
        with tarfile.open(self.folder / "models.tar", "w") as tar:
            tar.add(bundle / "metadata", "metadata")
            tar.add(bundle / "targets", "targets")
        artifact = self.folder / f"{name}.mender"
        words = [str(PROGRAMS["mender-artifact"]), "write", "module-image", "-T", "edge-runtime", "-t", DEVICE]
        subprocess.run(
            [*words, "-n", name, "-f", self.folder / "models.tar", "-o", artifact],
            check=True, capture_output=True, timeout=LIMIT_S,
        )  # fmt: skip
        return artifact

    def mender(self, *words: object) -> subprocess.CompletedProcess[str]:
        """`mender …`."""
        environment = {
            **os.environ,
            "MENDER": str(PROGRAMS["mender"]),
            "MODULE": str(MODULE),
            "MENDER_DATA": str(self._data),
            "EDGE_RUNTIME_COMMAND": str(Path(sys.executable).with_name("edge-runtime")),
            "EDGE_RUNTIME_ENDPOINT": self.daemon.endpoint,
            "EDGE_RUNTIME_MENDER_FOLDER": str(self.folder / "unpacked"),
        }
        return subprocess.run(
            ["unshare", "-m", "sh", "-ec", INSIDE, "sh", *map(str, words)],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def adds(self) -> float:
        """What the serving release of "adder" adds."""
        with Client(self.daemon.endpoint) as client:
            return float(client.infer("adder", {"x": np.zeros((1, 2), np.float32)})["y"][0, 0])


@pytest.fixture
def device(tmp_path: Path) -> Iterator[MenderDevice]:
    device = MenderDevice(tmp_path)
    with device.daemon:
        device.daemon.wait_ready()
        yield device


def test_mender_installs_and_commits_a_bundle_and_rolls_the_next_one_back_to_it(device: MenderDevice) -> None:
    device.fleet.site.release(device.fleet.adder(1))
    done = device.mender("install", device.artifact("first"))
    assert done.returncode == 0, done.stderr
    assert device.adds() == 1.0
    done = device.mender("commit")
    assert done.returncode == 0, done.stderr
    assert not (device.folder / "unpacked").exists()

    device.fleet.site.release(device.fleet.adder(2))
    assert device.mender("install", device.artifact("second")).returncode == 0
    assert device.adds() == 2.0
    done = device.mender("rollback")
    assert done.returncode == 0, done.stderr
    assert device.adds() == 1.0

    # A release whose golden answer is wrong is refused by the daemon: Mender hears of it, and nothing has changed.
    device.fleet.site.release(device.fleet.adder(3, says=4.0))
    done = device.mender("install", device.artifact("third"))
    assert done.returncode != 0
    assert "refused" in done.stderr
    assert device.adds() == 1.0
    assert "third" not in device.mender("show-artifact").stdout


def test_the_module_answers_what_it_does_not_know_with_success_and_a_payload_of_two_files_with_a_failure(
    tmp_path: Path,
) -> None:
    def run(state: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(MODULE), state, str(tmp_path)]
        environment = {**os.environ, "EDGE_RUNTIME_MENDER_FOLDER": str(tmp_path / "unpacked")}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)

    said = {state: run(state).stdout for state in ("SupportsRollback", "NeedsArtifactReboot", "Download", "NewState")}
    assert said == {"SupportsRollback": "Yes\n", "NeedsArtifactReboot": "No\n", "Download": "", "NewState": ""}
    (tmp_path / "files").mkdir()
    for name in "ab":
        (tmp_path / "files" / name).touch()
    done = run("ArtifactInstall")
    assert (done.returncode, "got 2 files, wanted one tar" in done.stderr) == (1, True)
    assert run("ArtifactRollback").returncode == 0
