"""Build edge-runtime_<version>~<distribution>_<architecture>.deb on any Linux with dpkg-deb, without Docker or root.

The package has a virtual environment in /usr/lib/edge-runtime for the distribution's own Python, with wheels of
requirements/dev.lock for that platform; the service, its drop-ins and a configuration. Further packages add libraries
to that environment, or have the client for the distribution's own Python (flavours.py). The same inputs give the same
bytes. `make deb` runs it; tests call `build`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from cross import sbom, wheels
from cross.building import ShowStep, made_line, run_program, show_nothing, watched
from cross.wheels import MACHINES, ROOT, Target, Wheel
from deploy.debian.flavours import (
    ADDED,
    CLIENT,
    CLIENT_EXTRAS,
    CLIENT_HOME,
    CLIENT_PATH,
    DAEMON,
    EXTRAS,
    FLAVOURS,
    OF_DISTRIBUTION,
    PACKAGES,
    chain,
    flavour_lines,
)
from deploy.debian.manual import manual
from edge_runtime.cli.completion import script_for

HERE = Path(__file__).parent
UNITS = ROOT / "deploy" / "systemd"
SBOMS = "usr/share/sbom"
SERVICE_DROP_INS = "usr/lib/systemd/system/edge-runtime.service.d"
SCRIPTS = ("preinst", "postinst", "prerm", "postrm")
MAINTAINER = "edge-runtime maintainers <maintainers@edge-runtime.invalid>"
LIMIT_S = 600.0

DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "deploy/runbook.md",
    "deploy/broker",
    "deploy/repository",
    "deploy/provisioning",
    "deploy/engines",
    "deploy/apt/README.md",
    "deploy/monitoring",
    "deploy/containers",
    "deploy/kserve",
    "cross/README.md",
    "cross/debian.lock",
    "demo/README.md",
    "device_profiles/README.md",
    "bench/results",
)
"""The handbook and every file that it links to, with the same paths below /usr/share/doc, so that links hold."""

COMPLETIONS = {
    "bash": "bash-completion/completions/edge-runtime",
    "zsh": "zsh/vendor-completions/_edge-runtime",
    "fish": "fish/vendor_completions.d/edge-runtime.fish",
}
"""The folders below /usr/share where shells look for completions of packages."""

DESCRIPTION = """\
 Drop an ONNX model into a folder and it is served, in batches, with a latency
 bound that holds under overload: a request carries a deadline, and is answered
 in time or told at once that it will not be. Models are updated with
 signatures, observed, and rolled back where they do badly.
 .
 With ONNX Runtime for the CPU, the Open Inference Protocol over HTTP and gRPC,
 MQTT, updates and Prometheus metrics.
"""

CLIENT_DESCRIPTION = """\
 The client of edge-runtime for the distribution's own Python 3: tensors in and
 out over ZeroMQ, MQTT or HTTP, blocking or with asyncio.
"""

CHANGES = """\
{package} ({version}) unstable; urgency=medium

  * What changed is in NEWS.gz of the package edge-runtime.

 -- {maintainer}  {date}
"""


@dataclass(frozen=True)
class Distribution:
    """A distribution's minor versions of Python 3 and glibc 2."""

    minor: int
    glibc: int


DISTRIBUTIONS = {
    "bookworm": Distribution(11, 36),
    "trixie": Distribution(13, 41),
    "jammy": Distribution(10, 35),
    "noble": Distribution(12, 39),
}


@dataclass(frozen=True)
class Making:
    """A package that is being made. root: where its files are laid out. own: our wheel.

    release: our version. version: the package's, with its distribution. epoch: the time of all files.
    """

    package: str
    root: Path
    own: Wheel
    target: Target
    release: str
    version: str
    epoch: int
    show_step: ShowStep

    def collect(self, extras: Iterable[str]) -> list[Wheel]:
        """The wheels of our package's extras, without our own."""
        return wheels.collect(self.own, extras, self.target, wheels.CACHE / "wheels", show_step=self.show_step)

    def unpack(self, found: list[Wheel], place: str) -> None:
        """Lay out wheels in a folder below root, our own with this release's number."""
        self.show_step(f"unpacking {len(found)} packages of Python")
        (self.root / place).mkdir(parents=True)
        for wheel in found:
            wheels.unpack(wheel, place).write(self.root)
        if self.own in found:
            _set_version(self.root / place, self.release)

    def needs_of_libraries(self) -> tuple[str, ...]:
        """The packages of Debian that libraries of wheels need."""
        return f"libc6 (>= 2.{_oldest_glibc(self.root)})", "libgcc-s1", "libstdc++6"

    @property
    def site_packages(self) -> str:
        """The folder of the daemon's libraries, below root."""
        return f"usr/lib/edge-runtime/lib/python3.{self.target.minor}/site-packages"


