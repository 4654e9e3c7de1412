"""Devices that boot a real systemd, with the package installed: made once for all tests, each test writes on top."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.booted_device import BootedDevice, why_no_device
from demo.device_package import build_package, why_no_package
from demo.device_root import debian_root
from demo.train_digits import MODEL_FILE
from tests.device.asking import HOST, MODELS


@pytest.fixture(scope="session")
def root() -> Path:
    """A Debian root; where no device can be booted, tests that want it are skipped and say why."""
    reason = why_no_package() or why_no_device()
    if reason is not None:
        pytest.skip(reason)
    try:
        return debian_root()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no Debian root can be made (no network?): {error.stderr.strip()[-300:]}")


@pytest.fixture(scope="session")
def package(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from this tree."""
    return build_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def installed(root: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Layers of a device on which the package was installed with no network, and one tiny model put in its place."""
    folder = tmp_path_factory.mktemp("installed")
    shared = tmp_path_factory.mktemp("shared")
    shutil.copy(package, shared / package.name)
    shutil.copy(MODEL_FILE, shared / "model.onnx")
    with BootedDevice(folder, [root], {HOST: shared}) as device:
        device.boot()
        device.run("apt-get", "install", "-qq", "-y", f"{HOST}/{package.name}")
        device.run("install", "-D", "-m", "644", f"{HOST}/model.onnx", f"{MODELS}/digits/1/model.onnx")
        device.shut_down()
    return [device.own_layer, root]


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
