"""The package from a signed apt repository, on devices that boot: upgraded under load, and gone back from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.booted_device import BootedDevice
from edge_runtime import Client, __version__
from tests.device.apt_site import PLACE, AptSite, changed_package, empty_package, own_keys
from tests.device.asking import CONFIG, PatientClient, main_pid, wait_right_answer
from tests.device.debian_packages import LIMIT_S, install_from_debian

OUTAGE_BAR_S = 3.0
"""While an upgrade restarts the daemon. Asserted with three times the slack, for a busy machine."""

NEWER, BROKEN, MENDED = "99.0.0", "99.1.0", "99.2.0"
PHASE = 30
IN_PHASE, OUT_OF_PHASE = "0" * 32, "0" * 31 + "1"
"""Identities of machines: apt counts the first into 30 percent for NEWER, and not the second."""
ALL = ("-o", "APT::Get::Always-Include-Phased-Updates=true")

FAILS = {
    "edge_runtime/daemon/run.py": (
        "            if daemon.start(signals.is_stop_told):",
        "            raise ConfigError('broken')\n            if daemon.start(signals.is_stop_told):",
    )
}
"""What a build is changed by so that its daemon starts and ends."""

CONFIGURED = {"/usr/share/edge-runtime/config.toml": ("# A device without a fan", "# A device with no fan")}
"""What a newer version says otherwise in the configuration that it brings."""

ADDED = "edge-runtime-enrolment"

DROPPED = "tokenizers"
"""A library's folder that only the older version has."""

STRANGE, NEXT = "/media/strange", "/media/next"

PROGRAM = "/usr/lib/edge-runtime"
KEPT = f"{PROGRAM}.before"
SOURCE = "/etc/apt/sources.list.d/edge-runtime.sources"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def keys() -> Iterator[tuple[str, str]]:
    """Of the repository, and of a stranger."""
    with own_keys() as made:
        yield made


@pytest.fixture(scope="module")
def site(package: Path, keys: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> AptSite:
    """A repository with the version that is installed and a newer one."""
    folder = tmp_path_factory.mktemp("apt") / "site"  # apt's own user reads it
    site = AptSite(folder, keys[0])
    site.pool.mkdir(parents=True)
    shutil.copy(package, site.pool)
    changed_package(package, site.pool, NEWER, CONFIGURED)
    site.publish(PHASE)
    return site


@pytest.fixture
def subscribed(installed: list[Path], site: AptSite, tmp_path: Path) -> Iterator[BootedDevice]:
    """A device with the older version, that knows the repository."""
    with BootedDevice(tmp_path / "device", installed, {PLACE: site.folder}) as device:
        device.boot()
        site.subscribe(device)
        yield device
        print(device.last_words(60))


def test_an_upgrade_from_the_repository_under_load_leaves_no_request_without_an_answer(
    subscribed: BootedDevice,
) -> None:
    subscribed.run("sh", "-c", f"echo '# ours' >> {CONFIG}")
    wait_right_answer(subscribed)
    before = main_pid(subscribed)
    with PatientClient(subscribed.endpoint) as client:
        client.wait_answers(200)
        subscribed.run("apt-get", "upgrade", "-qq", "-y", *ALL)
        client.wait_answers(200)
    print(f"{client.answered} answered, tried again {dict(client.tried_again)}, longest {client.longest_s:.2f} s")
    assert client.failed == []
    assert client.longest_s < 3 * OUTAGE_BAR_S
    assert main_pid(subscribed) != before
    assert serving(subscribed) == NEWER
    assert subscribed.run("tail", "-n1", CONFIG).output == "# ours\n"
    assert listed(subscribed) == f"{NEWER}~bookworm"
    assert not subscribed.path(KEPT).exists()


def test_a_package_whose_daemon_does_not_become_ready_is_gone_back_from_and_the_next_one_is_taken(
    installed: list[Path], package: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    site = AptSite(tmp_path / "apt", keys[0])
    site.pool.mkdir(parents=True)
    changed_package(package, site.pool, BROKEN, FAILS, without=DROPPED)
    site.publish()
    with BootedDevice(tmp_path / "device", installed, {PLACE: site.folder}) as device:
        device.boot()
        wait_right_answer(device)
        site.subscribe(device)
        with PatientClient(device.endpoint) as client:
            client.wait_answers(200)
            said = device.run("apt-get", "upgrade", "-qq", "-y").output
            client.wait_answers(200)
        print(f"back after {client.longest_s:.2f} s")
        assert client.failed == []
        assert f"{BROKEN}~bookworm did not become ready" in said
        assert f"{BROKEN}~bookworm did not become ready" in device.journal()
        assert serving(device) == __version__
        assert device.unit("ActiveState") == "active"

        changed_package(package, site.pool, MENDED, {}, without=DROPPED)
        site.publish()
        device.run("apt-get", "update", "-qq")
        device.run("apt-get", "upgrade", "-qq", "-y")
        assert serving(device) == MENDED
        assert not device.path(KEPT).exists()
        wrong = device.run("dpkg", "--verify", "edge-runtime", is_checked=False).output.splitlines()
        assert [line for line in wrong if PROGRAM in line] == []
        assert device.run("find", PROGRAM, "-name", DROPPED).output == "", "of the older version, and forgotten"


def test_unattended_upgrades_takes_what_is_for_its_share_and_goes_back_from_what_is_broken(
    installed: list[Path], package: Path, site: AptSite, keys: tuple[str, str], tmp_path: Path
) -> None:
    own = AptSite(tmp_path / "apt", keys[0])
    shutil.copytree(site.pool, own.pool, copy_function=os.link)
    for version in (__version__, NEWER):
        added_package(own, version)
    own.publish(PHASE)
    with BootedDevice(tmp_path / "device", installed, {PLACE: own.folder}) as device:
        device.boot()
        install_from_debian(device, "unattended-upgrades")
        own.subscribe(device)
        device.run("apt-get", "install", "-qq", "-y", f"{ADDED}={__version__}~bookworm")
        device.run("sh", "-c", f"echo '# ours' >> {CONFIG}")
        identity = device.path("/etc/apt/apt.conf.d/99identity")
        identity.write_text(f'APT::Machine-ID "{OUT_OF_PHASE}";\n')
        assert upgrade_unattended(device) == []
        identity.write_text(f'APT::Machine-ID "{IN_PHASE}";\n')
        assert upgrade_unattended(device) == ["edge-runtime", ADDED]
        assert (serving(device), listed(device), listed(device, ADDED)) == (NEWER, *[f"{NEWER}~bookworm"] * 2)
        assert device.run("tail", "-n1", CONFIG).output == "# ours\n"

        changed_package(package, own.pool, BROKEN, FAILS)
        added_package(own, BROKEN)
        own.publish()
        device.run("apt-get", "update", "-qq")
        assert upgrade_unattended(device) == ["edge-runtime", ADDED]
        assert f"{BROKEN}~bookworm did not become ready" in device.journal()
        assert (serving(device), listed(device)) == (NEWER, f"{BROKEN}~bookworm")
        assert upgrade_unattended(device) == [], "it was tried"


@pytest.fixture(scope="module")
def looked_at(
    installed: list[Path], site: AptSite, keys: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BootedDevice]:
    """A subscribed device on which nothing is installed: apt says what it would do.

    It sees two more folders: the repository, signed by a stranger, and the next release of a distribution.
    """
    folder = tmp_path_factory.mktemp("looked-at")
    site.signed_by(keys[1], folder / "strange")
    (folder / "next").mkdir()
    empty_package(folder / "next", "python3.13", "3.13.5-2")
    empty_package(folder / "next", "python3", "3.13.5-1", "Depends: python3.13\n")
    index = subprocess.run(["apt-ftparchive", "packages", "."], cwd=folder / "next", capture_output=True, check=True)
    (folder / "next" / "Packages").write_bytes(index.stdout)
    shared = {PLACE: site.folder, STRANGE: folder / "strange", NEXT: folder / "next"}
    with BootedDevice(folder / "device", installed, shared) as device:
        device.boot()
        site.subscribe(device)
        yield device


def test_apt_takes_nothing_that_a_stranger_signed(looked_at: BootedDevice) -> None:
    looked_at.run("sh", "-c", f"sed s:{PLACE}:{STRANGE}: {SOURCE} > /root/strange.sources")
    from_strange = ("-o", "Dir::Etc::sourcelist=/root/strange.sources", "-o", "Dir::Etc::sourceparts=/dev/null")
    refused = looked_at.run("apt-get", "update", *from_strange, is_checked=False)
    assert refused.status != 0
    assert "is not signed" in refused.output
    would = looked_at.run("apt-get", "upgrade", "--simulate", *ALL, *from_strange).output
    assert "Inst edge-runtime" not in would


@pytest.mark.parametrize(("identity", "is_in"), [(IN_PHASE, True), (OUT_OF_PHASE, False)])
def test_a_newer_version_is_for_the_share_of_devices_that_the_repository_names(
    looked_at: BootedDevice, identity: str, is_in: bool
) -> None:
    would = looked_at.run("apt-get", "upgrade", "--simulate", "-o", f"APT::Machine-ID={identity}").output
    assert (f"Inst edge-runtime [{__version__}~bookworm] ({NEWER}~bookworm" in would) is is_in


def test_a_distributions_next_python_neither_waits_for_the_daemon_nor_removes_it(looked_at: BootedDevice) -> None:
    with looked_at.path("/etc/apt/sources.list.d/next.list").open("w") as source:
        source.write(f"deb [trusted=yes] file:{NEXT} ./\n")
    looked_at.run("apt-get", "update", "-qq")
    would = looked_at.run("apt-get", "dist-upgrade", "--simulate", *ALL).output
    assert re.search(r"^Inst python3 \[3\.11\S*\] \(3\.13", would, re.MULTILINE)
    assert "Remv" not in would
    assert "kept back" not in would


def added_package(site: AptSite, version: str) -> None:
    """Put a package into the pool that is of one version with the daemon's, as those that add libraries are."""
    fields = f"Source: edge-runtime\nDepends: edge-runtime (= {version}~bookworm)\n"
    empty_package(site.pool, ADDED, f"{version}~bookworm", fields)


def upgrade_unattended(device: BootedDevice) -> list[str]:
    """Have unattended-upgrades do what its timer does each day. Returns the packages that it says it upgrades."""
    said = device.run("unattended-upgrade", "--debug", limit_s=LIMIT_S).output
    print(said)
    found = re.search(r"^Packages that will be upgraded:(.*)$", said, re.MULTILINE)
    return sorted(found[1].split()) if found is not None else []


def serving(device: BootedDevice) -> str:
    """The version of the daemon that answers."""
    with Client(device.endpoint) as client:
        return str(client.stats()["version"])


def listed(device: BootedDevice, package: str = "edge-runtime") -> str:
    """The version that dpkg has."""
    return device.run("dpkg-query", "--show", "--showformat=${Version}", package).output