@dataclass(frozen=True)
class Contents:
    """What was laid out for a package: its wheels, our own among them, and what its control file says of it.

    scripts: the folder with those of its maintainer. There are no conffiles: dpkg asks about one that was changed on
    the device and in the package, and unattended-upgrades leaves such a package out for good.
    """

    wheels: list[Wheel]
    summary: str
    description: str
    depends: tuple[str, ...]
    scripts: Path
    recommends: str = ""
    section: str = "science"


def build(
    architecture: str,
    name: str,
    folder: Path,
    *,
    package: str = DAEMON,
    version: str | None = None,
    level: int | None = 6,
    show_step: ShowStep = show_nothing,
) -> Path:
    """Build one package into a folder and return its file.

    name: the distribution's. package: one of PACKAGES. version: None is the source's. level: of xz; None: no xz.
    """
    distribution = DISTRIBUTIONS[name]
    version = version or _source_version()
    whole = f"{version}~{name}"
    epoch = _epoch()
    target = Target(architecture, distribution.minor, distribution.glibc)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-deb-") as made:
        root = Path(made) / "root"
        own = wheels.build_own(Path(made) / "own")
        making = Making(package, root, own, target, version, whole, epoch, show_step)
        lay_out = _lay_out_added if package in ADDED else _lay_out_client if package == CLIENT else _lay_out_daemon
        contents = lay_out(making)
        _lay_out_notes(making)
        _write_bill(making, contents.wheels)
        _write_control(making, contents)
        _make_plain(root, epoch)
        packing = ("-Znone",) if level is None else ("-Zxz", f"-z{level}")
        made_file = folder / f"{package}_{whole}_{architecture}.deb"
        show_step("packing" if level is None else f"packing with xz -{level}{', about a minute' if level > 3 else ''}")
        half = folder / f".{made_file.name}.part"  # a partial file must not have a package's name
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", *packing, "--build", str(root), str(half)],
            check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        )  # fmt: skip
        half.replace(made_file)
    return made_file


# ---- content --------------------------------------------------------------------------------------------------------


def _lay_out_daemon(making: Making) -> Contents:
    """A virtual environment as of `python -m venv`, with packages for the target machine, and the service around it."""
    found = [*making.collect(EXTRAS), making.own]
    making.unpack(found, making.site_packages)
    python = f"3.{making.target.minor}"
    _lay_out_commands(making.root, python)
    _lay_out_service(making.root)
    _lay_out_words(making.root, making.release, making.epoch)
    return Contents(
        found,
        "serve models on a device over ZeroMQ, HTTP, gRPC and MQTT",
        DESCRIPTION,
        # By its own name: a distribution's next Python lies beside it, and does not wait for this package or remove it.
        (f"python{python}", *making.needs_of_libraries(), "passwd"),
        HERE,
        recommends="systemd, ca-certificates",
    )


def _lay_out_added(making: Making) -> Contents:
    """The libraries that an added package has and those below it have not, in the daemon's environment."""
    added, on = ADDED[making.package], (DAEMON, *chain(making.package)[:-1])
    below = (*EXTRAS, *(ADDED[each].extra for each in on[1:]))
    known = {wheel.name for wheel in making.collect(below)}
    found = [wheel for wheel in making.collect((*below, added.extra)) if wheel.name not in known]
    making.unpack(found, making.site_packages)
    if added.drop_in:
        place = making.root / SERVICE_DROP_INS
        place.mkdir(parents=True)
        shutil.copyfile(UNITS / "drop-ins" / added.drop_in, place / added.drop_in)
    needed = (*(f"{each} (= {making.version})" for each in on), *making.needs_of_libraries())
    return Contents(found, added.summary, added.text, needed, HERE / "added")


def _lay_out_client(making: Making) -> Contents:
    """Our package, and the libraries of its client that the distribution has not, behind all that it has."""
    found = [wheel for wheel in (*making.collect(CLIENT_EXTRAS), making.own) if wheel.name not in OF_DISTRIBUTION]
    making.unpack(found, CLIENT_HOME)
    path = making.root / CLIENT_PATH
    path.parent.mkdir(parents=True)
    path.write_text(f"/{CLIENT_HOME}\n")
    # The libraries are for this Python alone, and so is what Debian brings for it.
    minor = making.target.minor
    python = f"python3 (>= 3.{minor}~)", f"python3 (<< 3.{minor + 1}~)"
    needed = (*python, *making.needs_of_libraries(), *OF_DISTRIBUTION.values())
    return Contents(
        found, "client of edge-runtime for Python 3", CLIENT_DESCRIPTION, needed, HERE / "client", section="python"
    )


def _lay_out_commands(root: Path, python: str) -> None:
    """The environment's interpreter, our command, and which packages add to it."""
    home = root / "usr/lib/edge-runtime"
    (home / FLAVOURS).write_text(flavour_lines())
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to(f"../../../bin/python{python}")
    (home / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n")
    command = home / "bin" / "edge-runtime"
    command.write_text(
        "#!/usr/lib/edge-runtime/bin/python3 -I\n"
        "import sys\n\nfrom edge_runtime.cli.main import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/edge-runtime").symlink_to("../lib/edge-runtime/bin/edge-runtime")


def _lay_out_service(root: Path) -> None:
    units = root / "usr/lib/systemd/system"
    shared = root / "usr/share/edge-runtime"
    for target, files in (
        (units, [UNITS / "edge-runtime.service", UNITS / "edge-runtime-retry.timer"]),
        (shared, [HERE / "config.toml"]),
        (shared / "drop-ins", sorted((UNITS / "drop-ins").glob("*.conf"))),
    ):
        target.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
    _lay_out_documents(root / "usr/share/doc/edge-runtime")


def _lay_out_notes(making: Making) -> None:
    """What every package has: its copyright, its changes, and what lintian is told."""
    package, documents = making.package, making.root / "usr/share/doc" / making.package
    documents.mkdir(parents=True, exist_ok=True)
    licences = ADDED[package].licences if package in ADDED else ""
    said = (HERE / "copyright").read_text("utf-8").replace("\n\nFiles:", f"\n{licences}\nFiles:")
    (documents / "copyright").write_text(said, encoding="utf-8")
    overrides = making.root / "usr/share/lintian/overrides" / package
    overrides.parent.mkdir(parents=True)
    told = (HERE / "lintian-overrides").read_text("utf-8").replace("@PACKAGE@", package)
    libraries = CLIENT_HOME if package == CLIENT else "*/site-packages"
    overrides.write_text(told.replace("@LIBRARIES@", libraries), encoding="utf-8")
    date = formatdate(making.epoch)
    changes = CHANGES.format(package=package, version=making.version, maintainer=MAINTAINER, date=date)
    texts = {"changelog.gz": changes}
    if package == DAEMON:
        texts["NEWS.gz"] = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name, text in texts.items():
        (documents / name).write_bytes(gzip.compress(text.encode(), 9, mtime=making.epoch))


def _write_bill(making: Making, found: list[Wheel]) -> None:
    """The bill of materials, where the image has its own."""
    package, architecture = making.package, making.target.architecture
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(making.epoch))
    purl = f"pkg:deb/edge-runtime/{package}@{quote(making.version, safe='+.~-')}?arch={architecture}"
    place = making.root / SBOMS / f"{package}.cdx.json"
    place.parent.mkdir(parents=True)
    name = f"{package}-{architecture}"
    place.write_bytes(sbom.make_sbom(name, making.version, created, purl=purl, wheels=found))


def _lay_out_documents(target: Path) -> None:
    for name in DOCUMENTS:
        source = ROOT / name
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for file in files:
            if file.is_file() and not file.name.startswith("."):
                place = target / file.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)


def _lay_out_words(root: Path, version: str, epoch: int) -> None:
    """The manual page and the shells' completions, of this tree's command line."""
    page = root / "usr/share/man/man1/edge-runtime.1.gz"
    page.parent.mkdir(parents=True)
    page.write_bytes(gzip.compress(manual(version, epoch).encode(), 9, mtime=epoch))
    for shell, place in COMPLETIONS.items():
        script = root / "usr/share" / place
        script.parent.mkdir(parents=True)
        script.write_text(script_for(shell) + "\n", encoding="utf-8")


def _write_control(making: Making, contents: Contents) -> None:
    root, control = making.root, making.root / "DEBIAN"
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    control.mkdir()
    size = sum(path.stat().st_size for path in files) // 1024
    # By the source apt decides whether a device is in a phase: added packages come with the daemon's or not at all.
    source = f"Source: {DAEMON}\n" if making.package != DAEMON else ""
    recommends = f"Recommends: {contents.recommends}\n" if contents.recommends else ""
    (control / "control").write_text(
        f"""\
Package: {making.package}
{source}Version: {making.version}
Architecture: {making.target.architecture}
Maintainer: {MAINTAINER}
Installed-Size: {size}
Depends: {", ".join(contents.depends)}
{recommends}Section: {contents.section}
Priority: optional
Description: {contents.summary}
{contents.description}"""
    )
    sums = [
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(root)}\n"
        for path in files
    ]
    (control / "md5sums").write_text("".join(sums))
    for script in SCRIPTS:
        if (contents.scripts / script).exists():
            text = (contents.scripts / script).read_text("utf-8")
            (control / script).write_text(text.replace("@TAG@", f"cpython-3{making.target.minor}"), encoding="utf-8")
            (control / script).chmod(0o755)


# ---- steps ----------------------------------------------------------------------------------------------------------


def _set_version(packages: Path, version: str) -> None:
    module = packages / "edge_runtime" / "__init__.py"
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', module.read_text("utf-8"), flags=re.MULTILINE)
    module.write_text(text, encoding="utf-8")


def _oldest_glibc(root: Path) -> int:
    """The minor version of the newest glibc symbol that a library needs; names are plain text in ELF files."""
    wanted: set[int] = {17}
    for path in root.rglob("*.so*"):
        wanted.update(int(found) for found in re.findall(rb"\0GLIBC_2\.(\d+)\0", path.read_bytes()))
    return max(wanted)


def _make_plain(root: Path, epoch: int) -> None:
    """Set modes and times that depend on neither the builder nor the time."""
    for path in [root, *sorted(root.rglob("*"))]:
        if not path.is_symlink():
            is_program = path.parent.name in {"bin", "DEBIAN"} or path.suffix == ".sh"
            is_script = is_program and path.is_file() and path.read_bytes()[:2] == b"#!"
            path.chmod(0o755 if path.is_dir() or is_script else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _source_version() -> str:
    text = (ROOT / "edge_runtime" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def _epoch() -> int:
    """`SOURCE_DATE_EPOCH`, else the last commit's time, else the lock's (reproducible-builds.org)."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    try:
        log = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return int((ROOT / "requirements/dev.lock").stat().st_mtime)
    return int(log.stdout)


def main() -> int:
    """Build the package and print its name, size and digest. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build a Debian package.", allow_abbrev=False)
    parser.add_argument("--architecture", choices=sorted(MACHINES), default="amd64")
    parser.add_argument("--distribution", choices=sorted(DISTRIBUTIONS), default="bookworm")
    parser.add_argument("--package", choices=(*PACKAGES, "all"), default=DAEMON)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    parser.add_argument("--version", help="default: the source's")
    parser.add_argument("--level", type=int, choices=range(10), default=6, help="of xz: 0 takes 10 s, 6 a minute")
    arguments = parser.parse_args()
    return run_program("deb", lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> None:
    with watched("building the daemon's wheel") as show_step:
        made = [
            build(
                arguments.architecture,
                arguments.distribution,
                arguments.folder,
                package=package,
                version=arguments.version,
                level=arguments.level,
                show_step=show_step,
            )
            for package in (PACKAGES if arguments.package == "all" else (arguments.package,))
        ]
    for file in made:
        sys.stdout.write(f"{made_line(file)}\n")


if __name__ == "__main__":
    raise SystemExit(main())
