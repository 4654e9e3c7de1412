"""What a person is told to install where a library is missing: by how this copy came here, and from no index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.debian.flavours import ADDED, flavour_lines
from edge_runtime.extras import added_by, advice_for, install_advice

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = [
    "numpy>=1.24",
    "paho-mqtt>=2.1; extra == 'mqtt'",
    'tuf>=7.0.1; extra == "update"',
    "edge-runtime[update]; extra == 'publish'",
    "securesystemslib[crypto]>=1.3; extra == 'publish'",
    "tensorrt>=10.3; platform_machine == 'x86_64' and extra == 'tensorrt'",
]
PYTHON = "/venv/bin/python"


def advice(
    extra: str,
    origin: dict[str, Any],
    *,
    prefix: str = "/venv",
    place: str = "/venv/site-packages",
    packages: dict[str, str] | None = None,
) -> str:
    home = Path(prefix)
    return advice_for(extra, origin, REQUIRED, prefix=home, place=Path(place), python=PYTHON, packages=packages or {})


@pytest.mark.parametrize(("is_editable", "option"), [(True, "--editable "), (False, "")])
def test_a_clone_is_installed_once_more_with_the_extra(tmp_path: Path, is_editable: bool, option: str) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    origin = {"url": clone.as_uri(), "dir_info": {"editable": is_editable}}
    assert advice("mqtt", origin) == f"install it with: {PYTHON} -m pip install {option}'{clone}[mqtt]'"


def test_a_wheel_is_named_by_its_file_or_its_address(tmp_path: Path) -> None:
    wheel = tmp_path / "edge_runtime-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert advice("mqtt", {"url": wheel.as_uri(), "archive_info": {}}).endswith(f"pip install '{wheel}[mqtt]'")
    url = "https://files.example/edge_runtime-0.1.0-py3-none-any.whl"
    assert advice("mqtt", {"url": url, "archive_info": {}}).endswith(f"pip install 'edge-runtime[mqtt] @ {url}'")
    git = {"url": "https://git.example/e.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert advice("mqtt", git).endswith("pip install 'edge-runtime[mqtt] @ git+https://git.example/e.git@abc'")


@pytest.mark.parametrize("origin", [{}, {"url": "file:///gone.whl", "archive_info": {}}], ids=["untold", "gone"])
def test_a_copy_of_unknown_origin_gets_the_libraries_alone(origin: dict[str, Any]) -> None:
    assert advice("mqtt", origin) == f"install it with: {PYTHON} -m pip install 'paho-mqtt>=2.1'"
    assert advice("publish", origin).endswith("pip install 'tuf>=7.0.1' 'securesystemslib[crypto]>=1.3'")
    assert advice("tensorrt", origin).endswith("pip install 'tensorrt>=10.3'")


def test_debians_package_is_extended_by_packages_and_never_by_pip_as_root(tmp_path: Path) -> None:
    (tmp_path / "flavours").write_text(flavour_lines())
    packages, home = added_by(tmp_path), "/usr/lib/edge-runtime"
    place = f"{home}/lib/python3.11/site-packages"
    assert packages == {added.extra: package for package, added in ADDED.items()}
    for extra, package in packages.items():
        told = advice(extra, {}, prefix=home, place=place, packages=packages)
        assert told == f"the package {package} adds it: sudo apt install {package} (docs/install.md)"
    for told in (
        advice("mqtt", {}, prefix=home, place=place, packages=packages),
        advice("mqtt", {}, prefix="/usr", place="/usr/lib/python3-edge-runtime"),
    ):
        assert told == (
            "no Debian package of edge-runtime has it; "
            "in an environment of your own it is 'paho-mqtt>=2.1' (docs/install.md)"
        )
    assert added_by(tmp_path / "none") == {}


def test_images_are_extended_in_their_own_way() -> None:
    for image in (
        advice("mqtt", {}, prefix="/usr", place="/usr/local/lib/python3.13/dist-packages"),
        advice("mqtt", {"url": "file:///source", "dir_info": {}}, prefix="/opt/edge-runtime", place="/opt/x"),
    ):
        assert image.startswith("this container image leaves it out; ")
        assert image.endswith("--build-arg FLAVOUR=onnxruntime,mqtt .")


def test_this_copy_reports_how_it_was_installed() -> None:
    assert "mqtt" in install_advice("mqtt")
    assert "'edge-runtime[mqtt]'" not in install_advice("mqtt")


def test_no_text_advises_to_install_a_name_that_is_on_no_index() -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    told = re.compile(r"pip install [^\n`]*?['\"` ]edge-runtime(\[[\w,-]+\])?['\"`\s]")
    found = [
        name
        for name in files.split("\0")
        if name.endswith((".py", ".md", ".toml", ".sh")) and not name.startswith(("tests/", "bench/"))
        if told.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []
