"""The Debian package through its life: built, installed, used, upgraded, removed, purged, on systems made for it."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from packaging.utils import canonicalize_name

from cross.wheels import NOT_NEEDED, is_left_out
from demo.digits import load_held_out
from deploy.debian.build_deb import COMPLETIONS, DISTRIBUTIONS, build
from edge_runtime import Client, __version__
from edge_runtime.cli.completion import script_for
from tests.changes import when_changed
from tests.system.debian_root import ROOT, DebianRoot, emulated_root, native_root

LARGEST_BYTES = 60e6
START_LIMIT_S = 600.0
PACKAGES = "/usr/lib/edge-runtime/lib"
STATE = "/var/lib/edge-runtime"

when_changed_lately = when_changed(
    "deploy/debian",
    "cross/wheels.py",
    "requirements/dev.lock",
    "pyproject.toml",
    "hatch_build.py",
    "tests/system/test_deb.py",
)
OTHERS = sorted(DISTRIBUTIONS.keys() - {"bookworm"})

UNMET = """
import importlib.metadata as metadata
from packaging.requirements import Requirement
for package in metadata.distributions():
    for line in package.requires or ():
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            if not wanted.specifier.contains(metadata.version(wanted.name)):
                print("wrong version:", package.name, "requires", line)
        except metadata.PackageNotFoundError:
            print("missing:", package.name, "requires", line)
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb; do: apt-get install dpkg"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for chroot")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deb")


@pytest.fixture(scope="module")
def package(folder: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # Else the last commit's, which another one may become meanwhile.
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield build("amd64", "bookworm", folder, level=0)


@pytest.fixture(scope="module")
def extracted(package: Path, folder: Path) -> Path:
    """Its files, for tests that only read them."""
    dpkg_deb("--extract", package, folder / "extracted")
    return folder / "extracted"


def test_the_package_is_small_and_named_for_version_distribution_and_architecture(package: Path) -> None:
    assert package.name == f"edge-runtime_{__version__}~bookworm_amd64.deb"
    assert package.stat().st_size <= LARGEST_BYTES


def test_the_package_wants_its_distributions_python_and_a_c_library_that_it_has(package: Path) -> None:
    wanted = field(package, "Depends")
    assert "python3 (>= 3.11~), python3 (<< 3.12~)" in wanted
    found = re.search(r"libc6 \(>= 2\.(\d+)\)", wanted)
    assert found is not None
    assert 17 <= int(found[1]) <= DISTRIBUTIONS["bookworm"].glibc


def test_the_package_holds_what_is_needed_to_serve_and_nothing_of_the_builders(package: Path) -> None:
    listing = dpkg_deb("--contents", package).splitlines()
    names = {line.split()[5] for line in listing}
    assert {line.split()[1] for line in listing} == {"root/root"}
    assert {"./usr/bin/edge-runtime", "./etc/edge-runtime/config.toml"} <= names
    assert "./usr/lib/systemd/system/edge-runtime.service" in names
    assert not [name for name in names if name.endswith((".pyc", ".pyi", "/RECORD"))]
    assert not [name for name in names if "/tests/" in name and not name.startswith("./usr/share/doc/")]
    inside = {name.partition("/site-packages/")[2] for name in names}
    assert not [name for name in inside if is_left_out(name)]
    assert {f"edge_runtime/pages/static/{name}" for name in ("index.html", "app.js", "theme.css")} <= inside
    libraries = {name for name in inside if not name.startswith("edge_runtime")}
    assert not [name for name in libraries if re.match(r"(pip|setuptools|pytest|onnx|openvino)(-|/)", name)]


def test_the_package_brings_a_manual_page_that_renders_without_a_warning(extracted: Path) -> None:
    page = gzip.decompress((extracted / "usr/share/man/man1/edge-runtime.1.gz").read_bytes())
    for checker in (["groff", "-man", "-Kutf8", "-Tutf8", "-ww"], ["mandoc", "-Tlint", "-Wwarning"]):
        if shutil.which(checker[0]) is not None:
            done = subprocess.run(checker, input=page, capture_output=True, timeout=1200, check=False)
            assert (done.stderr if checker[0] == "groff" else done.stdout) == b"", done


def test_every_document_that_one_in_the_package_links_to_is_there(extracted: Path) -> None:
    documents = extracted / "usr/share/doc/edge-runtime"
    links = {
        (page, link)
        for page in documents.rglob("*.md")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    }
    assert (documents / "README.md", "deploy/runbook.md") in links
    assert (documents / "README.md", "docs/configuration.md") in links
    assert [f"{page}: {link}" for page, link in sorted(links) if not (page.parent / link).exists()] == []
    assert (documents / "deploy/broker/mosquitto.conf").is_file()
    assert os.access(documents / "deploy/broker/make-certificates.sh", os.X_OK), "its README runs it"


def test_shells_find_what_they_complete_where_they_look_for_it(extracted: Path) -> None:
    shared = extracted / "usr/share"
    for shell, place in COMPLETIONS.items():
        assert (shared / place).read_text() == script_for(shell) + "\n"
    complete = 'source "$0"; COMP_WORDS=(edge-runtime prof); COMP_CWORD=1; _edge_runtime; echo "${COMPREPLY[@]}"'
    said = subprocess.run(
        ["bash", "--norc", "-c", complete, str(shared / COMPLETIONS["bash"])],
        capture_output=True, text=True, timeout=1200, check=True,
    )  # fmt: skip
    assert said.stdout == "profile\n"


def test_the_same_source_gives_the_same_bytes_whoever_builds_it_and_where(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    before = os.umask(0o077)
    try:
        again = build("amd64", "bookworm", tmp_path / "again", level=0)
    finally:
        os.umask(before)
    assert again.read_bytes() == package.read_bytes()


def test_lintian_has_nothing_to_say(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("no lintian; do: apt-get install lintian")
    said = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", str(package)],
        capture_output=True, text=True, timeout=1200, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout


@needs_root
@pytest.mark.parametrize("suite", ["bookworm", *(pytest.param(name, marks=when_changed_lately) for name in OTHERS)])
def test_the_package_installs_serves_upgrades_and_leaves_as_it_should(suite: str, folder: Path, package: Path) -> None:
    root = native_root(suite, folder / suite)
    first = package if suite == "bookworm" else build("amd64", suite, folder, level=None)
    install(root, first)
    installed_as_promised(root)
    serves(root)

    config, model = root.path("/etc/edge-runtime/config.toml"), root.path(f"{STATE}/models/digits/1/model.onnx")
    config.write_text(config.read_text() + '[log]\nlevel = "warning"\n')
    ours = config.read_text()
    if suite == "bookworm":
        # Once: each installation compiles every module, and the scripts and the files of others differ in nothing.
        install(root, newer(first, folder / f"{suite}-newer" / "package", "9.0.0"))
        assert root.run("edge-runtime", "--version").strip() == "9.0.0"
        assert config.read_text() == ours
        assert model.exists()
        serves(root)

    root.run("dpkg", "--remove", "edge-runtime")
    assert config.read_text() == ours
    assert model.exists()
    assert not root.path("/usr/lib/edge-runtime").exists()

    said = root.run("dpkg", "--purge", "edge-runtime")
    assert not root.path("/etc/edge-runtime").exists()
    assert not root.path(STATE).exists()
    assert "Left: the user" in said
    assert root.run("find", "/", "-xdev", "-name", "*edge-runtime*", "-not", "-path", "/proc/*").split() == []


@needs_root
@when_changed_lately
def test_the_package_for_arm64_installs_and_serves_there(folder: Path) -> None:
    root = emulated_root("bookworm", folder / "arm64")
    # Its packages are unpacked and not configured, so dpkg knows of none.
    install(root, build("arm64", "bookworm", folder, level=None), "--force-depends")
    installed_as_promised(root)
    serves(root)
    tunes(root)


# ---- steps ----------------------------------------------------------------------------------------------------------


def install(root: DebianRoot, package: Path, *options: str) -> None:
    shutil.copyfile(package, root.path("/tmp/package.deb"))
    root.run("dpkg", "--force-confdef", "--force-confold", *options, "--install", "/tmp/package.deb")
    root.path("/tmp/package.deb").unlink()


def installed_as_promised(root: DebianRoot) -> None:
    assert root.run("edge-runtime", "--version").strip() == __version__
    name, _, _, _, _, home, shell = root.run("getent", "passwd", "edge-runtime").strip().split(":")
    assert (name, home, shell) == ("edge-runtime", STATE, "/usr/sbin/nologin")
    assert owner(root, STATE) == "750 edge-runtime edge-runtime"
    assert owner(root, f"{STATE}/models") == "750 root edge-runtime"
    assert owner(root, "/etc/edge-runtime/config.toml") == "644 root root"
    assert root.path("/etc/systemd/system/multi-user.target.wants/edge-runtime.service").is_symlink()
    unmet = root.run("/usr/lib/edge-runtime/bin/python3", "-I", "-c", UNMET).splitlines()
    assert [
        line
        for line in unmet
        if canonicalize_name(re.split("[ <>=!~;]", line.partition(" requires ")[2])[0]) not in NOT_NEEDED
    ] == []
    sources = list(root.path(PACKAGES).rglob("*.py"))
    assert len(list(root.path(PACKAGES).rglob("*.pyc"))) == len(sources)
    assert (
        root.run("find", "/usr/lib/edge-runtime", "-not", "-user", "root", "-or", "-perm", "/022", "-type", "f") == ""
    )


def serves(root: DebianRoot) -> None:
    """The daemon as its user, with the package's configuration, as the service starts it."""
    version = root.path(f"{STATE}/models/digits/1")
    if not version.exists():
        version.parent.mkdir(parents=True)
        shutil.copytree(ROOT / "demo/models/digits/1", version)
    root.run("install", "-d", "-m", "0750", "-o", "edge-runtime", "-g", "edge-runtime", "/run/edge-runtime")
    digits = load_held_out()
    with serving(root) as endpoint, Client(endpoint) as client:
        client.wait_ready(START_LIMIT_S)  # emulated, beside other work, a start takes longer than a client waits
        answer = client.infer("digits", {"image": digits.images[:32].astype(np.float32)}, timeout_ms=60_000)
        (entry,) = client.models()
    assert (answer["digit"] == digits.labels[:32]).mean() > 0.9
    assert (entry["name"], entry["backend"]) == ("digits", "onnxruntime")
    root.run("rm", "-rf", "/run/edge-runtime")


def tunes(root: DebianRoot) -> None:
    """A tune in little time, which measures one way in full: processes, sockets and facts are those of the device."""
    wish = ("--slo", "p99=30s", "--time", "5s", "--dry-run", "--json")
    said = root.run("edge-runtime", "tune", "digits", "--models", f"{STATE}/models", "--state", STATE, *wish)
    found = json.loads(said[said.index("\n{") :])
    assert found["choice"]["backend"] == "onnxruntime"
    assert found["choice"]["rate"] > 0
    assert found["rows"][0]["accuracy"]["agreement"] == 1.0


@contextmanager
def serving(root: DebianRoot) -> Iterator[str]:
    daemon = root.start(
        "edge-runtime", "serve", user="edge-runtime:edge-runtime",
        RUNTIME_DIRECTORY="/run/edge-runtime", STATE_DIRECTORY=STATE,
    )  # fmt: skip
    socket = root.path("/run/edge-runtime/infer.sock")
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not socket.exists() and daemon.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        if not socket.exists():
            daemon.kill()
            pytest.fail(daemon.communicate(timeout=START_LIMIT_S)[0].decode())
        yield f"ipc://{socket}"
        daemon.terminate()
        said, _ = daemon.communicate(timeout=START_LIMIT_S)
        assert daemon.returncode == 0, said.decode()
    finally:
        daemon.kill()
        daemon.communicate()


def newer(package: Path, folder: Path, version: str) -> Path:
    """The same package as a later version, whose own configuration is another."""
    folder.parent.mkdir()
    dpkg_deb("--raw-extract", package, folder)
    control = folder / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {__version__}", f"Version: {version}"))
    (module,) = folder.rglob("edge_runtime/__init__.py")
    module.write_text(module.read_text().replace(f'"{__version__}"', f'"{version}"'))
    config = folder / "etc/edge-runtime/config.toml"
    config.write_text("# another\n" + config.read_text())
    made = folder.with_suffix(".deb")
    dpkg_deb("-Znone", "--root-owner-group", "--build", folder, made)
    return made


def field(package: Path, name: str) -> str:
    return dpkg_deb("--field", package, name).strip()


def owner(root: DebianRoot, path: str) -> str:
    return root.run("stat", "--format=%a %U %G", path).strip()


def dpkg_deb(*words: str | Path) -> str:
    return subprocess.run(
        ["dpkg-deb", *map(str, words)], capture_output=True, text=True, timeout=1200, check=True,
        stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip
