"""Devices that boot a real systemd, with the package installed: made once for all tests, each test writes on top."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.booted_device import BootedDevice, why_no_device
from demo.device_package import build_package, why_no_package
from demo.device_root import SUITE, device_root
from demo.train_digits import MODEL_FILE
from tests.device.asking import HOST, MODELS


@pytest.fixture(scope="session")
def root() -> Path:
    """Debian 12; where no device can be booted, tests that want it are skipped and say why."""
    return root_or_skip(SUITE)


@pytest.fixture(scope="session")
def package(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package for it, built from this tree."""
    return build_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def installed(root: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Layers of a device on which the package was installed with no network, and one tiny model put in its place."""
    return layers_with(root, package, tmp_path_factory)


@pytest.fixture(scope="session")
def installed_on_13(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same of Debian 13, with the package for that."""
    root = root_or_skip("trixie")
    return layers_with(root, build_package(tmp_path_factory.mktemp("package"), suite="trixie"), tmp_path_factory)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of the test that the device sees as HOST."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def device(installed: list[Path], shared: Path, tmp_path: Path) -> Iterator[BootedDevice]:
    """A device with the package installed, switched on."""
    with BootedDevice(tmp_path / "device", installed, {HOST: shared}) as device:
        device.boot()
        yield device
        # Shown for a test that fails.
        print(device.last_words(60))


@pytest.fixture
def device_13(installed_on_13: list[Path], shared: Path, tmp_path: Path) -> Iterator[BootedDevice]:
    """A device with Debian 13."""
    with BootedDevice(tmp_path / "device", installed_on_13, {HOST: shared}) as device:
        device.boot()
        yield device
        print(device.last_words(60))


def root_or_skip(suite: str) -> Path:
    """A Debian root, or the reason why there is none."""
    reason = why_no_package() or why_no_device()
    if reason is not None:
        pytest.skip(reason)
    try:
        return device_root(suite)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no Debian root can be made (no network?): {error.stderr.strip()[-300:]}")


def layers_with(root: Path, package: Path, folders: pytest.TempPathFactory) -> list[Path]:
    """Boot a device, install the package and a model, switch it off: what it wrote, and its root."""
    shared = folders.mktemp("shared")
    shutil.copy(package, shared / package.name)
    shutil.copy(MODEL_FILE, shared / "model.onnx")
    with BootedDevice(folders.mktemp("installed"), [root], {HOST: shared}) as device:
        device.boot()
        device.run("apt-get", "install", "-qq", "-y", f"{HOST}/{package.name}")
        device.run("install", "-D", "-m", "644", f"{HOST}/model.onnx", f"{MODELS}/digits/1/model.onnx")
        device.shut_down()
    return [device.own_layer, root]
