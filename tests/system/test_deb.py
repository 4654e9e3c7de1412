"""The Debian package through its life: built, installed, used, upgraded, removed, purged, on systems made for it."""

from __future__ import annotations

import gzip
import hashlib
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
from deploy.debian.flavours import ADDED, CLIENT
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

ADVICE = """
import edge_runtime.extras as extras
for extra, package in extras.added_by(extras.PACKAGE_HOME).items():
    print(f"{package}: {extras.install_advice(extra)}")
"""

ASKING = """
import json
import numpy as np
from edge_runtime import Client
with open("/tmp/seven.json") as file:
    image = np.array(json.load(file), np.float32).reshape(1, 64)
with Client("ipc:///run/edge-runtime/infer.sock") as client:
    client.wait_ready(600, "digits")
    print(client.infer("digits", {"image": image})["digit"][0])
    futures = [client.submit("digits", {"image": image}) for _ in range(100)]
    print(sum(future.result()["digit"][0] == 7 for future in futures), len(client.models()))
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
def beside(folder: Path) -> dict[str, Path]:
    """The packages beside it, by name."""
    return {name: build("amd64", "bookworm", folder, package=name, level=None) for name in (*ADDED, CLIENT)}


@pytest.fixture(scope="module")
def extracted(package: Path, folder: Path) -> Path:
    """Its files, for tests that only read them."""
    dpkg_deb("--extract", package, folder / "extracted")
    return folder / "extracted"


def test_the_package_is_small_and_named_for_version_distribution_and_architecture(package: Path) -> None:
    assert package.name == f"edge-runtime_{__version__}~bookworm_amd64.deb"
    assert package.stat().st_size <= LARGEST_BYTES


def test_the_package_wants_its_distributions_python_by_name_and_a_c_library_that_it_has(package: Path) -> None:
    wanted = field(package, "Depends")
    assert "python3.11," in wanted
    assert "python3 " not in wanted, "a bound on python3 holds a distribution's upgrade back, or is removed by it"
    found = re.search(r"libc6 \(>= 2\.(\d+)\)", wanted)
    assert found is not None
    assert 17 <= int(found[1]) <= DISTRIBUTIONS["bookworm"].glibc


def test_the_package_holds_what_is_needed_to_serve_and_nothing_of_the_builders(package: Path) -> None:
    listing = dpkg_deb("--contents", package).splitlines()
    names = {line.split()[5] for line in listing}
    assert {line.split()[1] for line in listing} == {"root/root"}
    assert {"./usr/bin/edge-runtime", "./usr/share/edge-runtime/config.toml"} <= names
    assert not [name for name in names if name.startswith("./etc/")], "dpkg would ask, and unattended-upgrades wait"
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


@when_changed_lately
@pytest.mark.skipif(shutil.which("lintian") is None, reason="no lintian; do: apt-get install lintian")
def test_lintian_has_nothing_to_say_of_any_package(package: Path, beside: dict[str, Path]) -> None:
    # Those beside it are not compressed here, for haste.
    passed_over = "uses-no-compression-for-control-tarball,uses-no-compression-for-data-tarball"
    for each in (package, *beside.values()):
        said = subprocess.run(
            ["lintian", "--allow-root", "--fail-on", "error,warning", "--suppress-tags", passed_over, str(each)],
            capture_output=True, text=True, timeout=1200, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (said.returncode, said.stdout) == (0, ""), each.name


def test_the_bill_of_materials_names_every_wheel_and_the_libraries_in_it(extracted: Path) -> None:
    bill = json.loads((extracted / "usr/share/sbom/edge-runtime.cdx.json").read_text())
    described = bill["metadata"]["component"]
    assert (described["type"], described["name"]) == ("application", "edge-runtime-amd64")
    assert described["purl"] == f"pkg:deb/edge-runtime/edge-runtime@{__version__}~bookworm?arch=amd64"
    (packages,) = extracted.glob("usr/lib/edge-runtime/lib/*/site-packages")
    installed = {path.name.partition("-")[0].lower().replace("_", "-") for path in packages.glob("*.dist-info")}
    assert {canonicalize_name(each["name"]) for each in bill["components"]} == {*map(canonicalize_name, installed)}
    parts = [part for each in bill["components"] for part in each.get("components", ())]
    assert len({part["bom-ref"] for part in parts}) == len(parts)
    listed = {
        occurrence["location"]: part["hashes"][0]["content"]
        for part in parts
        for occurrence in part.get("evidence", {}).get("occurrences", ())
    }
    libraries = {path.relative_to(packages).as_posix(): path for path in packages.rglob("lib*.so*")}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in libraries.items()}
    names = {part["name"].partition(".so")[0] for part in parts}
    assert {"libjpeg", "libzmq", "libsodium", "libscipy_openblas64_", "libsndfile_x86_64"} <= names
    assert "pkg:cargo/" in json.dumps(parts), "what a wheel says of its own crates"


@needs_root
@when_changed_lately
def test_added_packages_bring_their_libraries_to_the_daemon_and_leave_nothing(
    folder: Path, package: Path, beside: dict[str, Path]
) -> None:
    root = native_root("bookworm", folder / "added")
    install(root, package)
    before = everything(root)
    assert {field(each, "Source") for each in beside.values()} == {"edge-runtime"}, "else apt phases each by itself"
    for name in ADDED:
        told, sizes = sizes_told(), installed_bytes(root)
        install(root, beside[name])
        assert (installed_bytes(root) - sizes) / 1e6 == pytest.approx(told[name], abs=3), name
    libraries_fit(root)
    imports = "import av, cryptography, jsonschema, openvino, openvino_genai"
    root.run("/usr/lib/edge-runtime/bin/python3", "-I", "-c", imports)
    assert root.path("/usr/lib/systemd/system/edge-runtime.service.d/openvino.conf").is_file()
    serves(root)
    for name in reversed(ADDED):
        root.run("dpkg", "--purge", name)
    assert everything(root) == before
    said = root.run("/usr/lib/edge-runtime/bin/python3", "-I", "-c", ADVICE)
    assert said.splitlines() == [
        f"{name}: the package {name} adds it: sudo apt install {name} (docs/install.md)" for name in ADDED
    ]


@needs_root
@when_changed_lately
def test_the_clients_package_asks_from_the_distributions_own_python(
    folder: Path, package: Path, beside: dict[str, Path]
) -> None:
    root = native_root("bookworm", folder / "client")
    shutil.copyfile(beside[CLIENT], root.path("/tmp/client.deb"))
    shutil.copyfile("/etc/resolv.conf", root.path("/etc/resolv.conf"))
    try:
        root.run("apt-get", "update", "-qq")
        root.run("apt-get", "install", "-qq", "-y", "--no-install-recommends", "/tmp/client.deb")
    except AssertionError as error:
        pytest.skip(f"the distribution's packages cannot be fetched (no network?): {str(error)[-300:]}")
    assert installed_bytes(root, "/usr/lib/python3-edge-runtime") / 1e6 == pytest.approx(sizes_told()[CLIENT], abs=3)
    install(root, package)
    shutil.copyfile(ROOT / "demo/seven.json", root.path("/tmp/seven.json"))
    put_digits(root)
    with serving(root):
        assert root.run("python3", "-c", ASKING).split() == ["7", "100", "1"]
    root.run("dpkg", "--purge", CLIENT)
    assert not root.path("/usr/lib/python3-edge-runtime").exists()
    assert not root.path("/usr/lib/python3/dist-packages/python3-edge-runtime.pth").exists()


@needs_root
@pytest.mark.parametrize("suite", ["bookworm", *(pytest.param(name, marks=when_changed_lately) for name in OTHERS)])
def test_the_package_installs_serves_upgrades_and_leaves_as_it_should(suite: str, folder: Path, package: Path) -> None:
    root = native_root(suite, folder / suite)
    first = package if suite == "bookworm" else build("amd64", suite, folder, level=None)
    install(root, first)
    installed_as_promised(root)
    if suite == "bookworm":
        documents_tell_the_size(root)
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


@pytest.fixture(scope="module")
def arm64(folder: Path) -> DebianRoot:
    """A system of that architecture with the package: emulated it takes minutes, so each test has one step."""
    root = emulated_root("bookworm", folder / "arm64")
    # Its packages are unpacked and not configured, so dpkg knows of none.
    install(root, build("arm64", "bookworm", folder, level=None), "--force-depends")
    return root


@needs_root
@when_changed_lately
def test_the_package_for_arm64_installs_there(arm64: DebianRoot) -> None:
    installed_as_promised(arm64)


@needs_root
@when_changed_lately
def test_the_package_for_arm64_serves_there(arm64: DebianRoot) -> None:
    serves(arm64)


@needs_root
@when_changed_lately
def test_the_package_for_arm64_tunes_there(arm64: DebianRoot) -> None:
    put_digits(arm64)
    tunes(arm64)


# ---- steps ----------------------------------------------------------------------------------------------------------


def install(root: DebianRoot, package: Path, *options: str) -> None:
    shutil.copyfile(package, root.path("/tmp/package.deb"))
    root.run("dpkg", *options, "--install", "/tmp/package.deb")
    root.path("/tmp/package.deb").unlink()


def installed_as_promised(root: DebianRoot) -> None:
    assert root.run("edge-runtime", "--version").strip() == __version__
    name, _, _, _, _, home, shell = root.run("getent", "passwd", "edge-runtime").strip().split(":")
    assert (name, home, shell) == ("edge-runtime", STATE, "/usr/sbin/nologin")
    assert owner(root, STATE) == "750 edge-runtime edge-runtime"
    assert owner(root, f"{STATE}/models") == "750 root edge-runtime"
    assert owner(root, "/etc/edge-runtime/config.toml") == "644 root root"
    assert root.path("/etc/systemd/system/multi-user.target.wants/edge-runtime.service").is_symlink()
    libraries_fit(root)
    assert (
        root.run("find", "/usr/lib/edge-runtime", "-not", "-user", "root", "-or", "-perm", "/022", "-type", "f") == ""
    )


def documents_tell_the_size(root: DebianRoot) -> None:
    """What this package takes is one number, what pip installs another (test_wheel.py): README.md has both."""
    size = installed_bytes(root) / 1e6
    assert size == pytest.approx(sizes_told()["edge-runtime"], abs=4)
    told = re.search(r"The Debian\s+package takes (\d+) MB", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert told is not None
    assert size == pytest.approx(int(told[1]), abs=4)


def libraries_fit(root: DebianRoot) -> None:
    """Each library has what it requires, and every module is compiled."""
    unmet = root.run("/usr/lib/edge-runtime/bin/python3", "-I", "-c", UNMET).splitlines()
    assert [
        line
        for line in unmet
        if canonicalize_name(re.split("[ <>=!~;]", line.partition(" requires ")[2])[0]) not in NOT_NEEDED
    ] == []
    sources = list(root.path(PACKAGES).rglob("*.py"))
    assert len(list(root.path(PACKAGES).rglob("*.pyc"))) == len(sources)


def everything(root: DebianRoot) -> set[str]:
    """The files of the system where packages put theirs."""
    return set(root.run("find", "/usr", "/etc", "/var/lib/systemd", "-xdev").splitlines())


def installed_bytes(root: DebianRoot, *folders: str) -> int:
    """Bytes of files in the folders where the packages' are, compiled modules included."""
    places = folders or ("/usr/lib/edge-runtime", "/usr/share/doc", "/usr/share/sbom", "/usr/share/edge-runtime")
    found = root.run("find", *places, "-type", "f", "-printf", "%s\n")
    return sum(map(int, found.split()))


def sizes_told() -> dict[str, float]:
    """MB of each package in docs/install.md, as installed."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| .* \| (\d+) MB(?: more)? \|$", (ROOT / "docs/install.md").read_text(), re.MULTILINE
    )
    return {name: float(size) for name, size in rows}


def serves(root: DebianRoot) -> None:
    """The daemon as its user, with the package's configuration, as the service starts it."""
    put_digits(root)
    digits = load_held_out()
    with serving(root) as endpoint, Client(endpoint) as client:
        client.wait_ready(START_LIMIT_S)  # emulated, beside other work, a start takes longer than a client waits
        answer = client.infer("digits", {"image": digits.images[:32].astype(np.float32)}, timeout_ms=60_000)
        (entry,) = client.models()
    assert (answer["digit"] == digits.labels[:32]).mean() > 0.9
    assert (entry["name"], entry["backend"]) == ("digits", "onnxruntime")
    root.run("rm", "-rf", "/run/edge-runtime")


def put_digits(root: DebianRoot) -> None:
    """A model, and the folder of sockets, which the service's unit makes."""
    version = root.path(f"{STATE}/models/digits/1")
    if not version.exists():
        version.parent.mkdir(parents=True)
        shutil.copytree(ROOT / "demo/models/digits/1", version)
    root.run("install", "-d", "-m", "0750", "-o", "edge-runtime", "-g", "edge-runtime", "/run/edge-runtime")


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
    config = folder / "usr/share/edge-runtime/config.toml"
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
