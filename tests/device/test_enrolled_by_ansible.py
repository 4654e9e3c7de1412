"""The Ansible role on a device that boots, over ssh: installs from a repository, enrols, and changes nothing again."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.booted_device import BootedDevice
from demo.device_package import QUICK
from demo.train_digits import MODEL_FILE
from tests.device.apt_site import KEYS_PACKAGE, PLACE, AptSite, own_keys
from tests.device.asking import HOST, MODELS, wait_right_answer
from tests.device.debian_packages import install_from_debian

ROOT = Path(__file__).parents[2]
PLAYS = ROOT / "deploy" / "provisioning" / "ansible"
ANSIBLE = shutil.which("ansible-playbook", path=f"{ROOT}/build/ansible/bin:{os.environ['PATH']}")
"""Not of dev.lock: 10 s of set-up and 60 MB for one test of a sample."""

LIMIT_S = 600.0
NAME, GROUP = "cam-7", "line-1"
LIFE_DAYS = "1"
RENEW_AT = 0.0401
"""Of a day and the hour by which certificates are backdated: nine seconds after it was made."""

CONFIG = f'[enrolment]\nurl = "@ENROLMENT_URL@"\nidentity = "@IDENTITY@"\nrenew_at = {RENEW_AT}\n'

INVENTORY = """\
[devices]
{name} ansible_host=127.0.0.1 ansible_port={port} ansible_user=technician ansible_ssh_private_key_file={key}

[authorities]
authority.site ansible_connection=local ansible_become=false
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        ANSIBLE is None,
        reason="no ansible-playbook; do: python3 -m venv build/ansible && build/ansible/bin/pip install ansible-core",
    ),
]


@dataclass(frozen=True)
class Fleet:
    """An authority that answers at url, and the folder it keeps."""

    folder: Path
    url: str

    def devices(self) -> list[dict[str, object]]:
        """Whom it gave a certificate."""
        told: list[dict[str, object]] = json.loads(authority("devices", "--authority", str(self.folder), "--json"))
        return told


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Our own programs, as on the machine of an authority."""
    root, config, folder = tmp_path / "1.root.json", tmp_path / "device.toml", tmp_path / "authority"
    root.write_text('{"signed": "a root file"}')
    config.write_text(CONFIG)
    authority("init", str(folder), "--name", "127.0.0.1", "--root", str(root), "--config", str(config))
    words = ("--authority", str(folder), "--port", "0", "--life-days", LIFE_DAYS)
    serve = [sys.executable, "-m", "edge_runtime", "authority", "serve", *words]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            said = server.stdout.readline()
            yield Fleet(folder, said.partition("devices at ")[2].partition(";")[0])
        finally:
            server.terminate()


@pytest.fixture
def site(package: Path, tmp_path: Path) -> Iterator[AptSite]:
    """A repository with the daemon, and the package that enrols."""
    from deploy.debian.build_deb import build

    with own_keys() as (ours, _):
        site = AptSite(tmp_path / "apt", ours)
        site.pool.mkdir(parents=True)
        shutil.copy(package, site.pool)
        build("amd64", site.suite, site.pool, package="edge-runtime-enrolment", level=QUICK)
        site.publish()
        yield site


@pytest.fixture
def bare(root: Path, site: AptSite, shared: Path, tmp_path: Path) -> Iterator[BootedDevice]:
    """A device without the package."""
    with BootedDevice(tmp_path / "device", [root], {HOST: shared, PLACE: site.folder}) as device:
        device.boot()
        yield device
        print(device.last_words(60))


def test_the_role_installs_enrols_and_serves_and_changes_nothing_when_it_is_run_again(
    bare: BootedDevice, site: AptSite, fleet: Fleet, shared: Path, tmp_path: Path
) -> None:
    shutil.copy(MODEL_FILE, shared / "model.onnx")
    bare.run("install", "-D", "-m", "644", f"{HOST}/model.onnx", f"{MODELS}/digits/1/model.onnx")
    play = Play(site, fleet, let_in(bare, tmp_path), tmp_path)
    assert play.run()["changed"] > 0
    wait_right_answer(bare)
    (known,) = fleet.devices()
    assert (known["device"], known["group"]) == (NAME, GROUP)
    assert play.run()["changed"] == 0
    told = json.loads(bare.run("edge-runtime", "status", "--json").output)["enrolment"]
    assert told["reason"] == ""
    assert told["renewals"] > 0, "by the daemon, in its sandbox, while the role was run again"


@dataclass(frozen=True)
class Play:
    """The playbook, for one device."""

    site: AptSite
    fleet: Fleet
    port: int
    folder: Path

    def run(self) -> dict[str, int]:
        """Play it to its end: how many tasks were ok, changed, skipped, as its recap counts them."""
        inventory = self.folder / "inventory.ini"
        inventory.write_text(INVENTORY.format(name=NAME, port=self.port, key=self.folder / "key"))
        keys = self.site.pool / KEYS_PACKAGE.format(suite=self.site.suite)
        said = {
            "edge_runtime_keyring_deb": str(keys), "edge_runtime_group": GROUP,
            "edge_runtime_authority_url": self.fleet.url, "edge_runtime_authority_folder": str(self.fleet.folder),
        }  # fmt: skip
        played = subprocess.run(
            [str(ANSIBLE), "-i", str(inventory), "site.yml", "--extra-vars", json.dumps(said)],
            cwd=PLAYS, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env={
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self.folder), "LC_ALL": "C.UTF-8",
                "ANSIBLE_HOST_KEY_CHECKING": "false", "ANSIBLE_NOCOLOR": "true",
                "ANSIBLE_SSH_ARGS": "-o UserKnownHostsFile=/dev/null -o ControlMaster=no",
            },
        )  # fmt: skip
        assert played.returncode == 0, played.stdout + played.stderr
        recap = re.search(rf"^{NAME} +: (.*)$", played.stdout, re.MULTILINE)
        assert recap is not None, played.stdout
        return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", recap[1])}


def let_in(device: BootedDevice, folder: Path) -> int:
    """Start sshd on the device, for a technician with the folder's key who may become root. Returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    # Before it is installed, since that starts it: the device shares this machine's network.
    device.run("mkdir", "-p", "/etc/ssh/sshd_config.d")
    device.path("/etc/ssh/sshd_config.d/here.conf").write_text(f"Port {port}\nListenAddress 127.0.0.1\n")
    install_from_debian(device, "sudo", "openssh-server", "python3-apt")
    device.run("useradd", "--create-home", "--shell", "/bin/bash", "technician")
    device.path("/etc/sudoers.d/technician").write_text("technician ALL=(ALL) NOPASSWD: ALL\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    device.run("install", "-d", "-o", "technician", "-m", "700", "/home/technician/.ssh")
    device.path("/home/technician/.ssh/authorized_keys").write_bytes((folder / "key.pub").read_bytes())
    return port


def authority(*words: str) -> str:
    """What a verb of the authority says."""
    return subprocess.run(
        [sys.executable, "-m", "edge_runtime", "authority", *words],
        check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
    ).stdout  # fmt: skip
